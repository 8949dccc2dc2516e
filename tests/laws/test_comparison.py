"""Differences of two runs sum to the difference of their steps and of their MFU, whatever the runs."""

import math

import pytest
from hypothesis import given
from runs import examples, runs

from costmodel import Run, build_run, predict
from costmodel.comparison import compare, differing_fields, one_gpu, predicted


@examples(40)
@given(runs(), runs())
def test_the_bars_sum_to_the_difference_of_the_steps_and_of_the_mfu(first: Run, second: Run) -> None:
    base, other = predicted("a", first), predicted("b", second)
    comparison = compare(base, other)
    (d,) = comparison.differences
    a, b = comparison.entries
    assert math.isclose(math.fsum(bar.before_s for bar in d.bars), a.step_s, rel_tol=1e-9)
    assert math.isclose(math.fsum(bar.after_s for bar in d.bars), d.after_s, rel_tol=1e-9)
    assert math.isclose(math.fsum(bar.points for bar in d.bars), b.mfu - a.mfu, rel_tol=1e-6, abs_tol=1e-9)
    assert math.isclose(d.ratio, a.tokens_per_s_per_gpu / b.tokens_per_s_per_gpu, rel_tol=1e-9)
    assert len({bar.name for bar in d.bars}) == len(d.bars)
    assert [bar.name for bar in d.bars if bar.before_s] == [bar.name for bar in base.bars.bars]
    for entry in comparison.entries:
        assert sum(entry.memory.by_category.values()) == entry.memory.allocated


@examples(40)
@given(runs())
def test_a_run_does_not_differ_from_itself(run: Run) -> None:
    one = predicted("a", run)
    comparison = compare(one, one)
    assert comparison.fields == {}
    assert comparison.entries[1].efficiency == 1.0
    assert all(bar.difference_s == 0.0 and bar.points == 0.0 for bar in comparison.differences[0].bars)


@examples(40)
@given(runs())
def test_against_one_gpu_the_efficiency_is_the_weak_scaling_and_no_memory_is_negative(run: Run) -> None:
    base, one = one_gpu(run), predicted("b", run)
    b = compare(base, one).entries[1]
    assert b.weak is not None and b.efficiency is not None
    if run.plan.framework == "pytorch" and run.cluster.gpus > 1:  # the other dialects keep their gradient buffer on one GPU too
        assert b.efficiency == pytest.approx(b.weak, rel=1e-6)
    for role in base.report.roles:
        assert role.memory is not None and min(role.memory.allocated.by_category.values()) > 0


@pytest.mark.parametrize("plan", [{}, {"zero": 3}])
def test_a_slow_rank_is_not_the_one_gpu(plan: dict[str, int]) -> None:
    """The job waits for its slow rank; the one GPU that it is compared with is of the usual speed."""
    run, usual = (build_run(params="1B", cluster={"gpus": 8, "slow_rank": slow}, plan=plan) for slow in (1.2, 1.0))
    base = one_gpu(run)
    assert base.report.step_s == one_gpu(usual).report.step_s
    entry = compare(base, predicted("b", run)).entries[1]
    assert entry.weak is not None and entry.weak < 1 / 1.15
    assert entry.efficiency == pytest.approx(entry.weak, rel=1e-6)


def test_a_gpu_that_handles_twice_the_tokens_is_compared_at_the_same_tokens() -> None:
    """A step of two micro-batches is two of one, less what a step costs once: the update, the fixed part."""
    small, large = (build_run(params="1B", cluster={"gpus": 1}, recipe={"grad_accum": n}) for n in (1, 2))
    (d,) = compare(predicted("a", small), predicted("b", large)).differences
    by_name = {bar.name: bar for bar in d.bars}
    assert d.scale == 0.5
    assert by_name["matmul rate"].difference_s == pytest.approx(0.0, abs=1e-12)
    assert by_name["optimizer"].after_s == pytest.approx(by_name["optimizer"].before_s / 2)
    assert d.ratio < 1


def test_a_second_node_is_slower_for_what_crosses_it() -> None:
    """Eight GPUs of a node and sixteen of two, replicas of a 7B model: all that grows is the reduction over the slower link, and what it disturbs."""
    one, two = (build_run(params="7B", cluster={"gpus": n}, plan={"strategy": "ddp"}) for n in (8, 16))
    (d,) = compare(predicted("a", one), predicted("b", two)).differences
    grown = {bar.name for bar in d.bars if bar.difference_s > 1e-3 * d.before_s}
    assert "exposed dp_replicate" in grown
    assert grown <= {"exposed dp_replicate", "contention", "stragglers"}


def test_fields_that_follow_a_name_are_not_listed() -> None:
    a, b = build_run(model="gpt2", cluster={"gpus": 1}), build_run(model="llama-3-8b", cluster={"gpus": 1, "gpu": "a100"}, plan={"checkpointing": "full"})
    fields = differing_fields([a, b])
    assert fields["model.name"] == ("gpt2-small", "llama-3-8b")
    assert not [path for path in fields if path.startswith("model.") and path != "model.name"]
    assert not [path for path in fields if path.startswith("cluster.accelerator.") and path != "cluster.accelerator.name"]
    assert fields["plan.checkpointing.mode"] == ("none", "full")


def test_memory_is_of_the_fullest_role() -> None:
    run = build_run(params="7B", cluster={"gpus": 4}, plan={"pp": 4, "framework": "megatron"}, recipe={"grad_accum": 4})
    report = predict(run)
    entry = compare(predicted("a", run)).entries[0]
    assert entry.memory.allocated == max(role.memory.allocated.total_bytes for role in report.roles if role.memory)
    assert entry.memory.role == report.fullest.role
