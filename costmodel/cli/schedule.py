"""`costmodel schedule`: the picture of a pipeline schedule, of a run or of bare degrees."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from costmodel.cli.guard import InputError, plain
from costmodel.cli.options import Flag, Given, also, flag_value, takes_run
from costmodel.cli.screen import json_text

if TYPE_CHECKING:
    from costmodel.render.schedule import Timetable
    from costmodel.report import StepReport
    from costmodel.spec import Run

SCHEMA = 1
MOST_STAGES, MOST_CELLS = 1024, 400_000
"""Beyond these a picture helps nobody."""
_BARE = {"plan": {"pp", "schedule", "virtual_stages"}, "recipe": {"grad_accum"}}
"""Fields that need no model."""
_MICRO_BATCHES = Flag("--micro-batches", "recipe.grad_accum", "whole", "")


@takes_run
def schedule(
    given: Given,
    micro_batches: Annotated[str | None, typer.Option(metavar="N", show_default=False,
                                                      help="Micro-batches of a step: with a pipeline, the same as --grad-accum. Default: pp.")] = None,
    forward: Annotated[str | None, typer.Option(metavar="X", show_default=False, help="Time of a rank's forward, in any unit. Default: 1.")] = None,
    backward: Annotated[str | None, typer.Option(metavar="X", show_default=False,
                                                 help="Time of a rank's backward. Default: 2; 3 for a run with full checkpointing.")] = None,
    width: Annotated[str | None, typer.Option(metavar="N", show_default=False, help="Columns of the picture. Default: the screen's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON (docs/report.md) instead of the text.", show_default=False)] = False,
) -> None:
    """Show a pipeline schedule: forward, backward and idle cells of every rank, and the bubble.

    Of a run, or of --pp, --micro-batches, --schedule and --virtual-stages alone.
    """
    f, b = (None if text is None else _time(name, text) for name, text in (("--forward", forward), ("--backward", backward)))
    columns = None if width is None else int(flag_value(Flag("--width", "width", "whole", ""), width))
    if columns is not None and columns < 40:
        raise InputError(f"--width {width}: a picture needs at least 40 columns. Use --width 80.")
    if micro_batches is not None:
        if "recipe.grad_accum" in given.origins and given.origins["recipe.grad_accum"].holds_value:
            raise InputError(f"--micro-batches {micro_batches} and {given.origins['recipe.grad_accum'].text}: both say how many micro-batches a step has. "
                             "Give one of the two.")
        given = also(given, "recipe.grad_accum", flag_value(_MICRO_BATCHES, micro_batches), f"--micro-batches {micro_batches}")
    run: Run | None = None
    if _is_bare(given):
        name, p, v, m = _bare(given)
    else:
        run = given.resolve().run
        name, p, v, m = run.plan.schedule, run.plan.pp, run.plan.virtual_stages, run.micro_batches
        _known(given, name)
    _drawable(p, v, m)
    full = run is not None and run.plan.checkpointing.mode == "full"
    from costmodel.render.schedule import timetable
    table = timetable(name, p, v, m, f or 1.0, b or (3.0 if full else 2.0))
    report, notes = (None, []) if run is None else _prediction(given, run)
    if as_json:
        print(json_text(document(table, run, report)), end="")
    else:
        print(_text(table, run, report, columns, notes), end="")


def _time(flag: str, text: str) -> float:
    value = float(flag_value(Flag(flag, flag, "number", ""), text))
    if not 1e-3 <= value <= 1e3:
        raise InputError(f"{flag} {text}: must be a number from 0.001 to 1000. Use {flag} 1.")
    return value


def _is_bare(given: Given) -> bool:
    """Whether only degrees were given, and no run."""
    return all(isinstance(value, dict) and value.keys() <= _BARE.get(table, set()) for table, value in given.mapping.items())


def _bare(given: Given) -> tuple[str, int, int, int]:
    """Schedule, ranks, stages a rank and micro-batches from the degrees alone, under the rules of a run."""
    from costmodel.spec.run import INTERLEAVED, V_SHAPED
    plan, recipe = given.mapping.get("plan", {}), given.mapping.get("recipe", {})
    if plan.get("pp") is None:
        raise InputError("--pp: a schedule needs pipeline ranks. Use --pp 4 --micro-batches 8, or give a run.")
    name = str(plan.get("schedule") or "1f1b")
    _known(given, name)
    p, v = plan["pp"], plan.get("virtual_stages") or (2 if name in V_SHAPED else 1)
    m = recipe.get("grad_accum", p)
    for flag, field, value in (("--pp", "plan.pp", p), ("--virtual-stages", "plan.virtual_stages", plan.get("virtual_stages", 1)),
                               ("--micro-batches", "recipe.grad_accum", m)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            written = given.origins[field].text if field in given.origins else f"{flag} {value}"
            raise InputError(f"{written}: must be a whole number of at least 1. Use {flag} 4.")
    if v > 1 and name not in INTERLEAVED:
        raise InputError(f"--virtual-stages {v}: schedule {name} has one stage a rank. Use --schedule interleaved, or --virtual-stages 1.")
    if name in INTERLEAVED and v == 1:
        other = "1f1b" if name == "interleaved" else "zb-h1"
        raise InputError(f"--virtual-stages 1: an interleaved schedule has at least 2 stages a rank. Use --virtual-stages 2, or --schedule {other}.")
    if name in V_SHAPED and v != 2:
        raise InputError(f"--virtual-stages {v}: schedule {name} has two stages a rank. Use --virtual-stages 2, or --schedule interleaved-zb.")
    rounds = max(1, m // p)
    if name in ("interleaved", "interleaved-zb", "zb-h1") and m % rounds:
        raise InputError(f"--micro-batches {m}: the {name} schedule needs micro-batches in {rounds} equal rounds. "
                         f"Use --micro-batches {max(p, round(m / p) * p)}.")
    if name == "dualpipev" and m < 2 * p:
        raise InputError(f"--micro-batches {m}: dualpipev needs at least as many micro-batches as stages, {2 * p}. "
                         f"Use --micro-batches {2 * p}, or --schedule zbv.")
    return name, p, v, m


def _known(given: Given, name: str) -> None:
    from costmodel.program.schedule import PREDICTED
    if name not in PREDICTED:
        import difflib
        close = difflib.get_close_matches(name, PREDICTED, 1)
        written = given.origins["plan.schedule"].text if "plan.schedule" in given.origins else f"plan.schedule = {name}"
        raise InputError(f"{written}: this schedule is not known, or not predicted yet. "
                         + (f"Did you mean {close[0]}?" if close else f"Use one of {', '.join(PREDICTED)}."))


def _drawable(p: int, v: int, m: int) -> None:
    if p * v > MOST_STAGES:
        raise InputError(f"--pp {p}: {p * v} stages are too many to show. Use at most {MOST_STAGES}.")
    if 2 * p * v * m > MOST_CELLS:
        raise InputError(f"--micro-batches {m}: {2 * p * v * m:,} cells are too many to show. Use at most {MOST_CELLS // (2 * p * v)} micro-batches.")


def _prediction(given: Given, run: "Run") -> tuple["StepReport | None", list[str]]:
    """The prediction of a run, or the note that says why there is none."""
    from costmodel.catalog.profiles import load_profile
    from costmodel.prediction import predict
    from costmodel.spec import PlanError
    if run.plan.pp == 1:
        return None, ["pp = 1: there is no pipeline in this run."]
    with given.naming():
        profile = load_profile(run, given.profile)
    try:
        return predict(run, profile, scaling=False), []
    except PlanError as error:
        return None, [f"Its time is not predicted: {plain(error)}"]


def _text(table: "Timetable", run: "Run | None", report: "StepReport | None", columns: int | None, notes: list[str]) -> str:
    from costmodel.mesh import mesh_of
    from costmodel.render.prediction import title
    from costmodel.render.schedule import render_schedule
    from costmodel.render.text import Page, screen_width, wants_colour
    page = Page(min(140, columns or screen_width(sys.stdout)), wants_colour(sys.stdout))
    name = title(run) if run else "A pipeline of equal stages"
    return render_schedule(name, table, page, width=columns, layers=mesh_of(run).stages if run else (), roles=report.roles if report else (), notes=notes)


def document(table: "Timetable", run: "Run | None", report: "StepReport | None") -> dict[str, Any]:
    """A schedule as plain data with stable keys: docs/report.md."""
    from costmodel.mesh import mesh_of
    stages = mesh_of(run).stages if run else None
    ranks = []
    for rank, cells in enumerate(table.cells):
        time = report.roles[rank].time if report else None
        ranks.append({
            "rank": rank, "stages": table.stages(rank), "layers": list(stages[rank]) if stages else None, "in_flight": table.in_flight[rank],
            "cells": [{"kind": c.action.kind, "stage": c.action.stage, "micro_batch": c.action.micro, "start": c.start, "end": c.end} for c in cells],
            "predicted": {"step_s": time.step_s, "bubble_s": time.bubble_s, "phases": time.phases} if time else None})
    return {"schema": SCHEMA, "schedule": table.schedule, "pp": table.pp, "virtual_stages": table.virtual_stages, "micro_batches": table.micro_batches,
            "forward": table.forward, "backward": table.backward, "end": table.end,
            "bubble": {"over_ideal": table.over_ideal, "over_step": table.over_step}, "ranks": ranks}
