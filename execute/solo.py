"""One rank of a job on one real device: its memory and the time of its computation, as if the other ranks answered at once.

The program is the one that torchrun would start; execute.stand_in answers its collectives. So the time is that of computation and of the
writing of what is gathered; nothing waits for a peer, a network or a pipeline. On a GPU memory is what the caching allocator counted; on a
CPU, where no allocator counts, the storage tracker watches the same steps once more.
"""

import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from costmodel.report import MemoryReport, Peak, RoleReport, StepReport, TimeReport
from costmodel.spec import Run
from execute import compat
from execute.assemble import assemble
from execute.clock import Clock
from execute.data import source_of
from execute.device import Device, is_described, performed_elsewhere
from execute.dryrun import observe_real
from execute.dryrun import report as observed_report
from execute.flops import hardware_flops, model_flops
from execute.observe.profiling import profile_step
from execute.observe.trace import read_trace
from execute.optim import state_tensors
from execute.roles import peak_flops_per_s
from execute.stand_in import Others, stand_in_world
from execute.strategies import Prepared
from execute.support import check_supported
from execute.train import Training, make_ready


class Solo(NamedTuple):
    """What one rank did alone."""

    report: StepReport
    step_s: tuple[float, ...]
    """Raw samples: seconds of each timed step, in order."""


def solo(run: Run, device: Device, rank: int = 0, *, warmup: int = 3, steps: int = 10, trace: Path | None = None,
         progress: Callable[[str], None] = lambda words: None) -> Solo:
    """Perform `warmup` steps, then `steps` timed ones, then one under the profiler, whose trace is kept where `trace` says.

    Raises what a step raises: torch.OutOfMemoryError where the rank does not fit.
    """
    check_supported(run, "solo")
    world = run.plan.world_size
    with device.settings(run):
        memory = None
        if device.peaks() is None and not run.recipe.compile:  # a compiled layer cannot be watched
            progress("two steps watched")
            with stand_in_world(world, rank):
                memory = observed_report(observe_real(run, device.name), rank).roles[0].memory
        with stand_in_world(world, rank) as others:
            gc.collect()
            device.reset_peaks()
            job = Training(run, assemble(run, device.name), source_of(run), rank, device.name, warmup + steps + 1)
            meter = _Meter(job, device, others)
            meter.phase_ended("init")
            progress(f"{warmup} steps to warm up")
            for step in range(warmup):
                make_ready(job, step)(None)
                if step == 0:
                    meter.phase_ended("first step")
            device.synchronize()
            device.reset_peaks()
            progress(f"{steps} timed steps")
            clock = _timed(job, device, warmup, steps)
            meter.phase_ended("steady step")
            memory = memory or meter.report()
            progress("one step under the profiler")
            time = clock.report(_profiled(job, device, warmup + steps, trace))
    name = f"rank {rank}"
    role = RoleReport(name, world // run.plan.pp, rank, memory, time, None)
    peak = peak_flops_per_s(run) if is_described(run, device) else None
    return Solo(StepReport("solo", (role,), world, run.tokens_per_step, model_flops(run), hardware_flops(run), peak, notes=performed_elsewhere(run, device)),
                clock.seconds())


# -- memory -------------------------------------------------------------------------------------------------------------------


class _Meter:
    """The allocator's peaks phase by phase; the stand-in's own values are left out."""

    def __init__(self, job: Training, device: Device, others: Others) -> None:
        self.job, self.device, self.others = job, device, others
        self.allocated: dict[str, int] = {}
        self.reserved = 0

    def phase_ended(self, name: str) -> None:
        """Read the peaks since the last phase."""
        self.device.synchronize()
        peaks = self.device.peaks()
        if peaks is not None:
            self.allocated[name] = peaks.allocated - self.others.bytes
            self.reserved = max(self.reserved, peaks.reserved - self.others.bytes)
            self.device.reset_peaks()

    def report(self) -> MemoryReport | None:
        """Of the timed steps. By category only states are known: the allocator does not tell what a tensor is for."""
        if not self.allocated:
            return None
        used, capacity = self.device.used_bytes(), self.device.capacity_bytes()
        workspace = self.device.workspace_bytes() or 0
        phases = {name: Peak(size - (workspace if name != "init" else 0), name, {}) for name, size in self.allocated.items()}
        in_use = None if used is None else used - self.others.bytes
        return MemoryReport(phases["steady step"], phases, states_of(self.job.prepared), None, workspace, self.reserved, in_use,
                            {} if in_use is None else {"context": in_use - self.reserved}, capacity)


def states_of(prepared: Prepared) -> dict[str, int]:
    """Bytes that live between steps, counted tensor by tensor; buffers of communication are not seen this way."""
    device, host = state_tensors(prepared.optimizer)
    optimized = [p for group in prepared.optimizer.param_groups for p in group["params"]]
    parameters = [*prepared.model.parameters(), *optimized]
    scaling = [] if prepared.loss_scale is None else [prepared.loss_scale.scale, prepared.loss_scale.growth_tracker]
    seen: set[int] = set()
    sizes = {"parameters": _bytes(parameters, seen), "gradients": _bytes([p.grad for p in parameters], seen),
             "optimizer": _bytes([t for t in (*device, *host) if parameters and t.device.type == parameters[0].device.type], seen),
             "framework": _bytes([*prepared.model.buffers(), *scaling], seen)}
    return {name: size for name, size in sizes.items() if size}


def _bytes(tensors: Any, seen: set[int]) -> int:
    """Bytes of the storages of some tensors that nobody has counted yet."""
    total = 0
    for tensor in compat.inner_tensors([t for t in tensors if t is not None]):
        storage = tensor.untyped_storage()
        if compat.storage_key(storage) not in seen:
            seen.add(compat.storage_key(storage))
            total += storage.nbytes()
    return total


# -- time ---------------------------------------------------------------------------------------------------------------------


def _timed(job: Training, device: Device, first: int, steps: int) -> Clock:
    clock = Clock(device)
    for step in range(first, first + steps):
        clock.time(make_ready(job, step))
    device.synchronize()
    return clock


def _profiled(job: Training, device: Device, step: int, keep: Path | None) -> TimeReport:
    """The time of one step under the profiler; its trace is kept, or read and forgotten."""
    with tempfile.TemporaryDirectory() as folder:
        path = keep or Path(folder) / "trace.json"
        profile_step(make_ready(job, step), device.synchronize, path)
        return read_trace(path)
