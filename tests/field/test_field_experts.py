"""Mixtures of experts. Each test names its case (C40) and public source."""

from typing import Any

import pytest
from asked import GIB, activations, memory, predicted, run_of, time

from costmodel.prediction import predict

QWEN: dict[str, Any] = {"layers": 4, "hidden": 2048, "heads": 32, "kv_heads": 4, "head_dim": 128, "ffn": 6144, "vocab": 512, "qk_norm": "per_head",
                        "moe": {"experts": 128, "top_k": 8, "expert_ffn": 768}}
"""Four layers of Qwen3-30B-A3B."""
MEGATRON = {"framework": "megatron", "zero": 1}


def kept(tokens: int, model: dict[str, Any]) -> int:
    return activations(predicted(model=model, gpu="h100", gpus=8, plan=MEGATRON, seq_len=tokens, grad_accum=1))


def test_a_mixture_keeps_the_routed_copies_and_the_width_of_all_chosen_experts() -> None:
    """C40, NVIDIA/Megatron-LM#1784: with top 8 of 128 experts of width 768 the inner activations are those of a dense block of width 8 x 768 = 6144; the
    dispatched rows, top_k x h in place of h, come on top: 2 bytes each, beside indices and the router's scores in fp32."""
    dense = {k: v for k, v in QWEN.items() if k != "moe"}
    more = (kept(1024, QWEN) - kept(1024, dense)) / (4 * 1024)
    rows = 2 * 8 * 2048
    small = 128 * 4 + 8 * (4 + 3 * 8 + 4) + 4
    assert more == pytest.approx(rows + small, rel=0.03)


def test_the_busiest_rank_holds_and_computes_the_imbalance_times_the_even_share() -> None:
    """C82, NVIDIA-NeMo/Megatron-Bridge#947: dropless routing makes the hottest rank the limit. Routed rows, and the experts' share of the layer's
    activations with them, grow by the factor; the even share is what 1.0 holds beyond a mixture without tokens."""
    def held(imbalance: float) -> tuple[int, float]:
        report = predicted(model=QWEN, gpu="h100", gpus=8, plan={**MEGATRON, "ep": 8}, seq_len=4096, grad_accum=1, moe_imbalance=imbalance)
        flops = time(report).flops
        assert flops is not None
        return activations(report), flops["matmul"]

    even = held(1.0)
    for imbalance in (1.5, 2.0):
        more = held(imbalance)
        assert more[0] - even[0] == pytest.approx((imbalance - 1) * 4 * 4096 * 8 * (2 * (2048 + 3 * 768) + 4 + 8), rel=1e-3)
        assert more[1] - even[1] == pytest.approx((imbalance - 1) * 4 * 4096 * 8 * 6 * 3 * 768 * 2048, rel=1e-3)


def test_expert_parallelism_carries_the_buffers_of_an_all_to_all() -> None:
    """C22, NVIDIA/nccl#1685: the first all-to-all of 8 H100 grew the memory outside PyTorch from 1.06 to 4.34 GB."""
    def outside(ep: int) -> int:
        return sum(memory(predicted(model=QWEN, gpu="h100", gpus=8, plan={"zero": 3, "ep": ep}, seq_len=1024)).outside.values())

    assert 2 * GIB < outside(8) - outside(1) < 4 * GIB


def test_mfu_counts_active_parameters_and_the_heads_own_width() -> None:
    """C64, PrimeIntellect-ai/prime-rl#778: of Qwen3-30B-A3B 6 FLOPs a token for 3.3e9 active parameters, less the embedding, and attention over 32 heads
    of 128, which is twice the hidden width."""
    run = run_of(model="qwen3-30b-a3b", gpus=64, gpu="h100", plan={"zero": 3, "ep": 8}, seq_len=4096)
    report = predict(run, scaling=False)
    active = 48 * (2048 * (2 * 32 + 2 * 4) * 128 + 128 * 2048 + 8 * 3 * 2048 * 768) + 151_936 * 2048
    per_token = 6 * active + 12 * 48 * 4096 * 32 * 128
    assert report.model_flops == pytest.approx(per_token * report.tokens_per_step, rel=1e-9)


def test_a_mixtures_first_step_lacks_the_optimizers_state() -> None:
    """C07, pytorch/torchtitan#1789: DeepSeek-V3 16B (DeepSeek-V2-Lite's shape) under FSDP and ep over 8 GPUs, per-operation checkpointing: 58.28 GiB at step 1,
    73.32 at step 10; in between 14.0 to 15.5 GiB, Adam's 8 bytes a parameter over 8."""
    report = predicted(model="deepseek-v2-lite", gpus=8, plan={"strategy": "fsdp", "ep": 8, "checkpointing": "selective:op"}, seq_len=4096, micro_batch=4)
    phases = memory(report).phases
    more = phases["steady step"].total_bytes - phases["first step"].total_bytes
    assert 14.0 <= more / GIB <= 15.5
    assert more == pytest.approx(8 * 15_706_484_224 / 8, rel=0.01)
