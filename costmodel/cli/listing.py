"""`costmodel list`: what the catalogue knows, with filters."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from typing import Annotated, Any

import typer

from costmodel.cli.guard import InputError
from costmodel.cli.screen import json_text, screen

SCHEMA = 1
app = typer.Typer(rich_markup_mode=None, help="List what is known by name.", no_args_is_help=True)
Text = Annotated[str, typer.Argument(metavar="TEXT", help="Only entries whose words (name, family, …) contain this text.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON: every field, with its source.", show_default=False)]
Predicted = Annotated[bool, typer.Option("--predicted", help="Only those that can be predicted today.", show_default=False)]


@app.command()
def models(text: Text = "", family: Annotated[str, typer.Option(help="Only this family: llama, qwen, gpt, …", show_default=False)] = "",
           predicted: Predicted = False, as_json: AsJson = False) -> None:
    """Language models whose shape is known."""
    from costmodel.catalog import list_models
    entries = [e for e in list_models() if _same(family, e.family) and (e.predictable or not predicted)]
    _show("models", text, entries, as_json)


@app.command()
def gpus(text: Text = "", vendor: Annotated[str, typer.Option(help="Only this vendor: nvidia, amd, …", show_default=False)] = "",
         min_memory: Annotated[float, typer.Option(metavar="GIB", help="Only those with at least this memory.", show_default=False)] = 0.0,
         predicted: Predicted = False, as_json: AsJson = False) -> None:
    """Accelerators, and the CPUs of test machines."""
    from costmodel.catalog import list_accelerators
    entries = [e for e in list_accelerators()
               if _same(vendor, e.vendor) and e.memory_bytes >= min_memory * (1 << 30) and (e.predictable or not predicted)]
    _show("gpus", text, entries, as_json)


@app.command()
def clusters(text: Text = "", gpu: Annotated[str, typer.Option(help="Only nodes with this GPU.", show_default=False)] = "",
             as_json: AsJson = False) -> None:
    """Nodes: servers, cloud instances and racks."""
    from costmodel.catalog import accelerator, list_clusters
    from costmodel.spec import PlanError
    try:
        name = accelerator(gpu).name if gpu else ""
    except PlanError as error:
        raise InputError(f"--gpu {gpu}: {error.rule} {error.fix}") from None
    _show("clusters", text, [e for e in list_clusters() if name in ("", e.accelerator)], as_json)


@app.command()
def profiles(text: Text = "", as_json: AsJson = False) -> None:
    """Machine constants that can be asked for with --profile."""
    from costmodel.catalog.profiles import list_profiles
    entries = [{"name": name, "kind": "a vendor's fallback: data sheets only" if name.startswith("vendor_") else "this device"}
               for name in list_profiles()]
    _show("profiles", text, entries, as_json)


@app.command()
def strategies(text: Text = "", predicted: Predicted = False, as_json: AsJson = False) -> None:
    """Ways to spread a step: what each divides, shards, sends and forbids."""
    from costmodel.catalog import STRATEGIES
    _show("strategies", text, [s for s in STRATEGIES.values() if s.predicted or not predicted], as_json)


@app.command()
def precisions(text: Text = "", as_json: AsJson = False) -> None:
    """Number formats: bits, range, need of loss scaling."""
    from costmodel.catalog import NUMBER_FORMATS
    _show("precisions", text, list(NUMBER_FORMATS.values()), as_json)


@app.command()
def optimizers(text: Text = "", as_json: AsJson = False) -> None:
    """Optimizers: update rule, states and bytes per parameter, decay."""
    from costmodel.catalog import OPTIMIZERS
    _show("optimizers", text, list(OPTIMIZERS.values()), as_json)


def _same(wanted: str, value: str) -> bool:
    return not wanted or wanted.lower() in value.lower()


def _plain(entry: Any) -> dict[str, Any]:
    return asdict(entry) if is_dataclass(entry) and not isinstance(entry, type) else dict(entry)


def _show(kind: str, text: str, entries: Sequence[Any], as_json: bool) -> None:
    if text:
        from costmodel.render.listing import words_of
        entries = [e for e in entries if all(word in words_of(kind, e).lower() for word in text.lower().split())]
    if as_json:
        print(json_text({"schema": SCHEMA, "kind": kind, "entries": [_plain(e) for e in entries]}), end="")
    elif entries:
        from costmodel.render.listing import render_list
        print(render_list(kind, entries, screen()), end="")
    if not entries:
        print(f"no {kind} match; `costmodel list {kind}` shows all", file=sys.stderr)
