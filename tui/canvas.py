"""A widget that paints lines, and repaints only those that changed."""

from collections.abc import Sequence
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region, Size
from textual.strip import Strip
from textual.widget import Widget

from tui.lines import Line

MEMORY = "PGMOACTFSX"
STEP = "MAERtdrpekhiOswf"
PHASES = "FRBiOswf"
STYLES = frozenset({
    "bold", "dim", "good", "warn", "bad", "bad-figure", "accent", "head", "key", "cursor", "cursor-off", "tab", "tab-on", "bar",
    "free", "loss", "gain", "fits", "risky", "invalid",
    "base", "line-a", "line-b", "line-c", "line-d", "line-e", "line-m", "comm", "host", "idle", "exposed", "other",
    *(f"m-{letter}" for letter in MEMORY), *(f"t-{letter}" for letter in STEP), *(f"p-{letter}" for letter in PHASES)})


class Canvas(Widget):
    """Shows lines. A change of their number changes no layout: the height is that of the widget, or set by `auto` in a scroll view."""

    COMPONENT_CLASSES: ClassVar[set[str]] = set(STYLES)

    def __init__(self, *, id: str | None = None, classes: str | None = None, auto: bool = False) -> None:
        super().__init__(id=id, classes=classes)
        self.lines: list[Line] = []
        self.auto = auto
        """Be as high as the lines (inside a scroll view)."""
        self._styles: dict[str, Style] = {}

    def show(self, lines: Sequence[Line]) -> None:
        """Paint these lines; only rows that differ from the present ones are drawn again."""
        old, self.lines = self.lines, list(lines)
        if self.auto and len(old) != len(self.lines):
            self.refresh(layout=True)
            return
        width = self.size.width
        dirty = [y for y in range(max(len(old), len(self.lines))) if self._line(old, y) != self._line(self.lines, y)]
        if dirty:
            self.refresh(*(Region(0, y, width, 1) for y in dirty))

    @staticmethod
    def _line(lines: list[Line], y: int) -> Line:
        return lines[y] if y < len(lines) else []

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self.lines) if self.auto else super().get_content_height(container, viewport, width)

    def notify_style_update(self) -> None:
        self._styles = {}
        super().notify_style_update()

    def style_of(self, names: str) -> Style:
        """The joined style of some names over the widget's own, which gives what they leave open."""
        known = self._styles.get(names)
        if known is None:
            known = self.rich_style
            for name in names.split():
                known += self.get_component_rich_style(name, partial=True)
            self._styles[names] = known
        return known

    def render_line(self, y: int) -> Strip:
        width, base = self.size.width, self.style_of("")
        segments = []
        for span in self._line(self.lines, y):
            style = self.style_of(span.style)
            if span.action:
                style += Style.from_meta({"@click": span.action})
            segments.append(Segment(span.text, style))
        return Strip(segments).adjust_cell_length(width, base)
