"""A pipeline schedule as a picture: forward, backward (whole, or in two passes) and idle cells of every rank over time, its bubble, what each rank holds."""

from collections.abc import Sequence
from dataclasses import dataclass

from costmodel.program.schedule import Cell, bubble, grid, most_held, rank_order, stages_on
from costmodel.render.text import Page, Style
from costmodel.render.units import duration, plural, share
from costmodel.report import RoleReport
from costmodel.spec.run import SPLIT

LETTERS = "abcdefghijklmnopqrstuvwxyz"
_STYLES: dict[str, Style] = {"F": "green", "B": "yellow", "I": "yellow", "W": "", ".": "dim"}
_RULER = 5
"""Slots between two numbers of the ruler."""


@dataclass(frozen=True, slots=True)
class Timetable:
    """A schedule of equal stages and free transfers: when each pipeline rank does what."""

    schedule: str
    pp: int
    virtual_stages: int
    micro_batches: int
    forward: float
    """How long a forward of all stages of a rank takes."""
    backward: float
    cells: tuple[tuple[Cell, ...], ...]
    """By pipeline rank, in order."""
    in_flight: tuple[int, ...]
    """By pipeline rank: the most (micro-batch, stage) pairs whose activations it holds at once."""
    over_ideal: float
    """Bubble: idle time over the time that the work takes."""
    over_step: float
    """Bubble: idle time over the whole step."""

    @property
    def end(self) -> float:
        return max(row[-1].end for row in self.cells)

    def stages(self, rank: int) -> list[int]:
        """The stages a rank holds."""
        return list(stages_on(self.schedule, self.pp, self.virtual_stages, rank))

    @property
    def kinds(self) -> set[str]:
        """The letters of its actions."""
        return {cell.action.kind for row in self.cells for cell in row}


def timetable(schedule: str, p: int, v: int, m: int, forward: float = 1.0, backward: float = 2.0) -> Timetable:
    """The timetable of p ranks, v stages a rank and m micro-batches."""
    cells = tuple(tuple(row) for row in grid(schedule, p, v, m, forward=forward, backward=backward))
    over_ideal, over_step = bubble(schedule, p, v, m, forward=forward, backward=backward)
    held = tuple(most_held(rank_order(schedule, p, v, m, r)) for r in range(p))
    return Timetable(schedule, p, v, m, forward, backward, cells, held, over_ideal, over_step)


def formula(t: Timetable) -> tuple[str, str]:
    """The closed forms of the bubble, over the ideal time and over the step."""
    if t.schedule == "naive":
        return "p - 1", "(p - 1) / p"
    if t.schedule in SPLIT:
        stages = " v" if t.virtual_stages > 1 else ""
        return f"(p - 1) F / (m{stages} (F + B))", f"(p - 1) F / (m{stages} (F + B) + (p - 1) F)"
    if t.schedule == "interleaved":
        return "(p - 1) / (m v)", "(p - 1) / (m v + p - 1)"
    return "(p - 1) / m", "(p - 1) / (m + p - 1)"


def render_schedule(title: str, t: Timetable, page: Page, *, width: int | None = None, layers: Sequence[Sequence[int]] = (),
                    roles: Sequence[RoleReport] = (), notes: Sequence[str] = ()) -> str:
    """The whole text. layers: of each stage, by rank; roles: the prediction of each pipeline rank; width: columns of the picture."""
    page.line(title, "bold")
    kind = f"{t.schedule}, {plural(t.pp, 'rank')}, {plural(t.micro_batches, 'micro-batch', 'micro-batches')}"
    kind += f", {t.virtual_stages} stages a rank" if t.virtual_stages > 1 else ""
    page.heading("SCHEDULE", f"{kind}; forward {t.forward:g}, backward {t.backward:g}, free transfers")
    left_out = _picture(t, page, width or page.width)
    page.line()
    words = {"B": "B0 its backward", "I": "I0 the gradient of its input", "W": "W0 those of the weights"}
    legend = ", ".join(["F0 forward of micro-batch 0", *(text for kind, text in words.items() if kind in t.kinds), "- it goes on", ". idle"])
    if t.virtual_stages > 1:
        names = [f"{_letter(i, t)} stage {s}" for i, s in enumerate(t.stages(0))]
        names = names if len(names) <= 4 else [*names[:2], "…", names[-1]]
        legend += f"; the letter is the rank's stage (on rank 0: {', '.join(names)})"
    page.line(legend, "dim", "  ")
    if left_out:
        page.line(left_out, "dim", "  ")
    _bubble(t, page)
    _ranks(t, layers, roles, page)
    if notes:
        page.heading("NOTES")
        page.bullets(notes)
    return str(page)


def _letter(local: int, t: Timetable) -> str:
    return LETTERS[local] if t.virtual_stages <= len(LETTERS) else f".{local}"


def _label(cell: Cell, t: Timetable) -> str:
    kind, stage, micro = cell.action
    return f"{kind}{micro}" + (_letter(stage // t.pp, t) if t.virtual_stages > 1 else "")


def _picture(t: Timetable, page: Page, width: int) -> str:
    """The rows of all ranks; where they are too wide, their beginning and end, and a line that says so."""
    slot = min(t.forward, t.backward / (2 if t.schedule in SPLIT else 1)) / t.virtual_stages
    wide = max(len(_label(c, t)) for row in t.cells for c in row) + 1
    slots = round(t.end / slot + 0.499)
    name = len(f"rank {t.pp - 1}")
    room = max(4, (width - name - 4) // wide)
    if slots <= room:
        parts = [(0, slots)]
    else:
        ending = (room - 1) // 2
        parts = [(0, room - 1 - ending), (slots - ending, slots)]
    ruler = _ruler(slots, wide)
    rows = [("slot".ljust(name), ruler, "." * len(ruler))]
    for rank, cells in enumerate(t.cells):
        rows.append((f"rank {rank}".ljust(name), *_row(t, cells, slot, wide, slots)))
    for label, text, kinds in rows:
        shown = []
        for first, last in parts:
            shown.append(_coloured(text[first * wide : last * wide], kinds[first * wide : last * wide], page))
        page.lines.append(f"  {label}  {'…'.ljust(wide).join(shown)}".rstrip())
    if len(parts) == 1:
        return ""
    return (f"slots 0 to {parts[0][1] - 1} and {parts[1][0]} to {slots - 1} of {slots} are shown; "
            f"--width {name + 4 + slots * wide} shows all")


def _ruler(slots: int, wide: int) -> str:
    """The number of every fifth slot."""
    step = _RULER if wide * _RULER > len(str(slots)) + 1 else 2 * _RULER
    return "".join(str(i).ljust(wide * step) for i in range(0, slots, step))[: slots * wide].ljust(slots * wide)


def _row(t: Timetable, cells: Sequence[Cell], slot: float, wide: int, slots: int) -> tuple[str, str]:
    """A rank's row, and beside each character the kind of cell it belongs to."""
    text = list(".".ljust(wide) * slots)
    kinds = ["."] * len(text)
    for cell in cells:
        start, end = (round(x / slot * wide) for x in (cell.start, cell.end))
        text[start:end] = _label(cell, t).ljust(end - start - 1, "-") + " "
        kinds[start:end] = cell.action.kind * (end - start)
    return "".join(text), "".join(kinds)


def _coloured(text: str, kinds: str, page: Page) -> str:
    if not page.colour:
        return text
    out, start = [], 0
    for i in range(1, len(text) + 1):
        if i == len(text) or kinds[i] != kinds[start]:
            out.append(page.styled(text[start:i], _STYLES[kinds[start]]))
            start = i
    return "".join(out)


def _bubble(t: Timetable, page: Page) -> None:
    page.heading("BUBBLE", "idle time of a rank, in both conventions")
    p, m, v = t.pp, t.micro_batches, t.virtual_stages
    over = p - 1.0 if t.schedule == "naive" else (p - 1) / (m * v)
    if t.schedule in SPLIT:
        over *= t.forward / (t.forward + t.backward)
    exact = abs(over - t.over_ideal) < 1e-9
    ideal, step = (f" = {text}" if exact else "" for text in formula(t))
    page.pairs([("over ideal", f"{share(t.over_ideal)}{ideal}: idle over the time of the work"),
                ("over step", f"{share(t.over_step)}{step}: idle over the whole step")])


def _ranks(t: Timetable, layers: Sequence[Sequence[int]], roles: Sequence[RoleReport], page: Page) -> None:
    page.heading("RANKS", "what each holds" + (", and its predicted step" if roles else ""))
    header, align = ["rank", "stages", "in flight"], "><>"
    if layers:
        header, align = ["rank", "stages", "layers", "in flight"], "><<>"
    if roles:
        header, align = [*header, "forward", "backward", "bubble"], align + ">>>"
    rows = []
    for rank in range(t.pp):
        row = [str(rank), ", ".join(str(s) for s in t.stages(rank))]
        row += [", ".join(str(n) for n in layers[rank])] if layers else []
        row.append(str(t.in_flight[rank]))
        time = roles[rank].time if roles else None
        if time:
            phases = time.phases
            row += [duration(phases.get("forward", 0.0)), duration(phases.get("backward", 0.0) + phases.get("recompute", 0.0)),
                    f"{duration(time.bubble_s)} {share(time.bubble_s, time.step_s)}"]
        rows.append(row)
    page.table(header, rows, align)
    page.line()
    what = "micro-batches whose activations a rank holds at once" if t.virtual_stages == 1 else \
        f"micro-batches x stages whose activations a rank holds at once; a stage has 1/{t.virtual_stages} of its layers"
    page.line(f"in flight: the most {what}", "dim", "  ")
    if roles and roles[0].time:
        page.line(f"predicted, of a step of {duration(max(r.time.step_s for r in roles if r.time))}: forward and backward of all its micro-batches "
                  "(recompute and reduction included); the bubble here has the stages' own lengths and the transfers in it", "dim", "  ")
