"""Profiles as files: constants under their places, in TOML, the same bytes for the same constants."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from calibrate.crossvalidation import By, Held
from calibrate.evidence import StepEvidence
from calibrate.fit import LEAST_SCATTER, Fit
from costmodel.catalog.machines import Machine, distinct
from costmodel.catalog.profiles import PLACES, Constant


def rounded(value: float, digits: int = 4) -> float:
    """To a number of significant digits."""
    return float(f"{value:.{digits}g}")


def determined_constants(fit: Fit, *, date: str, versions: str) -> list[tuple[str, Constant]]:
    """(key, constant) of what a fit determined."""
    out = []
    for found in fit.determined:
        p = found.parameter
        new = Constant(rounded(found.value), p.base.unit, rounded(found.log_sd, 2), "; ".join(found.sources), "fitted", date, versions, p.place)
        out += [(key, new) for key in p.keys]
    return out


def held_constants(fit: Fit, *, date: str, versions: str) -> list[tuple[str, Constant]]:
    """(key, constant) of what a fit holds while their product with a determined one is now known better than either was."""
    out = []
    for found in (f for f in fit.found if f.with_):
        p = found.parameter
        words = f"held; {found.with_} was fitted, and only together do they show; {p.base.source}"
        out += [(key, p.base._replace(log_sd=rounded(found.log_sd, 2), source=words, date=date, versions=versions)) for key in p.keys]
    return out


def time_scatter(fit: Fit, held: Mapping[By, Held]) -> dict[str, float]:
    """What the formulas miss of a step's time, by software place: the robust size of residuals of steps left out, model by model where there
    are several models, else configuration by configuration; the root mean square over sources of five steps or more."""
    left = held["model"] if held["model"].groups > 1 else held["twin"]
    sizes: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for item, rows in zip(fit.model.evidence, fit.model.rows, strict=True):
        if isinstance(item, StepEvidence):
            for point, residual in zip(item.points, left.residuals[rows], strict=True):
                if point.figure == "time" and math.isfinite(residual):
                    sizes[item.profile.constant("scatter.time").place][point.source].append(abs(float(residual)))
    out = {}
    for place, sources in sizes.items():
        squares = [(1.4826 * statistics.median(found)) ** 2 for found in sources.values() if len(found) >= LEAST_STEPS]
        if squares:
            out[place] = max(LEAST_SCATTER, math.sqrt(statistics.fmean(squares)))
    return out


def fitted_profile(fit: Fit, held: Mapping[By, Held], name: str, dates: Sequence[str], versions: Mapping[str, str],
                   machines: Iterable[Machine] = ()) -> str:
    """The file of a fit: the machines it was measured on, what it determined, and the scatter of the steps it did not see."""
    sources = sorted({point.source for point in fit.model.points})
    source = "; ".join(sources[:MOST_SOURCES]) + (f"; {len(sources) - MOST_SOURCES} more" if len(sources) > MOST_SOURCES else "")
    date, words = max(dates, default="")[:10], environment_words(versions)
    constants = [*determined_constants(fit, date=date, versions=words), *held_constants(fit, date=date, versions=words)]
    for place, scatter in time_scatter(fit, held).items():
        constants.append(("scatter.time", Constant(rounded(scatter, 2), "log", 0.0, f"steps left out of the fit: {source}", "fitted", date, words, place)))
    return profile_text(name, constants, (f"Written by calibrate fit from {len(fit.model.points)} figures.",), distinct(machines))


LEAST_STEPS = 5
"""Steps from which a scatter is estimated."""
MOST_SOURCES = 3
"""Sources that a constant names."""


def profile_text(name: str, constants: Iterable[tuple[str, Constant]], comments: Iterable[str] = (), machines: Iterable[Machine] = ()) -> str:
    """A profile file: `name`, the machines, then every constant under its place, in order of place and key."""
    tables: dict[str, list[tuple[str, Constant]]] = {}
    for key, constant in sorted(constants, key=lambda item: (PLACES.index(item[1].place.partition(".")[0]), item[1].place, item[0])):
        path, _, last = key.rpartition(".")
        tables.setdefault(f"{constant.place}.{path}", []).append((last, constant))
    lines = [*(f"# {line}" for line in comments), f"name = {quoted(name)}"]
    for machine in machines:
        lines += ["", "[[machine]]", *(f"{key} = {quoted(text)}" for key, text in machine._asdict().items() if text)]
    for table, entries in tables.items():
        lines += ["", f"[{table}]", *(f"{key} = {inline(constant)}" for key, constant in entries)]
    return "\n".join(lines) + "\n"


def inline(constant: Constant) -> str:
    """A constant as an inline table; date and versions where it has them."""
    fields: dict[str, str] = {"value": f"{constant.value:g}" if constant.value != int(constant.value) or abs(constant.value) >= 1e15 else whole(constant.value),
                              "unit": quoted(constant.unit), "log_sd": repr(constant.log_sd), "basis": quoted(constant.basis),
                              "source": quoted(constant.source)}
    fields |= {name: quoted(text) for name, text in (("date", constant.date), ("versions", constant.versions)) if text}
    return f"{{{', '.join(f'{key} = {text}' for key, text in fields.items())}}}"


def whole(value: float) -> str:
    """A whole number; with a point where it is small enough to be a measure and not a count."""
    return str(int(value)) if abs(value) >= 10 else f"{value:.1f}"


def quoted(text: str) -> str:
    """A TOML basic string."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c >= " " else f"\\u{ord(c):04x}" for c in escaped) + '"'


def environment_words(versions: Mapping[str, str]) -> str:
    """Versions of a record in one line: "costmodel 0.1.0, torch 2.13.0"."""
    return ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
