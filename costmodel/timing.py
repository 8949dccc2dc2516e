"""From clocks to a TimeReport: what each second of a step was for, without and with a pipeline."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from costmodel.catalog.profiles import Profile
from costmodel.cost.prices import RunPrices
from costmodel.program.build import Program
from costmodel.program.ir import BlockCounts, Part, block_counts
from costmodel.program.schedule import Slot, linear_order, micro_class, pace, passes, rank_of
from costmodel.program.stages import PipelineRank
from costmodel.report import TimeReport
from costmodel.simulate import Clocks, Scan, step_time
from costmodel.spec import Run

Parts = dict[str, float]
SLOW_TRIED = 16
"""Pipeline ranks of which each is tried as the slow one."""


def _add(into: Parts, more: Parts, times: float = 1.0) -> None:
    for key, seconds in more.items():
        into[key] = into.get(key, 0.0) + times * seconds


def busy(counts: BlockCounts, scan: Scan) -> tuple[Parts, Parts, float]:
    """Seconds of the compute stream's kernels by what they are; FLOPs of matmuls and attention that are not recompute; seconds of the host."""
    out: Parts = {}
    flops: Parts = {}
    host = 0.0
    for block, times in counts:
        compiled = scan.of(block)
        whole = block.phase if block.phase in ("recompute", "optimizer") else ""
        host += times * compiled.host_s
        for kind, seconds in compiled.busy.items():
            name = whole or ("memory-bound" if kind == "memory" else kind)
            out[name] = out.get(name, 0.0) + times * seconds
        if not whole:
            _add(flops, compiled.flops, times)
    return out, flops, host


def _waits(clocks: Clocks) -> Parts:
    """What the compute stream waited for, as parts of the breakdown."""
    out = {f"exposed {axis}": s for axis, s in clocks.waits.items() if axis not in ("host", "")}
    out["host wait"] = clocks.waits.get("host", 0.0)
    out["contention"] = clocks.contention
    return out


def _report(run: Run, prices: RunPrices, seconds: float, parts: Parts, phases: Parts, comm: Parts, exposed: Parts, flops: Parts,
            host: float, bubble: float) -> TimeReport:
    """The step, with the fixed cost of one and the wait for the slowest rank."""
    stragglers = seconds * prices.jitter * math.log2(run.cluster.gpus)
    parts = {**parts, "bubble": bubble, "stragglers": stragglers, "fixed": prices.fixed}
    phases = {**phases, "bubble": bubble, "stragglers": stragglers, "fixed": prices.fixed}
    return TimeReport(seconds + stragglers + prices.fixed, {k: v for k, v in phases.items() if v}, {k: v for k, v in parts.items() if v},
                      {a: s for a, s in comm.items() if s}, {a: s for a, s in exposed.items() if s}, host, bubble, flops)


def _exposed(clocks: Clocks) -> Parts:
    return {axis: s for axis, s in clocks.waits.items() if axis not in ("host", "")}


def step_report(run: Run, prices: RunPrices, scan: Scan, clocks: Clocks, counts: BlockCounts) -> TimeReport:
    """The time of a rank without pipeline."""
    parts, flops, host = busy(counts, scan)
    return _report(run, prices, clocks.compute, {**parts, **_waits(clocks)}, clocks.phases, clocks.comm, _exposed(clocks), flops, host, 0.0)


class _Slot:
    """A part of a rank's step, run alone: how long it takes and what for."""

    __slots__ = ("seconds", "parts", "phases", "comm", "exposed", "flops", "host", "tail", "tail_axis")

    def __init__(self, part: Part, prices: RunPrices, scan: Scan, seen: dict[int, BlockCounts]) -> None:
        clocks = step_time(part, prices, scan=scan, drain=False)
        self.seconds = clocks.compute
        self.parts, self.flops, self.host = busy(block_counts(part, seen), scan)
        _add(self.parts, _waits(clocks))
        self.phases, self.comm, self.exposed = clocks.phases, clocks.comm, _exposed(clocks)
        self.tail, self.tail_axis = tail_of(clocks)


def tail_of(clocks: Clocks) -> tuple[float, str]:
    """How long, and which, a stream is still busy when a slot's last kernel is done; messages to other stages left out."""
    return max(((end - clocks.compute, axis) for axis, end in clocks.streams.items() if axis != "pp"), default=(0.0, ""))


def paced(run: Run, ranks: tuple[PipelineRank, ...], prices: RunPrices, seconds: Callable[[int, Part], float]) -> tuple[list[float], list[float]]:
    """The schedule of a run's micro-batches, given the seconds of a slot on a rank: when each rank is done, and the end of every action by its index."""
    p, m = run.plan, run.micro_batches
    what = [(kind, s, rank_of(p.schedule, s, p.pp)) for kind, s in passes(p.schedule, p.pp * p.virtual_stages)]
    durations: dict[str, list[float]] = {}
    for name in dict.fromkeys((micro_class(0, m), micro_class(m // 2, m), micro_class(m - 1, m))):
        durations[name] = [seconds(rank, ranks[rank].part(Slot(kind, s, name))) for kind, s, rank in what]
    first, middle, last = (durations[micro_class(i, m)] for i in (0, m // 2, m - 1))
    message = next(iter(ranks[0].builders.values())).links.message
    transfer = prices.seconds_of("pp", "send", message, p.pp)
    return pace(linear_order(p.schedule, p.pp, p.virtual_stages, m), p.pp, m, middle, first, last, transfer)


class Finished(NamedTuple):
    """When things end in a pipelined step, counted from the first micro-batch."""

    ranks: list[float]
    """Each rank's last action."""
    actions: list[float]
    """Every action, by its index in the schedule."""
    done: float
    """All of it, and what it left in flight."""
    around: float
    """Seconds of what comes before and after."""


def finished(run: Run, ranks: tuple[PipelineRank, ...], prices: RunPrices, slot: Callable[[int, Part], tuple[float, float]]) -> Finished:
    """The ends of a step, given (seconds, tail) of a part on a rank."""
    ends, actions = paced(run, ranks, prices, lambda rank, part: slot(rank, part)[0])
    done = max(*ends, *(end + slot(r, rank.part(rank.last))[1] for r, (end, rank) in enumerate(zip(ends, ranks, strict=True))))
    return Finished(ends, actions, done, max(slot(r, rank.before)[0] + slot(r, rank.after)[0] for r, rank in enumerate(ranks)))


def pipeline_seconds(run: Run, program: Program, prices: RunPrices, scan: Scan) -> float:
    """Seconds of a pipelined step as `pipeline_times` has them, and nothing else; stragglers and fixed time left out."""
    slots: dict[int, tuple[float, float]] = {}

    def priced(_: int, part: Part) -> tuple[float, float]:
        known = slots.get(id(part))
        if known is None:
            clocks = step_time(part, prices, scan=scan, drain=False)
            known = slots[id(part)] = clocks.compute, tail_of(clocks)[0]
        return known

    end = finished(run, program.pipeline, prices, priced)
    return end.done + end.around


def pipeline_times(run: Run, program: Program, prices: RunPrices, scan: Scan, seen: dict[int, BlockCounts]) -> list[TimeReport]:
    """The time of every pipeline rank.

    Every distinct slot is run alone; the schedule is the recurrence start = max(rank is free, what it needs has arrived). When all
    ranks have drained, and what the last backward of each left in flight is done, gradients are reduced and parameters updated; the
    slowest rank sets the pace of both.
    """
    ranks: tuple[PipelineRank, ...] = program.pipeline
    slots: dict[int, _Slot] = {}

    def priced(part: Part) -> _Slot:
        if id(part) not in slots:
            slots[id(part)] = _Slot(part, prices, scan, seen)
        return slots[id(part)]

    ends, _, done, around = finished(run, ranks, prices, lambda _, part: (priced(part).seconds, priced(part).tail))
    drained = max(ends)
    final = [priced(rank.part(rank.last)) for rank in ranks]
    reports: dict[tuple[int, float], TimeReport] = {}
    out: list[TimeReport] = []
    for rank, end, left in zip(ranks, ends, final, strict=True):
        waited = max(0.0, end + left.tail - drained)
        alike = id(rank.parts), waited
        if alike not in reports:
            parts: Parts = {}
            phases: Parts = {}
            comm: Parts = {}
            exposed: Parts = {}
            flops: Parts = {}
            host, worked = 0.0, waited
            for part, n in rank.parts.parts:
                slot = priced(part)
                worked += n * slot.seconds
                host += n * slot.host
                for into, more in ((parts, slot.parts), (phases, slot.phases), (comm, slot.comm), (exposed, slot.exposed), (flops, slot.flops)):
                    _add(into, more, n)
            if waited:
                for into, name in ((parts, f"exposed {left.tail_axis}"), (phases, "backward"), (exposed, left.tail_axis)):
                    _add(into, {name: waited})
            reports[alike] = _report(run, prices, done + around, parts, phases, comm, exposed, flops, host, done + around - worked)
        out.append(reports[alike])
    return out


def slow_rank_waits(run: Run, profile: Profile, program: Program, scan: Scan) -> dict[int, float]:
    """Seconds by which a step is longer where the slow rank (cluster.slow_rank) is one of the i-th role.

    Its kernels take longer, its communication does not; every other rank waits for it in the collectives of the step, so the whole job goes
    at its pace. In a pipeline the schedule runs with that rank's slots stretched: what falls into its bubble costs nothing. Of more than
    SLOW_TRIED pipeline ranks the first, the last and some between are tried.
    """
    slow = Scan(RunPrices(run, profile, run.cluster.slow_rank))
    if run.plan.pp == 1:
        base = max(step_time(role.step, scan.prices, scan=scan).compute for role in program.roles)
        return {i: max(0.0, step_time(role.step, slow.prices, scan=slow).compute - base) for i, role in enumerate(program.roles)}
    ranks: tuple[PipelineRank, ...] = program.pipeline
    seen: dict[int, BlockCounts] = {}
    slots: dict[tuple[bool, int], _Slot] = {}
    prices = RunPrices(run, profile)

    def priced(part: Part, slower: bool) -> tuple[float, float]:
        key = slower, id(part)
        if key not in slots:
            slots[key] = _Slot(part, prices, slow if slower else scan, seen)
        return slots[key].seconds, slots[key].tail

    def total(at: int) -> float:
        end = finished(run, ranks, prices, lambda rank, part: priced(part, rank == at))
        return end.done + end.around

    p = run.plan.pp
    tried = range(p) if p <= SLOW_TRIED else sorted({0, 1, p - 2, p - 1, *range(0, p, -(-p // SLOW_TRIED))})
    base = total(-1)
    return {r: max(0.0, total(r) - base) for r in tried}


def waiting(time: TimeReport, seconds: float) -> TimeReport:
    """A rank's time where it also waits so long for the slow rank."""
    return replace(time, step_s=time.step_s + seconds, phases={**time.phases, "slow rank": seconds}, breakdown={**time.breakdown, "slow rank": seconds})
