"""Changes of a run as somebody writes them behind the command line that gave it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from costmodel.cli.options import BY_FIELD, Given

if TYPE_CHECKING:
    from costmodel.spec import Run

STRATEGY_OF_STAGE = ("ddp", "zero1", "zero2", "fsdp")


def flags_behind(given: Given, before: "Run", changes: Mapping[str, Any], after: "Run") -> str:
    """The flags that make `after` of the command line of `before`: the changes, and what was written there and moves with them."""
    asked = given.origins.keys()
    same = {field for field in ("micro_batch", "grad_accum") if getattr(before.recipe, field) == getattr(after.recipe, field)}
    out = {field: value for field, value in changes.items() if field.removeprefix("recipe.") not in same}
    if "plan.strategy" in asked and "plan.zero" in out and "plan.zero" not in asked and after.plan.framework != "megatron":
        out = {**{k: v for k, v in out.items() if k != "plan.zero"}, "plan.strategy": STRATEGY_OF_STAGE[out["plan.zero"]]}
    follows = {"plan.dp": (before.plan.dp, after.plan.dp), "plan.dp_replicate": (before.plan.dp_replicate, after.plan.dp_replicate),
               "plan.dp_shard": (before.plan.dp_shard, after.plan.dp_shard), "cluster.nodes": (before.cluster.nodes, after.cluster.nodes),
               "recipe.global_batch": (before.recipe.global_batch, after.recipe.global_batch),
               "recipe.grad_accum": (before.recipe.grad_accum, after.recipe.grad_accum)}
    derived = "recipe.global_batch" in asked and "recipe.grad_accum" not in asked
    for field, (was, is_) in follows.items():
        moved = was != is_ or field == "recipe.grad_accum" and before.plan.pp != after.plan.pp
        if moved and (field in asked or field == "recipe.grad_accum" and not derived):
            out[field] = is_
    return written(out)


def written(changes: Mapping[str, Any]) -> str:
    """Changed fields as somebody writes them on the command line: "--tp 4 --set plan.reshard_after_forward=false"."""
    words = []
    for field, value in changes.items():
        plain = isinstance(value, bool | int | float | str)
        flag, text = BY_FIELD.get(field) if plain else None, toml_text(value)
        if flag is not None and flag.kind == "switch":
            words.append(flag.name if value else f"--no-{flag.name[2:]}")
        elif flag is not None:
            words.append(f"{flag.name} {text}")
        else:
            words.append(f"--set {field}={text}" if plain else f"--set '{field}={text}'")
    return " ".join(words)


def toml_text(value: Any) -> str:
    """A value as `--set` takes it; words stand bare."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_quoted(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_quoted(inner) for inner in value) + "]"
    return str(value)


def _quoted(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else toml_text(value)
