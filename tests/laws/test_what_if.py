"""A slow rank and slow links: what they cost, between bounds that need no model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import examples, runs

from costmodel import PlanError, Run, build_run, predict
from costmodel.changes import as_input, changed
from costmodel.report import TimeReport
from costmodel.solve import fewest_gpus

SEVERAL = st.sampled_from([2, 8, 16, 64])


def slowed(run: Run, slow_rank: float) -> Run:
    return run.model_copy(update={"cluster": run.cluster.model_copy(update={"slow_rank": slow_rank})})


def step(run: Run) -> float:
    seconds = predict(run, scaling=False).step_s
    assert seconds is not None
    return seconds


@examples(40)
@given(runs(SEVERAL), st.sampled_from([1.05, 1.5, 3.0]))
def test_a_job_with_a_slow_rank_is_between_its_own_pace_and_that_many_times_it(run: Run, times: float) -> None:
    """Compute is stretched, communication, launches and the fixed cost are not."""
    before, after = step(run), step(slowed(run, times))
    assert before * (1 - 1e-9) <= after <= before * times * (1 + 1e-9)
    assert step(slowed(run, 2 * times)) >= after * (1 - 1e-9)


@examples(40)
@given(runs(SEVERAL))
def test_the_parts_still_sum_to_the_step_and_the_rest_stays(run: Run) -> None:
    before, after = (predict(r, scaling=False) for r in (run, slowed(run, 2.0)))
    for old, new in zip(before.roles, after.roles, strict=True):
        assert isinstance(old.time, TimeReport) and isinstance(new.time, TimeReport)
        assert sum(new.time.breakdown.values()) == pytest.approx(new.time.step_s)
        assert sum(new.time.phases.values()) == pytest.approx(new.time.step_s)
        assert {k: v for k, v in new.time.breakdown.items() if k != "slow rank"} == old.time.breakdown
        assert (old.memory, old.collectives) == (new.memory, new.collectives)


def busy(time: TimeReport | None) -> float:
    """Seconds of kernels."""
    assert time is not None
    return sum(s for name, s in time.breakdown.items() if name in ("matmul", "attention", "memory-bound", "recompute", "optimizer"))


def test_alone_and_ahead_of_the_host_a_slow_gpu_takes_just_so_much_longer() -> None:
    run = build_run(params="1B", cluster={"gpus": 1}, recipe={"micro_batch": 4})
    before, after = (predict(r, scaling=False).roles[0].time for r in (run, slowed(run, 1.3)))
    assert before is not None and after is not None
    assert before.breakdown.get("host wait", 0.0) < 1e-3 * before.step_s
    assert after.breakdown["slow rank"] == pytest.approx(0.3 * busy(before), rel=1e-3)


PIPELINE = {"model": "llama-3-8b", "cluster": {"gpus": 4}, "plan": {"framework": "megatron", "pp": 4, "schedule": "naive"},
            "recipe": {"grad_accum": 1, "seq_len": 2048}}


def test_in_a_pipeline_without_overlap_it_costs_what_its_rank_computes() -> None:
    """One micro-batch passes one rank after the other, so the dearest place is the rank with most work."""
    run = build_run(**PIPELINE)
    before, after = predict(run, scaling=False), predict(slowed(run, 2.0), scaling=False)
    work = [busy(r.time) for r in before.roles]
    extra = (after.step_s or 0.0) - (before.step_s or 0.0)
    assert extra == pytest.approx(max(work), rel=0.05)
    note = next(n for n in after.notes if "times slower" in n)
    assert f"pipeline rank {work.index(max(work))}, as is counted here" in note


def test_in_a_full_pipeline_its_pace_is_every_ones() -> None:
    """With many micro-batches the schedule is paced by its slowest rank: twice the work of one is nearly twice the step."""
    run = build_run(**{**PIPELINE, "plan": {"framework": "megatron", "pp": 4, "schedule": "1f1b"}, "recipe": {"grad_accum": 64, "seq_len": 2048}})
    assert 1.6 < step(slowed(run, 2.0)) / step(run) < 2.0


@examples(30)
@given(runs(st.sampled_from([16, 64])), st.sampled_from([0.25, 0.5, 2.0]), st.sampled_from([0, 1]))
def test_a_link_factor_is_a_link_of_that_rate(run: Run, factor: float, index: int) -> None:
    """The oracle is the same cluster with another data sheet."""
    level = run.cluster.levels[index]
    named = [run.model_copy(update={"cluster": run.cluster.model_copy(update={"link_factors": {name: factor}})})
             for name in (level.name, level.kind, ("intra", "inter")[index])]
    levels = tuple(lv.model_copy(update={"bytes_per_s": lv.bytes_per_s * factor}) if lv == level else lv for lv in run.cluster.levels)
    device = run.cluster.accelerator
    if index == 0:
        device = device.model_copy(update={"peer_bytes_per_s": device.peer_bytes_per_s * factor})
    other = run.model_copy(update={"cluster": run.cluster.model_copy(update={"levels": levels, "accelerator": device})})
    assert {step(r) for r in named} == {step(other)}


@examples(50)
@given(runs(SEVERAL), st.sampled_from([1.0, 1.2]), st.sampled_from([{}, {"inter": 0.5}, {"nvlink": 0.9, "network": 0.1}]))
def test_they_stay_with_a_run_that_changes(run: Run, slow_rank: float, factors: dict[str, float]) -> None:
    run = run.model_copy(update={"cluster": run.cluster.model_copy(update={"slow_rank": slow_rank, "link_factors": factors})})
    assert changed(run, {}) == run
    assert as_input(run)["cluster"].get("link_factors", {}) == factors
    try:
        more = changed(run, {"cluster.gpus": 2 * run.cluster.gpus})
    except PlanError:
        return
    assert (more.cluster.slow_rank, more.cluster.link_factors) == (slow_rank, factors)


def test_a_search_looks_at_the_slow_machines() -> None:
    run = slowed(build_run(params="1B", cluster={"gpus": 8}, plan={"zero": 3}), 1.5)
    found = fewest_gpus(run)
    assert found.run is not None and found.run.cluster.slow_rank == 1.5
