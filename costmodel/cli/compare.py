"""`costmodel compare`: runs side by side, and why one takes longer than another."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from costmodel.cli.guard import InputError
from costmodel.cli.options import Given, takes_run
from costmodel.cli.screen import json_text, screen

if TYPE_CHECKING:
    from costmodel.comparison import Predicted

SCHEMA = 1
NAME = 40
"""Longest name of a run, in characters."""


@takes_run
def compare(
    given: Given,
    others: Annotated[list[Path] | None, typer.Argument(metavar="[RUN]...", show_default=False,
                                                        help="More run files; the flags apply to all of them.")] = None,
    changes: Annotated[list[str] | None, typer.Option("--with", metavar="FLAGS", show_default=False,
                                                      help='The first run with other flags, like --with "--gpus 16 --tp 2". Repeatable.')] = None,
    alone: Annotated[bool, typer.Option("--one-gpu", show_default=False, help="Compare with one GPU of the first run; so does a single run.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON (docs/report.md) instead of the text.", show_default=False)] = False,
) -> None:
    """Put runs side by side, and say where the difference in time comes from.

    The first is what the others are compared with; a single run is compared with one GPU.
    """
    from costmodel.comparison import compare as beside
    from costmodel.comparison import one_gpu
    runs = [(_name(given), given), *((path.stem, given.on(path)) for path in others or []), *((text, given.changed(text)) for text in changes or [])]
    found = [_predicted(name, one) for name, one in runs]
    if alone or len(found) == 1:
        first = found[0]
        if len(found) == 1 and first.run.cluster.gpus == 1:
            raise InputError('a single run of one GPU has nothing to be compared with. Give another run file, or --with "--gpus 8".')
        with given.naming():
            found.insert(0, one_gpu(first.run, given.profile))
    comparison = beside(found[0], *found[1:])
    if as_json:
        data = {"schema": SCHEMA, "runs": [one.run.model_dump(mode="json") for one in found], "comparison": comparison.to_dict()}
        print(json_text(data), end="")
        return
    from costmodel.render.comparison import render_comparison
    from costmodel.render.prediction import title
    page = screen()
    print(render_comparison([title(one.run) for one in found], comparison, page), end="")


def _name(given: Given) -> str:
    return given.file.stem if given.file else "the run"


def _predicted(name: str, given: Given) -> "Predicted":
    from costmodel.comparison import predicted
    resolved = given.resolve()
    with given.naming():
        return predicted(name if len(name) <= NAME else f"{name[:NAME - 1]}…", resolved.run, given.profile)
