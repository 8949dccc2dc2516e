"""Explore as a widget."""

from tui.canvas import Canvas
from tui.panes.base import Pane
from tui.state import State
from tui.views.explore import Size, explore


class Explore(Canvas, Pane):
    """The answer to the run in the form."""

    keys = (("⏎", "choose", "choose"),)
    with_form = True

    def paint(self, state: State) -> None:
        if self.size.width and self.size.height:
            self.show(explore(state, self.explorer.rested, Size(self.size.width, self.size.height)))
