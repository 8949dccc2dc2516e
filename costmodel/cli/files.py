"""Run files in (TOML, YAML, JSON), files of other programs too; results out."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from costmodel.atomic import write_atomically
from costmodel.cli.guard import InputError, shown
from costmodel.foreign.data import SUFFIXES

if TYPE_CHECKING:
    from costmodel.foreign.said import Foreign


def read_run_file(path: Path) -> dict[str, Any]:
    """The mapping a run file holds. A file that `predict --json` wrote gives its run back."""
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"{path}: a run file ends in .toml, .yaml or .json. Rename it to say which it is{_other_ways(path)}.")
    text = _text(path)
    try:
        data = _parse(path, text)
    except RecursionError:
        raise InputError(f"{path}: it is nested too deeply. A run is a few tables: model, cluster, plan, recipe.") from None
    if data is None:
        data = {}
    if not isinstance(data, dict):
        kind = "a list" if isinstance(data, list) else "text" if isinstance(data, str) else "one value"
        raise InputError(f"{path}: it holds {kind}, and a run is a table. "
                         "Write fields such as params, and the tables cluster, plan and recipe.")
    if "schema" in data and isinstance(data.get("run"), dict):
        data = dict(data["run"])
    return data


def _other_ways(path: Path) -> str:
    """What takes a file that is no run file."""
    if str(path) == "-":
        return "; only `costmodel oom --log -` reads standard input"
    return {".sh": "; `costmodel import` reads launch scripts", ".txt": "; `costmodel oom --log` reads messages",
            ".log": "; `costmodel oom --log` reads messages"}.get(path.suffix.lower(), "")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"{path}: there is no such file. {_nearby(path)}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start} is not UTF-8 text. Save it as UTF-8.") from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(f"{path}: it cannot be read ({why}). Give a readable .toml, .yaml or .json file.") from None


def _nearby(path: Path) -> str:
    import difflib
    try:
        names = [p.name for p in path.parent.iterdir() if p.suffix.lower() in SUFFIXES]
    except OSError:
        names = []
    close = difflib.get_close_matches(path.name, names, 1)
    if close:
        return f"Did you mean {path.parent / close[0]}?"
    return "Give the path of a .toml, .yaml or .json file, or flags alone." if path.suffix.lower() in SUFFIXES else "Check the path."


def _parse(path: Path, text: str) -> Any:
    from costmodel.foreign.data import SyntaxFault, parse

    def twice(key: str, line: int | None) -> None:
        raise InputError(f"{path}: {key} appears twice in one table{f' (again at line {line})' if line else ''}. Leave one out.")

    try:
        return parse(path.suffix.lower(), text, twice)
    except SyntaxFault as error:
        raise _broken(path, error.kind, error.problem, text) from None


def _broken(path: Path, kind: str, problem: str, text: str) -> InputError:
    """A syntax error, with the line it is on."""
    import re
    message = f"{path}: not valid {kind}: {problem}."
    found = re.search(r"line (\d+)", problem)
    lines = text.splitlines()
    if found and 1 <= int(found[1]) <= len(lines) and lines[int(found[1]) - 1].strip():
        line = lines[int(found[1]) - 1].strip()
        message += f" That line reads: {line if len(line) <= 60 else line[:57] + '...'}"
    return InputError(message)


def read_foreign_file(path: Path, given: Mapping[str, str], kind: str | None = None) -> "Foreign":
    """What a file says of a run; what prevents reading it is an InputError."""
    from costmodel.foreign.data import SyntaxFault
    from costmodel.foreign.detect import read_foreign
    from costmodel.spec import PlanError
    text = _text(path)
    try:
        return read_foreign(str(path), text, given, kind)
    except SyntaxFault as error:
        raise _broken(path, error.kind, error.problem, text) from None
    except RecursionError:
        raise InputError(f"{path}: it is nested too deeply.") from None
    except PlanError as error:
        where = "" if error.field == str(path) else f"{path}: "
        value = "" if error.value is None else f" = {shown(error.value)}"
        raise InputError(f"{where}{error.field}{value}: {error.rule} {error.fix}") from None


def model_of(path: Path) -> dict[str, Any]:
    """The model of a file, as a table of fields, for a run that is given by flags."""
    found = read_foreign_file(path, {})
    model = found.given().get("model")
    if not isinstance(model, dict) or found.params is None:
        why = ", ".join(found.missing) or f"a file of {found.program}"
        raise InputError(f"--model {path}: it does not say a whole model ({why}). `costmodel import` takes what it needs beside it.")
    if found.lost:
        raise InputError(f"--model {path}: no field of a run says {found.lost[0]}. `costmodel import` makes a run file without it.")
    return {"name": path.stem if path.stem != "config" else path.absolute().parent.name, **model}


def write_whole(path: Path, text: str) -> None:
    """Write what `-o` asks for, whole or not at all; what prevents it is an InputError."""
    if path.is_dir():
        raise InputError(f"-o {path}: it is a directory. Name a file in it, such as {path / 'prediction.json'}.")
    if not path.parent.is_dir():
        raise InputError(f"-o {path}: there is no directory {path.parent}. Create it first.")
    try:
        write_atomically(path, text)
    except OSError as error:
        raise InputError(f"-o {path}: it cannot be written ({error.strerror}). Choose another place.") from None
