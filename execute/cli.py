"""The program `execute`; and `execute dryrun RUN`: perform a run on fake tensors, and hold a prediction against it."""

import json
from typing import Annotated

import typer

from costmodel.cli.guard import GuardedGroup, InputError
from costmodel.cli.options import Given, SectionedCommand, takes_run
from execute import require_torch_or_refuse
from execute.commands import check_rank
from execute.lab_command import lab
from execute.run_command import run
from execute.solo_command import solo
from execute.validate_command import validate

OUTSIDE_TOLERANCE = 4
app = typer.Typer(name="execute", cls=GuardedGroup, rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False,
                  no_args_is_help=True, context_settings={"max_content_width": 100},
                  help="The step that `costmodel predict` predicts, performed by PyTorch.")


@app.callback()
def _program() -> None:
    """Exit codes: 0 done, 1 unexpected error, 2 bad input or no PyTorch, 3 out of memory, 4 outside the tolerance, 5 a rank failed, 6 timeout."""


@app.command(cls=SectionedCommand, short_help="One rank on fake tensors: bytes and collectives, no GPU.")
@takes_run
def dryrun(
    given: Given,
    rank: Annotated[int, typer.Option("--rank", metavar="N", help="Whose program to perform. Default: 0.", show_default=False)] = 0,
    against: Annotated[str, typer.Option("--against", metavar="predict", show_default=False,
                                         help="Compare with the prediction; exit code 4 outside the tolerance.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the text.", show_default=False)] = False,
) -> None:
    """Perform two steps of one rank on fake tensors and a fake process group, at any world size; report the second."""
    require_torch_or_refuse()
    run = given.resolve().run
    if against not in ("", "predict"):
        raise InputError(f"--against {against}: it knows the prediction only. Use --against predict.")
    check_rank(rank, run.plan.world_size)
    from execute.dryrun import dry_run
    with given.naming():
        report = dry_run(run, rank)
    if not against:
        from execute.text import as_text
        print(json.dumps(report.to_dict(), indent=2) if as_json else as_text(report))
        return
    from costmodel.prediction import predict
    from execute.compare import compare
    with given.naming():
        comparison = compare(predict(run), report)
    print(json.dumps(comparison.to_dict(), indent=2) if as_json else comparison.text())
    if not comparison.within_tolerance:
        raise typer.Exit(OUTSIDE_TOLERANCE)


app.command(cls=SectionedCommand, short_help="One rank of a job on one real device, alone.")(solo)
app.command(cls=SectionedCommand, short_help="The job itself under torchrun: time, memory, communication.")(run)
app.command(cls=SectionedCommand, short_help="Predicted against dry run against measured, case by case.")(validate)
app.command(cls=SectionedCommand, short_help="Every strategy against one device, measured and explained.")(lab)
