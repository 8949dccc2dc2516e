"""The constants of the profile that a figure rests on, found by changing each a little and predicting again."""

from dataclasses import dataclass

from costmodel.catalog.profiles import ConstantBasis, Profile, load_profile
from costmodel.prediction import predict
from costmodel.repricing import program_of, step_seconds
from costmodel.spec import Run

FIGURES = ("step_s", "reserved_bytes", "device_bytes")
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

    The program is built once and priced again for each constant of the profile. Whole numbers (tile sizes, alignments, thresholds) do not
    move by so little, and are left out.
    """
    base = profile if isinstance(profile, Profile) else load_profile(run, profile)
    program = program_of(run)

    def figures(p: Profile, of_memory: bool) -> dict[str, float]:
        if not of_memory and run.cluster.slow_rank == 1:
            return {"step_s": step_seconds(run, program, p)}
        report = predict(run, p, scaling=False, intervals=False)
        memory = report.fullest.memory
        found = {"reserved_bytes": memory and memory.reserved_bytes, "device_bytes": memory and memory.device_bytes} if of_memory else {"step_s": report.step_s}
        return {name: float(value) for name, value in found.items() if value}

    before = {of_memory: figures(base, of_memory) for of_memory in (False, True)}
    out: list[Weight] = []
    for key, c in sorted(base.constants.items()):
        if not c.value:
            continue
        of_memory = key.startswith("memory.")
        after = figures(base.replace({key: c.value * (1 + NUDGE)}), of_memory)
        for figure, value in before[of_memory].items():
            elasticity = (after[figure] / value - 1) / NUDGE
            if abs(elasticity) > LEAST:
                out.append(Weight(figure, key, c.value, c.unit, c.basis, c.source, c.log_sd, elasticity))
    return tuple(sorted(out, key=lambda w: (FIGURES.index(w.figure), -abs(w.elasticity))))
