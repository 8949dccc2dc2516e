"""The largest micro-batch, sequence or model that still fits, and the fewest GPUs: one search, and what binds it.

Memory grows with each of these and falls with the GPUs, but for what moves the other way: buffers that are cut anew, whole tensors
dealt to ranks, stages of unequal layers, channels of a group that leaves its node. So the search doubles and bisects, and then looks
beyond its answer; where something there fits after all, it goes on from there. The answer is always next to a value that does not fit.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from costmodel.catalog.profiles import Profile
from costmodel.changes import Keep
from costmodel.memory import tensors_at_peak
from costmodel.report import Peak, StepReport
from costmodel.repricing import program_of
from costmodel.solve.trials import Stopped, Trial, Trials, Watch, fits, worst
from costmodel.spec import PlanError, Run

Quantity = Literal["micro_batch", "seq_len", "layers", "gpus"]
FIELDS: dict[str, str] = {"micro_batch": "recipe.micro_batch", "seq_len": "recipe.seq_len", "layers": "model.layers", "gpus": "cluster.gpus"}
LIMITS = {"micro_batch": 1 << 24, "seq_len": 1 << 27, "layers": 1 << 12, "gpus": 1 << 14}
"""Beyond these nobody asks."""
TILE = 128
"""Sequences are sought in multiples of this many tokens, the tile of attention kernels."""
BEYOND = (1, 2, 3, 7, 15)
"""How far beyond its answer the search looks for a better value that fits after all."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Why the next value is no answer."""

    kind: Literal["memory", "rule", "range", "stopped"]
    """memory: it does not fit; rule: such a run is refused; range: there is no further value; stopped: the search was."""
    role: str = ""
    """Of the fullest rank, at the value that does not fit."""
    moment: str = ""
    """When its memory peaks, as the report names it."""
    category: str = ""
    """The largest category at that moment, and its bytes."""
    category_bytes: int = 0
    holds: dict[str, int] = field(default_factory=dict)
    """What the memory holds at that moment, the largest first, bytes: the categories, and activations and temporaries by part of the model
    (logits, attention, feed-forward, residual stream, other)."""
    growing: str = ""
    """The category that grew most from the answer, and by how many bytes; empty without an answer."""
    growing_bytes: int = 0
    states_bytes: int = 0
    """Model state of that rank: parameters, gradients, master weights, optimizer state."""
    over_bytes: int = 0
    """What is missing on the device; 0 where it would run, but in its last tenth."""
    states_alone: bool = False
    """The model state alone exceeds the device: no batch, sequence or checkpointing helps."""
    rule: str = ""
    """rule, range: why, in words."""


@dataclass(frozen=True, slots=True)
class Solution:
    """The answer of a search: the best value, its prediction, and the next value, which is not possible."""

    quantity: Quantity
    given: int
    """The value of the run that was asked about."""
    value: int | None
    """None where no value fits."""
    run: Run | None
    report: StepReport | None
    beyond: int | None
    """The next value: larger, or for GPUs fewer. Without an answer, the last resort that does not fit either."""
    beyond_report: StepReport | None
    bound: Bound
    predictions: int
    """How many were made."""
    stopped: bool = False
    """The search was stopped: `value` fits, but may not be the best."""


class Found(NamedTuple):
    """Two neighbours among the candidates: the best that fits (None: none does), and the next one, which does not (None: there is none)."""

    best: int | None
    beyond: int | None


def largest(run: Run, quantity: Literal["micro_batch", "seq_len", "layers"], profile: Profile | str | None = None, *, risky: bool = False,
            keep: Keep = "micro_batch", watch: Watch | None = None) -> Solution:
    """The largest value of one quantity with which the run still fits, all else as it is.

    A micro-batch keeps the accumulation, or with keep="global_batch" the global batch (then only its divisors are tried). Sequences come in
    multiples of 128 tokens and of what the plan cuts them into. `risky` takes a run that uses the last tenth of the device. Raises PlanError
    where not even the smallest value makes a run.
    """
    if quantity not in ("micro_batch", "seq_len", "layers"):
        raise PlanError("quantity", quantity, "is not sought.", "Use micro_batch, seq_len or layers.")
    return _search(Trials(run, profile, keep=keep, watch=watch), quantity, _values(run, quantity, keep), risky)


def fewest_gpus(run: Run, profile: Profile | str | None = None, *, risky: bool = False, keep: Keep = "micro_batch",
                most: int = LIMITS["gpus"], watch: Watch | None = None) -> Solution:
    """The fewest GPUs on which the run fits with the same tensor, pipeline and context degrees; the data-parallel degree follows.

    One node is used in part, more nodes are used whole. The micro-batch and its accumulation stay, or with keep="global_batch" the global batch.
    """
    return _search(Trials(run, profile, keep=keep, watch=watch), "gpus", _gpu_counts(run, keep, most), risky)


# -- candidates ----------------------------------------------------------------------------------------------------------------


class Candidates(NamedTuple):
    """Legal values in ascending order, by the rules that are known beforehand, and why there are none after them (for GPUs: before)."""

    values: Sequence[int]
    end: str


def _values(run: Run, quantity: str, keep: Keep) -> Candidates:
    p, most = run.plan, LIMITS[quantity]
    end = f"{most:,} is as far as is sought"
    if quantity == "micro_batch":
        if keep == "micro_batch":
            return Candidates(range(1, most + 1), end)
        each = run.recipe.global_batch // p.dp
        end = f"the global batch leaves {each:,} sequences to a data-parallel rank" if each <= most else end
        return Candidates([n for n in range(1, min(each, most) + 1) if each % n == 0], end)
    if quantity == "layers":
        return Candidates(range(p.pp * p.virtual_stages, most + 1), end)
    unit = math.lcm(run.sequence_pieces, p.tp * p.cp if p.sequence_parallel else 1)
    if run.model.positions == "learned":
        most, end = run.model.position_rows, f"the model has {run.model.position_rows:,} learned positions"
    tiled = math.lcm(unit, TILE)
    unit = tiled if tiled <= most else unit
    return Candidates(range(unit, most + 1, unit), end)


def _gpu_counts(run: Run, keep: Keep, most: int) -> Candidates:
    """Multiples of the other degrees within a node, then whole nodes."""
    p, node = run.plan, run.cluster.gpus_per_node
    each = p.tp * p.pp * p.cp
    inside = range(each, min(node, most) + 1, each)
    unit = math.lcm(each, node)
    counts = [*inside, *(n for n in range(unit, most + 1, unit) if n > node)]
    if keep == "global_batch":
        counts = [n for n in counts if run.recipe.global_batch % (run.recipe.micro_batch * (n // each)) == 0]
    if not counts:
        raise PlanError("cluster.gpus", most, f"tp x pp x cp = {each} ranks need at least {unit} GPUs.", f"Look up to {unit} GPUs.")
    return Candidates(counts, "a job has at least one GPU" if each == 1 else f"tp x pp x cp = {each} ranks hold one copy of the model")


# -- the search ----------------------------------------------------------------------------------------------------------------


def _search(trials: Trials, quantity: Quantity, candidates: Candidates, risky: bool) -> Solution:
    values = candidates.values
    known: dict[int, Trial] = {}
    down = quantity == "gpus"

    def trial(i: int) -> Trial:
        if i not in known:
            known[i] = trials.attempt({FIELDS[quantity]: values[i]}, f"{quantity} = {values[i]:,}")
        return known[i]

    def good(i: int) -> bool:
        return fits(trial(i).report, risky)

    given = _given(trials.run, quantity)
    try:
        found = first(len(values), good) if down else last(len(values), good)
    except Stopped:
        fitting = [i for i, t in known.items() if fits(t.report, risky)]
        best = (min(fitting) if down else max(fitting)) if fitting else None
        t = known[best] if best is not None else Trial(None, None, None)
        return Solution(quantity, given, None if best is None else values[best], t.run, t.report, None, None, Bound("stopped"), trials.done, True)
    best, next_ = found
    if best is None:
        extreme = trial(len(values) - 1 if down else 0)
        if extreme.refusal and all(t.refusal for t in known.values()):
            raise extreme.refusal
        shown = extreme if extreme.report else next(t for _, t in sorted(known.items(), reverse=down) if t.report)
        return Solution(quantity, given, None, None, None, _given(shown.run, quantity) if shown.run else None, shown.report,
                        _bound(shown, None, candidates.end), trials.done)
    answer = trial(best)
    beyond = trial(next_) if next_ is not None else None
    return Solution(quantity, given, values[best], answer.run, answer.report, None if next_ is None else values[next_],
                    beyond.report if beyond else None, _bound(beyond, answer, candidates.end), trials.done)


def _given(run: Run, quantity: str) -> int:
    r = run.recipe
    return {"micro_batch": r.micro_batch, "seq_len": r.seq_len, "layers": run.model.layers, "gpus": run.cluster.gpus}[quantity]


def last(n: int, good: Callable[[int], bool]) -> Found:
    """The last of n candidates that is good, where the first ones are: doubling, bisection, and a look beyond for a later one after all."""
    at = -1
    while True:
        low, high = _edge(n, good, at)
        later = next((high + d for d in BEYOND if high + d < n and good(high + d)), None)
        if later is None:
            return Found(low if low >= 0 else None, high if high < n else None)
        at = later


def first(n: int, good: Callable[[int], bool]) -> Found:
    """The first of n candidates that is good, where the last ones are; the same search, and a look before it for an earlier one after all."""
    low, high = _edge(n, lambda i: not good(i), -1)
    while high < n:
        earlier = next((low - d for d in reversed(BEYOND) if low - d >= 0 and good(low - d)), None)
        if earlier is None:
            return Found(high, low if low >= 0 else None)
        high = earlier
        while high > 0 and good(high - 1):
            high -= 1
        low = high - 1
    return Found(None, low if low >= 0 else None)


def _edge(n: int, holds: Callable[[int], bool], at: int) -> tuple[int, int]:
    """Two neighbours, of which the first holds (or is `at`) and the second does not (or is n): doubling from `at`, then bisection."""
    step, low, high = 1, at, n
    while low + step < n:
        if not holds(low + step):
            high = low + step
            break
        low, step = low + step, 2 * step
    else:
        if low < n - 1 and not holds(n - 1):
            high = n - 1
        elif low < n - 1:
            low = n - 1
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low, high


def _bound(beyond: Trial | None, answer: Trial | None, end: str) -> Bound:
    """Why the candidate next to the answer is none."""
    if beyond is None:
        return Bound("range", rule=end)
    if beyond.report is None:
        assert beyond.refusal is not None
        return Bound("rule", rule=beyond.refusal.rule)
    role = worst(beyond.report)
    memory = role.memory
    assert memory is not None and memory.capacity_bytes is not None
    split = memory.allocated.by_category
    category = max(split, key=lambda c: split[c])
    states = sum(memory.states.values())
    growing, more = "", 0
    if answer is not None and answer.report is not None:
        before = next((r.memory for r in answer.report.roles if r.role == role.role), None) or worst(answer.report).memory
        assert before is not None
        growth = {c: n - before.allocated.by_category.get(c, 0) for c, n in split.items()}
        growing = max(growth, key=lambda c: growth[c])
        more = growth[growing]
    over = max(0, -(memory.headroom_bytes or 0))
    assert beyond.run is not None
    holds = _holds(beyond.run, role.role, memory.allocated)
    outside = sum(memory.outside.values()) + (memory.workspace_bytes or 0)
    return Bound("memory", role.role, memory.allocated.moment, category, split[category], holds, growing, more, states, over,
                 states + outside > memory.capacity_bytes)


PARTS = {"logits": ("head", "loss", "embedding.out"), "attention": ("attention",), "feed-forward": ("mlp",), "residual stream": ("hidden",)}
"""Parts of the model by the beginning of a tensor's name; a tied head is called embedding."""


def _holds(run: Run, role: str, peak: Peak) -> dict[str, int]:
    """What a role's memory holds at its peak."""
    program = program_of(run)
    out = {category: n for category, n in peak.by_category.items() if category not in ("activations", "temporaries")}
    tensors = tensors_at_peak(next(r for r in program.roles if r.role == role))
    if not tensors:
        return dict(sorted(peak.by_category.items(), key=lambda item: -item[1]))
    for name, n in tensors.items():
        part = next((part for part, starts in PARTS.items() if name.removeprefix("grad:").startswith(starts)), "other")
        out[part] = out.get(part, 0) + n
    return dict(sorted(out.items(), key=lambda item: -item[1]))
