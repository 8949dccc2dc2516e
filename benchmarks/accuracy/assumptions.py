"""The rules of assumptions.toml: what a record leaves unsaid, per source, as data."""

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

PUBLISHED = Path(__file__).resolve().parent.parent / "published"
RULES_FILE = PUBLISHED / "assumptions.toml"
OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "has": lambda stated, want: want in str(stated or ""),
    "lacks": lambda stated, want: want not in str(stated or ""),
    "missing": lambda stated, want: (stated is None) is want,
    "from": lambda stated, want: stated is not None and str(stated) >= want,
    "before": lambda stated, want: stated is not None and str(stated) < want,
    "above": lambda stated, want: stated is not None and stated > want}


def look_up(record: Mapping[str, Any], path: str) -> Any:
    """A record's value at a dotted path; None where it is absent."""
    value: Any = record
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


@dataclass(frozen=True, slots=True)
class Rule:
    """One assumption: a field of the run's input, its value (or the pattern that reads it), the reason, and when it applies."""

    field: str
    reason: str
    value: Any = None
    pattern: str = ""
    when: Mapping[str, Any] = dataclass_field(default_factory=dict)
    overrides: bool = False
    """Wins over what the reader takes from the record."""

    def applies(self, record: Mapping[str, Any]) -> bool:
        return applies(self.when, record)

    def found(self, record: Mapping[str, Any]) -> Any:
        """The assumed value for this record; None where the pattern finds nothing."""
        if not self.pattern:
            return self.value
        match = re.search(self.pattern, str(look_up(record, "recipe.other") or ""))
        return number(match[1]) if match else None


def number(text: str) -> Any:
    """Text as int or float where it is one."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def applies(when: Mapping[str, Any], record: Mapping[str, Any]) -> bool:
    """Whether every condition holds of what the record states."""
    for path, want in when.items():
        stated = look_up(record, path)
        if isinstance(want, Mapping):
            if not all(OPERATORS[operator](stated, value) for operator, value in want.items()):
                return False
        elif stated not in want if isinstance(want, list) else stated != want:
            return False
    return True


@dataclass(frozen=True, slots=True)
class Source:
    """A publisher: its name here, how its records' `source` begins, and its rules."""

    name: str
    records: tuple[str, ...] = ()
    assume: tuple[Rule, ...] = ()
    refuse: tuple[tuple[str, Mapping[str, Any]], ...] = ()


@dataclass(frozen=True, slots=True)
class Suspect:
    """Records that are doubtful themselves: patterns of ids, the figures in doubt, the reason."""

    ids: tuple[str, ...]
    kinds: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Rules:
    """The whole file."""

    words: Mapping[str, Mapping[str, Any]]
    general: Source
    sources: tuple[Source, ...]
    suspects: tuple[Suspect, ...]

    def source_of(self, record: Mapping[str, Any]) -> Source:
        """The publisher of a record; one that no rule knows has its own name and the general rules."""
        text = str(record.get("source") or "")
        for source in self.sources:
            if text.startswith(source.records):
                return source
        return Source(re.split(r"[ ,]", text)[0] or "unnamed")

    def suspicions(self, record_id: str) -> dict[str, str]:
        """What is in doubt of a record ("time", "memory"), with the reason."""
        return {kind: s.reason for s in self.suspects if any(fnmatchcase(record_id, p) for p in s.ids) for kind in s.kinds}


@cache
def load_rules(path: Path = RULES_FILE) -> Rules:
    """Read the rules; a condition on a measured value is an error."""
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    sources = tuple(_source(s["name"], s) for s in data.get("source", ()))
    suspects = tuple(Suspect(tuple(s["ids"]), tuple(s["kinds"]), s["reason"]) for s in data.get("suspect", ()))
    return Rules(data.get("words", {}), _source("every record", data), sources, suspects)


def _source(name: str, data: Mapping[str, Any]) -> Source:
    refuse = tuple((r["reason"], r["when"]) for r in data.get("refuse", ()))
    assume = tuple(Rule(**rule) for rule in data.get("assume", ()))
    for when in (*(w for _, w in refuse), *(rule.when for rule in assume)):
        for condition in when:
            if condition.split(".")[0] == "measured":
                raise ValueError(f"{name}: a rule depends on {condition}; a measured value decides nothing")
    return Source(name, tuple(data.get("records", ())), assume, refuse)
