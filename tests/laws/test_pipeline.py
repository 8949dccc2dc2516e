"""Laws of pipeline schedules: more micro-batches never raise the bubble share; no rank does more than the others can feed it."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel import build_run, predict
from costmodel.program.ir import expand
from costmodel.program.schedule import bubble, linear_order, pace, passes, rounds
from costmodel.repricing import program_of

SECONDS = st.integers(1, 50).map(float)
SHAPES = st.tuples(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 8), st.integers(1, 24))


@given(SHAPES, st.data())
def test_more_micro_batches_never_raise_the_bubble_share(shape: tuple[str, int, int], data: st.DataObject) -> None:
    """At a fixed micro-batch and free messages, whatever each stage takes: of every rank, idle time over the whole step."""
    schedule, p, m = shape
    durations = data.draw(st.lists(SECONDS, min_size=2 * p, max_size=2 * p))
    ends = [max(pace(rounds(schedule, p, 1, n), p, n, durations, durations, durations, 0.0)[0]) for n in (m, m + 1)]
    for rank in range(p):
        work = durations[2 * rank] + durations[2 * rank + 1]
        fewer, more = ((end - n * work) / end for end, n in zip(ends, (m, m + 1), strict=True))
        assert more <= fewer + 1e-12


@given(SHAPES, st.data())
def test_a_pipeline_takes_at_least_the_work_of_its_slowest_rank_and_a_pass_through_all(shape: tuple[str, int, int], data: st.DataObject) -> None:
    schedule, p, m = shape
    durations = data.draw(st.lists(SECONDS, min_size=2 * p, max_size=2 * p))
    end = max(pace(rounds(schedule, p, 1, m), p, m, durations, durations, durations, 0.0)[0])
    slowest = max(durations[2 * r] + durations[2 * r + 1] for r in range(p))
    assert max(m * slowest, sum(durations)) <= end <= m * sum(durations)


@given(st.tuples(st.sampled_from([("naive", 1), ("gpipe", 1), ("1f1b", 1), ("interleaved", 2)]), st.integers(2, 6), st.sampled_from([1, 4, 12, 48])),
       st.sampled_from([0.0, 1e-3, 0.7, 9.0]), st.data())
def test_rounds_that_are_skipped_end_as_those_that_are_walked(shape: tuple[tuple[str, int], int, int], transfer: float, data: st.DataObject) -> None:
    """With equal and unequal stages, short and long messages; the first and the last micro-batch take another time."""
    (schedule, v), p, m = shape
    m = m if schedule != "interleaved" else p * m
    seconds = st.lists(st.one_of(SECONDS, st.floats(0.1, 9.0), st.just(2.0)), min_size=2 * p * v, max_size=2 * p * v)
    middle, first, last = (data.draw(seconds) for _ in range(3))
    if data.draw(st.booleans()):
        middle = [middle[0], middle[1]] * (p * v)
    walked, skipped = (pace(rounds(schedule, p, v, m), p, m, middle, first, last, transfer, every=every)[0] for every in (True, False))
    assert skipped == pytest.approx(walked, rel=1e-12)


@given(st.integers(1, 8), st.integers(1, 3), st.tuples(SECONDS, SECONDS, SECONDS))
def test_zb_h1_idles_as_its_paper_says(p: int, turns: int, seconds: tuple[float, float, float]) -> None:
    """Qi et al. 2024 (arXiv 2401.10241), table 1: (p - 1)(F + B - W) where 1F1B idles (p - 1)(F + B + W); B and W the gradients of inputs and weights.
    It holds while W is not the longest of the three."""
    forward, inputs, weights = seconds
    weights = min(weights, max(forward, inputs))
    m, work = turns * p, forward + inputs + weights
    split, whole = (bubble(name, p, 1, m, forward=forward, backward=inputs + weights, weight=weights)[0] * m * work for name in ("zb-h1", "1f1b"))
    assert whole == pytest.approx((p - 1) * work)
    if weights <= min(forward, inputs):
        assert split == pytest.approx((p - 1) * (forward + inputs - weights))
    assert split <= whole + 1e-9


@pytest.mark.parametrize(("schedule", "v"), [("zb-h1", 1), ("interleaved-zb", 2), ("interleaved-zb", 3), ("zbv", 2), ("dualpipev", 2)])
@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_equal_passes_leave_a_third_of_the_bubble_of_one_forward_one_backward(schedule: str, v: int, p: int) -> None:
    """Of the same stages with a whole backward: (p - 1)/(m v) becomes (p - 1)/(3 m v) where F = B = W."""
    m = 3 * p
    assert bubble(schedule, p, v, m)[0] == pytest.approx((p - 1) / (3 * m * v))


@given(st.sampled_from(["zb-h1", "interleaved-zb", "zbv", "dualpipev"]), st.integers(1, 5), st.integers(1, 4), st.data())
def test_a_split_pipeline_takes_at_least_the_work_of_its_slowest_rank(schedule: str, p: int, turns: int, data: st.DataObject) -> None:
    v, m = 1 if schedule == "zb-h1" else 2, turns * 2 * p
    what = passes(schedule, p * v)
    durations = data.draw(st.lists(SECONDS, min_size=len(what), max_size=len(what)))
    steps = linear_order(schedule, p, v, m)
    end = max(pace(rounds(schedule, p, v, m), p, m, durations, durations, durations, 0.0)[0])
    assert end >= max(sum(durations[s.key] for s in steps if s.rank == r) for r in range(p))
    assert end <= sum(durations[s.key] for s in steps)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_share_falls_through_predict_as_well(schedule: str) -> None:
    model = {"layers": 16, "hidden": 1024, "heads": 8, "ffn": 2816, "vocab": 256}
    shares = []
    for m in (4, 8, 16, 32, 64):
        run = build_run(model=model, cluster={"gpus": 4, "gpu": "h100"}, plan={"pp": 4, "schedule": schedule},
                        recipe={"seq_len": 2048, "grad_accum": m, "precision": "bf16-pure"})
        times = [role.time for role in predict(run, scaling=False).roles if role.time]
        shares.append(max(t.bubble_s / t.step_s for t in times))
    assert shares == sorted(shares, reverse=True)


def test_a_predicted_zero_bubble_step_idles_less_than_1f1b() -> None:
    """Of layers alone, at most the paper's third and what unequal passes and messages add."""
    model = {"layers": 16, "hidden": 4096, "heads": 32, "ffn": 16384, "vocab": 128, "gated": False, "tied_embeddings": False}
    idle = {}
    for schedule in ("1f1b", "zb-h1", "zbv"):
        run = build_run(model=model, cluster={"gpus": 4}, plan={"pp": 4, "schedule": schedule},
                        recipe={"grad_accum": 16, "precision": "bf16-pure", "seq_len": 2048})
        times = [role.time for role in predict(run, scaling=False).roles if role.time]
        idle[schedule] = max(t.bubble_s or 0.0 for t in times)
    assert idle["zb-h1"] < 0.55 * idle["1f1b"]
    assert idle["zbv"] < idle["zb-h1"]


@pytest.mark.parametrize("plan", [{"zero": 0}, {"zero": 1}, {"zero": 0, "overlap_grad_reduce": False}, {"zero": 1, "overlap_grad_reduce": False}])
@pytest.mark.parametrize("virtual_stages", [1, 2])
def test_megatron_reduces_the_gradients_of_all_stages_at_once(plan: dict[str, int], virtual_stages: int) -> None:
    """Each stage has sent its gradient on before it waits for its reductions (core/pipeline_parallel/schedules.py calls
    finalize_model_grads last): data parallelism adds the reductions of one rank, not those of all stages one after the other."""
    schedule = {"schedule": "interleaved", "virtual_stages": 2} if virtual_stages == 2 else {}
    model = {"layers": 16, "hidden": 4096, "heads": 32, "ffn": 16384, "vocab": 256, "tied_embeddings": False}
    steps, sent, slower = [], 0.0, 0.0
    for dp in (1, 8):  # in one NVLink domain: messages cross the same link
        run = build_run(model=model, cluster={"gpus": 8 * dp, "gpu": "gb200"}, plan={"framework": "megatron", "pp": 8, **plan, **schedule},
                        recipe={"grad_accum": 16})
        times = [role.time for role in predict(run, scaling=False).roles if role.time]
        steps.append(max(t.step_s - t.breakdown.get("stragglers", 0.0) for t in times))
        sent = max(sum(s for axis, s in t.communication_s.items() if axis.startswith("dp")) for t in times)
        slower = max(t.breakdown.get("contention", 0.0) for t in times)
    assert steps[0] < steps[1] < steps[0] + sent + 8 * slower


@pytest.mark.parametrize(("schedule", "m"), [("zb-h1", 8), ("zb-h1", 3), ("interleaved-zb", 4), ("zbv", 8), ("zbv", 3)])
def test_a_split_backward_under_fsdp_leaves_nothing_behind_and_is_timed(schedule: str, m: int) -> None:
    """Of a reduce dtype that is not the gradients', first passes take up what second passes left: every rank's step allocates and frees the same, and its
    phases sum to it."""
    model = {"layers": 8, "hidden": 256, "heads": 4, "ffn": 512, "vocab": 256}
    stages = {"virtual_stages": 2} if schedule == "interleaved-zb" else {}
    run = build_run(model=model, cluster={"gpus": 8}, plan={"pp": 4, "zero": 3, "schedule": schedule, **stages}, recipe={"seq_len": 128, "grad_accum": m})
    for role, ranks in zip(predict(run, scaling=False).roles, program_of(run).roles, strict=True):
        left = Counter[str]()
        for block in expand(ranks.step):
            for op in block.ops:
                for sign, tensors in ((1, op.allocs), (-1, op.frees)):
                    for t in tensors:
                        left[t.category] += sign * t.nbytes
        assert not any(left.values())
        assert role.time and role.time.step_s == pytest.approx(sum(role.time.phases.values()))
