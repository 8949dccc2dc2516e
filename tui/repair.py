"""From the advice of an error to changes that make the run whole.

An error ends in a way out ("Use zero = 3, or framework = megatron."). The values it names are tried, one after the other and, where
each leads to another error, on top of one another: what is offered is always a run that can be predicted.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from costmodel.changes import changed
from costmodel.spec import Model, Plan, PlanError, Recipe, Run

DEPTH = 4
"""Errors in a row that a repair may mend."""
TRIES = 40
"""Runs that one search may try."""
SECTIONS = {"plan": frozenset(Plan.model_fields), "recipe": frozenset(Recipe.model_fields), "model": frozenset(Model.model_fields),
            "cluster": frozenset({"gpus", "nodes", "gpus_per_node", "gpu", "name"})}
_ASSIGNED = re.compile(r'(?:--([a-z][a-z-]*) |\b([a-z][a-z_.]*) <?= )"?([\w.:-]*\w)"?(?:,? or ([\w.:-]*\w)\b(?! <?=))?')
"""A field with a value, or with either of two: `zero = 3`, `zero = 3 or 0`, `--gpus 64`."""
_WORD = re.compile(r"[\w.:-]*\w")


def suggestions(error: PlanError) -> Iterator[dict[str, Any]]:
    """Single changes that the words of an error name, in their order."""
    own = error.field.partition(".")[0]
    seen: list[dict[str, Any]] = []
    for match in _ASSIGNED.finditer(error.fix):
        path = _path((match[1] or match[2]).replace("-", "_"), own)
        if path is not None:
            seen += [{path: _value(word)} for word in (match[3], match[4]) if word]
    if error.field.count(".") == 1:
        seen += [{error.field: _value(word)} for word in _WORD.findall(error.fix.removeprefix("Use ")) if word not in ("or", "one", "of", "in", "with")]
    for i, change in enumerate(seen):
        if change not in seen[:i]:
            yield change


def repaired(run: Run, changes: Mapping[str, Any], error: PlanError, predict: Callable[[Run], object]) -> dict[str, Any] | None:
    """What to change besides (or instead) so that there is a run and a prediction; None where the words of the errors lead to none.

    Fewer changes come first. What was asked for stays unless the error says that this value cannot be.
    """
    front: list[tuple[dict[str, Any], PlanError]] = [({}, error)]
    tried = 0
    for _ in range(DEPTH):
        following: list[tuple[dict[str, Any], PlanError]] = []
        for so_far, last in front:
            options = [more for more in suggestions(last) if not more.keys() & so_far.keys()]
            for more in sorted(options, key=lambda more: bool(more.keys() & changes.keys())):
                tried += 1
                extra = {**so_far, **more}
                try:
                    predict(changed(run, {**changes, **extra}))
                    return extra
                except PlanError as other:
                    following.append((extra, other))
                if tried >= TRIES:
                    return None
        front = following
    return None


def _path(name: str, own: str) -> str | None:
    if "." in name:
        section, _, field = name.partition(".")
        return name if field in SECTIONS.get(section, ()) else None
    return next((f"{section}.{name}" for section in (own, *SECTIONS) if name in SECTIONS.get(section, ())), None)


def _value(word: str) -> Any:
    if word in ("true", "false"):
        return word == "true"
    try:
        return int(word)
    except ValueError:
        return word
