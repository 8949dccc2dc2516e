"""The form: one row a field, its value between the arrows that step it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from rich.cells import cell_len

from tui.fields import FIELDS, SECTIONS, Field, neighbours, shown
from tui.lines import Line, Span, dim
from tui.state import State


class Row(NamedTuple):
    """A row of the form: a heading, or a field."""

    title: str
    field: Field | None


def rows(headings: bool) -> list[Row]:
    """All rows of the form; narrow forms have no headings."""
    out: list[Row] = []
    for section in SECTIONS:
        if headings:
            out.append(Row(section.title, None))
        out += [Row("", field) for field in section.fields]
    return out


def form(state: State, cursor: str, focused: bool, width: int, height: int, top: int) -> list[Line]:
    """The rows in sight, `top` the first; with what follows from the run below them where there is room."""
    headings = height > len(FIELDS)
    out = [field_row(row.field, state, row.field.path == cursor, focused, width) if row.field else [Span(row.title, "head")]
           for row in rows(headings)[top:top + height]]
    r, run = state.run.recipe, state.run
    derived = [f" = {r.global_batch:,} sequences a step", f" = {run.tokens_per_step:,} tokens", f" = {run.model.params / 1e9:,.2f} B parameters",
               f" = {run.cluster.nodes:,} node{'s' if run.cluster.nodes > 1 else ''} of {run.cluster.gpus_in_node}"]
    if height - len(out) > len(derived):
        out += [[], *([dim(text)] for text in derived)]
    return out


def field_row(field: Field, state: State, here: bool, focused: bool, width: int) -> Line:
    """`label ◂ value ▸`; the label gives way, the value never. = is derived, ! is wrong, an idle field is dim."""
    value = state.values[field.path]
    kind = field.kind(state.run)
    wrong = state.problem is not None and field.path in wrong_fields(state)
    text = shown(value) if kind != "idle" else "–"
    if here:
        back, on = (bool(neighbours(field, state.run, value, by)) for by in (-1, 1))
    else:
        back = on = False
    style = "cursor" if here and focused else "cursor-off" if here else ""
    label_width = max(4, min(16, width - 4 - cell_len(text)))
    label = field.label if len(field.label) <= label_width else field.label[:label_width - 1] + "…"
    room = max(0, width - 1 - label_width - 3 - cell_len(text))
    before = room // 2
    mark = "!" if wrong else "=" if kind == "derived" else " "
    tone = "bad" if wrong else "dim" if kind != "own" else ""
    strong = "bold" if kind == "own" else "dim"
    left = Span("◂" if back else mark if mark == "=" else " ", _both("accent", style) if back else _both("dim", style), f"app.step_field('{field.path}', -1)")
    right = Span("▸" if on else " ", _both("accent", style), f"app.step_field('{field.path}', 1)")
    click = f"app.go_to('{field.path}')"
    return [Span(mark if mark == "!" else " ", _both(tone, style)), Span(label.ljust(label_width), _both(tone, style), click), left,
            Span(" " * before + text + " " * (room - before), _both(f"{strong} {tone}" if wrong else strong, style), click), right,
            Span(" ", style)]


def _both(*names: str) -> str:
    return " ".join(name for name in names if name)


def wrong_fields(state: State) -> set[str]:
    """Fields that a failed change is about: those it asked for, and the one the error names."""
    assert state.problem is not None
    changes: Mapping[str, Any] = state.problem.changes
    return {"model" if path == "params" else path for path in changes} | {state.problem.error.field}
