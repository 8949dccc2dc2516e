"""The time of steps that nobody watches: each step, and each of its phases."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

from torch import Tensor

from costmodel.report import Collective, TimeReport
from execute.device import Device
from execute.marks import Marks
from execute.observe.trace import FOLDED, Seen


class Clock:
    """Points in time around each step and each of its phases (execute.marks.Marks)."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.steps: list[tuple[Any, Any]] = []
        self.phases: list[tuple[str, Any, Any]] = []

    @contextmanager
    def phase_of(self, name: str) -> Iterator[None]:
        start = self.device.now()
        yield
        self.phases.append((FOLDED.get(name, name), start, self.device.now()))

    def forward(self, phase: str = "forward") -> Any:
        return self.phase_of(phase)

    def backward_ended(self) -> None:
        return None

    def time(self, step: Callable[[Marks], Tensor | None]) -> Tensor | None:
        start = self.device.now()
        loss = step(self)
        self.steps.append((start, self.device.now()))
        return loss

    def seconds(self) -> tuple[float, ...]:
        return tuple(self.device.seconds(start, end) for start, end in self.steps)

    def report(self, profiled: TimeReport) -> TimeReport:
        """The median step; its phases in the proportions of all timed steps; what was done, in those of the profiled step.

        The profiler slows a CPU's operators and not a GPU's kernels: there only idle time makes the difference between the two.
        """
        samples = self.seconds()
        step_s, whole = median(samples), sum(samples)
        phases: dict[str, float] = {}
        for name, start, end in self.phases:
            phases[name] = phases.get(name, 0.0) + self.device.seconds(start, end) * step_s / whole
        phases["other"] = step_s - sum(phases.values())
        scale = self.scale(profiled)
        breakdown = {kind: s * scale for kind, s in _busy(profiled).items()}
        communication, exposed = ({axis: s * scale for axis, s in part.items()} for part in (profiled.communication_s, profiled.exposed_s))
        bubble_s = None if profiled.bubble_s is None else profiled.bubble_s * scale
        return TimeReport(step_s, phases, {**breakdown, "idle": step_s - sum(breakdown.values())}, communication, exposed, profiled.host_s, bubble_s)

    def scale(self, profiled: TimeReport) -> float:
        """What the seconds of the profiled step are multiplied by, to be those of the median step."""
        step_s = median(self.seconds())
        return step_s / (profiled.step_s if self.device.name == "cpu" else max(step_s, sum(_busy(profiled).values())))

    def collectives(self, seen: Seen) -> tuple[Collective, ...]:
        """The profiled step's, in the seconds of the median step."""
        scale = self.scale(seen.time)
        return tuple(c if c.total_s is None else replace(c, total_s=c.total_s * scale) for c in seen.collectives)


def _busy(profiled: TimeReport) -> dict[str, float]:
    return {kind: s for kind, s in profiled.breakdown.items() if kind != "idle"}
