"""A view as a widget: it paints a state, and says what it focuses and which keys it adds to the key line."""

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

from textual.widget import Widget

from tui.state import State

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

    def paint(self, state: State) -> None:
        """Show a state."""

    def first_focus(self) -> Widget | None:
        """The widget that takes the keys of this view; None where it has none of its own."""
        return None

    def on_resize(self) -> None:
        self.paint(self.explorer.state)

    # What keys of some views ask of the view in sight; nothing where it has no such thing.

    def go(self) -> None:
        """Start what is chosen."""

    def cancel(self) -> None:
        """Stop what runs."""

    def pick_choice(self, at: int) -> None:
        """Choose an entry of the view's list."""

    def turn(self, what: str, by: int) -> None:
        """Another field or figure of a curve, the next section, a zoom."""

    def open(self, path: Path) -> None:
        """Show a file."""
