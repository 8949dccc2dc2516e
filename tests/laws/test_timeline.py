"""The timeline is the step, cut into slices: nothing is lost, nothing overlaps, and it ends when the prediction does."""

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from runs import examples, runs

from costmodel import Run, build_run, predict
from costmodel.catalog.profiles import load_profile
from costmodel.cost.prices import RunPrices
from costmodel.timeline import Slice, Timeline, timeline

CLOSE = 1e-9


def fixed(run: Run, busy_s: float) -> float:
    """The step of a rank whose streams are busy for so long: with the wait for the slowest rank and the fixed cost."""
    prices = RunPrices(run, load_profile(run))
    return busy_s * (1 + prices.jitter * math.log2(run.cluster.gpus)) + prices.fixed


@examples(80)
@given(runs())
def test_the_timeline_takes_as_long_as_the_step(run: Run) -> None:
    found = timeline(run)
    time = predict(run, scaling=False).roles[0].time
    assert time is not None
    assert math.isclose(fixed(run, found.busy_s), time.step_s, rel_tol=1e-6)
    assert all(a.end_s <= b.start_s + CLOSE for a, b in pairwise(found.spans))
    assert found.spans[-1].end_s <= found.busy_s * (1 + CLOSE)


def lanes(found: Timeline, *, ops: bool) -> dict[str, list[Slice]]:
    out: dict[str, list[Slice]] = {}
    for span in found.spans[:6] + found.spans[-2:]:
        for s in found.slices(span, ops=ops):
            out.setdefault(s.stream, []).append(s)
    return out


@examples(40)
@given(runs())
def test_the_slices_of_a_stream_do_not_overlap(run: Run) -> None:
    found = timeline(run)
    for stream, slices in lanes(found, ops=True).items():
        ordered = sorted(slices, key=lambda s: (s.start_s, s.end_s))
        for a, b in pairwise(ordered):
            assert a.end_s <= b.start_s + 1e-9 or a == b, (stream, a, b)
        assert all(s.end_s >= s.start_s and 0 <= s.exposed_s <= (s.end_s - s.start_s) * (1 + 1e-9) for s in slices)


@examples(40)
@given(runs())
def test_units_and_ops_end_alike(run: Run) -> None:
    found = timeline(run)
    for span in found.spans[:4] + found.spans[-1:]:
        coarse, fine = ({s.end_s for s in found.slices(span, ops=ops) if s.stream == "compute" and s.kind != "wait"} for ops in (False, True))
        if fine:
            assert math.isclose(max(coarse), max(fine), rel_tol=1e-6, abs_tol=1e-9) or max(coarse) >= max(fine)


def test_layers_are_numbered_up_and_down() -> None:
    run = build_run(params="1B", cluster={"gpus": 8}, plan={"zero": 3, "checkpointing": "full"})
    found = timeline(run)
    forward, backward = (next(s for s in found.spans if s.phase == phase) for phase in ("forward", "backward"))
    names = [s.name for s in found.slices(forward) if s.stream == "compute" and s.kind == "unit"]
    assert [n for n in names if n.startswith("layer")] == [f"layer {i}" for i in range(run.model.layers)]
    back = [(s.phase, s.name) for s in found.slices(backward) if s.stream == "compute" and s.kind == "unit" and s.name.startswith("layer")]
    assert back == [(phase, f"layer {i}") for i in reversed(range(run.model.layers)) for phase in ("recompute", "backward")]


def test_a_stage_numbers_its_own_layers() -> None:
    run = build_run(params="1B", model={"tied_embeddings": False}, cluster={"gpus": 2}, plan={"pp": 2}, recipe={"grad_accum": 4, "precision": "bf16-pure"})
    found = timeline(run, role=1)
    names = [s.name for s in found.slices(found.spans[1]) if s.stream == "compute" and s.name.startswith("layer")]
    assert names == [f"layer {i}" for i in range(7, 14)]
    assert [s.name for s in found.spans[1:5]] == ["forward 0", "backward 0", "forward 1", "backward 1"], "the last stage's 1F1B"


def test_the_collectives_are_those_of_the_report() -> None:
    run = build_run(params="1B", cluster={"gpus": 8}, plan={"zero": 3})
    found = timeline(run)
    sent = [s for span in found.spans for s in found.slices(span, ops=True) if s.kind == "collective"]
    role = predict(run).roles[0]
    assert role.collectives and role.time
    assert len(sent) == sum(c.count for c in role.collectives)
    assert math.isclose(sum(s.end_s - s.start_s for s in sent), role.time.communication_s["dp_shard"], rel_tol=1e-6)
    assert math.isclose(sum(s.end_s - s.start_s for span in found.spans for s in found.slices(span, ops=True) if s.name == "wait for dp_shard"),
                        role.time.exposed_s["dp_shard"], rel_tol=1e-6)


@pytest.mark.parametrize("plan", [
    {"pp": 4, "schedule": "gpipe"}, {"pp": 4}, {"pp": 4, "schedule": "interleaved", "virtual_stages": 2}, {"pp": 2, "zero": 3},
    {"pp": 2, "zero": 3, "schedule": "zbv"},
    {"pp": 4, "framework": "megatron", "zero": 1, "tp": 2, "sequence_parallel": True, "checkpointing": "full"}])
def test_every_rank_of_a_pipeline_has_a_timeline_within_the_step(plan: dict[str, Any]) -> None:
    run = build_run(model={"base": "llama-3-8b", "layers": 16}, cluster={"gpus": 16}, plan=plan, recipe={"grad_accum": 8, "precision": "bf16-pure"})
    roles = predict(run).roles
    for i, role in enumerate(roles):
        found = timeline(run, role=i)
        assert role.time is not None and found.role == role.role
        assert math.isclose(fixed(run, found.busy_s), role.time.step_s, rel_tol=1e-6)
        assert found.spans[-1].end_s <= found.busy_s * (1 + CLOSE)
        assert all(a.end_s <= b.start_s + CLOSE for a, b in pairwise(found.spans))
        worked = sum(s.end_s - s.start_s for s in found.spans)
        assert found.busy_s - worked >= (role.time.bubble_s or 0.0) - 1e-9, "idle, or waiting for what the last backward sends"


def test_a_router_holds_compute_up_until_the_host_has_read_it() -> None:
    """Megatron's dispatcher: the host comes to where compute is, and compute waits while it reads which rows go where."""
    run = build_run(model="mixtral-8x7b", cluster={"gpu": "h100", "gpus": 8}, plan={"framework": "megatron", "ep": 8}, recipe={"seq_len": 512})
    found = timeline(run)
    forward = next(span for span in found.spans if span.phase == "forward")
    ends = [max(s.end_s for s in found.slices(forward, ops=ops) if s.stream == "compute") for ops in (False, True)]
    assert ends == pytest.approx([forward.end_s] * 2)
