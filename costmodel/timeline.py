"""What every stream of a rank does when, over one step: spans (a micro-batch's forward or backward, the update), units, single ops.

The clocks are those of the scan that prices the step: each step of a compiled block is run by `simulate.run_block`, and what moved is a
slice. Spans are found at once; the slices of a span are laid out on demand, so that a step of a million kernels costs nothing until
somebody looks.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from costmodel.catalog.profiles import Profile, load_profile
from costmodel.cost.prices import RunPrices
from costmodel.program.actions import BACKWARD, FORWARD, INPUT, WEIGHT
from costmodel.program.ir import Block, Op, Part, Seq, expand
from costmodel.program.schedule import Slot, end_index, micro_class, rank_order
from costmodel.program.stages import PipelineRank
from costmodel.repricing import program_of
from costmodel.simulate import (
    BLOCKING,
    CHUNK,
    COMPUTE_KINDS,
    ISSUE,
    SIDE,
    WAIT,
    Clocks,
    Compiled,
    Scan,
    host_s,
    run_block,
    step_time,
)
from costmodel.spec import PlanError, Run
from costmodel.timing import finished, tail_of

SliceKind = Literal["unit", "matmul", "attention", "memory", "host", "collective", "side", "wait"]
COMPUTE, HOST = "compute", "host"
WORDS = {FORWARD: "forward", BACKWARD: "backward", INPUT: "input gradient", WEIGHT: "weight gradient"}


@dataclass(frozen=True, slots=True)
class Slice:
    """One thing that one stream does for a while; seconds from the start of the step."""

    stream: str
    """compute, host, copy, or the axis whose collectives it carries."""
    start_s: float
    end_s: float
    name: str
    phase: str
    kind: SliceKind
    """unit: a layer, the head, …; wait: compute stands still (its name says for what)."""
    op: Op | None = None
    """Its shape, FLOPs, bytes and collective, where it is a single op."""
    exposed_s: float = 0.0
    """Of a collective: seconds of it during which compute waited for its axis."""


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of the step on one rank: a forward or backward of a micro-batch, the update, or what surrounds them."""

    name: str
    phase: str
    start_s: float
    end_s: float
    stage: int
    micro_batch: int
    """-1 for what is not of one micro-batch."""
    part: Part = field(repr=False)
    clocks: Clocks = field(repr=False)
    """Where the streams are when it starts, counted from `origin_s`."""
    origin_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step of one rank role."""

    role: str
    spans: tuple[Span, ...]
    busy_s: float
    """When all streams are done. The step takes this, the waits for the slowest rank and for a slow one, and the fixed cost."""
    first_layers: dict[int, int]
    """The first layer of each stage."""
    roles: int
    """Rank roles of the run, of which this is one."""
    scan: Scan = field(repr=False)

    def slices(self, span: Span, *, ops: bool = False) -> list[Slice]:
        """What the streams do in a span, in order of issue: compute and host by unit, or by op; collectives and waits one by one."""
        clocks, out = span.clocks.copy(), []
        for name, blocks in _units(span.part, self.first_layers.get(span.stage, 0)):
            before = clocks.compute, clocks.host
            inside = [s for block in blocks for s in _block_slices(clocks, block, self.scan)]
            phase = blocks[0].phase
            if ops:
                out += inside
                continue
            out += [s for s in inside if s.stream not in (COMPUTE, HOST) or s.kind == "wait"]
            for stream, start, end in ((COMPUTE, before[0], clocks.compute), (HOST, before[1], clocks.host)):
                if end > start:
                    out.append(Slice(stream, start, end, name, phase, "unit"))
        if span is self.spans[-1]:
            out += _drain(clocks)
        return _with_exposure([_moved(s, span.origin_s) for s in out])


def timeline(run: Run, profile: Profile | str | None = None, *, role: int = 0) -> Timeline:
    """The step of the run's `role`-th rank role (in the order of the report). Raises PlanError where something is not predicted yet."""
    constants = profile if isinstance(profile, Profile) else load_profile(run, profile)
    prices = RunPrices(run, constants)
    scan = Scan(prices)
    program = program_of(run)
    if not 0 <= role < len(program.roles):
        roles = len(program.roles)
        raise PlanError("role", role, "the run has one rank role." if roles == 1 else f"the run has {roles} rank roles.",
                        "Use 0." if roles == 1 else f"Use 0 to {roles - 1}.")
    name = program.roles[role].role
    if run.plan.pp > 1:
        return _pipeline(run, program.pipeline, prices, scan, name, role)
    clocks = Clocks()
    spans = list(_walk(program.roles[role].step, run.micro_batches, clocks, scan))
    busy = max([clocks.compute, *clocks.streams.values()])
    return Timeline(name, tuple(spans), busy, {0: 0}, len(program.roles), scan)


def _walk(step: Seq, micro_batches: int, clocks: Clocks, scan: Scan) -> Iterator[Span]:
    """Spans of a step without a pipeline: what comes before the micro-batches, each one's forward and backward, the update."""
    micro = 0
    for part, times in step.parts:
        for _ in range(times):
            halves: list[Part] = [part]
            if isinstance(part, Seq) and micro < micro_batches and len(part.parts) == 2 and _phase(part) == "forward":
                halves = [child for child, _ in part.parts]
            for half in halves:
                phase, before, start = _phase(half), clocks.copy(), clocks.compute
                scan.run(half, clocks)
                of_one = len(halves) == 2
                yield Span(f"{phase} {micro}" if of_one else phase, phase, start, clocks.compute, 0, micro if of_one else -1, half, before)
            micro += len(halves) == 2


def _pipeline(run: Run, ranks: tuple[PipelineRank, ...], prices: RunPrices, scan: Scan, name: str, role: int) -> Timeline:
    """Spans of a pipeline rank: its slots where the schedule puts them, each begun with idle streams, and what surrounds them."""
    p, m = run.plan, run.micro_batches
    seconds: dict[int, tuple[float, float]] = {}

    def priced(_: int, part: Part) -> tuple[float, float]:
        if id(part) not in seconds:
            clocks = step_time(part, prices, scan=scan, drain=False)
            seconds[id(part)] = clocks.compute, tail_of(clocks)[0]
        return seconds[id(part)]

    end, mine = finished(run, ranks, prices, priced, every=True), ranks[role]
    ahead = priced(role, mine.before)[0]
    spans = [Span("begin", _phase(mine.before), 0.0, ahead, -1, -1, mine.before, Clocks())]
    for kind, stage, micro in rank_order(p.schedule, p.pp, p.virtual_stages, m, role):
        part = mine.part(Slot(kind, stage, micro_class(micro, m)))
        until = ahead + end.actions[end_index(kind, stage, p.pp * p.virtual_stages, micro, m)]
        start = until - priced(role, part)[0]
        if start < until or kind == FORWARD:  # the first stage's gradient of its input is none
            spans.append(Span(f"{WORDS[kind]} {micro}", "forward" if kind == FORWARD else "backward", start, until, stage, micro, part, Clocks(), start))
    update = ahead + end.done
    spans.append(Span("update", "optimizer", update, update + priced(role, mine.after)[0], -1, -1, mine.after, Clocks(), update))
    layers = {stage: builder.layers for r in ranks for stage, builder in r.builders.items()}
    first = {stage: sum(layers[s] for s in range(stage)) for stage in layers}
    return Timeline(name, tuple(spans), end.done + end.around, first, p.pp, scan)


# -- the slices of a span ----------------------------------------------------------------------------------------------------


def _phase(part: Part) -> str:
    """The phase of what the part runs first."""
    return next((block.phase for block in expand(part)), "")


def _units(part: Part, first_layer: int) -> Iterator[tuple[str, list[Block]]]:
    """Blocks in order, those of one unit and phase together, layers by number: forward counts up, backward down; what is computed again
    belongs to the layers whose backward follows."""
    stretches: list[tuple[str, str, list[Block]]] = []
    for block in expand(part):
        last = stretches[-1] if stretches else None
        if last and (last[0], last[1]) == (block.name, block.phase) and not (_is_core(block) and any(map(_is_core, last[2]))):
            last[2].append(block)
        else:
            stretches.append((block.name, block.phase, [block]))
    layers = sum(name == "layer" and phase == "backward" and any(map(_is_core, blocks)) for name, phase, blocks in stretches)
    up, down = first_layer, first_layer + layers - 1
    again: list[int] = []
    numbers: dict[int, int] = {}
    for i, (name, phase, blocks) in enumerate(stretches):
        if name != "layer" or not any(map(_is_core, blocks)):
            continue
        if phase == "forward":
            numbers[i], up = up, up + 1
        elif phase == "recompute":
            again.append(i)
        else:
            numbers |= {j: down - len(again) + 1 + k for k, j in enumerate(again)}
            again = []
            numbers[i], down = down, down - 1
    for i, (name, _, blocks) in enumerate(stretches):
        yield (f"layer {numbers[i]}" if i in numbers else name), blocks


def _is_core(block: Block) -> bool:
    return any(op.kind in ("matmul", "attention") for op in block.ops)


def _block_slices(clocks: Clocks, block: Block, scan: Scan) -> Iterator[Slice]:
    """Advance the clocks over one block, step by step, and tell what each stream did."""
    compiled = scan.of(block)
    for step, ops in zip(compiled.steps, _groups(block), strict=True):
        code, _, device, _, axis, *_ = step
        compute, host = clocks.compute, clocks.host
        waits = dict(clocks.waits)
        run_block(clocks, Compiled((step,), block.phase, {}, {}, 0.0, ()), scan.kappa)
        if clocks.host > host and code != CHUNK:
            yield Slice(HOST, host, clocks.host, ops[0].name, block.phase, "host", ops[0])
        if code == CHUNK:
            yield from _kernels(block.phase, ops, compute, host, clocks.compute, scan)
        elif code in (ISSUE, BLOCKING, SIDE):
            end = clocks.streams[axis]
            if device:
                yield Slice(axis, end - device, end, ops[0].name, block.phase, "side" if code == SIDE else "collective", ops[0])
        if code in (WAIT, BLOCKING) and clocks.compute > compute:
            at = compute
            for by in ("host", *[a for a in clocks.waits if a != "host"]):
                waited = clocks.waits.get(by, 0.0) - waits.get(by, 0.0)
                if waited > 0.0:
                    yield Slice(COMPUTE, at, at + waited, f"wait for {by}", block.phase, "wait", ops[0])
                    at += waited


def _groups(block: Block) -> list[list[Op]]:
    """The ops of each step of the compiled block: runs of kernels and host work together, everything else alone."""
    out: list[list[Op]] = []
    chunk: list[Op] = []
    for op in block.ops:
        if op.kind in COMPUTE_KINDS:
            if op.kernels or op.nbytes or op.flops:
                chunk.append(op)
        elif op.kind == "host":
            if op.kernels:
                chunk.append(op)
        else:
            out += [chunk] if chunk else []
            out += [[op], [op]] if op.kind == "route" else [[op]]  # the host waits for compute, then compute for the host
            chunk = []
    return out + ([chunk] if chunk else [])


def _kernels(phase: str, ops: list[Op], compute: float, host: float, end: float, scan: Scan) -> Iterator[Slice]:
    """A run of kernels, each begun when it has been launched and the one before is done; slowed down evenly to the end that was found."""
    prices = scan.prices
    if prices.synchronous:
        yield from _on_one_thread(phase, ops, compute, end, scan)
        return
    placed: list[tuple[float, float, float, float, Op]] = []
    at = compute
    for op in ops:
        before = host
        if op.kind in COMPUTE_KINDS:
            host += prices.launch_s(phase) * op.kernels
            start = max(at, host)
            at = start + prices.device_s(op)
        else:
            host += host_s(op, prices, phase)
            start = at = max(at, host)
        placed.append((before, host, start, at, op))
    slower = (end - compute) / (at - compute) if at > compute else 1.0
    at = compute
    for before, launched, start, done, op in placed:
        begin, finish = compute + (start - compute) * slower, compute + (done - compute) * slower
        if launched > before:
            yield Slice(HOST, before, launched, op.name, phase, "host", op)
        if begin - at > 1e-12:
            yield Slice(COMPUTE, at, begin, "wait for host", phase, "wait", op)
        if op.kind in COMPUTE_KINDS and finish > begin:
            yield Slice(COMPUTE, begin, finish, op.name, phase, op.kind, op)  # type: ignore[arg-type]
        at = max(at, finish)


def _on_one_thread(phase: str, ops: list[Op], begin: float, end: float, scan: Scan) -> Iterator[Slice]:
    """Work of a thread that both launches and computes, one after another; slowed down evenly to the end that was found."""
    prices = scan.prices
    seconds = []
    for op in ops:
        if op.kind in ("host", "route"):
            seconds.append(host_s(op, prices, phase))
        else:
            seconds.append(prices.launch_s(phase) * op.kernels + prices.device_s(op))
    whole = sum(seconds)
    slower, at = (end - begin) / whole if whole else 1.0, begin
    for op, each in zip(ops, seconds, strict=True):
        if each:
            kind: SliceKind = op.kind if op.kind in ("matmul", "attention", "host") else "memory"
            yield Slice(COMPUTE, at, at + each * slower, op.name, phase, kind, op)
            at += each * slower


def _drain(clocks: Clocks) -> list[Slice]:
    """What other streams still do when compute is done."""
    late = [(end, axis) for axis, end in clocks.streams.items() if end > clocks.compute]
    out, at = [], clocks.compute
    for end, axis in sorted(late):
        if end > at:
            out.append(Slice(COMPUTE, at, end, f"wait for {axis}", "optimizer", "wait"))
            at = end
    return out


def _with_exposure(slices: list[Slice]) -> list[Slice]:
    """Collectives with the seconds of them that compute waited for."""
    waits: dict[str, list[tuple[float, float]]] = {}
    for s in slices:
        if s.kind == "wait":
            waits.setdefault(s.name.removeprefix("wait for "), []).append((s.start_s, s.end_s))
    out = []
    for s in slices:
        if s.kind in ("collective", "side") and s.stream in waits:
            exposed = sum(max(0.0, min(s.end_s, b) - max(s.start_s, a)) for a, b in waits[s.stream])
            s = replace(s, exposed_s=exposed)
        out.append(s)
    return out


def _moved(s: Slice, by: float) -> Slice:
    return replace(s, start_s=s.start_s + by, end_s=s.end_s + by) if by else s
