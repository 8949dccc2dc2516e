"""`costmodel trace`: the predicted step as a file for Perfetto."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from costmodel.cli.guard import InputError
from costmodel.cli.options import Flag, Given, flag_value, takes_run

MOST_EVENTS = 300_000
"""Beyond these a viewer becomes slow."""
MOST_LAYERS = 200_000
"""Layers times micro-batches beyond which no viewer opens the file, and writing it takes minutes."""


@takes_run
def trace(
    given: Given,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", show_default=False, help="The file to write: trace.json, say.")],
    role: Annotated[str | None, typer.Option(metavar="N", show_default=False, help="One rank role, such as a pipeline rank. Default: all.")] = None,
    detail: Annotated[str | None, typer.Option(metavar="WORD", show_default=False, help="ops, or units (layers and collectives). "
                                               f"Default: ops up to {MOST_EVENTS:,} events.")] = None,
) -> None:
    """Write the predicted step as a Chrome trace: every kernel, collective and wait on its stream. Open it at ui.perfetto.dev."""
    import json

    from costmodel.cli.files import write_whole
    from costmodel.formats.chrome import count_slices
    from costmodel.formats.chrome import trace as chrome_trace
    from costmodel.spec import PlanError
    from costmodel.timeline import timeline
    if detail not in (None, "ops", "units"):
        raise InputError(f"--detail {detail}: is not one of the choices. Use --detail ops, or units.")
    if given.read_from(output):
        raise InputError(f"-o {output}: the trace would overwrite the file that the run was read from. Use another name.")
    one = None if role is None else int(flag_value(Flag("--role", "role", "whole", ""), role))
    run = given.resolve().run
    with given.naming():
        if run.micro_batches * run.model.layers > MOST_LAYERS:
            raise PlanError("recipe.grad_accum", run.recipe.grad_accum, "a trace of so many micro-batches is too long for a viewer.",
                            f"Use grad_accum = {max(1, MOST_LAYERS // run.model.layers)} or less: they repeat.")
        first = timeline(run, given.profile, role=one or 0)
        lines = [first] if one is not None else [first, *(timeline(run, given.profile, role=i) for i in range(1, first.roles))]
    events = sum(count_slices(line) for line in lines)
    if detail == "ops" and events > MOST_EVENTS:
        print(f"{events:,} events: a viewer may take long to open them; --detail units, or --role 0, gives fewer", file=sys.stderr)
    ops = detail == "ops" or (detail is None and events <= MOST_EVENTS)
    write_whole(output, json.dumps(chrome_trace(lines, ops=ops), allow_nan=False) + "\n")
    print(f"wrote {output}: {len(lines)} rank role{'s' if len(lines) > 1 else ''}, {'every op' if ops else 'layers and collectives'}", file=sys.stderr)
