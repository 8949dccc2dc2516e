"""A waterfall as text: the bars from the peak down to the MFU, and in words what the largest are."""

from costmodel.render.prediction import notes
from costmodel.render.text import Page
from costmodel.render.units import duration, share
from costmodel.report import StepReport
from costmodel.waterfall import UNEXPLAINED, Bar, Waterfall

CHART = 26
"""Columns of the chart; it takes more where the page has them."""
LARGE = 0.03
"""Share of the step from which a bar is spoken of."""
UNKNOWN = 0.1
"""Share of the step from which an unexplained rest is more than the error of a prediction, and what it may be is said."""
SUSPECTS = (
    "Is it one optimizer step, and are the tokens those of all ranks? Are batch, sequence, precision, checkpointing and kernels those of the job?",
    "Work outside the step's kernels: a data loader, logging, evaluation, saving, synchronisation by .item() or print.",
    "A slow rank or link: --slow-rank 1.5 and --link-factor inter=0.5 predict what one would cost.",
    "`execute run --trace FILE` performs the described step on the same machine: what it takes is the machine's, the rest is the job's code.")


def render_waterfall(title: str, w: Waterfall, gpus: int, page: Page, report: StepReport) -> str:
    """The whole answer about a run, of which `report` is the prediction."""
    page.line(title, "bold")
    of = f"the mean of the {gpus:,} GPUs" if gpus > 1 else "the one GPU"
    page.heading("WATERFALL", f"of a step on {of}; each share of it is as many points of MFU")
    bars_table(w, page)
    _large(w, page)
    notes(report, page)
    return str(page)


def bars_table(w: Waterfall, page: Page) -> None:
    """From the peak, bar by bar, to what is achieved: time, share, the MFU left, and where it goes as a chart."""
    ideal, *losses = w.bars
    header = ["", "time", "share", "MFU left"]
    rows = [["peak", "", "", share(1.0)], *([b.name, duration(b.seconds), share(b.share), share(b.left)] for b in losses),
            ["achieved (MFU)", duration(ideal.seconds), share(ideal.share), ""],
            ["step" if w.measured_s is None else "measured step", duration(w.step_s), share(1.0), ""]]
    spans = [(0.0, 1.0), *((b.left, b.left + b.share) for b in losses), (0.0, w.mfu), (0.0, 0.0)]
    taken = sum(max(len(r[i]) for r in (header, *rows)) + 2 for i in range(len(header))) + 2
    width = max(CHART, min(60, page.width - taken))
    page.table([*header, ""], [[*row, _floating(span, width)] for row, span in zip(rows, spans, strict=True)], "<>>><")


def _floating(span: tuple[float, float], width: int) -> str:
    """A bar between two levels of MFU; what rises above the peak is cut."""
    low, high = (min(1.0, max(0.0, x)) for x in (min(span), max(span)))
    start, end = round(low * width), round(high * width)
    if high > low and end == start:
        start, end = min(start, width - 1), min(start, width - 1) + 1
    return " " * start + "#" * (end - start)


def _large(w: Waterfall, page: Page) -> None:
    large = [b for b in sorted(w.bars[1:], key=lambda b: -abs(b.share)) if abs(b.share) >= LARGE]
    if large:
        page.heading("THE LARGEST", "and the MFU without each")
        page.pairs([(b.name, f"{_words(b, w)}; without it MFU {share(b.without)}") for b in large])
    if any(b.name == UNEXPLAINED and b.share >= UNKNOWN for b in large):
        page.heading("UNEXPLAINED", "what the run has and its description has not")
        page.bullets(SUSPECTS)


def _words(b: Bar, w: Waterfall) -> str:
    if b.name != UNEXPLAINED:
        return b.meaning
    assert w.measured_s is not None
    return f"measured {duration(w.measured_s)}, predicted {duration(w.predicted_s)} ({100 * (w.measured_s / w.predicted_s - 1):+.1f}%)"
