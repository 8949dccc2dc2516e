"""Device seconds against measured kernels, and against limits that no kernel beats.

Measured rates: ai-dynamo/aiconfigurator (GEMM tables, attention), FlashAttention-3 paper (arXiv 2407.08608) figures 5
and 6, NVIDIA/cudnn-frontend benchmarks, linkedin/Liger-Kernel, pytorch/ao. The model states rates sustained in
training; a short benchmark draws less power and is up to 1.4 times faster, hence the bands.
"""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.catalog import accelerator, cluster
from costmodel.catalog.profiles import load_profile
from costmodel.cost.compute import ComputeCosts, compute_costs, op_s
from costmodel.program.ir import Op
from costmodel.spec import Plan, PlanError, Precision, Recipe

WIDTH = {"bf16": 2, "fp16": 2, "fp8": 1, "fp32": 4, "tf32": 4}


def costs_of(gpu: str, **precision: Any) -> ComputeCosts:
    where = cluster(1, gpu=gpu)
    profile = load_profile(SimpleNamespace(cluster=where, plan=Plan()))
    return compute_costs(where.accelerator, profile, Recipe(precision=Precision(**precision)))


def matmul(m: int, n: int, k: int, dtype: str = "bf16", batch: int = 1) -> Op:
    return Op("linear", "matmul", 2.0 * batch * m * n * k, float(batch * WIDTH[dtype] * (m * k + k * n + m * n)), (batch, m, n, k), dtype)


def attention(kernel: str, s: int, batch: int = 4, heads: int = 32, d: int = 128, causal: int = 1, backward: int = 0) -> Op:
    flops = 4.0 * batch * heads * s * s * d * (0.5 if causal else 1.0) * (2.5 if backward else 1.0)
    nbytes = 8.0 * batch * heads * s * d * (2 if backward else 1)
    return Op(f"attention:{kernel}", "attention", flops, nbytes, (batch, heads, heads, s, s, d, causal, backward), "bf16")


def tflops(op: Op, costs: ComputeCosts) -> float:
    return op.flops / op_s(op, costs) / 1e12


@pytest.mark.parametrize(("gpu", "measured"), [
    ("a100", {512: 41.2, 1024: 120.1, 2048: 159.0, 4096: 254.8, 8192: 293.7}),
    ("h100", {512: 72.2, 1024: 348.9, 2048: 719.9, 4096: 827.8, 8192: 713.2, 16384: 692.5}),
    ("h200", {512: 72.7, 1024: 377.8, 2048: 730.0, 4096: 817.8, 8192: 670.3, 16384: 682.9}),
    ("b200", {512: 96.0, 1024: 470.7, 2048: 1205.3, 4096: 1523.3, 8192: 1686.7, 16384: 1493.6}),
    ("l40s", {512: 59.0, 1024: 155.7, 2048: 251.3, 4096: 219.9, 8192: 187.1, 16384: 187.0}),
    ("rtx_pro_6000_server", {512: 63.6, 1024: 194.4, 2048: 290.1, 4096: 397.7, 8192: 389.8, 16384: 402.1}),
])
def test_square_bf16_matmuls_are_within_the_band_of_a_short_benchmark(gpu: str, measured: dict[int, float]) -> None:
    costs = costs_of(gpu)
    for n, rate in measured.items():
        assert 0.65 <= tflops(matmul(n, n, n), costs) / rate <= 1.35, n


def test_large_h100_matmuls_run_below_the_rate_of_a_benchmark_but_not_far_below() -> None:
    """The 16384 square alone measures 692.5 TFLOP/s (ai-dynamo/aiconfigurator); in training power takes up to a factor of 1.3."""
    for m, n, k in ((8192, 16384, 4096), (16384, 5120, 13824), (16384, 16384, 16384)):
        assert 692.5 / 1.3 <= tflops(matmul(m, n, k), costs_of("h100")) <= 692.5


def test_500_watts_slow_the_same_chip_down() -> None:
    """Power goes with the clock to between the first and the third power: 500 W of 700 W give 0.71 to 0.89 of the rate."""
    op = matmul(16384, 8192, 4096)
    assert 500 / 700 <= tflops(op, costs_of("h100_sxm_96gb_500w")) / tflops(op, costs_of("h100")) <= (500 / 700) ** (1 / 3)


def test_head_sizes_off_a_multiple_of_8_make_batched_matmuls_several_times_slower() -> None:
    """BLOOM's head size 108 against 112 on A100. In its log (train/tr11-176B-ml/chronicles-prequel.md, 26 February 2022) 182B with 128 heads takes 43.9 s
    more than with 64. Scores and their products are 4.2e14 FLOPs a rank and step: with the 4 s that aligned heads take, 9 TFLOP/s."""
    costs = costs_of("a100")
    slow, fast = matmul(2048, 2048, 108, batch=64), matmul(2048, 2048, 112, batch=64)
    assert op_s(slow, costs) > 2.5 * op_s(fast, costs)
    assert 8 <= tflops(slow, costs) <= 13
    assert op_s(matmul(8192, 50257, 768), costs) > 1.5 * op_s(matmul(8192, 50304, 768), costs)


def test_fp32_matmuls_use_tf32_only_when_the_precision_says_so() -> None:
    op = matmul(8192, 8192, 8192, "fp32")
    plain, tf32 = costs_of("a100", compute="fp32"), costs_of("a100", compute="tf32")
    assert tflops(op, plain) <= 19.5
    assert 60 <= tflops(op, tf32) <= 156
    assert op_s(op, costs_of("a100", compute="bf16")) == op_s(op, plain)


def test_fp8_gains_over_bf16_what_torchtitan_measures() -> None:
    """Tensorwise float8 makes torchtitan's linear layers up to twice as fast; whole steps gain 1.25 to 1.36."""
    costs = costs_of("h100")
    assert 1.3 <= op_s(matmul(16384, 14336, 4096), costs) / op_s(matmul(16384, 14336, 4096, "fp8"), costs) <= 2.0


def test_a_wave_that_just_overflows_lowers_the_rate() -> None:
    """132 units take 11 x 12 tiles of 128 x 128 at once; 11 x 13 need a second wave."""
    costs = costs_of("h100")
    assert tflops(matmul(128 * 11, 128 * 13, 8192), costs) < 0.85 * tflops(matmul(128 * 11, 128 * 12, 8192), costs)


@pytest.mark.parametrize(("gpu", "kernel", "d", "causal", "backward", "batch", "heads", "measured"), [
    ("h100", "fa2", 128, 0, 0, 1, 16, {4096: 368, 16384: 370}),
    ("h100", "fa2", 128, 1, 0, 1, 16, {4096: 319, 16384: 335}),
    ("h100", "fa2", 64, 0, 0, 1, 32, {4096: 321, 16384: 324}),
    ("h100", "fa2", 128, 0, 1, 1, 16, {4096: 310, 16384: 322}),
    ("h100", "fa3", 128, 0, 0, 1, 16, {4096: 638, 16384: 648}),
    ("h100", "fa3", 128, 1, 0, 1, 16, {4096: 579, 16384: 616}),
    ("h100", "fa3", 128, 0, 1, 1, 16, {4096: 542, 16384: 561}),
    ("h100", "cudnn", 128, 1, 0, 1, 16, {4096: 518, 16384: 539}),
    ("h200", "cudnn", 128, 1, 0, 1, 64, {4096: 591, 16384: 673}),
    ("h200", "cudnn", 128, 1, 1, 1, 64, {4096: 474, 16384: 579}),
    ("gb200", "cudnn", 128, 1, 0, 2, 64, {4096: 1408, 16384: 1708}),
    ("a100", "fa2", 128, 1, 0, 4, 32, {4096: 161.9, 8192: 175.4}),
    ("a100", "fa2", 128, 0, 0, 1, 16, {16384: 227.8}),
    ("l40s", "fa2", 128, 1, 0, 4, 32, {4096: 177.9, 8192: 183.3}),
    ("mi300x", "fa2", 128, 1, 0, 4, 32, {4096: 486.7, 8192: 547.1}),
])
def test_attention_kernels_reach_their_measured_rates(gpu: str, kernel: str, d: int, causal: int, backward: int, batch: int, heads: int,
                                                      measured: dict[int, float]) -> None:
    costs = costs_of(gpu)
    for s, rate in measured.items():
        assert tflops(attention(kernel, s, batch, heads, d, causal, backward), costs) == pytest.approx(rate, rel=0.2), s


@pytest.mark.parametrize(("s", "measured"), [(512, 430.3), (1024, 517.1), (2048, 565.5), (4096, 590.2)])
def test_attention_saturates_with_the_sequence(s: int, measured: float) -> None:
    """H100, FA3, head 128, no mask, 16 heads and 16k tokens: pytorch/benchmark pull request 2391."""
    assert tflops(attention("fa3", s, 16384 // s, 16, causal=0), costs_of("h100")) == pytest.approx(measured, rel=0.1)


def test_an_attention_kernel_without_a_rate_is_named() -> None:
    with pytest.raises(PlanError, match=r"attention:fa3: no rate is known .*known: sdpa.* Use attention"):
        op_s(Op("attention:fa3", "attention", 1e9, 0.0, (1, 1, 1, 64, 64, 64, 1, 0)), costs_of("cpu_xeon_2core"))


@pytest.mark.parametrize(("gpu", "nbytes", "measured_us"), [
    ("h200", 134.2e6, 35), ("h200", 268.4e6, 71), ("gb200", 134.2e6, 23), ("gb200", 268.4e6, 42),  # rms_norm, cudnn-frontend
    ("h100", 2147e6, 715.1),  # torch.clone, Dao-AILab/quack
    ("h100", 712e6, 253.5),  # fp8 cast, pytorch/ao
    ("a100", 537e6, 322.3),  # layer_norm fp32, Liger-Kernel
    ("b200", 813.6e6, 125.9),  # mxfp8 cast, pytorch/ao
])
def test_memory_bound_kernels_take_their_measured_time(gpu: str, nbytes: float, measured_us: float) -> None:
    assert op_s(Op("norm", "memory", nbytes=nbytes), costs_of(gpu)) * 1e6 == pytest.approx(measured_us, rel=0.15)


def test_copies_to_the_host_run_at_the_measured_pcie_rate() -> None:
    """H200, PCIe 5 x16: 55.4 GB/s by nvbandwidth (stas00/ml-engineering network)."""
    assert 1e9 / op_s(Op("offload", "copy", nbytes=1e9), costs_of("h200")) == pytest.approx(55.4e9, rel=0.05)


@pytest.mark.parametrize(("n", "gflops"), [(64, 55), (128, 104), (256, 112), (512, 143), (1024, 143)])
def test_cpu_matmuls_are_near_one_measured_core(n: int, gflops: float) -> None:
    """torch 2.13, one thread of a Xeon with AVX-512, fp32; run-to-run noise of that host is 10 to 35%."""
    assert 0.6 <= tflops(matmul(n, n, n, "fp32"), costs_of("cpu_xeon_2core", compute="fp32")) * 1000 / gflops <= 1.4


def test_a_kernel_is_found_by_the_name_of_its_op() -> None:
    costs = costs_of("h100")
    op = attention("fa2", 4096, backward=1)
    assert op_s(op._replace(name="attention:fa2.grad_q"), costs) == op_s(op, costs)
    assert op_s(op._replace(name="attention:efficient"), costs) == op_s(op._replace(name="attention:sdpa"), costs)


def test_memory_bound_work_costs_the_same_on_any_stream() -> None:
    costs = costs_of("h100")
    assert op_s(Op("cast", "side", nbytes=1e8), costs) == op_s(Op("cast", "memory", nbytes=1e8), costs)


def test_other_kinds_take_no_device_time() -> None:
    costs = costs_of("h100")
    assert [op_s(Op("x", kind), costs) for kind in ("collective", "wait", "record", "hold", "sync", "host")] == [0] * 6


def test_every_kernel_generation_has_a_rate_on_every_gpu() -> None:
    for gpu in ("a100", "h100", "h200", "b200", "gb300", "l40s", "mi300x", "v100", "gaudi2"):
        assert {"sdpa", "fa1", "fa2", "cudnn"} <= set(costs_of(gpu).attention)


SIZES = st.integers(1, 20_000)


@given(m=SIZES, n=SIZES, k=SIZES, batch=st.integers(1, 64), dtype=st.sampled_from(["bf16", "fp32", "fp8"]))
def test_no_matmul_beats_the_peak_or_the_memory(m: int, n: int, k: int, batch: int, dtype: str) -> None:
    device, op = accelerator("h100"), matmul(m, n, k, dtype, batch)
    limit = max(op.flops / device.flops_per_s[dtype], op.nbytes / device.memory_bytes_per_s)
    assert op_s(op, costs_of("h100")) > limit


@given(s=st.integers(1, 100_000), batch=st.integers(1, 64), heads=st.integers(1, 128), d=st.integers(1, 256),
       causal=st.integers(0, 1), backward=st.integers(0, 1), kernel=st.sampled_from(["sdpa", "fa1", "fa2", "fa3", "cudnn"]))
def test_no_attention_beats_the_peak(s: int, batch: int, heads: int, d: int, causal: int, backward: int, kernel: str) -> None:
    op = attention(kernel, s, batch, heads, d, causal, backward)
    assert op_s(op, costs_of("h100")) > op.flops / accelerator("h100").flops_per_s["bf16"]


@given(a=st.floats(0, 1e12), b=st.floats(0, 1e12), kind=st.sampled_from(["memory", "copy"]))
def test_more_bytes_never_take_less_time(a: float, b: float, kind: Any) -> None:
    costs = costs_of("h100")
    low, high = (op_s(Op("x", kind, nbytes=v), costs) for v in sorted((a, b)))
    assert 0 < low <= high
    assert high >= max(a, b) / accelerator("h100").memory_bytes_per_s


@given(m=st.integers(1, 4096), n=st.integers(1, 512), k=st.integers(1, 512))
def test_twice_the_rows_never_take_less_time(m: int, n: int, k: int) -> None:
    costs = costs_of("h100")
    assert op_s(matmul(2 * m, n, k), costs) >= op_s(matmul(m, n, k), costs) * (1 - 1e-9)
