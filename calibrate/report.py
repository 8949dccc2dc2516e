"""What a fit found, as text and as plain data."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from calibrate.crossvalidation import By, Held, by_source, coverage, error_of
from calibrate.fit import Fit
from costmodel.render.text import Page

SPLITS: tuple[By, ...] = ("twin", "model", "cluster", "source")
SPLIT_WORDS = {"twin": "one configuration", "model": "one model", "cluster": "one cluster", "source": "one source"}
STRONG = 0.5
"""Correlations worth a line."""


def percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def text(fit: Fit, held: Mapping[By, Held], skipped: list[tuple[str, str]], page: Page) -> str:
    """The whole report."""
    points = fit.model.points
    page.heading("EVIDENCE", f"{len(points)} figures of {len({p.twin or p.name for p in points})} configurations")
    if skipped:
        page.line(f"{len(skipped)} records left out; the first, {skipped[0][0]}: {skipped[0][1]}", indent="  ")
    page.heading("DETERMINED", "constants that the records say more about than the base profile does")
    rows = [[f.parameter.place, f.parameter.key, f"{f.parameter.base.value:.4g}", f"{f.value:.4g}", f.parameter.base.unit, percent(f.log_sd),
             percent(f.parameter.prior)] for f in fit.determined]
    page.table(["place", "constant", "base", "fitted", "unit", "error", "prior"], rows, "<<>><>>")
    if not rows:
        page.line("none", indent="  ")
    together = [f for f in fit.found if f.with_]
    if together:
        page.heading("HELD", "the records show these only together with another constant")
        page.table(["constant", "with", "error"], [[f.parameter.name, f.with_, percent(f.log_sd)] for f in together], "<<>")
    rest = [f for f in fit.found if not f.determined and not f.with_]
    page.heading("AT THEIR PRIOR", f"{len(rest)} constants that the records do not determine")
    page.line(", ".join(f.parameter.name for f in rest) or "none", indent="  ")
    pairs = list(correlated(fit))
    if pairs:
        page.heading("CORRELATED", f"by more than {STRONG:g}: their product or ratio is surer than either")
        page.table(["constant", "and", "correlation"], [[a, b, f"{c:+.2f}"] for a, b, c in pairs], "<<>")
    page.heading("RESIDUALS", "mean error of the figures the fit saw, and bias; scatter is robust")
    before, after = by_source(points, fit.before), by_source(points, fit.after)
    page.table(["source", "figures", "before", "bias", "after", "bias", "scatter"],
               [[name, str(b.points), percent(b.mean_abs), f"{100 * b.bias:+.1f}%", percent(after[name].mean_abs), f"{100 * after[name].bias:+.1f}%",
                 percent(fit.scatter[name])] for name, b in before.items()], "<>>>>>>")
    page.heading("HELD OUT", "mean error of figures the fit did not see, and how many the 10 to 90% interval covers")
    lines = []
    for by, left in held.items():
        known = np.isfinite(left.residuals)
        error, same = error_of(left.residuals), error_of(fit.before[known])
        covered = coverage(points, left, whole_scatter(fit))
        if error is None or same is None or covered is None:
            lines.append([SPLIT_WORDS[by], str(left.groups), "-", "-", "-", "-"])
            continue
        lines.append([SPLIT_WORDS[by], str(left.groups), percent(same.mean_abs), percent(error.mean_abs), percent(covered[0]), percent(covered[1])])
    page.table(["left out at a time", "groups", "before", "after", "covered", "half-width"], lines, "<>>>>>")
    return str(page)


def whole_scatter(fit: Fit) -> dict[str, float]:
    """Scatter of a source's figures about predictions that do not know its offset."""
    return {source: math.hypot(own, fit.model.apart) for source, own in fit.scatter.items()}


def correlated(fit: Fit) -> Iterator[tuple[str, str, float]]:
    """Pairs of free constants whose estimates are strongly correlated."""
    for i, a in enumerate(fit.free):
        for k in range(i):
            if abs(fit.correlations[i, k]) > STRONG:
                yield fit.model.parameters[fit.free[k]].name, fit.model.parameters[a].name, float(fit.correlations[i, k])


def data(fit: Fit, held: Mapping[By, Held], skipped: list[tuple[str, str]]) -> dict[str, Any]:
    """The report with stable keys: docs/calibrating.md."""
    points = fit.model.points
    before, after = by_source(points, fit.before), by_source(points, fit.after)
    splits = {}
    for by, left in held.items():
        error, same, covered = error_of(left.residuals), error_of(fit.before[np.isfinite(left.residuals)]), coverage(points, left, whole_scatter(fit))
        splits[by] = {"groups": left.groups, "before": same.mean_abs if same else None, "after": error.mean_abs if error else None,
                      "covered": covered[0] if covered else None, "half_width": covered[1] if covered else None}
    return {"schema": 1, "kind": "fit", "figures": len(points), "skipped": [{"record": name, "reason": why} for name, why in skipped],
            "constants": [{"place": f.parameter.place, "key": f.parameter.key, "unit": f.parameter.base.unit, "base": f.parameter.base.value, "value": f.value,
                           "log_sd": f.log_sd, "prior_log_sd": f.parameter.prior, "state": "determined" if f.determined else "held" if f.with_ else "prior",
                           "with": f.with_ or None} for f in fit.found],
            "correlations": [{"a": a, "b": b, "correlation": c} for a, b, c in correlated(fit)],
            "sources": {name: {"figures": b.points, "before": b.mean_abs, "after": after[name].mean_abs, "bias_after": after[name].bias,
                               "scatter": fit.scatter[name]} for name, b in before.items()},
            "held_out": splits,
            "points": [{"name": p.name, "source": p.source, "figure": p.figure, "measured": p.measured,
                        "before": p.measured * float(np.exp(fit.before[i])), "after": p.measured * float(np.exp(fit.after[i]))} for i, p in enumerate(points)]}
