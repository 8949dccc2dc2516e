"""Measured: what was predicted beside what was seen, figure by figure; what was not seen says so."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from costmodel.render.prediction import title
from costmodel.render.units import duration, size
from costmodel.report import CATEGORIES, RoleReport, StepReport
from costmodel.spec import Run
from tui.jobs import JOBS
from tui.lines import Line, Span, bold, dim, fitted, line, wrapped

NAME, FIGURE, OFF = 24, 12, 8


@dataclass(frozen=True, slots=True)
class Laid:
    """A measurement beside the prediction of its run."""

    run: Run
    predicted: StepReport
    measured: StepReport
    source: str


class Row(NamedTuple):
    """One figure of both; None where it was not seen."""

    name: str
    predicted: float | None
    measured: float | None
    unit: str
    """bytes or s."""
    basis: str


def rows(predicted: StepReport, measured: StepReport) -> list[Row]:
    """Every figure that either has, of the rank role that was measured."""
    theirs = measured.roles[0]
    ours = next((r for r in predicted.roles if r.role == theirs.role), None) or max(
        (r for r in predicted.roles if r.example_rank <= theirs.example_rank), key=lambda r: r.example_rank, default=predicted.roles[0])
    return [*_memory(ours, theirs, predicted), *_time(ours, theirs, predicted)]


def _memory(ours: RoleReport, theirs: RoleReport, report: StepReport) -> list[Row]:
    a, b = ours.memory, theirs.memory
    if a is None:
        return []
    allocated, states = report.basis.get("allocated", ""), report.basis.get("states", "")
    out = [Row("allocated at the peak", a.allocated.total_bytes, b.allocated.total_bytes if b else None, "bytes", allocated),
           Row("reserved", a.reserved_bytes, b.reserved_bytes if b else None, "bytes", report.basis.get("reserved", "")),
           Row("device total", a.device_bytes, b.device_bytes if b else None, "bytes", report.basis.get("device", ""))]
    for name in CATEGORIES:
        mine, seen = a.states.get(name, 0), b.states.get(name) if b else None
        if mine or seen:
            out.append(Row(f"state: {name.replace('_', ' ')}", mine, seen, "bytes", states))
    for name in CATEGORIES:
        mine, seen = a.allocated.by_category.get(name, 0), b.allocated.by_category.get(name) if b else None
        if mine or seen:
            out.append(Row(f"peak: {name.replace('_', ' ')}", mine, seen, "bytes", allocated))
    out += [Row(f"peak of {name}", peak.total_bytes, b.phases[name].total_bytes if b and name in b.phases else None, "bytes", allocated)
            for name, peak in a.phases.items()]
    return out


def _time(ours: RoleReport, theirs: RoleReport, report: StepReport) -> list[Row]:
    a, b = ours.time, theirs.time
    if a is None:
        return []
    basis = report.basis.get("time", "")
    out = [Row("step", a.step_s, b.step_s if b else None, "s", basis)]
    for label, mine, seen in (("", a.phases, b.phases if b else {}), ("work: ", a.breakdown, b.breakdown if b else {}),
                              ("sent over ", a.communication_s, b.communication_s if b else {})):
        out += [Row(f"{label}{name}", mine.get(name), seen.get(name), "s", basis) for name in dict.fromkeys([*mine, *seen])]
    return out


def table(laid: Laid, width: int) -> list[Line]:
    """The figures with how far they are apart, and a bar of both: ▀ predicted, ▄ measured."""
    bar = max(8, min(40, width - NAME - 2 * FIGURE - OFF - 12))
    key = "▀ predicted ▄ measured" if bar >= 12 else "▀ pred ▄ meas"
    out: list[Line] = [fitted(line(bold(title(laid.run)), dim(f"   {laid.source}")), width),
                       [dim("".ljust(NAME) + "predicted".rjust(FIGURE) + "measured".rjust(FIGURE) + "off".rjust(OFF) + f"  {key}")]]
    found = rows(laid.predicted, laid.measured)
    for unit in ("bytes", "s"):
        of = [row for row in found if row.unit == unit]
        most = max((v for row in of for v in (row.predicted, row.measured) if v), default=0.0)
        out += [[], [Span("MEMORY" if unit == "bytes" else "TIME", "head")]] if of else []
        out += [fitted(_row(row, most, bar), width) for row in of]
    return out


def _row(row: Row, most: float, bar: int) -> Line:
    show = size if row.unit == "bytes" else duration
    a, b = row.predicted, row.measured
    off, style = "", "dim"
    if a is not None and b:
        apart = a / b - 1
        off, style = f"{100 * apart:+.1f}%", "good" if abs(apart) < 0.05 else "warn" if abs(apart) < 0.2 else "bad-figure"
    p, m = (round((v or 0.0) / most * bar) if most else 0 for v in (a, b))
    pair = "█" * min(p, m) + ("▀" * (p - m) if p > m else "▄" * (m - p))
    return [Span(row.name[:NAME - 1].ljust(NAME)), Span((show(a) if a is not None else "-").rjust(FIGURE)),
            Span((show(b) if b is not None else "not seen").rjust(FIGURE), "" if b is not None else "dim"), Span(off.rjust(OFF), style),
            Span("  "), Span(pair.ljust(bar), "bar"), dim(f"  {row.basis}")]


HEAD = 8


def head(choice: int, running: str, words: str, ok: bool, width: int) -> list[Line]:
    """What can be performed, and what is being said."""
    out: list[Line] = [line(Span("MEASURED ", "head"), dim("↑ ↓ choose  "), Span("g", "accent bold", "app.search"), dim(" perform  "),
                            Span("c", "accent bold", "app.cancel"), dim(" stop  "), Span("r", "accent bold", "app.record"), dim(" open a record"))]
    for i, job in enumerate(JOBS):
        here = i == choice
        out.append(fitted(line(Span(f" {'▸' if here else ' '} {job.name:<10}", "bold" if here else ""), dim(job.does)), width))
    if running:
        out.append(fitted(line(Span(f"performing: {running}  ", "accent bold"), *progress(words), dim(words)), width))
    elif words:
        out += wrapped(words, width, 2, "" if ok else "bad")
    return [*out, *[[] for _ in range(HEAD - len(out))]][:HEAD]


def progress(words: str) -> Line:
    """A bar where the words count ("3 of 14")."""
    found = re.search(r"(\d+) of (\d+)", words)
    if not found or not int(found[2]):
        return []
    done = round(12 * min(1.0, int(found[1]) / int(found[2])))
    return [Span("█" * done, "bar"), Span("░" * (12 - done) + " ", "dim")]


def empty(width: int) -> list[Line]:
    """What the view is for, before there is anything in it."""
    text = ("Here a prediction is laid beside what was seen: perform this run (g), or open a record (r) that execute has written. "
            "What was not seen says so.")
    return [[], *wrapped(text, width, 4, "dim")]


def log(lines: Sequence[str], width: int) -> list[Line]:
    """Plain output of a job."""
    return [[Span(text[:width])] for text in lines]
