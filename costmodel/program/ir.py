"""The program of one rank: operations, blocks that repeat, and the one fold that every reading uses.

An Op states what is computed, moved, allocated and freed; it holds no seconds. A Block is a tuple of Ops that always run
together. A Seq is (Block or Seq, repeats)…; a 96-layer stage is a handful of distinct blocks.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal, NamedTuple, TypeVar

Kind = Literal["matmul", "attention", "memory", "copy", "collective", "side", "wait", "record", "hold", "sync", "host", "route", "mark"]
"""What an op is, and where it runs.

matmul, attention, memory: work on the compute stream. side: memory-bound work on the stream of `axis`. copy: a transfer between
host and device, on its own stream. collective: on its axis's stream, behind what that stream already has. wait: compute waits for
an event. record: an event becomes the compute stream's present. hold: an axis's stream waits for an event. sync: the host waits
for compute. host: work of the host alone, `kernels` units of the cause that `axis` names (costmodel.program.host). route: the host
reads which rows go to which expert while compute waits, `kernels` the experts. mark: a place in a unit where
the strategy puts ops of its own; the builder leaves none.
"""


class Tensor(NamedTuple):
    """An allocation or a release: what, its category (costmodel.report.CATEGORIES), and its bytes (always positive)."""

    name: str
    category: str
    nbytes: int
    pool: str = ""
    """The stream whose allocator pool it comes from: the compute stream's, or "gather", "reduce"."""


class Comm(NamedTuple):
    """The communication of a collective.

    `nbytes` is the message in the field's convention: all-reduce and broadcast, the per-rank buffer; all-gather and
    reduce-scatter, the full tensor; all-to-all, one rank's send buffer; send, the message.
    """

    axis: str
    kind: str
    nbytes: int
    in_bytes: int
    out_bytes: int
    dtype: str
    group: int


class Op(NamedTuple):
    """One operation of a rank's program."""

    name: str
    kind: Kind
    flops: float = 0.0
    nbytes: float = 0.0
    """Bytes read plus bytes written in device memory."""
    dims: tuple[int, ...] = ()
    """matmul: (batch, m, n, k); attention: (batch, heads, kv_heads, s_q, s_k, head_dim, causal, backward), where a window counts as the shorter
    causal s_k of as much work."""
    dtype: str = "fp32"
    kernels: int = 1
    """Kernels the host launches for it."""
    allocs: tuple[Tensor, ...] = ()
    frees: tuple[Tensor, ...] = ()
    comm: Comm | None = None
    event: str = ""
    """collective, copy: the event it signals when done (empty: compute waits at once); wait, hold: the event waited for;
    record: the event set."""
    axis: str = ""
    """side, hold: the axis on whose stream it happens; host: what causes the work."""
    again: bool = False
    """Runs a second time, to compute an activation again."""
    detached: bool = False
    """collective, side: does not wait for the compute stream, for its input was there long before."""
    inline: bool = False
    """collective: the call returns when it is done, where host and device are one (gloo); on a GPU its stream alone is held up."""

    def taking(self, tensors: tuple[Tensor, ...]) -> "Op":
        """This op allocating more (much faster than _replace)."""
        return _op((*self[:_ALLOCS], self.allocs + tensors, *self[_ALLOCS + 1:])) if tensors else self

    def freeing(self, tensors: tuple[Tensor, ...]) -> "Op":
        """This op freeing more."""
        return _op((*self[:_FREES], self.frees + tensors, *self[_FREES + 1:]))


_op = partial(tuple.__new__, Op)
_ALLOCS, _FREES = Op._fields.index("allocs"), Op._fields.index("frees")


class Block:
    """Ops that run together, in order, in one phase; equal blocks are one object within a program."""

    __slots__ = ("name", "phase", "ops", "timed")

    def __init__(self, name: str, phase: str, ops: tuple[Op, ...], timed: "Block | None" = None) -> None:
        self.name = name
        self.phase = phase
        self.ops = ops
        self.timed = timed
        """A block whose ops take and send the same and differ in what they free: its clocks are this one's too. None: no other than itself."""

    def __repr__(self) -> str:
        return f"Block({self.name}, {self.phase}, {len(self.ops)} ops)"


class Seq(NamedTuple):
    """Parts in order, each with how often it repeats."""

    parts: tuple[tuple["Block | Seq", int], ...]


Part = Block | Seq
A = TypeVar("A")


def seq(*parts: Part | tuple[Part, int]) -> Seq:
    """A Seq of parts, dropping empty ones; `seq(a, (b, 3))` is a, then b three times."""
    out: list[tuple[Part, int]] = []
    for part in parts:
        p, n = part if isinstance(part, tuple) and not isinstance(part, Seq) else (part, 1)
        if n > 0 and (p.ops if isinstance(p, Block) else p.parts):
            out.append((p, n))
    return Seq(tuple(out))


def periods(marks: Sequence[object], longest: int = 16) -> list[tuple[int, int, int]]:
    """A sequence as stretches (start, length, count) of its shortest periods up to `longest`; a stretch without one has count 1."""
    out: list[tuple[int, int, int]] = []
    i, n = 0, len(marks)
    while i < n:
        period, count = 1, 1
        for candidate in range(1, min(longest, (n - i) // 2) + 1):
            if marks[i] == marks[i + candidate] and marks[i:i + candidate] == marks[i + candidate:i + 2 * candidate]:
                period, count = candidate, 2
                while marks[i:i + period] == marks[i + count * period:i + (count + 1) * period]:
                    count += 1
                break
        out.append((i, period, count))
        i += period * count
    return out


def fold(part: Part, leaf: Callable[[Block], A], chain: Callable[[list[tuple[A, int]]], A], seen: dict[int, A]) -> A:
    """Read a program bottom-up: `leaf` reads a Block, `chain` the readings of a Seq's parts in order, each with its repeats.

    Equal parts are read once; `seen` carries readings (by identity) from one fold of a program to the next.
    """
    if isinstance(part, Block):
        value = leaf(part)
    else:
        parts: list[tuple[A, int]] = []
        for child, n in part.parts:
            one = seen.get(id(child))
            parts.append((fold(child, leaf, chain, seen) if one is None else one, n))
        value = chain(parts)
    seen[id(part)] = value
    return value


def expand(part: Part) -> Iterator[Block]:
    """Every block in the order in which it runs, repeats written out, lazily."""
    if isinstance(part, Block):
        yield part
        return
    for child, n in part.parts:
        for _ in range(n):
            yield from expand(child)


BlockCounts = list[tuple[Block, int]]


def block_counts(part: Part, seen: dict[int, BlockCounts] | None = None) -> BlockCounts:
    """Every distinct block and how often it runs: the fold that counts. `seen` carries counts of parts (by identity) along."""
    seen = {} if seen is None else seen
    known = seen.get(id(part))
    if known is not None:
        return known
    if isinstance(part, Block):
        counts = [(part, 1)]
    else:
        totals: dict[Block, int] = {}
        for child, times in part.parts:
            if isinstance(child, Block):
                totals[child] = totals.get(child, 0) + times
            else:
                for block, n in block_counts(child, seen):
                    totals[block] = totals.get(block, 0) + n * times
        counts = list(totals.items())
    seen[id(part)] = counts
    return counts


class RankProgram(NamedTuple):
    """What one rank role runs: set-up, then steps of micro-batches and an update."""

    role: str
    ranks: int
    """How many ranks play this role."""
    example_rank: int
    persistent: tuple[Tensor, ...]
    """State that lives before the first step: parameters, master weights, buffers."""
    step: Seq
    """A steady step; allocations and frees net to zero."""
    first_step: Seq
    """The first step; differs where state is created lazily. Its net allocation is the state that stays."""
