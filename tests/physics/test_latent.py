"""Multi-head latent attention, counted by hand: published parameters, FLOPs as torchtitan counts them, kernels, what is kept, and what tp sends.

Sources: arXiv 2405.04434 (DeepSeek-V2), arXiv 2412.19437 (DeepSeek-V3); pytorch/torchtitan, models/deepseek_v3 (get_nparams_and_flops);
NVIDIA/Megatron-LM, core/transformer/multi_latent_attention.py.
"""

from typing import Any

import pytest
from steps import memory, sent, step

from costmodel import PlanError, build_run, predict
from costmodel.catalog.models import model
from costmodel.program.build import build
from costmodel.program.inventory import inventory_of
from costmodel.program.ir import expand
from costmodel.program.layers import resolved_attention

A, H, NOPE, ROPE, DV, Q, KV, V, F, L, T = 8, 256, 32, 16, 32, 96, 64, 1024, 512, 2, 512
LATENT: dict[str, Any] = {"layers": L, "hidden": H, "heads": A, "ffn": F, "vocab": V, "mla": {
    "q_lora_rank": Q, "kv_lora_rank": KV, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": DV}}
MATRICES = H * Q + Q * A * (NOPE + ROPE) + H * (KV + ROPE) + KV * A * (NOPE + DV) + A * DV * H + 3 * H * F
MEGATRON = {"framework": "megatron", "zero": 1}
PURE = {"precision": "bf16-pure"}


@pytest.mark.parametrize(("name", "total", "within"), [
    ("deepseek-v2-lite", 15_706_484_224, 0), ("deepseek-v2", 235_741_434_880, 0),   # the checkpoints
    ("deepseek-v3", 671e9, 1e9), ("kimi-k2", 1.026e12, 1e9)])                        # arXiv 2412.19437; the checkpoint, whose fp8 scales are apart
def test_parameters_are_the_published_ones(name: str, total: float, within: float) -> None:
    assert model(name).params == pytest.approx(total, abs=within)


def test_what_a_rank_holds_is_what_the_model_counts() -> None:
    assert build_run(model=LATENT).model.params == 2 * V * H + H + L * (MATRICES + 2 * H + Q + KV)
    run = build_run(model=LATENT, cluster={"gpus": 4, "gpu": "h100"}, plan={**MEGATRON, "tp": 4, "sequence_parallel": True})
    cut = Q * A * (NOPE + ROPE) + KV * A * (NOPE + DV) + A * DV * H + 3 * H * F
    assert inventory_of(run).layer.numel == cut // 4 + H * Q + H * (KV + ROPE) + 2 * H + Q + KV


def test_model_flops_are_those_of_torchtitan() -> None:
    """6 a parameter of a matrix, and 6·L·a·(d_nope + d_rope + d_v)·s for attention, a token."""
    report = step(LATENT, gpu="h100", seq_len=T)
    assert report.model_flops == (6 * (L * MATRICES + V * H) + 6 * L * A * (NOPE + ROPE + DV) * T) * T


def test_the_kernels_products_are_as_wide_as_queries_or_values() -> None:
    """Half of s² pairs: forward one product of each kind, backward (scores again, queries, keys) three as wide as queries, two as wide as values."""
    run = build_run(model=LATENT, cluster={"gpu": "h100"}, recipe={"seq_len": T, **PURE})
    ops = [op for block in expand(build(run).roles[0].step) for op in block.ops if op.kind == "attention"]
    wide, narrow, pairs = NOPE + ROPE, DV, A * T * T / 2
    assert [op.flops for op in ops] == [2 * pairs * (wide + narrow)] * L + [2 * pairs * (3 * wide + 2 * narrow)] * L


@pytest.mark.parametrize(("gpu", "mla", "framework", "kernel"), [
    ("h100", {}, "pytorch", "cudnn"), ("a100", {}, "pytorch", "efficient"), ("cpu_epyc_2core", {}, "pytorch", "math"),
    ("h100", {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}, "pytorch", "cudnn"),
    ("h100", {"qk_nope_head_dim": 128, "qk_rope_head_dim": 32, "v_head_dim": 128}, "pytorch", "efficient")])
def test_pytorch_picks_a_kernel_that_has_two_head_sizes(gpu: str, mla: dict[str, int], framework: str, kernel: str) -> None:
    """sdp_utils.cpp, check_head_dim_size_flash, check_cudnn_tensor_shapes and check_cudnn_d256_bprop_head_dim of torch 2.13."""
    run = build_run(model={**LATENT, "mla": {**LATENT["mla"], **mla}}, cluster={"gpu": gpu}, plan={"framework": framework})
    assert resolved_attention(run) == kernel


def test_a_layer_keeps_latents_and_every_heads_keys() -> None:
    """PyTorch, 16 bits: the norms' inputs and outputs, queries, keys, W_kvb's whole output (values are a view of it), attention's output, the MLP's
    four; fp32 statistics of four norms and a log-sum-exp a head."""
    one, two = (memory(step({**LATENT, "layers": n, "vocab": 64}, gpu="h100", seq_len=T, **PURE)).activations_bytes for n in (4, 3))
    kept = H + H + Q + Q + (KV + ROPE) + KV + A * ((NOPE + ROPE) * 2 + NOPE + DV + DV) + H + H + 4 * F
    assert one - two == T * (2 * kept + 4 * (4 + A))


def test_tensor_parallelism_gathers_latents_not_hidden_states() -> None:
    """Megatron, a layer, elements a token. Forward gathers both latents, the rotary keys and the MLP's input; backward those again that weights need
    (Q + KV + H), and what its reduce-scatters forward give back."""
    def of(layers: int) -> dict[str, int]:
        report = step({**LATENT, "layers": layers}, gpus=2, gpu="h100", plan={**MEGATRON, "tp": 2, "sequence_parallel": True}, seq_len=T, clip_norm=0.0)
        return sent(report.roles[0], 2)

    three, two = of(3), of(2)
    assert three["all-gather"] - two["all-gather"] == T * ((Q + KV + ROPE + H) + (Q + KV + H) + 2 * H)
    assert three["reduce-scatter"] - two["reduce-scatter"] == T * (2 * H + Q + KV + ROPE + H)


def test_replicated_projections_sum_their_gradients_over_tp() -> None:
    """Their weights saw one rank's tokens: they join the norms' all-reduce, in fp32."""
    def of(layers: int) -> int:
        report = step({**LATENT, "layers": layers}, gpus=2, gpu="h100", plan={**MEGATRON, "tp": 2, "sequence_parallel": True}, seq_len=T)
        return next(c.message_bytes for c in report.roles[0].collectives or () if c.axis == "tp" and c.kind == "all-reduce" and c.message_bytes > 100_000)

    assert of(3) - of(2) == 4 * (H * Q + H * (KV + ROPE) + Q + KV + 2 * H)


@pytest.mark.parametrize(("plan", "recipe", "changed", "named"), [
    ({"strategy": "fsdp", "tp": 2}, {}, {}, "PyTorch's tensor parallelism"), ({**MEGATRON, "tp": 2}, {}, {}, "without sequence parallelism"),
    ({"strategy": "fsdp", "cp": 2}, {}, {}, "context parallelism"), ({"strategy": "muon-distributed"}, {}, {}, "nanochat"),
    ({"strategy": "fsdp"}, {"attention": "fa2"}, {}, "one head size"), ({"strategy": "fsdp"}, {}, {"norm": "layernorm"}, "another norm"),
    ({"strategy": "fsdp"}, {}, {"rotary_fraction": 0.5}, "rotary part")])
def test_what_latent_attention_does_not_go_with_is_refused_by_name(plan: Any, recipe: Any, changed: Any, named: str) -> None:
    with pytest.raises(PlanError, match=named):
        predict(build_run(model={**LATENT, **changed}, cluster={"gpus": 2, "gpu": "h100"}, plan=plan, recipe=recipe))


@pytest.mark.parametrize("field", [{"head_dim": 32}, {"kv_heads": 2}, {"qk_norm": "per_head"}, {"fused_qkv": True}])
def test_fields_of_ordinary_projections_are_refused(field: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="its own projections"):
        build_run(model={**LATENT, **field})
