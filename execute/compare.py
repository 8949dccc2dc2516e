"""Two reports of the same run, side by side: a prediction against a dry run."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from costmodel.report import CATEGORIES, Collective, RoleReport, StepReport

EXACT = ("parameters", "gradients", "master_weights", "optimizer")
TOLERANCE = 0.05
"""For the peak and for activations alone."""
CollectiveKey = tuple[str, str, int, int, str]


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


@dataclass(frozen=True, slots=True)
class Comparison:
    """Figures of bytes, and the collectives that only one of the two has."""

    rows: tuple[Row, ...]
    moments: tuple[str, str]
    missing: dict[CollectiveKey, int]
    """Observed, not predicted: (axis, kind, group, message bytes, dtype) -> how many."""
    surplus: dict[CollectiveKey, int]

    @property
    def within_tolerance(self) -> bool:
        return all(r.within for r in self.rows) and not self.missing and not self.surplus

    def row(self, name: str) -> Row:
        return next(r for r in self.rows if r.name == name)

    def text(self) -> str:
        """A table for people."""
        lines = [f"{'bytes':<32} {'predicted':>18} {'dry run':>18} {'difference':>12}"]
        for r in self.rows:
            verdict = "" if r.within else "  outside" if r.tolerance else "  must be equal"
            lines.append(f"{r.name:<32} {r.predicted:>18,} {r.observed:>18,} {r.difference:>11.2%}{verdict}")
        lines.append(f"peak, predicted: {self.moments[0]}")
        lines.append(f"peak, dry run:   {self.moments[1]}")
        for title, side in (("only in the dry run", self.missing), ("only predicted", self.surplus)):
            lines += [f"{title}: {n} x {kind} over {axis} ({group} ranks), {nbytes:,} bytes, {dtype}"
                      for (axis, kind, group, nbytes, dtype), n in side.items()]
        if not self.missing and not self.surplus:
            lines.append("collectives: equal")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain data with stable keys."""
        return {"within_tolerance": self.within_tolerance,
                "bytes": [{"name": r.name, "predicted": r.predicted, "dryrun": r.observed, "difference": r.difference, "within": r.within}
                          for r in self.rows],
                "moments": {"predicted": self.moments[0], "dryrun": self.moments[1]},
                "only_dryrun": [[*k, n] for k, n in self.missing.items()], "only_predicted": [[*k, n] for k, n in self.surplus.items()]}


def compare(predicted: StepReport, observed: StepReport) -> Comparison:
    """Hold a prediction's role against the rank that was performed."""
    seen = observed.roles[0]
    role = role_of(predicted, seen.example_rank)
    assert role.memory is not None and seen.memory is not None
    a, b = role.memory, seen.memory
    rows = [Row(f"between steps: {c}", a.states.get(c, 0), b.states.get(c, 0), 0.0 if c in EXACT else None)
            for c in CATEGORIES if a.states.get(c) or b.states.get(c)]
    rows.append(Row("activations alone", a.activations_bytes or 0, b.activations_bytes or 0, TOLERANCE))
    rows.append(Row("peak", a.allocated.total_bytes, b.allocated.total_bytes, TOLERANCE))
    rows += [Row(f"at the peak: {c}", a.allocated.by_category.get(c, 0), b.allocated.by_category.get(c, 0), None)
             for c in CATEGORIES if a.allocated.by_category.get(c) or b.allocated.by_category.get(c)]
    rows += [Row(f"peak of {phase}", a.phases[phase].total_bytes, b.phases[phase].total_bytes, None) for phase in a.phases if phase in b.phases]
    sent, saw = collective_counts(role.collectives or ()), collective_counts(seen.collectives or ())
    return Comparison(tuple(rows), (a.allocated.moment, b.allocated.moment), dict(saw - sent), dict(sent - saw))


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
