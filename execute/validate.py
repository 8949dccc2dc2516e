"""Predicted against dry run against measured: bytes by category, collectives, time; what is outside its tolerance is named."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from costmodel.catalog.machines import Machine, differences
from costmodel.catalog.profiles import load_profile
from costmodel.prediction import predict
from costmodel.records import Outcome
from costmodel.render.units import duration, size
from costmodel.report import RoleReport, StepReport
from costmodel.spec import Run
from execute.compare import Comparison, compare
from execute.suite import Case
from execute.support import Mode

TIME_TOLERANCE = 0.25
"""Of a step, where the machine's constants were fitted on it."""
HALF = 0.5
Observe = Callable[[Run], tuple[Outcome, dict[int, RoleReport]]]
"""Performs a run for real: how it ended, and what its ranks saw."""


@dataclass(frozen=True, slots=True)
class Side:
    """One role as predicted, and as one way of performing it saw it."""

    role: str
    comparison: Comparison


@dataclass(frozen=True, slots=True)
class Checked:
    """A case with all its comparisons."""

    name: str
    run: Run
    outcome: Outcome
    sides: tuple[Side, ...]
    time_judged: bool

    def outside(self) -> Iterator[str]:
        """Every row that is outside its tolerance, in words."""
        for side in self.sides:
            c = side.comparison
            where = f"{self.name}: {side.role}, {c.observed}"
            for r in c.rows:
                if not r.within:
                    yield f"{where}: {r.name}: predicted {r.predicted:,} bytes, seen {r.observed:,} ({r.difference:+.2%})"
            for title, odd in (("not predicted", c.missing), ("not seen", c.surplus)):
                for (axis, kind, group, nbytes, dtype), n in odd.items():
                    yield f"{where}: {title}: {n} x {kind} over {axis} ({group} ranks), {nbytes:,} bytes, {dtype}"
            for s in c.seconds:
                if self.time_judged and abs(s.predicted / s.observed - 1) > TIME_TOLERANCE:
                    yield f"{where}: {s.name}: predicted {s.predicted * 1e3:.2f} ms, took {s.observed * 1e3:.2f} ms ({s.predicted / s.observed - 1:+.1%})"

    def lines(self) -> Iterator[str]:
        """The name, and a line for each role and way of performing it; a line is at most 80 wide."""
        yield self.name
        for side in self.sides:
            c = side.comparison
            peak = c.row("peak")
            states = "equal" if all(r.within for r in c.rows if r.tolerance == 0.0) else "differ"
            sent = "not seen" if not c.collectives else "equal" if not c.missing and not c.surplus else "differ"
            yield (f"  {side.role:<16} {c.observed:<7} {states:<6} {size(peak.predicted):>10} {size(peak.observed):>10} {peak.difference:>+7.2%}  "
                   f"{sent}").rstrip()
            for s in c.seconds:
                yield f"  {'':<16} {'':<7} {'time':<6} {duration(s.predicted):>10} {duration(s.observed):>10} {s.predicted / s.observed - 1:>+7.0%}"

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "run": self.run.model_dump(mode="json"), "outcome": self.outcome.kind, "message": self.outcome.message,
                "roles": [{"role": side.role, "against": side.comparison.observed, **side.comparison.to_dict()} for side in self.sides],
                "time_judged": self.time_judged, "outside": list(self.outside())}


HEADER = (f"{'':<26} {'':<6} {'peak,':>10} {'peak,':>10}\n"
          f"  {'role':<16} {'seen in':<7} {'states':<6} {'predicted':>10} {'seen':>10} {'off':>7}  messages")


def check(case: Case, mode: Mode, profile: str | None, observe: Observe) -> Checked:
    """Predict a case, dry-run every role's example rank, perform it as the mode says, and compare."""
    from execute.dryrun import dry_run
    from execute.support import dry_runs
    predicted = predict(case.run, profile)
    outcome, seen = (Outcome(), {}) if mode == "dryrun" else observe(case.run)
    sides = []
    for role in predicted.roles:
        rank = role.example_rank
        if dry_runs(case.run):
            sides.append(Side(role.role, compare(predicted, dry_run(case.run, rank))))
        if rank in seen:
            sides.append(Side(role.role, compare(predicted, alone(seen[rank], mode, case.run, slowest(seen)))))
    return Checked(case.name, case.run, outcome, tuple(sides), profile is not None and Path(profile).suffix == ".toml")


def unlike(cases: Iterable[Case], profile: str | None) -> list[str]:
    """Why times that are judged by a profile of one's own may not be this machine's, in words."""
    if profile is None or Path(profile).suffix != ".toml":
        return []
    from execute.observe.environment import environment
    runs, seen = [case.run for case in cases], environment()
    here = Machine(seen.host, seen.accelerator, torch=seen.versions["torch"])
    return [f"{profile}: {words}" for words in differences(load_profile(runs[0], profile).machines, here, (run.cluster.accelerator.name for run in runs))]


def check_predictable(cases: Iterable[Case], profile: str | None) -> None:
    """Raise PlanError where a case cannot be predicted with some constants."""
    for case in cases:
        predict(case.run, profile, scaling=False)


def alone(rank: RoleReport, mode: Mode, run: Run, step_s: float | None) -> StepReport:
    """One rank's report; a job's step takes as long as its slowest rank's."""
    if rank.time is not None and step_s is not None:
        rank = replace(rank, time=replace(rank.time, step_s=step_s))
    return StepReport(mode, (rank,), run.plan.world_size, run.tokens_per_step)


def slowest(seen: dict[int, RoleReport]) -> float | None:
    return max((r.time.step_s for r in seen.values() if r.time is not None), default=None)


def fits(run: Run) -> bool:
    """Whether a run is predicted to take no more than half of its device's memory."""
    memory = predict(run, scaling=False).fullest.memory
    return memory is not None and memory.capacity_bytes is not None and memory.allocated.total_bytes <= HALF * memory.capacity_bytes
