"""What one leaves with: the run as a TOML file, and as a command line. Both give this very run back."""

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from costmodel.changes import as_input
from costmodel.cli.options import FLAGS
from costmodel.inputs import build_run
from costmodel.spec import PlanError, Run, Spec

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def plain_input(run: Run, profile: str | None = None) -> dict[str, Any]:
    """The shortest input of a run as plain tables, words and numbers; a shape that was asked for by its count is that count."""
    given = as_input(run)
    if isinstance(given["model"], Spec):
        count = run.model.name.removeprefix("llama-style-")
        if run.model.shape_rule and _same_model(run, count):
            given = {"params": count, **{key: value for key, value in given.items() if key != "model"}}
    out: dict[str, Any] = _plain(given)
    return {**out, "profile": profile} if profile else out


def _same_model(run: Run, count: str) -> bool:
    try:
        return build_run(params=count).model == run.model
    except PlanError:
        return False


def _plain(value: Any) -> Any:
    if isinstance(value, Spec):
        value = value.model_dump()
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, tuple | list):
        return [_plain(inner) for inner in value]
    return value


def as_toml(run: Run, profile: str | None = None) -> str:
    """A run file that `costmodel predict` reads."""
    return "\n".join([*_tables(plain_input(run, profile), "")]).strip() + "\n"


def _tables(table: Mapping[str, Any], path: str) -> Iterator[str]:
    inner = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    own = {key: value for key, value in table.items() if key not in inner}
    if path and (own or not inner):
        yield f"\n[{path}]"
    yield from (f"{_key(key)} = {toml(value)}" for key, value in own.items())
    for key, value in inner.items():
        yield from _tables(value, f"{path}.{_key(key)}" if path else _key(key))


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else toml(key)


def toml(value: Any) -> str:
    """A value in TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = "".join(f"\\u{ord(c):04x}" if ord(c) < 32 or c == "\x7f" else f"\\{c}" if c in '"\\' else c for c in value)
        return f'"{escaped}"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml(inner) for inner in value)}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {toml(inner)}" for key, inner in value.items()) + "}"
    return repr(value)


def command_line(run: Run, profile: str | None = None) -> str:
    """The command that predicts this run."""
    flags = {flag.field: flag for flag in FLAGS}
    words = ["costmodel", "predict"]
    given = plain_input(run, profile)
    if "accelerator" in given["cluster"]:  # a cluster of one's own goes whole: its fields follow from nothing
        words += ["--set", f"cluster={toml(given.pop('cluster'))}"]
    for path, value in _paths(given, ""):
        flag = flags.get(path)
        if flag is None or isinstance(value, list):
            words += ["--set", f"{path}={value if isinstance(value, str) and _BARE.fullmatch(value) and not _number(value) else toml(value)}"]
        elif flag.kind == "switch":
            words.append(flag.name if value else f"--no-{flag.name[2:]}")
        else:
            words += [flag.name, str(value)]
    return shlex.join(words)


def _number(text: str) -> bool:
    from costmodel.cli.options import toml_scalar
    return bool(toml_scalar(text) != text)


def _paths(table: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        name = f"{path}.{key}" if path else key
        if isinstance(value, Mapping):
            yield from _paths(value, name)
        else:
            yield name, value
