"""What is on the screen as plain values: a line is a list of spans, a span is a text with the names of its styles.

Views are functions from a state and a size to lines; `canvas.Canvas` paints them. The names are component classes of the canvas, so
every colour comes from the style sheet.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size


class Span(NamedTuple):
    """A text, its styles (names separated by spaces), and the action that a click on it runs."""

    text: str
    style: str = ""
    action: str = ""


Line = list[Span]


def line(*spans: Span | str) -> Line:
    """A line of spans; plain text is a span without style."""
    return [span if isinstance(span, Span) else Span(span) for span in spans]


def dim(text: str) -> Span:
    return Span(text, "dim")


def bold(text: str) -> Span:
    return Span(text, "bold")


def text_of(spans: Iterable[Span]) -> str:
    """The line as it reads without colour."""
    return "".join(span.text for span in spans)


def length(spans: Iterable[Span]) -> int:
    """Cells of a line."""
    return sum(cell_len(span.text) for span in spans)


def fitted(spans: Line, width: int) -> Line:
    """The line cut to a width; what is cut ends in an ellipsis."""
    if length(spans) <= width:
        return spans
    out: Line = []
    left = width - 1
    for span in spans:
        size = cell_len(span.text)
        if size > left:
            out.append(span._replace(text=set_cell_size(span.text, max(0, left)) + "…"))
            return out
        out.append(span)
        left -= size
    return out


def both_ends(left: Line, right: Line, width: int) -> Line:
    """One line flush left and one flush right; the left one gives way."""
    room = width - length(right)
    kept = fitted(left, max(0, room - 1))
    return [*kept, Span(" " * max(0, room - length(kept))), *right]


def flowed(items: Sequence[Line], width: int, rows: int, gap: int = 1, indent: int = 0) -> list[Line]:
    """Items side by side, wrapped between items, in at most `rows` lines; what does not fit ends in an ellipsis."""
    out: list[Line] = [[Span(" " * indent)] if indent else []]
    for item in items:
        used = length(out[-1])
        begins = used <= indent
        if not begins and used + gap + length(item) > width:
            if len(out) == rows:
                out[-1] = [*fitted(out[-1], width - 1), Span("…", "dim")] if used < width else out[-1]
                return out
            out.append([Span(" " * indent)] if indent else [])
            begins = True
        out[-1] += [*([] if begins else [Span(" " * gap)]), *item]
    return [fitted(row, width) for row in out]


def wrapped(text: str, width: int, rows: int, style: str = "") -> list[Line]:
    """A paragraph in at most `rows` lines; the last one is cut with an ellipsis where more follows."""
    import textwrap
    parts = textwrap.wrap(text, max(8, width), break_on_hyphens=False) or [""]
    if len(parts) > rows:
        parts = [*parts[:rows - 1], parts[rows - 1][:max(0, width - 1)].rstrip() + "…"]
    return [[Span(part, style)] for part in parts]
