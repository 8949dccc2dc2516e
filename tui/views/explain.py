"""Explain: what each axis divides, shards, copies and sends, and what every figure rests on; the page that `costmodel explain` prints."""

import re

from costmodel.explain import constants, explain
from costmodel.render.explain import render_explanation
from costmodel.render.prediction import title
from costmodel.render.text import Page
from tui.lines import Line, Span
from tui.state import State

_CODE = re.compile(r"\x1b\[([0-9;]*)m")
_STYLES = {"1": "bold", "2": "dim", "1;31": "bad", "1;33": "warn", "1;32": "good", "0": ""}
_HEADING = re.compile(r"[A-Z][A-Z ]+[A-Z0-9]+(?=  |$)")


def page(state: State, width: int, with_constants: bool) -> list[Line]:
    """The whole page; the constants take a prediction each and come later. Raises PlanError where there is nothing to explain."""
    e = explain(state.run, state.report, state.profile)
    weights = constants(state.run, state.profile) if with_constants else ()
    text = render_explanation(title(state.run), e, weights, state.report, Page(width, True))
    lines = [spans(row) for row in text.splitlines()]
    return lines if with_constants else [*lines, [], [Span("  looking at what each constant weighs …", "dim")]]


def spans(row: str) -> Line:
    """A row with colour codes as spans; headings get their own style."""
    out: Line = []
    style, at = "", 0
    for code in _CODE.finditer(row):
        if code.start() > at:
            out.append(Span(row[at:code.start()], style))
        style, at = _STYLES.get(code[1], ""), code.end()
    if at < len(row):
        out.append(Span(row[at:], style))
    if out and not out[0].text.startswith(" ") and _HEADING.fullmatch(out[0].text.strip()):
        out[0] = out[0]._replace(style="head")
    return out


def headings(lines: list[Line]) -> list[int]:
    """Rows that begin a section."""
    return [y for y, row in enumerate(lines) if row and row[0].style == "head"]
