"""Published records as evidence for `calibrate.fit`: step time and reserved memory of every record that is read and predicted."""

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.accuracy.assumptions import Rules, look_up
from benchmarks.accuracy.reader import Refused, read
from benchmarks.accuracy.score import GIB, memory_figures
from benchmarks.accuracy.statistics import configuration
from calibrate.evidence import Point, StepEvidence, step_evidence
from costmodel.catalog.profiles import load_profile
from costmodel.spec import PlanError

NOISE = {"time": 0.1, "reserved": 0.05}
"""Stated scatter of a publisher's figures about the formulas, before the residuals say how much."""


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
            step = measured.get("step_time_s")
            if step is None and measured.get("tokens_per_s_per_gpu"):
                step = run.tokens_per_step / run.cluster.gpus / measured["tokens_per_s_per_gpu"]
            if step and "time" not in suspect and not look_up(measured, "other.launch_bound"):
                points.append(Point(name, figure="time", measured=float(step), noise=NOISE["time"], **common))
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
