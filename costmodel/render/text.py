"""Plain aligned text with a little colour, at any width.

Written by hand instead of with rich: a table is all that is needed, and loading rich would be a fifth of the time of a cold call.
"""

import os
import re
import shutil
import textwrap
from collections.abc import Sequence
from typing import IO, Literal

Style = Literal["bold", "dim", "red", "yellow", "green", ""]
_CODES = {"bold": "1", "dim": "2", "red": "1;31", "yellow": "1;33", "green": "1;32"}
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
NARROW = 28
"""Columns below which wrapped text is hard to read."""


def wants_colour(stream: IO[str]) -> bool:
    """Colour only on a terminal, and not where NO_COLOR is set or the terminal is dumb."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def screen_width(stream: IO[str]) -> int:
    """Columns to write: the terminal's between 60 and 140, COLUMNS where it is set, else 80."""
    columns = shutil.get_terminal_size((80, 24)).columns if stream.isatty() or os.environ.get("COLUMNS") else 80
    return max(60, min(140, columns))


class Page:
    """Lines of a text of one width, with or without colour. `device`: what stands for GPU on machines that have none, a word as long."""

    def __init__(self, width: int = 80, colour: bool = False, device: str = "GPU") -> None:
        self.width = width
        self.colour = colour
        self.device = device
        self.lines: list[str] = []

    def __str__(self) -> str:
        return "\n".join(self.lines).replace("GPU", self.device) + "\n"

    def styled(self, text: str, style: Style) -> str:
        return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if self.colour and style and text else text

    def line(self, text: str = "", style: Style = "", indent: str = "") -> None:
        """One paragraph, wrapped."""
        for part in textwrap.wrap(text, self.width - len(indent), break_on_hyphens=False) or [""]:
            self.lines.append((indent + self.styled(part, style)).rstrip())

    def heading(self, title: str, remark: str = "") -> None:
        """A section's title after an empty line, with a remark beside it, below it where both do not fit."""
        if self.lines:
            self.lines.append("")
        if len(title) + 2 + len(remark) <= self.width:
            self.lines.append(self.styled(title, "bold") + (f"  {self.styled(remark, 'dim')}" if remark else ""))
        else:
            self.lines.append(self.styled(title, "bold"))
            for part in textwrap.wrap(remark, self.width - 2):
                self.lines.append("  " + self.styled(part, "dim"))

    def bullets(self, texts: Sequence[str]) -> None:
        for text in texts:
            self.lines += textwrap.wrap(text, self.width, initial_indent="  - ", subsequent_indent="    ", break_on_hyphens=False)

    def pairs(self, rows: Sequence[tuple[str, str]], styles: Sequence[Style] = ()) -> None:
        """A column of labels, and beside each its text, wrapped."""
        label_width = max((len(label) for label, _ in rows), default=0)
        room = max(20, self.width - label_width - 4)
        for i, (label, text) in enumerate(rows):
            style = styles[i] if i < len(styles) else ""
            for j, part in enumerate(textwrap.wrap(text, room, break_on_hyphens=False) or [""]):
                self.lines.append(f"  {(label if j == 0 else '').ljust(label_width)}  {self.styled(part, style)}".rstrip())

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]], align: str = "", bold_last: bool = False) -> None:
        """Columns as wide as their cells; align: one of < > a column.

        The last column wraps where the line would be too long, and where it would be very narrow moves below the rows it does not fit in.
        """
        if not rows:
            return
        align = align or "<" * len(header)
        last = len(header) - 1
        widths = [max(len(r[i]) for r in [header, *rows]) for i in range(last + 1)]
        gap = "  " if 2 + sum(widths) + 2 * last <= self.width or widths[last] > NARROW else " "
        room = self.width - 2 - sum(widths[:-1]) - len(gap) * last
        narrow = room < min(widths[last], NARROW)
        if narrow:
            room, gap = room + (len(gap) - 1) * last, " "
        widths[last] = min(widths[last], self.width - 6 if narrow else max(room, 1))
        for n, row in enumerate([header, *rows]):
            below = narrow and len(row[last]) > room
            style: Style = "dim" if n == 0 else "bold" if bold_last and n == len(rows) else ""
            cells = [_cell(row[i], widths[i], align[i]) for i in range(last)]
            parts = textwrap.wrap(row[last], widths[last], break_on_hyphens=False) or [""]
            if below:
                lines = [gap.join(cells), *(f"    {part}" for part in parts if part)]
            else:
                blank = [" " * widths[i] for i in range(last)]
                lines = [gap.join([*(cells if j == 0 else blank), _cell(part, widths[last], align[last])]) for j, part in enumerate(parts)]
            self.lines += [self.styled(f"  {line}".rstrip(), style) for line in lines]


def _cell(text: str, width: int, align: str) -> str:
    return text.rjust(width) if align == ">" else text.ljust(width)


def uncoloured(text: str) -> str:
    """A text without its colour codes."""
    return _ANSI.sub("", text)
