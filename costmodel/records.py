"""Records: one step that somebody performed, with what it was performed on; one JSON file each.

A record says what was run (a Run), what was seen (a StepReport), on which machine, every timed step, and how it ended: a run that dies
leaves one too, without a report. Source of the form: docs/report.md.
"""

import json
import secrets
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from costmodel.atomic import write_atomically
from costmodel.report import Provenance, StepReport, report_from_dict
from costmodel.spec import Run

SCHEMA = 1
Ending = Literal["ok", "oom", "timeout", "signal", "failed", "interrupted"]
EXIT_CODES: dict[Ending, int] = {"ok": 0, "oom": 3, "failed": 5, "signal": 5, "timeout": 6, "interrupted": 130}


class RecordError(ValueError):
    """A file that is no record; the message says which, and why."""


@dataclass(frozen=True, slots=True)
class Environment:
    """The machine of a record, as it named itself."""

    accelerator: str
    """Name of the device: the GPU's, or the CPU's model."""
    accelerators: int
    """Devices that this host has of it."""
    accelerator_bytes: int | None
    """Memory of one, where it has its own."""
    host: str
    machine: str
    """Operating system and architecture."""
    cores: int
    """Cores that the process may use."""
    memory_bytes: int | None
    """Memory of the host."""
    versions: dict[str, str]
    """costmodel, python, torch, and where there are any cuda, cudnn, nccl, driver."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How it ended."""

    kind: Ending = "ok"
    """oom: an allocation failed. timeout: no end in the time given. signal: a process was killed. failed: a rank raised an error.
    interrupted: somebody stopped it."""
    rank: int | None = None
    """The rank it happened to first, where that is known."""
    message: str = ""
    signal: str | None = None
    """The signal's name, such as SIGKILL."""
    tried_bytes: int | None = None
    """oom: the allocation that failed."""
    allocated_bytes: int | None = None
    """oom: what was allocated then."""
    reserved_bytes: int | None = None
    """oom: what the allocator held then."""

    @property
    def exit_code(self) -> int:
        """What a command that ended so exits with."""
        return EXIT_CODES[self.kind]


@dataclass(frozen=True, slots=True)
class Record:
    """A run that was performed."""

    run: Run
    provenance: Provenance
    """solo, run, dryrun or published; also where there is no report."""
    report: StepReport | None
    """What was seen; None where nothing was."""
    outcome: Outcome
    environment: Environment | None
    """None for published figures."""
    date: str
    """When it ended, UTC, ISO 8601."""
    source: str = ""
    """The command, or where it was published."""
    step_s: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """Raw samples by rank: the seconds of each timed step, in order."""
    assumed: dict[str, str] = field(default_factory=dict)
    """For each field that was not given: what was taken, and why."""

    def __post_init__(self) -> None:
        if self.report is not None and self.report.provenance != self.provenance:
            raise RecordError(f"the record says {self.provenance} and its report says {self.report.provenance}.")

    def to_dict(self) -> dict[str, Any]:
        """Plain data with stable keys (docs/report.md); `run` first, so that a record can be given back as a run file."""
        report = None if self.report is None else self.report.to_dict()
        environment = None if self.environment is None else asdict(self.environment)
        return {"schema": SCHEMA, "kind": "record", "run": self.run.model_dump(mode="json"), "provenance": self.provenance,
                "outcome": {**asdict(self.outcome), "exit_code": self.outcome.exit_code}, "report": report, "environment": environment,
                "date": self.date, "source": self.source, "step_s": {str(rank): list(s) for rank, s in self.step_s.items()}, "assumed": self.assumed}


def record_from_dict(data: Any) -> Record:
    """Read what `Record.to_dict` wrote. Raises RecordError."""
    from pydantic import TypeAdapter, ValidationError
    if not isinstance(data, dict) or data.get("kind") != "record":
        raise RecordError("it is not a record: a record is a JSON object whose kind is \"record\".")
    if data.get("schema") != SCHEMA:
        raise RecordError(f"its schema is {data.get('schema')}, and this version reads {SCHEMA}.")
    missing = [key for key in ("run", "provenance", "outcome", "report", "environment", "date") if key not in data]
    if missing:
        raise RecordError(f"it has no {missing[0]}.")
    part, kept = "", {k: v for k, v in data.items() if k not in ("schema", "kind")}
    try:
        part = "run."
        kept["run"] = Run.model_validate(data["run"])
        part = "report."
        kept["report"] = None if data["report"] is None else report_from_dict(data["report"])
        part = ""
        return TypeAdapter(Record).validate_python(kept)
    except ValidationError as error:
        first = error.errors()[0]
        where = part + ".".join(str(step) for step in first["loc"])
        raise RecordError(f"{where.rstrip('.')}: {first['msg']}.") from None
    except (AttributeError, TypeError) as error:
        raise RecordError(f"{part.rstrip('.')}: {error}.") from None


def read_record(path: Path) -> Record:
    """The record of one file. Raises RecordError with one line that names the file."""
    try:
        return record_from_dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise RecordError(f"{path}: there is no such file.") from None
    except OSError as error:
        raise RecordError(f"{path}: it cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError as error:
        raise RecordError(f"{path}: byte {error.start} is not UTF-8 text.") from None
    except json.JSONDecodeError as error:
        raise RecordError(f"{path}: not valid JSON: {error.msg} (line {error.lineno}, column {error.colno}).") from None
    except RecursionError:
        raise RecordError(f"{path}: it is nested too deeply for a record.") from None
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from None


def read_records(folder: Path) -> Iterator[tuple[Path, Record]]:
    """Every record of a folder and of the folders in it, in order of their names. Raises RecordError at the first broken one."""
    for path in sorted(folder.rglob("*.json")):
        yield path, read_record(path)


def unique_name(record: Record) -> str:
    """A file name that no other record has: when, what and how, and a random end."""
    run, when = record.run, "".join(c for c in record.date[:19] if c.isdigit() or c == "T")
    what = "".join(c if c.isalnum() or c in ".-" else "-" for c in run.model.name.lower())
    return f"{when}-{record.provenance}-{what}-{run.plan.world_size}x-{record.outcome.kind}-{secrets.token_hex(3)}.json"


def write_record(record: Record, where: Path) -> Path:
    """Write a record into a folder under a name of its own, or to the named .json file, atomically; its path. Raises OSError."""
    path = where / unique_name(record) if where.is_dir() or where.suffix.lower() != ".json" else where
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(record.to_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    return path
