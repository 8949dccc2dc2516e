"""The words of the commands of a launch script, its variables filled in.

Not a shell: assignments, arrays, `${NAME:-default}`, `$((arithmetic))` and here-documents are followed from top to bottom; what stands inside if, for, while
and case is taken only where it gives a variable that nothing else gives; nothing is executed. SLURM's variables follow from its #SBATCH lines.
"""

import ast
import operator
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import NamedTuple

Value = str | list[str]
_NAME = r"[A-Za-z_]\w*"
_ASSIGN = re.compile(rf"^(?:export\s+|local\s+|readonly\s+|declare\s+(?:-\w+\s+)*)?({_NAME})(\+?=)(.*)$", re.S)
_OPENS, _CLOSES = ("if", "for", "while", "until", "case"), ("fi", "done", "esac")
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv, ast.FloorDiv: operator.floordiv,
              ast.Mod: operator.mod}


class Script(NamedTuple):
    """What a script says."""

    commands: list[list[str]]
    """Words of each command, in order."""
    variables: dict[str, Value]
    documents: dict[str, str]
    """Text of here-documents, by the file they are written to (empty where the script does not say)."""
    unknown: list[str]
    """Variables that were used and that nothing gives."""


def read(text: str, given: Mapping[str, str]) -> Script:
    """The commands of a script; `given` are variables and arguments ("1") from outside, which win over the script's own defaults."""
    variables: dict[str, Value] = {**_slurm(text), **given}
    fixed = set(given)
    maybe: dict[str, Value] = {}
    unknown: list[str] = []
    commands: list[list[str]] = []
    documents: dict[str, str] = {}
    depth = 0
    for line, document in _statements(text):
        first = line.split(None, 1)[0].rstrip(";")
        if first in _OPENS and not re.search(r";\s*(?:fi|done|esac)\s*$", line):
            depth += 1
            continue
        if first in _CLOSES:
            depth = max(0, depth - 1)
            continue
        if document is not None:
            target = re.search(r">\s*(\S+)\s*$", line.split("<<")[0]) or re.search(r"<<-?\s*\S+\s*>\s*(\S+)", line)
            documents[_filled(target[1], variables, unknown) if target else ""] = _filled(document, variables, unknown)
            continue
        found = _ASSIGN.match(line)
        if found:
            name, sign, right = found.groups()
            value = _value(right.strip(), variables, unknown)
            into = maybe if depth else variables
            if name in fixed:
                continue
            into[name] = value if sign == "=" else _joined(into.get(name, variables.get(name)), value)
            if not depth and isinstance(value, str) and " --" in value:
                commands.append(_words(value))
            continue
        commands.append(_words(_filled(line, {**maybe, **variables}, unknown)))
    return Script(commands, {**maybe, **variables}, documents, [name for name in dict.fromkeys(unknown) if name not in variables and name not in maybe])


def _slurm(text: str) -> dict[str, Value]:
    """Variables that SLURM sets from a script's #SBATCH lines."""
    out: dict[str, Value] = {}
    for option, value in re.findall(r"^#SBATCH\s+(--?[\w-]+)[=\s]+([^\s#]+)", text, re.M):
        if option in ("--nodes", "-N"):
            out["SLURM_NNODES"] = out["SLURM_JOB_NUM_NODES"] = value
        elif option == "--ntasks-per-node":
            out["SLURM_NTASKS_PER_NODE"] = value
        elif option in ("--gres", "--gpus-per-node", "--gpus-per-task") and (count := re.search(r"(\d+)$", value)):
            out["SLURM_GPUS_ON_NODE"] = count[1]
    return out


def _statements(text: str) -> Iterator[tuple[str, str | None]]:
    """Lines with their continuations, comments left out; a here-document's text goes with the line that opens it."""
    lines = iter(text.replace("\\\r\n", "\\\n").splitlines())
    held = ""
    for raw in lines:
        line = f"{held} {raw}" if held else raw
        bare = _without_comment(raw).rstrip()
        if bare.endswith("\\"):
            held = f"{held} {bare[:-1].rstrip()}" if held else bare[:-1].rstrip()
            continue
        line = f"{held} {bare}" if held else bare
        while _open(line):
            more = next(lines, None)
            if more is None:
                break
            line = f"{line}\n{_without_comment(more).rstrip().removesuffix(chr(92))}"
        held = ""
        line = line.strip()
        if not line:
            continue
        here = re.search(r"<<-?\s*(['\"]?)(\w+)\1", line)
        if here and "<<<" not in line:
            body: list[str] = []
            for inside in lines:
                if inside.strip() == here[2]:
                    break
                body.append(inside)
            yield line, "\n".join(body)
        else:
            yield line, None
    if held.strip():
        yield held.strip(), None


def _without_comment(line: str) -> str:
    """A line without what follows a # at the start of a word, outside quotes."""
    quote = ""
    for i, c in enumerate(line):
        if quote:
            quote = "" if c == quote and line[i - 1] != "\\" else quote
        elif c in "'\"":
            quote = c
        elif c == "#" and (i == 0 or line[i - 1] in " \t("):
            return line[:i]
    return line


def _open(line: str) -> bool:
    """Whether a quote or the parenthesis of an array is still open."""
    quote, depth = "", 0
    array = re.match(rf"^(?:export\s+|local\s+|declare\s+(?:-\w+\s+)*)?{_NAME}\+?=\(", line.lstrip()) is not None
    for i, c in enumerate(line):
        if quote:
            quote = "" if c == quote and line[i - 1] != "\\" else quote
        elif c in "'\"" and (i == 0 or line[i - 1] != "\\"):
            quote = c
        elif c in "()":
            depth += 1 if c == "(" else -1
    return bool(quote) or array and depth > 0


def _value(right: str, variables: Mapping[str, Value], unknown: list[str]) -> Value:
    """The right side of an assignment."""
    if right.startswith("(") and right.endswith(")"):
        inside = "\n".join(_without_comment(line) for line in right[1:-1].splitlines())
        return _words(_filled(inside, variables, unknown))
    filled = _filled(right, variables, unknown)
    if filled[:1] in "'\"" and filled[:1] and filled.rstrip(";")[-1:] == filled[:1]:
        return filled.rstrip(";")[1:-1].strip()
    words = _words(filled)
    return words[0].rstrip(";") if words else ""


def _joined(before: Value | None, more: Value) -> Value:
    if isinstance(more, list):
        return [*(before if isinstance(before, list) else [before] if before else []), *more]
    return f"{before if isinstance(before, str) else ' '.join(before or [])}{more}"


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.replace('"', " ").replace("'", " ").split()


def _filled(text: str, variables: Mapping[str, Value], unknown: list[str]) -> str:
    """The text with its variables; inside single quotes it stays, and what a command would print is left empty."""
    out, i, quoted = [], 0, False
    while i < len(text):
        c = text[i]
        if c == "\\" and i + 1 < len(text):
            out.append(text[i + 1] if text[i + 1] == "$" else text[i:i + 2])
            i += 2
        elif c == '"':
            quoted = not quoted
            out.append(c)
            i += 1
        elif c == "'" and not quoted and (end := text.find("'", i + 1)) > 0:
            out.append(text[i:end + 1])
            i = end + 1
        elif c == "`":
            i = (text.find("`", i + 1) + 1) or len(text)
        elif c == "$":
            piece, i = _variable(text, i, variables, unknown)
            out.append(piece)
        else:
            out.append(c)
            i += 1
    return "".join(out)


def _variable(text: str, at: int, variables: Mapping[str, Value], unknown: list[str]) -> tuple[str, int]:
    """What stands for the variable at `at`, and where the text goes on."""
    if text.startswith("$((", at) and (end := text.find("))", at)) > 0:
        return str(_arithmetic(text[at + 3:end], variables, unknown)), end + 2
    if text.startswith("$(", at):
        depth, i = 0, at + 1
        while i < len(text):
            depth += (text[i] == "(") - (text[i] == ")")
            i += 1
            if not depth:
                break
        return "", i
    found = re.compile(rf"\$\{{({_NAME}|\d+)(\[[@*]\])?(?:(:?[-=])([^}}]*))?[^}}]*\}}|\$({_NAME}|\d)").match(text, at)
    if not found:
        return "$", at + 1
    name = found[1] or found[5]
    value = variables.get(name)
    if value is None or value == "":
        if found[3] is not None:
            return _filled(found[4].strip("\"'"), variables, unknown), found.end()
        unknown.append(name)
        return "", found.end()
    return " ".join(map(shlex.quote, value)) if isinstance(value, list) else value, found.end()


def _arithmetic(text: str, variables: Mapping[str, Value], unknown: list[str]) -> int | str:
    """A whole number; empty where it is not known."""
    filled = re.sub(_NAME, lambda name: str(variables.get(name[0], name[0])), _filled(text, variables, unknown))

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return int(_OPERATORS[type(node.op)](value(node.left), value(node.right)))
        raise ValueError

    try:
        return value(ast.parse(filled.strip(), mode="eval").body)
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError):
        return ""
