"""Compare as a widget: the table, and below it a curve over a field for each pinned run."""

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.segment import Segment
from rich.style import Style
from textual.app import ComposeResult
from textual.strip import Strip
from textual.widget import Widget

from costmodel.solve import Progress
from costmodel.spec import PlanError
from tui.canvas import Canvas
from tui.fields import BY_PATH, shown
from tui.lines import Line
from tui.panes.base import Pane
from tui.pins import Pinned
from tui.state import State
from tui.views.compare import CURVE_FIELDS, METRICS, NOW, Point, compared, curve_title, sweep, table

if TYPE_CHECKING:
    from textual_plot import PlotWidget

Curves = list[tuple[str, list[Point]]]
"""Letter and points of each run."""


class Compare(Pane):
    """Pins against the first pin, or the run against one GPU."""

    keys = (("x", "field", "turn('field', 1)"), ("m", "figure", "turn('figure', 1)"))

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.field, self.metric = 0, 0
        self.curves: Curves = []
        self.plot: PlotWidget | None = None

    def compose(self) -> ComposeResult:
        yield Canvas(id="table")
        yield Canvas(id="curve-title")

    async def on_mount(self) -> None:
        from textual_plot import PlotWidget
        plot = PlotWidget(id="curve", allow_pan_and_zoom=False)
        plot.can_focus = False
        await self.mount(plot)
        plot.margin_top, plot.margin_bottom = 0, 2
        for canvas in plot.query(Widget):
            _always_styled(canvas)
        self.plot = plot
        self.call_after_refresh(self.draw)

    def paint(self, state: State) -> None:
        table_canvas = self.query_one("#table", Canvas)
        if not table_canvas.size.width:
            return
        try:
            lines = table(compared(state, self.explorer.pins), table_canvas.size.width, table_canvas.size.height)
        except PlanError as error:
            lines = [[*_message(error)]]
        table_canvas.show(lines)
        self._title()
        self._sweep(state)

    def _title(self) -> None:
        canvas = self.query_one("#curve-title", Canvas)
        letters = [f"{letter} {pin.name}" for letter, pin in self._runs(self.explorer.state)]
        canvas.show([curve_title(CURVE_FIELDS[self.field], METRICS[self.metric], letters if len(letters) > 1 else [], canvas.size.width)])

    def _runs(self, state: State) -> list[tuple[str, Pinned]]:
        pins = [(chr(65 + i), pin) for i, pin in enumerate(self.explorer.pins)]
        now = [("▸" if pins else "●", Pinned(NOW, state.run, state.report))]
        return [*pins, *(now if all(pin.run != state.run for pin in self.explorer.pins) else [])]

    def _sweep(self, state: State) -> None:
        """Predict the curves in a thread; a newer state ends it."""
        path, runs = CURVE_FIELDS[self.field], self._runs(state)
        app = self.explorer

        def watch(progress: Progress) -> bool:
            time.sleep(0.0005)
            return app.current(state) and CURVE_FIELDS[self.field] == path

        def work() -> None:
            curves = [(letter, sweep(pin.run, path, state.profile, app.keep, watch)) for letter, pin in runs]
            if watch(Progress(0, None, "")):
                app.call_from_thread(self.take, curves)

        self.run_worker(work, thread=True, group="curve", exclusive=True, exit_on_error=False)

    def take(self, curves: Curves) -> None:
        self.curves = curves
        self.draw()

    def draw(self) -> None:
        """The curves; the letter of a run marks its points, so that they read without colour."""
        if self.plot is None or not self.plot.is_mounted:
            return
        from textual_plot import HiResMode
        metric, field = METRICS[self.metric], BY_PATH[CURVE_FIELDS[self.field]]
        self.plot.clear()
        values = sorted({point.value for _, points in self.curves for point in points})
        place = {value: float(math.log2(value)) if min(values) > 0 else float(value) for value in values}
        peak = 0.0
        for i, (letter, points) in enumerate(self.curves):
            drawn = [(place[p.value], y) for p in points if (y := metric.of(p.report)) is not None]
            if not drawn:
                continue
            style = _colour(self.query_one("#table", Canvas), i)
            xs, ys = zip(*drawn, strict=True)
            self.plot.plot(xs, ys, line_style=style, hires_mode=HiResMode.BRAILLE)
            self.plot.scatter(xs, ys, marker=letter, marker_style=style)
            peak = max(peak, *ys)
        if not values or not peak:
            return
        ends = list(place.values())
        margin = max(0.3, 0.03 * (ends[-1] - ends[0]))
        self.plot.set_xlimits(ends[0] - margin, ends[-1] + margin)
        self.plot.set_ylimits(0, peak * 1.1)
        self.plot.set_x_formatter(_Values({place[v]: shown(v) for v in values}))
        self.plot.set_xlabel(field.label)

    def turn(self, what: str, by: int) -> None:
        """Another field for the curve, or another figure."""
        if what == "field":
            self.field = (self.field + by) % len(CURVE_FIELDS)
            self.paint(self.explorer.state)
        elif what == "figure":
            self.metric = (self.metric + by) % len(METRICS)
            self._title()
            self.draw()


def _always_styled(widget: Widget) -> None:
    """textual-plot's canvas has cells without a style, on which Textual's filter for NO_COLOR fails."""
    bare = widget.render_line

    def render_line(y: int) -> Strip:
        return Strip([Segment(s.text, s.style or Style.null(), s.control) for s in bare(y)])

    setattr(widget, "render_line", render_line)  # noqa: B010


def _colour(canvas: Canvas, i: int) -> str:
    style = canvas.style_of(f"line-{'abcde'[i % 5]}")
    return style.color.name if style.color else "default"


def _message(error: PlanError) -> Line:
    from tui.lines import Span
    return [Span(f"{error.rule} {error.fix}", "warn")]


def _Values(labels: dict[float, str]):  # type: ignore[no-untyped-def]
    """An axis with a tick at every value; made here, where textual-plot has been imported."""
    from textual_plot import AxisFormatter

    class Values(AxisFormatter):
        def get_ticks(self, min_: float, max_: float, max_ticks: int = 8) -> list[float]:
            inside = [x for x in labels if min_ <= x <= max_]
            every = max(1, -(-len(inside) // max(max_ticks, 8)))
            return inside[::every]

        def get_labels_for_ticks(self, ticks: Sequence[float]) -> list[str]:
            return [labels.get(tick, "") for tick in ticks]

    return Values()
