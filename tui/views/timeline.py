"""Timeline: what each stream of each rank role does over one step, at the level of detail that fits; the slice picked; the pipeline's map.

A step has up to millions of slices. Of each span (a micro-batch's forward or backward, the update) the finest level is drawn whose slices
are a few cells long: spans, units (layers), single ops. Collectives and host work shorter than that become a density.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from costmodel.program.ir import Op
from costmodel.render.units import duration, size
from costmodel.render.words import operation
from costmodel.spec import Run
from costmodel.timeline import COMPUTE, HOST, Slice, Span, Timeline
from tui.lines import Line, bold, dim, fitted, line
from tui.lines import Span as Text
from tui.views.pipeline import Cells, Window

WAITS = "waits"
"""What compute waits for, among the streams of a span."""
CELLS = {"unit": 4.0, "op": 3.0}
"""Cells that a slice of a level needs on average to be drawn."""
DENSITY = " ▁▂▃▄▅▆▇█"
LETTERS = {"forward": "F", "backward": "B", "recompute": "R", "optimizer": "U"}
SHORT = {"all-gather": "AG", "reduce-scatter": "RS", "all-reduce": "AR", "all-to-all": "A2A", "broadcast": "BC", "send": "S", "recv": "RV"}
STYLES = {"forward": "p-F", "backward": "p-B", "recompute": "p-R", "optimizer": "p-O"}
LABEL = 19


class Lane(NamedTuple):
    """One row: a stream of a rank role."""

    at: int
    """Which of the timelines."""
    stream: str


class Item(NamedTuple):
    """Something drawn in a lane, which can be picked."""

    start: float
    end: float
    label: str
    phase: str
    what: Slice | Span


@dataclass(eq=False)
class Lanes:
    """The timelines of a run's rank roles, and the slices already laid out."""

    run: Run
    timelines: tuple[Timeline, ...]
    axes: tuple[str, ...]
    """Streams of communication that carry something."""
    step_s: float
    seen: dict[tuple[int, int, bool], tuple[float, list[Slice]]] = field(default_factory=dict)
    sorted: dict[tuple[int, int, bool], dict[str, list[Slice]]] = field(default_factory=dict)
    eager: bool = True
    """Lay slices out when they are asked for, however long that takes; else note them as missing."""
    missing: list[tuple[int, Span, bool]] = field(default_factory=list)

    def streams(self, at: int, span: Span, ops: bool) -> dict[str, list[Slice]] | None:
        """Slices of a span by stream, what compute waits for under WAITS. None where they are still to be laid out."""
        key = (at, id(span), ops)
        known = self.sorted.get(key)
        if known is None:
            found = self._slices(at, span, ops)
            if found is None:
                return None
            known = self.sorted[key] = {}
            for s in found:
                known.setdefault(WAITS if s.kind == "wait" else s.stream, []).append(s)
        return known

    def _slices(self, at: int, span: Span, ops: bool) -> list[Slice] | None:
        """Those of an equal slot of a pipeline are the same, moved."""
        key = _key(at, span, ops)
        if key not in self.seen:
            if not self.eager:
                self.missing.append((at, span, ops))
                return None
            self.seen[key] = span.origin_s, self.timelines[at].slices(span, ops=ops)
        origin, found = self.seen[key]
        by = span.origin_s - origin
        return [Slice(s.stream, s.start_s + by, s.end_s + by, s.name, s.phase, s.kind, s.op, s.exposed_s) for s in found] if by else found

    def lay_out(self, wanted: Sequence[tuple[int, Span, bool]], go_on: Callable[[], bool]) -> None:
        """Lay out slices that a drawing missed; for a thread."""
        for at, span, ops in wanted:
            if not go_on():
                return
            key = _key(at, span, ops)
            if key not in self.seen:
                self.seen[key] = span.origin_s, self.timelines[at].slices(span, ops=ops)

    def next_wait(self, at: int, after: float, least_s: float) -> Slice | None:
        """The first time from `after` on that compute stands still for so long; for a thread."""
        for span in self.timelines[at].spans:
            if span.end_s > after:
                self.lay_out([(at, span, False)], lambda: True)
                waits = [s for s in (self.streams(at, span, False) or {}).get(WAITS, ()) if s.start_s >= after and s.end_s - s.start_s > least_s]
                if waits:
                    return min(waits, key=lambda s: s.start_s)
        return None

    def visible(self, at: int, window: Window) -> list[Span]:
        return [s for s in self.timelines[at].spans if s.end_s > window.start and s.start_s < window.end and s.end_s > s.start_s]


def lanes_of(timelines: Sequence[Timeline], axes: Sequence[str], at: int, rows: int) -> tuple[Lane, ...]:
    """Every role's streams where they have room; else the compute stream of each, and the other streams of the role `at`."""
    others = (*axes, HOST)
    if len(timelines) * (1 + len(others)) <= rows:
        return tuple(Lane(i, stream) for i in range(len(timelines)) for stream in (COMPUTE, *others))
    return tuple(Lane(i, stream) for i in range(len(timelines)) for stream in ((COMPUTE, *others) if i == at else (COMPUTE,)))[:rows]


def items(lanes: Lanes, lane: Lane, window: Window, width: int) -> list[Item]:
    """What a lane shows in a window, at the finest level that fits; nothing of spans too short for their streams to be told apart."""
    out: list[Item] = []
    for span in lanes.visible(lane.at, window):
        cells = (span.end_s - span.start_s) / window.span * width
        streams = _streams(lanes, lane, span, cells)
        if streams is None:
            if lane.stream == COMPUTE:
                out.append(Item(span.start_s, span.end_s, _short(span.name), span.phase, span))
            continue
        out += [Item(s.start_s, s.end_s, _slice_label(s), s.phase, s) for s in streams.get(lane.stream, ())
                if s.end_s > window.start and s.start_s < window.end]
    return sorted(out, key=lambda item: item.start)


def _key(at: int, span: Span, ops: bool) -> tuple[int, int, bool]:
    """Equal slots of a pipeline share their slices."""
    return at, id(span.part) if span.origin_s > 0.0 else id(span), ops


def _streams(lanes: Lanes, lane: Lane, span: Span, cells: float) -> dict[str, list[Slice]] | None:
    """The slices of a span at the level that its cells allow; None: the span itself. Streams beside compute are told apart sooner."""
    if cells < (8 if lane.stream == COMPUTE else 3):
        return None
    units = lanes.streams(lane.at, span, False)
    if units is None or lane.stream not in (COMPUTE, HOST):
        return units
    n = max(1, len(units.get(COMPUTE, ())))
    if cells / n >= CELLS["op"] * 8:
        ops = lanes.streams(lane.at, span, True)
        if ops is not None and cells / max(1, len(ops.get(COMPUTE, ()))) >= CELLS["op"]:
            return ops
    return units if cells / n >= CELLS["unit"] or lane.stream == HOST else None


def exposed(lanes: Lanes, at: int, window: Window, width: int) -> list[tuple[float, float]]:
    """When compute stands still, in the spans that are long enough to look into."""
    return [(s.start_s, s.end_s) for span in lanes.visible(at, window) if (span.end_s - span.start_s) / window.span * width >= 8
            for s in (lanes.streams(at, span, False) or {}).get(WAITS, ()) if s.end_s > window.start and s.start_s < window.end]


# -- drawing -----------------------------------------------------------------------------------------------------------------


def ruler(window: Window, width: int) -> Line:
    """Milliseconds along the top."""
    marks = Cells(width, " ", "dim")
    every = max(12, width // max(1, width // 14))
    for x in range(0, width - 8, every):
        marks.put(x, f"|{1e3 * (window.start + x / width * window.span):,.1f}", "dim")
    return [dim("ms".ljust(LABEL)), *marks.line()]


def lane_line(lanes: Lanes, lane: Lane, window: Window, width: int, here: bool, picked: Item | None) -> Line:
    """A lane's row."""
    found = items(lanes, lane, window, width)
    if lane.stream == COMPUTE:
        row = _bars(found, window, width, picked)
        for start, end in exposed(lanes, lane.at, window, width):
            a, b = _cell(start, window, width), _cell(end, window, width)
            for i in range(max(0, a), min(width, b)):
                if row.chars[i] in " ·":  # never over a label
                    row.put(i, "!", "exposed")
    elif found and sum((min(i.end, window.end) - max(i.start, window.start)) / window.span * width for i in found) / len(found) >= 4:
        row = _bars(found, window, width, picked, "comm" if lane.stream != HOST else "host")
    else:
        row = _density(found, window, width, "comm" if lane.stream != HOST else "host")
        if picked is not None:
            row.put(_cell(picked.start, window, width), "◆", "accent bold")
    name = _role(lanes.timelines[lane.at].role) if lane.stream == COMPUTE else ""
    stream = "embed" if lane.stream == "embedding" else lane.stream
    label = f"{'▸' if here else ' '}{name:<5}{stream}"
    return [Text(label[:LABEL - 1].ljust(LABEL), "bold" if here else "" if lane.stream == COMPUTE else "dim"), *row.line()]


def _cell(when: float, window: Window, width: int) -> int:
    return round((when - window.start) / window.span * width)


def _bars(found: Sequence[Item], window: Window, width: int, picked: Item | None, plain: str = "") -> Cells:
    """Items with their labels; one that does not fit loses its beginning (`attention.out` is `out`), else becomes its letter."""
    row = Cells(width, " " if plain else "·", "idle")
    for item in found:
        a, b = max(0, _cell(item.start, window, width)), min(width, _cell(item.end, window, width))
        if b <= a:
            continue
        style = "cursor" if picked is not None and item.start == picked.start and item.end == picked.end else plain or STYLES.get(item.phase, "p-f")
        n = b - a
        text = next((words for words in (item.label, item.label.partition(".")[2]) if 0 < len(words) < n), item.label[:1] if n > 1 else _letter(item.label))
        row.put(a, (text.ljust(n - 1) + "▕") if n > 1 else text, style)
    return row


def _letter(label: str) -> str:
    """A single cell holds a letter, never a cut number."""
    return label[:1] if label[:1].isalpha() else " "


def _density(found: Sequence[Item], window: Window, width: int, style: str) -> Cells:
    """How busy each cell is; ! where compute waits for a good part of it."""
    busy, waits = [0.0] * width, [0.0] * width
    step = window.span / width
    for item in found:
        late = item.what.exposed_s if isinstance(item.what, Slice) else 0.0
        for into, start in ((busy, item.start), (waits, item.end - late)):
            if start >= item.end:
                continue
            first, last = max(0, int((start - window.start) / step)), min(width - 1, int((item.end - window.start) / step))
            for i in range(first, last + 1):
                left = window.start + i * step
                into[i] += max(0.0, min(item.end, left + step) - max(start, left)) / step
    row = Cells(width, " ", style)
    for i, part in enumerate(busy):
        if waits[i] > 0.5:
            row.put(i, "!", "exposed")
        elif part > 0.02:
            row.put(i, DENSITY[min(8, 1 + int(part * 7.999))], style)
    return row


def _role(role: str) -> str:
    return role.replace("pipeline rank ", "pp").replace("every rank", "all").replace("fullest shard", "most").replace("emptiest shard", "least")


def _short(name: str) -> str:
    """F3 for "forward 3"."""
    word, _, number = name.partition(" ")
    return f"{LETTERS.get(word, word[:6])}{number}"


def _slice_label(s: Slice) -> str:
    if s.op is not None and s.op.comm is not None:
        return f"{SHORT.get(s.op.comm.kind, s.op.comm.kind)} {s.name.partition('(')[2].rstrip(')') or s.name.rpartition('.')[0] or s.name}"
    if s.name.startswith("layer "):
        return "L" + s.name[6:]
    return s.name


# -- what was picked -----------------------------------------------------------------------------------------------------------


def inspector(item: Item | None, run: Run, width: int) -> list[Line]:
    """Three rows about the slice picked: its shape, bytes and cost."""
    if item is None:
        return [[dim("← → pick a slice   ↑ ↓ another stream   + - 0 zoom   n next wait")], [], []]
    seconds = item.end - item.start
    when = f"{duration(seconds)} from {duration(item.start)}"
    if isinstance(item.what, Span):
        span = item.what
        words = span.name if span.micro_batch < 0 else f"{span.phase} of micro-batch {span.micro_batch}" + (f", stage {span.stage}" if run.plan.pp > 1 else "")
        return [fitted(line(bold(words), f"   {when}"), width), [dim("zoom in (+) for its layers and operations")], []]
    s = item.what
    if s.op is None:
        return [fitted(line(bold(f"{s.phase} of {s.name}"), f"   {when} on {s.stream}"), width), [dim("zoom in (+) for its operations")], []]
    return [fitted(row, width) for row in _op_rows(s, s.op, when)]


def _op_rows(s: Slice, op: Op, when: str) -> list[Line]:
    if op.comm is not None:
        c = op.comm
        hidden = f"exposed {duration(s.exposed_s)} of {duration(s.end_s - s.start_s)}" if s.exposed_s else "hidden behind compute"
        return [line(bold(f"{c.kind} over {c.axis}"), f"   {s.name}, {s.phase}   {when}"),
                line(f"{c.group} ranks   in {size(c.in_bytes)}   out {size(c.out_bytes)}   message {size(c.nbytes)} {c.dtype}"),
                line(hidden if not s.exposed_s else bold(hidden))]
    shape = ""
    if op.kind == "matmul" and len(op.dims) == 4:
        batch, m, n, k = op.dims
        shape = f"{f'{batch} x ' if batch > 1 else ''}[{m} x {k}] · [{k} x {n}]"
    elif op.kind == "attention" and len(op.dims) >= 6:
        b, h, kv, q, keys, d = op.dims[:6]
        shape = f"batch {b}, heads {h} ({kv} KV) of {d}, {q} x {keys}"
    seconds = s.end_s - s.start_s
    rate = f"   {op.flops / seconds / 1e12:,.0f} TFLOP/s" if op.flops and seconds else ""
    moved = f"{size(op.nbytes)} moved, {op.nbytes / seconds / 1e12:.2f} TB/s" if op.nbytes and seconds else ""
    return [line(bold(operation(op.name) or op.name), f"   {s.phase}   {when}"), line(f"{s.kind} {op.dtype}   {shape}"),
            line(f"{op.flops / 1e9:,.1f} GFLOP{rate}   {moved}" if op.flops else moved)]
