"""`execute dryrun RUN.toml`: perform a run on fake tensors, and hold a prediction against it."""

import json
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from costmodel.inputs import build_run
from costmodel.spec import PlanError, Run
from execute import TorchMissing, require_torch

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
                  help="The step that `costmodel predict` predicts, performed by PyTorch.")
OUTSIDE_TOLERANCE = 4


@app.callback()
def main() -> None:
    """Perform a Run: on fake tensors, at any world size, without a GPU."""


@app.command()
def dryrun(run: Annotated[str, typer.Argument(help="A run file (TOML), or - for none.")] = "-",
           values: Annotated[list[str] | None, typer.Option("--set", help="key=value over the file, e.g. plan.zero=3")] = None,
           rank: Annotated[int, typer.Option(help="Which rank's program to perform.")] = 0,
           against: Annotated[str, typer.Option(help="predict: compare with the prediction, exit 4 outside the tolerance.")] = "",
           as_json: Annotated[bool, typer.Option("--json", help="The StepReport as JSON.")] = False) -> None:
    """Perform two steps of one rank on fake tensors and a fake process group; report the second."""
    try:
        require_torch()
        described = read_run(run, values or [])
        from execute import dryrun as dry
        report = dry.dry_run(described, rank)
    except (PlanError, TorchMissing) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    if not against:
        typer.echo(json.dumps(report.to_dict(), indent=2) if as_json else _text(report))
        return
    if against != "predict":
        typer.echo(f"--against {against}: only predict is known.", err=True)
        raise typer.Exit(2)
    from costmodel.predict import predict
    from execute.compare import compare
    comparison = compare(predict(described), report)
    typer.echo(json.dumps(comparison.to_dict(), indent=2) if as_json else comparison.text())
    if not comparison.within_tolerance:
        raise typer.Exit(OUTSIDE_TOLERANCE)


def read_run(path: str, values: Sequence[str]) -> Run:
    """The Run of a TOML file with `section.key=value` laid over it; values are read as TOML, else as text."""
    given: dict[str, Any] = {}
    if path != "-":
        try:
            given = tomllib.loads(Path(path).read_text())
        except OSError as error:
            raise PlanError("run", path, "cannot be read.", str(error)) from None
        except tomllib.TOMLDecodeError as error:
            raise PlanError("run", path, f"is not TOML: {error}.", "See docs/run.md for the form of a run file.") from None
    for item in values:
        key, equals, text = item.partition("=")
        if not equals:
            raise PlanError("--set", item, "is not key=value.", "Write --set plan.zero=3.")
        *sections, last = key.split(".")
        table = given
        for section in sections:
            table = table.setdefault(section, {})
        table[last] = _value(text)
    return build_run(**given)


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def _text(report: Any) -> str:
    """The report for people."""
    lines = []
    for role in report.roles:
        memory = role.memory
        lines.append(f"{role.role} of {report.world_size}, second step, allocated bytes")
        lines.append(f"  peak         {memory.allocated.total_bytes:>18,}  {memory.allocated.moment}")
        lines += [f"    {name:<15}{size:>14,}" for name, size in memory.allocated.by_category.items()]
        lines.append("  between steps")
        lines += [f"    {name:<15}{size:>14,}" for name, size in memory.states.items()]
        lines.append(f"  activations  {memory.activations_bytes:>18,}  at their highest")
        lines += [f"  peak, {name:<15}{peak.total_bytes:>12,}  {peak.moment}" for name, peak in memory.phases.items()]
        lines.append("  collectives of a step")
        lines += [f"    {c.phase:<10}{c.axis:<14}{c.kind:<15}{c.count:>5} x {c.message_bytes:>15,} bytes  {c.dtype:<6} over {c.group}"
                  for c in role.collectives or ()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(app())
