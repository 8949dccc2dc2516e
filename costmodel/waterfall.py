"""The MFU waterfall: where a step's seconds go, from the peak of the data sheet down to what is achieved.

The first bar is the time that the model's FLOPs would take at the dense peak; every other bar is what one cause adds to it, and all of
them sum to the step. Each share of the step is as many points of MFU lost, for MFU is the first bar's share. The bars are of the mean
GPU of the job: work that is uneven over ranks is averaged, and the wait for the slowest is a bar of its own.
"""

from dataclasses import asdict, dataclass
from typing import Any

from costmodel.catalog.profiles import Profile, load_profile
from costmodel.cost.compute import matmul_rates
from costmodel.cost.prices import AXIS_ORDER, EMBEDDING_AXIS, EXPERT_AXIS, EXPERT_TENSOR_AXIS, REPLICA_AXIS
from costmodel.program.ir import COPIES
from costmodel.program.parallel.expert import ExpertParallel
from costmodel.program.schedule import bubble
from costmodel.report import RoleReport, StepReport, TimeReport
from costmodel.spec import PlanError, Run

IDEAL, UNEXPLAINED = "model FLOPs at peak", "unexplained"
MEANINGS = {
    IDEAL: "what the model needs, at the dense peak of the data sheet",
    "matmul rate": "matmuls: the rate a GPU sustains is below its data sheet",
    "matmul shapes": "matmuls: tiles, small dims, bytes and launches of these shapes",
    "rows of experts": "rows that experts compute beyond k of each token: empty slots, rounding",
    "attention kernel": "attention kernels below the peak",
    "attention counted": "attention FLOPs that run, less those counted: MFU counts the causal half that kernels skip",
    "memory-bound": "norms, activations, residuals, casts, loss: bytes, not FLOPs",
    "cpu": "the CPU adds gradients up in host memory, and the GPU waits",
    "host wait": "the GPU waits for the host to launch",
    "recompute": "activations computed again in backward",
    "contention": "kernels slowed by communication that they hide",
    "bubble": "pipeline ranks idle because of the schedule",
    "uneven ranks": "waiting for the rank with more work, and for transfers",
    "optimizer": "the update, clipping included",
    "stragglers": "the slowest of many ranks",
    "slow rank": "waiting for the rank that computes slower (cluster.slow_rank)",
    "fixed": "outside the kernels of a step: data, logging",
    UNEXPLAINED: "measured, less what is predicted"}
"""Every bar, in order; communication that compute waits for stands before contention, by axis."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One part of the step."""

    name: str
    meaning: str
    seconds: float
    """Negative where it makes the step shorter."""
    share: float
    """Of the step: as many points of MFU."""
    left: float
    """MFU that is left after this bar and those above it."""
    without: float
    """MFU of a step without this bar."""


@dataclass(frozen=True, slots=True)
class Waterfall:
    """The bars of a step; the first is the model's FLOPs at peak, and all sum to `step_s`."""

    step_s: float
    """The measured step where one was given, else the predicted."""
    predicted_s: float
    measured_s: float | None
    peak_flops_per_s: float
    bars: tuple[Bar, ...]

    @property
    def ideal_s(self) -> float:
        """Seconds of the model's FLOPs at peak."""
        return self.bars[0].seconds

    @property
    def mfu(self) -> float:
        return self.ideal_s / self.step_s

    def to_dict(self) -> dict[str, Any]:
        """Plain data with stable keys (docs/report.md)."""
        return {**asdict(self), "ideal_s": self.ideal_s, "mfu": self.mfu}


def waterfall(run: Run, report: StepReport, profile: Profile | str | None = None, measured_s: float | None = None) -> Waterfall:
    """The bars of a predicted step, and of a measured one with what the prediction leaves unexplained.

    `profile` tells the sustained matmul rate; None takes the shipped one. Raises PlanError where the report has no times or peak, or the
    measured step is not positive, or beyond the peak.
    """
    if measured_s is not None and not measured_s > 0:
        raise PlanError("measured", measured_s, "a step takes more than 0 seconds.", "Use measured = 2.84s.")
    parts = seconds_by_cause(run, report, profile)
    predicted = sum(parts.values())
    if measured_s is not None:
        parts[UNEXPLAINED] = measured_s - predicted
    step = predicted if measured_s is None else measured_s
    ideal, gone = parts[IDEAL], 0.0
    if measured_s is not None and ideal > measured_s:
        raise PlanError("measured", f"{measured_s:g} s", f"that is {100 * ideal / measured_s:.0f}% of the peak of {run.cluster.accelerator.name}, and no step "
                        "is above 100%.", "Check the GPU, the precision, and that the tokens are those of one step of all ranks.")
    bars = []
    for name, seconds in parts.items():
        gone += 0.0 if name == IDEAL else seconds
        rest = step - seconds
        without = 1.0 if name == IDEAL or rest <= 0 else ideal / rest
        bars.append(Bar(name, meaning(name), seconds, seconds / step, 1 - gone / step, without))
    peak = report.peak_flops_per_s
    assert peak is not None
    return Waterfall(step, predicted, measured_s, peak, tuple(bars))


def meaning(name: str) -> str:
    """A bar in words."""
    axis = name.removeprefix("exposed ")
    if axis in COPIES:
        return f"compute waits for copies {'from' if axis == COPIES[0] else 'to'} host memory"
    return MEANINGS[name] if axis == name else f"compute waits for communication over {axis}"


def seconds_by_cause(run: Run, report: StepReport, profile: Profile | str | None = None) -> dict[str, float]:
    """Seconds of the mean GPU by bar, in the order of the waterfall; they sum to the step. A bar of 0 is left out, the ideal never.

    Matmuls: rate = FLOPs / sustained - FLOPs / peak, shapes = time - FLOPs / sustained. Attention: time - FLOPs run / peak, and
    (FLOPs run - FLOPs counted) / peak. The schedule's bubble is that of equal stages with the mean work; what is beyond it is unevenness.
    """
    timed = [(role, role.time) for role in report.roles if role.time]
    peak, step = report.peak_flops_per_s, report.step_s
    if not timed or not peak or not step or not report.model_flops:
        raise PlanError("report", report.provenance, "a waterfall needs times, FLOPs and the peak of the device.", "Use a prediction of a GPU.")
    mean = _mean(timed)
    flops = _mean_flops(timed)
    ideal = report.model_flops / report.world_size / peak
    matmul, attention = flops.get("matmul", 0.0), flops.get("attention", 0.0)
    constants = profile if isinstance(profile, Profile) else load_profile(run, profile)
    sustained = matmul_rates(run.cluster.accelerator, constants, run.recipe.precision)[run.recipe.precision.compute]
    idle = mean.pop("bubble", 0.0)
    scheduled = min(idle, _schedule_bubble(run, timed))
    padded = _padded_flops(run)
    out = {IDEAL: ideal, "matmul rate": matmul / sustained - matmul / peak, "matmul shapes": mean.pop("matmul", 0.0) - matmul / sustained,
           "rows of experts": padded / peak, "attention kernel": mean.pop("attention", 0.0) - attention / peak,
           "attention counted": (matmul - padded + attention) / peak - ideal}
    exposed = [f"exposed {axis}" for axis in (*AXIS_ORDER, EXPERT_AXIS, REPLICA_AXIS, EXPERT_TENSOR_AXIS, EMBEDDING_AXIS, *COPIES)]
    mean |= {"bubble": scheduled, "uneven ranks": idle - scheduled + step - _over_ranks(timed, [t.step_s for _, t in timed])}
    names = ["memory-bound", "host wait", "cpu", "recompute", *exposed, "contention", "bubble", "uneven ranks", "optimizer", "stragglers", "slow rank", "fixed"]
    out |= {name: mean.get(name, 0.0) for name in names}
    assert set(mean) <= set(names), f"parts of the step without a bar: {set(mean) - set(names)}"
    negligible = 1e-12 * step
    return {name: seconds for name, seconds in out.items() if name == IDEAL or abs(seconds) > negligible}


Timed = list[tuple[RoleReport, TimeReport]]


def _over_ranks(timed: Timed, values: list[float]) -> float:
    """The mean over ranks of a figure of each role."""
    ranks = sum(role.ranks for role, _ in timed)
    return sum(role.ranks * value for (role, _), value in zip(timed, values, strict=True)) / ranks


def _mean(timed: Timed) -> dict[str, float]:
    """The breakdown of the mean GPU."""
    names = dict.fromkeys(name for _, time in timed for name in time.breakdown)
    return {name: _over_ranks(timed, [time.breakdown.get(name, 0.0) for _, time in timed]) for name in names}


def _mean_flops(timed: Timed) -> dict[str, float]:
    names = dict.fromkeys(name for _, time in timed for name in time.flops or {})
    return {name: _over_ranks(timed, [(time.flops or {}).get(name, 0.0) for _, time in timed]) for name in names}


def _padded_flops(run: Run) -> float:
    """FLOPs of a step of the mean rank on rows that are no token's: experts' slots that stay empty, shares rounded up."""
    m, r, p = run.model, run.recipe, run.plan
    if m.moe is None:
        return 0.0
    routed = r.micro_batch * (r.seq_len // p.cp) // p.tp * m.moe.top_k
    busiest, others = (ExpertParallel(run, busiest=which).received(routed) for which in (True, False))
    rows = (busiest + (p.ep - 1) * others) / p.ep if p.pp == 1 and r.moe_imbalance > 1 else busiest
    matrices = 3 if m.gated else 2
    return 6.0 * (rows - routed) * matrices * m.hidden * m.moe.expert_ffn * m.layers / p.pp * run.micro_batches


def _schedule_bubble(run: Run, timed: Timed) -> float:
    """Idle seconds of a rank in the same schedule, were all stages alike: the mean forward and backward, transfers free."""
    p = run.plan
    if p.pp == 1:
        return 0.0
    forward, backward = (_over_ranks(timed, [sum(t.phases.get(name, 0.0) for name in names) for _, t in timed])
                         for names in (("forward",), ("recompute", "backward")))
    over_ideal, _ = bubble(p.schedule, p.pp, p.virtual_stages, run.micro_batches, forward=forward, backward=backward)
    return over_ideal * (forward + backward)
