"""From the name somebody writes to the name of an entry, or to an error that says what was meant."""

import re
from functools import cache

from costmodel.catalog.files import Folder, entry_names, read_aliases
from costmodel.spec.base import PlanError

_FIELD: dict[Folder, str] = {"models": "model", "accelerators": "gpu", "nodes": "cluster"}
_LISTED_AS: dict[Folder, str] = {"models": "models", "accelerators": "gpus", "nodes": "clusters"}
_SAME_ENTRY: dict[Folder, frozenset[str]] = {
    "models": frozenset({"meta", "hf", "base", "chat", "instruct", "it"}),
    "accelerators": frozenset({"nvidia", "tesla", "geforce", "quadro", "amd", "instinct", "intel", "google", "gpu"}),
    "nodes": frozenset(),
}
"""Words that do not change the entry: a tuned model has its base's shape, a device is the same with its vendor's name."""
_BETWEEN_DIGITS = re.compile(r"(?<=\d)[-_. ]+(?=\d)")
_ELSEWHERE = re.compile(r"[-_ ]+|(?<!\d)\.|\.(?!\d)")


def spelling(name: str) -> str:
    """A name without case and separators, except one "." between two digits.

    "Llama_3.1-8B" and "llama-3-1-8b" are one spelling; "gpt3-13b" and "gpt3-1.3b" stay two.
    """
    return _ELSEWHERE.sub("", _BETWEEN_DIGITS.sub(".", name.strip().lower()))


def resolve(folder: Folder, name: str) -> str:
    """The entry that `name` means: its own name, an alias, a hub id, each however spelt; otherwise a PlanError."""
    if name in entry_names(folder):
        return name
    for written in (name, _without_known_words(folder, name)):
        key = spelling(written)
        if "/" in written and folder == "models":
            found = _hub_spellings().get(key)
        else:
            found = _own_spellings(folder).get(key) or _other_spellings(folder).get(key)
        if found:
            return found
    matches = {entry for key, entry in _all_spellings(folder).items() if key.replace(".", "") == spelling(name).replace(".", "")}
    if len(matches) == 1:
        return matches.pop()
    raise PlanError(_FIELD[folder], name, "is not in the catalogue.", _did_you_mean(folder, name, sorted(matches)))


def _without_known_words(folder: Folder, name: str) -> str:
    owner, slash, last = name.strip().rpartition("/")
    words = [word for word in re.split(r"[-_ ]+", last) if word.lower() not in _SAME_ENTRY[folder]]
    return owner + slash + "-".join(words)


@cache
def _own_spellings(folder: Folder) -> dict[str, str]:
    return {spelling(name): name for name in entry_names(folder)}


@cache
def _other_spellings(folder: Folder) -> dict[str, str]:
    return {spelling(alias): name for name, aliases in read_aliases(folder).items() for alias in aliases}


@cache
def _hub_spellings() -> dict[str, str]:
    return {spelling(hub_id): name for name, ids in read_aliases("models_hub").items() for hub_id in ids}


def _all_spellings(folder: Folder) -> dict[str, str]:
    hub = _hub_spellings() if folder == "models" else {}
    return hub | _other_spellings(folder) | _own_spellings(folder)


def _did_you_mean(folder: Folder, name: str, ambiguous: list[str]) -> str:
    from difflib import get_close_matches
    spellings = _all_spellings(folder)
    close = [spellings[key] for key in get_close_matches(spelling(name), spellings, n=8, cutoff=0.6)]
    meant = list(dict.fromkeys(ambiguous + close))[:3]
    question = f"Did you mean {', '.join(meant)}? " if meant else ""
    return f"{question}`costmodel list {_LISTED_AS[folder]}` shows all."
