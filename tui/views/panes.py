"""The views as widgets, by name. A pane paints a state, and says what it focuses and which keys it adds to the key line."""

from typing import TYPE_CHECKING, ClassVar, cast

from textual.widget import Widget

from tui.canvas import Canvas
from tui.state import State
from tui.views.explore import Proposal, Size, explore

if TYPE_CHECKING:
    from tui.app import Explorer


class Pane(Widget):
    """A view of the state."""

    keys: ClassVar[tuple[tuple[str, str, str], ...]] = ()
    """(key, what it does, action) that the key line shows first."""
    with_form = False
    """Keep the form beside it on narrow screens."""

    @property
    def explorer(self) -> "Explorer":
        return cast("Explorer", self.app)

    def paint(self, state: State, proposal: Proposal | None) -> None:
        """Show a state."""

    def first_focus(self) -> Widget | None:
        """The widget that takes the keys of this view; None where it has none of its own."""
        return None

    def on_resize(self) -> None:
        self.paint(self.explorer.state, self.explorer.proposal)


class Explore(Canvas, Pane):
    """The answer to the run in the form."""

    keys = (("⏎", "choose", "choose"),)
    with_form = True

    def paint(self, state: State, proposal: Proposal | None) -> None:
        if self.size.width and self.size.height:
            self.show(explore(state, proposal, Size(self.size.width, self.size.height)))


PANES: dict[str, type[Pane]] = {"explore": Explore}
