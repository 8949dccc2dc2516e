"""The catalogue's files: one small TOML file per entry, read when it is asked for."""

import os
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, Literal

Folder = Literal["models", "accelerators", "nodes"]
DATA = Path(__file__).parent / "data"


@cache
def entry_names(folder: Folder) -> tuple[str, ...]:
    """Names of a folder's entries, in alphabetical order."""
    return tuple(sorted(file.removesuffix(".toml") for file in os.listdir(DATA / folder) if file.endswith(".toml")))


def read_entry(folder: Folder, name: str) -> dict[str, Any]:
    """One entry as its file states it; `name` is one of `entry_names`."""
    return tomllib.loads((DATA / folder / f"{name}.toml").read_text(encoding="utf-8"))


@cache
def read_aliases(file: str) -> dict[str, list[str]]:
    """Other names by entry name: `models`, `models_hub`, `accelerators` or `nodes`."""
    aliases: dict[str, list[str]] = tomllib.loads((DATA / "aliases" / f"{file}.toml").read_text(encoding="utf-8"))
    return aliases
