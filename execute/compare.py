"""Two reports of the same run, side by side: a prediction against a dry run or a measurement. What was not observed is not compared."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from typing import Any, NamedTuple

from costmodel.report import CATEGORIES, Collective, Provenance, RoleReport, StepReport

EXACT = ("parameters", "gradients", "master_weights", "optimizer")
TOLERANCE = 0.05
"""For the peak and for activations alone."""
CollectiveKey = tuple[str, str, int, int, str]
SEEN_IN: dict[Provenance, str] = {"dryrun": "dry run", "solo": "solo", "run": "measured", "published": "published"}
NOT_ALONE = ("bubble", "contention", "stragglers")
"""What a rank does not lose that is alone on its device."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of both."""

    name: str
    predicted: int
    observed: int
    tolerance: float | None
    """Allowed relative difference; None: shown, not judged."""

    @property
    def difference(self) -> float:
        """Relative to the observed figure."""
        if self.predicted == self.observed:
            return 0.0
        return self.predicted / self.observed - 1 if self.observed else float("inf")

    @property
    def within(self) -> bool:
        return self.tolerance is None or abs(self.difference) <= self.tolerance


class Seconds(NamedTuple):
    """A time of both: shown, not judged."""

    name: str
    predicted: float
    observed: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Figures of bytes, and the collectives that only one of the two has."""

    rows: tuple[Row, ...]
    moments: tuple[str, str]
    missing: dict[CollectiveKey, int]
    """Observed, not predicted: (axis, kind, group, message bytes, dtype) -> how many."""
    surplus: dict[CollectiveKey, int]
    seconds: tuple[Seconds, ...] = ()
    observed: Provenance = "dryrun"
    collectives: bool = True
    """Whether collectives were observed."""

    @property
    def within_tolerance(self) -> bool:
        return all(r.within for r in self.rows) and not self.missing and not self.surplus

    def row(self, name: str) -> Row:
        return next(r for r in self.rows if r.name == name)

    def text(self) -> str:
        """A table for people."""
        seen = SEEN_IN.get(self.observed, self.observed)
        lines = [f"{'bytes':<32} {'predicted':>18} {seen:>18} {'difference':>12}"]
        for r in self.rows:
            verdict = "" if r.within else "  outside" if r.tolerance else "  must be equal"
            lines.append(f"{r.name:<32} {r.predicted:>18,} {r.observed:>18,} {r.difference:>11.2%}{verdict}")
        lines.append(f"peak, predicted: {self.moments[0]}")
        lines.append(f"peak, {seen + ':':<10} {self.moments[1]}")
        lines += [f"{s.name:<32} {s.predicted * 1e3:>15,.3f} ms {s.observed * 1e3:>15,.3f} ms {s.predicted / s.observed - 1:>11.2%}" for s in self.seconds]
        for title, side in ((f"only in the {seen}", self.missing), ("only predicted", self.surplus)):
            lines += [f"{title}: {n} x {kind} over {axis} ({group} ranks), {nbytes:,} bytes, {dtype}"
                      for (axis, kind, group, nbytes, dtype), n in side.items()]
        if self.collectives and not self.missing and not self.surplus:
            lines.append("collectives: equal")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain data with stable keys."""
        seen = self.observed
        return {"within_tolerance": self.within_tolerance,
                "bytes": [{"name": r.name, "predicted": r.predicted, seen: r.observed, "difference": r.difference if isfinite(r.difference) else None,
                           "within": r.within} for r in self.rows],
                "seconds": [{"name": s.name, "predicted": s.predicted, seen: s.observed} for s in self.seconds],
                "moments": {"predicted": self.moments[0], seen: self.moments[1]},
                f"only_{seen}": [[*k, n] for k, n in self.missing.items()], "only_predicted": [[*k, n] for k, n in self.surplus.items()]}


def compare(predicted: StepReport, observed: StepReport) -> Comparison:
    """Hold a prediction's role against the rank that was performed."""
    seen = observed.roles[0]
    role = role_of(predicted, seen.example_rank)
    assert role.memory is not None and seen.memory is not None
    a, b = role.memory, seen.memory
    rows = [Row(f"between steps: {c}", a.states.get(c, 0), b.states.get(c, 0), 0.0 if c in EXACT else None)
            for c in CATEGORIES if (a.states.get(c) or b.states.get(c)) and (c != "communication" or b.allocated.by_category)]
    if b.activations_bytes is not None:
        rows.append(Row("activations alone", a.activations_bytes or 0, b.activations_bytes, TOLERANCE))
    rows.append(Row("peak", a.allocated.total_bytes, b.allocated.total_bytes, TOLERANCE))
    if b.allocated.by_category:
        rows += [Row(f"at the peak: {c}", a.allocated.by_category.get(c, 0), b.allocated.by_category.get(c, 0), None)
                 for c in CATEGORIES if a.allocated.by_category.get(c) or b.allocated.by_category.get(c)]
    rows += [Row(f"peak of {phase}", a.phases[phase].total_bytes, b.phases[phase].total_bytes, None) for phase in a.phases if phase in b.phases]
    if a.host is not None and b.host is not None:
        rows += [Row(f"on the host: {c}", a.host.states.get(c, 0), b.host.states.get(c, 0), 0.0 if c in EXACT else None)
                 for c in CATEGORIES if a.host.states.get(c) or b.host.states.get(c)]
        rows.append(Row("peak on the host", a.host.allocated.total_bytes, b.host.allocated.total_bytes, TOLERANCE))
    if a.reserved_bytes is not None and b.reserved_bytes is not None:
        rows.append(Row("reserved", a.reserved_bytes, b.reserved_bytes, None))
    sent, saw = (collective_counts(r.collectives or ()) if seen.collectives is not None else Counter() for r in (role, seen))
    return Comparison(tuple(rows), (a.allocated.moment, b.allocated.moment), dict(saw - sent), dict(sent - saw), tuple(_seconds(role, seen, observed)),
                      observed.provenance, seen.collectives is not None)


def _seconds(role: RoleReport, seen: RoleReport, observed: StepReport) -> Iterator[Seconds]:
    """The step; of a rank alone on its device, less what only company costs."""
    if role.time is None or seen.time is None:
        return
    if observed.provenance != "solo":
        yield Seconds("step", role.time.step_s, seen.time.step_s)
        return
    company = sum(s for name, s in role.time.breakdown.items() if name in NOT_ALONE or name.startswith("exposed "))
    yield Seconds("step without communication", role.time.step_s - company, seen.time.step_s)


def role_of(report: StepReport, rank: int) -> RoleReport:
    """The role that a rank plays: its own where a role names it as example, else the fullest."""
    return next((r for r in report.roles if r.example_rank == rank), report.fullest)


def collective_counts(collectives: tuple[Collective, ...]) -> Counter[CollectiveKey]:
    """How many of each kind over each group with each message; a group of one sends nothing."""
    counts: Counter[CollectiveKey] = Counter()
    for c in collectives:
        if c.group > 1:
            counts[(c.axis, c.kind, c.group, c.message_bytes, c.dtype)] += c.count
    return counts
