"""Fit on the probe and the odd runs, predict the even ones.

Each repeat is divided by the reference kernel beside it. The baseline is one throughput, FLOPs over seconds, of the fitted runs.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from benchmarks.cpu_study.measure import REPEATS, WORLDS, file_of
from benchmarks.cpu_study.plan import Case, cases
from calibrate.crossvalidation import hold_out
from calibrate.evidence import Evidence, Point, step_evidence
from calibrate.fit import Fit, fit
from calibrate.probe.record import probe_evidence, probe_from_dict
from calibrate.profiles import fitted_profile
from calibrate.reading import LEAST_NOISE, twin_of
from calibrate.report import SPLITS
from costmodel import predict
from costmodel.catalog.profiles import load_profile


class Measured(NamedTuple):
    """One run: its median step over the repeats, and how far the repeats were apart."""

    case: Case
    seconds: float
    noise: float
    """Standard error of the median's logarithm."""


def score(folder: Path, gpu: str) -> dict[str, Any]:
    """Write here.toml, the profile fitted; errors, baseline and coverage of the runs held out."""
    measured = measurements(folder, gpu)
    fitted = [m for m in measured if not m.case.held_out]
    evidence: list[Evidence] = list(probe_evidence(probe_from_dict(json.loads((folder / "probe.json").read_text(encoding="utf-8")))))
    evidence += [step_evidence(m.case.run, load_profile(m.case.run), (_point(m),)) for m in fitted]
    found = fit(evidence)
    profile = folder / "here.toml"
    profile.write_text(_profile(found), encoding="utf-8")
    throughput = median(math.log(m.seconds / _flops(m.case)) for m in fitted)
    rows = [{**_row(m, str(profile)), "constant_throughput_s": math.exp(throughput) * _flops(m.case), "before_s": _row(m, None)["predicted_s"]}
            for m in measured if m.case.held_out]
    return {"fitted": len(fitted), "held_out": len(rows), "time_spread": max(r["measured_s"] for r in rows) / min(r["measured_s"] for r in rows),
            "mean_abs_error": _error(rows, "predicted_s"), "mean_abs_error_before": _error(rows, "before_s"),
            "constant_throughput_error": _error(rows, "constant_throughput_s"),
            "by_strategy": {name: _error([r for r in rows if r["run"].startswith(f"{name}-")], "predicted_s")
                            for name in dict.fromkeys(r["run"].partition("-")[0] for r in rows)},
            "covered": fmean(r["low_s"] <= r["measured_s"] <= r["high_s"] for r in rows),
            "median_half_width": median((r["high_s"] - r["low_s"]) / 2 / r["predicted_s"] for r in rows), "runs": rows}


def measurements(folder: Path, gpu: str) -> list[Measured]:
    """Every run that was measured."""
    files = [json.loads((folder / file_of(repeat, world)).read_text(encoding="utf-8")) for repeat in range(REPEATS) for world in WORLDS
             if (folder / file_of(repeat, world)).exists()]
    typical = median(s for file in files for run in file["runs"] for s in run["reference_s"])
    logs: dict[str, list[float]] = {}
    for file in files:
        for run in file["runs"]:
            slowest = [max(step) for step in zip(*run["step_s"], strict=True)]
            logs.setdefault(run["name"], []).append(math.log(median(slowest) / fmean(run["reference_s"]) * typical))
    return [Measured(case, math.exp(median(logs[case.name])), _standard_error(logs[case.name])) for case in cases(gpu) if case.name in logs]


def _standard_error(logs: Sequence[float]) -> float:
    """Of a median: 1.2533 times the deviation over the root of the count."""
    centre = fmean(logs)
    return 1.2533 * math.sqrt(sum((x - centre) ** 2 for x in logs) / max(len(logs) - 1, 1) / len(logs))


def _point(m: Measured) -> Point:
    run = m.case.run
    return Point(m.case.name, "steps", "time", m.seconds, math.hypot(LEAST_NOISE, m.noise), run.model.name, f"{run.cluster.gpus} ranks", twin_of(run))


def _profile(found: Fit) -> str:
    return fitted_profile(found, {by: hold_out(found, by) for by in SPLITS}, "here", [], {})


def _flops(case: Case) -> float:
    flops = predict(case.run, scaling=False).model_flops
    assert flops
    return flops


def _row(m: Measured, profile: str | None) -> dict[str, Any]:
    report = predict(m.case.run, profile, scaling=False, intervals=True)
    assert report.step_s and report.interval
    low, high = report.interval["step_s"]
    return {"run": m.case.name, "measured_s": m.seconds, "standard_error": m.noise, "predicted_s": report.step_s, "low_s": low, "high_s": high}


def _error(rows: Sequence[dict[str, Any]], key: str) -> float:
    return fmean(abs(row[key] / row["measured_s"] - 1) for row in rows)
