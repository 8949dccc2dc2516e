"""The commands of `costmodel`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from costmodel.cli import listing
from costmodel.cli.compare import compare
from costmodel.cli.explain import explain
from costmodel.cli.guard import DOES_NOT_FIT, GuardedGroup, InputError, set_debug
from costmodel.cli.importing import import_
from costmodel.cli.mesh import mesh
from costmodel.cli.oom import MessageCommand, oom
from costmodel.cli.options import Given, SectionedCommand, flag_of, takes_run
from costmodel.cli.schedule import schedule
from costmodel.cli.screen import device_of, json_text, screen
from costmodel.cli.solve import solve
from costmodel.cli.trace import trace
from costmodel.cli.tui import tui
from costmodel.cli.waterfall import waterfall

if TYPE_CHECKING:
    from costmodel.advice import Advice
    from costmodel.catalog.profiles import Profile
    from costmodel.inputs import Resolved
    from costmodel.report import StepReport
    from costmodel.spec import Run

SCHEMA = 1
ADVICE_S = 10.0
"""Seconds after which a prediction shows the advice found so far: a pipeline of hundreds of slots takes longer than anybody waits."""
app = typer.Typer(name="costmodel", cls=GuardedGroup, rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False,
                  no_args_is_help=True, context_settings={"max_content_width": 100},
                  help="What a training step costs in memory and time when it is spread over many GPUs.")
app.add_typer(listing.app, name="list")


def _version(asked: bool) -> None:
    if asked:
        from costmodel import __version__
        print(f"costmodel {__version__}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.", show_default=False)] = False,
    debug: Annotated[bool, typer.Option("--debug", callback=set_debug, is_eager=True, help="Show the traceback of an error.",
                                        show_default=False)] = False,
) -> None:
    """Exit codes: 0 done, 1 unexpected error, 2 bad input, 3 does not fit in memory."""


@app.command(cls=SectionedCommand, short_help="Memory and time of one training step, without running it.")
@takes_run
def predict(
    given: Given,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON (docs/report.md) instead of the text.", show_default=False)] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", show_default=False,
                                                help="Write to a file instead: JSON where it ends in .json, else the text.")] = None,
) -> None:
    """Predict memory and time of one training step, without running it.

    Exit code 3: the run does not fit in memory.
    """
    from costmodel.catalog.profiles import load_profile
    from costmodel.prediction import predict as predict_run
    if output is not None and given.read_from(output):
        raise InputError(f"-o {output}: the answer would overwrite the file that the run was read from. Use another name.")
    resolved = given.resolve()
    with given.naming():
        profile = load_profile(resolved.run, given.profile)
        report = predict_run(resolved.run, profile, intervals=True)
        advice = _advice(given, resolved.run) if report.verdict in ("does not fit", "risky") else None
    if as_json or (output is not None and output.suffix.lower() == ".json"):
        text = as_document(resolved, profile, report, advice)
    else:
        text = as_text(resolved, profile, report, given, advice, to_file=output is not None)
    if output is None:
        print(text, end="")
    else:
        from costmodel.cli.files import write_whole
        write_whole(output, text)
        print(f"wrote {output}", file=sys.stderr)
    if report.verdict == "does not fit":
        raise typer.Exit(DOES_NOT_FIT)


app.command(cls=SectionedCommand, short_help="What makes a run fit, or faster; the largest, the best plan.")(solve)
app.command(cls=SectionedCommand, short_help="Runs side by side, and why one takes longer.")(compare)
app.command(cls=SectionedCommand, short_help="What is copied, sharded and sent; bytes per parameter.")(explain)
app.command(cls=SectionedCommand, short_help="Where the time goes, from the peak down to the MFU.")(waterfall)
app.command(cls=MessageCommand, short_help="PyTorch's out-of-memory message: which tensor, when, why.")(oom)
app.command(cls=SectionedCommand, short_help="Who sits where: ranks, process groups, the links they cross.")(mesh)
app.command(cls=SectionedCommand, short_help="The picture of a pipeline schedule, and its bubble.")(schedule)
app.command(cls=SectionedCommand, short_help="The predicted step as a Chrome trace, kernel by kernel.")(trace)
app.command(cls=SectionedCommand, short_help="Change a run field by field, and watch; with a guided tour.")(tui)
app.command("import", short_help="A run file from another training program's files.")(import_)


def _advice(given: Given, run: "Run") -> "Advice":
    """What would make a run fit; only worked out for one that does not, or hardly does, and not for ever."""
    import time

    from costmodel.advice import advise
    until = time.monotonic() + ADVICE_S
    return advise(run, given.profile, watch=lambda _: time.monotonic() < until)


def document(resolved: "Resolved", profile: "Profile", report: "StepReport", advice: "Advice | None" = None) -> dict[str, Any]:
    """A prediction as plain data with stable keys: docs/report.md."""
    from costmodel.cli.solve import advice_document
    return {"schema": SCHEMA, "run": resolved.run.model_dump(mode="json"), "assumed": resolved.assumed,
            "profile": {"name": profile.name, "guess": profile.guess}, "report": report.to_dict(), "training": training_document(resolved.run, report),
            "advice": None if advice is None else advice_document(advice)}


def training_document(run: "Run", report: "StepReport") -> dict[str, Any] | None:
    """What the whole training takes, where its tokens were given."""
    from dataclasses import asdict
    training = report.training(run.recipe.train_tokens) if run.recipe.train_tokens else None
    return None if training is None else asdict(training)


def as_document(resolved: "Resolved", profile: "Profile", report: "StepReport", advice: "Advice | None" = None) -> str:
    """The document as JSON."""
    return json_text(document(resolved, profile, report, advice))


def as_text(resolved: "Resolved", profile: "Profile", report: "StepReport", given: Given, advice: "Advice | None" = None, to_file: bool = False) -> str:
    """The prediction for people."""
    from costmodel.render.prediction import render
    from costmodel.render.text import Page
    page = Page(100, device=device_of(resolved.run)) if to_file else screen(resolved.run)
    assumed = [(flag_of("params" if field == "model" else field), why) for field, why in resolved.assumed.items()]
    if advice is None:
        return render(resolved.run, assumed, report, profile.name, page)
    from costmodel.cli.written import flags_behind
    from costmodel.render.advice import fit_section
    found = advice
    return render(resolved.run, assumed, report, profile.name, page,
                  lambda page: fit_section(found, lambda s: flags_behind(given, resolved.run, s.changes, s.run), page))
