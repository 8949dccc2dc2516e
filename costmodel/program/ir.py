"""The program of one rank: operations, blocks that repeat, and the one fold that every reading uses.

An Op states what is computed, moved, allocated and freed; it holds no seconds. A Block is a tuple of Ops that always run
together. A Seq is (Block or Seq, repeats)…; a 96-layer stage is a handful of distinct blocks.
"""

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, TypeVar, Union

Kind = Literal["matmul", "attention", "memory", "copy", "collective", "wait", "sync", "host"]


class Tensor(NamedTuple):
    """An allocation or a release: what, its category (costmodel.report.CATEGORIES), and its bytes (always positive)."""

    name: str
    category: str
    nbytes: int


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
    """matmul: (batch, m, n, k); attention: (batch, heads, kv_heads, s_q, s_k, head_dim, causal, backward)."""
    dtype: str = "fp32"
    kernels: int = 1
    """Kernels the host launches for it."""
    allocs: tuple[Tensor, ...] = ()
    frees: tuple[Tensor, ...] = ()
    comm: Comm | None = None
    event: str = ""
    """collective: the event it signals when done (empty: compute waits at once); wait: the event waited for."""


class Block:
    """Ops that run together, in order, in one phase; equal blocks are one object within a program."""

    __slots__ = ("name", "phase", "ops")

    def __init__(self, name: str, phase: str, ops: tuple[Op, ...]) -> None:
        self.name = name
        self.phase = phase
        self.ops = ops

    def __repr__(self) -> str:
        return f"Block({self.name}, {self.phase}, {len(self.ops)} ops)"


class Seq(NamedTuple):
    """Parts in order, each with how often it repeats."""

    parts: tuple[tuple[Union[Block, "Seq"], int], ...]


Part = Union[Block, Seq]
A = TypeVar("A")


def seq(*parts: Part | tuple[Part, int]) -> Seq:
    """A Seq of parts, dropping empty ones; `seq(a, (b, 3))` is a, then b three times."""
    out: list[tuple[Part, int]] = []
    for part in parts:
        p, n = part if isinstance(part, tuple) and not isinstance(part, Seq) else (part, 1)
        if n > 0 and (p.ops if isinstance(p, Block) else p.parts):
            out.append((p, n))
    return Seq(tuple(out))


def fold(part: Part, leaf: Callable[[Block], A], join: Callable[[A, A], A], repeat: Callable[[A, int], A], unit: A) -> A:
    """Read a program bottom-up with a monoid: `leaf` reads a Block, `join` is sequence, `repeat` is the n-fold join.

    Equal blocks are read once.
    """
    seen: dict[int, A] = {}

    def read(p: Part) -> A:
        key = id(p)
        if key in seen:
            return seen[key]
        if isinstance(p, Block):
            value = leaf(p)
        else:
            value = unit
            for child, n in p.parts:
                one = read(child)
                value = join(value, one if n == 1 else repeat(one, n))
        seen[key] = value
        return value

    return read(part)


def expand(part: Part) -> Iterator[Block]:
    """Every block in the order in which it runs, repeats written out, lazily."""
    if isinstance(part, Block):
        yield part
        return
    for child, n in part.parts:
        for _ in range(n):
            yield from expand(child)


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
