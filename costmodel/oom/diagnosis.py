"""An out-of-memory message read against a run: which tensor asked, when in the step, whether the figures agree, and why it failed.

Sizes are compared as the allocator rounds them. A block of 2 or 20 MiB names no tensor.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from costmodel.advice import Advice, advise
from costmodel.catalog.profiles import Profile, load_profile
from costmodel.changes import changed
from costmodel.oom.message import GIB, LARGE_BLOCK, MIB, SMALL_BLOCK, Message, block_bytes
from costmodel.oom.requests import Request, requests
from costmodel.prediction import predict
from costmodel.report import RoleReport, StepReport
from costmodel.repricing import program_of
from costmodel.solve import Watch
from costmodel.spec import PlanError, Run

AGREES = 0.05
"""Relative difference up to which an allocated figure agrees with the prediction."""
OTHER_PROCESS = 512 * MIB
"""Device memory beyond this process and its context that counts as somebody else's."""
Cause = Literal["need", "fragmentation", "other process", "not described", "unclear"]


@dataclass(frozen=True, slots=True)
class Match(Request):
    """A request of the run beside a message."""

    off_bytes: int
    """Allocated in the message, less the nearest that is predicted when the request comes; 0 where it lies between, or is not said."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What an out-of-memory message means for a run."""

    message: Message
    matches: tuple[Match, ...]
    """Tensors of that size, the one whose moment agrees best with the allocated figure first."""
    names_no_tensor: bool
    """The size is the allocator's block for small tensors."""
    closest: tuple[Match, ...]
    """Without a match, the tensors nearest in size."""
    agrees: bool | None
    """Whether the message's allocated is what is predicted at that moment; None where it is not said."""
    report: StepReport
    role: str
    peak_bytes: int
    """Predicted peak of allocated, workspaces included, of that role."""
    reserved_bytes: int | None
    outside_bytes: int
    """Predicted context and NCCL."""
    capacity_bytes: int
    others_bytes: int | None
    """Of the device, neither free nor of this process and its predicted context; None where the message does not say enough."""
    cause: Cause
    advice: Advice | None
    """What would make the run fit; None where the prediction says that it does."""


def diagnose(run: Run, message: Message, profile: Profile | str | None = None, *, watch: Watch | None = None) -> Diagnosis:
    """Read a message against a run; the capacity in it counts, where it is given."""
    if message.tried is None or not message.tried.nbytes:
        raise PlanError("tried", None, "the size that was asked for is needed.", "Give the message, or --tried 112MiB.")
    if message.capacity is not None:
        run = changed(run, {"cluster.memory_bytes": message.capacity.nbytes})
    held, room = message.allocated, run.cluster.accelerator.memory_bytes
    if held is not None and held.nbytes > room * (1 + AGREES):
        raise PlanError("allocated", f"{held.nbytes / GIB:.2f} GiB", f"{run.cluster.accelerator.name} has {room / GIB:.2f} GiB in all.",
                        "Give the GPU of the job with --gpu, or what it has with --capacity.")
    constants = profile if isinstance(profile, Profile) else load_profile(run, profile)
    report = predict(run, constants, scaling=False)
    program = program_of(run)
    small = message.tried.nbytes in (SMALL_BLOCK, LARGE_BLOCK)
    asked = message.tried
    found = [_match(request, message) for role, part in zip(program.roles, report.roles, strict=True)
             for request in requests(run, program, role, _workspaces(part), lambda n: asked.holds(block_bytes(n)))]
    matches = [] if small else _best(m for m in found if asked.holds(block_bytes(m.nbytes)))
    closest = [] if matches or small else sorted(_best(found), key=lambda m: abs(block_bytes(m.nbytes) - asked.nbytes))[:3]
    role_name = matches[0].role if matches else report.fullest.role
    role_report = next(r for r in report.roles if r.role == role_name)
    memory = role_report.memory
    assert memory is not None and memory.capacity_bytes is not None
    peak, outside = memory.allocated.total_bytes + _workspaces(role_report), sum(memory.outside.values())
    others = _others(message, outside)
    agrees = None
    if message.allocated is not None and matches:
        agrees = abs(matches[0].off_bytes) <= AGREES * message.allocated.nbytes + message.allocated.half_width
    cause = _cause(message, peak, outside, memory.capacity_bytes, others)
    advice = advise(run, profile, watch=watch) if report.verdict != "fits" else None
    return Diagnosis(message, tuple(matches[:5]), small, tuple(closest), agrees, report, role_name, peak, memory.reserved_bytes, outside,
                     memory.capacity_bytes, others, cause, advice)


def _match(r: Request, message: Message) -> Match:
    off = 0
    if message.allocated is not None:
        said = message.allocated.nbytes
        off = said - min(max(said, r.live_low), r.live_high)
    return Match(r.tensor, r.part_of, r.category, r.nbytes, r.step, r.moment, r.role, r.live_low, r.live_high, off)


def _workspaces(role: RoleReport) -> int:
    return (role.memory.workspace_bytes or 0) if role.memory else 0


def _others(message: Message, outside: int) -> int | None:
    """Device memory that neither this process nor the free rest accounts for."""
    if message.others is not None:
        return message.others.nbytes
    if message.capacity is None or message.free is None:
        return None
    used = message.capacity.nbytes - message.free.nbytes
    if message.process is not None:
        return max(0, used - message.process.nbytes)
    return None if message.reserved is None else max(0, used - message.reserved.nbytes - outside)


def _cause(message: Message, peak: int, outside: int, capacity: int, others: int | None) -> Cause:
    """Why it failed. What the run needs counts first: a run that cannot fit is not saved by a tidier allocator."""
    assert message.tried is not None
    if others is not None and others > max(OTHER_PROCESS, message.tried.nbytes) and peak + outside <= capacity:
        return "other process"
    if peak + outside > capacity:
        return "need"
    if message.unallocated is not None and message.unallocated >= message.tried.nbytes:
        return "fragmentation"
    if message.allocated is not None and message.allocated.nbytes > peak * (1 + AGREES):
        return "not described"
    return "unclear"


def _best(matches: Iterable[Match]) -> list[Match]:
    """One match for each tensor and moment, the nearest to the message's allocated figure first."""
    kept: dict[tuple[str, str, str], Match] = {}
    for m in matches:
        key = m.tensor, m.part_of, m.moment
        if key not in kept or abs(m.off_bytes) < abs(kept[key].off_bytes):
            kept[key] = m
    return sorted(kept.values(), key=lambda m: (abs(m.off_bytes), m.step != "first step"))
