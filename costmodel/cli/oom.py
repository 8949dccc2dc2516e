"""`costmodel oom`: an out-of-memory message of PyTorch, read against a run."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from costmodel.cli.guard import InputError
from costmodel.cli.options import Given, SectionedCommand, takes_run
from costmodel.cli.screen import json_text, screen
from costmodel.cli.solve import advice_document
from costmodel.cli.written import flags_behind

if TYPE_CHECKING:
    from costmodel.oom import Diagnosis, Figure, Message

SCHEMA = 1
TELLTALE = "ried to allocate"


class MessageCommand(SectionedCommand):
    """A command of which any argument that holds an out-of-memory message is the message."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        out: list[str] = []
        for arg in args:
            out += ["--message", arg] if TELLTALE in arg and not arg.startswith("--") and out[-1:] != ["--message"] else [arg]
        return super().parse_args(ctx, out)


@takes_run
def oom(
    given: Given,
    message: Annotated[str | None, typer.Option(metavar="TEXT", show_default=False,
                                                help="PyTorch's message; an argument that holds one needs no --message.")] = None,
    log: Annotated[Path | None, typer.Option("--log", metavar="FILE", show_default=False, help="A file that holds the message; - is standard input.")] = None,
    tried: Annotated[str | None, typer.Option(metavar="SIZE", show_default=False, help="What was tried to allocate, as in the message: 112.00MiB.")] = None,
    allocated: Annotated[str | None, typer.Option(metavar="SIZE", show_default=False, help="Allocated by PyTorch.")] = None,
    reserved: Annotated[str | None, typer.Option(metavar="SIZE", show_default=False, help="Reserved in total by PyTorch.")] = None,
    free: Annotated[str | None, typer.Option(metavar="SIZE", show_default=False, help="Free on the device.")] = None,
    capacity: Annotated[str | None, typer.Option(metavar="SIZE", show_default=False, help="Total capacity of the device. Default: the GPU's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON (docs/report.md) instead of the text.", show_default=False)] = False,
) -> None:
    """Explain an out-of-memory message: which tensor, when in the step, true need or fragmentation, and what to change.

    costmodel oom run.toml "CUDA out of memory. Tried to allocate 112.00 MiB. GPU 0 has …"
    """
    from costmodel.oom import diagnose
    said = _message(message, log, {"tried": tried, "allocated": allocated, "reserved": reserved, "free": free, "capacity": capacity})
    run = given.resolve().run
    with given.naming():
        found = diagnose(run, said, given.profile)
    if as_json:
        print(json_text({"schema": SCHEMA, "run": run.model_dump(mode="json"), "diagnosis": document(found)}), end="")
        return
    from costmodel.render.oom import render_oom
    from costmodel.render.prediction import title
    page = screen(run)
    print(render_oom(title(run), found, lambda s: flags_behind(given, run, s.changes, s.run), page), end="")


def _message(text: str | None, log: Path | None, figures: dict[str, str | None]) -> "Message":
    """The message, with figures given beside it in place of its own."""
    from dataclasses import replace

    from costmodel.oom import Message, read_message, read_size
    from costmodel.spec import PlanError
    if text is not None and log is not None:
        raise InputError(f"--log {log} and a message: give one of the two.")
    written = {name: value for name, value in figures.items() if value is not None}
    if text is None and log is None and not written and not sys.stdin.isatty():
        log = Path("-")
    if log is not None:
        text = _read(log)
    try:
        said = Message() if text is None else read_message(text)
        return replace(said, **{name: read_size(value, f"--{name}") for name, value in written.items()})
    except PlanError as error:
        if not error.field.startswith("--") and not (text and text.strip()):
            raise InputError(f"no message was given. {error.fix} A file that holds it goes behind --log.") from None
        about = f"{error.field} {error.value}" if error.field.startswith("--") else "the message"
        raise InputError(f"{about}: {error.rule} {error.fix}") from None


def _read(log: Path) -> str:
    if str(log) == "-":
        return sys.stdin.read()
    try:
        return log.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"--log {log}: it cannot be read ({error.strerror}). Give a text file, or - for standard input.") from None


def document(d: "Diagnosis") -> dict[str, Any]:
    """A diagnosis as plain data with stable keys: docs/report.md."""
    def figure(f: "Figure | None") -> int | None:
        return None if f is None else f.nbytes

    m = d.message
    return {"message": {"tried_bytes": figure(m.tried), "allocated_bytes": figure(m.allocated), "reserved_bytes": figure(m.reserved),
                        "unallocated_bytes": m.unallocated, "free_bytes": figure(m.free), "capacity_bytes": figure(m.capacity),
                        "process_bytes": figure(m.process), "others_bytes": figure(m.others)},
            "matches": [asdict(x) for x in d.matches], "names_no_tensor": d.names_no_tensor, "closest": [asdict(x) for x in d.closest],
            "agrees": d.agrees, "role": d.role, "peak_bytes": d.peak_bytes, "predicted_reserved_bytes": d.reserved_bytes, "outside_bytes": d.outside_bytes,
            "capacity_bytes": d.capacity_bytes, "others_bytes": d.others_bytes, "cause": d.cause, "verdict": d.report.verdict,
            "advice": None if d.advice is None else advice_document(d.advice)}
