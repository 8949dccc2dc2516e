"""Published records as evidence for `calibrate.fit`: step time and reserved memory of every record that is read and predicted."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from benchmarks.accuracy.assumptions import Rules, look_up
from benchmarks.accuracy.reader import Refused, read
from benchmarks.accuracy.score import GIB, memory_figures
from benchmarks.accuracy.statistics import configuration
from calibrate.evidence import Point, StepEvidence, step_evidence
from costmodel.catalog.profiles import load_profile
from costmodel.records import Outcome, Record
from costmodel.report import RoleReport, StepReport, TimeReport
from costmodel.spec import PlanError, Run

NOISE = {"time": 0.1, "reserved": 0.05}
"""Stated scatter of a publisher's figures about the formulas, before the residuals say how much."""


def published_records(records: Iterable[Mapping[str, Any]], rules: Rules) -> Iterator[Record]:
    """Step times of published runs as records that `calibrate fit` reads; the same are left out as of the evidence."""
    for record in records:
        measured, name = record.get("measured") or {}, str(record.get("id"))
        if "time" in rules.suspicions(name) or look_up(measured, "other.launch_bound"):
            continue
        try:
            reading = read(record, rules)
        except (Refused, PlanError):
            continue
        step = step_of(reading.run, measured)
        if step:
            time = TimeReport(step, {}, {}, {}, {})
            report = StepReport("published", (RoleReport("slowest rank", reading.run.cluster.gpus, 0, None, time, None),), reading.run.cluster.gpus,
                                reading.run.tokens_per_step)
            yield Record(reading.run, "published", report, Outcome(), None, str(record.get("source_date") or ""), reading.source.name)


def step_of(run: Run, measured: Mapping[str, Any]) -> float | None:
    """Seconds of a step as published, or as they follow from tokens per second and GPU."""
    step, rate = measured.get("step_time_s"), measured.get("tokens_per_s_per_gpu")
    if step is None and rate:
        step = run.tokens_per_step / run.cluster.gpus / rate
    return None if step is None else float(step)


def published_evidence(records: Iterable[Mapping[str, Any]], rules: Rules, base: str | None = None) -> list[StepEvidence]:
    """One piece of evidence a record. Doubtful figures and tests bound by launches are left out; so is memory of a rank that is not the fullest."""
    out = []
    for record in records:
        name, measured = str(record.get("id")), record.get("measured") or {}
        suspect = rules.suspicions(name)
        try:
            run = read(record, rules).run
            common = {"source": rules.source_of(record).name, "model": run.model.name, "twin": configuration(run),
                      "cluster": f"{run.cluster.gpus} x {run.cluster.accelerator.name}"}
            points = []
            step = step_of(run, measured)
            if step and "time" not in suspect and not look_up(measured, "other.launch_bound"):
                points.append(Point(name, figure="time", measured=step, noise=NOISE["time"], **common))
            reserved = dict(memory_figures(measured)).get("reserved")
            last = str(look_up(measured, "other.mem_rank") or "").startswith("last")
            if reserved and "memory" not in suspect and not last and run.cluster.accelerator.kernel_table == "cuda":
                apart = {**common, "source": f"{common['source']}, memory"}
                points.append(Point(name, figure="reserved", measured=reserved * GIB, noise=NOISE["reserved"], **apart))
            if points:
                out.append(step_evidence(run, load_profile(run, base), points))
        except (Refused, PlanError):
            continue
    return out
