"""The memory reading of a program: what is live, when it is most, and what that is made of."""

from dataclasses import dataclass
from operator import add
from typing import NamedTuple

from costmodel.program.ir import Block, Part, RankProgram, Tensor, expand, fold
from costmodel.report import CATEGORIES, Peak

INDEX = {category: i for i, category in enumerate(CATEGORIES)}
POOLS = ("", "gather", "reduce")
POOL_INDEX = {pool: i for i, pool in enumerate(POOLS)}
ACTIVATIONS = INDEX["activations"]
WIDTH = len(CATEGORIES)


class Reading(NamedTuple):
    """Memory of a piece of program, relative to its start; a monoid under `join`."""

    net: tuple[int, ...]
    """Bytes per category at the end."""
    total: int
    peak: int
    """Highest total inside, at least 0 (the start)."""
    at_peak: tuple[int, ...]
    moment: str
    activations: int
    """Highest activations inside, at least 0."""
    pools: tuple[int, ...]
    """Bytes per allocator pool at the end, and the highest of each."""
    pool_peaks: tuple[int, ...]


ZERO = Reading((0,) * WIDTH, 0, 0, (0,) * WIDTH, "", 0, (0,) * len(POOLS), (0,) * len(POOLS))


def read_block(block: Block) -> Reading:
    """One pass over the ops: allocations count before an op runs, releases after it."""
    net = [0] * WIDTH
    total = peak = top = 0
    moment, aside = "", False
    at_peak: tuple[int, ...] | None = None
    for op in block.ops:
        allocs, frees = op.allocs, op.frees
        if allocs:
            for _, category, nbytes, pool in allocs:
                net[INDEX[category]] += nbytes
                total += nbytes
                if pool:
                    aside = True
            if total > peak:
                peak, moment, at_peak = total, op.name, tuple(net)
            if net[ACTIVATIONS] > top:
                top = net[ACTIVATIONS]
        if frees:
            for _, category, nbytes, pool in frees:
                net[INDEX[category]] -= nbytes
                total -= nbytes
                if pool:
                    aside = True
    words = f"{block.phase} of {block.name}: {moment}" if moment else ""
    pools, pool_peaks = _read_pools(block) if aside else ((total, 0, 0), (peak, 0, 0))
    return Reading(tuple(net), total, peak, at_peak or (0,) * WIDTH, words, top, pools, pool_peaks)


def _read_pools(block: Block) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Bytes per allocator pool at the end, and the highest of each, where a block uses more than the compute stream's."""
    pools, peaks = [0] * len(POOLS), [0] * len(POOLS)
    for op in block.ops:
        for t in op.allocs:
            p = POOL_INDEX[t.pool]
            pools[p] += t.nbytes
            peaks[p] = max(peaks[p], pools[p])
        for t in op.frees:
            pools[POOL_INDEX[t.pool]] -= t.nbytes
    return tuple(pools), tuple(peaks)


def join(a: Reading, b: Reading) -> Reading:
    """a, then b."""
    if a is ZERO:
        return b
    later = a.total + b.peak
    if later > a.peak:
        peak, moment = later, b.moment
        at_peak = tuple(map(add, a.net, b.at_peak))
    else:
        peak, moment, at_peak = a.peak, a.moment, a.at_peak
    top, here = a.activations, a.net[ACTIVATIONS] + b.activations
    return Reading(tuple(map(add, a.net, b.net)), a.total + b.total, peak, at_peak, moment, top if top > here else here,
                   tuple(map(add, a.pools, b.pools)), tuple(map(max, a.pool_peaks, map(add, a.pools, b.pool_peaks))))


def repeat(a: Reading, n: int) -> Reading:
    """a, n times: the peak is in the last repeat where a leaves something behind, else in the first."""
    if not any(a.net) and not any(a.pools):
        return a
    before = Reading(tuple([x * (n - 1) for x in a.net]), a.total * (n - 1), 0, (0,) * WIDTH, "", 0,
                     tuple([x * (n - 1) for x in a.pools]), (0,) * len(POOLS))
    end = join(before, a)
    first = a.peak >= end.peak
    return Reading(end.net, end.total, max(a.peak, end.peak), a.at_peak if first else end.at_peak, a.moment, max(a.activations, end.activations),
                   end.pools, tuple([max(p, q) for p, q in zip(a.pool_peaks, end.pool_peaks, strict=True)]))


def read(part: Part, memo: dict[int, Reading]) -> Reading:
    """The reading of a piece of program; `memo` holds what has been read before, of this program."""
    known = memo.get(id(part))
    return fold(part, read_block, join, repeat, ZERO, memo) if known is None else known


def of_tensors(tensors: tuple[Tensor, ...]) -> Reading:
    """Tensors that are simply there."""
    net, pools = [0] * WIDTH, [0] * len(POOLS)
    for t in tensors:
        net[INDEX[t.category]] += t.nbytes
        pools[POOL_INDEX[t.pool]] += t.nbytes
    total = sum(net)
    return Reading(tuple(net), total, total, tuple(net), "at rest", net[ACTIVATIONS], tuple(pools), tuple(pools))


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Peaks of a rank over its life, by phase; bytes."""

    peak: Peak
    phases: dict[str, Peak]
    states: dict[str, int]
    activations: int
    pool_peaks: tuple[int, ...]


def _peak(r: Reading) -> Peak:
    return Peak(r.peak, r.moment, {c: n for c, n in zip(CATEGORIES, r.at_peak, strict=True) if n})


def _phases(start: Reading, step: Part, memo: dict[int, Reading]) -> tuple[Reading, Reading, Reading]:
    """(whole, passes, update): readings of a step that begins at `start`; update is its last block."""
    assert not isinstance(step, Block)
    base = Reading(start.net, start.total, start.total, start.net, "at rest", start.net[ACTIVATIONS], start.pools, start.pools)
    passes = base
    for child, n in step.parts[:-1]:
        one = read(child, memo)
        passes = join(passes, one if n == 1 else repeat(one, n))
    here = Reading(passes.net, passes.total, passes.total, passes.net, "before the update", passes.net[ACTIVATIONS], passes.pools, passes.pools)
    last, _ = step.parts[-1]
    update = join(here, read(last, memo))
    higher = update if update.peak > passes.peak else passes
    whole = Reading(update.net, update.total, higher.peak, higher.at_peak, higher.moment, max(passes.activations, update.activations), update.pools,
                    tuple(map(max, passes.pool_peaks, update.pool_peaks)))
    return whole, passes, update


def memory_of(program: RankProgram, memo: dict[int, Reading] | None = None) -> MemoryReading:
    """Peaks of init, the first step, a steady step and its optimizer step.

    `memo` carries readings from one rank of a run to the next. The first step begins with what exists at start; a steady step
    with what the first left (gradients, optimizer state).
    """
    memo = {} if memo is None else memo
    init = of_tensors(program.persistent)
    first, _, _ = _phases(init, program.first_step, memo)
    steady, passes, update = _phases(first, program.step, memo)
    whole = max((init, first, steady), key=lambda r: r.peak)
    pools = tuple([max(p) for p in zip(first.pool_peaks, steady.pool_peaks, strict=True)])
    phases = {"init": _peak(init), "first step": _peak(first), "steady step": _peak(passes), "optimizer step": _peak(update)}
    states = {c: n for c, n in zip(CATEGORIES, steady.net, strict=True) if n}
    return MemoryReading(_peak(whole), phases, states, max(first.activations, steady.activations), pools)


MOST_BLOCKS = 50_000
"""Blocks that are walked one by one before the walk is given up."""


def tensors_at_peak(program: RankProgram) -> dict[str, int]:
    """Saved activations and temporaries that are live when a rank's memory is highest, by tensor name; bytes, the largest first.

    Empty where the peak is not reached within MOST_BLOCKS blocks, or at rest.
    """
    peak = memory_of(program).peak
    held = dict.fromkeys(CATEGORIES, 0)
    live: dict[str, int] = {}

    def add(tensors: tuple[Tensor, ...], sign: int) -> None:
        for name, category, nbytes, _ in tensors:
            held[category] += sign * nbytes
            if category in ("activations", "temporaries"):
                live[name] = live.get(name, 0) + sign * nbytes

    add(program.persistent, 1)
    for part in (program.first_step, program.step):
        for i, block in enumerate(expand(part)):
            if i == MOST_BLOCKS:
                return {}
            for op in block.ops:
                add(op.allocs, 1)
                if op.name in peak.moment and all(held[c] == peak.by_category.get(c, 0) for c in CATEGORIES):
                    return dict(sorted(((name, n) for name, n in live.items() if n > 0), key=lambda item: -item[1]))
                add(op.frees, -1)
    return {}
