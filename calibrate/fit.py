"""The fit: constants from evidence, by robust least squares on log ratios with the base profile as prior.

What is minimised, over x = log(constant / base):

    sum over points   c² log(1 + (r / (c s))²)      r = log(predicted / measured), s the scatter of its source
  + sum over constants  (x / prior)²                prior = the base profile's log_sd

Where `apart` is above 0, each source also has an offset of its own, normal with that deviation, that no prediction uses: publishers differ
in software and settings that no constant stands for, and without it one publisher's bias would go into a constant of the hardware.

The Cauchy loss (c = 2.385, 95% efficient on a normal) bounds what an outlier can do; priors are not robust: they hold constants that no
point determines. Scatter is estimated from the residuals of each source and the fit repeated. Which constants may move is decided
first, by pivoted QR on the sensitivities (Golub and Van Loan, section 5.4): a constant stays at its prior where the points, the others
given, say less about it than the prior does.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy.linalg import qr
from scipy.optimize import least_squares

from calibrate.evidence import Evidence, Point
from costmodel.catalog.profiles import Constant, Profile

Array = npt.NDArray[np.float64]
CAUCHY = 2.385
"""Residuals, in standard deviations, beyond which weight is lost (Holland and Welsch 1977)."""
STEP = 1e-3
"""Of the derivative, in the logarithm of a constant."""
REACH = 4.0
"""Prior standard deviations that a constant may move."""
ROUNDS = 3
"""Fits, each on the scatter that the last one left; constants that it leaves undetermined are dropped."""
TURNS = 8
"""Gauss-Newton steps of a fit at most."""
SETTLED = 0.02
"""Prior standard deviations: a step that moves no constant by more is the last."""
HALVINGS = 5
LEAST_SCATTER = 0.01
POOLED = 4
"""Points' worth of a source's stated noise in its estimated scatter."""
STRUCTURE = ("matmul.tile", "matmul.split_k", "matmul.align", "attention.q_tile", "attention.pad_to")
"""Constants that are whole numbers of a kernel's structure, not magnitudes."""


class FitError(ValueError):
    """A fit that the records cannot carry; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A constant that may move: where it stands, and its base."""

    place: str
    key: str
    base: Constant
    prior: float
    """Standard deviation of its logarithm before the fit."""
    low: float
    high: float
    """Bounds of log(value / base)."""
    tied: tuple[str, ...] = ()
    """Other constants of the place that move with it."""

    @property
    def name(self) -> str:
        return f"{self.place}: {self.key}"

    @property
    def family(self) -> str:
        """Place and kind of the constant: "hardware.h100_sxm attention"."""
        return f"{self.place} {self.key.partition('.')[0]}"

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key, *self.tied)


TIES = {"matmul.bf16.peak_share": "matmul.fp16.peak_share"}
"""Constants that are one magnitude: a matrix unit runs both 16-bit formats at one rate. Tied where the base gives them one value."""


def parameter(key: str, base: Constant, tied: tuple[str, ...] = (), loosen: float = 1.0) -> Parameter:
    """A constant as a parameter: within REACH prior deviations, and a share of a data sheet at most 1 (a CPU has no data sheet)."""
    prior = base.log_sd * loosen
    high = REACH * prior
    if base.unit == "share" and base.value <= 1.0 and base.place != "hardware.cpu":
        high = min(high, -math.log(base.value))
    return Parameter(base.place, key, base, prior, -REACH * prior, max(high, 1e-6), tied)


def candidates(evidence: Iterable[Evidence], wanted: Callable[[str, str], bool] = lambda place, key: True,
               loosen: float = 1.0) -> tuple[Parameter, ...]:
    """Every uncertain magnitude of the evidence's profiles that `wanted(place, key)` lets through, one per place and key.

    `loosen` widens the priors: for a machine that may differ from the shipped constants by more than they say.
    """
    found: dict[tuple[str, str], Parameter] = {}
    slaves: set[tuple[str, str]] = set()
    for item in evidence:
        constants = item.profile.constants
        for key, constant in constants.items():
            movable = constant.log_sd > 0 and constant.value > 0 and key not in STRUCTURE and not key.endswith(("min_group", "scatter.time"))
            if movable and (constant.place, key) not in found and wanted(constant.place, key):
                other = TIES.get(key, "")
                tied = (other,) if other in constants and constants[other][:3] == constant[:3] and constants[other].place == constant.place else ()
                found[constant.place, key] = parameter(key, constant, tied, loosen)
                slaves |= {(constant.place, name) for name in tied}
    return tuple(found[at] for at in sorted(found) if at not in slaves)


class Model:
    """Log predictions of all evidence as a function of x, and their derivatives; each piece is priced again only where x moved it."""

    def __init__(self, evidence: Sequence[Evidence], parameters: Sequence[Parameter], apart: float = 0.0) -> None:
        self.evidence, self.parameters, self.apart = tuple(evidence), tuple(parameters), apart
        index = {(p.place, key): j for j, p in enumerate(parameters) for key in p.keys}
        self.uses = [tuple(dict.fromkeys(index[c.place, key] for key, c in item.profile.constants.items() if (c.place, key) in index and item.bears_on(key)))
                     for item in evidence]
        self.points = tuple(point for item in evidence for point in item.points)
        self.rows: list[slice] = []
        start = 0
        for item in evidence:
            self.rows.append(slice(start, start + len(item.points)))
            start += len(item.points)
        self.measured = np.array([math.log(point.measured) for point in self.points])
        self.sources = {source: k for k, source in enumerate(dict.fromkeys(point.source for point in self.points))}
        self.source_of = np.array([self.sources[point.source] for point in self.points], dtype=int)
        self._known: list[tuple[tuple[float, ...], list[float]] | None] = [None] * len(self.evidence)
        self._derivatives: tuple[bytes, Array] | None = None

    def _profile(self, i: int, x: Array) -> Profile:
        moved = {key: self.parameters[j].base.value * math.exp(x[j]) for j in self.uses[i] if x[j] != 0.0 for key in self.parameters[j].keys}
        return self.evidence[i].profile.replace(moved) if moved else self.evidence[i].profile

    def _piece(self, i: int, x: Array) -> list[float]:
        at = tuple(x[j] for j in self.uses[i])
        known = self._known[i]
        if known is None or known[0] != at:
            known = self._known[i] = at, self.evidence[i].log_predicted(self._profile(i, x))
        return known[1]

    def residuals(self, x: Array, pieces: Iterable[int] | None = None) -> Array:
        """log(predicted / measured) of every point, or of the points of some pieces (the others 0)."""
        out = np.zeros(len(self.points))
        for i in range(len(self.evidence)) if pieces is None else pieces:
            out[self.rows[i]] = np.array(self._piece(i, x)) - self.measured[self.rows[i]]
        return out

    def jacobian(self, x: Array) -> Array:
        """d log(predicted) / dx by forward differences, backward where x stands at its upper bound."""
        if self._derivatives is not None and self._derivatives[0] == x.tobytes():
            return self._derivatives[1]
        out = np.zeros((len(self.points), len(self.parameters)))
        for i, item in enumerate(self.evidence):
            here = np.array(self._piece(i, x))
            for j in self.uses[i]:
                step = STEP if x[j] + STEP <= self.parameters[j].high else -STEP
                moved = x.copy()
                moved[j] += step
                out[self.rows[i], j] = (np.array(item.log_predicted(self._profile(i, moved))) - here) / step
        self._derivatives = x.tobytes(), out
        return out


@dataclass(frozen=True, slots=True)
class Found:
    """What the fit says of one constant."""

    parameter: Parameter
    value: float
    log_sd: float
    """Standard error of its logarithm; for a constant held at its prior, what is left of the prior given the others."""
    determined: bool
    with_: str = ""
    """Of a held constant that the points do bear on: the determined one that stands for both."""
    sources: tuple[str, ...] = ()
    """Of a determined constant: those that say most of it, first the one that says most."""


@dataclass(frozen=True)
class Fit:
    """The answer: constants, how sure, and what the residuals look like."""

    model: Model
    found: tuple[Found, ...]
    """Every candidate, determined ones first."""
    free: tuple[int, ...]
    """Indices into model.parameters of those that moved."""
    x: Array
    covariance: Array
    """Of the free ones, in log; robust, clustered by twin."""
    scatter: Mapping[str, float]
    """Standard deviation of log(predicted / measured) by source, after the fit."""
    jacobian: Array
    before: Array
    """Residuals at the base profile."""
    after: Array
    scales: Array = field(repr=False)
    """Scatter of each point that the fit weighed it with."""

    @property
    def determined(self) -> tuple[Found, ...]:
        return tuple(f for f in self.found if f.determined)

    @cached_property
    def correlations(self) -> Array:
        """Of the free constants."""
        sd = np.sqrt(np.diag(self.covariance))
        return np.asarray(self.covariance / np.outer(sd, sd))


def fit(evidence: Sequence[Evidence], parameters: Sequence[Parameter] | None = None, *, required: Sequence[Parameter] = (),
        apart: float = 0.0) -> Fit:
    """Fit the constants that the evidence determines.

    `parameters` are the candidates (None: every uncertain constant); each of `required` must be determined. `apart` is what sources differ
    by that no constant has (see above). Raises FitError where there
    are fewer independent configurations than constants to determine, or none.
    """
    return fit_model(Model(evidence, candidates(evidence) if parameters is None else parameters, apart), required=required)


def fit_model(model: Model, *, held: frozenset[str] = frozenset(), required: Sequence[Parameter] = ()) -> Fit:
    """`fit` on a model that is there already, without the constants of the families `held`."""
    parameters = model.parameters
    twins = len({point.twin or point.name for point in model.points})
    if twins < 3:
        raise FitError(f"{twins} independent measurement{'s' if twins != 1 else ''}: a fit needs 3 or more. Give more records.")
    if len(required) > twins:
        raise FitError(f"{len(required)} constants asked of {twins} independent measurements. Ask for fewer, or give more records.")
    if not parameters:
        raise FitError("none of the constants asked for matters to these records. See `calibrate show` for their names.")
    scales = np.array([point.noise for point in model.points])
    base = np.zeros(len(parameters))
    before, sensitivity = model.residuals(base), model.jacobian(base)
    prior = np.array([p.prior for p in parameters])
    limit = min(twins, len(parameters))
    movable = np.array([p.family not in held for p in parameters])
    free = informed(without_offsets(model, sensitivity / scales[:, None], scales) * movable * prior, limit)
    x, after, jacobian = base, before, sensitivity
    for _ in range(ROUNDS):
        x, after, jacobian = settle(model, free, x, after, jacobian, scales)
        scatter = spread_by_source(model.points, after + offsets(model, after, scales))
        scales = np.array([scatter[point.source] for point in model.points])
        weight = weights(after + offsets(model, after, scales), scales)
        known = without_offsets(model, jacobian / scales[:, None], scales) * np.sqrt(weight)[:, None] * prior
        kept = informed(known * np.isin(np.arange(len(parameters)), free), limit)
        x, free = np.where(np.isin(np.arange(len(parameters)), kept), x, 0.0), kept
    x, after, _ = settle(model, free, x, model.residuals(x), jacobian, scales)
    jacobian = model.jacobian(x)
    left = after + offsets(model, after, scales)
    scatter = spread_by_source(model.points, left)
    missing = [p.name for j, p in enumerate(parameters) if p in required and j not in free]
    if missing:
        raise FitError(f"the records do not determine {', '.join(missing)}: its effect is too small, or that of other constants. "
                       "Leave it out, or give records that it matters to.")
    covariance = robust_covariance(model, free, jacobian, left, scales)
    found = _describe(model, free, x, covariance, jacobian, scales, left)
    return Fit(model, found, free, x, covariance, scatter, jacobian, before, after, scales)


def informed(scaled: Array, limit: int) -> tuple[int, ...]:
    """Columns that the rows determine better than a unit prior does, each given those chosen before it."""
    if not scaled.size:
        return ()
    r, order = qr(scaled, mode="r", pivoting=True)[:2]
    size = np.abs(np.diag(r))[:limit]
    return tuple(sorted(int(j) for j, s in zip(order, size, strict=False) if s > 1.0))


def settle(model: Model, free: Sequence[int], x: Array, residuals: Array, jacobian: Array, scales: Array) -> tuple[Array, Array, Array]:
    """(x, residuals, derivatives) at the minimum for a given scatter, by Gauss-Newton steps; derivatives are renewed where steps do not shrink."""
    prior = np.array([p.prior for p in model.parameters])
    last = math.inf
    for _ in range(TURNS):
        moved = descend(model, free, x, residuals, jacobian, scales)
        far = float(np.max(np.abs(moved - x) / prior, initial=0.0))
        x, residuals = moved, model.residuals(moved)
        if far < SETTLED:
            break
        if far > last / 2:
            jacobian = model.jacobian(x)
        last = far
    return x, residuals, jacobian


def descend(model: Model, free: Sequence[int], x: Array, here: Array, jacobian: Array, scales: Array) -> Array:
    """One Gauss-Newton step: the minimum of the linearised problem, or the nearest halving on the way there that is no worse."""
    columns = list(free)
    if not columns:
        return np.zeros(len(model.parameters))
    moved = x.copy()
    everything = np.ones(len(here), dtype=bool)
    moved[columns], offsets = linear_minimum(model, columns, jacobian, here, scales, x[columns], everything)
    start = objective(model, x, here + offsets, scales)
    for _ in range(HALVINGS):
        if objective(model, moved, model.residuals(moved) + offsets, scales) <= start:
            break
        moved = (x + moved) / 2
    return moved


def objective(model: Model, x: Array, residuals: Array, scales: Array) -> float:
    """What is minimised, the offsets of the sources given; see the head of this file."""
    prior = np.array([p.prior for p in model.parameters])
    return float(CAUCHY**2 * np.log1p((residuals / (CAUCHY * scales)) ** 2).sum() + ((x / prior) ** 2).sum())


def linear_minimum(model: Model, columns: Sequence[int], jacobian: Array, residuals: Array, scales: Array, at: Array,
                   seen: npt.NDArray[np.bool_]) -> tuple[Array, Array]:
    """(values of some parameters, offset of every point's source) at the minimum of the problem linearised at `at`, within bounds, on the
    points `seen`."""
    low, high = (np.array(values) for values in zip(*((model.parameters[j].low, model.parameters[j].high) for j in columns), strict=True))
    scaled, reach = augmented(model, columns, jacobian, scales)
    belongs, scaled = scaled[:, len(columns):] * scales[:, None], scaled[seen]
    sources = len(reach) - len(columns)
    matrix = np.vstack([scaled, np.diag(1.0 / reach)])
    origin = np.concatenate([at, np.zeros(sources)])
    target = residuals[seen] / scales[seen]

    def value(x: Array) -> Array:
        return np.concatenate([target + scaled @ (x - origin), x / reach])

    bounds = np.concatenate([low, np.full(sources, -np.inf)]), np.concatenate([high, np.full(sources, np.inf)])
    start = np.concatenate([np.clip(at, low + 1e-9, high - 1e-9), np.zeros(sources)])
    done = least_squares(value, start, jac=lambda _: matrix, bounds=bounds, loss=loss_of(int(seen.sum())), x_scale=reach, max_nfev=60, xtol=1e-6, ftol=1e-7)
    return np.asarray(done.x[:len(columns)]), np.asarray(belongs @ done.x[len(columns):])


def loss_of(points: int) -> Callable[[Array], Array]:
    """Cauchy for the points, squares for the priors, in scipy's form: rho, its first and its second derivative by squared residual."""
    def rho(z: Array) -> Array:
        out = np.vstack([z, np.ones_like(z), np.zeros_like(z)])
        near = 1.0 + z[:points] / CAUCHY**2
        out[0, :points], out[1, :points], out[2, :points] = CAUCHY**2 * np.log(near), 1.0 / near, -1.0 / (CAUCHY * near) ** 2
        return out
    return rho


def weights(residuals: Array, scales: Array) -> Array:
    """What the loss leaves of each point's weight, 0 to 1."""
    return np.asarray(1.0 / (1.0 + (residuals / (CAUCHY * scales)) ** 2))


def spread_by_source(points: Sequence[Point], residuals: Array) -> dict[str, float]:
    """Scatter of each source: 1.4826 times the median size of its residuals, drawn to its stated noise where points are few."""
    by: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for point, residual in zip(points, residuals, strict=True):
        by[point.source].append((abs(residual), point.noise))
    out = {}
    for source, items in by.items():
        sizes, stated = np.array([size for size, _ in items]), float(np.median([noise for _, noise in items]))
        found = 1.4826 * float(np.median(sizes))
        out[source] = max(LEAST_SCATTER, math.sqrt((len(sizes) * found**2 + POOLED * stated**2) / (len(sizes) + POOLED)))
    return out


def offsets(model: Model, residuals: Array, scales: Array) -> Array:
    """The offset of every point's source that goes with some residuals; 0 where sources are not taken to be apart."""
    out = np.zeros(len(model.sources))
    if model.apart > 0.0:
        for k in range(len(out)):
            own = model.source_of == k
            for _ in range(10):
                weight = weights(residuals[own] + out[k], scales[own]) / scales[own] ** 2
                out[k] = -float((weight * residuals[own]).sum() / (weight.sum() + 1.0 / model.apart**2))
    return np.asarray(out[model.source_of])


def without_offsets(model: Model, scaled: Array, scales: Array) -> Array:
    """Scaled sensitivities, of which each source's mean counts only as far as its offset leaves it free."""
    if model.apart <= 0.0:
        return scaled
    out = scaled.copy()
    for k in range(len(model.sources)):
        own = model.source_of == k
        free = 1.0 / math.sqrt(1.0 + own.sum() * (model.apart / float(np.median(scales[own]))) ** 2)
        out[own] -= (1.0 - free) * scaled[own].mean(axis=0)
    return out


def augmented(model: Model, columns: Sequence[int], jacobian: Array, scales: Array) -> tuple[Array, Array]:
    """(scaled sensitivities with a column for each source's offset, prior deviation of every column)."""
    sources = len(model.sources) if model.apart > 0.0 else 0
    belongs = np.eye(len(model.sources))[model.source_of][:, :sources]
    prior = np.array([model.parameters[j].prior for j in columns])
    return np.hstack([jacobian[:, list(columns)], belongs]) / scales[:, None], np.concatenate([prior, np.full(sources, model.apart)])


def inverse_curvature(scaled: Array, weight: Array, reach: Array) -> Array:
    """Covariance of the parameters where residuals are as scattered as their scales say."""
    return np.asarray(np.linalg.inv(scaled.T @ (weight[:, None] * scaled) + np.diag(1.0 / reach**2)))


def robust_covariance(model: Model, columns: Sequence[int], jacobian: Array, left: Array, scales: Array) -> Array:
    """The sandwich H⁻¹ (G + P) H⁻¹: H the curvature, G the scores summed by twin and then squared, P the priors' precision; at least H⁻¹,
    for few twins make the sandwich too small. `left` are residuals with the sources' offsets, which are marginalised.

    White 1980, clustered as Liang and Zeger 1986.
    """
    free = len(columns)
    if not free:
        return np.zeros((0, 0))
    scaled, reach = augmented(model, columns, jacobian, scales)
    weight = weights(left, scales)
    plain = inverse_curvature(scaled, weight, reach)
    scores: dict[str, Array] = defaultdict(lambda: np.zeros(len(reach)))
    for i, point in enumerate(model.points):
        scores[point.twin or point.name] += weight[i] * left[i] / scales[i] * scaled[i]
    stacked = np.array(list(scores.values()))
    sandwich = (plain @ (stacked.T @ stacked + np.diag(1.0 / reach**2)) @ plain)[:free, :free]
    plain = plain[:free, :free]
    larger = np.sqrt(np.maximum(np.diag(sandwich), np.diag(plain)) / np.diag(sandwich))
    return np.asarray(sandwich * np.outer(larger, larger))


def _describe(model: Model, free: Sequence[int], x: Array, covariance: Array, jacobian: Array, scales: Array, residuals: Array) -> tuple[Found, ...]:
    sd = np.sqrt(np.diag(covariance)) if len(free) else np.zeros(0)
    weight = weights(residuals, scales)
    scaled = without_offsets(model, jacobian / scales[:, None], scales) * np.sqrt(weight)[:, None]
    information = (scaled**2).sum(axis=0)
    at = {j: k for k, j in enumerate(free)}
    out = []
    for j, p in enumerate(model.parameters):
        if j in at:
            out.append(Found(p, p.base.value * math.exp(x[j]), float(sd[at[j]]), True, sources=_speakers(model.points, scaled[:, j])))
            continue
        left = 1.0 / math.sqrt(information[j] + 1.0 / p.prior**2)
        stands = _stand_in(scaled, j, free, model.parameters) if left < 0.7 * p.prior else ""
        out.append(Found(p, p.base.value, float(left) if stands else p.prior, False, stands))
    return tuple(sorted(out, key=lambda f: (not f.determined, f.parameter.name)))


def _speakers(points: Sequence[Point], column: Array) -> tuple[str, ...]:
    """Sources with a tenth or more of what is known of a constant."""
    shares: dict[str, float] = defaultdict(float)
    for point, value in zip(points, column, strict=True):
        shares[point.source] += float(value) ** 2
    whole = sum(shares.values()) or 1.0
    return tuple(source for source, share in sorted(shares.items(), key=lambda kv: -kv[1]) if share >= 0.1 * whole)


def _stand_in(scaled: Array, j: int, free: Sequence[int], parameters: Sequence[Parameter]) -> str:
    """The free constant whose effect on the points is most like that of a held one."""
    norms = np.linalg.norm(scaled, axis=0)
    likeness = {k: abs(float(scaled[:, j] @ scaled[:, k])) / (norms[j] * norms[k]) for k in free if norms[k] > 0}
    return parameters[max(likeness, key=lambda k: likeness[k])].name if likeness else ""
