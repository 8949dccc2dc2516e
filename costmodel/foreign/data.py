"""The text of a data file (TOML, YAML, JSON) as plain data, for our own files and those of other programs."""

from collections.abc import Callable
from typing import Any

SUFFIXES = (".toml", ".yaml", ".yml", ".json")
Twice = Callable[[str, int | None], None]
"""Told a key that appears twice in one table, and the line of the second where it is known: which of two is meant, a file cannot say."""


class SyntaxFault(ValueError):
    """The text is not of its kind: what is wrong, with the line and column where they are known."""

    def __init__(self, kind: str, problem: str) -> None:
        self.kind, self.problem = kind, problem
        super().__init__(f"not valid {kind}: {problem}")


def parse(suffix: str, text: str, twice: Twice) -> Any:
    """What a file with this suffix holds. Raises SyntaxFault, and RecursionError where it is nested too deeply."""
    if suffix == ".toml":
        import tomllib
        try:
            return tomllib.loads(text)
        except ValueError as error:
            raise SyntaxFault("TOML", f"{error}") from None
    return _json(text, twice) if suffix == ".json" else _yaml(text, twice)


def _json(text: str, twice: Twice) -> Any:
    import json

    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _check([(key, None) for key, _ in pairs], twice)
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=table)
    except json.JSONDecodeError as error:
        raise SyntaxFault("JSON", f"{error.msg} (at line {error.lineno}, column {error.colno})") from None
    except ValueError as error:
        raise SyntaxFault("JSON", str(error)) from None


def _yaml(text: str, twice: Twice) -> Any:
    import re

    import yaml

    class Loader(yaml.SafeLoader):
        """YAML 1.2's floats: 3e-4 is a number, not a word."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            _check([(f"{key.value}", key.start_mark.line + 1) for key, _ in node.value if isinstance(key, yaml.ScalarNode)], twice)
            return super().construct_mapping(node, deep)

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789"))
    try:
        return yaml.load(text, Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" (at line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise SyntaxFault("YAML", f"{error.problem or error.context}{where}") from None
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise SyntaxFault("YAML", " ".join(str(error).split())) from None


def _check(keys: list[tuple[str, int | None]], twice: Twice) -> None:
    """Tell each key, with its line, that an earlier one of the same table equals."""
    seen: set[str] = set()
    for key, line in keys:
        if key in seen:
            twice(key, line)
        seen.add(key)
