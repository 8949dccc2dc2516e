"""What to change: the smallest changes that make a run fit, each with its price; for one that fits, what would make it faster.

Every proposal is a change of fields and its prediction: applied, it gives exactly the figures that it promises. The global batch stays, so
steps can be compared; only more GPUs bring more sequences.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

from costmodel.advice.ladders import DEGREES, OFFLOAD, Change, savings, speedups
from costmodel.catalog.profiles import Profile
from costmodel.changes import Keep
from costmodel.report import StepReport
from costmodel.solve import Watch, fewest_gpus, fits
from costmodel.solve.trials import Stopped, Trial, Trials, held_bytes, worst
from costmodel.spec import Run

ENOUGH = 0.002
"""A change that saves a smaller part of the memory, or of the step, is not worth its line."""
PAIRED = 7
"""Of the changes that save most, so many are tried in pairs."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """One change, or a few together: what to set, and what comes out, before and after."""

    words: str
    changes: dict[str, Any]
    """By dotted field, as `costmodel.changes.changed` takes them."""
    keep: Keep
    """What of the batch stays."""
    remark: str
    """What it changes besides memory and time; empty where nothing."""
    run: Run
    report: StepReport
    needs_before: int
    """Device total of the fullest rank, bytes."""
    needs_after: int
    headroom_bytes: int
    step_before: float
    step_after: float
    tokens_per_s_before: float
    tokens_per_s_after: float
    per_gpu: float
    """Tokens a second of one GPU, after over before."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do about a run."""

    report: StepReport
    """Of the run as it is."""
    fit: tuple[Suggestion, ...] = ()
    """Single changes after which it fits, the fastest first; those that change the numbers of the training come last."""
    together: tuple[Suggestion, ...] = ()
    """Where no single change is enough, or more GPUs alone: changes that are, on the same GPUs; where more GPUs alone are not enough, on more as well."""
    helps: tuple[Suggestion, ...] = ()
    """Single changes that need less memory and are not enough, the strongest first."""
    faster: tuple[Suggestion, ...] = ()
    """Of a run that fits: single changes that fit as well and are faster, the fastest first."""
    states_alone: bool = False
    """The model state alone exceeds the device."""
    stopped: bool = False


Picked = dict[str, Change]
"""Changes to apply together, by ladder."""


def advise(run: Run, profile: Profile | str | None = None, *, watch: Watch | None = None) -> Advice:
    """What makes a run fit where it does not or is risky, and what makes it faster where it fits.

    Some thirty predictions, a few times as many where several changes are needed; `watch` is told before each and may stop it.
    """
    trials = Trials(run, profile, keep="global_batch", watch=watch, remember=True)
    start = trials.attempt({})
    if start.report is None:
        assert start.refusal is not None
        raise start.refusal
    if fits(start.report):
        return _faster(trials, start.report)
    return _fitting(trials, start.report)


# -- how a change is judged ------------------------------------------------------------------------------------------------------


def _suggestion(trials: Trials, before: StepReport, words: str, changes: dict[str, Any], remark: str, keep: Keep = "global_batch") -> Suggestion | None:
    """The change with its prediction; None where there is no such run."""
    trial = trials.attempt(changes, words, keep=keep)
    if trial.run is None or trial.report is None or trial.run == trials.run:
        return None
    memory = worst(trial.report).memory
    assert memory is not None and memory.headroom_bytes is not None
    per_gpu = (trial.report.tokens_per_s_per_gpu or 0.0) / (before.tokens_per_s_per_gpu or 1.0)
    return Suggestion(words, changes, keep, remark, trial.run, trial.report, _needs(before), held_bytes(memory), memory.headroom_bytes,
                      before.step_s or 0.0, trial.report.step_s or 0.0, before.tokens_per_s or 0.0, trial.report.tokens_per_s or 0.0, per_gpu)


def _needs(report: StepReport) -> int:
    memory = worst(report).memory
    return held_bytes(memory) if memory else 0


def _price(s: Suggestion) -> tuple[int, float]:
    """What a change costs, for comparison: in how many ways it changes the numbers of the training, then the tokens a second of one GPU."""
    return s.remark.count(";") + bool(s.remark), -s.per_gpu


# -- a run that does not fit -----------------------------------------------------------------------------------------------------


def _fitting(trials: Trials, before: StepReport) -> Advice:
    single = _Singles([], {})
    together: list[Suggestion] = []
    stopped = False
    try:
        _try_singles(trials, before, single)
        here = any("plan.offload" not in s.changes for s in single.enough)
        more = _more_gpus(trials, before, {})
        if more is not None:
            single.enough.append(more)
        if not here:
            together = _together(trials, before, single, gpus_alone=more is not None)
    except Stopped:
        stopped = True
    memory = worst(before).memory
    assert memory is not None and memory.capacity_bytes is not None
    alone = sum(memory.states.values()) + sum(memory.outside.values()) + (memory.workspace_bytes or 0) > memory.capacity_bytes
    helps = sorted((s for _, s in single.helps.values()), key=lambda s: s.needs_after)
    return Advice(before, tuple(sorted(single.enough, key=_price)), tuple(together), tuple(helps), (), alone, stopped)


class _Singles(NamedTuple):
    """Single changes: those that are enough, and of each other ladder the step that saves most."""

    enough: list[Suggestion]
    helps: dict[str, tuple[Change, Suggestion]]


def _try_singles(trials: Trials, before: StepReport, into: _Singles) -> None:
    """Try each ladder up to its mildest step that is enough."""
    enough, helps = into
    done: set[str] = set()
    for change in savings(trials.run):
        if change.ladder in done or change.ladder == OFFLOAD and any(not s.remark for s in enough):
            continue
        s = _suggestion(trials, before, change.words, change.changes, change.remark)
        if s is None:
            continue
        if fits(s.report):
            enough.append(s)
            done.add(change.ladder)
            helps.pop(change.ladder, None)
        elif s.needs_after < s.needs_before * (1 - ENOUGH) and not _overfills_host(s.report) and (
                change.ladder not in helps or s.needs_after < helps[change.ladder][1].needs_after):
            helps[change.ladder] = change, s


def _overfills_host(report: StepReport) -> bool:
    """Whether what is offloaded does not fit in a node."""
    return any(r.memory is not None and r.memory.host is not None and r.memory.host.verdict == "does not fit" for r in report.roles)


def _more_gpus(trials: Trials, before: StepReport, picked: Picked) -> Suggestion | None:
    """The fewest GPUs that are enough after some changes, where more of them shard more; changes that the GPUs make needless go."""
    changes = _merged(picked)
    run = trials.attempt(changes).run if picked else trials.run
    if run is None:
        return None
    found = fewest_gpus(run, trials.profile, watch=trials.watch)
    if found.stopped:
        raise Stopped
    if found.value is None or found.value <= run.cluster.gpus:
        return None
    gpus = {"cluster.gpus": found.value}
    if picked:  # the share of a rank as it is after the changes
        gpus |= {"recipe.micro_batch": run.recipe.micro_batch, "recipe.grad_accum": run.recipe.grad_accum}
    for ladder in [key for key in picked if key not in ("micro_batch", "tp", "pp")]:
        rest = {key: change for key, change in picked.items() if key != ladder}
        without = _suggestion(trials, before, "", {**_merged(rest), **gpus}, "", "micro_batch")
        if without is not None and fits(without.report):
            picked = rest
    words = " + ".join([*(c.words for c in picked.values()), f"{found.value:,} GPUs"])
    return _suggestion(trials, before, words, {**_merged(picked), **gpus}, _remarks(picked), "micro_batch")


def _together(trials: Trials, before: StepReport, single: _Singles, gpus_alone: bool) -> list[Suggestion]:
    """Changes that are enough together: the cheapest of pairs and of as many as it takes; and, where more GPUs alone are not enough, those of more GPUs."""
    by_help = [change for change, _ in sorted(single.helps.values(), key=lambda cs: cs[1].needs_after) if change.ladder != OFFLOAD][:PAIRED]
    sets: list[Picked] = [{a.ladder: a, b.ladder: b} for a, b in combinations(by_help, 2)]
    plain = _greedy(trials, {}, lambda change: not change.remark and change.ladder not in (*DEGREES, OFFLOAD))
    spread = _greedy(trials, plain, lambda change: not change.remark and change.ladder != OFFLOAD)
    sets += [plain, spread]
    found = [s for s in (_milder(trials, before, picked) for picked in sets) if s is not None]
    if not found and not any("plan.offload" in s.changes for s in single.enough):
        offloaded = _milder(trials, before, _greedy(trials, plain, lambda change: not change.remark and change.ladder not in DEGREES))
        found = [] if offloaded is None else [offloaded]
    if not found:
        sets = [_greedy(trials, plain, lambda change: change.ladder not in (*DEGREES, OFFLOAD)),
                _greedy(trials, spread, lambda change: change.ladder != OFFLOAD)]
        found = [s for s in (_milder(trials, before, picked) for picked in sets) if s is not None]
    more = None if gpus_alone else _more_gpus(trials, before, plain)
    return sorted([*([min(found, key=_price)] if found else []), *([more] if more is not None else [])], key=_price)


def _greedy(trials: Trials, picked: Picked, allowed: Callable[[Change], bool]) -> Picked:
    """More and more changes, at each turn the one that saves most, until it fits or nothing more saves."""
    picked = dict(picked)
    trial = trials.attempt(_merged(picked))
    while trial.run is not None and trial.report is not None and not fits(trial.report):
        best: tuple[int, Change, Trial] | None = None
        for change in savings(trial.run):
            if allowed(change):
                other = trials.attempt(_merged({**picked, change.ladder: change}), change.words)
                if other.report is not None and (best is None or _needs(other.report) < best[0]):
                    best = _needs(other.report), change, other
        if best is None or best[0] > _needs(trial.report) * (1 - ENOUGH):
            break
        _, change, trial = best
        picked[change.ladder] = change
    return picked


def _milder(trials: Trials, before: StepReport, picked: Picked) -> Suggestion | None:
    """A set of changes that is enough, less what is not needed, each as mild as it can be; None where it is not enough."""
    picked = dict(picked)

    def tried(some: Picked) -> Suggestion | None:
        s = _suggestion(trials, before, " + ".join(c.words for c in some.values()), _merged(some), _remarks(some))
        return s if s is not None and fits(s.report) else None

    best = tried(picked)
    if best is None:
        return None
    for ladder in sorted(picked, key=lambda key: not picked[key].remark):
        without = tried({key: change for key, change in picked.items() if key != ladder})
        if without is not None:
            del picked[ladder]
            best = without
    for ladder in list(picked):
        for change in savings(trials.run):
            if change.ladder != ladder or change == picked[ladder]:
                continue
            other = tried({**picked, ladder: change})
            if other is not None and _price(other) < _price(best):
                best, picked[ladder] = other, change
    return best


def _merged(picked: Picked) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for change in picked.values():
        out |= change.changes
    return out


def _remarks(picked: Picked) -> str:
    return "; ".join(c.remark for c in picked.values() if c.remark)


# -- a run that fits ---------------------------------------------------------------------------------------------------------------


def _faster(trials: Trials, before: StepReport) -> Advice:
    best: dict[str, Suggestion] = {}
    stopped = False
    try:
        for change in speedups(trials.run):
            s = _suggestion(trials, before, change.words, change.changes, change.remark)
            if s is None or not fits(s.report) or s.step_after > s.step_before * (1 - ENOUGH):
                continue
            if change.ladder not in best or s.step_after < best[change.ladder].step_after:
                best[change.ladder] = s
    except Stopped:
        stopped = True
    return Advice(before, faster=tuple(sorted(best.values(), key=lambda s: (bool(s.remark), s.step_after))), stopped=stopped)
