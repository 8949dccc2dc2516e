"""Changes of a run as somebody writes them behind the command line that gave it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from costmodel.cli.options import BY_FIELD, Given
from costmodel.foreign.run_file import toml_value

if TYPE_CHECKING:
    from costmodel.spec import Run

STRATEGY_OF_STAGE = ("ddp", "zero1", "zero2", "fsdp")
LOST = ("sequence_parallel", "loss_parallel", "tp_overlap", "schedule", "virtual_stages", "stage_layers", "dp", "dp_replicate", "dp_shard")
"""Fields of a plan that move with its degrees."""


def flags_behind(given: Given, before: "Run", changes: Mapping[str, Any], after: "Run") -> str:
    """The flags that make `after` of the command line of `before`: the changes, and what was written there and moves with them."""
    asked = given.origins.keys()
    same = {field for field in ("micro_batch", "grad_accum") if getattr(before.recipe, field) == getattr(after.recipe, field)}
    out = {field: value for field, value in changes.items() if field.removeprefix("recipe.") not in same}
    if "plan.zero" in out and _stage_is_a_word(given):
        own = after.plan.framework == "megatron" and "plan.framework" not in asked
        out = {"plan.strategy": "megatron", **out} if own else {**{k: v for k, v in out.items() if k != "plan.zero"},
                                                               "plan.strategy": STRATEGY_OF_STAGE[out["plan.zero"]]}
    moved = {f"plan.{field}": getattr(after.plan, field) for field in LOST if getattr(before.plan, field) != getattr(after.plan, field)}
    if before.cluster.nodes != after.cluster.nodes:
        moved["cluster.nodes"] = after.cluster.nodes
    if before.recipe.global_batch != after.recipe.global_batch:
        moved["recipe.global_batch"] = after.recipe.global_batch
    out |= {field: value for field, value in moved.items() if field in asked and field not in out}
    follows = ("recipe.global_batch" in asked or "recipe.batch_tokens" in asked) and "recipe.grad_accum" not in asked
    if not follows and (before.recipe.grad_accum != after.recipe.grad_accum or before.plan.pp != after.plan.pp):
        out["recipe.grad_accum"] = after.recipe.grad_accum
    return written(out)


def _stage_is_a_word(given: Given) -> bool:
    """Whether the ZeRO stage was given by a strategy, which a stage beside it would contradict."""
    from costmodel.inputs import STRATEGY_FIELDS, strategy_key
    plan = given.mapping.get("plan", {})
    return "plan.zero" not in given.origins and "zero" in STRATEGY_FIELDS.get(strategy_key(plan.get("strategy")), {})


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
    return value if isinstance(value, str) else toml_value(value)
