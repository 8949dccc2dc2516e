"""Every way to spread a run over its GPUs, best first.

A shape is a ZeRO stage with its shards, a tensor and a pipeline degree, with or without sequence parallelism; on each stand the kinds of
checkpointing and the micro-batches that the global batch allows. The batch, the model and the dialect stay. Memory grows with the
micro-batch and falls with checkpointing, so a shape is first tried at its smallest: where that does not fit, nothing of it does. From there
on micro-batches grow until they do not fit; heavier checkpointing is tried only where lighter does not fit, for it costs time.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any, Literal, NamedTuple

from costmodel.catalog.profiles import Profile
from costmodel.inputs import checkpointing_word
from costmodel.report import StepReport
from costmodel.solve.trials import Stopped, Trials, Watch, fits
from costmodel.spec import Run

CHECKPOINTING = ("none", "selective", "selective:op", "full")
"""Lightest first."""
STAGES = {"pytorch": (0, 1, 2, 3), "deepspeed": (0, 1, 2, 3), "megatron": (0, 1, 3), "nanochat": (1,)}
Outcome = Literal["fit", "too_large", "refused", "impossible"]
"""impossible: refused whatever the batch."""
OF_THE_BATCH = ("recipe.micro_batch", "recipe.grad_accum", "recipe.global_batch", "recipe.loss_chunks")
"""Fields whose refusals another micro-batch may lift."""
MOST = 4000
"""Predictions of one search."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One plan that fits: what it changes in the run, by dotted field, and what comes out."""

    changes: dict[str, Any]
    run: Run
    report: StepReport


@dataclass(frozen=True, slots=True)
class Plans:
    """The plans of a job's GPUs: those that fit, fastest first, and what became of the others."""

    best: tuple[Choice, ...]
    candidates: int
    """All that were thought of; the four counts below sum to it, unless the search was stopped."""
    fit: int
    too_large: int
    """Predicted, and more than the device holds (or risky, where that is not taken)."""
    refused: int
    """Against a rule, or not predicted yet."""
    pruned: int
    """Not predicted: larger than one that does not fit, or recomputing where that is not needed."""
    predictions: int
    stopped: bool = False
    """Before all candidates were looked at, by the watcher or at the most predictions."""


class Shape(NamedTuple):
    """How the ranks are used, without batch and checkpointing."""

    zero: int
    dp_shard: int
    dp: int
    tp: int
    pp: int
    sequence_parallel: bool
    ep: int = 1


def plans(run: Run, profile: Profile | str | None = None, *, risky: bool = False, most: int = MOST, watch: Watch | None = None) -> Plans:
    """Every plan of the run's GPUs at its global batch, fastest first among those that fit.

    At most `most` predictions are made. `watch` is told before each, with candidates settled and in all; where it says False, what was
    found so far is returned.
    """
    trials = Trials(run, profile, keep="global_batch", watch=watch)
    shapes = sorted(_shapes(run), key=lambda s: (s.tp * s.pp, s.pp, s.sequence_parallel, s.zero, s.ep))
    kinds = _kinds(run)
    batches = {shape: _micro_batches(run, shape) for shape in shapes}
    total = sum(len(kinds) * max(1, len(batches[s])) for s in shapes)
    found: list[Choice] = []
    count: Counter[str] = Counter()

    def tried(shape: Shape, kind: str | None, micro_batch: int) -> Outcome:
        if trials.done >= most:
            raise Stopped
        changes = _changes(run, shape, kind, micro_batch)
        words = f"tp {shape.tp}, pp {shape.pp}, {f'ep {shape.ep}, ' if shape.ep > 1 else ''}ZeRO-{shape.zero}, micro-batch {micro_batch}"
        trial = trials.attempt(changes, words, done=count.total(), of=total)
        if trial.run is None or trial.report is None:
            return "refused" if trial.refusal and trial.refusal.field in OF_THE_BATCH else "impossible"
        if not fits(trial.report, risky):
            return "too_large"
        found.append(Choice(changes, trial.run, trial.report))
        return "fit"

    stopped = False
    try:
        for shape in shapes:
            _one_shape(kinds, batches[shape], partial(tried, shape), count)
    except Stopped:
        stopped = True
    found.sort(key=lambda c: -(c.report.tokens_per_s or 0.0))
    return Plans(tuple(found), total, len(found), count["too_large"], count["refused"], count["pruned"], trials.done, stopped)


def _one_shape(kinds: Sequence[str | None], batches: Sequence[int], tried: Callable[[str | None, int], Outcome], count: Counter[str]) -> None:
    """All candidates of a shape, each counted once."""
    if not batches:
        count["refused"] += len(kinds)
        return
    floor = kinds[-1], batches[0]
    smallest, others = tried(*floor), len(kinds) * len(batches) - 1
    if smallest == "impossible":
        count["refused"] += 1 + others
        return
    count[smallest] += 1
    if smallest == "too_large":
        count["pruned"] += others
        return
    enough: set[int] = set()
    """Micro-batches that fit with lighter checkpointing."""
    for kind in kinds:
        full = False
        for micro_batch in batches:
            if (kind, micro_batch) == floor:
                continue
            if full or micro_batch in enough:
                count["pruned"] += 1
                continue
            outcome = tried(kind, micro_batch)
            count["refused" if outcome == "impossible" else outcome] += 1
            full = outcome == "too_large"
            if outcome == "fit":
                enough.add(micro_batch)


def _kinds(run: Run) -> tuple[str | None, ...]:
    """Checkpointing to try; None is the run's own, where no word says it."""
    own = run.plan.checkpointing
    if own in map(checkpointing_word, CHECKPOINTING):
        return CHECKPOINTING
    return tuple(None if own.mode == kind else kind for kind in CHECKPOINTING)


def _shapes(run: Run) -> Iterator[Shape]:
    """Degrees that multiply to the GPUs; tensor parallelism stays within a node."""
    p, gpus = run.plan, run.cluster.gpus
    most_tp = max(p.tp, run.cluster.gpus_in_node)
    for tp in (n for n in range(1, most_tp + 1) if gpus % (n * p.cp) == 0):
        for pp in (n for n in range(1, run.model.layers + 1) if gpus % (n * tp * p.cp) == 0):
            dp = gpus // (tp * pp * p.cp)
            for zero in STAGES[p.framework]:
                if dp * p.cp == 1 and zero != p.zero and not (zero == 3 and tp * pp > 1):  # nothing is sharded, but the rules differ
                    continue
                shards = {dp if zero else 1}
                node = run.cluster.gpus_in_node // tp
                if zero == 3 and p.framework == "pytorch" and 1 < node < dp and dp % node == 0:
                    shards.add(node)
                for dp_shard in sorted(shards):
                    for sequence_parallel in (False, True)[:1 + (tp > 1)]:
                        for ep in _expert_degrees(run, zero, dp_shard if zero else dp, tp, pp):
                            yield Shape(zero, dp_shard, dp, tp, pp, sequence_parallel, ep)


def _expert_degrees(run: Run, zero: int, shards: int, tp: int, pp: int) -> Iterator[int]:
    """Expert-parallel degrees to try: 1, the run's own, and the powers of two that divide the experts and the ranks they can be spread over."""
    moe, p = run.model.moe, run.plan
    ranks = shards * p.cp
    if moe is None or (p.framework != "megatron" and (zero != 3 or tp * pp * p.cp > 1)):
        ranks = 1
    most = gcd(ranks, moe.experts) if moe else 1
    yield from sorted({1, *(1 << i for i in range(most.bit_length()) if most % (1 << i) == 0), *([p.ep] if most % p.ep == 0 else [])})


def _micro_batches(run: Run, shape: Shape) -> list[int]:
    """Powers of two, and the run's own, that divide what the global batch leaves to a data-parallel rank."""
    each, rest = divmod(run.recipe.global_batch, shape.dp)
    if rest:
        return []
    powers = {1 << i for i in range(each.bit_length())}
    return [n for n in sorted({*powers, run.recipe.micro_batch}) if each % n == 0]


def _changes(run: Run, shape: Shape, kind: str | None, micro_batch: int) -> dict[str, Any]:
    """The fields by which a candidate differs from the run."""
    p = run.plan
    wanted: dict[str, Any] = {"plan.zero": shape.zero, "plan.tp": shape.tp, "plan.pp": shape.pp, "plan.ep": shape.ep, "recipe.micro_batch": micro_batch}
    if shape.tp > 1:
        wanted["plan.sequence_parallel"] = shape.sequence_parallel
    if kind is not None and p.checkpointing != checkpointing_word(kind):
        wanted["plan.checkpointing"] = kind
    now: dict[str, Any] = {"plan.zero": p.zero, "plan.tp": p.tp, "plan.pp": p.pp, "plan.ep": p.ep, "plan.sequence_parallel": p.sequence_parallel,
                           "recipe.micro_batch": run.recipe.micro_batch}
    changes = {field: value for field, value in wanted.items() if field not in now or now[field] != value}
    copies = p.dp_replicate > 1 and (p.zero == 3 or p.framework == "megatron" and p.zero > 0)
    if shape.dp_shard != shape.dp and shape.zero == 3 or copies and (shape.zero == 3 or p.framework == "megatron" and shape.zero):
        changes["plan.dp_shard"] = shape.dp_shard
    if shape.zero == 3 and p.framework == "pytorch" and shape.pp > 1 and p.reshard_after_forward:
        changes["plan.reshard_after_forward"] = False
    return changes
