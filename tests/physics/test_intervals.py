"""Intervals of a prediction: against drawing every constant many times, which is what they stand for."""

import math
import random

import pytest

from costmodel import build_run, predict
from costmodel.catalog.profiles import Profile, load_profile
from costmodel.repricing import NINE_IN_TEN, program_of, step_seconds
from costmodel.spec import Run

RUNS = {"compute": {"params": "1B", "cluster": {"gpus": 1}}, "sharded": {"params": "1B", "cluster": {"gpus": 16}, "plan": {"zero": 3}},
        "pipeline": {"params": "1B", "cluster": {"gpus": 4}, "plan": {"pp": 4, "framework": "megatron"}, "recipe": {"grad_accum": 8}},
        "host": {"params": "100M", "cluster": {"gpus": 1}, "recipe": {"seq_len": 256}}}
UNREAD = ("memory.", "moe.", "cp.", "host.memory_", "host.thread_", "copy.pageable_")
"""Constants of what these runs have not: experts, context parallelism, state in host memory."""
STRUCTURE = ("matmul.tile", "matmul.split_k", "attention.q_tile")
"""Whole numbers of a kernel's build, which no interval moves."""


@pytest.fixture(params=RUNS)
def run(request: pytest.FixtureRequest) -> Run:
    return build_run(**RUNS[request.param])


def without_spread(profile: Profile) -> Profile:
    quiet = profile.replace({key: c._replace(log_sd=0.0) for key, c in profile.constants.items()})
    return quiet.replace({"scatter.time": 0.0})


def test_a_program_priced_again_takes_what_predict_says(run: Run) -> None:
    profile = load_profile(run)
    assert step_seconds(run, program_of(run), profile) == pytest.approx(predict(run, scaling=False).step_s, rel=1e-9)


def test_a_profile_without_uncertainty_gives_no_interval_of_time(run: Run) -> None:
    report = predict(run, without_spread(load_profile(run)), scaling=False, intervals=True)
    assert report.interval is None


def test_scatter_alone_gives_its_own_quantiles(run: Run) -> None:
    """exp(±1.2816 x 0.1) about the prediction."""
    report = predict(run, without_spread(load_profile(run)).replace({"scatter.time": 0.1}), scaling=False, intervals=True)
    assert report.interval and report.step_s
    low, high = report.interval["step_s"]
    assert (low / report.step_s, high / report.step_s) == pytest.approx((math.exp(-0.12816), math.exp(0.12816)), rel=1e-3)


def test_the_interval_is_about_that_of_drawn_constants(run: Run) -> None:
    """200 draws of every uncertain constant: their spread is the interval's, within a third."""
    profile = load_profile(run).replace({"scatter.time": 0.0})
    program, draw = program_of(run), random.Random(4)
    moving = {key: c for key, c in profile.constants.items() if c.log_sd > 0 and not key.startswith(UNREAD) and key not in STRUCTURE}
    times = []
    for _ in range(200):
        drawn = {key: c.value * math.exp(c.log_sd * draw.gauss(0, 1)) for key, c in moving.items()}
        times.append(math.log(step_seconds(run, program, profile.replace(drawn))))
    times.sort()
    spread = (times[180] - times[20]) / 2 / NINE_IN_TEN
    report = predict(run, profile, scaling=False, intervals=True)
    assert report.interval
    low, high = report.interval["step_s"]
    assert math.log(high / low) / 2 / NINE_IN_TEN == pytest.approx(spread, rel=0.35)


def test_memory_has_intervals_where_the_allocator_does() -> None:
    report = predict(build_run(params="1B", cluster={"gpus": 8}, plan={"zero": 3}), intervals=True)
    memory = report.fullest.memory
    assert report.interval and memory and memory.reserved_bytes and memory.device_bytes
    for name, value in (("reserved_bytes", memory.reserved_bytes), ("device_bytes", memory.device_bytes)):
        low, high = report.interval[name]
        assert low < value < high
