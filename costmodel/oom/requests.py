"""What the ranks of a run ask the allocator for, one request after the other, and what is live then."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from costmodel.program.build import Program
from costmodel.program.inventory import Inventory
from costmodel.program.ir import Block, Part, RankProgram, Tensor, expand
from costmodel.spec import DTYPE_BYTES, Run

MOST_BLOCKS = 50_000
"""Blocks of a program that are walked; a step of more is cut short."""


Pieces = Callable[[Tensor], list[tuple[str, int]]]
"""How a tensor of the program is asked for."""
Step = Literal["init", "first step", "steady step"]


@dataclass(frozen=True, slots=True)
class Request:
    """A tensor that a rank asks the allocator for."""

    tensor: str
    """Its name in the program, or of the parameter that it belongs to."""
    part_of: str
    """The list that it is one of (exp_avg, parameters, …); empty where it stands alone."""
    category: str
    nbytes: int
    step: Step
    moment: str
    """As in the report: phase, block and operation."""
    role: str
    live_low: int
    """Predicted bytes allocated when it is asked for, with workspaces: at the least and at the most, for one of a list."""
    live_high: int


class _Ask(NamedTuple):
    """A request of a block: what is asked for, and the bytes live before and after, counted from the block's start."""

    tensor: str
    part_of: str
    category: str
    nbytes: int
    moment: str
    low: int
    high: int


def requests(run: Run, program: Program, role: RankProgram, workspaces: int, wanted: Callable[[int], bool]) -> Iterator[Request]:
    """What a rank asks for as the model is made and in its first two steps, in order: every request of a size that is `wanted`, of the
    others those of each block's first turn."""
    pieces = _pieces(run, program.inventory)
    live = workspaces
    for t in role.persistent:
        for name, nbytes in pieces(t):
            yield Request(name, t.name if name != t.name else "", t.category, nbytes, "init", "at rest", role.role, live, live + t.nbytes)
        live += t.nbytes
    seen: dict[int, tuple[int, list[_Ask]]] = {}
    steps: tuple[tuple[Step, Part], ...] = (("first step", role.first_step), ("steady step", role.step))
    for step, part in steps:
        for i, block in enumerate(expand(part)):
            if i == MOST_BLOCKS:
                return
            known = seen.get(id(block))
            if known is None:
                net, asks = _asks(block, pieces)
                seen[id(block)] = net, [ask for ask in asks if wanted(ask.nbytes)]
            else:
                net, asks = known
            for ask in asks:
                yield Request(*ask[:4], step, ask.moment, role.role, live + ask.low, live + ask.high)
            live += net


def _asks(block: Block, pieces: Pieces) -> tuple[int, list[_Ask]]:
    """What a block leaves behind, and its requests."""
    live, out = 0, []
    for op in block.ops:
        moment = f"{block.phase} of {block.name}: {op.name}"
        before, after = live, live + sum(t.nbytes for t in op.allocs)
        for t in op.allocs:
            for name, nbytes in pieces(t):
                if name == t.name:
                    out.append(_Ask(name, "", t.category, nbytes, moment, live, live))
                else:  # lists that one op makes grow side by side, parameter by parameter
                    out.append(_Ask(name, t.name, t.category, nbytes, moment, before, after))
            live += t.nbytes
        live -= sum(t.nbytes for t in op.frees)
    return live, out


LISTS = {"parameters": "parameter", "parameters (shard)": "parameter", "exp_avg": "state", "exp_avg_sq": "state", "momentum": "state",
         "optimizer.sqrt": "state", "gradients (shard)": "gradient"}
"""Tensors of the program that are one for each parameter, and which dtype they have."""


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
