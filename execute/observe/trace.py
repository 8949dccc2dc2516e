"""From torch.profiler's Chrome trace of one step to a TimeReport: what computed, what communicated, what of it was exposed, what was idle.

A step is the host's annotation `step`, its parts are `forward`, `backward`, … (execute.observe.profiling makes them). Every instant of the
step has one owner: the first of matmul, attention, optimizer, other work, then communication by axis; the rest is idle. So the parts sum
to the step, and exposed communication is what no computation covers.

    GPU   computation: kernels, copies and memsets on any stream; communication: kernels whose name starts with nccl, whose arguments
          name the process group. A kernel of NCCL also waits for its peers.
    CPU   computation: what the operators on the thread that runs the step (backward runs there too) do themselves; communication: gloo's
          own annotations on its worker threads. A thread serves one process group; which axis that is follows from the sizes it sends.
          Of messages between two ranks the receive counts, which also waits for the sender; a send is in flight until somebody asks.
          Idle is Python between operators.

What a pipeline's stage waits for its neighbours is its bubble, transfers included: a receive does not tell why its message is late, and the
prediction counts it alike. A collective's seconds are those of the events of its kind and size over its axis.
"""

import gzip
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from costmodel.report import Collective, TimeReport

STEP = "step"
PIPELINE, BUBBLE = "pp", "bubble"
PHASES = ("forward", "recompute", "backward", "unscale", "clip", "optimizer")
FOLDED = {"recompute": "backward", "unscale": "optimizer", "clip": "optimizer"}
"""As the prediction and the collective recorder count them."""
GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cpu_op", "cuda_runtime", "cuda_driver")
WAITS = re.compile(r"(cuda|cu|hip)\w*Synchronize")
MATMUL = re.compile(r"gemm|splitk|cutlass|cublas|nvjet|xmma|^aten::(linear|matmul|mm|addmm|bmm|baddbmm)$|mkldnn_linear", re.IGNORECASE)
ATTENTION = re.compile(r"flash|fmha|attention|sdpa", re.IGNORECASE)
WORKS = re.compile(r"(?!autograd::|torch::autograd::|_?c10d)\w+::")
SIZES = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "long": 8, "int": 4, "unsigned char": 1, "bool": 1}
KINDS = {"reduce-scatter": "all_reduce", "all-reduce": "all_reduce", "all-gather": "all_gather", "broadcast": "broadcast", "all-to-all": "all_to_all"}
"""What gloo runs for a kind of collective; its reduce-scatter is an all-reduce of the whole."""
NCCL_KINDS = {"allreduce": "all-reduce", "_allgather_base": "all-gather", "allgather": "all-gather", "_reduce_scatter_base": "reduce-scatter",
              "reduce_scatter": "reduce-scatter", "broadcast": "broadcast", "all_to_all": "all-to-all", "recv": "recv", "reduce": "reduce"}
"""NCCL's collectives as PyTorch names them beside a kernel (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp)."""
NCCL_SIZES = {"Float": 4, "Double": 8, "BFloat16": 2, "Half": 2, "Long": 8, "Int": 4, "Byte": 1, "Bool": 1}

Interval = tuple[float, float]


class TraceError(ValueError):
    """A trace that holds no step, or is no trace."""


class _Event(NamedTuple):
    """A complete event of a trace, in seconds from the start of the step."""

    name: str
    category: str
    start: float
    end: float
    thread: Any
    args: Mapping[str, Any]


class Seen(NamedTuple):
    """What the trace of a step says."""

    time: TimeReport
    collectives: tuple[Collective, ...]
    """Those that were asked about, each with the seconds of all of its kind where the trace tells them."""


def load_trace(path: Path) -> dict[str, Any]:
    """A Chrome trace from a file, gzipped or not. Raises TraceError."""
    try:
        content = path.read_bytes()
        trace = json.loads((gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8", "replace"))
    except FileNotFoundError:
        raise TraceError(f"{path}: there is no such file.") from None
    except (OSError, EOFError) as error:
        raise TraceError(f"{path}: it cannot be read ({error}).") from None
    except json.JSONDecodeError as error:
        raise TraceError(f"{path}: not valid JSON: {error.msg} (line {error.lineno}, column {error.colno}).") from None
    if not isinstance(trace, dict):
        raise TraceError(f"{path}: it is no Chrome trace: it holds no traceEvents.")
    return trace


def read_trace(trace: Mapping[str, Any] | Path, collectives: Sequence[Collective] = (), axes: Mapping[str, str] | None = None) -> TimeReport:
    """The time of the last annotated step of a trace: `read_step`, without its collectives one by one."""
    return read_step(trace, collectives, axes).time


def read_step(trace: Mapping[str, Any] | Path, collectives: Sequence[Collective] = (), axes: Mapping[str, str] | None = None) -> Seen:
    """The last annotated step of a trace.

    `collectives` are those of a step, for gloo, which names no process group. `axes` maps process groups' names to axes, for NCCL; the
    groups of a DeviceMesh are known by their descriptions. An axis that cannot be told is "world". Raises TraceError.
    """
    if isinstance(trace, Path):
        trace = load_trace(trace)
    events, step_s, main = _step(trace)
    on_gpu = any(e.category in GPU_WORK for e in events)
    phases = _phases(events, step_s, "gpu_user_annotation" if on_gpu else "user_annotation", None if on_gpu else main)
    if on_gpu:
        work, sent = _gpu(events, _group_axes(trace, axes or {}))
        host_s: float | None = _length(_without(_union(e for e in events if e.category in LAUNCHES), _union(e for e in events if WAITS.match(e.name))))
    else:
        work, sent, host_s = _operators(events, main), _gloo(events, main, collectives), None
    intervals = {axis: _union(of) for axis, of in sorted(sent.items())}
    return Seen(_report(step_s, phases, work, intervals, host_s), _timed(collectives, sent, {} if on_gpu else KINDS))


# -- events -------------------------------------------------------------------------------------------------------------------


def _step(trace: Mapping[str, Any]) -> tuple[list[_Event], float, Any]:
    """The events of the last step, cut to it; its seconds; its thread."""
    raw = [e for e in trace.get("traceEvents") or () if isinstance(e, Mapping) and e.get("ph") == "X" and "dur" in e]
    steps = [e for e in raw if e.get("cat") == "user_annotation" and e.get("name") == STEP]
    if not steps:
        raise TraceError(f'the trace has no annotation "{STEP}": record it around one step.')
    last = max(steps, key=lambda e: float(e["ts"]))
    origin, whole = float(last["ts"]), float(last["dur"]) * 1e-6
    events = []
    for e in raw:
        start = (float(e["ts"]) - origin) * 1e-6
        start, end = max(0.0, start), min(whole, start + float(e["dur"]) * 1e-6)
        if end > start:
            events.append(_Event(str(e.get("name")), str(e.get("cat")), start, end, e.get("tid"), e.get("args") or {}))
    return events, whole, last.get("tid")


def _phases(events: Iterable[_Event], step_s: float, category: str, thread: Any) -> dict[str, list[Interval]]:
    """Intervals of each phase; of nested annotations the inner one, what no annotation covers is "other"."""
    marked = sorted((e for e in events if e.category == category and e.name in PHASES and thread in (None, e.thread)), key=lambda e: -e.start)
    found: dict[str, list[Interval]] = {}
    covered: list[Interval] = []
    for event in marked:
        own = _without([(event.start, event.end)], covered)
        name = FOLDED.get(event.name, event.name)
        found[name] = _merged([*found.get(name, ()), *own])
        covered = _merged([*covered, (event.start, event.end)])
    rest = _without([(0.0, step_s)], covered)
    return {**{name: found[name] for name in PHASES if name in found}, **({"other": rest} if rest else {})}


def _gpu(events: Iterable[_Event], axes: Mapping[str, str]) -> tuple[list[_Event], dict[str, list[_Event]]]:
    """Computation, and communication by axis, on a GPU."""
    work, sent = [], defaultdict(list)
    for event in events:
        if event.category in GPU_WORK:
            if event.name.startswith("nccl"):
                sent[axes.get(str(event.args.get("Process Group Name")), "world")].append(event)
            else:
                work.append(event)
    return work, sent


def _group_axes(trace: Mapping[str, Any], axes: Mapping[str, str]) -> dict[str, str]:
    """Process group name -> axis; a DeviceMesh describes the groups of its dimension tp as mesh_tp."""
    known = {}
    for group in (trace.get("distributedInfo") or {}).get("pg_config") or ():
        described = str(group.get("pg_desc", ""))
        if described.startswith("mesh_"):
            known[str(group.get("pg_name"))] = described.removeprefix("mesh_")
    return {**known, **axes}


def _operators(events: Iterable[_Event], main: Any) -> list[_Event]:
    """What the operators of the step's thread do themselves, apart from the operators that they call.

    Work is what the dispatcher runs. An operator that starts or awaits communication does none; nor do autograd's nodes, in whose hooks
    a strategy waits.
    """
    stack: list[_Event] = []
    own: list[_Event] = []

    def leave(until: float) -> None:
        """Close the operators that end by then; each has been cut to what remains of it."""
        while stack and stack[-1].end <= until:
            done = stack.pop()
            own.append(done)
            if stack:
                stack[-1] = stack[-1]._replace(start=done.end)

    for event in sorted((e for e in events if e.category == "cpu_op" and e.thread == main), key=lambda e: (e.start, -e.end)):
        leave(event.start)
        if stack:
            own.append(stack[-1]._replace(end=event.start))
        stack.append(event)
    leave(float("inf"))
    return [e for e in own if e.end > e.start and WORKS.match(e.name)]


def _gloo(events: Iterable[_Event], main: Any, collectives: Sequence[Collective]) -> dict[str, list[_Event]]:
    """Communication by axis: gloo's worker threads, and what the step's own thread receives."""
    by_thread: dict[Any, list[_Event]] = defaultdict(list)
    for event in events:
        if event.category == "user_annotation" and (event.name == "gloo:recv" or event.name.startswith("gloo:") and event.thread != main):
            by_thread[event.thread].append(event)
    known = {axis: {_asked(c) for c in collectives if c.axis == axis and c.group > 1}
             for axis in dict.fromkeys(c.axis for c in collectives if c.group > 1)}
    sent: dict[str, list[_Event]] = defaultdict(list)
    for thread in by_thread.values():
        sent[_axis_of_thread(thread, known)] += thread
    return sent


def _axis_of_thread(events: Sequence[_Event], known: Mapping[str, set[tuple[str, int]]]) -> str:
    """The axis that sends most of what a worker thread sent, by kind and size; the only axis where there is one."""
    if len(known) == 1:
        return next(iter(known))
    hits = {axis: sum(_message(e) in sizes for e in events) for axis, sizes in known.items()}
    best = max(hits.values(), default=0)
    winners = [axis for axis, count in hits.items() if count == best]
    return winners[0] if best and len(winners) == 1 else "world"


def _bytes(event: _Event) -> int:
    """Bytes of an event's inputs, from the shapes that the profiler recorded."""
    total = 0
    for shape, kind in zip(event.args.get("Input Dims") or (), event.args.get("Input type") or (), strict=False):
        count = 1
        for n in shape:
            count *= int(n) if isinstance(n, int) else 0
        total += count * SIZES.get(kind, 0)
    return total


def _asked(c: Collective, ran: Mapping[str, str] = KINDS) -> tuple[str, int]:
    """How events name a collective: what ran for it, by default under gloo, and the bytes that go in (or, of a receive, come out)."""
    return ran.get(c.kind, c.kind), c.in_bytes or c.message_bytes


def _message(event: _Event) -> tuple[str, int]:
    """The same of an event: gloo's by its name and shapes, a kernel of NCCL by its arguments."""
    if not event.name.startswith("nccl"):
        return event.name.removeprefix("gloo:"), _bytes(event)
    kind = NCCL_KINDS.get(str(event.args.get("Collective name")), "")
    count = event.args.get("Out msg nelems" if kind == "recv" else "In msg nelems")
    return kind, int(count or 0) * NCCL_SIZES.get(str(event.args.get("dtype")), 0)


def _timed(collectives: Sequence[Collective], sent: Mapping[str, Sequence[_Event]], ran: Mapping[str, str]) -> tuple[Collective, ...]:
    """Each collective with the seconds of the events of its kind and size over its axis; those that phases have alike, shared out by their number."""
    took: dict[tuple[str, str, int], float] = defaultdict(float)
    asked: Counter[tuple[str, str, int]] = Counter()
    for axis, events in sent.items():
        for event in events:
            took[(axis, *_message(event))] += event.end - event.start
    for c in collectives:
        asked[(c.axis, *_asked(c, ran))] += c.count
    return tuple(replace(c, total_s=took[key] * c.count / asked[key]) if (key := (c.axis, *_asked(c, ran))) in took and c.group > 1 else c
                 for c in collectives)


# -- from intervals to a report -----------------------------------------------------------------------------------------------


def _report(step_s: float, phases: Mapping[str, list[Interval]], work: Iterable[_Event], sent: Mapping[str, list[Interval]],
            host_s: float | None) -> TimeReport:
    """Give every instant of the step to its owner, and add up."""
    updates = phases.get("optimizer", [])
    kinds: dict[str, list[Interval]] = {"matmul": [], "attention": [], "optimizer": [], "memory-bound": []}
    for event in work:
        kinds[_kind(event, updates)].append((event.start, event.end))
    breakdown: dict[str, float] = {}
    covered: list[Interval] = []
    for name, intervals in (*((kind, _merged(i)) for kind, i in kinds.items()), *((_waited_for(axis), i) for axis, i in sent.items())):
        own = _without(intervals, covered)
        if intervals:
            breakdown[name] = _length(own)
            covered = _merged([*covered, *own])
    breakdown["idle"] = step_s - sum(breakdown.values())
    return TimeReport(step_s=step_s, phases={name: _length(i) for name, i in phases.items()}, breakdown=breakdown,
                      communication_s={axis: _length(i) for axis, i in sent.items()},
                      exposed_s={axis: breakdown[f"exposed {axis}"] for axis in sent if axis != PIPELINE}, host_s=host_s,
                      bubble_s=breakdown.get(BUBBLE))


def _waited_for(axis: str) -> str:
    return BUBBLE if axis == PIPELINE else f"exposed {axis}"


def _kind(event: _Event, updates: Sequence[Interval]) -> str:
    """What a kernel or an operator does, by its name; all work of the update is the optimizer's."""
    if any(start <= event.start < end for start, end in updates):
        return "optimizer"
    if ATTENTION.search(event.name):
        return "attention"
    return "matmul" if MATMUL.search(event.name) else "memory-bound"


def _merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same instants as disjoint intervals in order."""
    out: list[Interval] = []
    for start, end in sorted(intervals):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], end)
        elif end > start:
            out.append((start, end))
    return out


def _union(events: Iterable[_Event]) -> list[Interval]:
    return _merged((e.start, e.end) for e in events)


def _without(intervals: Sequence[Interval], holes: Sequence[Interval]) -> list[Interval]:
    """Disjoint ordered intervals less other ones."""
    out, first = [], 0
    for start, end in intervals:
        while first < len(holes) and holes[first][1] <= start:
            first += 1
        at = first
        while at < len(holes) and holes[at][0] < end:
            if holes[at][0] > start:
                out.append((start, holes[at][0]))
            start = max(start, holes[at][1])
            at += 1
        if start < end:
            out.append((start, end))
    return out


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
