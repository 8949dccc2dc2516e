"""Timeline as a widget: lanes that zoom and pan, a slice that is picked, the map of the pipeline."""

from typing import ClassVar, cast

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widget import Widget

from costmodel.report import StepReport
from costmodel.spec import PlanError, Run
from costmodel.timeline import COMPUTE, Slice, timeline
from tui.canvas import Canvas
from tui.lines import dim
from tui.panes.base import Pane
from tui.state import State
from tui.views.explore import folded, held
from tui.views.pipeline import Window, pipeline_map
from tui.views.timeline import LABEL, Item, Lane, Lanes, inspector, items, lane_line, lanes_of, ruler

NEAREST_S = 1e-6
"""The narrowest window."""


class Track(Canvas, can_focus=True):
    """The lanes, which take the keys."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "pick(-1)", "slice before", show=False), Binding("right", "pick(1)", "next slice", show=False),
        Binding("up", "lane(-1)", "stream above", show=False), Binding("down", "lane(1)", "stream below", show=False),
        Binding("plus,equals_sign", "zoom(0.5)", "zoom in", show=False), Binding("minus", "zoom(2)", "zoom out", show=False),
        Binding("0", "fit", "the whole step", show=False), Binding("n", "next_wait", "next wait", show=False),
        Binding("shift+left", "pan(-0.25)", "earlier", show=False), Binding("shift+right", "pan(0.25)", "later", show=False)]

    @property
    def pane(self) -> "Timeline":
        return cast("Timeline", self.parent)

    def action_pick(self, by: int) -> None:
        self.pane.pick(by)

    def action_lane(self, by: int) -> None:
        self.pane.move(by)

    def action_zoom(self, by: float) -> None:
        self.pane.zoom(by)

    def action_fit(self) -> None:
        self.pane.fit()

    def action_pan(self, by: float) -> None:
        self.pane.pan(by)

    def action_next_wait(self) -> None:
        self.pane.next_wait()

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self.pane.zoom(0.5)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self.pane.zoom(2)

    def on_click(self, event: events.Click) -> None:
        self.focus()
        self.pane.pick_at(event.x, event.y)

    def on_resize(self) -> None:
        self.pane.draw()


class Timeline(Pane):
    """The step of each rank role, stream by stream."""

    keys = (("+ -", "zoom", "turn('zoom', 1)"), ("0", "all", "turn('fit', 1)"), ("← →", "slice", "turn('slice', 1)"),
            ("n", "next wait", "turn('wait', 1)"))

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.lanes: Lanes | None = None
        self.window = Window(0.0, 1.0)
        self.lane = Lane(0, COMPUTE)
        """Where the cursor is."""
        self.picked: Item | None = None
        self.run: Run | None = None

    def compose(self) -> ComposeResult:
        yield Track(id="track")
        yield Canvas(id="inspector")
        yield Canvas(id="map")

    def first_focus(self) -> Widget:
        return self.query_one(Track)

    def paint(self, state: State) -> None:
        """Lay the step out in a thread where the run is another one."""
        if state.run is self.run or not self.query_one(Track).size.width:
            return
        self.run = state.run
        rows, width = self.query_one(Track).size.height - 1, self.query_one(Track).size.width - LABEL
        app = self.explorer

        def work() -> None:
            try:
                lanes = laid_out(state.run, state.report, state.profile, rows)
            except PlanError as error:
                app.call_from_thread(self.say, f"{error.rule} {error.fix}")
                return
            for lane in lanes_of(lanes.timelines, lanes.axes, 0, rows):
                if self.run is not state.run or app.leaving:
                    return
                items(lanes, lane, Window(0.0, lanes.step_s), width)
            lanes.eager = False
            app.call_from_thread(self.take, state.run, lanes)

        self.run_worker(work, thread=True, group="timeline", exclusive=True, exit_on_error=False)

    def say(self, words: str) -> None:
        self.query_one(Track).show([[dim(words)]])

    def take(self, run: Run, lanes: Lanes) -> None:
        if self.run is run:
            self.lanes, self.picked = lanes, None
            if self.lane not in self.rows:
                self.lane = Lane(0, COMPUTE)
            self.fit()

    # -- what is in sight ------------------------------------------------------------------------------------------------------

    @property
    def width(self) -> int:
        return self.query_one(Track).size.width - LABEL

    @property
    def rows(self) -> tuple[Lane, ...]:
        """The lanes in sight; the cursor's role shows all of its streams."""
        assert self.lanes is not None
        return lanes_of(self.lanes.timelines, self.lanes.axes, self.lane.at, self.query_one(Track).size.height - 1)

    def draw(self) -> None:
        track, lanes = self.query_one(Track), self.lanes
        if lanes is None or self.width < 10:
            return
        rows = [ruler(self.window, self.width)]
        for lane in self.rows:
            here = lane == self.lane
            rows.append(lane_line(lanes, lane, self.window, self.width, here, self.picked if here else None))
        track.show(rows)
        self._lay_out(lanes)
        below = self.query_one("#inspector", Canvas)
        below.show(inspector(self.picked, lanes.run, below.size.width))
        chart = self.query_one("#map", Canvas)
        chart.show(pipeline_map(lanes.run, self.window, lanes.step_s, chart.size.width, chart.size.height))

    def _lay_out(self, lanes: Lanes) -> None:
        """What the drawing missed is laid out in a thread, and drawn then."""
        wanted, lanes.missing = lanes.missing, []
        if not wanted:
            return
        window = self.window

        def work() -> None:
            lanes.lay_out(wanted, lambda: self.lanes is lanes and self.window == window)
            if self.lanes is lanes and self.window == window:
                self.app.call_from_thread(self.draw)

        self.run_worker(work, thread=True, group="slices", exclusive=True, exit_on_error=False)

    def fit(self) -> None:
        if self.lanes is not None:
            self.window = Window(0.0, self.lanes.step_s)
            self.draw()

    def zoom(self, by: float) -> None:
        """Around the picked slice, else around the middle."""
        if self.lanes is None:
            return
        middle = (self.picked.start + self.picked.end) / 2 if self.picked else (self.window.start + self.window.end) / 2
        span = min(self.lanes.step_s, max(NEAREST_S, self.window.span * by))
        self._look(middle - span / 2, span)

    def pan(self, by: float) -> None:
        if self.lanes is not None:
            self._look(self.window.start + by * self.window.span, self.window.span)

    def _look(self, start: float, span: float) -> None:
        assert self.lanes is not None
        start = max(0.0, min(start, self.lanes.step_s - span))
        self.window = Window(start, start + span)
        self.draw()

    def turn(self, what: str, by: int) -> None:
        """What the key line says, for the mouse."""
        if what == "zoom":
            self.zoom(0.5)
        elif what == "fit":
            self.fit()
        elif what == "slice":
            self.pick(by)
        elif what == "wait":
            self.next_wait()

    # -- what is picked --------------------------------------------------------------------------------------------------------

    def move(self, by: int) -> None:
        """To the stream above or below."""
        if self.lanes is not None:
            rows = self.rows
            at = (rows.index(self.lane) if self.lane in rows else 0) + by
            self.lane = rows[max(0, min(len(rows) - 1, at))]
            self.picked = None
            self.draw()

    def pick(self, by: int) -> None:
        """The next slice of the lane; what is out of sight is panned to."""
        if self.lanes is None:
            return
        wide = Window(max(0.0, self.window.start - self.window.span), min(self.lanes.step_s, self.window.end + self.window.span))
        found = items(self.lanes, self.lane, wide, int(self.width * wide.span / self.window.span))
        if self.picked is None:
            found = [item for item in found if item.end > self.window.start and item.start < self.window.end]
            after = found if by > 0 else found[::-1]
        else:
            after = [item for item in found if item.start > self.picked.start] if by > 0 else [item for item in found if item.start < self.picked.start][::-1]
        if after:
            self._pick(after[0])

    def _pick(self, item: Item) -> None:
        self.picked = item
        if item.start < self.window.start or item.end > self.window.end:
            self._look((item.start + item.end) / 2 - self.window.span / 2, self.window.span)
        else:
            self.draw()

    def pick_at(self, x: int, y: int) -> None:
        """The slice under the mouse."""
        if self.lanes is None or not 1 <= y <= len(self.rows):
            return
        self.lane = self.rows[y - 1]
        when = self.window.start + (x - LABEL + 0.5) / self.width * self.window.span
        found = items(self.lanes, self.lane, self.window, self.width)
        self.picked = min(found, key=lambda item: max(item.start - when, when - item.end, 0.0), default=None)
        self.draw()

    def next_wait(self) -> None:
        """The next time that compute stands still, beyond the picked slice."""
        lanes = self.lanes
        if lanes is None:
            return
        at, after = self.lane.at, self.picked.end if self.picked else self.window.start

        def work() -> None:
            found = lanes.next_wait(at, after, NEAREST_S)
            if self.lanes is lanes:
                self.app.call_from_thread(self.show_wait, at, found)

        self.run_worker(work, thread=True, group="wait", exclusive=True, exit_on_error=False)

    def show_wait(self, at: int, found: Slice | None) -> None:
        if found is None:
            self.app.notify("Compute waits no more after this.")
            return
        self.lane = Lane(at, COMPUTE)
        start, end = found.start_s, found.end_s
        self.picked = Item(start, end, "wait", "", found)
        span = min(self.window.span, 40 * (end - start))
        self._look((start + end) / 2 - span / 2, span)


def laid_out(run: Run, report: StepReport, profile: str | None, rows: int) -> Lanes:
    """The timelines of the rank roles for which there is room: the first ones, the fullest and the last."""
    axes = tuple(dict.fromkeys(axis for role in report.roles if role.time for axis in role.time.communication_s))
    fullest = max(report.roles, key=lambda r: held(r.memory) if r.memory else 0)
    kept = [role for role in folded(report.roles, fullest, max(1, rows - len(axes) - 1))[0] if role is not None]
    return Lanes(run, tuple(timeline(run, profile, role=report.roles.index(role)) for role in kept), axes, report.step_s or 0.0)
