"""Compare: pinned runs side by side, each against the first, and why they differ."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from costmodel.changes import Keep, changed
from costmodel.comparison import Comparison, Entry, Predicted, compare, one_gpu
from costmodel.render.units import share
from costmodel.report import CATEGORIES, StepReport
from costmodel.solve.trials import Watch
from costmodel.spec import PlanError, Run
from costmodel.waterfall import IDEAL, waterfall
from tui.fields import BY_PATH
from tui.lines import Line, Span, bold, dim, fitted, line
from tui.pins import Pinned
from tui.state import State, answer
from tui.views.explore import GIB, gib, held, ms

NOW = "now"


def compared(state: State, pins: Sequence[Pinned]) -> Comparison:
    """The pins and the present run; the first pin is the base, or one GPU where nothing is pinned. Raises PlanError for a run without times."""
    now = _predicted(Pinned(NOW, state.run, state.report), state.profile)
    if not pins:
        return compare(one_gpu(state.run, state.profile), now)
    return compare(*(_predicted(pin, state.profile) for pin in pins), now)


def _predicted(pin: Pinned, profile: str | None) -> Predicted:
    return Predicted(pin.name, pin.run, pin.report, waterfall(pin.run, pin.report, profile))


LABEL = 18


def table(c: Comparison, width: int, height: int) -> list[Line]:
    """The runs as columns: what they need and how fast they are, against A; then what costs MFU against A, the largest first."""
    wide = max(12, min(24, (width - LABEL) // len(c.entries)))
    base = c.entries[0]
    names = [Span(f"{entry.label if entry.name != NOW else '▸'} {entry.name}"[:wide - 1].rjust(wide), "bold" if entry.name == NOW else "base")
             for entry in c.entries]
    rows: list[Line] = [[Span("COMPARE".ljust(LABEL), "head"), *names]]
    figures: list[tuple[str, Callable[[Entry], float | None], Callable[[float], str], int]] = [
        ("GPUs", lambda e: e.gpus, lambda v: f"{v:,.0f}", 0),
        ("device GiB", lambda e: e.memory.device, gib, 1),
        *((name.replace("_", " "), _category(name), gib, 1) for name in CATEGORIES if any(e.memory.by_category.get(name, 0) > GIB / 20 for e in c.entries)),
        ("step ms", lambda e: 1e3 * e.step_s, ms, 1),
        ("tok/s per GPU", lambda e: e.tokens_per_s_per_gpu, lambda v: f"{v:,.0f}", -1),
        ("MFU %", lambda e: 100 * e.mfu, lambda v: f"{v:.1f}", -1)]
    if height < 20:
        figures = [row for row in figures if row[0] in ("GPUs", "device GiB", "activations", "step ms", "tok/s per GPU", "MFU %")]
    for label, of, write, bad in figures:
        rows.append([dim(label.ljust(LABEL)), *(_cell(of(e), of(base) if e is not base else None, write, bad, wide) for e in c.entries)])
    verdicts = [Span(entry.memory.verdict.rjust(wide), "good" if entry.memory.verdict == "fits" else "bad") for entry in c.entries]
    rows.insert(3, [dim("verdict".ljust(LABEL)), *verdicts])
    rows.append([dim("of A's speed".ljust(LABEL)), *(Span((share(e.efficiency) if e.efficiency is not None else "-").rjust(wide)) for e in c.entries)])
    rows += _causes(c, wide, height - len(rows))
    return [fitted(row, width) for row in rows][:height]


def _category(name: str) -> Callable[[Entry], float | None]:
    return lambda e: e.memory.by_category.get(name, 0)


def _cell(value: float | None, base: float | None, write: Callable[[float], str], bad: int, wide: int) -> Span:
    """A figure, and its distance from A's; bad: 1 where more is worse, -1 where less is."""
    if value is None:
        return Span("-".rjust(wide), "dim")
    text, style = write(value), ""
    if base is not None and bad:
        by = value - base
        told = write(abs(by))
        if any(c in "123456789" for c in told):
            text = f"{text} {'+' if by > 0 else '-'}{told}"
            style = "bad-figure" if (by > 0) == (bad > 0) else "good"
    return Span(text.rjust(wide), style)


def _causes(c: Comparison, wide: int, room: int) -> list[Line]:
    """Bars of the waterfall: points of MFU against A."""
    if room < 3 or not c.differences:
        return []
    names = dict.fromkeys(bar.name for d in c.differences for bar in d.bars if bar.name != IDEAL)
    points = {name: [next((bar.points for bar in d.bars if bar.name == name), 0.0) for d in c.differences] for name in names}
    ranked = sorted(names, key=lambda name: -max(abs(p) for p in points[name]))
    rows: list[Line] = [[Span("MFU against A", "head"), dim(" points, by cause")]]
    for name in ranked[:room - 1]:
        if max(abs(p) for p in points[name]) < 0.0005:
            break
        cells = [Span(" " * wide), *(Span(f"{100 * p:+.1f}".rjust(wide), "bad-figure" if p < 0 else "good") for p in points[name])]
        rows.append([dim(name[:LABEL - 1].ljust(LABEL)), *cells])
    return rows


# -- curves --------------------------------------------------------------------------------------------------------------------


class Metric(NamedTuple):
    """What a curve shows."""

    name: str
    of: Callable[[StepReport], float | None]


METRICS: tuple[Metric, ...] = (
    Metric("tokens/s per GPU", lambda r: r.tokens_per_s_per_gpu),
    Metric("MFU %", lambda r: None if r.mfu is None else 100 * r.mfu),
    Metric("step ms", lambda r: None if r.step_s is None else 1e3 * r.step_s),
    Metric("GiB of the fullest rank", lambda r: max((held(role.memory) / GIB for role in r.roles if role.memory), default=None)))
CURVE_FIELDS = ("cluster.gpus", "recipe.micro_batch", "recipe.seq_len", "recipe.grad_accum", "plan.tp", "plan.pp", "plan.zero", "plan.dp_replicate",
                "recipe.global_batch")


class Point(NamedTuple):
    """A value of a field, and the prediction of the run with it."""

    value: int
    report: StepReport


def sweep(run: Run, path: str, profile: str | None, keep: Keep, watch: Watch | None = None) -> list[Point]:
    """The run over all values of a field that make one. `watch` says False to stop."""
    from costmodel.solve import Progress
    out: list[Point] = []
    values = BY_PATH[path].values(run)
    for i, value in enumerate(values):
        if watch is not None and not watch(Progress(i, len(values), f"{path} = {value}")):
            break
        try:
            out.append(Point(value, answer(changed(run, {path: value}, keep), profile).report))
        except PlanError:
            continue
    return out


def curve_title(path: str, metric: Metric, fits: Sequence[str], width: int) -> Line:
    """What the curve shows, and the keys that change it."""
    said = line(Span("CURVE ", "head"), bold(f"{metric.name} over {BY_PATH[path].label}"), dim("   "),
                Span("x", "accent bold", "app.turn('field', 1)"), dim(" field  "), Span("m", "accent bold", "app.turn('figure', 1)"), dim(" figure  "))
    if fits:
        said.append(dim("  ".join(fits)))
    return fitted(said, width)
