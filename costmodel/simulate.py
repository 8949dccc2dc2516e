"""The time reading of a program: the streams of one rank, with PyTorch's real dependencies.

Clocks: the host, the compute stream, one stream per communication axis, the copy stream. The host launches ahead of the device;
a kernel starts when it has been launched and the stream before it is done. A collective starts when the host has issued it, its
stream is free, and (unless detached) the compute stream has reached the point of issue. A Block is compiled once into a few
steps; runs of kernels collapse into one, exactly: with launch times H and durations C, a run of kernels moves the compute stream
from c to max(c + ΣC, h + D), D the longest path that begins with a launch.
"""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from costmodel.program.ir import Block, Comm, Op, Part

COMPUTE_KINDS = ("matmul", "attention", "memory")
SETTLED = 1e-9
"""Relative difference below which two successive repeats count as equal."""


class Prices(Protocol):
    """Seconds of an op on its stream, and of its launches on the host."""

    def device_s(self, op: Op) -> float: ...

    def launch_s(self, phase: str) -> float: ...

    def collective_s(self, comm: Comm) -> float: ...

    @property
    def synchronous(self) -> bool:
        """Whether host and device are one thread, as on a CPU."""

    @property
    def contention(self) -> float: ...

    @property
    def collective_host_s(self) -> float: ...

    @property
    def per_tensor_s(self) -> float: ...

    @property
    def call_s(self) -> float: ...

    def route_s(self, experts: int) -> float: ...


@dataclass(slots=True)
class Clocks:
    """Where the streams of a rank are, and what they have done; seconds."""

    host: float = 0.0
    compute: float = 0.0
    streams: dict[str, float] = field(default_factory=dict)
    busy_from: dict[str, float] = field(default_factory=dict)
    events: dict[str, tuple[float, str, float]] = field(default_factory=dict)
    """event -> (when; the axis that signals it, "" for compute; its start where the host issued it too late, else 0)."""
    waits: dict[str, float] = field(default_factory=dict)
    """What the compute stream waited for: an axis, or "host"."""
    contention: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds of the compute stream by phase."""
    comm: dict[str, float] = field(default_factory=dict)

    def flat(self) -> list[float]:
        """Everything that moves, in the order of `_advance`."""
        events = self.events.values()
        return [self.compute, self.host, *self.streams.values(), *self.busy_from.values(), *[t for t, _, _ in events], *[late for _, _, late in events],
                self.contention, *self.waits.values(), *self.phases.values(), *self.comm.values()]


Step = tuple[int, float, float, float, str, str, float]
CHUNK, ISSUE, BLOCKING, WAIT, RECORD, HOLD, SIDE, SYNC = range(8)
NEVER = (0.0, "", 0.0)
CONTROL = {"wait": WAIT, "record": RECORD, "hold": HOLD, "sync": SYNC}


@dataclass(slots=True)
class Compiled:
    """A block as steps of the scan: (code, host, device, longest, axis, event, detached)."""

    steps: tuple[Step, ...]
    phase: str
    busy: dict[str, float]
    """Seconds of its kernels by kind."""
    flops: dict[str, float]
    """FLOPs of its matmuls and attention kernels, those that run a second time left out."""
    host_s: float
    """Seconds the host spends issuing it."""
    sent: tuple[Comm, ...]
    """Its collectives."""


def compile_block(block: Block, prices: Prices) -> Compiled:
    """Collapse runs of kernels, keep what touches other streams."""
    if prices.synchronous:
        return _compile_synchronous(block, prices)
    steps: list[Step] = []
    host = device = longest = 0.0
    phase = block.phase
    launch, price = prices.launch_s(phase), prices.device_s
    busy: dict[str, float] = {}
    flops: dict[str, float] = {}
    sent: list[Comm] = []
    total = 0.0
    for op in block.ops:
        kind, kernels = op.kind, op.kernels
        if kind in COMPUTE_KINDS:
            if kernels == 0 and op.nbytes == 0.0 and op.flops == 0.0:
                continue
            seconds = price(op)
            name = "recompute" if op.again else kind
            busy[name] = busy.get(name, 0.0) + seconds
            if name != "memory" and name != "recompute":
                flops[name] = flops.get(name, 0.0) + op.flops
            host += launch * kernels
            device += seconds
            longest += seconds
            if host + seconds > longest:
                longest = host + seconds
            continue
        if kind == "host" or kind == "call":
            host += (prices.per_tensor_s if kind == "host" else prices.call_s) * kernels
            if host > longest:
                longest = host
            continue
        if host or device:
            steps.append((CHUNK, host, device, longest, "", "", 0.0))
            host = device = longest = 0.0
        detached = 1.0 if op.detached else 0.0
        if kind == "collective":
            assert op.comm is not None
            sent.append(op.comm)
            steps.append((ISSUE if op.event else BLOCKING, prices.collective_host_s, prices.collective_s(op.comm), 0.0, op.comm.axis, op.event, detached))
        elif kind == "route":
            stalled = prices.route_s(kernels)
            steps += [(SYNC, 0.0, 0.0, 0.0, "", "", 0.0), (CHUNK, stalled, 0.0, stalled, "", "", 0.0)]
        elif kind in ("side", "copy"):
            steps.append((SIDE, launch * kernels, price(op), 0.0, op.axis or "copy", op.event, detached))
        else:
            steps.append((CONTROL[kind], launch * kernels, 0.0, 0.0, op.axis, op.event, 0.0))
    if host or device:
        steps.append((CHUNK, host, device, longest, "", "", 0.0))
    for step in steps:
        total += step[1]
    return Compiled(tuple(steps), phase, busy, flops, total, tuple(sent))


def _compile_synchronous(block: Block, prices: Prices) -> Compiled:
    """Where one thread both launches and computes, launches take the time of the compute stream, and so does what a GPU does on streams beside
    it; collectives alone go on in the background, those that are called with async_op."""
    steps: list[Step] = []
    launch, price = prices.launch_s(block.phase), prices.device_s
    busy: dict[str, float] = {}
    flops: dict[str, float] = {}
    sent: list[Comm] = []
    chunk = host = 0.0
    for op in block.ops:
        kind, kernels = op.kind, op.kernels
        work = kind in COMPUTE_KINDS or kind in ("side", "copy")
        if work:
            if kernels == 0 and op.nbytes == 0.0 and op.flops == 0.0 and kind in COMPUTE_KINDS:
                continue
            launched, seconds = launch * kernels, price(op)
            name = "recompute" if op.again else kind if kind in COMPUTE_KINDS else "memory"
            busy[name] = busy.get(name, 0.0) + launched + seconds
            if name in ("matmul", "attention"):
                flops[name] = flops.get(name, 0.0) + op.flops
        elif kind in ("host", "call"):
            launched, seconds = (prices.per_tensor_s if kind == "host" else prices.call_s) * kernels, 0.0
            if launched:
                busy["memory"] = busy.get("memory", 0.0) + launched
        else:
            launched = prices.collective_host_s if kind == "collective" else 0.0
        host += launched
        if kind in COMPUTE_KINDS or kind in ("host", "call"):
            chunk += launched + seconds
            continue
        if chunk:
            steps.append((CHUNK, 0.0, chunk, chunk, "", "", 0.0))
            chunk = 0.0
        if work:
            steps.append((CHUNK, 0.0, launched + seconds, launched + seconds, "", "", 0.0))
        elif kind == "collective":
            assert op.comm is not None
            sent.append(op.comm)
            code = ISSUE if op.event and not op.inline else BLOCKING
            steps.append((code, 0.0, launched + prices.collective_s(op.comm), 0.0, op.comm.axis, op.event, 0.0))
        elif kind == "route":
            stalled = prices.route_s(kernels)
            host += stalled
            busy["memory"] = busy.get("memory", 0.0) + stalled
            steps += [(SYNC, 0.0, 0.0, 0.0, "", "", 0.0), (CHUNK, 0.0, stalled, stalled, "", "", 0.0)]
        else:
            steps.append((CONTROL[kind], 0.0, 0.0, 0.0, op.axis, op.event, 0.0))
    if chunk:
        steps.append((CHUNK, 0.0, chunk, chunk, "", "", 0.0))
    return Compiled(tuple(steps), block.phase, busy, flops, host, tuple(sent))


def run_block(c: Clocks, block: Compiled, kappa: float) -> None:
    """Advance the clocks over one block."""
    compute, host = c.compute, c.host
    begin = compute
    streams, busy, events, waits = c.streams, c.busy_from, c.events, c.waits
    for code, launch, device, longest, axis, event, detached in block.steps:
        if code == CHUNK:
            free = compute + device
            paced = host + longest
            if paced > free:
                waits["host"] = waits.get("host", 0.0) + paced - free
                after = paced
            else:
                after = free
            if kappa and device:
                for name, end in streams.items():
                    if end > compute:
                        begin_busy = busy.get(name, end)
                        overlap = (end if end < after else after) - (begin_busy if begin_busy > compute else compute)
                        if overlap > 0.0:
                            share = overlap if overlap < device else device
                            c.contention += kappa * share
                            after += kappa * share
            host += launch
            compute = after
        elif code == WAIT:
            when, by, late = events.get(event, NEVER)
            if when > compute:
                if late > compute:
                    late = late if late < when else when
                    waits["host"] = waits.get("host", 0.0) + late - compute
                    compute = late
                waits[by] = waits.get(by, 0.0) + when - compute
                compute = when
        elif code == ISSUE or code == BLOCKING:
            host += launch
            free = streams.get(axis, 0.0)
            start = late = free
            if host > free:
                start = late = host
            else:
                late = 0.0
            if not detached and compute > start:
                start = compute
                late = 0.0
            end = start + device
            if start > free or axis not in busy:
                busy[axis] = start
            streams[axis] = end
            c.comm[axis] = c.comm.get(axis, 0.0) + device
            if code == ISSUE:
                events[event] = (end, axis, late)
            elif end > compute:
                if late > compute:
                    waits["host"] = waits.get("host", 0.0) + late - compute
                    compute = late
                waits[axis] = waits.get(axis, 0.0) + end - compute
                compute = end
        elif code == RECORD:
            events[event] = (compute, "", 0.0)
        elif code == HOLD:
            when = events.get(event, NEVER)[0]
            if when > streams.get(axis, 0.0):
                streams[axis] = when
        elif code == SIDE:
            host += launch
            free = streams.get(axis, 0.0)
            start = host if host > free else free
            if not detached and compute > start:
                start = compute
            if start > free or axis not in busy:
                busy[axis] = start
            streams[axis] = start + device
            if event:
                events[event] = (start + device, axis, 0.0)
        elif code == SYNC:
            host = max(host + launch, compute)
    c.compute, c.host = compute, host
    phase = block.phase
    c.phases[phase] = c.phases.get(phase, 0.0) + compute - begin


class Linear(NamedTuple):
    """A part that touches host and compute stream alone, as a matrix over (max, +).

    host becomes max(host + hh, compute + hc), compute becomes max(host + ch, compute + cc).
    """

    hh: float
    hc: float
    ch: float
    cc: float
    device: float
    """Seconds of its kernels."""
    phase: str
    """The one phase of its blocks; empty where there are several."""

    def then(self, b: "Linear") -> "Linear":
        """This part and then another."""
        return Linear(max(b.hh + self.hh, b.hc + self.ch), max(b.hh + self.hc, b.hc + self.cc), max(b.ch + self.hh, b.cc + self.ch),
                      max(b.ch + self.hc, b.cc + self.cc), self.device + b.device, self.phase if self.phase == b.phase else "")

    def times(self, n: int) -> "Linear":
        """This part `n` times, n at least 1."""
        if n == 1:
            return self
        half = self.times(n // 2)
        both = half.then(half)
        return both.then(self) if n % 2 else both

    def run(self, c: Clocks) -> None:
        """Advance the clocks; they must not be busy with a stream that slows the kernels down."""
        begin = c.compute
        c.host, c.compute = max(c.host + self.hh, begin + self.hc), max(c.host + self.ch, begin + self.cc)
        waited = c.compute - (begin + self.device)
        if waited > 0.0:
            c.waits["host"] = c.waits.get("host", 0.0) + waited
        c.phases[self.phase] = c.phases.get(self.phase, 0.0) + c.compute - begin


NO_PATH = float("-inf")


def linear_block(block: Compiled) -> Linear | None:
    """A block as a matrix, where it touches no other stream."""
    whole = Linear(0.0, NO_PATH, NO_PATH, 0.0, 0.0, block.phase)
    for code, launch, device, longest, *_ in block.steps:
        if code == CHUNK:
            step = Linear(launch, NO_PATH, longest, device, device, block.phase)
        elif code == SYNC:
            step = Linear(launch, 0.0, NO_PATH, 0.0, 0.0, block.phase)
        else:
            return None
        whole = whole.then(step)
    return whole


class Scan:
    """Runs a program over the clocks, compiling each distinct block once."""

    def __init__(self, prices: Prices) -> None:
        self.prices = prices
        self.kappa = prices.contention
        self.compiled: dict[int, tuple[Block, Compiled]] = {}
        """By identity, with the block, so that no other takes its place."""
        self.steady: dict[int, tuple[Part, list[float]]] = {}
        """How one repeat of a part advances the clocks once they have settled."""
        self.linears: dict[int, tuple[Part, Linear | None]] = {}

    def of(self, block: Block) -> Compiled:
        """The block as steps, compiled once."""
        block = block.timed
        key = id(block)
        known = self.compiled.get(key)
        if known is None:
            known = self.compiled[key] = (block, compile_block(block, self.prices))
        return known[1]

    def linear(self, part: Part) -> Linear | None:
        """The part as a matrix, where it touches host and compute stream alone."""
        key = id(part)
        known = self.linears.get(key)
        if known is not None:
            return known[1]
        whole: Linear | None = None
        if isinstance(part, Block):
            whole = linear_block(self.of(part))
        else:
            for child, n in part.parts:
                step = self.linear(child)
                if step is None:
                    whole = None
                    break
                step = step.times(n)
                whole = step if whole is None else whole.then(step)
        self.linears[key] = part, whole
        return whole

    def run(self, part: Part, clocks: Clocks, times: int = 1) -> None:
        """Advance the clocks over `part`, `times` times."""
        if times > 1 or not isinstance(part, Block):
            linear = self.linear(part)
            if linear is not None and linear.phase and (not self.kappa or all(end <= clocks.compute for end in clocks.streams.values())):
                linear.times(times).run(clocks)
                return
        if times > 1:
            self._repeat(part, clocks, times)
        elif isinstance(part, Block):
            run_block(clocks, self.of(part), self.kappa)
        else:
            for child, n in part.parts:
                if n == 1 and isinstance(child, Block):
                    run_block(clocks, self.of(child), self.kappa)
                else:
                    self.run(child, clocks, n)

    def _repeat(self, part: Part, clocks: Clocks, times: int) -> None:
        """Repeats (layers, micro-batches): when two successive ones advance every clock alike, or one advances them as the part was
        seen to when it had settled, the next do too, as long as no stream overtakes another."""
        before = clocks.flat()
        step: list[float] | None = None
        settled = self.steady.get(id(part), (part, None))[1]
        left = times
        while left:
            self.run(part, clocks)
            left -= 1
            if not left:
                break
            after = clocks.flat()
            new: list[float] | None = None
            if len(after) == len(before):
                new = [b - a for a, b in zip(before, after, strict=True)]
                if settled is not None and _same(settled, new) or step is not None and _same(step, new):
                    skip = min(left, _headroom(clocks, new))
                    if skip > 0:
                        settled = new
                        self.steady[id(part)] = (part, new)
                        _advance(clocks, new, skip)
                        left -= skip
                        after = clocks.flat()
            step, before = new, after


def _same(a: list[float], b: list[float]) -> bool:
    if len(a) != len(b):
        return False
    return all(x == y or abs(x - y) <= SETTLED * (abs(x) + abs(y)) + 1e-15 for x, y in zip(a, b, strict=True))


def _headroom(clocks: Clocks, step: list[float]) -> int:
    """Repeats of an advance before one stream overtakes another (and so another wait decides), less a margin of two.

    Inside a repeat a stream may be ahead of where it ends by as much as it advances, so that much distance does not count; and
    two that part but are not further apart yet may have met in the last repeat.
    """
    values = [clocks.compute, clocks.host, *clocks.streams.values()]
    least = 1e18
    for i, (value, gain) in enumerate(zip(values, step, strict=False)):
        for other, other_gain in zip(values[:i], step[:i], strict=True):
            closing, apart = (gain - other_gain) if value < other else (other_gain - gain), abs(value - other) - max(gain, other_gain)
            drift = SETTLED * (abs(gain) + abs(other_gain))
            if closing > drift:
                least = min(least, apart / closing)
            elif closing < -drift and apart < 0.0:
                return 0
    return int(least) - 2 if least < 1e17 else 1 << 60


def _advance(clocks: Clocks, step: list[float], times: int) -> None:
    """Repeat an advance without running it."""
    values = iter([s * times for s in step])
    clocks.compute += next(values)
    clocks.host += next(values)
    for name in clocks.streams:
        clocks.streams[name] += next(values)
    for name in clocks.busy_from:
        clocks.busy_from[name] += next(values)
    moved_events = [next(values) for _ in clocks.events]
    for (name, (when, by, late)), moved in zip(list(clocks.events.items()), moved_events, strict=True):
        clocks.events[name] = (when + moved, by, late + next(values))
    clocks.contention += next(values)
    for table in (clocks.waits, clocks.phases, clocks.comm):
        for name in table:
            table[name] += next(values)


def seconds(step: Part, scan: Scan) -> float:
    """Seconds of one step that begins with idle streams."""
    linear = scan.linear(step)
    return step_time(step, scan.prices, scan=scan).compute if linear is None else max(linear.ch, linear.cc)


def step_time(program_step: Part, prices: Prices, *, scan: Scan | None = None, drain: bool = True) -> Clocks:
    """The clocks at the end of one steady step, that of a rank whose streams are idle at its start.

    The step ends when compute and, with `drain`, every stream is done: the next step begins with what they hold.
    """
    clocks = Clocks()
    (scan or Scan(prices)).run(program_step, clocks)
    for name, end in clocks.streams.items():
        if drain and end > clocks.compute:
            clocks.phases["optimizer"] = clocks.phases.get("optimizer", 0.0) + end - clocks.compute
            begin = clocks.busy_from.get(name, 0.0)
            if begin > clocks.compute:
                clocks.waits["host"] = clocks.waits.get("host", 0.0) + begin - clocks.compute
                clocks.compute = begin
            clocks.waits[name] = clocks.waits.get(name, 0.0) + end - clocks.compute
            clocks.compute = end
    return clocks
