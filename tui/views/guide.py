"""The tour's panel: where we are, what happens, what to watch, who holds what, one question."""

from tui.lines import Line, Span, bold, dim, fitted, flowed, line, wrapped
from tui.tour import STOPS, Stop

HEIGHT = 8
"""Rows of the panel, its border included."""


def panel(at: int, answer: str | None, width: int) -> list[Line]:
    """The seven rows of a stop."""
    stop = STOPS[at]
    dots = "●" * (at + 1) + "○" * (len(STOPS) - at - 1)
    head = [Span(f"TOUR {at + 1}/{len(STOPS)}", "accent bold"), bold(f"  {stop.title}  "), dim(dots)]
    head += [Span("  [ back", "dim", "app.tour_move(-1)"), Span("  ] next", "dim", "app.tour_move(1)"), Span("  esc leave", "dim", "app.tour")]
    rows = [fitted(head, width), *wrapped(stop.what, width, 2)]
    rows += [[]] * (3 - len(rows))
    rows.append(fitted(line(Span("LOOK ", "accent bold"), stop.look), width))
    rows += flowed(who(stop), width, 1, gap=3)
    if answer is None:
        rows.append(fitted([Span("?  ", "accent bold"), bold(stop.question)], width))
        rows.append(fitted([dim("   change it in the form, or "), Span("a", "accent bold", "app.answer"), dim(" changes it and says")], width))
    else:
        said = wrapped(answer, width - 3, 2)
        rows += [[Span("=  " if i == 0 else "   ", "good bold"), *part] for i, part in enumerate(said)]
    return rows


def who(stop: Stop) -> list[Line]:
    """What is replicated, sharded and sent."""
    return [line(bold(name), f" {words}") for name, words in (("copied", stop.replicated), ("split", stop.sharded), ("sent", stop.sent))]
