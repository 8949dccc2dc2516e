"""The map of a pipeline schedule, and rows that are drawn cell by cell."""

from typing import NamedTuple

from costmodel.program.actions import FORWARD, WEIGHT
from costmodel.program.schedule import bubble, grid
from costmodel.render.units import share
from costmodel.spec import Run
from costmodel.spec.run import SPLIT
from tui.lines import Line, dim, fitted, line
from tui.lines import Span as Text


class Window(NamedTuple):
    """The part of the step in sight, seconds."""

    start: float
    end: float

    @property
    def span(self) -> float:
        return self.end - self.start


class Cells:
    """A row being drawn: characters, and a style for each."""

    def __init__(self, width: int, fill: str, style: str) -> None:
        self.chars, self.styles = [fill] * width, [style] * width

    def put(self, at: int, text: str, style: str) -> None:
        for i, char in enumerate(text, at):
            if 0 <= i < len(self.chars):
                self.chars[i], self.styles[i] = char, style

    def line(self) -> Line:
        out: Line = []
        start = 0
        for i in range(1, len(self.chars) + 1):
            if i == len(self.chars) or self.styles[i] != self.styles[start]:
                out.append(Text("".join(self.chars[start:i]), self.styles[start]))
                start = i
        return out


def pipeline_map(run: Run, window: Window | None, whole_s: float, width: int, rows: int) -> list[Line]:
    """The schedule with equal stages, every rank a row: digits are forwards, B begins a backward; below it the part that `window` shows."""
    p, m = run.plan, run.micro_batches
    if p.pp == 1 or rows < 4:
        return []
    _, over_step = bubble(p.schedule, p.pp, p.virtual_stages, m)
    out: list[Line] = [fitted(line(Text("PIPELINE ", "head"), f"{p.schedule}  p = {p.pp}  m = {m}",
                                   dim(f"   bubble {share(over_step)} of the step with equal stages   digits forward  "
                                       f"{'I, W gradients of input, weights' if p.schedule in SPLIT else 'B backward'}  · idle")), width)]
    cells = grid(p.schedule, p.pp, p.virtual_stages, m, forward=1.0, backward=2.0)
    whole = max(row[-1].end for row in cells)
    room = width - 6
    shown = list(range(p.pp)) if p.pp <= rows - 2 else [*range(rows - 3), p.pp - 1]
    for rank in shown:
        drawn = Cells(room, "·", "idle")
        for i, cell in enumerate(cells[rank]):
            a, b = round(cell.start / whole * room), round(cell.end / whole * room)
            if b <= a:
                continue
            kind, back = cell.action.kind, cell.action.kind != FORWARD
            text = (f"{kind}{cell.action.micro}" if len(f"{kind}{cell.action.micro}") < b - a else kind) if back else str(cell.action.micro)
            text = text if len(text) <= b - a else str(cell.action.micro)[-1]
            drawn.put(a, text.ljust(b - a), f"p-{kind if kind == WEIGHT else 'B' if back else 'F'}{'' if i % 2 else ' bold'}")
        out.append([dim(f"pp{rank}".ljust(6)), *drawn.line()])
    if window is None:
        return out
    left, right = (int(max(0.0, min(1.0, when / whole_s)) * (room - 1)) for when in (window.start, window.end))
    out.append([dim("shown ".ljust(6)), Text(" " * left + "└" + "─" * max(0, right - left - 1) + "┘", "accent")])
    return out
