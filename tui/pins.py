"""Runs that are kept to compare with."""

from collections.abc import Sequence
from typing import NamedTuple

from costmodel.render.prediction import strategy_name
from costmodel.report import StepReport
from costmodel.spec import Run
from tui.fields import FIELDS, reading, shown

MOST_PINS = 4


class Pinned(NamedTuple):
    """A run that was kept, with its prediction."""

    name: str
    run: Run
    report: StepReport


def pin_name(run: Run, others: Sequence[Run]) -> str:
    """The plan in short; what changed since the last pin where that says more."""
    if others:
        before, after = reading(others[-1]), reading(run)
        moved = [f"{field.label} {shown(after[field.path])}" for field in FIELDS
                 if before[field.path] != after[field.path] and field.kind(run) == "own"]
        if 0 < len(moved) <= 2:
            return ", ".join(moved)
    return f"{run.cluster.gpus}x {strategy_name(run.plan)}"
