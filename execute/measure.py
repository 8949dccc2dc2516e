# mypy: disable-error-code="no-untyped-call, no-any-return, misc"
"""One rank's steps of a real job: timed with nobody watching, then one under the profiler, then three watched.

The watched steps are of a second training run, so that the tracker sees every tensor from its birth. On a GPU the caching allocator's own
figures, taken over the timed steps, stand beside them.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from costmodel.report import MemoryReport, Peak, RoleReport, TimeReport
from execute.assemble import assemble
from execute.data import source_of
from execute.device import Device
from execute.dryrun import observe_real
from execute.dryrun import report as observed_report
from execute.job import Job
from execute.marks import Marks
from execute.observe.profiling import profile_step
from execute.observe.trace import FOLDED, read_trace
from execute.train import Training, make_ready


class Unwatched(NamedTuple):
    """What the steps that nobody watched say."""

    clock: "Clock"
    losses: tuple[float | None, ...]
    """Warm-up included."""
    allocator: MemoryReport | None
    axes: dict[str, str]
    """Process group -> axis of the run."""


def measure(job: Job, rank: int, device: Device, trace: Path, say: Callable[[str], None]) -> tuple[RoleReport, tuple[float, ...], tuple[float | None, ...]]:
    """A rank's report, the seconds of its timed steps, the losses of all its steps. The profiled step's trace is kept at `trace`."""
    run = job.run
    with device.settings(run):
        seen = _unwatched(job, rank, device, trace, say)
    gc.collect()
    with device.settings(run):
        say("watching three steps")
        watched = observed_report(observe_real(run, device.name), rank).roles[0]
    say("reading the trace")
    memory = watched.memory if seen.allocator is None else beside(watched.memory, seen.allocator)
    time = seen.clock.report(device, read_trace(trace, watched.collectives or (), seen.axes))
    role = RoleReport(f"rank {rank}", 1, rank, memory, time, watched.collectives)
    return role, seen.clock.seconds(device), seen.losses


def _unwatched(job: Job, rank: int, device: Device, trace: Path, say: Callable[[str], None]) -> Unwatched:
    run, first = job.run, job.warmup
    say("building the model")
    source = source_of(run, Path(job.data) if job.data else None, job.seed)
    training = Training(run, assemble(run, device.name, job.seed), source, rank, device.name, first + job.steps + 1)
    losses: list[Tensor | None] = []
    for step in range(first):
        say(f"warm-up step {step + 1} of {first}")
        losses.append(make_ready(training, step)())
    device.synchronize()
    device.reset_peaks()
    dist.barrier()
    say(f"{job.steps} timed steps")
    clock = Clock(device)
    for step in range(first, first + job.steps):
        losses.append(clock.time(make_ready(training, step)))
    device.synchronize()
    allocator = allocator_report(device)
    say("one step under the profiler")
    profile_step(make_ready(training, first + job.steps), device.synchronize, trace)
    axes = {group.group_name: axis for axis, group in training.prepared.axes.items()}
    return Unwatched(clock, tuple(None if loss is None else float(loss) for loss in losses), allocator, axes)


def allocator_report(device: Device) -> MemoryReport | None:
    """What the caching allocator counted since its peaks were reset, without the workspaces of libraries; None where there is none."""
    peaks, used = device.peaks(), device.used_bytes()
    if peaks is None:
        return None
    workspace = device.workspace_bytes() or 0
    allocated = Peak(peaks.allocated - workspace, "timed steps, as the allocator counts", {})
    return MemoryReport(allocated, {}, {}, None, workspace, peaks.reserved, used, {} if used is None else {"context": used - peaks.reserved},
                        device.capacity_bytes())


def beside(watched: MemoryReport | None, allocator: MemoryReport) -> MemoryReport | None:
    """What the tracker saw, with the allocator's figures: its peak, of rounded blocks, is a phase of its own."""
    if watched is None:
        return None
    return replace(watched, phases={**watched.phases, "allocator": allocator.allocated}, workspace_bytes=allocator.workspace_bytes,
                   reserved_bytes=allocator.reserved_bytes, device_bytes=allocator.device_bytes, outside=allocator.outside,
                   capacity_bytes=allocator.capacity_bytes)


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

    def seconds(self, device: Device) -> tuple[float, ...]:
        return tuple(device.seconds(start, end) for start, end in self.steps)

    def report(self, device: Device, profiled: TimeReport) -> TimeReport:
        """The median step; its phases in the proportions of all timed steps; what was done, in those of the profiled step.

        The profiler slows a CPU's operators and not a GPU's kernels: there only idle time makes the difference between the two.
        """
        samples = self.seconds(device)
        step_s, whole = median(samples), sum(samples)
        phases: dict[str, float] = {}
        for name, start, end in self.phases:
            phases[name] = phases.get(name, 0.0) + device.seconds(start, end) * step_s / whole
        phases["other"] = step_s - sum(phases.values())
        work = {kind: s for kind, s in profiled.breakdown.items() if kind != "idle"}
        scale = step_s / (profiled.step_s if device.name == "cpu" else max(step_s, sum(work.values())))
        breakdown = {kind: s * scale for kind, s in work.items()}
        communication, exposed = ({axis: s * scale for axis, s in part.items()} for part in (profiled.communication_s, profiled.exposed_s))
        return TimeReport(step_s, phases, {**breakdown, "idle": step_s - sum(breakdown.values())}, communication, exposed, profiled.host_s)
