"""The constants of the profile that a figure rests on, found by changing each a little and predicting again."""

from dataclasses import dataclass

from costmodel.catalog.profiles import ConstantBasis, Profile, load_profile
from costmodel.prediction import predict
from costmodel.report import StepReport
from costmodel.spec import Run

NUDGE = 1e-3
LEAST = 1e-4
"""A figure that moves by less than this part of the nudge does not rest on the constant."""


@dataclass(frozen=True, slots=True)
class Weight:
    """How much one figure of the report rests on one constant."""

    figure: str
    """step_s, reserved_bytes or device_bytes."""
    key: str
    value: float
    unit: str
    basis: ConstantBasis
    source: str
    log_sd: float
    """Standard deviation of the constant's logarithm: 0.1 is 10%."""
    elasticity: float
    """Percent that the figure moves where the constant grows by one percent."""

    @property
    def doubt(self) -> float:
        """What the constant's own uncertainty makes of the figure, as a share of it: one standard deviation."""
        return abs(self.elasticity) * self.log_sd


def constants(run: Run, profile: Profile | str | None = None) -> tuple[Weight, ...]:
    """The constants that the step's time and the reserved and device bytes rest on, the most influential of each first.

    Costs a prediction for each constant of the profile. Whole numbers (tile sizes, alignments, thresholds) do not move by so little, and are
    left out.
    """
    base = profile if isinstance(profile, Profile) else load_profile(run, profile)
    before = _figures(predict(run, base, scaling=False))
    out: list[Weight] = []
    for key, c in sorted(base.constants.items()):
        if not c.value:
            continue
        after = _figures(predict(run, base.replace({key: c.value * (1 + NUDGE)}), scaling=False))
        for figure, value in before.items():
            elasticity = (after[figure] / value - 1) / NUDGE
            if abs(elasticity) > LEAST:
                out.append(Weight(figure, key, c.value, c.unit, c.basis, c.source, c.log_sd, elasticity))
    return tuple(sorted(out, key=lambda w: (list(before).index(w.figure), -abs(w.elasticity))))


def _figures(report: StepReport) -> dict[str, float]:
    memory = report.fullest.memory
    figures = {"step_s": report.step_s, "reserved_bytes": memory and memory.reserved_bytes, "device_bytes": memory and memory.device_bytes}
    return {name: float(value) for name, value in figures.items() if value}
