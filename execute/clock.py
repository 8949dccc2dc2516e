"""The time of steps that nobody watches: each step, and each of its phases."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from torch import Tensor

from costmodel.report import TimeReport
from execute.device import Device
from execute.marks import Marks
from execute.observe.trace import FOLDED


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
        work = {kind: s for kind, s in profiled.breakdown.items() if kind != "idle"}
        scale = step_s / (profiled.step_s if self.device.name == "cpu" else max(step_s, sum(work.values())))
        breakdown = {kind: s * scale for kind, s in work.items()}
        communication, exposed = ({axis: s * scale for axis, s in part.items()} for part in (profiled.communication_s, profiled.exposed_s))
        return TimeReport(step_s, phases, {**breakdown, "idle": step_s - sum(breakdown.values())}, communication, exposed, profiled.host_s)
