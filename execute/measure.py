# mypy: disable-error-code="no-untyped-call, no-any-return, misc"
"""One rank's steps of a real job: timed with nobody watching, then one under the profiler, then three watched.

The watched steps are of a second training run, so that the tracker sees every tensor from its birth. On a GPU the caching allocator's own
figures, taken over the timed steps, stand beside them.
"""

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from costmodel.report import MemoryReport, Peak, RoleReport
from execute.assemble import assemble
from execute.clock import Clock
from execute.data import source_of
from execute.device import Device
from execute.dryrun import observe_real
from execute.dryrun import report as observed_report
from execute.job import Job
from execute.observe.profiling import profile_step
from execute.observe.trace import read_step
from execute.solo import states_of
from execute.train import Training, make_ready


class Unwatched(NamedTuple):
    """What the steps that nobody watched say."""

    clock: Clock
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
    watched = RoleReport(f"rank {rank}", 1, rank, None, None, None)
    if not run.recipe.compile:  # a compiled layer cannot be watched
        with device.settings(run):
            say("watching three steps")
            watched = observed_report(observe_real(run, device.name), rank).roles[0]
    say("reading the trace")
    traced = read_step(trace, watched.collectives or (), seen.axes)
    sent = None if watched.collectives is None else seen.clock.collectives(traced)
    role = replace(watched, ranks=1, memory=beside(watched.memory, seen.allocator), time=seen.clock.report(traced.time), collectives=sent)
    return role, seen.clock.seconds(), seen.losses


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
    allocator = allocator_report(device, states_of(training.prepared))
    say("one step under the profiler")
    profile_step(make_ready(training, first + job.steps), device.synchronize, trace)
    axes = {group.group_name: axis for axis, group in training.prepared.axes.items()}
    return Unwatched(clock, tuple(None if loss is None else float(loss) for loss in losses), allocator, axes)


def allocator_report(device: Device, states: dict[str, int]) -> MemoryReport | None:
    """What the caching allocator counted since its peaks were reset, without the workspaces of libraries; None where there is none."""
    peaks, used = device.peaks(), device.used_bytes()
    if peaks is None:
        return None
    workspace = device.workspace_bytes() or 0
    allocated = Peak(peaks.allocated - workspace, "timed steps, as the allocator counts", {})
    return MemoryReport(allocated, {}, states, None, workspace, peaks.reserved, used, {} if used is None else {"context": used - peaks.reserved},
                        device.capacity_bytes())


def beside(watched: MemoryReport | None, allocator: MemoryReport | None) -> MemoryReport | None:
    """What the tracker saw, with the allocator's figures: its peak, of rounded blocks, is a phase of its own. Or what there is of the two."""
    if watched is None or allocator is None:
        return watched or allocator
    return replace(watched, phases={**watched.phases, "allocator": allocator.allocated}, workspace_bytes=allocator.workspace_bytes,
                   reserved_bytes=allocator.reserved_bytes, device_bytes=allocator.device_bytes, outside=allocator.outside,
                   capacity_bytes=allocator.capacity_bytes)
