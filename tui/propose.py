"""What `s` offers for a run that is whole: from the advice about it, the change to make first and what it promises."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from costmodel.changes import Keep
from costmodel.report import StepReport

if TYPE_CHECKING:
    from costmodel.advice import Advice, Suggestion

GIB = 1 << 30


class Proposal(NamedTuple):
    """A change, in words, and what the prediction promises of it."""

    changes: Mapping[str, Any]
    keep: Keep
    words: str
    promise: str


class Rested(NamedTuple):
    """What is worked out when a state has rested for a moment."""

    report: StepReport
    """With intervals, and the efficiency against one GPU."""
    proposals: "Proposals | None" = None
    """None while they are looked for."""


class Proposals(NamedTuple):
    """All that is offered, the best first."""

    found: tuple[Proposal, ...]
    title: str


def proposals(advice: "Advice") -> Proposals:
    """Make it fit where it does not; else make it faster."""
    if advice.faster:
        return Proposals(tuple(_proposal(s) for s in advice.faster), "faster")
    fit = (*advice.fit, *advice.together)
    return Proposals(tuple(_proposal(s) for s in (fit or advice.helps)), "fits" if fit else "helps")


def _proposal(s: "Suggestion") -> Proposal:
    """Time is per token of one GPU, so that a change of the batch or of the GPUs compares."""
    per_token = 1 / s.per_gpu - 1 if s.per_gpu else 0.0
    points = 100 * ((s.report.mfu or 0.0) - (s.report.mfu or 0.0) / (s.per_gpu or 1.0))
    promise = f"{s.needs_after / GIB:,.1f} GiB  time {per_token:+.0%}  MFU {points:+.1f}"
    return Proposal(s.changes, s.keep, s.words, promise + (f"  ({s.remark})" if s.remark else ""))
