"""A CPU rank: one thread launches and computes, and waits in every call that has no async_op. Oracles: torch.distributed's
`async_op=False` (the call returns when the work is done), which FSDP2 uses throughout and DDP's reducer never; a sum by hand."""

from typing import Any

import pytest

from costmodel import build_run, predict
from costmodel.timeline import timeline

MODEL = {"layers": 3, "hidden": 256, "heads": 8, "ffn": 1024, "vocab": 1024, "tied_embeddings": False}


def cpu_run(strategy: str, **plan: Any) -> Any:
    return build_run(model=MODEL, cluster={"gpu": "cpu_epyc_2core", "gpus": 2}, plan={"strategy": strategy, **plan},
                     recipe={"seq_len": 128, "micro_batch": 2, "precision": "fp32"})


def time_of(run: Any) -> Any:
    time = predict(run, scaling=False).roles[0].time
    assert time is not None
    return time


def test_fsdp_hides_no_communication_under_gloo() -> None:
    time = time_of(cpu_run("fsdp"))
    assert time.exposed_s["dp_shard"] == pytest.approx(time.communication_s["dp_shard"])


def test_ddp_reduces_in_the_background_also_under_gloo() -> None:
    time = time_of(cpu_run("ddp", bucket_bytes=1 << 20))
    assert 0.0 < time.exposed_s["dp_replicate"] < 0.9 * time.communication_s["dp_replicate"]


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "zero2"])
def test_a_cpu_never_waits_for_its_host(strategy: str) -> None:
    run = cpu_run(strategy) if strategy != "single" else build_run(
        model=MODEL, cluster={"gpu": "cpu_epyc_2core", "gpus": 1}, recipe={"seq_len": 128, "micro_batch": 2, "precision": "fp32"})
    time = time_of(run)
    assert "host wait" not in time.breakdown
    assert sum(time.breakdown.values()) == pytest.approx(time.step_s)


def test_launches_take_time_beside_the_kernels() -> None:
    """A GPU hides them behind kernels; here a step takes the sum, whichever is longer."""
    run = cpu_run("ddp")
    slow = predict(run, _slower_host(run), scaling=False)
    fast = predict(run, scaling=False)
    assert slow.step_s is not None and fast.step_s is not None
    host = fast.roles[0].time
    assert host is not None and slow.step_s - fast.step_s == pytest.approx(host.host_s, rel=0.1)


def _slower_host(run: Any) -> Any:
    from costmodel.catalog.profiles import load_profile
    profile = load_profile(run)
    return profile.replace({"host.multiplier": 2 * profile.value("host.multiplier")})


def test_the_timeline_of_a_cpu_has_one_thread_and_ends_with_the_prediction() -> None:
    run = cpu_run("fsdp")
    line = timeline(run)
    slices = [s for span in line.spans for s in line.slices(span, ops=True)]
    assert not any(s.stream == "host" for s in slices)
    compute = sum(s.end_s - s.start_s for s in slices if s.stream == "compute")
    assert compute == pytest.approx(line.busy_s, rel=1e-6)
