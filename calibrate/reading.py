"""Files of measurements into evidence: records that execute wrote (.json, folders of them, .jsonl with one a line) and probes."""

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from calibrate.evidence import Evidence, Point, step_evidence
from calibrate.probe.record import ProbeError, probe_evidence, probe_from_dict
from costmodel.catalog.machines import Machine
from costmodel.catalog.profiles import load_profile
from costmodel.records import Environment, Record, RecordError, record_from_dict
from costmodel.spec import PlanError, Run

LEAST_NOISE = 0.05
"""What the formulas are known to miss even where repeats agree: the stated noise of a step's time before residuals speak."""


class ReadingError(ValueError):
    """Files that hold nothing to fit; the message says which, and why."""


@dataclass(slots=True)
class Read:
    """What files held."""

    evidence: list[Evidence] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    """(name, reason) of what could not be used."""
    versions: dict[str, str] = field(default_factory=dict)
    dates: list[str] = field(default_factory=list)
    machines: list[Machine] = field(default_factory=list)
    """Those that named themselves."""


def read_files(paths: Sequence[Path], base: str | None = None) -> Read:
    """Evidence of files and folders, priced on the base profile. Raises ReadingError at a file that is neither record nor probe."""
    read = Read()
    for path in paths:
        for name, data in _documents(path):
            try:
                if isinstance(data, dict) and data.get("kind") == "probe":
                    probe = probe_from_dict(data)
                    read.evidence += probe_evidence(probe, base)
                    read.versions |= probe.environment.versions
                    read.dates.append(probe.date)
                    read.machines.append(machine_of(probe.environment, probe.cluster.accelerator.name, probe.date))
                else:
                    _take(read, name, record_from_dict(data), base)
            except (RecordError, ProbeError) as error:
                raise ReadingError(f"{name}: {error}") from None
    if not read.evidence:
        why = f" {len(read.skipped)} were left out, the first because {read.skipped[0][1]}." if read.skipped else ""
        raise ReadingError(f"{', '.join(map(str, paths))}: no measurement to fit.{why} Give records of `execute run` or of `calibrate probe`.")
    return read


def _documents(path: Path) -> Iterator[tuple[str, Any]]:
    """(name, JSON) of every document of a path."""
    if path.is_dir():
        files = sorted(path.rglob("*.json"))
        if not files:
            raise ReadingError(f"{path}: there is no .json file in this folder.")
    elif path.is_file():
        files = [path]
    else:
        raise ReadingError(f"{path}: there is no such file.")
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
            if file.suffix.lower() == ".jsonl":
                yield from ((f"{file}:{i}", json.loads(line)) for i, line in enumerate(text.splitlines(), 1) if line.strip())
            else:
                yield str(file), json.loads(text)
        except UnicodeDecodeError as error:
            raise ReadingError(f"{file}: byte {error.start} is not UTF-8 text.") from None
        except json.JSONDecodeError as error:
            raise ReadingError(f"{file}: not valid JSON: {error.msg} (line {error.lineno}).") from None


def _take(read: Read, name: str, record: Record, base: str | None) -> None:
    if record.outcome.kind != "ok" or record.report is None:
        read.skipped.append((name, f"it ended with {record.outcome.kind}"))
        return
    if record.provenance not in ("solo", "run", "published"):
        read.skipped.append((name, f"a {record.provenance} measures no time"))
        return
    try:
        profile = load_profile(record.run, base)
        points = tuple(record_points(name, record))
        if not points:
            read.skipped.append((name, "it holds neither a time nor reserved memory"))
            return
        read.evidence.append(step_evidence(record.run, profile, points))
    except PlanError as error:
        read.skipped.append((name, f"it is not predicted ({error.field}: {error.rule})"))
        return
    read.dates.append(record.date)
    if record.environment is not None:
        read.versions |= record.environment.versions
        read.machines.append(machine_of(record.environment, record.run.cluster.accelerator.name, record.date))


def machine_of(seen: Environment, accelerator: str, date: str) -> Machine:
    """A measured machine as a profile names it; `accelerator` is what the run took it for."""
    return Machine(seen.host, seen.accelerator, accelerator, seen.versions.get("torch", ""), date[:10])


def record_points(name: str, record: Record) -> Iterator[Point]:
    """Time and reserved memory of a record; time is the median over steps of the slowest rank's. A rank that stood for several alone
    measured its computation, not the job's step: of it only the memory is taken."""
    assert record.report is not None
    run = record.run
    source = f"{record.provenance} on {record.environment.host}" if record.environment else record.source or record.provenance
    common = {"source": source, "model": run.model.name, "cluster": f"{run.cluster.gpus} x {run.cluster.accelerator.name}", "twin": twin_of(run),
              "setting": f"{source} on {run.cluster.accelerator.name}"}
    alone = record.provenance == "solo" and run.plan.world_size > 1
    seconds = slowest(record)
    if seconds and not alone:
        yield Point(name, figure="time", measured=statistics.median(seconds), noise=math.hypot(LEAST_NOISE, repeat_noise(seconds)), **common)
    reserved = [role.memory.reserved_bytes for role in record.report.roles if role.memory and role.memory.reserved_bytes]
    if reserved:
        yield Point(name, figure="reserved", measured=float(max(reserved)), noise=LEAST_NOISE, **common)


def slowest(record: Record) -> list[float]:
    """Seconds of every timed step, of the rank that took longest."""
    if record.step_s:
        return [max(s for s in step if s is not None) for step in zip_longest(*record.step_s.values())]
    step = record.report.step_s if record.report else None
    return [step] if step else []


def repeat_noise(seconds: Sequence[float]) -> float:
    """Standard error of the median's logarithm: 1.2533 times the scatter over the root of the count."""
    if len(seconds) < 2:
        return 0.1
    logs = [math.log(s) for s in seconds]
    return 1.2533 * statistics.stdev(logs) / math.sqrt(len(logs))


def twin_of(run: Run) -> str:
    """A key that records of one configuration share."""
    return json.dumps(run.model_dump(mode="json"), sort_keys=True)


