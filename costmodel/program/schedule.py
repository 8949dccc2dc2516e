"""Pipeline schedules: the order in which each pipeline rank runs forward and backward of its stages' micro-batches.

`naive` runs one micro-batch at a time through all stages. `gpipe` runs all forwards, then all backwards (arXiv 1811.06965). `1f1b` warms up
with p - r forwards on rank r, then alternates (arXiv 2006.09503). `interleaved` gives each rank v stages, p apart, and runs them depth
first (arXiv 2104.04473). The orders of gpipe, 1f1b and interleaved are those of torch.distributed.pipelining, action by action.
Schedules that split backward are in zerobubble.py.
"""

from collections.abc import Sequence
from functools import lru_cache
from operator import sub
from typing import NamedTuple

from costmodel.program.actions import BACKWARD, FORWARD, INPUT, WEIGHT, Action
from costmodel.program.ir import periods
from costmodel.program.zerobubble import split_order, words
from costmodel.spec.run import SPLIT, V_SHAPED

PREDICTED = ("naive", "gpipe", "1f1b", "interleaved", *SPLIT)


class Cell(NamedTuple):
    """An action in time: seconds, or slots."""

    action: Action
    start: float
    end: float


def rank_of(schedule: str, stage: int, p: int) -> int:
    """The pipeline rank that holds a stage: stages go round robin, or there and back as a V."""
    return 2 * p - 1 - stage if schedule in V_SHAPED and stage >= p else stage % p


def stages_on(schedule: str, p: int, v: int, rank: int) -> tuple[int, ...]:
    """The stages that a rank holds, in order of the model."""
    return (rank, 2 * p - 1 - rank) if schedule in V_SHAPED else tuple(range(rank, p * v, p))


@lru_cache(maxsize=256)
def rank_order(schedule: str, p: int, v: int, m: int, rank: int) -> tuple[Action, ...]:
    """The actions of one rank, in order. p ranks, v stages a rank, m micro-batches."""
    if schedule == "interleaved":
        return _interleaved(p, v, m, rank)
    if schedule in SPLIT:
        return split_order(schedule, p, v, m, rank)
    forward = [Action(FORWARD, rank, i) for i in range(m)]
    backward = [Action(BACKWARD, rank, i) for i in range(m)]
    if schedule == "gpipe":
        return (*forward, *backward)
    warm = 1 if schedule == "naive" else min(m, p - rank)
    out = forward[:warm]
    for i in range(m):
        out.append(backward[i])
        if i + warm < m:
            out.append(forward[i + warm])
    return tuple(out)


def _interleaved(p: int, v: int, m: int, rank: int) -> tuple[Action, ...]:
    """torch/distributed/pipelining/schedules.py, ScheduleInterleaved1F1B; warm-up 2(p - r - 1) + (v - 1)·(micro-batches a round)."""
    per_round = m // max(1, m // p)
    warm = min((v - 1) * per_round + 2 * (p - 1 - rank), m * v)
    done_f, done_b = [0] * v, [0] * v
    out: list[Action] = []

    def run(kind: str, local: int, done: list[int]) -> None:
        out.append(Action(kind, local * p + rank, done[local]))
        done[local] += 1

    for step in range(m * v + warm):
        if step < m * v:
            run(FORWARD, step // per_round % v, done_f)
        if step >= warm:
            run(BACKWARD, v - 1 - (step - warm) // per_round % v, done_b)
    return tuple(out)


def most_held(order: Sequence[Action]) -> int:
    """The most micro-batches whose forward is done and whose backward is not, in all its passes, over the order of one rank."""
    held = most = 0
    for action in order:
        held += (action.kind == FORWARD) - (action.kind in (BACKWARD, WEIGHT))
        most = max(most, held)
    return most


class Slot(NamedTuple):
    """A pass of one class of micro-batch (only, first, middle, last; of a split backward zerobubble.words) through a stage."""

    kind: str
    stage: int
    micro: str


def micro_class(index: int, count: int) -> str:
    """The class of a micro-batch by its place among `count`."""
    if count == 1:
        return "only"
    return "first" if index == 0 else "last" if index == count - 1 else "middle"


@lru_cache(maxsize=256)
def slot_pattern(schedule: str, p: int, v: int, m: int, rank: int) -> tuple[tuple[tuple[Slot, ...], int], ...]:
    """The slots of a rank in order, as stretches that repeat: (slots, how often)."""
    order = rank_order(schedule, p, v, m, rank)
    if schedule in SPLIT:
        slots = [Slot(kind, stage, word or micro_class(i, m)) for (kind, stage, i), word in zip(order, words(order), strict=True)]
    else:
        slots = [Slot(kind, stage, micro_class(i, m)) for kind, stage, i in order]
    return tuple((tuple(slots[start:start + length]), count) for start, length, count in periods(slots, 6 * p * v))


@lru_cache(maxsize=256)
def slot_counts(schedule: str, p: int, v: int, m: int, rank: int) -> tuple[tuple[Slot, int], ...]:
    """How often a rank runs each slot."""
    counts: dict[Slot, int] = {}
    for slots, times in slot_pattern(schedule, p, v, m, rank):
        for slot in slots:
            counts[slot] = counts.get(slot, 0) + times
    return tuple(counts.items())


class Step(NamedTuple):
    """One action of the whole pipeline, placed after everything it depends on."""

    rank: int
    key: int
    """Which duration it takes: an index into `passes`."""
    own: int
    """Index of its end."""
    needs: int
    """Index of the end, on another rank, that it waits for; -1 for none: what its own rank made is there when it is its turn."""
    micro: int


@lru_cache(maxsize=256)
def passes(schedule: str, stages: int) -> tuple[tuple[str, int], ...]:
    """The (kind, stage) whose duration a schedule asks for, in the order of their keys: 2·stage for a forward, 2·stage + 1 for the backward
    that the stage before waits for; then what else there is of a split backward."""
    waited = INPUT if schedule in SPLIT and schedule != "dualpipev" else BACKWARD
    rest = () if schedule not in SPLIT else (WEIGHT, INPUT) if waited == BACKWARD else (WEIGHT,)
    return (*((kind, s) for s in range(stages) for kind in (FORWARD, waited)), *((kind, s) for kind in rest for s in range(stages)))


def end_index(kind: str, stage: int, stages: int, micro: int, m: int) -> int:
    """Where `pace` puts the end of an action; a backward whole and that of the input stand in one place, for the stage before waits for either."""
    return (2 * stages + stage if kind == WEIGHT else 2 * stage + (kind != FORWARD)) * m + micro


@lru_cache(maxsize=64)
def linear_order(schedule: str, p: int, v: int, m: int) -> tuple[Step, ...]:
    """All actions of all ranks in an order in which each follows what it needs, that in which they start where all take one slot; the order
    within a rank is kept."""
    stages = p * v
    orders = [rank_order(schedule, p, v, m, r) for r in range(p)]
    keys = {(kind, stage): key for key, (kind, stage) in enumerate(passes(schedule, stages))}
    at, free = [0] * p, [0] * p
    done: dict[int, int] = {}
    out: list[tuple[int, Step]] = []
    moved = True
    while moved:
        moved = False
        for rank in range(p):
            while at[rank] < len(orders[rank]):
                kind, stage, micro = orders[rank][at[rank]]
                own, other = end_index(kind, stage, stages, micro, m), stage
                if kind == FORWARD:
                    needs = -1 if stage == 0 else (stage - 1) * 2 * m + micro
                    other = stage - 1
                elif kind == WEIGHT:
                    needs = (stage * 2 + 1) * m + micro
                else:
                    needs = own - m if stage == stages - 1 else ((stage + 1) * 2 + 1) * m + micro
                    other = stage if stage == stages - 1 else stage + 1
                if needs >= 0 and needs not in done:
                    break
                slot = max(free[rank], done.get(needs, 0))
                done[own] = free[rank] = slot + 1
                out.append((slot, Step(rank, keys[kind, stage], own, needs if rank_of(schedule, other, p) != rank else -1, micro)))
                at[rank] += 1
                moved = True
    assert len(out) == sum(map(len, orders)), f"{schedule} with p={p}, v={v}, m={m} deadlocks"
    return tuple([step for _, step in sorted(out, key=lambda placed: (placed[0], placed[1].rank))])


class Round(NamedTuple):
    """Steps of the whole pipeline that repeat, each time with the next micro-batch."""

    steps: tuple[tuple[int, int, int, int], ...]
    """(rank, which duration, index of its end, index of the end it waits for or -1) of the first time. Durations are those of all keys for
    the first micro-batch, then those for a middle one, then those for the last."""
    times: int
    inputs: tuple[tuple[int, int], ...] = ()
    """Of each step the steps of this round or the one before that it begins after: its rank's last, and the one it waits for (or itself).
    Empty where they lie further back, or where somebody needs more of these rounds later than the ends of the last one."""


@lru_cache(maxsize=64)
def rounds(schedule: str, p: int, v: int, m: int) -> tuple[Round, ...]:
    """The order of all actions as rounds."""
    keys = len(passes(schedule, p * v))
    steps = [(s.rank, s.key + keys * (0 if s.micro == 0 else 2 if s.micro == m - 1 else 1), s.own, s.needs) for s in linear_order(schedule, p, v, m)]
    place = {own: i for i, (_, _, own, _) in enumerate(steps)}
    out: list[Round] = []
    for start, length, count in periods([step[:2] for step in steps], 2 * keys):
        once, last, end = steps[start:start + length], start + (count - 1) * length, start + count * length
        if count > 1 and all(steps[i + length][2] == steps[i][2] + 1 for i in range(start, last)):
            near = all(place.get(needs, last) >= last - length for _, _, _, needs in steps[last:end])
            done = all(not start <= place.get(needs, last) < last for _, _, _, needs in steps[end:])
            out.append(Round(tuple(once), count, _inputs(once, place, start) if near and done else ()))
        elif out and out[-1].times == 1:
            out[-1] = Round((*out[-1].steps, *steps[start:end]), 1)
        else:
            out.append(Round(tuple(steps[start:end]), 1))
    return tuple(out)


def _inputs(steps: Sequence[tuple[int, int, int, int]], place: dict[int, int], start: int) -> tuple[tuple[int, int], ...]:
    """Which steps of a round each of its steps begins after."""
    latest = {rank: i for i, (rank, *_) in enumerate(steps)}
    out = []
    for i, (rank, _, _, needs) in enumerate(steps):
        out.append((latest[rank], (place[needs] - start) % len(steps) if needs >= 0 else i))
        latest[rank] = i
    return tuple(out)


ROUNDING = 4e-15
"""Relative difference of two sums that are the same but for rounding."""


def pace(order: Sequence[Round], p: int, m: int, durations: Sequence[float], first: Sequence[float], last: Sequence[float],
         transfer: float, *, every: bool = True) -> tuple[list[float], list[float]]:
    """When each rank has done its last action, and the end of every action by its index: start = max(rank is free, what it needs has arrived).

    durations[key] are seconds of an action; `first` and `last` those of micro-batch 0 and m - 1. Without `every`, rounds that go on as
    the ones before did are skipped, and their ends left out.
    """
    times = (*first, *durations, *last)
    ends = [0.0] * (len(durations) * m)
    free = [0.0] * p
    for steps, count, inputs in order:
        history: list[list[float]] = []
        k = 0
        while k < count:
            for rank, takes, own, needs in steps:
                start = free[rank]
                if needs >= 0:
                    arrives = ends[needs + k] + transfer
                    if arrives > start:
                        start = arrives
                ends[own + k] = free[rank] = start + times[takes]
            k += 1
            if every or not inputs or k == count:
                continue
            history.append([ends[own + k - 1] for _, _, own, _ in steps])
            period, gains = _goes_on(history, inputs, p)
            skipped = (count - k) // period
            if skipped:
                k += skipped * period
                for (rank, _, own, _), end, gain in zip(steps, history[-1], gains, strict=True):
                    ends[own + k - 1] = free[rank] = end + skipped * gain
                history.clear()
    return free, ends


def _goes_on(history: list[list[float]], inputs: Sequence[tuple[int, int]], longest: int) -> tuple[int, list[float]]:
    """(after how many rounds, how much later) each end follows an earlier one, in the last round and from then on; a period beyond the
    schedule where nothing does.

    The recurrence is a (max, +) map. Ends that all come later by one and the same time (after at most `longest` rounds) go on to do so;
    ends that each gained the same twice do as well, where what decided when a step begins gained at least as much as what did not.
    """
    now = history[-1]
    near = ROUNDING * now[0]
    for period in range(1, min(longest, len(history) - 1) + 1):
        gains = list(map(sub, now, history[-1 - period]))
        if max(gains) - min(gains) <= near:
            return period, gains
        if period == 1 and len(history) > 2 and all(abs(g - (b - a)) <= near for g, b, a in zip(gains, history[-2], history[-3], strict=True)) and all(
                gains[i] <= g + near and gains[j] <= g + near for g, (i, j) in zip(gains, inputs, strict=True)):
            return 1, gains
    return NEVER, []


NEVER = 1 << 60


def grid(schedule: str, p: int, v: int, m: int, *, forward: float = 1.0, backward: float = 1.0, weight: float | None = None) -> list[list[Cell]]:
    """The cells of every rank, with the passes of every stage taking the same time (divided by v where a rank has v stages).

    `weight` is what the gradients of weights take of a backward that is split; None: half of it.
    """
    late = backward / 2 if weight is None else weight
    share = {FORWARD: forward / v, BACKWARD: backward / v, INPUT: (backward - late) / v, WEIGHT: late / v}
    steps, what = linear_order(schedule, p, v, m), passes(schedule, p * v)
    ends = [0.0] * (len(what) * m)
    free = [0.0] * p
    cells: list[list[Cell]] = [[] for _ in range(p)]
    for rank, key, own, needs, micro in steps:
        kind, stage = what[key]
        start = max(free[rank], ends[needs] if needs >= 0 else 0.0)
        ends[own] = free[rank] = start + share[kind]
        cells[rank].append(Cell(Action(kind, stage, micro), start, free[rank]))
    return cells


def bubble(schedule: str, p: int, v: int, m: int, *, forward: float = 1.0, backward: float = 2.0, weight: float | None = None) -> tuple[float, float]:
    """The bubble of equal stages and free transfers, in both conventions: idle over ideal time, and idle over the whole step."""
    cells = grid(schedule, p, v, m, forward=forward, backward=backward, weight=weight)
    whole = max(c[-1].end for c in cells)
    ideal = m * (forward + backward)
    return (whole - ideal) / ideal, (whole - ideal) / whole
