"""Random legal runs: every strategy and dialect, small models of many kinds, one to 4,096 GPUs."""

import os
from typing import Any

from hypothesis import reject, settings
from hypothesis import strategies as st

from costmodel import PlanError, Run, build_run
from costmodel.program.build import build

DIALECTS = [("pytorch", 0), ("pytorch", 1), ("pytorch", 2), ("pytorch", 3), ("deepspeed", 0), ("deepspeed", 1), ("deepspeed", 2),
            ("deepspeed", 3), ("megatron", 0), ("megatron", 1), ("megatron", 3), ("nanochat", 1)]
GPUS = st.one_of(st.integers(1, 8), st.sampled_from([16, 24, 48, 64, 128, 1000, 4096]))
FLAGS = ("gated", "tied_embeddings", "norm_bias", "qkv_bias", "attention_out_bias", "mlp_bias", "head_bias", "fused_qkv", "embedding_norm",
         "final_norm", "parallel_residual")

TIMES = int(os.environ.get("COSTMODEL_LAW_EXAMPLES", "1"))


def examples(n: int) -> settings:
    """How many runs a law is tried on; COSTMODEL_LAW_EXAMPLES=20 tries twenty times as many."""
    return settings(max_examples=n * TIMES)


@st.composite
def models(draw: st.DrawFn) -> dict[str, Any]:
    """A small dense Transformer: GPT-like, Llama-like and everything between."""
    heads = draw(st.sampled_from([1, 2, 3, 4, 8]))
    head_dim = draw(st.sampled_from([8, 16, 64]))
    fields: dict[str, Any] = {flag: draw(st.booleans()) for flag in FLAGS}
    norm = draw(st.sampled_from(["layernorm", "rmsnorm", "rmsnorm_no_weight"]))
    positions = draw(st.sampled_from(["rope", "learned", "none"]))
    one_or_four = {"norms_per_layer": 1} if fields["parallel_residual"] else {"norms_per_layer": 4, "norm_placement": "sandwich"}
    fields |= {
        "layers": draw(st.integers(1, 9)), "heads": heads, "kv_heads": draw(st.sampled_from([k for k in (1, 2, 4, 8, heads) if heads % k == 0])),
        "head_dim": head_dim, "hidden": draw(st.sampled_from([heads * head_dim, 48])), "ffn": draw(st.integers(1, 200)),
        "vocab": draw(st.integers(2, 2000)), "norm": norm, "norm_bias": fields["norm_bias"] and norm == "layernorm", "positions": positions,
        "position_rows": 64 if positions == "learned" else 0, "activation": draw(st.sampled_from(["gelu", "silu", "relu", "relu_squared"])),
        **draw(st.sampled_from([{}, {"norm_placement": "post"}, one_or_four])),
        "qk_norm": draw(st.sampled_from(["none", "none", "per_head", "full"]))}
    return fields


@st.composite
def mixtures(draw: st.DrawFn) -> dict[str, Any]:
    """The experts of a small mixture of experts."""
    experts = draw(st.sampled_from([1, 4, 6, 8]))
    return {"experts": experts, "top_k": draw(st.integers(1, min(3, experts))), "expert_ffn": draw(st.integers(1, 90)),
            **draw(st.sampled_from([{}, {"shared_experts": 1, "shared_ffn": 30}])), "router_bias": draw(st.booleans())}


@st.composite
def plans(draw: st.DrawFn, gpus: int) -> dict[str, Any]:
    """A plan of any dialect over so many GPUs; FSDP and Megatron may replicate, DDP may accumulate without reducing."""
    framework, zero = draw(st.sampled_from(DIALECTS))
    plan: dict[str, Any] = {"framework": framework, "zero": zero}
    if framework == "pytorch" and zero == 3 or framework == "megatron" and zero:
        plan["dp_shard"] = draw(st.sampled_from([n for n in (1, 2, 8, gpus) if gpus % n == 0]))
    for flag in ("gradient_as_bucket_view", "sync_each_micro_batch", "reshard_after_forward", "backward_prefetch", "overlap_grad_reduce",
                 "overlap_param_gather"):
        plan[flag] = draw(st.booleans())
    if draw(st.booleans()):
        plan |= {"bucket_bytes": draw(st.integers(1, 200_000)), "first_bucket_bytes": draw(st.integers(1, 20_000)),
                 "prefetch_bucket_params": draw(st.sampled_from([0, 50_000_000])), "max_live_params": draw(st.sampled_from([0, 20_000, 10**9])),
                 "allgather_bucket_params": draw(st.integers(500, 10**8))}
    if framework == "megatron" and zero == 3:
        plan |= {"reshard_after_forward": True, "sync_each_micro_batch": True, "double_buffer": draw(st.booleans()),
                 "communication_unit_params": draw(st.sampled_from([None, 1, 2_000, 20_000, 200_000]))}
    plan["checkpointing"] = draw(st.sampled_from(["none", "none", "full", "full:2", "full:3", "full:4", "every:2", "every:3", "selective", "selective:op"]))
    return plan


@st.composite
def recipes(draw: st.DrawFn, gpu: str) -> dict[str, Any]:
    """Batch, precision, optimizer and kernels that the GPU can run."""
    words = {"v100": ["fp32", "fp16-mixed"], "cpu_xeon_2core": ["fp32", "bf16-mixed"]}.get(gpu, ["fp32", "tf32", "bf16-mixed", "bf16-pure", "fp16-mixed"])
    words += ["fp8"] if gpu == "h100" else []
    name = draw(st.sampled_from(["sgd", "momentum", "adam", "adamw", "adamw", "adam8bit", "muon"]))
    kind = draw(st.sampled_from(["foreach", "for-loop"] if name in ("sgd", "momentum") else ["foreach", "fused", "for-loop"]))
    compiled = draw(st.booleans())
    return {
        "seq_len": draw(st.integers(8, 64)), "micro_batch": draw(st.integers(1, 3)), "grad_accum": draw(st.integers(1, 6)),
        "precision": draw(st.sampled_from(words)), "optimizer": {"name": name, "implementation": kind, "weight_decay": draw(st.sampled_from([0.0, 0.1]))},
        "attention": draw(st.sampled_from(["eager", "sdpa"])), "loss": draw(st.sampled_from(["eager", "bf16", "chunked", "fused"])),
        "loss_chunks": draw(st.integers(1, 8)), "fused_norm": draw(st.booleans()), "causal": draw(st.booleans()),
        "dropout": draw(st.sampled_from([0.0, 0.1])), "compile": compiled, "cuda_graphs": compiled and draw(st.booleans()),
        "grad_accum_fusion": draw(st.booleans()), "clip_norm": draw(st.sampled_from([0.0, 1.0]))}


@st.composite
def inputs(draw: st.DrawFn, gpus: st.SearchStrategy[int] = GPUS) -> dict[str, Any]:
    """The input of a legal run, as `build_run` takes it."""
    count = draw(gpus)
    gpu = draw(st.sampled_from(["h100", "a100", "v100", "cpu_xeon_2core"] if count == 1 else ["h100", "a100", "v100"]))
    model, plan, recipe = draw(models()), draw(plans(count)), draw(recipes(gpu))
    if draw(st.sampled_from([False, False, True])):
        model["moe"] = draw(mixtures())
        degrees = [n for n in (1, 2, 4) if count % n == 0 and model["moe"]["experts"] % n == 0]
        plan["ep"], recipe["moe_imbalance"] = draw(st.sampled_from(degrees)), draw(st.sampled_from([1.0, 1.5]))
        if plan["framework"] == "megatron":
            plan |= {"ep_dispatcher": draw(st.sampled_from(["alltoall", "allgather", "flex"])), "ep_overlap": draw(st.booleans())}
        recipe["moe_capacity_factor"] = draw(st.sampled_from([None, None, 1.25]))
    in_place = plan["framework"] == "pytorch" and plan["zero"] < 2 and not plan["gradient_as_bucket_view"]  # test_known.py
    recipe["zero_set_to_none"] = not in_place or draw(st.booleans())
    if plan["framework"] == "nanochat":
        model["vocab"] = -(-model["vocab"] // count) * count
        recipe["optimizer"]["name"] = draw(st.sampled_from(["muon", "adamw"]))
    elif recipe["optimizer"]["name"] == "muon" and (plan["framework"], plan["zero"]) != ("pytorch", 0):
        recipe["optimizer"]["name"] = "adam"
    return {"model": model, "cluster": {"gpus": count, "gpu": gpu}, "plan": plan, "recipe": recipe}


def built(given: dict[str, Any]) -> Run:
    """The run of an input; one that is refused, for whatever it combines, is not an example."""
    try:
        run = build_run(**given)
        build(run)
    except PlanError:
        reject()
    return run


def runs(gpus: st.SearchStrategy[int] = GPUS) -> st.SearchStrategy[Run]:
    """Runs that can be predicted."""
    return inputs(gpus).map(built)
