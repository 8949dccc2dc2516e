"""Stacked bars of letters: the first cell of a part holds its letter and the rest dots, so that a bar reads without colour."""

from collections.abc import Sequence

from tui.lines import Line, Span

Parts = Sequence[tuple[str, float]]


def cells(parts: Parts, width: int, whole: float) -> list[tuple[str, int]]:
    """Cells of each part, where `whole` is `width` cells wide: by largest remainder, so that the bar is as long as its sum says.

    A part above a quarter of a cell gets one, taken from the longest: a small part does not flicker from one bar to the next.
    """
    if whole <= 0 or width <= 0:
        return [(letter, 0) for letter, _ in parts]
    exact = [max(0.0, value) / whole * width for _, value in parts]
    counts = [int(x) for x in exact]
    left = round(sum(exact)) - sum(counts)
    for i in sorted(range(len(parts)), key=lambda i: counts[i] - exact[i])[:max(0, left)]:
        counts[i] += 1
    for i, size in enumerate(exact):
        if size > 0.25 and counts[i] == 0 and max(counts) > 1:
            counts[counts.index(max(counts))] -= 1
            counts[i] = 1
    return [(letter, n) for (letter, _), n in zip(parts, counts, strict=True)]


def filled(letter: str, n: int) -> str:
    """n cells of one part."""
    return letter + "·" * (n - 1) if n > 0 else ""


def stacked(parts: Parts, width: int, whole: float, prefix: str) -> Line:
    """A bar whose `whole` is `width` cells; the style of a part is `prefix` and its letter."""
    return [Span(filled(letter, n), styled(prefix, letter)) for letter, n in cells(parts, width, whole) if n]


def styled(prefix: str, letter: str) -> str:
    """The style of a part: its letter, i for idle."""
    return prefix + ("i" if letter == "·" else letter)


CAPACITY_AT = 0.72
"""Of a bar's width, whatever the run: a change is then a change of the bar, never of its scale."""


def against(parts: Parts, width: int, capacity: float, prefix: str) -> Line:
    """A bar against a capacity that stands at a fixed place: free cells are shaded, what does not fit is cut with »."""
    mark = int(width * CAPACITY_AT)
    bar = stacked(parts, mark, capacity, prefix)
    used = sum(len(span.text) for span in bar)
    if used <= mark:
        return [*bar, Span("░" * (mark - used), "free"), Span("│", "bold"), Span(" " * (width - mark - 1))]
    before, after = _split(bar, mark)
    room = width - mark - 1
    over = sum(len(span.text) for span in after)
    if over > room:
        after = [*_split(after, room - 1)[0], Span("»", "bad")]
        over = room
    return [*before, Span("│", "bold"), *after, Span(" " * (room - over))]


def _split(bar: Line, at: int) -> tuple[Line, Line]:
    before: Line = []
    for i, span in enumerate(bar):
        if len(span.text) > at:
            return [*before, span._replace(text=span.text[:at])], [span._replace(text=span.text[at:]), *bar[i + 1:]]
        before.append(span)
        at -= len(span.text)
    return before, []
