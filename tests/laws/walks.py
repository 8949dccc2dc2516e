"""The readings of a program done the slow way: every block in order, nothing folded, nothing extrapolated."""

from collections import Counter
from typing import NamedTuple

from costmodel.program.ir import Part, RankProgram, Tensor, expand
from costmodel.simulate import Clocks, Prices, Scan


def net(part: Part) -> dict[str, int]:
    """Bytes allocated less bytes freed, by category, where they differ."""
    total: Counter[str] = Counter()
    for block in expand(part):
        for op in block.ops:
            total.update(_sums(op.allocs))
            total.subtract(_sums(op.frees))
    return {category: n for category, n in total.items() if n}


def _sums(tensors: tuple[Tensor, ...]) -> Counter[str]:
    out: Counter[str] = Counter()
    for t in tensors:
        out[t.category] += t.nbytes
    return out


class Walked(NamedTuple):
    """What the naive walk over first and steady step finds."""

    peak: int
    at_peak: dict[str, int]
    activations: int
    lowest: dict[str, int]
    """The lowest bytes that each category ever had."""


def walk_memory(role: RankProgram) -> Walked:
    """Live bytes after every allocation and release of the first step and of the second."""
    live = _sums(role.persistent)
    lowest: dict[str, int] = {}
    total = sum(live.values())
    peak, at_peak, activations = total, dict(live), live["activations"]
    for step in (role.first_step, role.step):
        for block in expand(step):
            for op in block.ops:
                for t in op.allocs:
                    live[t.category] += t.nbytes
                    total += t.nbytes
                if total > peak:
                    peak, at_peak = total, dict(live)
                activations = max(activations, live["activations"])
                for t in op.frees:
                    live[t.category] -= t.nbytes
                    total -= t.nbytes
                    lowest[t.category] = min(lowest.get(t.category, 0), live[t.category])
    return Walked(peak, {k: n for k, n in at_peak.items() if n}, activations, {k: n for k, n in lowest.items() if n < 0})


def walk_time(part: Part, prices: Prices) -> Clocks:
    """The clocks after running every block, one by one."""
    scan, clocks = Scan(prices), Clocks()
    for block in expand(part):
        scan.run(block, clocks)
    for end in clocks.streams.values():
        clocks.compute = max(clocks.compute, end)
    return clocks
