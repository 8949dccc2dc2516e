"""What a search answers fits, and the next value does not; every plan is counted once."""

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import examples, runs

from costmodel import PlanError, Run, build_run, predict
from costmodel.changes import changed
from costmodel.solve import Progress, Solution, fewest_gpus, fits, largest, plans
from costmodel.solve.limits import first, last

GPUS = st.sampled_from([1, 2, 8, 16])


def on_a_small_card(run: Run, share: float) -> Run:
    """The run on a card that fits, with nothing to spare, `share` times the tensors of the run, so that the search is short."""
    memory = predict(run, scaling=False).fullest.memory
    assert memory is not None
    other = sum(memory.outside.values()) + (memory.workspace_bytes or 0)
    tensors = (memory.reserved_bytes - (memory.workspace_bytes or 0)) if memory.reserved_bytes else memory.allocated.total_bytes
    capacity = int((other + share * tensors) / 0.9) + 1
    accelerator = run.cluster.accelerator.model_copy(update={"memory_bytes": capacity})
    return run.model_copy(update={"cluster": run.cluster.model_copy(update={"accelerator": accelerator})})


def max_allocated(found: Solution) -> int:
    """Bytes at the peak of the role that binds."""
    assert found.beyond_report is not None
    return next(r.memory.allocated.total_bytes for r in found.beyond_report.roles if r.role == found.bound.role and r.memory)


@examples(20)
@given(runs(GPUS), st.sampled_from(["micro_batch", "seq_len", "layers"]), st.sampled_from([1.2, 1.5, 3.0]), st.booleans())
def test_the_largest_fits_and_one_more_does_not(run: Run, quantity: Literal["micro_batch", "seq_len", "layers"], share: float, risky: bool) -> None:
    run = on_a_small_card(run, share)
    field = {"micro_batch": "recipe.micro_batch", "seq_len": "recipe.seq_len", "layers": "model.layers"}[quantity]
    try:
        found = largest(run, quantity, risky=risky)
    except PlanError:  # this model, plan and recipe refuse every value
        return
    if found.value is not None:
        again = predict(changed(run, {field: found.value}), scaling=False)
        assert fits(again, risky)
        assert again == found.report
    if found.bound.kind == "memory":
        assert found.beyond is not None
        assert not fits(predict(changed(run, {field: found.beyond}), scaling=False), risky)
        assert list(found.bound.holds.values()) == sorted(found.bound.holds.values(), reverse=True)
        assert sum(found.bound.holds.values()) == pytest.approx(max_allocated(found), rel=1e-9)
        if quantity == "micro_batch" and found.value is not None:
            assert found.beyond == found.value + 1


@examples(20)
@given(runs(GPUS), st.sampled_from([0.5, 0.9, 1.5]))
def test_the_fewest_gpus_fit_and_the_next_fewer_do_not(run: Run, share: float) -> None:
    run = on_a_small_card(run, share)
    found = fewest_gpus(run, most=64)
    if found.value is not None:
        assert fits(predict(changed(run, {"cluster.gpus": found.value}), scaling=False))
    if found.value is not None and found.beyond is not None:
        assert found.beyond < found.value
        if found.bound.kind == "memory":
            assert not fits(predict(changed(run, {"cluster.gpus": found.beyond}), scaling=False))


@examples(200)
@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_an_answer_is_good_and_its_neighbour_is_not(good: list[bool]) -> None:
    for search, step in ((last, 1), (first, -1)):
        found = search(len(good), lambda i: good[i])
        assert found.best is None or good[found.best]
        assert found.beyond is None or not good[found.beyond]
        if found.best is not None:
            assert found.beyond == (found.best + step if 0 <= found.best + step < len(good) else None)


@examples(100)
@given(st.integers(0, 10**6), st.integers(1, 10**6))
def test_where_memory_grows_the_search_is_exact(fit: int, more: int) -> None:
    asked: set[int] = set()

    def good(i: int) -> bool:
        asked.add(i)
        return i < fit

    assert last(fit + more, good).best == (fit - 1 if fit else None)
    assert first(fit + more, lambda i: not good(i)).best == fit
    assert len(asked) <= 4 * 21 + 10


@examples(12)
@given(runs(st.sampled_from([1, 2, 4, 8])))
def test_every_plan_is_counted_once_and_fits_as_promised(run: Run) -> None:
    run = on_a_small_card(run, 1.0)
    found = plans(run)
    assert found.fit + found.too_large + found.refused + found.pruned == found.candidates
    assert len(found.best) == found.fit
    speeds = [choice.report.tokens_per_s or 0.0 for choice in found.best]
    assert speeds == sorted(speeds, reverse=True)
    for choice in found.best[:2]:
        assert changed(run, choice.changes, "global_batch") == choice.run
        assert predict(choice.run, scaling=False) == choice.report
        assert choice.run.recipe.global_batch == run.recipe.global_batch


LLAMA = {"model": "llama-3-8b", "plan": {"strategy": "fsdp"}}


def test_pruning_loses_no_plan() -> None:
    """What was not predicted is predicted here: a plan that was skipped either does not fit or is slower than one that was kept."""
    run = build_run(model="llama-3-8b", cluster={"gpus": 8}, plan={"zero": 3, "checkpointing": "full"}, recipe={"global_batch": 64, "micro_batch": 1})
    found = plans(run)
    fastest = found.best[0].report.tokens_per_s or 0.0
    for tp in (1, 2, 4, 8):
        for kind in ("none", "selective", "selective:op", "full"):
            for micro_batch in (1, 2, 4, 8):
                try:
                    other = predict(changed(run, {"plan.tp": tp, "plan.checkpointing": kind, "recipe.micro_batch": micro_batch}, "global_batch"), scaling=False)
                except PlanError:
                    continue
                assert not fits(other) or (other.tokens_per_s or 0.0) <= fastest


def test_the_fastest_plan_is_no_slower_than_checkpointing_by_operation() -> None:
    """What `solve` proposes of checkpointing is among the plans: 13B in sequences of 8192 hardly fits 64 cards, and recomputing every other matmul helps."""
    run = build_run(params="13B", cluster={"gpus": 64}, plan={"zero": 3}, recipe={"seq_len": 8192, "batch_tokens": "512K"})
    near = {"plan.checkpointing": "selective:op"}
    fastest = plans(run, most=60).best[0].report.tokens_per_s or 0.0
    assert fastest >= (predict(changed(run, near), scaling=False).tokens_per_s or 0.0)


def test_three_cards_are_the_fewest_that_hold_the_states_of_llama_3_8b() -> None:
    """torchtitan issue 620: with 16 bytes a parameter, two cards of 48 GB hold no batch; three hold 39.9 GiB of states each, tightly."""
    run = build_run(**LLAMA, cluster={"gpu": "rtx_a6000", "gpus": 2}, recipe={"seq_len": 128})
    alone = largest(run, "micro_batch")
    assert alone.value is None
    assert alone.bound.states_alone
    assert alone.bound.states_bytes / 2**30 == pytest.approx(59.8, abs=0.1)
    found = fewest_gpus(run, risky=True)
    assert (found.value, found.beyond, found.bound.kind) == (3, 2, "memory")


def test_more_gpus_do_not_help_where_nothing_is_sharded() -> None:
    found = fewest_gpus(build_run(model="llama-3-8b", cluster={"gpus": 8}, plan={"strategy": "ddp"}))
    assert found.value is None
    assert found.bound.states_alone


def test_the_logits_bind_a_small_model() -> None:
    """GPT-2's vocabulary: three fp32 and one bf16 tensor of logits at the loss, 14 bytes each, exceed what the 12 layers keep."""
    found = largest(build_run(model="gpt2", cluster={"gpu": "rtx_3090", "gpus": 1}), "micro_batch")
    assert found.value is not None
    assert next(iter(found.bound.holds)) == "logits"
    assert found.bound.holds["logits"] == pytest.approx(14 * (found.value + 1) * 1024 * 50257, rel=0.15)


def test_learned_positions_end_the_sequence() -> None:
    found = largest(build_run(model="gpt2", cluster={"gpu": "rtx_3090", "gpus": 1}), "seq_len")
    assert (found.value, found.beyond, found.bound.kind) == (1024, None, "range")
    assert "1,024 learned positions" in found.bound.rule


def test_a_search_can_be_watched_and_stopped() -> None:
    run = build_run(**LLAMA, cluster={"gpus": 8})
    seen: list[Progress] = []

    def three(progress: Progress) -> bool:
        seen.append(progress)
        return len(seen) <= 3

    found = plans(run, watch=three)
    assert found.stopped
    assert found.predictions == 3
    assert [p.done for p in seen] == sorted(p.done for p in seen)
    assert seen[0].of == found.candidates
    seen.clear()
    part = largest(run, "micro_batch", watch=three)
    assert part.stopped
    assert part.bound.kind == "stopped"


def test_what_is_never_possible_is_refused() -> None:
    with pytest.raises(PlanError, match="attention sinks"):
        largest(build_run(model="gpt-oss-20b", cluster={"gpus": 8}), "micro_batch")
    with pytest.raises(PlanError, match="not sought"):
        largest(build_run(**LLAMA), "heads")  # type: ignore[arg-type]


def test_plans_of_a_mixture_of_experts_spread_the_experts_as_well() -> None:
    """Degrees that divide 8 experts and the data-parallel ranks; each is a plan of its own; PyTorch spreads them under FSDP alone."""
    moe = {"layers": 4, "hidden": 1024, "heads": 8, "ffn": 2048, "vocab": 1024, "moe": {"experts": 8, "top_k": 2, "expert_ffn": 2048}}
    run = build_run(model=moe, cluster={"gpus": 4, "gpu": "h100"}, plan={"zero": 3}, recipe={"seq_len": 1024, "global_batch": 8})
    found = plans(run).best
    degrees = {c.run.plan.ep for c in found if c.run.plan.zero == 3 and c.run.plan.pp == 1}
    assert degrees == {1, 2, 4}
    assert all(c.run.plan.ep == 1 for c in found if c.run.plan.zero != 3 or c.run.plan.pp > 1)
