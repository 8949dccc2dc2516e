"""Pipelines and what their ranks hold. Each test names its case (C31) and public source.

C37 (deepspeedai/DeepSpeed#4477, #2800) is in tests/physics/test_tensor_and_pipeline.py.
"""

import json
from typing import Any

import pytest
from asked import GB, GPT, kept, memory, predicted, seconds, states
from typer.testing import CliRunner

from costmodel import StepReport
from costmodel.cli.app import app

GPT_3 = {**GPT, "layers": 8, "hidden": 12288, "heads": 96, "ffn": 49152, "vocab": 50304}


def gpt_3(pp: int, tied: bool) -> StepReport:
    return predicted(model={**GPT_3, "tied_embeddings": tied}, gpus=8 * pp, gpu="h100", plan={"framework": "megatron", "tp": 8, "pp": pp}, seq_len=2048)


def test_a_tied_embedding_is_counted_once_kept_twice_and_summed() -> None:
    """C31, bigscience-workshop/Megatron-DeepSpeed#99, NVIDIA/Megatron-LM#299: with pp > 1 the first and the last stage hold V x h / tp each, and add one
    all-reduce of its fp32 gradient."""
    table = 50304 * 12288 // 8
    one, eight = gpt_3(1, True), gpt_3(8, True)
    held = [states(eight, i)["parameters"] for i in range(8)]
    assert sum(held) - states(one)["parameters"] == 2 * table
    assert held[0] - held[1] == 2 * table
    assert 2 * table <= held[7] - held[6] < 2 * table * 1.01
    sums = [c for c in eight.roles[0].collectives or () if c.axis == "embedding"]
    assert [(c.kind, c.group, c.message_bytes) for c in sums] == [("all-reduce", 2, 4 * table)]
    untied = [states(gpt_3(8, False), i)["parameters"] for i in range(8)]
    assert untied == held and sum(untied) == states(gpt_3(1, False))["parameters"]


def test_first_and_last_stages_are_the_fullest() -> None:
    """C38, deepspeedai/DeepSpeed#1378, a layer a stage, checkpointed: the embedding and the head make the first (6824 MB) and the last
    (7126) 46% heavier than the middle, and the last, with logits, peaks highest."""
    report = predicted(model={**GPT, "layers": 8, "hidden": 4096, "heads": 32, "ffn": 16384, "vocab": 50304}, gpus=8,
                       plan={"framework": "megatron", "pp": 8, "checkpointing": "full"}, seq_len=2048, grad_accum=8)
    static, peaks = ([figure(i) for i in range(8)] for figure in (lambda i: kept(report, i), lambda i: memory(report, i).allocated.total_bytes))
    for found in (static, peaks):
        assert min(found[0], found[-1]) > max(found[1:-1])
        assert found[-1] >= found[0]


def test_interleaving_is_faster_and_keeps_more() -> None:
    """C41, NVIDIA/Megatron-LM#169, sail-sg/zero-bubble-pipeline-parallelism#21: a 6.2B model over 8 H800. 1F1B 55 samples/s and 48 GB, interleaved
    66 and 57 GB."""
    shape: dict[str, Any] = {**GPT, "layers": 32, "hidden": 4096, "heads": 32, "ffn": 16384, "vocab": 50304, "positions": "learned", "position_rows": 1024}
    plain, interleaved = (predicted(model=shape, gpus=8, gpu="h800", plan={"framework": "megatron", "pp": 8, "schedule": word, "virtual_stages": v},
                                    seq_len=1024, micro_batch=6, grad_accum=24) for word, v in (("1f1b", 1), ("interleaved", 4)))
    assert seconds(interleaved) < seconds(plain)
    assert memory(interleaved).allocated.total_bytes > memory(plain).allocated.total_bytes


@pytest.mark.parametrize(("plan", "gb"), [({"pp": 8}, 13.2), ({"pp": 2}, 33.0)])
def test_states_of_a_70b_model_on_128_gpus(plan: dict[str, Any], gb: float) -> None:
    """C65, NVIDIA/Megatron-LM#1031, TP 8: 6P/64 + 12P/128 bytes a rank with PP 8 and DP 2, 6P/16 + 12P/128 with PP 2 and DP 8; the mean of the ranks."""
    report = predicted(model="llama-3-70b", gpus=128, gpu="h100", plan={"framework": "megatron", "zero": 1, "tp": 8, "sequence_parallel": True, **plan},
                       seq_len=4096, grad_accum=8)
    assert sum(kept(report, i) for i in range(len(report.roles))) / len(report.roles) / GB == pytest.approx(gb, rel=0.02)


def test_full_recompute_costs_a_quarter_of_the_flops() -> None:
    """C65: the four passes instead of three that leave 3/4 of the model's FLOP/s, but for the head, which is not run again."""
    plain, again = (predicted(model="llama-2-70b", gpus=128, gpu="h100", plan={"framework": "megatron", "zero": 1, "tp": 8, "sequence_parallel": True, "pp": 8,
                                                                               "checkpointing": word}, seq_len=4096, grad_accum=64)
                    for word in ("none", "full"))
    assert 0.74 <= seconds(plain) / seconds(again) <= 0.80


@pytest.mark.parametrize("global_batch", [512, 1024, 1536])
def test_70b_on_128_gpus_with_full_recompute(global_batch: int) -> None:
    """C65: 296.5 TFLOP/s a GPU. The global batch is not stated; from 512 on the bubble, 7/256 at most, hardly matters."""
    plan = {"framework": "megatron", "zero": 1, "tp": 8, "pp": 8, "sequence_parallel": True, "checkpointing": "full"}
    report = predicted(model="llama-2-70b", gpus=128, gpu="h100", plan=plan, seq_len=4096, global_batch=global_batch, micro_batch=1, attention="fa2",
                       compile=True, grad_accum_fusion=True)
    assert report.mfu and report.peak_flops_per_s
    assert report.mfu * report.peak_flops_per_s / 1e12 == pytest.approx(296.5, rel=0.05)


def test_zero_1_halves_what_a_rank_of_the_181b_model_holds() -> None:
    """C73, bigscience-workshop/bigscience#48, tp 8, pp 12, dp 4 on A100: 37 GB instead of 72. Master weights and moments are 12 bytes of 1.885e9 parameters
    a rank, of which stage 1 leaves a quarter: at least 17 GB."""
    off, on = (predicted(params="181B", gpus=384, plan={"framework": "megatron", "zero": zero, "tp": 8, "pp": 12, "checkpointing": "full"}, seq_len=2048,
                         micro_batch=2, global_batch=2048) for zero in (0, 1))
    assert kept(off) - kept(on) >= 17 * GB


def test_the_bubble_of_bloom_181b() -> None:
    """C73: micro-batches m = GBS / (MBS x DP) = 2048 / (2 x 4) = 256, so (p-1)/m = 11/256 = 4.3%; at a global batch of 384 on 16 replicas m = 12, 92%."""
    for micro_batches, bubble in ((2048 // (2 * 4), 0.043), (384 // (2 * 16), 11 / 12)):
        answer = CliRunner().invoke(app, ["schedule", "--pp", "12", "--micro-batches", str(micro_batches), "--json"])
        assert json.loads(answer.stdout)["bubble"]["over_ideal"] == pytest.approx(bubble, abs=0.0005)
