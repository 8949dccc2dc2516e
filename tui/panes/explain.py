"""Explain as a widget: a page that scrolls, made in a thread; first without, then with the weight of every constant."""

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widget import Widget

from costmodel.spec import PlanError, Run
from tui.canvas import Canvas
from tui.lines import Line, Span
from tui.panes.base import Pane
from tui.state import State
from tui.views.explain import headings, page


class Explain(Pane):
    """The page of `costmodel explain`."""

    keys = (("n", "next section", "turn('section', 1)"), ("↑ ↓", "scroll", "turn('section', 0)"))

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.made: tuple[Run, int] | None = None

    def compose(self) -> ComposeResult:
        with Scroll(id="scroll"):
            yield Canvas(id="page", auto=True)

    def first_focus(self) -> Widget:
        return self.query_one("#scroll")

    def paint(self, state: State) -> None:
        width = self.query_one("#scroll").size.width - 1
        if width < 20 or self.made == (state.run, width):
            return
        self.made = state.run, width
        app = self.explorer

        def work() -> None:
            for complete in (False, True):
                try:
                    lines = page(state, max(40, width), complete)
                except PlanError as error:
                    lines = [[Span(f"{error.rule} {error.fix}", "warn")]]
                if not app.current(state):
                    return
                app.call_from_thread(self.take, (state.run, width), lines)

        self.run_worker(work, thread=True, group="explain", exclusive=True, exit_on_error=False)

    def take(self, made: tuple[Run, int], lines: list[Line]) -> None:
        if self.made == made:
            self.query_one("#page", Canvas).show(lines)

    def turn(self, what: str, by: int) -> None:
        """Scroll to the next section; after the last one, to the first."""
        scroll = self.query_one(Scroll)
        tops = headings(self.query_one("#page", Canvas).lines)
        if what == "section" and by and tops:
            at = next((top for top in tops if top > scroll.scroll_offset.y + 1), tops[0])
            scroll.scroll_to(y=at, animate=False)


class Scroll(VerticalScroll, can_focus=True):
    """Arrows and page keys scroll; n goes to the next section."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("n", "app.turn('section', 1)", "next section", show=False)]
