"""`execute solo RUN`: one rank of a run on one real device."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from costmodel.cli.guard import InputError, debugging
from costmodel.cli.options import Given, takes_run
from execute import require_torch_or_refuse
from execute.commands import NoMemoryCheck, check_device, check_least, check_rank, naming, say
from execute.recording import keep, make_record, outcome_of, prepare_place

if TYPE_CHECKING:
    from costmodel.inputs import Resolved
    from execute.solo import Solo

OUTSIDE_TOLERANCE = 4


@takes_run
def solo(
    given: Given,
    context: typer.Context,
    rank: Annotated[int, typer.Option("--rank", metavar="N", help="Whose program to perform. Default: 0.", show_default=False)] = 0,
    device: Annotated[str, typer.Option("--device", metavar="KIND", show_default=False,
                                        help="cuda or cpu. Default: cuda where there is a GPU.")] = "",
    warmup: Annotated[int, typer.Option("--warmup", metavar="N", help="Steps before the timed ones. Default: 3.", show_default=False)] = 3,
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="Timed steps. Default: 10.", show_default=False)] = 10,
    against: Annotated[str, typer.Option("--against", metavar="predict", show_default=False,
                                         help="Compare with the prediction; exit code 4 outside the tolerance.")] = "",
    record: Annotated[Path | None, typer.Option("--record", "-o", metavar="PLACE", show_default=False,
                                                help="Keep a record: a .json file, or a folder in which it gets a name of its own.")] = None,
    trace: Annotated[Path | None, typer.Option("--trace", metavar="FILE", show_default=False,
                                               help="Keep the Chrome trace of one more step: .json or .json.gz.")] = None,
    no_memory_check: NoMemoryCheck = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record (docs/report.md) instead of the text.", show_default=False)] = False,
) -> None:
    """Perform one rank of a job on one real device, alone: its memory, and the time of its computation.

    The other ranks are made up: any world size, no torchrun. Exit code 3: it ran out of memory; 5: it failed.
    """
    require_torch_or_refuse()
    resolved = given.resolve()
    _check(resolved, rank, warmup, steps, against)
    for place in (record, trace and trace.parent):
        if place is not None:
            prepare_place(place)
    from costmodel.spec import PlanError
    from execute.device import this_device
    from execute.host_memory import check_host_memory
    from execute.solo import solo as perform
    check_device(device)
    with given.naming(), naming({"device": "--device"}):
        here = this_device(device)
        if here.name == "cpu" and not no_memory_check:
            check_host_memory(resolved.run, 1)
    source, done, outcome = f"execute solo --rank {rank} --warmup {warmup} --steps {steps}", None, None
    try:
        with given.naming():
            done = perform(resolved.run, here, rank, warmup=warmup, steps=steps, trace=trace, progress=lambda words: say(f"solo: {words}"))
    except (InputError, PlanError):
        raise
    except (Exception, KeyboardInterrupt) as error:
        outcome = outcome_of(error, rank)
        if debugging(context):
            import traceback
            traceback.print_exception(error)
    _finish(resolved, rank, done, outcome, source, record, as_json, against)


def _check(resolved: "Resolved", rank: int, warmup: int, steps: int, against: str) -> None:
    world = resolved.run.plan.world_size
    if against not in ("", "predict"):
        raise InputError(f"--against {against}: it knows the prediction only. Use --against predict.")
    check_rank(rank, world)
    check_least(warmup, "--warmup", 1, 1)
    check_least(steps, "--steps", 1, 1)


def _finish(resolved: "Resolved", rank: int, done: "Solo | None", outcome: Any, source: str, place: Path | None, as_json: bool, against: str) -> None:
    """Write the record, print what was seen, and exit as it ended."""
    from costmodel.records import Outcome
    from execute.text import as_text
    outcome = outcome or Outcome()
    record = make_record(resolved, "solo", outcome, done.report if done else None, {rank: done.step_s} if done else {}, source)
    if place is not None:
        say(f"wrote {keep(record, place)}")
    comparison = None
    if done is not None and against:
        from costmodel.prediction import predict
        from execute.compare import compare
        comparison = compare(predict(resolved.run), done.report)
    if as_json:
        print(json.dumps({**record.to_dict(), **({"comparison": comparison.to_dict()} if comparison else {})}, indent=2, ensure_ascii=False))
    elif done is not None:
        print(comparison.text() if comparison else as_text(done.report, done.step_s))
    if outcome.kind != "ok":
        say(f"{outcome.kind}: {outcome.message}")
        raise typer.Exit(outcome.exit_code)
    if comparison is not None and not comparison.within_tolerance:
        raise typer.Exit(OUTSIDE_TOLERANCE)
