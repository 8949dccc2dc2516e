"""`costmodel waterfall`: where the step's time goes, from the peak of the data sheet to the MFU."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from costmodel.cli.guard import InputError, shown
from costmodel.cli.options import Given, takes_run
from costmodel.cli.screen import json_text, screen

if TYPE_CHECKING:
    from costmodel.spec import Run

SCHEMA = 1
_SCALE = {"": 1.0, "k": 1e3, "m": 1e6}
_MEASURED = re.compile(r"\s*([0-9][0-9,_]*(?:\.[0-9]+)?|\.[0-9]+)\s*"
                       r"(?:(ms|s|sec|seconds?)|(%)(?:\s*mfu)?|([km]?)\s*(?:tok|tokens?)\s*/\s*s(?:ec)?(\s*/\s*gpu)?)\s*", re.IGNORECASE)


def measured_step(text: str, tokens_per_step: int, gpus: int, ideal_s: float) -> float:
    """Seconds of a measured step: a time (2.84s, 910ms), the tokens per second of the job or of each GPU, or the MFU (31%) of a step whose FLOPs take
    `ideal_s` at the peak.
    """
    found = _MEASURED.fullmatch(text)
    number = float(found[1].replace(",", "").replace("_", "")) if found else 0.0
    if not found or not number > 0:
        raise InputError(f"--measured {shown(text)}: it must be a time, a rate or an MFU. Write 2.84s, 910ms, \"12000 tok/s\" (of the job), "
                         "\"1500 tok/s/gpu\" or 31%.")
    unit, percent, scale, each = found[2], found[3], found[4], found[5]
    if unit:
        return number / 1e3 if unit.lower() == "ms" else number
    if percent:
        return ideal_s / (number / 100)
    return tokens_per_step / (number * _SCALE[scale.lower()] * (gpus if each else 1))


def recorded_step(path: Path, run: "Run") -> float:
    """Seconds of the step that a record of `execute run` measured; of the same job as the run's, as far as its size tells."""
    from costmodel.records import RecordError, read_record
    try:
        record = read_record(path)
    except RecordError as error:
        raise InputError(f"--measured {error}") from None
    step_s = record.report.step_s if record.report is not None else None
    if record.provenance != "run" or step_s is None:
        raise InputError(f"--measured {path}: it holds no step of a whole job. Give a record of `execute run`, or the time itself.")
    theirs, ours = ((r.tokens_per_step, r.cluster.gpus) for r in (record.run, run))
    if theirs != ours:
        raise InputError(f"--measured {path}: its step has {theirs[0]:,} tokens on {theirs[1]} GPUs, and the run {ours[0]:,} on {ours[1]}. "
                         f"Predict that very job: costmodel waterfall {path} --measured {path}.")
    return step_s


@takes_run
def waterfall(
    given: Given,
    measured: Annotated[str | None, typer.Option(metavar="STEP", show_default=False, help="A measured step, to see what the prediction leaves "
                                                 "unexplained: 2.84s, 910ms, \"12000 tok/s\" (of the job), \"1500 tok/s/gpu\", an MFU, 31%; "
                                                 "or a record of `execute run`, FILE.json.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON (docs/report.md) instead of the text.", show_default=False)] = False,
) -> None:
    """Show where the step's time goes: from the peak of the data sheet, cause by cause, down to the MFU.

    The bars sum to the step, so each share of it is as many points of MFU.
    """
    from costmodel.catalog.profiles import load_profile
    from costmodel.prediction import predict
    from costmodel.waterfall import waterfall as fall
    resolved = given.resolve()
    run = resolved.run
    with given.naming():
        profile = load_profile(run, given.profile)
        report = predict(run, profile, scaling=False)
        bars = fall(run, report, profile)
        if measured is not None:
            took = (recorded_step(Path(measured), run) if measured.lower().endswith(".json")
                    else measured_step(measured, run.tokens_per_step, run.cluster.gpus, bars.ideal_s))
            bars = fall(run, report, profile, took)
    if as_json:
        data = {"schema": SCHEMA, "run": run.model_dump(mode="json"), "profile": {"name": profile.name, "guess": profile.guess}, "waterfall": bars.to_dict()}
        print(json_text(data), end="")
        return
    from costmodel.render.prediction import title
    from costmodel.render.waterfall import render_waterfall
    page = screen(run)
    print(render_waterfall(title(run), bars, run.cluster.gpus, page, report), end="")
