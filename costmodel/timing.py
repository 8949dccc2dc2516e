"""From clocks to a TimeReport: what each second of a step was for, without and with a pipeline."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from costmodel.catalog.profiles import Profile
from costmodel.cost.prices import RunPrices
from costmodel.program.build import Program
from costmodel.program.ir import BlockCounts, Part, Seq
from costmodel.program.schedule import Slot, micro_class, pace, passes, rank_of, rounds
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


BUSY_WORDS = {"memory": "memory-bound"}


def busy(counts: BlockCounts, scan: Scan) -> tuple[Parts, Parts, float]:
    """Seconds of the compute stream's kernels by what they are; FLOPs of matmuls and attention that are not recompute; seconds of the host."""
    out: Parts = {}
    flops: Parts = {}
    host = 0.0
    for block, times in counts:
        compiled = scan.of(block)
        host += times * compiled.host_s
        whole = block.phase if block.phase in ("recompute", "optimizer") else ""
        for kind, seconds in compiled.busy.items():
            name = whole or BUSY_WORDS.get(kind, kind)
            out[name] = out.get(name, 0.0) + times * seconds
        if not whole and compiled.flops:
            _add(flops, compiled.flops, times)
    return out, flops, host


def _waits(clocks: Clocks) -> Parts:
    """What the compute stream waited for, as parts of the breakdown."""
    out = {f"exposed {axis}": s for axis, s in clocks.waits.items() if axis not in ("host", "")}
    out["host wait"] = clocks.waits.get("host", 0.0)
    out["contention"] = clocks.contention
    return out


def _exposed(clocks: Clocks) -> Parts:
    return {axis: s for axis, s in clocks.waits.items() if axis not in ("host", "")}


def step_report(run: Run, prices: RunPrices, scan: Scan, clocks: Clocks, counts: BlockCounts, *, step_s: float | None = None) -> TimeReport:
    """The time of a rank whose streams did what `clocks` say, in a step of `step_s` (a pipeline's; else what they took): with the fixed cost of a
    step, and the wait for the slowest rank."""
    seconds = clocks.compute if step_s is None else step_s
    stragglers = seconds * prices.jitter * math.log2(run.cluster.gpus)
    parts, flops, host = busy(counts, scan)
    idle = {"bubble": seconds - clocks.compute, "stragglers": stragglers, "fixed": prices.fixed}
    phases, parts = {**clocks.phases, **idle}, {**parts, **_waits(clocks), **idle}
    return TimeReport(seconds + stragglers + prices.fixed, {k: v for k, v in phases.items() if v}, {k: v for k, v in parts.items() if v},
                      {a: s for a, s in clocks.comm.items() if s}, {a: s for a, s in _exposed(clocks).items() if s}, host, idle["bubble"], flops)


def tail_of(clocks: Clocks) -> tuple[float, str]:
    """How long, and which, a stream is still busy when a slot's last kernel is done; messages to other stages left out."""
    return max(((end - clocks.compute, axis) for axis, end in clocks.streams.items() if axis != "pp"), default=(0.0, ""))


Priced = Callable[[int, Part], tuple[float, float]]
"""(seconds, tail) of a part on a rank: how long it takes, and how long after it a stream is busy with what it left in flight."""


def paced(run: Run, ranks: tuple[PipelineRank, ...], prices: RunPrices, slot: Priced, every: bool) -> tuple[list[float], list[float]]:
    """The schedule of a run's micro-batches: when each rank is done, and the end of every action by its index."""
    p, m = run.plan, run.micro_batches
    what = [(kind, s, rank_of(p.schedule, s, p.pp)) for kind, s in passes(p.schedule, p.pp * p.virtual_stages)]
    durations: dict[str, list[float]] = {}
    for name in dict.fromkeys((micro_class(0, m), micro_class(m // 2, m), micro_class(m - 1, m))):
        durations[name] = [slot(rank, ranks[rank].part(Slot(kind, s, name)))[0] for kind, s, rank in what]
    first, middle, last = (durations[micro_class(i, m)] for i in (0, m // 2, m - 1))
    message = next(iter(ranks[0].builders.values())).links.message
    transfer = prices.seconds_of("pp", "send", message, p.pp)
    return pace(rounds(p.schedule, p.pp, p.virtual_stages, m), p.pp, m, middle, first, last, transfer, every=every)


class Finished(NamedTuple):
    """When things end in a pipelined step, counted from the first micro-batch."""

    ranks: list[float]
    """Each rank's last action."""
    actions: list[float]
    """Every action, by its index in the schedule, where they were asked for."""
    done: float
    """All of it, and what it left in flight."""
    around: float
    """Seconds of what comes before and after."""


def finished(run: Run, ranks: tuple[PipelineRank, ...], prices: RunPrices, slot: Priced, *, every: bool = False) -> Finished:
    """The ends of a step; `every`: of all actions too."""
    ends, actions = paced(run, ranks, prices, slot, every)
    done = max(*ends, *[end + slot(r, rank.part(rank.last))[1] for r, (end, rank) in enumerate(zip(ends, ranks, strict=True))])
    return Finished(ends, actions if every else [], done, max([slot(r, rank.before)[0] + slot(r, rank.after)[0] for r, rank in enumerate(ranks)]))


class _Slots:
    """The parts of a pipeline's ranks, each run alone once: a Priced."""

    def __init__(self, scan: Scan) -> None:
        self.scan = scan
        self.clocks: dict[int, Clocks] = {}
        self.prices: dict[int, tuple[float, float]] = {}

    def of(self, part: Part) -> Clocks:
        """The clocks at its end."""
        known = self.clocks.get(id(part))
        if known is None:
            known = self.clocks[id(part)] = step_time(part, self.scan.prices, scan=self.scan, drain=False)
        return known

    def __call__(self, rank: int, part: Part) -> tuple[float, float]:
        known = self.prices.get(id(part))
        if known is None:
            clocks = self.of(part)
            known = self.prices[id(part)] = clocks.compute, tail_of(clocks)[0]
        return known


def pipeline_seconds(run: Run, program: Program, prices: RunPrices, scan: Scan) -> float:
    """Seconds of a pipelined step as `pipeline_times` has them, and nothing else; stragglers and fixed time left out."""
    end = finished(run, program.pipeline, prices, _Slots(scan))
    return end.done + end.around


def pipeline_times(run: Run, program: Program, prices: RunPrices, scan: Scan, counts: Sequence[BlockCounts]) -> list[TimeReport]:
    """The time of every pipeline rank; `counts` are the blocks of each.

    Every distinct slot is run alone; the schedule is the recurrence start = max(rank is free, what it needs has arrived). When all
    ranks have drained, and what the last backward of each left in flight is done, gradients are reduced and parameters updated; the
    slowest rank sets the pace of both.
    """
    ranks: tuple[PipelineRank, ...] = program.pipeline
    slots = _Slots(scan)
    ends, _, done, around = finished(run, ranks, prices, slots)
    drained = max(ends)
    reports: dict[tuple[int, float], TimeReport] = {}
    out: list[TimeReport] = []
    for rank, end, blocks in zip(ranks, ends, counts, strict=True):
        tail, axis = tail_of(slots.of(rank.part(rank.last)))
        waited = max(0.0, end + tail - drained)
        alike = id(rank.parts), waited
        if alike not in reports:
            whole = _summed(rank.parts, slots)
            if waited:
                whole.compute += waited
                for into, name in ((whole.phases, "backward"), (whole.waits, axis)):
                    _add(into, {name: waited})
            reports[alike] = step_report(run, prices, scan, whole, blocks, step_s=done + around)
        out.append(reports[alike])
    return out


def _summed(parts: Seq, slots: _Slots) -> Clocks:
    """What the streams of a rank do in all its parts; the host's clock and the streams' left out."""
    whole = Clocks()
    for part, n in parts.parts:
        c = slots.of(part)
        whole.compute += n * c.compute
        whole.contention += n * c.contention
        for into, more in ((whole.phases, c.phases), (whole.comm, c.comm), (whole.waits, c.waits)):
            _add(into, more, n)
    return whole


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
    normal, late, prices = _Slots(scan), _Slots(slow), RunPrices(run, profile)

    def total(at: int) -> float:
        end = finished(run, ranks, prices, lambda rank, part: (late if rank == at else normal)(rank, part))
        return end.done + end.around

    p = run.plan.pp
    tried = range(p) if p <= SLOW_TRIED else sorted({0, 1, p - 2, p - 1, *range(0, p, -(-p // SLOW_TRIED))})
    base = total(-1)
    return {r: max(0.0, total(r) - base) for r in tried}


def waiting(time: TimeReport, seconds: float) -> TimeReport:
    """A rank's time where it also waits so long for the slow rank."""
    return replace(time, step_s=time.step_s + seconds, phases={**time.phases, "slow rank": seconds}, breakdown={**time.breakdown, "slow rank": seconds})
