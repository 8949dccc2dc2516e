"""What to change, as a text: a table of changes with their figures, each with the flags that make it."""

from collections.abc import Callable, Sequence

from costmodel.advice import Advice, Suggestion
from costmodel.render.text import Page
from costmodel.render.units import count, duration, size
from costmodel.solve.trials import worst

SHOWN, HELPS_SHOWN = 6, 3
"""Rows of a list of changes, and of a list of those that are not enough."""
DEAR = 0.9
"""Below this share of the tokens a second of a GPU, the best single change is called dear."""
Flags = Callable[[Suggestion], str]


def fit_section(advice: Advice, flags: Flags, page: Page) -> None:
    """What makes a run fit that does not, or that is risky."""
    risky = advice.report.verdict == "risky"
    page.heading("FIT", "single changes that give it room" if risky and advice.fit else "single changes that make it fit" if advice.fit else
                 "no single change is enough" if advice.together or advice.helps else "")
    if advice.states_alone:
        memory = worst(advice.report).memory
        assert memory is not None
        page.line(f"The model state alone ({size(sum(memory.states.values()))}) exceeds the device: neither batch, sequence nor checkpointing can help.",
                  indent="  ")
    if advice.fit:
        _table(advice.fit[:SHOWN], flags, page)
        if advice.together:
            page.line()
            page.line("On the same GPUs, together these are:", indent="  ")
            _table(advice.together, flags, page)
        if max(s.per_gpu for s in advice.fit) < DEAR:
            page.line()
            page.line("Several changes together may cost less: `costmodel solve --plans` predicts every plan of these GPUs.", "dim", "  ")
    elif advice.together:
        page.line("Together these are:", indent="  ")
        _table(advice.together, flags, page)
    tight = [s for s in advice.helps if s.report.verdict == "risky" and advice.report.verdict == "does not fit"]
    if advice.fit and tight:
        page.line()
        page.line("With these it may run, under pressure (risky):", indent="  ")
        _table(tight[:HELPS_SHOWN], flags, page)
    if not advice.fit and advice.helps:
        if advice.together:
            page.line()
            also = f", and {'one' if len(tight) == 1 else 'some'} may run under pressure (risky)" if tight else ""
            page.line(f"Alone, these help most{also}:", indent="  ")
        _table(advice.helps[:HELPS_SHOWN], flags, page)
    if advice.stopped and (advice.fit or advice.helps):
        page.line("The search was cut short; `costmodel solve` looks further.", "dim", "  ")
    if not (advice.fit or advice.together or advice.helps):
        page.line("Nothing that can be predicted makes it fit on these GPUs: a smaller model, or GPUs with more memory." if not advice.stopped else
                  "The search was stopped before anything was found.", indent="  ")


def faster_section(advice: Advice, flags: Flags, page: Page) -> None:
    """What makes a run that fits faster."""
    page.heading("FASTER", "single changes that still fit, fastest first" if advice.faster else "")
    if advice.faster:
        _table(advice.faster[:SHOWN], flags, page)
    else:
        page.line("No single change of those that are tried is faster and still fits.", indent="  ")


def render_advice(title: str, advice: Advice, flags: Flags, page: Page) -> str:
    """The whole answer of `costmodel solve` without a question."""
    page.line(title, "bold")
    memory = worst(advice.report).memory
    assert memory is not None
    if advice.report.verdict == "fits":
        page.line()
        page.line(f"It fits, with {size(memory.headroom_bytes)} to spare on the fullest rank; {duration(advice.report.step_s)} a step.", "green", "  ")
        faster_section(advice, flags, page)
    else:
        fit_section(advice, flags, page)
    return str(page)


def _table(rows: Sequence[Suggestion], flags: Flags, page: Page) -> None:
    """Figures and words of each change, then the flags of each."""
    wide = page.width >= 100
    page.table(["", "needs", "to spare", "step", *(["tokens/s"] if wide else []), "per GPU", "change"],
               [[str(i), size(s.needs_after), size(s.headroom_bytes), duration(s.step_after), *([count(s.tokens_per_s_after)] if wide else []),
                 f"{100 * (s.per_gpu - 1):+.1f}%", s.words + (f" ({s.remark})" if s.remark else "")] for i, s in enumerate(rows, 1)],
               "<>>>>><" if wide else "<>>>><")
    page.pairs([(str(i), flags(s)) for i, s in enumerate(rows, 1)])
