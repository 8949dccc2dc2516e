"""The time reading of a program: the streams of one rank, with PyTorch's real dependencies.

Clocks: the host, the compute stream, one stream per communication axis, the copy stream. The host launches ahead of the device;
a kernel starts when it has been launched and the stream before it is done. A collective starts when the host has issued it, its
stream is free, and (unless detached) the compute stream has reached the point of issue. A Block is compiled once into a few
steps; runs of kernels collapse into one, exactly: with launch times H and durations C, a run of kernels moves the compute stream
from c to max(c + ΣC, h + D), D the longest path that begins with a launch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from costmodel.program.ir import Block, Comm, Op, Part

COMPUTE_KINDS = ("matmul", "attention", "memory")
SETTLED = 1e-9
"""Relative difference below which two successive repeats count as equal."""
ROUNDING = 4e-15
"""Relative difference of two sums that are the same but for rounding."""


class Prices(Protocol):
    """Seconds of an op on its stream, and of its launches on the host."""

    def device_s(self, op: Op) -> float: ...

    def memory_s(self, op: Op) -> float: ...

    def launch_s(self, phase: str) -> float: ...

    def collective_s(self, comm: Comm) -> float: ...

    @property
    def synchronous(self) -> bool:
        """Whether host and device are one thread, as on a CPU."""

    @property
    def contention(self) -> float: ...

    @property
    def collective_host_s(self) -> float: ...

    def work_s(self, cause: str, phase: str) -> float: ...

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

    led: int = 0
    """How often the host decided when something on another stream than compute began."""

    def copy(self) -> "Clocks":
        return Clocks(self.host, self.compute, dict(self.streams), dict(self.busy_from), dict(self.events), dict(self.waits), self.contention,
                      dict(self.phases), dict(self.comm), self.led)


Step = tuple[int, float, float, float, str, str, float]
CHUNK, ISSUE, BLOCKING, WAIT, RECORD, HOLD, SIDE, SYNC = range(8)
NEVER = (0.0, "", 0.0)
IN_STEP = "tp"
"""The axis whose collectives begin when compute reaches them, never ahead of it: when exactly its stream was last busy decides nothing."""
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
    stretch: "Stretch | None" = None
    """The whole block, where it touches no other stream but for collectives of tp that compute waits for at once."""


def compile_block(block: Block, prices: Prices) -> Compiled:
    """Collapse runs of kernels, keep what touches other streams."""
    if prices.synchronous:
        return _compile_synchronous(block, prices)
    steps: list[Step] = []
    phase = block.phase
    launch, memory_s = prices.launch_s(phase), prices.memory_s
    sent: list[Comm] = []
    busy: dict[str, float] = {}
    flops: dict[str, float] = {}
    host = device = longest = before = moved = 0.0
    for op in block.ops:
        kind, kernels = op.kind, op.kernels
        if kind == "memory":
            if not kernels and not op.nbytes and not op.flops:
                continue
            seconds = memory_s(op)
            if not op.again:
                moved += seconds
        elif kind == "matmul" or kind == "attention":
            seconds = prices.device_s(op)
            if not op.again:
                busy[kind] = busy.get(kind, 0.0) + seconds
                flops[kind] = flops.get(kind, 0.0) + op.flops
        elif kind == "host":
            if kernels:
                host += host_s(op, prices, phase)
                if host > longest:
                    longest = host
            continue
        else:
            if host or device:
                steps.append((CHUNK, host, device, longest, "", "", 0.0))
                before += host
                host = device = longest = 0.0
            if kind == "route":
                stalled = host_s(op, prices, phase)
                before += stalled
                steps += [(SYNC, 0.0, 0.0, 0.0, "", "", 0.0), (CHUNK, stalled, 0.0, stalled, "", "", 0.0)]
                continue
            if op.comm is not None:
                sent.append(op.comm)
            other = _other_stream(op, launch, prices)
            before += other[1]
            steps.append(other)
            continue
        if op.again:
            busy["recompute"] = busy.get("recompute", 0.0) + seconds
        host += launch * kernels
        device += seconds
        longest = (host if host > longest else longest) + seconds
    stretch: Stretch | None = Stretch(host, device, longest, phase)
    if steps:
        stretch = _stretch([*steps, (CHUNK, host, device, longest, "", "", 0.0)], phase)
    if host or device:
        steps.append((CHUNK, host, device, longest, "", "", 0.0))
    if moved:
        busy["memory"] = moved
    return Compiled(tuple(steps), phase, busy, flops, before + host, tuple(sent), stretch)


def host_s(op: Op, prices: Prices, phase: str) -> float:
    """Seconds of work of the host alone: of an op of kind host or route."""
    if op.kind == "route":
        return prices.route_s(op.kernels)
    return prices.work_s(op.axis, phase) * op.kernels


def _other_stream(op: Op, launch: float, prices: Prices) -> Step:
    """The step of an op that touches another stream than host and compute."""
    kind, detached = op.kind, 1.0 if op.detached else 0.0
    if kind == "collective":
        assert op.comm is not None
        return ISSUE if op.event else BLOCKING, prices.collective_host_s, prices.collective_s(op.comm), 0.0, op.comm.axis, op.event, detached
    if kind in ("side", "copy"):
        return SIDE, launch * op.kernels, prices.device_s(op), 0.0, op.axis or "copy", op.event, detached
    return CONTROL[kind], launch * op.kernels, 0.0, 0.0, op.axis, op.event, 0.0


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
        elif kind == "host":
            launched, seconds = host_s(op, prices, block.phase) if kernels else 0.0, 0.0
            if launched:
                busy["memory"] = busy.get("memory", 0.0) + launched
        else:
            launched = prices.collective_host_s if op.comm is not None and op.comm.group > 1 else 0.0
        host += launched
        if kind in COMPUTE_KINDS or kind == "host":
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
            stalled = host_s(op, prices, block.phase)
            host += stalled
            busy["memory"] = busy.get("memory", 0.0) + stalled
            steps += [(SYNC, 0.0, 0.0, 0.0, "", "", 0.0), (CHUNK, 0.0, stalled, stalled, "", "", 0.0)]
        else:
            steps.append((CONTROL[kind], 0.0, 0.0, 0.0, op.axis, op.event, 0.0))
    if chunk:
        steps.append((CHUNK, 0.0, chunk, chunk, "", "", 0.0))
    return Compiled(tuple(steps), block.phase, busy, flops, host, tuple(sent), _stretch(steps, block.phase))


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
            if late:
                c.led += 1
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
            if start == host:
                c.led += 1
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


class Stretch(NamedTuple):
    """Kernels and host work in a row, and collectives that compute waits for at once: host becomes host + `host`, compute becomes
    max(compute + `device`, host + `longest`)."""

    host: float
    device: float
    """Seconds of its kernels and collectives."""
    longest: float
    """The longest path that begins with a launch."""
    phase: str
    """The one phase of its blocks; empty where there are several."""
    comm: tuple[tuple[str, float], ...] = ()
    """Seconds of its collectives by axis."""

    def then(self, b: "Stretch") -> "Stretch":
        """This one and then another."""
        after, through = self.longest + b.device, self.host + b.longest
        comm = self.comm or b.comm
        if self.comm and b.comm:
            comm = tuple((axis, sum(s for a, s in (*self.comm, *b.comm) if a == axis)) for axis in dict([*self.comm, *b.comm]))
        return Stretch(self.host + b.host, self.device + b.device, after if after > through else through, self.phase if self.phase == b.phase else "", comm)

    def times(self, n: int) -> "Stretch":
        """This one `n` times, n at least 1: a path that begins with a launch passes through every later repeat on the host or on the device."""
        host, device, longest, phase, comm = self
        return Stretch(n * host, n * device, longest + (n - 1) * (host if host > device else device), phase, tuple([(a, n * s) for a, s in comm]))

    def run(self, c: Clocks) -> None:
        """Advance the clocks; they must not be busy with a stream that slows the kernels down or that its collectives have to wait for."""
        begin = c.compute
        free, paced = begin + self.device, c.host + self.longest
        c.host += self.host
        if paced > free:
            c.waits["host"] = c.waits.get("host", 0.0) + paced - free
            free = paced
        c.compute = free
        c.phases[self.phase] = c.phases.get(self.phase, 0.0) + free - begin
        for axis, seconds in self.comm:
            for table in (c.waits, c.comm):
                table[axis] = table.get(axis, 0.0) + seconds
            c.streams[axis] = c.busy_from[axis] = free


def _stretch(steps: Sequence[Step], phase: str) -> Stretch | None:
    """The steps of a block as one stretch, where they are."""
    whole: Stretch | None = None
    for code, host, device, longest, axis, *_ in steps:
        if code == CHUNK:
            one = Stretch(host, device, longest, phase)
        elif code == BLOCKING and axis == IN_STEP:
            one = Stretch(host, device, host + device, phase, ((axis, device),))
        else:
            return None
        whole = one if whole is None else whole.then(one)
    return whole or Stretch(0.0, 0.0, 0.0, phase)


class Scan:
    """Runs a program over the clocks, compiling each distinct block once."""

    def __init__(self, prices: Prices) -> None:
        self.prices = prices
        self.kappa = prices.contention
        self.compiled: dict[int, tuple[Block, Compiled]] = {}
        """By identity, with the block, so that no other takes its place."""
        self.settled: dict[int, Advance] = {}
        """How one repeat of a part advances the clocks once they have settled, by the part's identity."""
        self.stretches: dict[int, tuple[Part, Stretch | None]] = {}

    def of(self, block: Block) -> Compiled:
        """The block as steps, compiled once."""
        block = block.timed or block
        known = self.compiled.get(id(block))
        if known is None:
            known = self.compiled[id(block)] = (block, compile_block(block, self.prices))
        return known[1]

    def stretch(self, part: Part) -> Stretch | None:
        """The part as one stretch, where it is one."""
        if isinstance(part, Block):
            return self.of(part).stretch
        known = self.stretches.get(id(part))
        if known is not None:
            return known[1]
        whole: Stretch | None = None
        for child, n in part.parts:
            one = self.stretch(child)
            if one is None:
                whole = None
                break
            if n > 1:
                one = one.times(n)
            whole = one if whole is None else whole.then(one)
        self.stretches[id(part)] = part, whole
        return whole

    def run(self, part: Part, clocks: Clocks, times: int = 1) -> None:
        """Advance the clocks over `part`, `times` times."""
        if times > 1 or not isinstance(part, Block):
            stretch = self.stretch(part)
            if stretch is not None and stretch.phase and (
                    not (self.kappa or stretch.comm) or all(end <= clocks.compute for end in clocks.streams.values())):
                (stretch if times == 1 else stretch.times(times)).run(clocks)
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
        """Repeats (layers, micro-batches), run until they are seen to go on alike; the others are not run."""
        known = self.settled.get(id(part))
        if known is not None:
            self.run(part, clocks)
            times -= 1
            if times and known.begins_at(clocks):
                known.advance(clocks, times)
                return
        last: Advance | None = None
        while times:
            before = clocks.copy()
            self.run(part, clocks)
            times -= 1
            if not times:
                return
            new = Advance.between(part, before, clocks)
            if new.uniform:
                self.settled[id(part)] = new
                new.advance(clocks, times)
                return
            skip = min(times, _headroom(clocks, new)) if last is not None and new.same(last) else 0
            if skip > 0:
                new.advance(clocks, skip)
                times -= skip
            last = new


class Advance(NamedTuple):
    """What one repeat of a part did to the clocks: how much each moved, those that did not left out."""

    part: Part
    compute: float
    host: float
    contention: float
    led: int
    streams: dict[str, float]
    busy_from: dict[str, float]
    events: dict[str, float]
    sums: tuple[dict[str, float], dict[str, float], dict[str, float]]
    """Of waits, phases, comm."""
    start: Clocks
    """The clocks before it."""

    @classmethod
    def between(cls, part: Part, a: Clocks, b: Clocks) -> "Advance":
        """From the clocks before and after a repeat."""
        streams = _moved(a.streams, b.streams)
        return cls(part, b.compute - a.compute, b.host - a.host, b.contention - a.contention, b.led - a.led, streams, _moved(a.busy_from, b.busy_from),
                   {name: e[0] - a.events.get(name, NEVER)[0] for name, e in b.events.items() if e != a.events.get(name)},
                   (_moved(a.waits, b.waits), _moved(a.phases, b.phases), _moved(a.comm, b.comm)),
                   a)

    @property
    def uniform(self) -> bool:
        """Whether all that moved, moved alike: from then on every repeat does. The host may fall behind where it decided nothing, and a
        stream may have been busy since whenever, where that is past."""
        a, gain, near = self.start, self.compute, _rounding(self.start)
        if not -near <= gain - self.host <= near and (self.led or "host" in self.sums[0] or self.host > gain):
            return False
        for moved in (self.streams, self.events):
            for g in moved.values():
                if not -near <= g - gain <= near:
                    return False
        for name, begin in a.busy_from.items():
            g = self.busy_from.get(name, 0.0)
            if not -near <= g - gain <= near and (begin > a.compute or begin + g > a.compute):
                return False
        return all(not (end > a.compute and name not in self.streams) for name, end in a.streams.items())

    def begins_at(self, c: Clocks) -> bool:
        """Whether the clocks stand to one another as before this repeat, which was uniform."""
        then, near = self.start, _rounding(c)
        later = c.compute - then.compute
        behind = later - (c.host - then.host)
        if behind < -near or behind > near and (self.led or "host" in self.sums[0]):
            return False
        for name in self.streams:
            if not -near <= c.streams[name] - then.streams[name] - later <= near:
                return False
            if (c.busy_from[name] > c.compute or then.busy_from[name] > then.compute) and not -near <= c.busy_from[name] - then.busy_from[name] - later <= near:
                return False
        for name in self.events:
            if not -near <= c.events[name][0] - then.events[name][0] - later <= near:
                return False
        return all(name in self.streams or end <= c.compute for name, end in c.streams.items())

    def same(self, other: "Advance") -> bool:
        """Whether two successive repeats moved the same clocks as much."""
        return (_same({"": self.compute, "host": self.host, "contention": self.contention}, {"": other.compute, "host": other.host,
                      "contention": other.contention}) and _same(self.streams, other.streams) and _same(self.busy_from, other.busy_from)
                and _same(self.events, other.events) and all(map(_same, self.sums, other.sums)))

    def advance(self, c: Clocks, times: int) -> None:
        """Repeat it without running it."""
        c.compute += times * self.compute
        c.host += times * self.host
        c.contention += times * self.contention
        for table, moved in zip((c.streams, c.busy_from, c.waits, c.phases, c.comm), (self.streams, self.busy_from, *self.sums), strict=True):
            for name, gain in moved.items():
                table[name] += times * gain
        for name, gain in self.events.items():
            when, by, late = c.events[name]
            c.events[name] = when + times * gain, by, late and late + times * gain


def _moved(a: dict[str, float], b: dict[str, float]) -> dict[str, float]:
    return {name: end - a.get(name, 0.0) for name, end in b.items() if end != a.get(name)}


def _rounding(c: Clocks) -> float:
    """Seconds by which clocks that are the same may differ."""
    return ROUNDING * (c.compute + c.host) + 1e-15


def _same(a: dict[str, float], b: dict[str, float]) -> bool:
    if a.keys() != b.keys():
        return False
    for name, x in a.items():
        y = b[name]
        if x != y and abs(x - y) > SETTLED * (abs(x) + abs(y)) + 1e-15:
            return False
    return True


def _headroom(clocks: Clocks, step: Advance) -> int:
    """Repeats of an advance before one stream overtakes another (and so another wait decides), less a margin of two.

    Inside a repeat a stream may be ahead of where it ends by as much as it advances, so that much distance does not count; and
    two that part but are not further apart yet may have met in the last repeat. A stream that did not move, and is behind, decides nothing.
    """
    pairs = [(clocks.compute, step.compute), (clocks.host, step.host)]
    pairs += [(end, step.streams.get(name, 0.0)) for name, end in clocks.streams.items() if name in step.streams or end > clocks.compute - step.compute]
    least = 1e18
    for i, (value, gain) in enumerate(pairs):
        for other, other_gain in pairs[:i]:
            closing = gain - other_gain if value < other else other_gain - gain
            drift = SETTLED * (gain + other_gain)
            if -drift <= closing <= drift:
                continue
            apart = abs(value - other) - (gain if gain > other_gain else other_gain)
            if closing > drift:
                least = min(least, apart / closing)
            elif apart < 0.0:
                return 0
    return int(least) - 2 if least < 1e17 else 1 << 60


def seconds(step: Part, scan: Scan) -> float:
    """Seconds of one step that begins with idle streams."""
    stretch = scan.stretch(step)
    return step_time(step, scan.prices, scan=scan).compute if stretch is None else max(stretch.device, stretch.longest)


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
