"""An out-of-memory message read against a run: which tensor asked, when in the step, whether the figures agree, and why it failed.

PyTorch prints what it asked the device for, not what the program asked for: a request is rounded to 512 bytes, then served from a block of
2 MiB (up to 1 MiB), of 20 MiB (below 10 MiB), or of its size rounded up to 2 MiB; that block is what "Tried to allocate" shows, with two
decimals (c10/cuda/CUDACachingAllocator.cpp). So sizes are compared rounded, and a block of 2 or 20 MiB names no tensor.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from costmodel.advice import Advice, advise
from costmodel.catalog.profiles import Profile, load_profile
from costmodel.prediction import predict
from costmodel.program.build import Program, build
from costmodel.program.inventory import Inventory
from costmodel.program.ir import Part, RankProgram, Tensor, expand
from costmodel.program.stages import build_pipeline
from costmodel.report import RoleReport, StepReport
from costmodel.solve import Watch
from costmodel.spec import DTYPE_BYTES, PlanError, Run

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
UNITS = {"": 1, "B": 1, "BYTES": 1, "KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": 1 << 40, "KB": KIB, "MB": MIB, "GB": GIB, "TB": 1 << 40}
"""PyTorch's units are binary, whatever they are called."""
SMALL_REQUEST, SMALL_BLOCK, LARGE_REQUEST, LARGE_BLOCK, ROUNDED_TO = MIB, 2 * MIB, 10 * MIB, 20 * MIB, 2 * MIB
MOST_BLOCKS = 50_000
"""Blocks of a program that are walked; a step of more is cut short."""
AGREES = 0.05
"""Relative difference up to which an allocated figure agrees with the prediction."""
OTHER_PROCESS = 512 * MIB
"""Device memory beyond this process and its context that counts as somebody else's."""
Cause = Literal["need", "fragmentation", "other process", "not described", "unclear"]


class Figure(NamedTuple):
    """Bytes as a message prints them, and by how much the print may be off."""

    nbytes: int
    half_width: float = 0.0

    def holds(self, nbytes: float) -> bool:
        """Whether a number of bytes prints as this figure."""
        return abs(nbytes - self.nbytes) <= self.half_width + 1.0


@dataclass(frozen=True, slots=True)
class Message:
    """What an out-of-memory message says; None where it does not."""

    tried: Figure | None = None
    capacity: Figure | None = None
    free: Figure | None = None
    allocated: Figure | None = None
    """Live tensors, by PyTorch."""
    reserved: Figure | None = None
    """Held by the caching allocator, allocated included."""
    process: Figure | None = None
    """In use by this process, the context included."""
    others: Figure | None = None
    """In use by other processes, where the message lists them."""

    @property
    def unallocated(self) -> int | None:
        """Reserved and not allocated: what fragmentation, or another stream's pool, keeps."""
        return None if self.reserved is None or self.allocated is None else max(0, self.reserved.nbytes - self.allocated.nbytes)


_SIZE = r"([0-9][0-9,]*(?:\.[0-9]+)?)\s*([KMGT]i?B|bytes|B)\b"
_FORMS = {
    "tried": (rf"ried to allocate {_SIZE}",),
    "capacity": (rf"total capac(?:i)?ty of {_SIZE}", rf"{_SIZE} total capacity"),
    "free": (rf"of which {_SIZE} is free", rf"{_SIZE} free[;,)]"),
    "allocated": (rf"{_SIZE} is allocated by PyTorch", rf"{_SIZE} already allocated"),
    "reserved": (rf"{_SIZE} reserved in total by PyTorch", rf"{_SIZE} cached\)"),
    "unallocated": (rf"{_SIZE} is reserved by PyTorch but unallocated",),
    "process": (rf"this process has {_SIZE} memory in use",)}
"""PyTorch's wording, newest first (2.1 on; 1.4 to 2.0; "cached" before 1.4)."""


def read_size(text: str, field: str = "size") -> Figure:
    """"112.00 MiB", "1.5GiB" or "117440512" as bytes; what is not written is taken as rounded."""
    found = re.fullmatch(r"\s*([0-9][0-9,]*(?:\.([0-9]+))?)\s*([A-Za-z]*)\s*", text)
    if not found or found[3].upper() not in UNITS:
        raise PlanError(field, text, "is not a number of bytes.", "Write it as the message does: 112.00 MiB, 45.56 GiB.")
    return _figure(found[1], found[3])


def _figure(number: str, unit: str) -> Figure:
    scale = UNITS[unit.upper()]
    decimals = len(number.partition(".")[2])
    return Figure(round(float(number.replace(",", "")) * scale), 0.5 * 10.0 ** -decimals * scale if scale > 1 else 0.0)


def read_message(text: str) -> Message:
    """The figures of PyTorch's message, anywhere in a text; of several messages the first. Raises PlanError where there is none."""
    text = " ".join(text.split())
    start = text.find("ried to allocate")
    if start < 0:
        raise PlanError("message", text[:60], "it holds no out-of-memory message of PyTorch.",
                        'Give the line with "Tried to allocate", or its figures as --tried, --allocated, --reserved and --capacity.')
    following = text.find("ried to allocate", start + 1)
    text = text[start:following if following > 0 else len(text)]
    found: dict[str, Figure] = {}
    for key, forms in _FORMS.items():
        for form in forms:
            match = re.search(form, text)
            if match:
                found[key] = _figure(match[1], match[2])
                break
    spare = found.pop("unallocated", None)
    if spare is not None and "allocated" in found:
        a = found["allocated"]
        found["reserved"] = Figure(a.nbytes + spare.nbytes, a.half_width + spare.half_width)
    if "process" in found and found["process"].nbytes == 0:  # containers hide it
        del found["process"]
    listed = [_figure(*m.groups()) for m in re.finditer(rf"Process \d+ has {_SIZE} memory in use", text)]
    return Message(**found, others=Figure(sum(f.nbytes for f in listed)) if listed else None)


def block_bytes(request: int) -> int:
    """What PyTorch's caching allocator asks the device for, to serve a request."""
    size = -(-request // 512) * 512
    if size <= SMALL_REQUEST:
        return SMALL_BLOCK
    return LARGE_BLOCK if size < LARGE_REQUEST else -(-size // ROUNDED_TO) * ROUNDED_TO


@dataclass(frozen=True, slots=True)
class Match:
    """A tensor of the run whose block has the size that was asked for."""

    tensor: str
    """Its name in the program, or of the parameter that it belongs to."""
    part_of: str
    """The list that it is one of (exp_avg, parameters, …); empty where it stands alone."""
    category: str
    nbytes: int
    step: Literal["init", "first step", "steady step"]
    moment: str
    """As in the report: phase, block and operation."""
    role: str
    live_low: int
    """Predicted bytes allocated when it is asked for, with workspaces: at the least and at the most, for one of a list."""
    live_high: int
    off_bytes: int
    """Allocated in the message less the nearest of these; 0 where nothing was said."""


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
    if message.tried is None:
        raise PlanError("tried", None, "the size that was asked for is needed.", "Give the message, or --tried 112MiB.")
    if message.capacity is not None:
        run = with_memory(run, message.capacity.nbytes)
    constants = profile if isinstance(profile, Profile) else load_profile(run, profile)
    report = predict(run, constants, scaling=False)
    program = build_pipeline(run) if run.plan.pp > 1 else build(run)
    small = message.tried.nbytes in (SMALL_BLOCK, LARGE_BLOCK)
    found: list[Match] = []
    for role, part in zip(program.roles, report.roles, strict=True):
        found += _requests(run, program, role, _workspaces(part), message)
    matches = [] if small else _best(m for m in found if message.tried.holds(block_bytes(m.nbytes)))
    asked = message.tried.nbytes
    closest = [] if matches or small else sorted(_best(found), key=lambda m: abs(block_bytes(m.nbytes) - asked))[:3]
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


def with_memory(run: Run, nbytes: int) -> Run:
    """The run on devices that offer so many bytes."""
    accelerator = run.cluster.accelerator.model_copy(update={"memory_bytes": nbytes})
    return run.model_copy(update={"cluster": run.cluster.model_copy(update={"accelerator": accelerator})})


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


# -- what the run asks for ---------------------------------------------------------------------------------------------------------


def _best(matches: Iterable[Match]) -> list[Match]:
    """One match for each tensor and moment, the nearest to the message's allocated figure first."""
    kept: dict[tuple[str, str, str], Match] = {}
    for m in matches:
        key = m.tensor, m.part_of, m.moment
        if key not in kept or abs(m.off_bytes) < abs(kept[key].off_bytes):
            kept[key] = m
    return sorted(kept.values(), key=lambda m: (abs(m.off_bytes), m.step != "first step"))


def _requests(run: Run, program: Program, role: RankProgram, workspaces: int, message: Message) -> Iterator[Match]:
    """Every request of a rank in its first two steps, with what is predicted to be allocated when it comes."""
    allocated = message.allocated

    def match(tensor: str, part_of: str, category: str, nbytes: int, step: Literal["init", "first step", "steady step"], moment: str, low: int,
              high: int) -> Match:
        off = 0
        if allocated is not None:
            off = allocated.nbytes - high if allocated.nbytes > high else allocated.nbytes - low if allocated.nbytes < low else 0
        return Match(tensor, part_of, category, nbytes, step, moment, role.role, low, high, off)

    pieces = _pieces(run, program.inventory)
    live = workspaces
    for t in role.persistent:
        for name, nbytes in pieces(t):
            yield match(name, t.name if name != t.name else "", t.category, nbytes, "init", "at rest", live, live + t.nbytes)
        live += t.nbytes
    steps: tuple[tuple[Literal["first step", "steady step"], Part], ...] = (("first step", role.first_step), ("steady step", role.step))
    for step, part in steps:
        for i, block in enumerate(expand(part)):
            if i == MOST_BLOCKS:
                return
            for op in block.ops:
                words = f"{block.phase} of {block.name}: {op.name}"
                after = live + sum(t.nbytes for t in op.allocs)
                for t in op.allocs:
                    for name, nbytes in pieces(t):
                        if name == t.name:
                            yield match(name, "", t.category, nbytes, step, words, live, live)
                        else:  # lists that one op makes grow side by side, parameter by parameter
                            yield match(name, t.name, t.category, nbytes, step, words, after - sum(u.nbytes for u in op.allocs), after)
                    live += t.nbytes
                live -= sum(t.nbytes for t in op.frees)


LISTS = {"parameters": "parameter", "parameters (shard)": "parameter", "exp_avg": "state", "exp_avg_sq": "state", "momentum": "state",
         "optimizer.sqrt": "state", "gradients (shard)": "gradient"}
"""Tensors of the program that are one for each parameter, and which dtype they have."""


Pieces = Callable[[Tensor], list[tuple[str, int]]]


def _pieces(run: Run, inventory: Inventory) -> Pieces:
    """How a tensor of the program is asked for: at once, or parameter by parameter; FSDP1 keeps a layer's parameters as one flat shard."""
    p, precision = run.plan, run.recipe.precision
    sharded = p.zero == 3 and p.state_shards > 1
    n = p.state_shards if sharded else 1
    bytes_of = {"parameter": DTYPE_BYTES[precision.parameter], "state": DTYPE_BYTES[precision.optimizer_state],
                "gradient": DTYPE_BYTES[precision.gradient]}
    units = (("embedding", inventory.embedding), ("layer", inventory.layer), ("head", inventory.head))
    kept: dict[str, list[tuple[str, int]]] = {}
    for kind, size in bytes_of.items():
        each = [(q.name, -(-q.shape[0] // n) * (q.numel // q.shape[0]) * size) for _, unit in units for q in unit.params]
        flat = [(f"{name} (flat)", -(-unit.numel // n) * size) for name, unit in units if unit.numel] if sharded else []
        kept[kind] = list(dict.fromkeys(each + flat))
    flat_buffers = p.framework != "pytorch"

    def pieces(t: Tensor) -> list[tuple[str, int]]:
        kind = LISTS.get(t.name)
        return [(t.name, t.nbytes)] if kind is None or flat_buffers and kind != "parameter" else kept[kind]

    return pieces
