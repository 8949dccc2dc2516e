"""Error on records that the fit did not see: every group is left out in turn, and twins are never parted.

The constants without a group come from the whole fit's sensitivities (one robust linear solve a group); the records of the group are then
predicted with those constants in full. Which constants are free was decided with all records.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from calibrate.evidence import Point
from calibrate.fit import Array, Fit, augmented, inverse_curvature, linear_minimum, weights
from costmodel.repricing import NINE_IN_TEN

By = Literal["source", "model", "cluster", "twin"]


@dataclass(frozen=True, slots=True)
class Held:
    """Residuals log(predicted / measured) of points that were held out, in the order of the fit's points."""

    by: By
    groups: int
    residuals: Array
    from_constants: Array
    """Standard deviation of each prediction that follows from the constants' own."""


def groups_of(points: Sequence[Point], by: By) -> list[int]:
    """A group number per point; points that share a twin share a group, whatever else they are."""
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        while parent.setdefault(name, name) != name:
            name = parent[name]
        return name

    labels = []
    for point in points:
        label = f"{by} {getattr(point, by) or point.name}"
        parent[root(f"twin {point.twin or point.name}")] = root(label)
        labels.append(label)
    numbers: dict[str, int] = {}
    return [numbers.setdefault(root(label), len(numbers)) for label in labels]


FOLDS = 40
"""Groups are left out one by one up to this many, and several at a time beyond it."""


def hold_out(fit: Fit, by: By) -> Held:
    """Leave every group out once. With a single group nothing is held out, and the residuals are not numbers."""
    points, columns = fit.model.points, list(fit.free)
    labels = np.array(groups_of(points, by)) % FOLDS
    out, spread = np.full(len(points), np.nan), np.full(len(points), np.nan)
    count = int(labels.max()) + 1 if len(labels) else 0
    whole, reaches = augmented(fit.model, columns, fit.jacobian, fit.scales)
    jacobian, at = fit.jacobian[:, columns], fit.x[columns]
    owner = [i for i, rows in enumerate(fit.model.rows) for _ in range(rows.start, rows.stop)]
    for group in range(count if count > 1 else 0):
        seen = labels != group
        x = fit.x.copy()
        inverse = np.zeros((0, 0))
        if columns:
            x[columns], offset = linear_minimum(fit.model, columns, fit.jacobian, fit.after, fit.scales, at, seen)
            weight = weights((fit.after + jacobian @ (x[columns] - at) + offset)[seen], fit.scales[seen])
            inverse = inverse_curvature(whole[seen], weight, reaches)[:len(columns), :len(columns)]
        left = np.flatnonzero(~seen)
        out[left] = fit.model.residuals(x, sorted({owner[i] for i in left}))[left]
        spread[left] = np.sqrt(np.einsum("ij,jk,ik->i", jacobian[left], inverse, jacobian[left])) if columns else 0.0
    return Held(by, count, out, spread)


@dataclass(frozen=True, slots=True)
class Error:
    """Relative errors of a set of points, predicted / measured - 1."""

    points: int
    mean_abs: float
    median_abs: float
    bias: float


def error_of(residuals: Array) -> Error | None:
    """None for no points."""
    known = np.expm1(residuals[np.isfinite(residuals)])
    if not len(known):
        return None
    return Error(len(known), float(np.abs(known).mean()), float(np.median(np.abs(known))), float(known.mean()))


def by_source(points: Sequence[Point], residuals: Array) -> dict[str, Error]:
    """Errors of each source, in order of appearance."""
    rows: dict[str, list[int]] = defaultdict(list)
    for i, point in enumerate(points):
        rows[point.source].append(i)
    found = {source: error_of(residuals[index]) for source, index in rows.items()}
    return {source: error for source, error in found.items() if error is not None}


def coverage(points: Sequence[Point], held: Held, scatter: Mapping[str, float] | float,
             only: Callable[[Point], bool] = lambda _: True) -> tuple[float, float] | None:
    """(share of held-out points within the 10 to 90% interval, median half-width of the interval over the prediction)."""
    inside, widths = [], []
    for point, residual, spread in zip(points, held.residuals, held.from_constants, strict=True):
        if not math.isfinite(residual) or not only(point):
            continue
        own = scatter if isinstance(scatter, float) else scatter[point.source]
        reach = NINE_IN_TEN * math.hypot(spread, own)
        inside.append(abs(residual) <= reach)
        widths.append(math.sinh(reach))
    return (sum(inside) / len(inside), float(np.median(widths))) if inside else None
