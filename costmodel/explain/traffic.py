"""What a rank sends in a step: which tensor, by which collective, over which ranks and link, when, and beside what."""

from dataclasses import dataclass

from costmodel.cost.prices import RunPrices
from costmodel.mesh import Groups, Mesh
from costmodel.program.ir import BlockCounts, Comm, Op
from costmodel.timeline import Span, Timeline

PARAMETERS, GRADIENTS, ACTIVATIONS = "parameters", "gradients", "activations"
ACTIVATION_GRADIENTS, STATISTICS, NORM = "gradients of activations", "loss statistics", "gradient norm"
KEYS_VALUES, KEYS_VALUES_GRADIENTS = "keys and values", "gradients of keys and values"
TOKENS, LOGITS, LOGITS_GRADIENTS = "tokens", "logits", "gradients of logits"
"""DataParallel's."""
ROWS, ROW_GRADIENTS, COUNTS = "rows of tokens to and from experts", "gradients of rows", "counts of rows"


@dataclass(frozen=True, slots=True)
class Movement:
    """Equal collectives of a step."""

    tensor: str
    """What travels: parameters, gradients, activations, gradients of activations, keys and values, gradients of keys and values, rows to and from
    experts, their gradients and counts, loss statistics, gradient norm; DataParallel's tokens and logits."""
    collective: str
    axis: str
    group: int
    """Ranks that take part."""
    stride: int
    """How far apart they are in the rank order."""
    link: str
    """The slowest level of the topology that the group crosses; empty where it is alone."""
    phase: str
    count: int
    message_bytes: int
    """Each: the full tensor of an all-gather or reduce-scatter, else the buffer of a rank."""
    dtype: str
    sent_bytes: int
    """What a rank sends in a step by all of them on a ring: (n-1)/n of the message for an all-gather, reduce-scatter or all-to-all,
    twice that for an all-reduce, all of it for a send or a broadcast."""
    seconds: float
    """Of all of them, hidden or not."""
    beside: str
    """What runs meanwhile; empty where compute waits for it at once."""
    exposed_s: float
    """Seconds that compute waits for them; those of an axis sum to the report's `exposed_s`."""


def what(op: Op, phase: str) -> str:
    """The tensor that a collective moves, by the operation it follows from."""
    assert op.comm is not None
    name, axis = op.name.partition("(")[0], op.comm.axis
    if name.startswith("clip."):
        return NORM
    if name.startswith(("scatter_tokens", "gather_logits")):
        return TOKENS if name == "scatter_tokens" else LOGITS if phase != "backward" else LOGITS_GRADIENTS
    if axis == "ep":
        return COUNTS if name == "experts.counts" else ROW_GRADIENTS if phase == "backward" and name.endswith(".all_to_all.all_to_all") else ROWS
    if axis == "etp":
        return ROW_GRADIENTS if phase == "backward" else ROWS
    if axis == "pp":
        return ACTIVATIONS if name.endswith("activation") else ACTIVATION_GRADIENTS
    if axis == "cp":
        if name.endswith((".all_to_all", ".all_to_all_gradient")):
            return ACTIVATION_GRADIENTS if name.endswith("_gradient") else ACTIVATIONS
        return KEYS_VALUES_GRADIENTS if name.endswith("_gradient") else KEYS_VALUES
    if axis == "tp":
        if name.startswith("loss."):
            return STATISTICS
        if name.startswith("norm_gradient") or name.endswith((".wgrad.all_reduce", ".bgrad.all_reduce")):
            return GRADIENTS
        return ACTIVATIONS if phase != "backward" or name.endswith(".regather") else ACTIVATION_GRADIENTS
    return PARAMETERS if name in ("all_gather", "gather_parameters", "broadcast_parameters") else GRADIENTS


def ring_bytes(comm: Comm) -> int:
    """What one rank sends of a collective by a ring."""
    if comm.group == 1 or comm.kind == "recv":
        return 0
    if comm.kind in ("send", "broadcast"):
        return comm.nbytes
    turns = 2 if comm.kind == "all-reduce" else 1
    return turns * comm.nbytes * (comm.group - 1) // comm.group


Key = tuple[str, str, Comm, bool]
"""What travels, phase, collective, whether it is waited for later."""


def _key(op: Op, phase: str) -> Key:
    assert op.comm is not None
    return what(op, phase), phase, op.comm, bool(op.event)


def movements(counts: BlockCounts, prices: RunPrices, mesh: Mesh, line: Timeline, exposed_s: dict[str, float]) -> tuple[Movement, ...]:
    """Every collective of a rank's step, equal ones together, phase by phase; `exposed_s` is what compute waited for by axis."""
    found: dict[Key, int] = {}
    for block, times in counts:
        for op in block.ops:
            if op.comm is not None and op.comm.group > 1:
                key = _key(op, block.phase)
                found[key] = found.get(key, 0) + times
    seconds = {key: n * prices.collective_s(key[2]) for key, n in found.items()}
    waits = _waits(line, seconds, exposed_s)
    out: list[Movement] = []
    for key, n in found.items():
        tensor, phase, comm, later = key
        groups = _groups(mesh, comm)
        out.append(Movement(tensor, comm.kind, comm.axis, comm.group, groups.stride, link_words(groups), phase, n, comm.nbytes, comm.dtype,
                            n * ring_bytes(comm), seconds[key], _beside(comm, phase) if later else "", waits[key]))
    order = {"forward": 0, "recompute": 1, "backward": 2, "optimizer": 3}
    return tuple(sorted(out, key=lambda m: order.get(m.phase, 4)))


def _waits(line: Timeline, seconds: dict[Key, float], exposed_s: dict[str, float]) -> dict[Key, float]:
    """What compute waited for, by collective, from the timeline.

    Of a part that repeats, the first two and the last are laid out, and the second stands for those between. What an axis was waited for
    besides (copies around a gather, what a pipeline's last backward leaves in flight) is spread over those of its collectives that run beside
    kernels, by their seconds.
    """
    out = dict.fromkeys(seconds, 0.0)
    spans: dict[int, list[Span]] = {}
    for span in line.spans:
        spans.setdefault(id(span.part), []).append(span)
    for same in spans.values():
        chosen = [(same[0], 1)] if len(same) == 1 else [(same[0], 1), (same[1], len(same) - 2), (same[-1], 1)]
        for span, times in chosen:
            for piece in line.slices(span) if times else ():
                if piece.op is not None and piece.op.comm is not None and piece.exposed_s:
                    out[_key(piece.op, piece.phase)] += times * piece.exposed_s
    for axis, total in exposed_s.items():
        mine = [key for key in seconds if key[2].axis == axis and seconds[key]]
        beside = [key for key in mine if key[3]] or mine
        left, whole = total - sum(out[key] for key in mine), sum(seconds[key] for key in beside)
        for key in beside:
            out[key] = max(0.0, out[key] + left * seconds[key] / whole)
    return out


def _groups(mesh: Mesh, comm: Comm) -> Groups:
    """The process groups of an axis; where state or gradients span cp as well, the wider ones, or cp's own where nothing else is above 1."""
    of_axis = [g for g in mesh.groups if g.size == comm.group and (g.axis == comm.axis or g.axis.startswith(f"{comm.axis} x"))]
    return next(iter(of_axis), None) or next(g for g in mesh.groups if g.axis == "cp")


def link_words(groups: Groups) -> str:
    """The slowest level that some group of an axis crosses."""
    return groups.crosses[-1].kind if groups.crosses else ""


def _beside(comm: Comm, phase: str) -> str:
    if comm.axis == "pp":
        return "other micro-batches"
    return f"{phase} kernels"
