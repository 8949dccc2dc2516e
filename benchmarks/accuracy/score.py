"""One record predicted: its figures beside the measured ones."""

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.accuracy.assumptions import Rules, look_up
from benchmarks.accuracy.reader import Reading, Refused, plan_reason, read
from costmodel import predict
from costmodel.report import RoleReport, StepReport
from costmodel.spec import PlanError, Run

GIB = 1 << 30
MEMORY_KINDS = ("allocated", "active", "reserved", "nvidia-smi")
"""Kinds that are scored; "unknown" is not."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A predicted figure beside the measured one: step time in seconds ("time"), memory in GiB by its kind."""

    kind: str
    predicted: float
    measured: float


@dataclass(slots=True)
class Row:
    """What became of one record."""

    id: str
    publisher: str
    source: str
    quality: str | None
    refused: str | None = None
    measured: Mapping[str, Any] = field(default_factory=dict)
    run: Run | None = None
    pairs: list[Pair] = field(default_factory=list)
    oom_predicted: bool | None = None
    risky: bool | None = None
    launch_bound: bool = False
    """The publisher's flag: a tiny test whose time is that of the host."""
    suspect: dict[str, str] = field(default_factory=dict)
    assumed: list[tuple[str, Any, str]] = field(default_factory=list)
    breakdown: dict[str, float] = field(default_factory=dict)
    memory_parts: dict[str, float] = field(default_factory=dict)
    seconds_per_token: float | None = None
    """Measured GPU-seconds per token, which compares steps of different size."""
    predicted_per_token: float | None = None
    interval: tuple[float, float] | None = None
    """10% and 90% quantiles of the predicted step time, seconds."""

    def figure(self, kind: str) -> Pair | None:
        return next((pair for pair in self.pairs if pair.kind == kind), None)


def load_records(path: Path) -> Iterator[dict[str, Any]]:
    """Records of a .jsonl (or .jsonl.gz) file."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            if line.strip():
                yield json.loads(line)


def score_all(records: Iterable[Mapping[str, Any]], rules: Rules) -> list[Row]:
    return [score(record, rules) for record in records]


def score(record: Mapping[str, Any], rules: Rules) -> Row:
    """Read and predict one record; a record that cannot be is a row with its reason."""
    measured = record.get("measured") or {}
    row = Row(str(record.get("id")), rules.source_of(record).name, str(record.get("source") or ""), record.get("quality"), measured=measured,
              launch_bound=bool(look_up(measured, "other.launch_bound")), suspect=rules.suspicions(str(record.get("id"))))
    try:
        reading = read(record, rules)
        report = predict(reading.run, scaling=False)
    except Refused as refusal:
        row.refused = str(refusal)
    except PlanError as error:
        row.refused = plan_reason(error)
    except Exception as error:
        row.refused = f"failed: {type(error).__name__}: {error}"
    else:
        _fill(row, reading, report)
    return row


def _fill(row: Row, reading: Reading, report: StepReport) -> None:
    row.run, row.assumed = reading.run, reading.assumed
    row.oom_predicted, row.risky = report.verdict == "does not fit", report.verdict == "risky"
    row.interval = (report.interval or {}).get("step_s")
    measured, tokens, gpus = row.measured, reading.run.tokens_per_step, report.world_size
    step = measured.get("step_time_s")
    if step is None and measured.get("tokens_per_s_per_gpu"):
        step = tokens / gpus / measured["tokens_per_s_per_gpu"]
    slowest = max((role for role in report.roles if role.time), key=lambda role: role.time.step_s if role.time else 0.0, default=None)
    if slowest and slowest.time:
        row.breakdown, row.predicted_per_token = dict(slowest.time.breakdown), slowest.time.step_s * gpus / tokens
    if step and report.step_s:
        row.pairs.append(Pair("time", report.step_s, step))
        row.seconds_per_token = step * gpus / tokens
    role = measured_role(report, measured)
    if role and role.memory:
        row.memory_parts = {k: v / GIB for k, v in role.memory.allocated.by_category.items() if v}
        for kind, value in memory_figures(measured):
            predicted = memory_of(role, kind)
            if predicted is not None:
                row.pairs.append(Pair(kind, predicted, value))


def measured_role(report: StepReport, measured: Mapping[str, Any]) -> RoleReport | None:
    """The role of the rank that was measured: the last where the publisher says so, else the fullest."""
    roles = [role for role in report.roles if role.memory]
    if not roles:
        return None
    if str(look_up(measured, "other.mem_rank") or "").startswith("last"):
        return max(roles, key=lambda role: role.example_rank)
    return report.fullest


def memory_figures(measured: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """(kind, GiB) of every memory figure of a record that can be scored."""
    kind, peak = measured.get("mem_kind"), measured.get("peak_mem_gib")
    if kind in MEMORY_KINDS and peak:
        yield str(kind), peak
    other = measured.get("other") or {}
    for key, name in (("peak_active_gib", "active"), ("peak_reserved_gib", "reserved"), ("mem_allocated_after_step_gib", "after step")):
        if other.get(key) and kind != name:
            yield name, other[key]
    ranks = other.get("per_rank")
    if ranks and kind != "reserved":
        figures = ranks.values() if isinstance(ranks, Mapping) else ranks
        yield "reserved", max(figure["reserved_gib"] for figure in figures)


def memory_of(role: RoleReport, kind: str) -> float | None:
    """The predicted figure, in GiB, that a kind of measurement is compared with."""
    memory = role.memory
    assert memory is not None
    workspaces = memory.workspace_bytes or 0
    found = {"allocated": memory.allocated.total_bytes + workspaces, "active": memory.allocated.total_bytes + workspaces,
             "reserved": memory.reserved_bytes, "nvidia-smi": memory.device_bytes, "after step": sum(memory.states.values()) + workspaces}[kind]
    return None if found is None else found / GIB


def line(row: Row) -> dict[str, Any]:
    """A row as a line of --rows; low and high are the 10% and 90% quantiles of the predicted time."""
    time, kind = row.figure("time"), row.measured.get("mem_kind")
    memory = row.figure(str(kind)) if kind else None
    oom = row.measured.get("oom")
    return {
        "id": row.id, "source": row.source, "quality": row.quality, "refused": row.refused,
        "step_time_s": {"predicted": time.predicted if time else None, "measured": time.measured if time else row.measured.get("step_time_s"),
                        "low": row.interval[0] if row.interval else None, "high": row.interval[1] if row.interval else None},
        "memory_gib": {"predicted": memory.predicted if memory else None, "measured": row.measured.get("peak_mem_gib"), "mem_kind": kind},
        "oom": {"predicted": row.oom_predicted, "measured": oom}}
