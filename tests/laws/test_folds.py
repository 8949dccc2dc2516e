"""Folded equals expanded, and a steady step gives back what it takes."""

from collections import Counter

import pytest
from hypothesis import given
from runs import examples, runs
from walks import net, walk_memory, walk_time

from costmodel import Run, build_run
from costmodel.catalog.profiles import load_profile
from costmodel.cost.prices import RunPrices
from costmodel.memory import memory_of
from costmodel.program.build import build
from costmodel.program.ir import block_counts, expand
from costmodel.program.stages import build_pipeline
from costmodel.simulate import Scan, compile_block, seconds, step_time


@examples(80)
@given(runs())
def test_a_steady_step_frees_what_it_allocates_in_every_category(run: Run) -> None:
    for role in build(run).roles:
        assert net(role.step) == {}


@examples(80)
@given(runs())
def test_a_first_step_leaves_gradients_and_optimizer_state_alone(run: Run) -> None:
    for role in build(run).roles:
        assert net(role.first_step).keys() <= {"gradients", "optimizer"}


@examples(80)
@given(runs())
def test_folded_memory_is_that_of_the_walk(run: Run) -> None:
    for role in build(run).roles:
        folded, walked = memory_of(role), walk_memory(role)
        assert (folded.peak.total_bytes, folded.activations) == (walked.peak, walked.activations)
        assert sum(walked.at_peak.values()) == walked.peak


@examples(80)
@given(runs())
def test_nothing_is_freed_that_is_not_there(run: Run) -> None:
    for role in build(run).roles:
        assert walk_memory(role).lowest == {}


@examples(80)
@given(runs())
def test_scanned_time_is_that_of_every_block_run_in_turn(run: Run) -> None:
    prices = RunPrices(run, load_profile(run))
    for role in build(run).roles:
        scanned, walked = step_time(role.step, prices), walk_time(role.step, prices)
        assert scanned.compute == pytest.approx(walked.compute, rel=1e-9)
        assert scanned.comm == pytest.approx(walked.comm, rel=1e-9)
        assert scanned.contention == pytest.approx(walked.contention, rel=1e-8, abs=1e-12)


@examples(60)
@given(runs())
def test_counted_blocks_are_those_of_the_expansion(run: Run) -> None:
    for role in build(run).roles:
        walked = Counter(id(block) for block in expand(role.step))
        assert {id(block): n for block, n in block_counts(role.step)} == walked


@examples(60)
@given(runs())
def test_seconds_of_a_step_are_those_of_every_block_run_in_turn(run: Run) -> None:
    """On one GPU they come from one stretch of kernels."""
    prices = RunPrices(run, load_profile(run))
    for role in build(run).roles:
        assert seconds(role.step, Scan(prices)) == pytest.approx(walk_time(role.step, prices).compute, rel=1e-9)


@examples(40)
@given(runs())
def test_blocks_that_share_their_clocks_do_the_same(run: Run) -> None:
    """Variants that differ in what they free are priced once."""
    prices = RunPrices(run, load_profile(run))
    for role in build(run).roles:
        for block, _ in block_counts(role.step):
            if block.timed is not None:
                assert compile_block(block, prices) == compile_block(block.timed, prices)


def test_a_pipelines_variants_share_their_clocks_and_do_the_same() -> None:
    run = build_run(model="llama-3-8b", cluster={"gpus": 16}, plan={"pp": 4}, recipe={"grad_accum": 8, "precision": "bf16-pure"})
    prices, shared = RunPrices(run, load_profile(run)), 0
    for rank in build_pipeline(run).pipeline:
        for block, _ in block_counts(rank.parts):
            if block.timed is not None:
                shared += 1
                assert compile_block(block, prices) == compile_block(block.timed, prices)
    assert shared
