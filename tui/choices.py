"""Values of a field for the picker: the list with what the catalogue says, what was typed, and the change that it makes."""

from typing import Any

from costmodel.catalog import accelerator_entry, list_models
from costmodel.cli.options import toml_scalar
from costmodel.spec import PlanError
from costmodel.spec.sizing import parse_count
from tui.dialogs import Choice
from tui.fields import Field, shown
from tui.state import State
from tui.views.explore import gib


def read_value(text: str) -> Any:
    """What somebody typed: a number, a word, on or off."""
    return {"on": True, "off": False}.get(text.lower(), toml_scalar(text))


def field_change(field: Field, value: Any) -> dict[str, Any]:
    """The change that sets a field; a count of parameters in the model's place asks for a shape."""
    if field.path == "model":
        try:
            parse_count(str(value))
            return {"params": str(value)}
        except PlanError:
            pass
    return {field.path: value}


def choices(field: Field, state: State) -> list[Choice]:
    """The values of a field, with what the catalogue says of them."""
    detail: dict[Any, str] = {}
    values = list(field.values(state.run))
    if field.path == "model":
        detail = {entry.name: f"{entry.params / 1e9:>8,.2f} B  {entry.family}" for entry in list_models()}
    elif field.path == "cluster.gpu":
        for name in values:
            entry = accelerator_entry(name)
            detail[name] = f"{gib(entry.memory_bytes):>6} GiB  {entry.bf16_flops_per_s / 1e12:>5,.0f} TFLOP/s bf16  {entry.memory_bytes_per_s / 1e12:.2f} TB/s"
    return [Choice(shown(value), detail.get(value, ""), value) for value in values]
