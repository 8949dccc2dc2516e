"""What the time of a step cannot be: beyond the device, off its own sum, or with communication that hides where it cannot.

Limits are those of the data sheet and of PyTorch's order of events (reducer.cpp, torch/distributed/fsdp/_fully_shard).
"""

from typing import Any

import pytest
from steps import LLAMA, MIB, sent, step

from costmodel import StepReport, build_run, predict
from costmodel.catalog.profiles import load_profile
from costmodel.report import RoleReport, TimeReport
from costmodel.spec import Run

PLANS: dict[str, dict[str, Any]] = {
    "ddp": {}, "zero 1": {"zero": 1}, "zero 2": {"zero": 2}, "fsdp": {"zero": 3}, "fsdp, full checkpointing": {"zero": 3, "checkpointing": "full"},
    "hsdp": {"strategy": "hsdp", "dp_shard": 8}, "deepspeed 1": {"framework": "deepspeed", "zero": 1},
    "deepspeed 2": {"framework": "deepspeed", "zero": 2}, "deepspeed 3": {"framework": "deepspeed", "zero": 3},
    "megatron": {"framework": "megatron"}, "megatron 1": {"framework": "megatron", "zero": 1}}
BUCKETED = {"layers": 3, "hidden": 512, "heads": 8, "ffn": 2048, "vocab": 8192, "gated": False}


def large(plan: dict[str, Any], gpus: int = 16) -> Run:
    """An 8B model on H100s: kernels of milliseconds, so that the host is far ahead."""
    return build_run(model="llama-3-8b", cluster={"gpus": gpus, "gpu": "h100"}, plan=plan, recipe={"seq_len": 8192, "micro_batch": 1, "grad_accum": 2})


def time_of(report: StepReport) -> TimeReport:
    times = [r.time for r in report.roles if r.time]
    return max(times, key=lambda t: t.step_s)


def seconds(role: RoleReport, kind: str, message: int) -> float:
    """Seconds of one collective of a step."""
    (found,) = {c.total_s / c.count for c in role.collectives or () if (c.kind, c.message_bytes) == (kind, message) and c.total_s is not None}
    return found


@pytest.mark.parametrize("name", PLANS)
def test_parts_sum_to_the_step_and_a_large_model_stays_below_the_peak(name: str) -> None:
    """989.4 TFLOP/s of 16-bit arithmetic is a limit; a GEMM-bound step that needs ten times as long is not GEMM-bound."""
    run = large(PLANS[name])
    report = predict(run, scaling=False)
    t = time_of(report)
    assert sum(t.breakdown.values()) == pytest.approx(t.step_s, rel=1e-12)
    assert sum(t.phases.values()) == pytest.approx(t.step_s, rel=1e-12)
    assert min(*t.breakdown.values(), *t.phases.values()) >= 0
    assert report.mfu is not None and report.hfu is not None
    assert 0.1 < report.mfu <= report.hfu < 0.9
    assert report.step_s == t.step_s


@pytest.mark.parametrize("name", PLANS)
def test_a_large_model_waits_for_no_more_communication_than_there_is(name: str) -> None:
    t = time_of(predict(large(PLANS[name]), scaling=False))
    assert t.communication_s
    for axis, exposed in t.exposed_s.items():
        assert 0 <= exposed <= t.communication_s[axis] * 1.01, axis


def test_a_host_that_is_late_is_not_called_communication() -> None:
    """A small model on two GPUs: compute waits for a broadcast that the host has not issued yet; that wait is the host's."""
    t = time_of(step(LLAMA, 2, gpu="h100", plan={"zero": 1}))
    assert t.exposed_s["dp_shard"] <= t.communication_s["dp_shard"] * 1.01


def test_the_last_bucket_of_ddp_is_exposed() -> None:
    """Its all-reduce cannot start before the last gradient (the embedding's), and nothing of backward is left to hide it."""
    report = step(BUCKETED, 8, precision="fp32", micro_batch=64, seq_len=1024)
    role = report.roles[0]
    assert role.time is not None
    last = seconds(role, "all-reduce", 24 * MIB + 4 * 1024)
    assert role.time.exposed_s["dp_replicate"] >= last * (1 - 1e-9)


def test_earlier_buckets_hide_behind_a_backward_that_is_long_enough() -> None:
    """Long compute between buckets: all but the last are sent before it ends."""
    report = step(BUCKETED, 8, precision="fp32", micro_batch=64, seq_len=1024)
    role = report.roles[0]
    assert role.time is not None
    assert role.time.exposed_s["dp_replicate"] == pytest.approx(seconds(role, "all-reduce", 24 * MIB + 4 * 1024), rel=0.05)


def test_without_accumulating_locally_ddp_exposes_a_bucket_each_micro_batch() -> None:
    def exposed(each: bool) -> float:
        t = time_of(step(BUCKETED, 8, plan={"sync_each_micro_batch": each}, precision="fp32", micro_batch=16, seq_len=1024, grad_accum=4))
        return t.exposed_s["dp_replicate"]

    assert exposed(True) == pytest.approx(4 * exposed(False), rel=0.1)


def test_fsdp_exposes_its_first_gather_and_its_last_reduce_scatter() -> None:
    """Before the root's parameters nothing can run; after its gradients nothing is left to run. Llama-3-8B: embedding, head and norm."""
    run = build_run(model="llama-3-8b", cluster={"gpus": 16, "gpu": "h100"}, plan={"zero": 3}, recipe={"seq_len": 8192, "micro_batch": 1})
    role = predict(run, scaling=False).roles[0]
    root = 2 * 128_256 * 4096 + 4096
    assert role.time is not None
    first, last = seconds(role, "all-gather", 2 * root), seconds(role, "reduce-scatter", 4 * root)
    assert role.time.exposed_s["dp_shard"] >= (first + last) * (1 - 1e-9)


def test_without_overlap_megatron_exposes_every_reduction() -> None:
    run = large({"framework": "megatron", "overlap_grad_reduce": False})
    t = time_of(predict(run, scaling=False))
    assert t.exposed_s["dp_replicate"] == pytest.approx(t.communication_s["dp_replicate"], rel=0.01)
    overlapped = time_of(predict(large({"framework": "megatron"}), scaling=False))
    assert overlapped.exposed_s["dp_replicate"] < t.exposed_s["dp_replicate"]


def with_network(run: Run, faster: float, contention: float | None = None) -> StepReport:
    """The run with every link so many times as fast, in rate and in latency."""
    profile = load_profile(run)
    changes = {}
    for key in profile.constants:
        last = key.rpartition(".")[2]
        if key.startswith("link.") and last in ("share", "nvls_share"):
            changes[key] = profile.value(key) * faster
        elif key.startswith("link.") and last in ("base_s", "hop_s", "hop_large_s", "nvls_s", "peer_s"):
            changes[key] = profile.value(key) / faster
    if contention is not None:
        changes["overlap.contention"] = contention
    return predict(run, profile.replace(changes), scaling=False)


@pytest.mark.parametrize("name", PLANS)
def test_a_faster_network_never_slows_the_step(name: str) -> None:
    run = large(PLANS[name])
    times = [time_of(with_network(run, f)).step_s for f in (0.25, 0.5, 1.0, 2.0, 4.0, 1000.0)]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("name", PLANS)
def test_a_free_network_without_contention_leaves_compute_alone(name: str) -> None:
    """What is left is what the kernels and the host take."""
    t = time_of(with_network(large(PLANS[name]), 1e9, 0.0))
    compute = sum(t.breakdown.get(k, 0.0) for k in ("matmul", "attention", "memory-bound", "recompute", "optimizer", "host wait", "stragglers", "fixed"))
    assert t.step_s == pytest.approx(compute, rel=2e-3)
    assert "contention" not in t.breakdown


def test_over_a_free_network_ddp_computes_what_one_gpu_does() -> None:
    """The same matmuls and attention to the second; memory-bound work adds the copies into and out of buckets."""
    alone = time_of(predict(large({}, 1), scaling=False))
    ddp = time_of(with_network(large({}, 8), 1e9, 0.0))
    for kind in ("matmul", "attention", "optimizer"):
        assert ddp.breakdown[kind] == pytest.approx(alone.breakdown[kind])
    assert ddp.breakdown["memory-bound"] > alone.breakdown["memory-bound"]


def test_contention_costs_no_more_than_its_share_of_hidden_communication() -> None:
    t = {k: time_of(with_network(large({"zero": 3}), 1.0, k)) for k in (0.0, 0.5)}
    extra = t[0.5].breakdown["contention"]
    assert 0 < extra <= 0.5 * t[0.5].communication_s["dp_shard"]
    assert t[0.0].step_s < t[0.5].step_s <= t[0.0].step_s + extra * 1.01


def test_twice_the_micro_batches_take_twice_the_passes() -> None:
    """Forward and backward repeat; the update does not."""
    once, twice = (time_of(step("llama-3-8b", 1, gpu="h100", seq_len=4096, grad_accum=m)) for m in (4, 8))
    assert twice.phases["forward"] == pytest.approx(2 * once.phases["forward"], rel=0.01)
    assert twice.phases["backward"] == pytest.approx(2 * once.phases["backward"], rel=0.02)
    assert twice.phases["optimizer"] == pytest.approx(once.phases["optimizer"], rel=0.01)


def test_full_recompute_costs_about_a_forward_pass_of_the_layers() -> None:
    """Korthikanti et al. (arXiv 2205.05198), figure 7: 30 to 40% of overhead, less what early stopping saves."""
    plain, again = (time_of(step("llama-3-8b", 1, gpu="h100", seq_len=4096, plan={"checkpointing": c})).step_s for c in ("none", "full"))
    assert 1.15 <= again / plain <= 1.4


def test_one_gpu_communicates_nothing() -> None:
    for plan in ({}, {"zero": 1}, {"zero": 2}, {"zero": 3}, {"framework": "deepspeed", "zero": 3}, {"framework": "megatron", "zero": 1}):
        assert not time_of(step(LLAMA, 1, plan=plan)).communication_s


@pytest.mark.parametrize("accumulation", [1, 4])
def test_megatron_gathers_parameters_beside_the_next_forward(accumulation: int) -> None:
    """Megatron-LM, --overlap-param-gather (core/distributed/param_and_grad_buffer.py): the same all-gathers, issued before the first forward, of which
    compute waits for the first bucket; a forward longer than the others hides them."""
    after, beside = (step("llama-2-7b", 16, gpu="h100", plan={"framework": "megatron", "zero": 1, "overlap_param_gather": on}, seq_len=4096, micro_batch=2,
                          precision="bf16-mixed", grad_accum=accumulation).roles[0] for on in (False, True))
    assert after.time is not None and beside.time is not None
    assert sent(after) == sent(beside)
    assert beside.time.communication_s["dp_shard"] == pytest.approx(after.time.communication_s["dp_shard"])
    gathers = [(c.phase, c.count, c.total_s) for c in beside.collectives or () if c.kind == "all-gather"]
    assert {phase for phase, _, _ in gathers} == {"forward"}
    total, first = sum(s for _, _, s in gathers if s), max(s / n for _, n, s in gathers if s)
    saved = after.time.exposed_s["dp_shard"] - beside.time.exposed_s["dp_shard"]
    assert total - 2 * first <= saved <= total
