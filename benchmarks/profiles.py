"""Shipped profiles from published measurements: the constants that kernel tables and training runs determine.

    python -m benchmarks.profiles            # fit, and say what would change (some minutes)
    python -m benchmarks.profiles --write    # and write costmodel/catalog/data/profiles and published/fitted.json

Two fits, the second on the constants of the first: attention rates from tables of kernels alone; then sustained arithmetic, host times, tensor
parallelism's factors and a mixture's waits from training runs. The prior of every constant that may change is in published/priors.toml, as it was set by hand
from the sources named there, so the same measurements give the same files. What small matrices cost and the curves of links were set by hand on
the very tables: a fit gains under a point of mean error on them, and loses single points and other cards, so they are not fitted, only judged.

A constant is taken over only where it earns it: by place and kind (an accelerator's attention, a link), the error of figures left out of the
fit (one configuration at a time for tables, one model at a time for training runs) must fall. Where it does not, the prior stays. Fallback
profiles (those that say `guess`) are not fitted.
"""

import argparse
import json
import math
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accuracy.assumptions import PUBLISHED, load_rules
from benchmarks.accuracy.evidence import published_evidence
from benchmarks.accuracy.score import load_records
from benchmarks.kernels import kernel_evidence
from calibrate.crossvalidation import By, Held, by_source, coverage, error_of, hold_out
from calibrate.evidence import Evidence, Point
from calibrate.fit import Fit, Model, candidates, fit_model
from calibrate.profiles import determined_constants, inline, profile_text, rounded, time_scatter
from calibrate.report import SPLITS, percent, whole_scatter
from costmodel.catalog.profiles import DATA, Constant, file_constants

PRIORS = PUBLISHED / "priors.toml"
FITTED = PUBLISHED / "fitted.json"
DATE = "2026-11"
"""Of the collection of published measurements."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A fit: which constants may move, and what must be left out to judge them."""

    name: str
    keys: tuple[str, ...]
    """Beginnings of keys."""
    rooms: tuple[str, ...]
    by: By
    apart: float
    """Deviation of one source's figures from another's that no constant has."""
    also: tuple[tuple[str, str], ...] = ()
    """(place, key) of constants beside those."""

    def moves(self, place: str, key: str) -> bool:
        """Whether a constant may move."""
        return (key.startswith(self.keys) and place.startswith(self.rooms)) or (place, key) in self.also


TABLES = Stage("tables of kernels", ("attention.",), ("hardware.",), "twin", 0.0)
RUNS = Stage("training runs", ("matmul.bf16.peak_share", "matmul.fp16.peak_share", "matmul.unaligned_batched", "host.eager.", "host.collective_s",
                               "step.fixed_s", "overlap.contention", "tp.eager_factor", "tp.compile_factor", "jitter.", "moe."),
             ("hardware.", "software."), "model", 0.05,
             also=(("hardware.b200_sxm", "attention.cudnn.share"),))  # a table of this kernel exists for GB200 alone, whose power limit is higher


def stage_fit(stage: Stage, evidence: Sequence[Evidence], say: Callable[[str], None]) -> tuple[Fit, dict[By, Held]]:
    """(fit, what it predicts of figures left out). Families that earn nothing are held, and the rest is fitted again."""
    measured = [item for item in evidence if not item.profile.guess]
    model = Model(measured, candidates(measured, stage.moves), stage.apart)
    refused: frozenset[str] = frozenset()
    while True:
        found = fit_model(model, held=refused)
        left = hold_out(found, stage.by)
        worse = {family for family, (before, after) in by_family(found, left).items() if after >= before}
        say(f"{stage.name}: {len(found.determined)} constants determined; no gain for {', '.join(sorted(worse)) or 'none'}")
        if not worse:
            return found, {stage.by: left}
        refused |= worse


def by_family(found: Fit, left: Held) -> dict[str, tuple[float, float]]:
    """Per family with a determined constant: mean error of the figures that one of them moves, before the fit and left out of it."""
    out = {}
    columns: dict[str, list[int]] = defaultdict(list)
    for j in found.free:
        columns[found.model.parameters[j].family].append(j)
    for family, own in columns.items():
        moved = (np.abs(found.jacobian[:, own]).max(axis=1) > LEAST_EFFECT) & np.isfinite(left.residuals)
        before, after = error_of(found.before[moved]), error_of(left.residuals[moved])
        if before and after:
            out[family] = before.mean_abs, after.mean_abs
    return out


LEAST_EFFECT = 0.05
"""d log(figure) / d log(constant) from which a figure counts for a constant."""


def rewritten(text: str, table: str, name: str, constant: Constant) -> str:
    """A shipped file with one constant's line replaced."""
    lines, inside = text.splitlines(), False
    for i, line in enumerate(lines):
        if line.startswith("["):
            inside = line.strip() == f"[{table}]"
        elif inside and re.match(rf"{re.escape(name)} *= *\{{", line):
            lines[i] = f"{name} = {inline(constant)}"
            return "\n".join(lines) + "\n"
    raise ValueError(f"no {name} in [{table}]")


def write_shipped(constants: Iterable[tuple[str, Constant]]) -> list[Path]:
    """Write constants into the files of their places."""
    written = []
    for key, constant in constants:
        path = DATA / (constant.place.replace(".", "/", 1) + ".toml")
        table, _, name = key.rpartition(".")
        path.write_text(rewritten(path.read_text(encoding="utf-8"), table, name, constant), encoding="utf-8")
        written.append(path)
    return written


def shipped_constants(found: Fit) -> list[tuple[str, Constant]]:
    """What a fit gives to the shipped files: determined constants, each with the sources that say most of it, and as sure as another machine of
    the kind allows."""
    return [(key, c._replace(log_sd=rounded(math.hypot(c.log_sd, MACHINES), 2), source=f"{c.source}; prior {prior(key, c.place)}"))
            for key, c in determined_constants(found, date=DATE, versions="")]


MACHINES = 0.05
"""Deviation of one machine from another of its kind, as of the surest priors: a shipped constant is for machines that were not measured."""


def prior(key: str, place: str) -> str:
    """The prior's value; its source stands in the file of priors."""
    return f"{file_constants(PRIORS)[place, key].value:g}"


def summary(found: Fit, held: Mapping[By, Held]) -> dict[str, Any]:
    """Cross-validated errors and coverage by source, as plain data."""
    points = found.model.points
    out: dict[str, Any] = {}
    for by, left in held.items():
        known = np.isfinite(left.residuals)
        before, after = by_source(points, np.where(known, found.before, np.nan)), by_source(points, left.residuals)
        sources = {}
        for name, error in before.items():
            covered = coverage(points, left, scatter_of(found, held), partial(_is_from, name))
            sources[name] = {"figures": error.points, "before": round(error.mean_abs, 4), "after": round(after[name].mean_abs, 4),
                             "bias": round(after[name].bias, 4), "covered": round(covered[0], 3) if covered else None,
                             "half_width": round(covered[1], 3) if covered else None}
        out[by] = sources
    return out


def _is_from(source: str, point: Point) -> bool:
    return point.source == source


def scatter_of(found: Fit, held: Mapping[By, Held]) -> dict[str, float]:
    """Per source, the scatter that the shipped profiles state: by framework for steps, the source's own for tables."""
    stated = time_scatter(found, held) if "model" in held else {}
    out = whole_scatter(found)
    for item in found.model.evidence:
        place = item.profile.constants["scatter.time"].place if "scatter.time" in item.profile.constants else ""
        if place in stated:
            out |= {point.source: stated[place] for point in item.points if point.figure == "time"}
    return out


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profiles", description="Fit the shipped profiles to published measurements.")
    parser.add_argument("--write", action="store_true", help="write the shipped profiles and published/fitted.json")
    parser.add_argument("--stage", choices=("tables", "runs"), help="fit one stage only")
    arguments = parser.parse_args(argv)

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    constants: list[tuple[str, Constant]] = []
    report: dict[str, Any] = json.loads(FITTED.read_text(encoding="utf-8")) if FITTED.is_file() else {}
    if arguments.stage != "runs":
        found, held = stage_fit(TABLES, list(kernel_evidence(str(PRIORS))), say)
        constants += _finish("tables", found, held, report)
    if arguments.stage != "tables":
        evidence = published_evidence(load_records(PUBLISHED / "runs.jsonl"), load_rules(), _base(constants))
        found, held = stage_fit(RUNS, evidence, say)
        held |= {by: hold_out(found, by) for by in SPLITS if by not in held}
        constants += _finish("runs", found, held, report)
        constants += [("scatter.time", Constant(rounded(s, 2), "log", 0.0, "training runs left out of the fit, one model at a time: robust scatter",
                                                "fitted", DATE, "", place)) for place, s in time_scatter(found, held).items()]
    if arguments.write:
        stages = (*((TABLES,) if arguments.stage != "runs" else ()), *((RUNS,) if arguments.stage != "tables" else ()))
        priors = [(key, constant) for (place, key), constant in file_constants(PRIORS).items() if any(stage.moves(place, key) for stage in stages)]
        write_shipped([*priors, *constants])
        FITTED.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return 0


def _base(constants: Iterable[tuple[str, Constant]]) -> str:
    """A profile file for the second fit: its priors, and constants of the first where it was not written."""
    known = {(place, key): constant for (place, key), constant in file_constants(PRIORS).items() if RUNS.moves(place, key)}
    known |= {(constant.place, key): constant for key, constant in constants}
    with tempfile.NamedTemporaryFile("w", suffix=".toml", prefix="base-", delete=False, encoding="utf-8") as file:
        file.write(profile_text("base", ((key, constant) for (_, key), constant in known.items())))
    return file.name


def _finish(name: str, found: Fit, held: Mapping[By, Held], report: dict[str, Any]) -> list[tuple[str, Constant]]:
    constants = shipped_constants(found)
    for key, constant in constants:
        old = file_constants(PRIORS)[constant.place, key]
        print(f"{constant.place:28} {key:32} {old.value:10.4g} -> {constant.value:10.4g} {constant.unit:9} {percent(constant.log_sd):>6}  {constant.source}")
    report[name] = summary(found, held)
    print(json.dumps(report[name], indent=1), flush=True)
    return constants


if __name__ == "__main__":
    sys.exit(main())
