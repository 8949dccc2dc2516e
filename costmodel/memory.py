"""The memory reading of a program: what is live, when it is most, and what that is made of."""

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from costmodel.program.ir import Block, Op, Part, RankProgram, Seq, Tensor, expand, fold
from costmodel.report import CATEGORIES, Peak

ACTIVATIONS = "activations"
PACKED = sorted(CATEGORIES, key=("temporaries", ACTIVATIONS, "gradients", "communication", *CATEGORIES).index)
"""Categories in one integer, 64 bits each, those that change most lowest: adding two such integers adds every category."""
LANE = {category: 64 * i for i, category in enumerate(PACKED)}
EMPTY = 1 << 62
OFFSET = sum(EMPTY << lane for lane in LANE.values())
"""Added to a sum, it makes every lane positive, so that lanes can be told apart."""
LANES = struct.Struct(f"<{len(PACKED)}Q")
POOLS = ("", "gather", "reduce")
POOL_INDEX = {pool: i for i, pool in enumerate(POOLS)}
Pools = tuple[int, int, int]


def by_category(packed: int) -> dict[str, int]:
    """Bytes per category of a packed sum, zeros left out."""
    lanes = dict(zip(PACKED, LANES.unpack((packed + OFFSET).to_bytes(LANES.size, "little")), strict=True))
    return {category: lanes[category] - EMPTY for category in CATEGORIES if lanes[category] != EMPTY}


class Reading(NamedTuple):
    """Memory of a piece of program, relative to its start; a monoid under `chain`."""

    net: int
    """Bytes per category at the end, packed."""
    total: int
    peak: int
    """Highest total inside, at least 0 (the start)."""
    at_peak: int
    """Bytes per category then, packed."""
    moment: str
    held: int
    """Activations at the end."""
    activations: int
    """Highest activations inside, at least 0."""
    pools: tuple[Pools, Pools] | None
    """Bytes per allocator pool at the end, and the highest of each; None where only the compute stream's is used."""


NOTHING = Reading(0, 0, 0, 0, "", 0, 0, None)


def pools_of(r: Reading) -> tuple[Pools, Pools]:
    """Bytes per allocator pool at the end, and the highest of each."""
    return r.pools or ((r.total, 0, 0), (r.peak, 0, 0))


def read_block(block: Block) -> Reading:
    """One pass over the ops: allocations count before an op runs, releases after it."""
    net = at_peak = total = peak = held = top = 0
    moment, aside = "", False
    for op in block.ops:
        allocs, frees = op.allocs, op.frees
        if allocs:
            for _, category, nbytes, pool in allocs:
                net += nbytes << LANE[category]
                total += nbytes
                if category == ACTIVATIONS:
                    held += nbytes
                if pool:
                    aside = True
            if total > peak:
                peak, moment, at_peak = total, op.name, net
            if held > top:
                top = held
        for _, category, nbytes, pool in frees:
            net -= nbytes << LANE[category]
            total -= nbytes
            if category == ACTIVATIONS:
                held -= nbytes
            if pool:
                aside = True
    words = f"{block.phase} of {block.name}: {moment}" if moment else ""
    return Reading(net, total, peak, at_peak, words, held, top, _read_pools(block) if aside else None)


def _read_pools(block: Block) -> tuple[Pools, Pools]:
    """Bytes per allocator pool at the end, and the highest of each, where a block uses more than the compute stream's."""
    pools, peaks = [0] * len(POOLS), [0] * len(POOLS)
    for op in block.ops:
        for t in op.allocs:
            p = POOL_INDEX[t.pool]
            pools[p] += t.nbytes
            peaks[p] = max(peaks[p], pools[p])
        for t in op.frees:
            pools[POOL_INDEX[t.pool]] -= t.nbytes
    return (pools[0], pools[1], pools[2]), (peaks[0], peaks[1], peaks[2])


def chain(start: Reading, parts: Iterable[tuple[Reading, int]]) -> Reading:
    """`start`, then each part so often; of a part that leaves something behind, the last repeat is as high as any."""
    net, total, peak, at_peak, moment, held, top, pools = start
    for part, n in parts:
        net_1, total_1, peak_1, at_peak_1, moment_1, held_1, top_1, pools_1 = part
        if pools is not None or pools_1 is not None:
            pools = _chain_pools(pools or ((total, 0, 0), (peak, 0, 0)), pools_of(part), n)
        if total + peak_1 > peak:
            peak, at_peak, moment = total + peak_1, net + at_peak_1, moment_1
        if held + top_1 > top:
            top = held + top_1
        if n > 1:
            more = n - 1
            net, total, held = net + more * net_1, total + more * total_1, held + more * held_1
            if total + peak_1 > peak:
                peak, at_peak, moment = total + peak_1, net + at_peak_1, moment_1
            if held + top_1 > top:
                top = held + top_1
        net, total, held = net + net_1, total + total_1, held + held_1
    return Reading(net, total, peak, at_peak, moment, held, top, pools)


def _chain_pools(a: tuple[Pools, Pools], b: tuple[Pools, Pools], n: int) -> tuple[Pools, Pools]:
    """The same of each allocator pool."""
    (main, gather, reduce), (p, q, r) = a
    (main_1, gather_1, reduce_1), (p_1, q_1, r_1) = b
    more = max(0, main_1 * (n - 1)), max(0, gather_1 * (n - 1)), max(0, reduce_1 * (n - 1))
    return ((main + n * main_1, gather + n * gather_1, reduce + n * reduce_1),
            (max(p, main + more[0] + p_1), max(q, gather + more[1] + q_1), max(r, reduce + more[2] + r_1)))


def read(part: Part, memo: dict[int, Reading]) -> Reading:
    """The reading of a piece of program; `memo` holds what has been read before, of this program."""
    known = memo.get(id(part))
    return fold(part, read_block, partial(chain, NOTHING), memo) if known is None else known


def of_tensors(tensors: tuple[Tensor, ...]) -> Reading:
    """Tensors that are simply there."""
    return read_block(Block("", "", (Op("at rest", "host", kernels=0, allocs=tensors),)))._replace(moment="at rest")


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Peaks of a rank over its life, by phase; bytes."""

    peak: Peak
    phases: dict[str, Peak]
    states: dict[str, int]
    activations: int
    pool_peaks: tuple[int, ...]


def _at_rest(r: Reading, moment: str) -> Reading:
    """What is live when a piece of program ends, as the start of what follows."""
    pools = (r.pools[0], r.pools[0]) if r.pools else None
    return Reading(r.net, r.total, r.total, r.net, moment, r.held, r.held, pools)


def _phases(start: Reading, step: Part, memo: dict[int, Reading]) -> tuple[Reading, Reading, Reading]:
    """(whole, passes, update): readings of a step that begins at `start`; update is its last block."""
    assert not isinstance(step, Block)
    *before, (last, _) = step.parts
    passes = chain(_at_rest(start, "at rest"), [(read(child, memo), n) for child, n in before])
    update = chain(_at_rest(passes, "before the update"), [(read(last, memo), 1)])
    higher = update if update.peak > passes.peak else passes
    pools = None
    if passes.pools or update.pools:
        (p, q, r), (end, highest) = pools_of(passes)[1], pools_of(update)
        pools = end, (max(p, highest[0]), max(q, highest[1]), max(r, highest[2]))
    whole = Reading(update.net, update.total, higher.peak, higher.at_peak, higher.moment, update.held, max(passes.activations, update.activations), pools)
    return whole, passes, update


def memory_of(program: RankProgram, memo: dict[int, Reading] | None = None) -> MemoryReading:
    """Peaks of init, the first step, a steady step and its optimizer step.

    `memo` carries readings from one rank of a run to the next. The first step begins with what exists at start; a steady step
    with what the first left (gradients, optimizer state).
    """
    memo = {} if memo is None else memo
    init = memo.get(id(program.persistent)) or memo.setdefault(id(program.persistent), of_tensors(program.persistent))
    first, _, _ = _phases(init, program.first_step, memo)
    steady, passes, update = _phases(first, program.step, memo)
    peaks = [Peak(r.peak, r.moment, by_category(r.at_peak)) for r in (init, first, passes, update)]
    pools = tuple(map(max, pools_of(first)[1], pools_of(steady)[1]))
    phases = dict(zip(("init", "first step", "steady step", "optimizer step"), peaks, strict=True))
    return MemoryReading(max(peaks, key=lambda p: p.total_bytes), phases, by_category(steady.net), max(first.activations, steady.activations), pools)


def host_memory_of(program: RankProgram) -> MemoryReading:
    """The same of host memory: the reading of a program whose ops allocate there what `Op.host_allocs` says, and nothing else."""
    seen: dict[int, Part] = {}
    step, first_step = (fold(part, _on_host, lambda parts: Seq(tuple(parts)), seen) for part in (program.step, program.first_step))
    assert isinstance(step, Seq) and isinstance(first_step, Seq)
    return memory_of(program._replace(persistent=program.host, step=step, first_step=first_step))


def _on_host(block: Block) -> Part:
    ops = [op._replace(allocs=op.host_allocs, frees=op.host_frees) for op in block.ops if op.host_allocs or op.host_frees]
    return Block(block.name, block.phase, tuple(ops))


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
