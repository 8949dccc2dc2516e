"""Whose file this is, and what it says of a run."""

from collections.abc import Callable, Mapping
from typing import Any

from costmodel.catalog import model
from costmodel.foreign import axolotl, deepspeed, huggingface, megatron, nanotron, neox, shapes, shell, torchtitan
from costmodel.foreign.data import SUFFIXES, parse
from costmodel.foreign.said import Foreign
from costmodel.spec.base import PlanError

Test = Callable[[Mapping[str, Any]], bool]
Read = Callable[[Mapping[str, Any]], Foreign]
READERS: dict[str, tuple[Test, Read]] = {
    "neox": (neox.is_config, neox.read), "deepspeed": (deepspeed.is_config, deepspeed.read), "nanotron": (nanotron.is_config, nanotron.read),
    "axolotl": (axolotl.is_config, axolotl.read), "torchtitan": (torchtitan.is_config, torchtitan.read), "simumax": (shapes.is_simumax, shapes.read_simumax),
    "deepseek": (shapes.is_deepseek, shapes.read_deepseek), "huggingface": (huggingface.is_config, huggingface.read)}
"""Readers of tables, by the word that names their program. The first whose marks a file has reads it."""
OWN = frozenset({"plan", "recipe", "cluster", "params", "schema"})
"""Tables that our own run files have."""


def read_foreign(name: str, text: str, given: Mapping[str, str], kind: str | None = None) -> Foreign:
    """What a file says of a run. `given`: variables and arguments of a script; `kind`: a model_type that a config.json is read as.

    Raises data.SyntaxFault where the text is not of its kind, PlanError where nobody knows such a file.
    """
    suffix = f".{name.rpartition('.')[2].lower()}" if "." in name else ""
    if suffix not in SUFFIXES:
        return _script(name, text, given)
    doubled: list[str] = []
    data = parse(suffix, text, lambda key, line: doubled.append(f"{key} appears twice{f' (again at line {line})' if line else ''}: the last is taken"))
    if not isinstance(data, Mapping):
        raise PlanError(name, None, "it holds no table of settings.", f"Give a file of {', '.join(READERS)}, or a launch script.")
    if kind:
        found = huggingface.read(data, kind)
    else:
        reader = next((read for test, read in READERS.values() if test(data)), None)
        if reader is None and OWN & data.keys():
            raise PlanError(name, None, "it is a run file of costmodel already.", f"Use it as it is: costmodel predict {name}.")
        if reader is None:
            raise PlanError(name, None, f"none of the programs that are known here writes these keys ({', '.join(map(str, list(data)[:4]))}, …).",
                            f"Known are {', '.join(READERS)} and launch scripts of Megatron-LM; --as llama reads a config.json as that type of model.")
        found = reader(data)
    found.notes = doubled + found.notes
    _compare(name, found)
    return found


def _compare(name: str, found: Foreign) -> None:
    """Say where a file has the name of a known model, and another size."""
    stem = name.replace("\\", "/").rpartition("/")[2].rpartition(".")[0]
    for word in dict.fromkeys((str(found.get("model.name", stem)), stem, stem.split("_")[0])):
        try:
            known = model(word)
        except PlanError:
            continue
        mine = found.params
        if mine and mine != known.params:
            found.notes.append(f"{known.name} of the catalogue has {known.params:,} parameters, and this file's model {mine:,}")
        return


def _script(name: str, text: str, given: Mapping[str, str]) -> Foreign:
    """A launch script: its command with most of Megatron's options."""
    script = shell.read(text, given)
    commands = [words for words in script.commands if megatron.is_command(words)]
    if not commands:
        raise PlanError(name, None, "no command in it has the options of Megatron-LM (--num-layers, --hidden-size, …).",
                        f"Give a launch script of Megatron-LM, or a file that ends in {', '.join(SUFFIXES)}.")
    found = megatron.read(max(commands, key=lambda words: len(megatron.options(words))), script.variables, script.documents)
    if unset := [name for name in script.unknown if name.isdigit() or not name.startswith(("SLURM_", "MASTER_"))]:
        found.notes.append(f"not set in the script, and taken as empty: {', '.join(unset)} (--env NAME=VALUE gives them)")
    return found
