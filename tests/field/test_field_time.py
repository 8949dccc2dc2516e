"""Step time, utilisation, networks. Each test names its case (C50) and public source."""

from typing import Any

import pytest
from asked import GB, network, predicted, run_of, seconds, time
from typer.testing import CliRunner

from costmodel.cli.app import app

# -- networks ----------------------------------------------------------------------------------------------------------------


def test_accumulating_under_fsdp_gathers_again() -> None:
    """C50, marin-community/marin#6304: a run bound by its gathers at 1.5 times the tokens in two micro-steps has 0.75 to 0.80 of the throughput. (There
    a mixture of experts; the law is the gathers'.)"""
    once, twice = (predicted(model="llama-3-8b", gpus=64, gpu="h100", plan={"strategy": "fsdp"}, cluster=network(64, 8, 64, 450 * GB, "infiniband"),
                             seq_len=2048, micro_batch=m, grad_accum=n) for m, n in ((4, 1), (3, 2)))
    assert once.bound_by.startswith("communication over dp_shard")
    assert once.tokens_per_s and twice.tokens_per_s
    assert 0.75 <= twice.tokens_per_s / once.tokens_per_s <= 0.80


def test_fsdp_hides_its_gathers_but_the_first() -> None:
    """C52, pytorch/pytorch#83917 and #108234: within a node, of Llama-3-8B's gathers and scatters only those with nothing before them are waited for."""
    found = time(predicted(model="llama-3-8b", gpus=8, gpu="h100", plan={"strategy": "fsdp"}, seq_len=8192))
    assert 0 < found.exposed_s["dp_shard"] < 0.3 * found.communication_s["dp_shard"]


@pytest.mark.parametrize(("gbit", "low", "high"), [(10, 4.5, 7.0), (25, 1.8, 2.8)])
def test_zero_3_over_a_slow_network_waits_seconds(gbit: float, low: float, high: float) -> None:
    """C67, deepspeedai/DeepSpeed#5770: a 1.5B model on 2 + 2 A10 takes 6.2 s more than on 2, what 3 x 2P x 3/4 bytes need at 10 Gb/s."""
    given: dict[str, Any] = {"model": "qwen2.5-1.5b", "gpu": "a10", "plan": {"framework": "deepspeed", "zero": 3}, "seq_len": 1024}
    one, two = predicted(**given, gpus=2), predicted(**given, gpus=4, cluster=network(4, 2, gbit, 25 * GB))
    assert low <= seconds(two) - seconds(one) <= high


def test_two_nodes_can_be_slower_than_one() -> None:
    """C68, pytorch/pytorch#36298, NVIDIA/nccl#318: GPT-2 in fp32 on p3.16xlarge, 25 Gb/s between nodes: 2 x 15/16 x 0.5 GB take 0.28 to 0.45 s a step,
    and with less than 0.25 s of compute two nodes do less than one."""
    given: dict[str, Any] = {"model": "gpt2", "gpu": "v100_sxm2_16gb", "plan": {"strategy": "ddp"}, "seq_len": 1024, "precision": "fp32"}
    one, two = predicted(**given, gpus=8), predicted(**given, gpus=16, cluster=network(16, 8, 25, 150 * GB))
    assert 0.28 <= time(two).communication_s["dp_replicate"] <= 0.45
    assert seconds(one) < 0.25
    assert one.tokens_per_s and two.tokens_per_s
    assert two.tokens_per_s < one.tokens_per_s


def test_a_network_decides_what_a_second_node_costs() -> None:
    """C70, mosaicml/llm-foundry#336: MPT-1B under FSDP on two nodes at 1, 10 and 200 Gb/s: more than 5 times, 1.5 to 4 times, less than 1.2 times as
    slow. The batch is not stated: 32 sequences of 2048 a GPU, fully checkpointed."""
    given: dict[str, Any] = {"model": "mpt-1b", "gpu": "a100_sxm_80gb", "plan": {"strategy": "fsdp", "checkpointing": "full"}, "seq_len": 2048,
                             "micro_batch": 32}
    one = seconds(predicted(**given, gpus=8))
    slow, medium, fast = (seconds(predicted(**given, gpus=16, cluster=network(16, 8, gbit, kind=kind))) / one
                          for gbit, kind in ((1, "ethernet"), (10, "ethernet"), (200, "infiniband")))
    assert slow > 5
    assert 1.5 <= medium <= 4
    assert fast < 1.2


def zero_3_of_80b(micro_batch: int) -> Any:
    return predicted(params="80B", gpus=512, plan={"framework": "deepspeed", "zero": 3, "checkpointing": "full"},
                     cluster=network(512, 8, 340, kind="efa"), seq_len=1024, micro_batch=micro_batch)


def test_deepspeeds_zero_3_sends_three_times_two_bytes_a_parameter() -> None:
    """C71, deepspeedai/DeepSpeed#2928, 80B over 64 nodes of 8: 3 x 2P bytes, which at 340 Gb/s a node take 11.3 s a micro-batch at full rate."""
    report, params = zero_3_of_80b(2), run_of(params="80B").model.params
    sent = sum(c.count * c.message_bytes for c in report.roles[0].collectives or ())
    assert sent / params == pytest.approx(3 * 2, rel=0.02)
    assert 1 <= time(report).communication_s["dp_shard"] / (6 * params / (340e9 / 8)) < 1.5


def test_three_axes_beat_zero_3_on_slow_networks() -> None:
    """C71: BLOOM-176B as tp 4, pp 12 at 140 Gb/s did more FLOP/s a GPU than 80B under ZeRO-3 at 340; micro-batches of 2."""
    stages = (5, *([6] * 10), 5)
    plan = {"framework": "megatron", "zero": 1, "tp": 4, "pp": 12, "checkpointing": "full", "stage_layers": stages}
    bloom = predicted(model="bloom-176b", gpus=384, plan=plan, cluster=network(384, 8, 140, kind="infiniband"), seq_len=2048, micro_batch=2,
                      global_batch=2048)
    zero_3 = zero_3_of_80b(2)
    assert bloom.hfu and zero_3.hfu
    assert bloom.hfu > zero_3.hfu


# -- utilisation -------------------------------------------------------------------------------------------------------------


def test_the_flops_and_tokens_of_a_gpt_2_step() -> None:
    """C61, karpathy/nanoGPT#110: 12 x 1024 tokens, accumulated 5 times on each of 8 GPUs, are 491,520 a step, at 8.55e8 FLOPs each; its 562 ms are
    93.5 TFLOP/s a GPU, 30% of an A100."""
    report = predicted(model={"base": "gpt2", "vocab": 50304}, gpus=8, gpu="a100_sxm_40gb", plan={"strategy": "ddp"}, seq_len=1024, micro_batch=12,
                       grad_accum=5, compile=True, attention="fa1")
    assert report.tokens_per_step == 491_520
    assert report.model_flops and report.peak_flops_per_s
    assert report.model_flops / report.tokens_per_step == pytest.approx(8.55e8, rel=0.002)
    assert report.model_flops / 0.562 / 8 / 1e12 == pytest.approx(93.5, abs=0.2)
    assert report.model_flops / 0.562 / 8 / report.peak_flops_per_s == pytest.approx(0.30, abs=0.005)


def test_utilisation_is_over_the_devices_own_peak() -> None:
    """C62, karpathy/nanoGPT#464, #466 and #182: 33.79 s for 2 x 64 x 4 x 512 tokens on two TITAN Xp, called 0.96% of an A100, are 25% of their fp32 peak; 104%
    on an H100 is 33% of its own."""
    titan = predicted(model={"base": "gpt2", "vocab": 44902}, gpus=2, gpu="titan_xp", plan={"strategy": "ddp"}, seq_len=512, micro_batch=4, grad_accum=64,
                      precision="fp32")
    assert titan.model_flops and titan.peak_flops_per_s
    achieved = titan.model_flops / 33.79 / 2
    assert achieved / 312e12 == pytest.approx(0.0096, abs=0.0001)
    assert 0.24 <= achieved / titan.peak_flops_per_s <= 0.26
    h100 = predicted(model="gpt2", gpu="h100", seq_len=1024).peak_flops_per_s
    assert h100
    assert 0.32 <= 1.04 * 312e12 / h100 <= 0.34


def test_more_than_the_peak_is_refused() -> None:
    """C62: a logger that divides by another GPU's peak says 104%; a step so measured is not accepted."""
    line = ["waterfall", "--model", "gpt2", "--gpu", "h100", "--seq-len", "1024", "--micro-batch", "12", "--measured", "10ms"]
    answer = CliRunner().invoke(app, line)
    assert answer.exit_code == 2
    assert "% of the peak of h100_sxm, and no step is above 100%" in answer.stderr
    assert CliRunner().invoke(app, [*line[:-1], "32ms"]).exit_code == 0


def test_head_size_comes_from_the_model_not_from_its_width() -> None:
    """C64, PrimeIntellect-ai/prime-rl#778: Qwen3 has heads of 128, not hidden / heads. 0.6B: 28 layers, hidden 1024, 16 heads, 8 for keys, ffn 3072."""
    report = predicted(model="qwen3-0.6b", gpu="h100", seq_len=4096)
    width = 16 * 128
    layer = 2 * 1024 * width + 2 * 1024 * width // 2 + 3 * 1024 * 3072
    per_token = 6 * (28 * layer + 151936 * 1024) + 12 * 28 * width * 4096
    assert report.model_flops == pytest.approx(per_token * 4096, rel=1e-6)


def test_the_attention_of_qwen3_30b_is_wider_than_its_hidden_size() -> None:
    """C64: 32 heads of 128 are 4096 for a hidden size of 2048. (Its FLOPs need the experts.)"""
    model = run_of(model="qwen3-30b-a3b").model
    assert (model.hidden, model.heads * model.head_dim) == (2048, 4096)
