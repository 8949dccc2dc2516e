"""A predicted step as a Chrome trace, for Perfetto (ui.perfetto.dev) or chrome://tracing, beside the profiler's own of a real run.

Source of the form: "Trace Event Format" (Chromium project). Times are microseconds; a rank role is a process, a stream a thread.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from costmodel.timeline import Slice, Timeline

FIRST_STREAMS = ("compute", "host")


def trace(timelines: Iterable[Timeline], *, ops: bool = True) -> dict[str, Any]:
    """The trace of some rank roles: single ops, or with `ops` False whole units (layers, head) and collectives."""
    events: list[dict[str, Any]] = []
    for pid, line in enumerate(timelines):
        threads: dict[str, int] = dict(zip(FIRST_STREAMS, (0, 1), strict=True))
        for s in _slices(line, ops):
            tid = threads.setdefault(s.stream, len(threads))
            events.append({"ph": "X", "name": s.name, "cat": f"{s.phase},{s.kind}", "pid": pid, "tid": tid, "ts": 1e6 * s.start_s,
                           "dur": 1e6 * (s.end_s - s.start_s), "args": _arguments(s)})
        for span in line.spans:
            events.append({"ph": "X", "name": span.name, "cat": span.phase, "pid": pid, "tid": len(threads), "ts": 1e6 * span.start_s,
                           "dur": 1e6 * (span.end_s - span.start_s), "args": {"stage": span.stage} if span.stage >= 0 else {}})
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": line.role}})
        names = {**threads, "step": len(threads)}
        events += [{"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}} for name, tid in names.items()]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def count_slices(line: Timeline, *, ops: bool = True) -> int:
    """About how many events a role's trace has: equal spans are laid out once."""
    seen: dict[int, int] = {}
    for span in line.spans:
        if id(span.part) not in seen:
            seen[id(span.part)] = len(line.slices(span, ops=ops))
    return sum(seen[id(span.part)] for span in line.spans)


def _slices(line: Timeline, ops: bool) -> Iterator[Slice]:
    for span in line.spans:
        yield from line.slices(span, ops=ops)


def _arguments(s: Slice) -> dict[str, Any]:
    """What is known of an op, by the names of the report."""
    out: dict[str, Any] = {}
    if s.op is not None:
        known = {"flops": s.op.flops, "bytes": s.op.nbytes, "dims": list(s.op.dims), "dtype": s.op.dtype}
        out = {key: value for key, value in known.items() if value}
        if s.op.comm is not None and s.kind == "collective":
            c = s.op.comm
            out = {"collective": c.kind, "axis": c.axis, "group": c.group, "message_bytes": c.nbytes, "in_bytes": c.in_bytes, "out_bytes": c.out_bytes,
                   "dtype": c.dtype, "exposed_us": 1e6 * s.exposed_s}
    return out
