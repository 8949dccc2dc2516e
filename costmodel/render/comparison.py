"""A comparison as text: runs side by side, their memory, and the difference in time bar by bar."""

from collections.abc import Callable, Sequence
from typing import Any

from costmodel.comparison import Comparison, Difference, Entry
from costmodel.render.text import Page
from costmodel.render.units import count, duration, long_time, plural, share, size
from costmodel.report import CATEGORIES

SHOWN, MOST_CAUSES = 0.1, 4
"""Part of the largest difference from which that of another bar is named in the summary, and how many are."""
MOST_FIELDS = 16


def render_comparison(titles: Sequence[str], c: Comparison, page: Page) -> str:
    """The whole answer; `titles` say in a line what each run is."""
    page.line(f"{plural(len(c.entries), 'run')} side by side", "bold")
    page.heading("RUNS")
    page.pairs([(e.label, f"{e.name}: {title}") for e, title in zip(c.entries, titles, strict=True)])
    _fields(c, page)
    _figures(c, page)
    _memory(c, page)
    for difference in c.differences:
        _difference(c.entries[0].label, difference, page)
    if c.notes:
        page.heading("NOTES")
        page.bullets(c.notes)
    page.heading("IN SHORT")
    for entry, difference in zip(c.entries[1:], c.differences, strict=True):
        page.line(in_short(c.entries[0], entry, difference), indent="  ")
    return str(page)


def _fields(c: Comparison, page: Page) -> None:
    """What the runs differ in."""
    rows = [[path, *map(_value, values)] for path, values in c.fields.items()]
    if rows:
        page.heading("WHAT DIFFERS")
        _blocks(["field"], [e.label for e in c.entries], rows[:MOST_FIELDS], page)
        if len(rows) > MOST_FIELDS:
            page.line(f"and {plural(len(rows) - MOST_FIELDS, 'field')} more (--json lists all)", "dim", "  ")


def _value(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return ",".join(map(str, value)) or "none"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)


def _figures(c: Comparison, page: Page) -> None:
    page.heading("SIDE BY SIDE")
    base = c.entries[0].label
    figures: list[tuple[str, Callable[[Entry], str]]] = [
        ("GPUs", lambda e: count(e.gpus)), ("nodes", lambda e: count(e.nodes)), ("verdict", lambda e: e.memory.verdict),
        ("tokens a step", lambda e: count(e.tokens_per_step)), ("step", lambda e: duration(e.step_s)), ("tokens/s", lambda e: count(e.tokens_per_s)),
        ("tokens/s/GPU", lambda e: count(e.tokens_per_s_per_gpu)), (f"  of {base}'s", lambda e: "-" if e.efficiency is None else share(e.efficiency)),
        ("weak scaling", lambda e: share(e.weak)), ("strong scaling", lambda e: share(e.strong)), ("MFU", lambda e: share(e.mfu)),
        ("HFU", lambda e: share(e.hfu)), ("communication", lambda e: duration(e.communication_s)), ("  exposed", lambda e: duration(e.exposed_s)),
        ("  of the step", lambda e: share(e.exposed_s, e.step_s))]
    if any(e.training for e in c.entries):
        figures += [("training", lambda e: long_time(e.training.seconds) if e.training else "-"),
                    ("  GPU-hours", lambda e: count(e.training.gpu_hours) if e.training else "-")]
    _blocks([""], [e.label for e in c.entries], [[name, *(of(e) for e in c.entries)] for name, of in figures], page)


def _memory(c: Comparison, page: Page) -> None:
    """By category at the peak of the fullest rank; with two runs also the difference."""
    page.heading("MEMORY", "of the fullest rank, at its peak")
    names = [name for name in CATEGORIES if any(e.memory.by_category.get(name) for e in c.entries)]
    figures: list[tuple[str, Callable[[Entry], int | None]]] = [(name.replace("_", " "), _of_category(name)) for name in names]
    figures += [("allocated", lambda e: e.memory.allocated), ("reserved", lambda e: e.memory.reserved), ("device total", lambda e: e.memory.device)]
    rows = []
    for name, of in figures:
        values = [of(e) for e in c.entries]
        row = [name, *(size(v) if v is not None else "-" for v in values)]
        if len(values) == 2:
            a, b = values
            row.append(_signed(b - a, size) if a is not None and b is not None else "-")
        rows.append(row)
    rows.append(["capacity", *(size(e.memory.capacity) if e.memory.capacity else "-" for e in c.entries), *([""] if len(c.entries) == 2 else [])])
    heads = [e.label for e in c.entries]
    _blocks([""], [*heads, *([f"{heads[1]} - {heads[0]}"] if len(heads) == 2 else [])], rows, page)


def _of_category(name: str) -> Callable[[Entry], int | None]:
    return lambda e: e.memory.by_category.get(name, 0)


def _difference(base: str, d: Difference, page: Page) -> None:
    same = abs(d.scale - 1) < 1e-9
    page.heading(f"{d.label} AGAINST {base}", f"{_spends(d.ratio, base)}; a step of the mean GPU, {count(d.tokens_per_gpu)} tokens on each"
                 + ("" if same else f", so {d.label}'s seconds x {d.scale:.4g}"))
    rows = [[b.name, duration(b.before_s), duration(b.after_s), _signed(b.difference_s, duration), _points(b.points)] for b in d.bars]
    rows.append(["step", duration(d.before_s), duration(d.after_s), _signed(d.after_s - d.before_s, duration), _points(d.mfu_after - d.mfu_before)])
    page.table(["", base, d.label, f"{d.label} - {base}", "MFU points"], rows, "<>>>>", bold_last=True)


def _spends(ratio: float, base: str) -> str:
    """A ratio of times: 12.3% more GPU time on a token than A."""
    change = 100 * (ratio - 1)
    if abs(change) < 0.05:
        return f"as much GPU time on a token as {base}"
    if 0.5 <= ratio < 2:
        return f"{abs(change):.1f}% {'more' if change > 0 else 'less'} GPU time on a token than {base}"
    return f"{ratio:.3g} times the GPU time of {base} on a token"


def in_short(base: Entry, entry: Entry, d: Difference) -> str:
    """What the difference comes to, and its largest causes."""
    causes = sorted(d.bars, key=lambda b: -abs(b.difference_s))
    least = max(SHOWN * abs(causes[0].difference_s), 1e-4 * d.before_s)
    named = [f"{b.name} {_signed(b.difference_s, duration)}" for b in causes if abs(b.difference_s) >= least][:MOST_CAUSES]
    memory = entry.memory.allocated - base.memory.allocated
    peak = f"{size(abs(memory))} {'more' if memory > 0 else 'less'}" if memory else "as much"
    causes_words = f": {', '.join(named)}" if named else ""
    return (f"{entry.label} spends {_spends(d.ratio, base.label)}{causes_words}. Its fullest rank peaks at {size(entry.memory.allocated)} "
            f"of live tensors, {peak}.")


def _signed(value: float, words: Callable[[float], str]) -> str:
    """A difference with its sign."""
    text = words(abs(value))
    return f"{'+' if value > 0 else '-' if value < 0 else ''}{text}"


def _points(value: float) -> str:
    text = f"{100 * value:+.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text


def _blocks(first: Sequence[str], heads: Sequence[str], rows: Sequence[Sequence[str]], page: Page) -> None:
    """A table of a label and a column for each run, cut into as many as the page is wide for; each begins with the base."""
    widths = [max(len(r[i]) for r in ([*first, *heads], *rows)) for i in range(len(heads) + 1)]
    at = 1
    while at <= len(heads):
        chosen = [1] if at > 1 else []
        taken = 2 + widths[0] + sum(widths[i] + 2 for i in chosen)
        while at <= len(heads) and (taken + widths[at] + 2 <= page.width or len(chosen) < 2):
            chosen.append(at)
            taken += widths[at] + 2
            at += 1
        page.table([*first, *(heads[i - 1] for i in chosen)], [[r[0], *(r[i] for i in chosen)] for r in rows], "<" + ">" * len(chosen))
        if at <= len(heads):
            page.line()
