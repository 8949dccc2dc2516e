"""The page of keys, and how to read the bars."""

from tui.keys import FORM_KEYS, KEYS, VIEW_KEYS
from tui.lines import Line, Span, wrapped


def help_page(width: int) -> list[Line]:
    """The keys, and how to read the bars."""
    out: list[Line] = []
    for key, does in (*FORM_KEYS, *((key.shown, key.does) for key in KEYS), *VIEW_KEYS):
        first, *rest = wrapped(does[:1].upper() + does[1:], width - 12, 3)
        out.append([Span(f"{key:<11} ", "accent bold"), *first])
        out += [[Span(" " * 12), *row] for row in rest]
    out += [[], [Span("Bars", "head")]]
    text = ("A part of a bar begins with its letter. Memory: P parameters, G gradients, M master weights, O optimizer, A activations, C communication "
            "buffers, T temporaries, F framework, S the allocator pool's slack, X context and NCCL; ░ is free, │ the capacity, » goes on. Work: M matmul, "
            "A attention, E memory-bound, R recompute, t d r p waiting for tp, shard, replica and pipeline communication, k contention, h host, · bubble, "
            "O optimizer, s stragglers, f fixed. In the form = is derived, ! is wrong, ◂ ▸ step.")
    return [*out, *wrapped(text, width, 12)]
