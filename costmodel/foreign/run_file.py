"""A run file (TOML) of what another program's files say, with where each field was read."""

from collections.abc import Mapping
from typing import Any

from costmodel.foreign.said import Foreign

TABLES = ("model", "cluster", "plan", "recipe")


def text_of(found: Foreign, files: list[str]) -> str:
    """The run file; what was decided, lost and left unread stands in comments above it."""
    lines = [f"# Read from {', '.join(files)} ({found.program})."]
    if params := found.params:
        lines.append(f"# The model has {params:,} parameters.")
    for title, items in (("Note", found.notes), ("NO FIELD FOR", found.lost)):
        for item in items:
            lines += _wrapped(f"# {title}: ", f"{item}.".split())
    lines += [f"# MISSING: {field} ({why})." for field, why in found.missing.items()]
    if found.unread:
        lines += _wrapped("# Not read: ", [f"{word}," for word in found.unread[:-1]] + [f"{found.unread[-1]}."])
    given = found.given()
    if isinstance(given.get("model"), str):
        lines += ["", _line("model", given.pop("model"), found.fields["model"].source)]
    for table in TABLES:
        fields = given.get(table)
        if isinstance(fields, Mapping):
            lines += ["", f"[{table}]"]
            lines += [_line(name, value, found.fields[f"{table}.{name}"].source) for name, value in fields.items()]
    return "\n".join(lines) + "\n"


def _line(name: str, value: Any, source: str) -> str:
    return f"{f'{name} = {toml_value(value)}':<40}  # {source}"


def toml_value(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        import json
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {toml_value(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return str(value)


def _wrapped(start: str, words: list[str], width: int = 110) -> list[str]:
    """Words as comment lines."""
    lines, line = [], start
    for word in words:
        if len(line) + len(word) > width and line.strip("# "):
            lines.append(line.rstrip())
            line = "#   "
        line += f"{word} "
    return [*lines, line.rstrip()]
