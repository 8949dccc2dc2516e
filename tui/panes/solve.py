"""Solve as a widget: a search in a thread that yields to the keys, its progress, and a table whose rows can be applied."""

import time
from dataclasses import replace
from typing import ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widget import Widget
from textual.widgets import DataTable

from costmodel.solve import Plans, Progress, Solution
from costmodel.spec import PlanError
from tui.canvas import Canvas
from tui.panes.base import Pane
from tui.state import State
from tui.views.solve import COLUMNS, SEARCHES, Found, Searching, head, rows

YIELD_S, TOLD_S = 0.001, 0.1
"""Seconds: the pause of a search before each prediction, and between two signs of progress."""


class Solve(Pane):
    """Searches; one runs at a time."""

    keys = (("g", "go", "search"), ("c", "stop", "cancel"))

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.now = Searching()
        self.running = 0
        """Number of the running search; 0 when none runs."""
        self.started = 0
        self.found: list[Found] = []

    def compose(self) -> ComposeResult:
        yield SearchList(id="searches")
        table: DataTable[str] = DataTable(id="answers", cursor_type="row", zebra_stripes=False)
        yield table

    def on_mount(self) -> None:
        self.table.add_columns(*COLUMNS)

    @property
    def table(self) -> "DataTable[str]":
        return self.query_one("#answers", DataTable)

    def first_focus(self) -> Widget:
        return self.query_one(SearchList)

    def paint(self, state: State) -> None:
        canvas = self.query_one(SearchList)
        if canvas.size.width:
            canvas.show(head(self.now, bool(self.running), canvas.size.width))

    def choose(self, by: int) -> None:
        if not self.running:
            self.pick_choice(max(0, min(len(SEARCHES) - 1, self.now.choice + by)))

    def pick_choice(self, at: int) -> None:
        if not self.running and at != self.now.choice:
            self.now = Searching(at)
            self.paint(self.explorer.state)

    def go(self) -> None:
        """Start the chosen search on the run in the form."""
        if self.running:
            self.app.notify("A search is running: c stops it.")
            return
        self.started += 1
        me = self.running = self.started
        self.now = Searching(self.now.choice, Progress(0, None, ""))
        self.found = []
        self.table.clear()
        state, keep, search, app = self.explorer.state, self.explorer.keep, SEARCHES[self.now.choice], self.explorer
        told = 0.0

        def watch(progress: Progress) -> bool:
            nonlocal told
            time.sleep(YIELD_S)
            if time.monotonic() - told > TOLD_S:
                told = time.monotonic()
                if not app.leaving:
                    app.call_from_thread(self.tell, me, progress)
            return self.running == me and not app.leaving

        def work() -> None:
            try:
                answer: Solution | Plans | str = search.start(state.run, state.profile, keep, watch)
            except PlanError as error:
                answer = f"{error.rule} {error.fix}"
            if not app.leaving:
                app.call_from_thread(self.take, me, answer)

        self.run_worker(work, thread=True, group="solve", exit_on_error=False)
        self.paint(state)

    def tell(self, me: int, progress: Progress) -> None:
        if self.running == me:
            self.now = replace(self.now, progress=progress)
            self.paint(self.explorer.state)

    def cancel(self) -> None:
        """Stop the search; what it has found stays."""
        if self.running:
            self.running = -self.running
        else:
            self.app.notify("No search is running: g starts one.")

    def take(self, me: int, answer: "Solution | Plans | str") -> None:
        if abs(self.running) != me:
            return
        self.running = 0
        if isinstance(answer, str):
            self.now = Searching(self.now.choice, error=answer)
        else:
            self.now = Searching(self.now.choice, answer=answer)
            self.found = rows(answer, self.explorer.keep)
            self.table.clear()
            self.table.add_rows(row.cells for row in self.found)
            if self.found and self.explorer.view == "solve":
                self.table.focus()
        self.paint(self.explorer.state)

    @on(DataTable.RowSelected)
    def _apply(self, event: DataTable.RowSelected) -> None:
        row = self.found[event.cursor_row]
        self.explorer.change_keeping(row.changes, row.keep)
        self.app.notify("Applied: u takes it back.")


class SearchList(Canvas, can_focus=True):
    """The searches; arrows choose, g or enter starts."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "choose(-1)", "search above", show=False), Binding("down", "choose(1)", "search below", show=False),
        Binding("enter", "app.search", "go", show=False)]

    def action_choose(self, by: int) -> None:
        pane = self.parent
        assert isinstance(pane, Solve)
        pane.choose(by)

    def on_click(self, event: events.Click) -> None:
        self.focus()

    def on_resize(self) -> None:
        pane = self.parent
        assert isinstance(pane, Solve)
        pane.paint(pane.explorer.state)
