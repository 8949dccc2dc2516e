"""Multi-head latent attention (MLA): queries, and keys with values, go through narrow latents (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    q = W_qb norm(W_qa x), or W_q x where queries have no latent; per head d_nope + d_rope wide, of which the last d_rope are rotated
    (latent, k_rope) = W_kva x;  (k_nope, v) = W_kvb norm(latent);  k = (k_nope, rotated k_rope, the same for every head)

Training multiplies the latents out: keys are d_nope + d_rope wide and values d_v, of every head (absorbing W_kvb into W_q and W_o is for decoding).
Written as torchtitan's deepseek_v3 (models/deepseek_v3, Attention): v is a view of W_kvb's output and keeps all of it for backward. Megatron
(core/transformer/multi_latent_attention.py) copies v; under tensor parallelism its projections to latents are whole on every rank and see that rank's tokens
(sequence parallelism), their outputs are gathered, narrow as they are, and W_qb, W_kvb are cut by heads.

Kernels: heads of d_nope + d_rope and d_v are for cuDNN's attention (192 and 128, Hopper on), FlashAttention-3 and the memory-efficient kernel; FlashAttention-2
has one head size. Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, 2.13 (check_head_dim_size_flash, check_cudnn_tensor_shapes).
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from costmodel.program.tape import Back, Value
from costmodel.spec import PlanError, Run
from costmodel.spec.run import BEFORE_AMPERE

if TYPE_CHECKING:
    from costmodel.program.layers import Walk

CUDNN = (192, 128)
"""Head sizes of queries and values that cuDNN takes on Hopper's and Blackwell's data-centre GPUs, beside those up to 128 on others too."""
PREFER = ("hopper", "blackwell", "blackwell_ultra")
"""Where scaled_dot_product_attention asks cuDNN first (check_prefer_cudnn_attention: compute capabilities 9 and 10)."""


def kernel(run: Run) -> str:
    """The kernel behind the word sdpa."""
    mla, acc = run.model.mla, run.cluster.accelerator
    assert mla is not None
    if acc.kernel_table == "cpu":
        return "math"
    low = run.recipe.precision.compute in ("bf16", "fp16", "fp8")
    asked = _data_centre(run) or run.plan.framework == "megatron"
    return "cudnn" if low and asked and _cudnn(run) else "efficient"


def _data_centre(run: Run) -> bool:
    acc = run.cluster.accelerator
    return acc.architecture in PREFER and not acc.name.startswith("rtx")


def _cudnn(run: Run) -> bool:
    """Whether cuDNN's attention takes these heads on this device."""
    m, architecture = run.model, run.cluster.accelerator.architecture
    assert m.mla is not None
    if max(m.head_dim, m.mla.v_head_dim) <= 128:
        return run.cluster.accelerator.kind == "cuda" and architecture not in BEFORE_AMPERE
    return (m.head_dim, m.mla.v_head_dim) == CUDNN and _data_centre(run)


def refusals(run: Run) -> Iterator[PlanError]:
    """What latent attention does not go with, or not yet."""
    m, p, r = run.model, run.plan, run.recipe
    if m.mla is None:
        return
    heads = f"heads of {m.head_dim} for queries and {m.mla.v_head_dim} for values"
    if r.attention in ("fa1", "fa2"):
        yield PlanError("recipe.attention", r.attention, f"FlashAttention-2 has one head size, and latent attention {heads}.", "Use attention = sdpa or eager.")
    if r.attention == "cudnn" and not _cudnn(run):
        yield PlanError("recipe.attention", r.attention, f"cuDNN does not take {heads} on {run.cluster.accelerator.name}.", "Use attention = sdpa or eager.")
    for on, field, value, what, fix in (
            (m.norm != "rmsnorm", "model.norm", m.norm, "latents under another norm", "Use norm = rmsnorm."),
            (m.positions != "rope" or m.rotary_fraction != 1, "model.positions", m.positions, "latent attention without its rotary part",
             "Use positions = rope."),
            (p.framework == "nanochat", "plan.framework", p.framework, "latent attention in nanochat's dialect", "Use framework = pytorch or megatron."),
            (p.cp > 1, "plan.cp", p.cp, "latent attention under context parallelism", "Use cp = 1."),
            (p.tp > 1 and p.framework != "megatron", "plan.tp", p.tp, "latent attention under PyTorch's tensor parallelism",
             "Use tp = 1, or framework = megatron."),
            (p.tp > 1 and not p.sequence_parallel, "plan.sequence_parallel", False, "latent attention under tensor parallelism without sequence parallelism",
             "Use sequence_parallel = true.")):
        if on:
            yield PlanError(field, value, f"{what}: not predicted yet.", fix)


def queries_keys_values(w: "Walk", x: Value) -> tuple[Value, Value, Value]:
    """From the normed input (this rank's rows) to what attention takes of every token, for this rank's heads."""
    m = w.run.model
    mla = m.mla
    assert mla is not None
    rope, nope, dv = mla.qk_rope_head_dim, mla.qk_nope_head_dim, mla.v_head_dim
    if mla.q_lora_rank:
        q = _up(w, w.linear(x, "attention.q_a", mla.q_lora_rank, m.hidden, False), "attention.q", m.head_dim, mla.q_lora_rank)
    else:
        q = w.linear(w.tp.enter(w, x, "attention"), "attention.q", w.heads * m.head_dim, m.hidden, False)
    q_nope, q_rope = _views(w, q, ("attention.q_nope", w.heads * nope), ("attention.q_rope", w.heads * rope), keeps=0)
    q = _joined(w, "attention.query", q_nope, w.rope(q_rope, "attention.q", 1.0))
    latents = w.linear(x, "attention.kv_a", mla.kv_lora_rank + rope, m.hidden, False)
    latent, k_rope = _views(w, latents, ("attention.latent", mla.kv_lora_rank), ("attention.k_rope", rope), keeps=0)
    if w.tp.t > 1:
        k_rope = w.tp.enter(w, k_rope, "attention.k_rope")
    k_rope = w.rope(k_rope, "attention.k", 1.0)
    kv = _up(w, latent, "attention.kv", nope + dv, mla.kv_lora_rank)
    k_nope, v = _views(w, kv, ("attention.k_nope", w.heads * nope), ("attention.v", w.heads * dv), keeps=1)
    k = _joined(w, "attention.key", k_nope, k_rope)
    if w.tp.megatron or w.n.attention in ("eager", "math") and w.batch > 1:
        v = _copied(w, v)
    return q, k, v


def _up(w: "Walk", latent: Value, name: str, head: int, rank: int) -> Value:
    """A latent's norm, and the product that makes every head of it. CUDA's autocast runs norms in fp32."""
    n = w.n
    if n.autocast and n.table == "cuda" and not n.compiled:
        latent = w.cast(latent, "fp32")
    normed = w.norm(latent, f"{name}_a_norm", rank)
    return w.linear(w.tp.enter(w, normed, name) if w.tp.t > 1 else normed, f"{name}_b", w.heads * head, rank, False)


def _views(w: "Walk", x: Value, *parts: tuple[str, int], keeps: int) -> tuple[Value, ...]:
    """Parts of every token's row (their widths); that numbered `keeps` holds the whole, for it is needed longest. Backward puts them together again."""
    tokens = x.numel // sum(width for _, width in parts)
    views = tuple(w.tape.value(name, tokens * width, x.dtype) for name, width in parts)
    for at, view in enumerate(views):
        view.own_bytes = x.own_bytes if at == keeps else 0
    x.own_bytes = 0
    w.tape.record(f"{x.name}.split", "memory", (x,), views, kernels=0, dtype=x.dtype, backs=(Back("cat", "memory", 0, nbytes=2.0 * x.nbytes, dtype=x.dtype),))
    if x.made_by in w.cached:  # a kept result stays with its views
        w.cached.append(len(w.tape.nodes) - 1)
    return views


def _joined(w: "Walk", name: str, nope: Value, rope: Value) -> Value:
    """Every head's two parts beside one another; the rotated one may be the same for all heads, whose gradients are then summed."""
    heads = w.heads if name == "attention.key" else 1
    y = w.tape.value(name, nope.numel + heads * rope.numel, nope.dtype)
    back = Back("sum", "memory", 1, nbytes=float((heads + 1) * rope.nbytes), dtype=rope.dtype) if heads > 1 else Back("grad_rope", "memory", 1, alias=True)
    w.tape.record(f"{name}.cat", "memory", (nope, rope), (y,), nbytes=2.0 * y.nbytes, dtype=y.dtype, backs=(Back("grad_nope", "memory", 0, alias=True), back))
    return y


def _copied(w: "Walk", x: Value) -> Value:
    y = w.tape.value(f"{x.name}.copied", x.numel, x.dtype)
    w.tape.record(y.name, "memory", (x,), (y,), nbytes=2.0 * x.nbytes, dtype=x.dtype, backs=(Back("grad", "memory", 0, alias=True),))
    return y
