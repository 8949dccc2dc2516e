"""What every command that performs a step writes down of it, however it ends."""

import os
import signal
from datetime import UTC, datetime
from pathlib import Path

from costmodel.cli.guard import InputError
from costmodel.inputs import Resolved
from costmodel.records import Outcome, Record, write_record
from costmodel.report import Provenance, StepReport


def prepare_place(where: Path) -> None:
    """Refuse, before any work is done, a place where a record cannot be written: a folder, made if need be, or a .json file."""
    folder = where.parent if where.suffix.lower() == ".json" and not where.is_dir() else where
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".{os.getpid()}.probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(f"--record {where}: nothing can be written there ({error.strerror}). Choose another place.") from None


def make_record(resolved: Resolved, provenance: Provenance, outcome: Outcome, report: StepReport | None = None,
                step_s: dict[int, tuple[float, ...]] | None = None, source: str = "") -> Record:
    """A record of a run that ended now on this machine."""
    from execute.observe.environment import environment
    return Record(run=resolved.run, provenance=provenance, report=report, outcome=outcome, environment=environment(),
                  date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), source=source, step_s=step_s or {}, assumed=resolved.assumed)


def outcome_of(error: BaseException, rank: int | None = None) -> Outcome:
    """How a step ended that raised this."""
    from execute.device import out_of_memory
    if isinstance(error, KeyboardInterrupt):
        return Outcome("interrupted", rank, "interrupted", signal=signal.SIGINT.name)
    said = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return out_of_memory(error, rank) or Outcome("failed", rank, said)


def keep(record: Record, where: Path) -> Path:
    """Write a record; where that fails, say so as the user's input is wrong."""
    try:
        return write_record(record, where)
    except OSError as error:
        raise InputError(f"--record {where}: it cannot be written ({error.strerror}). Choose another place.") from None
