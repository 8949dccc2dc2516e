"""The fit against known truth: records made from known constants plus noise must give the constants back."""

import math

import numpy as np
import pytest

from calibrate.crossvalidation import groups_of, hold_out
from calibrate.evidence import DirectEvidence, Point, StepEvidence, step_evidence
from calibrate.fit import Fit, FitError, Parameter, candidates, fit, parameter
from costmodel import build_run
from costmodel.catalog.profiles import Constant, Profile, load_profile

TRUTH = {"matmul.bf16.peak_share": 0.94, "bandwidth.share": 1.05, "attention.fa2.share": 0.9, "host.multiplier": 1.4}
"""Factor of each constant over the shipped one: within two standard deviations of its prior."""


def steps(count: int, noise: float, seed: int) -> list[StepEvidence]:
    """Steps of small and large models on one H100, timed by a machine whose constants are TRUTH."""
    draw = np.random.default_rng(seed)
    out = []
    for i in range(count):
        hidden = (256, 512, 1024, 2048, 4096)[i % 5]
        run = build_run(model={"layers": 2 + i % 3, "hidden": hidden, "heads": hidden // 64, "ffn": 4 * hidden, "vocab": 32000},
                        cluster={"gpu": "h100", "gpus": 1}, plan={"checkpointing": ("none", "full")[i % 2]},
                        recipe={"seq_len": (512, 2048, 8192)[i % 3], "micro_batch": 1 + i % 4, "attention": "fa2"})
        profile = load_profile(run)
        truth = profile.replace({key: profile.value(key) * factor for key, factor in TRUTH.items()})
        name = f"run {i}"
        item = step_evidence(run, profile, [Point(name, "made", "time", 1.0, noise, model=f"h{hidden}", cluster="h100", twin=name)])
        seconds = math.exp(item.log_predicted(truth)[0] + noise * draw.standard_normal())
        out.append(StepEvidence(run, profile, (Point(name, "made", "time", seconds, noise, f"h{hidden}", "h100", name),), item.program))
    return out


def chosen(evidence: list[StepEvidence], *extra: str) -> tuple[Parameter, ...]:
    return tuple(p for p in candidates(evidence) if p.key in (*TRUTH, *extra))


@pytest.fixture(scope="module")
def answer() -> Fit:
    evidence = steps(60, 0.05, seed=1)
    return fit(evidence, chosen(evidence, "copy.share", "attention.sdpa.share"))


def test_known_constants_come_back_within_three_standard_errors(answer: Fit) -> None:
    found = {f.parameter.key: f for f in answer.determined}
    assert set(found) == set(TRUTH)
    for key, factor in TRUTH.items():
        off = math.log(found[key].value / found[key].parameter.base.value / factor)
        assert abs(off) < 3 * found[key].log_sd
        assert found[key].log_sd < found[key].parameter.prior


def test_constants_that_no_record_bears_on_stay_at_their_prior(answer: Fit) -> None:
    held = {f.parameter.key: f for f in answer.found if not f.determined}
    assert set(held) == {"copy.share", "attention.sdpa.share"}
    for f in held.values():
        assert f.value == f.parameter.base.value
        assert f.log_sd == f.parameter.prior


def test_the_scatter_of_the_records_is_found(answer: Fit) -> None:
    assert answer.scatter["made"] == pytest.approx(0.05, rel=0.35)


def test_records_left_out_are_predicted_about_as_well_as_the_noise(answer: Fit) -> None:
    held = hold_out(answer, "model")
    assert held.groups == 5
    assert float(np.abs(held.residuals).mean()) < 0.06
    assert float(np.abs(answer.before).mean()) > 0.08


def test_one_sided_outliers_move_no_constant_by_two_standard_errors() -> None:
    evidence = steps(200, 0.05, seed=2)
    clean = fit(evidence, chosen(evidence))
    worse = []
    for i, item in enumerate(evidence):
        point = item.points[0]
        slow = Point(point.name, point.source, point.figure, point.measured * math.exp(20 * 0.05), point.noise, point.model, point.cluster, point.twin)
        worse.append(StepEvidence(item.run, item.profile, (slow,), item.program) if i % 10 == 3 else item)
    dirty = fit(worse, chosen(evidence))
    assert {f.parameter.key for f in dirty.determined} == set(TRUTH)
    for a, b in zip(clean.determined, dirty.determined, strict=True):
        assert a.parameter == b.parameter
        assert abs(math.log(b.value / a.value)) < 2 * a.log_sd


def test_two_constants_of_which_only_the_product_shows_are_told_apart_from_free_ones() -> None:
    """One host: its multiplier and the launch time scale the same seconds, so one of them stands for both."""
    evidence = steps(40, 0.03, seed=3)
    names = ("host.multiplier", "host.eager.forward_s", "host.eager.backward_s", "host.eager.recompute_s")
    answer = fit(evidence, [p for p in candidates(evidence) if p.key in names])
    held = [f for f in answer.found if not f.determined and f.with_]
    assert held
    assert all(f.log_sd < f.parameter.prior for f in held)


def direct(values: list[float]) -> DirectEvidence:
    profile = Profile("made", False, {"x": Constant(1.0, "s", 0.5, "made", "assumed", place="hosts.made")})
    points = tuple(Point(str(i), "made", "time", v, 0.1) for i, v in enumerate(values))
    return DirectEvidence(profile, points, ("x",) * len(values))


def test_the_posterior_of_a_mean_is_the_textbook_s() -> None:
    """n measurements of one constant with known scatter: mean and standard error of a normal with a normal prior."""
    draw = np.random.default_rng(5)
    logs = 0.2 + 0.1 * draw.standard_normal(400)
    answer = fit([direct([math.exp(v) for v in logs])])
    found = answer.determined[0]
    shrunk = logs.mean() * 400 / 0.01 / (400 / 0.01 + 1 / 0.25)
    assert math.log(found.value) == pytest.approx(shrunk, abs=0.004)
    assert found.log_sd == pytest.approx(0.1 / 20, rel=0.2)


def test_one_publisher_s_bias_stays_its_own() -> None:
    """400 figures of one source, all a fifth off: with sources a tenth apart, the constant is known to a tenth and not to a two-hundredth.

    Textbook: prior variance 0.25 and a measurement of variance 0.01 (+ 0.01 / 400).
    """
    draw = np.random.default_rng(6)
    answer = fit([direct([math.exp(0.2 + 0.1 * z) for z in draw.standard_normal(400)])], apart=0.1)
    found = answer.determined[0]
    assert found.log_sd == pytest.approx((1 / (1 / 0.25 + 1 / 0.010025)) ** 0.5, rel=0.1)
    assert math.log(found.value) == pytest.approx(0.2 * 0.25 / 0.26, abs=0.01)
    assert answer.scatter["made"] == pytest.approx(0.1, rel=0.2)


def test_fewer_records_than_a_fit_needs_are_refused() -> None:
    with pytest.raises(FitError, match="2 independent measurements: a fit needs 3 or more"):
        fit([direct([1.0, 1.1])])


def test_a_constant_asked_for_that_the_records_do_not_determine_is_refused(answer: Fit) -> None:
    evidence = list(answer.model.evidence)
    wanted = [p for p in candidates(evidence) if p.key in ("copy.share", "bandwidth.share")]
    with pytest.raises(FitError, match=r"do not determine hardware.common: copy.share"):
        fit(evidence, wanted, required=wanted)


def test_twins_are_never_parted() -> None:
    points = [Point("a", "one", "time", 1, 0.1, model="m", twin="t"), Point("b", "two", "time", 1, 0.1, model="n", twin="t"),
              Point("c", "two", "time", 1, 0.1, model="n", twin="u"), Point("d", "three", "time", 1, 0.1, model="o", twin="v")]
    assert groups_of(points, "source") == [0, 0, 0, 1]
    assert groups_of(points, "twin") == [0, 0, 1, 2]


def test_a_share_cannot_exceed_one() -> None:
    p = parameter("bandwidth.share", Constant(0.9, "share", 0.5, "made", "assumed", place="hardware.made"))
    assert 0.9 * math.exp(p.high) == pytest.approx(1.0)
