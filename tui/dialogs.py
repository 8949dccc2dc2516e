"""Dialogs: pick a value, ask for a name, read a page."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from tui.canvas import Canvas
from tui.lines import Line


class Choice(NamedTuple):
    """A value of a list: how it reads, what to say beside it."""

    label: str
    detail: str
    value: Any


Check = Callable[[Any], Sequence[Line]]
"""What would come of a value, in at most two lines."""


class Picker(ModalScreen[Any]):
    """Type to search the list, or any value; what it would do is said while typing."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "back"), Binding("down", "down", "next", priority=True), Binding("up", "up", "previous", priority=True)]

    def __init__(self, title: str, hint: str, choices: Sequence[Choice], check: Check, read: Callable[[str], Any], now: Any = None) -> None:
        super().__init__()
        self.heading, self.hint, self.choices, self.check, self.read, self.now = title, hint, choices, check, read, now
        self.found: list[Choice] = []

    def compose(self) -> ComposeResult:
        with Vertical(classes="box"):
            yield Static(self.heading, classes="title", markup=False)
            yield Static(self.hint, classes="hint", markup=False)
            yield Input(placeholder="type to search, or a value", id="typed", compact=True)
            yield OptionList(id="list", compact=True, markup=False)
            yield Canvas(id="said")

    def on_mount(self) -> None:
        self._search("")

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        self._search(event.value)

    def _search(self, text: str) -> None:
        words = text.lower().split()
        self.found = [c for c in self.choices if all(word in f"{c.label} {c.detail}".lower() for word in words)]
        if words:
            self.found.sort(key=lambda c: (c.label.lower() != text.lower().strip(), not c.label.lower().startswith(words[0])))
        wide = max((len(c.label) for c in self.choices), default=0)
        options = self.query_one("#list", OptionList)
        options.clear_options()
        options.add_options([Option(f"{'•' if c.value == self.now else ' '} {c.label.ljust(wide)}  {c.detail}") for c in self.found])
        exact = next((i for i, c in enumerate(self.found) if c.value == self.now), 0) if not words else 0
        typed = bool(words) and not any(c.label.lower() == text.lower().strip() for c in self.found)
        options.highlighted = None if not self.found or (typed and self._is_value(text)) else exact
        self._say()

    @staticmethod
    def _is_value(text: str) -> bool:
        """A number is meant as it is, not as a search."""
        return text.strip()[:1].isdigit() or text.strip()[:1] in "./~-"

    def chosen(self) -> Any:
        """What enter would take: the highlighted choice, else what was typed."""
        highlighted = self.query_one("#list", OptionList).highlighted
        if highlighted is not None and highlighted < len(self.found):
            return self.found[highlighted].value
        text = self.query_one("#typed", Input).value.strip()
        return self.read(text) if text else None

    def _say(self) -> None:
        value = self.chosen()
        self.query_one("#said", Canvas).show([] if value is None else self.check(value))

    @on(OptionList.OptionHighlighted)
    def _highlighted(self) -> None:
        self._say()

    @on(OptionList.OptionSelected)
    @on(Input.Submitted)
    def _take(self) -> None:
        self.dismiss(self.chosen())

    def action_down(self) -> None:
        self.query_one("#list", OptionList).action_cursor_down()

    def action_up(self) -> None:
        self.query_one("#list", OptionList).action_cursor_up()


class Ask(ModalScreen[str | None]):
    """Ask for one line of text."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "back")]

    def __init__(self, title: str, hint: str, value: str) -> None:
        super().__init__()
        self.heading, self.hint, self.value = title, hint, value

    def compose(self) -> ComposeResult:
        with Vertical(classes="box"):
            yield Static(self.heading, classes="title", markup=False)
            yield Input(self.value, id="typed", compact=True)
            yield Static(self.hint, classes="hint", markup=False)

    @on(Input.Submitted)
    def _take(self, event: Input.Submitted) -> None:
        self.dismiss(event.value.strip() or None)


class Paper(ModalScreen[None]):
    """A page to read; any of esc, enter, q closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,enter,q,question_mark,i", "dismiss(None)", "back")]

    def __init__(self, title: str, lines: Callable[[int], Sequence[Line]], wide: int = 72) -> None:
        super().__init__()
        self.heading, self.page, self.wide = title, lines, wide

    def compose(self) -> ComposeResult:
        with Vertical(classes="box"):
            yield Static(f"{self.heading}   (esc back, ↑ ↓ scroll)", classes="title", markup=False)
            with VerticalScroll():
                yield Canvas(id="page", auto=True)

    def on_mount(self) -> None:
        self.query_one("#page", Canvas).show(self.page(min(self.wide, self.app.size.width - 10)))
