"""The form as a widget: a cursor over the fields, a window over the rows."""

from typing import TYPE_CHECKING, ClassVar, cast

from textual import events
from textual.binding import Binding, BindingType

from tui.canvas import Canvas
from tui.fields import FIELDS
from tui.state import State
from tui.views.form import form, rows

if TYPE_CHECKING:
    from tui.app import Explorer


class Form(Canvas, can_focus=True):
    """Arrows choose and step; enter or / opens the list of the field."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1)", "field above", show=False), Binding("down", "move(1)", "field below", show=False),
        Binding("left", "step(-1)", "smaller", show=False), Binding("right", "step(1)", "larger", show=False),
        Binding("enter,slash,space", "choose", "choose", show=False),
        Binding("home", "move(-99)", "first", show=False), Binding("end", "move(99)", "last", show=False)]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.cursor = FIELDS[0].path
        self.top = 0

    @property
    def explorer(self) -> "Explorer":
        return cast("Explorer", self.app)

    def paint(self, state: State) -> None:
        width, height = self.size.width, self.size.height
        if width and height:
            self.show(form(state, self.cursor, self.has_focus, width, height, self._window(height)))

    def _window(self, height: int) -> int:
        """The first row in sight, so that the cursor and what is around it are."""
        every = rows(height > len(FIELDS))
        at = next(i for i, row in enumerate(every) if row.field and row.field.path == self.cursor)
        if at < self.top + 1:
            self.top = max(0, at - 1)
        elif at > self.top + height - 2:
            self.top = min(at - height + 2, len(every) - height)
        self.top = max(0, min(self.top, len(every) - height))
        return self.top

    def go_to(self, path: str) -> None:
        self.cursor = path
        self.paint(self.explorer.state)

    def action_move(self, by: int) -> None:
        at = next(i for i, field in enumerate(FIELDS) if field.path == self.cursor)
        self.go_to(FIELDS[max(0, min(len(FIELDS) - 1, at + by))].path)

    def action_step(self, by: int) -> None:
        self.explorer.step(self.cursor, by)

    def action_choose(self) -> None:
        self.explorer.action_choose(self.cursor)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self.action_move(1)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self.action_move(-1)

    def on_focus(self) -> None:
        self.paint(self.explorer.state)

    def on_blur(self) -> None:
        self.paint(self.explorer.state)

    def on_resize(self) -> None:
        self.paint(self.explorer.state)
