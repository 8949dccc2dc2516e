"""How well a fitted profile predicts steps that the fit did not see, on this CPU machine with gloo.

    python -m benchmarks.cpu_study measure FOLDER    # probe, then every run five times, interleaved; half an hour on two quiet cores
    python -m benchmarks.cpu_study score FOLDER      # fit on the probe and the runs chosen for it, predict the others

The runs span widths, depths, sequence lengths, seven strategies, one and two ranks, and a factor of 30 or more in step time. Those with an odd number are
fitted, those with an even number are held out, and no shape is in both. Each repeat is timed between two timings of a reference kernel and divided by
them. The baseline is one throughput, FLOPs over seconds, of the fitted runs. Measure a quiet machine: nothing here undoes another process.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.evidence import Evidence, Point, step_evidence
from calibrate.fit import fit
from calibrate.probe.record import probe_evidence, probe_from_dict
from calibrate.profiles import fitted_profile
from calibrate.reading import slowest, twin_of
from costmodel import build_run, predict
from costmodel.catalog.profiles import load_profile
from costmodel.records import read_record
from costmodel.spec import PlanError, Run

REPEATS, STEPS, WARMUP = 5, 5, 2
STRATEGIES: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("single", 1, {}), ("ddp", 2, {"strategy": "ddp"}), ("zero1", 2, {"strategy": "zero1"}), ("zero2", 2, {"strategy": "zero2"}),
    ("fsdp", 2, {"strategy": "fsdp"}), ("tensor", 2, {"tp": 2}), ("pipeline", 2, {"pp": 2}))
SHAPES = ((128, 2, 128, 2), (160, 2, 128, 2), (192, 2, 256, 1), (256, 2, 128, 2), (320, 2, 128, 2), (384, 3, 128, 2), (448, 3, 256, 1), (512, 3, 128, 2),
          (576, 4, 128, 2), (640, 4, 128, 2), (704, 4, 128, 2), (768, 5, 128, 2))
"""(width, layers, sequence, micro-batch), small to large: odd places are fitted, even ones held out."""


def runs(gpu: str) -> Iterator[tuple[str, bool, Run]]:
    """(name, held out, run) of the study."""
    for place, (width, layers, seq_len, micro) in enumerate(SHAPES):
        for name, ranks, plan in STRATEGIES:
            model = {"name": f"study-{width}", "layers": layers, "hidden": width, "heads": width // 32, "ffn": 4 * width, "vocab": 1024,
                     "tied_embeddings": False}
            recipe = {"seq_len": seq_len, "micro_batch": micro, "precision": "fp32", "grad_accum": 4 if "pp" in plan else 1}
            try:
                yield f"{name}-{width}", place % 2 == 1, build_run(model=model, cluster={"gpu": gpu, "gpus": ranks}, plan=plan, recipe=recipe)
            except PlanError:
                continue


def reference_s() -> float:
    """Seconds of a matrix multiplication of 512 on one thread, the median of nine."""
    import torch
    torch.set_num_threads(1)
    a = torch.randn(512, 512)
    times = []
    for _ in range(9):
        start = time.perf_counter()
        torch.mm(a, a)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(folder: Path, gpu: str) -> None:
    """Write probe.json, and a record and a reference time for every repeat of every run."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "calibrate", "probe", "-o", str(folder / "probe.json")], check=True)
    chosen = list(runs(gpu))
    for repeat in range(REPEATS):
        for number, (name, _, run) in enumerate(chosen, 1):
            target = folder / f"{name}-{repeat}.json"
            if target.exists():
                continue
            given = folder / "run.json"
            given.write_text(json.dumps({"schema": 1, "run": run.model_dump(mode="json")}), encoding="utf-8")
            before = reference_s()
            done = subprocess.run([sys.executable, "-m", "execute", "run", str(given), "--steps", str(STEPS), "--warmup", str(WARMUP), "--device", "cpu",
                                   "--record", str(target)], capture_output=True, text=True)
            print(f"repeat {repeat + 1} of {REPEATS}, {number} of {len(chosen)}: {name}: exit {done.returncode}", file=sys.stderr)
            if done.returncode == 0:
                target.with_suffix(".reference").write_text(f"{(before + reference_s()) / 2:.9f}", encoding="utf-8")
    (folder / "run.json").unlink(missing_ok=True)


def measured(folder: Path, name: str, typical: float) -> float | None:
    """Median over repeats of the step's seconds, each divided by the reference beside it; None where no repeat ended well."""
    found = []
    for reference in sorted(folder.glob(f"{name}-[0-9].reference")):
        record = read_record(reference.with_suffix(".json"))
        seconds = slowest(record)
        if seconds:
            found.append(statistics.median(seconds) / float(reference.read_text(encoding="utf-8")) * typical)
    return statistics.median(found) if found else None


def score(folder: Path, gpu: str) -> dict[str, Any]:
    """Fit on the probe and the odd runs; errors, baseline and coverage of the even ones."""
    from calibrate.crossvalidation import hold_out
    from calibrate.report import SPLITS
    typical = statistics.median(float(p.read_text(encoding="utf-8")) for p in folder.glob("*.reference"))
    evidence: list[Evidence] = list(probe_evidence(probe_from_dict(json.loads((folder / "probe.json").read_text(encoding="utf-8")))))
    held: list[tuple[str, Run, float]] = []
    throughput = []
    for name, out, run in runs(gpu):
        seconds = measured(folder, name, typical)
        if seconds is None:
            continue
        if out:
            held.append((name, run, seconds))
            continue
        flops = predict(run, scaling=False).model_flops
        throughput.append(math.log(seconds / flops)) if flops else None
        point = Point(name, "steps", "time", seconds, 0.05, run.model.name, f"{run.cluster.gpus} ranks", twin_of(run))
        evidence.append(step_evidence(run, load_profile(run), (point,)))
    found = fit(evidence)
    profile = folder / "here.toml"
    profile.write_text(fitted_profile(found, {by: hold_out(found, by) for by in SPLITS}, "here", [], {}), encoding="utf-8")
    rows, errors, baseline, inside, widths = [], [], [], [], []
    for name, run, seconds in held:
        report = predict(run, str(profile), scaling=False, intervals=True)
        assert report.step_s and report.interval and report.model_flops
        low, high = report.interval["step_s"]
        errors.append(abs(report.step_s / seconds - 1))
        baseline.append(abs(math.exp(statistics.median(throughput)) * report.model_flops / seconds - 1))
        inside.append(low <= seconds <= high)
        widths.append((high - low) / 2 / report.step_s)
        rows.append({"run": name, "measured_s": seconds, "predicted_s": report.step_s, "low_s": low, "high_s": high})
    times = [row[2] for row in held]
    return {"held_out": len(held), "fitted": len(throughput), "mean_abs_error": float(np.mean(errors)), "constant_throughput_error": float(np.mean(baseline)),
            "covered": float(np.mean(inside)), "median_half_width": float(np.median(widths)), "time_spread": max(times) / min(times), "runs": rows}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_study", description="A fitted profile against steps that the fit did not see.")
    parser.add_argument("what", choices=("measure", "score"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpu", default="cpu_epyc_2core", help="this machine in the catalogue")
    arguments = parser.parse_args(argv)
    if arguments.what == "measure":
        measure(arguments.folder, arguments.gpu)
        return 0
    print(json.dumps(score(arguments.folder, arguments.gpu), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
