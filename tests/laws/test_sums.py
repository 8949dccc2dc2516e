"""Totals are the sums of their parts, figures are finite and within the limits of the device, for every legal run."""

import json
import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from runs import examples, runs

from costmodel import Run, predict
from costmodel.catalog.profiles import load_profile
from costmodel.cost.prices import RunPrices
from costmodel.program.ir import COPIES, block_counts
from costmodel.report import report_from_dict
from costmodel.repricing import program_of
from costmodel.simulate import SIDE, Scan


@examples(80)
@given(runs())
def test_the_parts_of_every_peak_sum_to_it(run: Run) -> None:
    for role in predict(run, scaling=False).roles:
        m = role.memory
        assert m is not None
        for peak in (m.allocated, *m.phases.values()):
            assert sum(peak.by_category.values()) == peak.total_bytes
            assert all(n > 0 for n in peak.by_category.values())
        assert all(n >= 0 for n in m.states.values())
        assert sum(m.states.values()) <= m.allocated.total_bytes
        assert m.allocated.total_bytes == max(p.total_bytes for p in m.phases.values())
        assert m.activations_bytes is not None and 0 <= m.activations_bytes <= m.allocated.total_bytes


@examples(80)
@given(runs())
def test_the_parts_of_the_step_sum_to_it(run: Run) -> None:
    report = predict(run, scaling=False)
    assert sum(role.ranks for role in report.roles) == report.world_size == run.cluster.gpus
    assert all(0 <= role.example_rank < report.world_size for role in report.roles)
    for role in report.roles:
        t = role.time
        if t is None:  # of several roles, only the slowest (the first) is timed
            assert role is not report.roles[0]
            continue
        assert math.isclose(sum(t.breakdown.values()), t.step_s, rel_tol=1e-9)
        assert math.isclose(sum(t.phases.values()), t.step_s, rel_tol=1e-9)
        assert min(t.breakdown.values()) > 0
        for axis, seconds in t.communication_s.items():
            assert axis in COPIES or math.isclose(sum(c.total_s or 0.0 for c in role.collectives or () if c.axis == axis), seconds, rel_tol=1e-6)


@examples(80)
@given(runs())
def test_no_more_is_waited_for_than_the_streams_of_communication_do(run: Run) -> None:
    """Casts and copies of shards run on the stream of their axis and count, and so does the host's time to issue: a wait for the last of
    several collectives contains the gaps between them, and one for a gather or a reduction also the copies from and to host memory that its
    stream waits for. Megatron's parameter gathers that outlive the step are left out (test_known.py)."""
    if run.plan.framework == "megatron" and run.plan.overlap_param_gather:
        return
    program = program_of(run)
    steps = [rank.parts for rank in program.pipeline] if run.plan.pp > 1 else [role.step for role in program.roles]
    scan = Scan(RunPrices(run, load_profile(run)))
    for role, step in zip(predict(run, scaling=False).roles, steps, strict=True):
        if role.time:
            beside: Counter[str] = Counter()
            for block, times in block_counts(step, {}):
                for code, host, seconds, _, axis, *_ in scan.of(block).steps:
                    beside[axis] += times * (seconds if code == SIDE else host)
            copies = sum(role.time.communication_s.get(name, 0.0) for name in COPIES)
            for axis, seconds in role.time.exposed_s.items():
                assert seconds <= (role.time.communication_s.get(axis, 0.0) + beside[axis] + copies) * (1 + 1e-6) + 1e-9


@examples(80)
@given(runs())
def test_allocated_is_within_reserved_and_reserved_within_the_device_total(run: Run) -> None:
    for role in predict(run, scaling=False).roles:
        m = role.memory
        assert m is not None and m.capacity_bytes is not None
        if m.device_bytes is not None:
            assert m.reserved_bytes is not None
            assert m.allocated.total_bytes <= m.reserved_bytes
            assert m.device_bytes == m.reserved_bytes + sum(m.outside.values())
            assert m.headroom_bytes == m.capacity_bytes - m.device_bytes


@examples(80)
@given(runs())
def test_no_step_beats_the_arithmetic_of_its_gpus(run: Run) -> None:
    """Model FLOPs over the dense peak of every GPU; attention's square may be half skipped where it is causal."""
    report = predict(run)
    assert report.step_s is not None and report.model_flops is not None and report.hardware_flops is not None
    assert report.peak_flops_per_s is not None
    done = report.model_flops * (0.5 if run.recipe.causal else 1.0)
    assert math.isfinite(report.step_s)
    assert report.step_s > done / report.world_size / report.peak_flops_per_s
    assert report.hardware_flops >= report.model_flops > 0
    assert report.tokens_per_step == run.recipe.micro_batch * run.recipe.grad_accum * run.plan.dp * run.recipe.seq_len
    assert report.scaling is not None and report.scaling.weak is not None and report.scaling.strong is not None
    assert 0 < report.scaling.weak < math.inf and 0 < report.scaling.strong < math.inf


@examples(80)
@given(runs())
def test_replicas_never_beat_one_gpu(run: Run) -> None:
    """Sharded state may: the optimizer's work is split too, and a flat shard is one tensor where one GPU updates many."""
    p = run.plan
    if p.framework == "pytorch" and p.zero == 0 and p.tp * p.pp * p.cp == 1:
        scaling = predict(run).scaling
        assert scaling is not None and scaling.weak is not None and scaling.strong is not None
        assert scaling.weak <= 1 + 1e-9 and scaling.strong <= 1 + 1e-9


@examples(60)
@given(runs())
def test_a_report_survives_its_dict_and_json(run: Run) -> None:
    report = predict(run)
    data = json.loads(json.dumps(report.to_dict()))
    assert report_from_dict(data) == report
    assert report_from_dict(data).to_dict() == report.to_dict()


@examples(60)
@given(runs(st.just(1)))
def test_one_gpu_sends_nothing(run: Run) -> None:
    """Buckets and casts of a wrapper may remain; a group of one moves no byte and takes no time on the wire."""
    for role in predict(run, scaling=False).roles:
        assert all(c.group == 1 and not c.total_s for c in role.collectives or ())
        assert role.time is not None and role.time.communication_s.keys() <= set(COPIES)


@examples(60)
@given(runs())
def test_a_prediction_is_a_function_of_its_run(run: Run) -> None:
    assert predict(run) == predict(Run.model_validate(run.model_dump()))
