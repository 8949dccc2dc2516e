"""Profiles as tables: their constants, how two of them differ, and how well each predicts some records."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import numpy as np

from calibrate.crossvalidation import by_source
from calibrate.plots import histogram, scatter
from calibrate.reading import read_files
from calibrate.report import percent
from costmodel.catalog.profiles import Constant, constants_at, file_constants, file_machines, list_profiles
from costmodel.render.text import Page
from costmodel.spec import PlanError

Constants = dict[tuple[str, str], Constant]


def constants_of(name: str) -> Constants:
    """(place, key) -> constant of a profile: a .toml file's own, or a shipped hardware file's. Raises PlanError."""
    if name.endswith(".toml"):
        return file_constants(Path(name))
    found = constants_at(f"hardware.{name}")
    if not found:
        raise PlanError("profile", name, "no profile of that name has constants of its own.",
                        f"Use a path to a .toml file, or one of {', '.join(list_profiles())}.")
    return {(f"hardware.{name}", key): constant for key, constant in found.items()}


def show(name: str, records: Sequence[Path], page: Page) -> str:
    """One profile's constants, and with records how it predicts them."""
    constants = constants_of(name)
    for machine in file_machines(Path(name)) if name.endswith(".toml") else ():
        page.line(f"fitted on {machine.words}{f', as {machine.accelerator}' if machine.accelerator else ''}")
    page.heading("CONSTANTS", f"{len(constants)} of {name}")
    rows = [[place or "every run", key, f"{c.value:.4g}", c.unit, percent(c.log_sd), c.basis, c.date or "-", c.source]
            for (place, key), c in sorted(constants.items())]
    page.table(["place", "constant", "value", "unit", "error", "basis", "date", "source"], rows, "<<><><<<")
    if records:
        _predicted(records, [name], page)
    return str(page)


def diff(a: str, b: str, records: Sequence[Path], page: Page) -> str:
    """Constants that two profiles give differently; apart: in standard deviations of both together."""
    left, right = constants_of(a), constants_of(b)
    rows = []
    for at in sorted({*left, *right}):
        one, two = left.get(at), right.get(at)
        if one and two and one[:3] == two[:3]:
            continue
        ratio = f"{two.value / one.value:.3f}" if one and two and one.value else "-"
        spread = math.hypot(one.log_sd, two.log_sd) if one and two else 0.0
        apart = f"{abs(math.log(two.value / one.value)) / spread:.1f}" if one and two and spread and one.value > 0 and two.value > 0 else "-"
        rows.append([at[0] or "every run", at[1], f"{one.value:.4g}" if one else "-", f"{two.value:.4g}" if two else "-", ratio, apart,
                     (one or two or Constant(0, "", 0, "", "assumed")).unit])
    page.heading("DIFFERENCES", f"{a} and {b}: {len(rows)} of {len({*left, *right})} constants")
    page.table(["place", "constant", "first", "second", "ratio", "apart", "unit"], rows, "<<>>>><")
    if not rows:
        page.line("none", indent="  ")
    if records:
        _predicted(records, [a, b], page)
    return str(page)


def _predicted(records: Sequence[Path], names: Sequence[str], page: Page) -> None:
    for name in names:
        read = read_files(records, name if name.endswith(".toml") else None)
        points = [point for item in read.evidence for point in item.points]
        residuals = np.array([log - math.log(point.measured) for item in read.evidence
                              for log, point in zip(item.log_predicted(item.profile), item.points, strict=True)])
        page.heading("PREDICTED", f"with {name}: mean error {percent(fmean(abs(math.expm1(r)) for r in residuals))} of {len(points)} figures")
        rows = [[source, str(e.points), percent(e.mean_abs), percent(e.median_abs), f"{100 * e.bias:+.1f}%"]
                for source, e in by_source(points, residuals).items()]
        page.table(["source", "figures", "mean", "median", "bias"], rows, "<>>>>")
        for figure in dict.fromkeys(point.figure for point in points):
            pairs = [(p.measured, p.measured * math.exp(r)) for p, r in zip(points, residuals, strict=True) if p.figure == figure]
            page.line()
            page.lines += scatter(pairs, unit="s" if figure == "time" else "bytes")
        page.line()
        page.lines += histogram(residuals.tolist())
