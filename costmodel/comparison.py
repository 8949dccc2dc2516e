"""Runs side by side, and the difference of two by the bars of the waterfall.

Runs of different sizes are compared by what a GPU spends on a token: the bars of B are scaled to the tokens that a GPU of A handles in a
step, so that where both handle as many, they are plainly seconds of the step. The differences of all bars sum to that of the steps, and
their points to that of the MFU.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from costmodel.catalog.profiles import Profile, load_profile
from costmodel.prediction import predict, single_gpu
from costmodel.report import CATEGORIES, MemoryReport, StepReport, Training, Verdict
from costmodel.spec import PlanError, Run
from costmodel.waterfall import Waterfall, meaning, waterfall

ONE_GPU = "one GPU"


@dataclass(frozen=True, slots=True)
class Predicted:
    """A run with its prediction."""

    name: str
    run: Run
    report: StepReport
    bars: Waterfall
    note: str = ""
    """What a reader of its figures should know."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of the fullest role of a run; bytes."""

    role: str
    by_category: dict[str, int]
    """At the peak; sums to `allocated`."""
    allocated: int
    reserved: int | None
    device: int | None
    capacity: int | None
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Entry:
    """One run of a comparison."""

    label: str
    """A, B, …; A is what the others are compared with."""
    name: str
    gpus: int
    nodes: int
    params: int
    tokens_per_step: int
    step_s: float
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    efficiency: float | None
    """tokens/s/GPU over that of A: the scaling efficiency where only the number of GPUs differs. None where the models differ."""
    weak: float | None
    """Scaling efficiency against one GPU at the same micro-batch."""
    strong: float | None
    """The same for the same global batch."""
    mfu: float
    hfu: float | None
    communication_s: float
    """Of the mean rank, hidden or not."""
    exposed_s: float
    """What compute waited for of it."""
    memory: Memory
    training: Training | None = None
    """The whole training, where the run says its tokens."""


@dataclass(frozen=True, slots=True)
class BarDifference:
    """One bar of both runs."""

    name: str
    meaning: str
    before_s: float
    """Seconds in a step of A."""
    after_s: float
    """Seconds of B for as many tokens a GPU."""
    points: float
    """What it adds to the MFU of B over that of A, as a share: -0.03 is three points lost. 0 where it costs as much for each model FLOP."""

    @property
    def difference_s(self) -> float:
        return self.after_s - self.before_s


@dataclass(frozen=True, slots=True)
class Difference:
    """Why a run takes longer or shorter than A."""

    label: str
    tokens_per_gpu: float
    """Tokens a step of each GPU of A: what the seconds are for."""
    scale: float
    """Seconds of this run's bars for one second of its own step; 1 where both have as many tokens a GPU."""
    before_s: float
    after_s: float
    mfu_before: float
    mfu_after: float
    bars: tuple[BarDifference, ...]

    @property
    def ratio(self) -> float:
        """GPU time of a token over that of A."""
        return self.after_s / self.before_s


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs side by side; the first is the base."""

    entries: tuple[Entry, ...]
    differences: tuple[Difference, ...]
    """One for each run after the first."""
    fields: dict[str, tuple[Any, ...]]
    """Every field of the runs in which they differ, by its dotted path, with the value of each; None where a run has no such field."""
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data with stable keys (docs/report.md)."""
        data = asdict(self)
        for into, difference in zip(data["differences"], self.differences, strict=True):
            into["ratio"] = difference.ratio
            for bar, one in zip(into["bars"], difference.bars, strict=True):
                bar["difference_s"] = one.difference_s
        return data


def predicted(name: str, run: Run, profile: Profile | str | None = None) -> Predicted:
    """A run predicted for a comparison. Raises PlanError where it is not predicted yet."""
    constants = profile if isinstance(profile, Profile) else load_profile(run, profile)
    report = predict(run, constants)
    return Predicted(name, run, report, waterfall(run, report, constants))


def one_gpu(run: Run, profile: Profile | str | None = None) -> Predicted:
    """The default base: the run's own kernels on one GPU that spreads nothing, its capacity ignored; what `report.scaling` is against.

    FSDP's mixed precision (bf16 weights made from fp32 shards) has no counterpart without FSDP: memory is then that of torch.autocast.
    """
    constants = profile if isinstance(profile, Profile) else load_profile(run, profile)
    alone = single_gpu(run)
    base = predicted(ONE_GPU, alone, constants)
    p = alone.recipe.precision
    if p.autocast or p.master or p.parameter == p.compute or p.compute == "tf32":
        return base
    recipe = alone.recipe.model_copy(update={"precision": p.model_copy(update={"autocast": True})})
    casting = predict(alone.model_copy(update={"recipe": recipe}), constants, scaling=False, intervals=False)
    roles = tuple(replace(role, memory=other.memory) for role, other in zip(base.report.roles, casting.roles, strict=True))
    return replace(base, report=replace(base.report, roles=roles),
                   note="One GPU runs the kernels of the run; its memory is that of torch.autocast, which it would use without FSDP.")


def compare(base: Predicted, *others: Predicted) -> Comparison:
    """The runs side by side, and each but the first against the first."""
    everyone = (base, *others)
    entries = tuple(_entry(chr(ord("A") + i) if i < 26 else f"#{i + 1}", one, base) for i, one in enumerate(everyone))
    differences = tuple(_difference(entry.label, base, one) for entry, one in zip(entries[1:], others, strict=True))
    return Comparison(entries, differences, differing_fields([one.run for one in everyone]),
                      tuple(one.note for one in everyone if one.note))


def _entry(label: str, one: Predicted, base: Predicted) -> Entry:
    report, run = one.report, one.run
    step, rate, each, mfu = report.step_s, report.tokens_per_s, report.tokens_per_s_per_gpu, report.mfu
    other = base.report.tokens_per_s_per_gpu
    assert step and rate and each and mfu and other
    timed = [(role.ranks, role.time) for role in report.roles if role.time]
    ranks = sum(n for n, _ in timed)
    communication, exposed = (sum(n * sum(of.values()) for n, of in table) / ranks for table in (
        [(n, t.communication_s) for n, t in timed], [(n, t.exposed_s) for n, t in timed]))
    scaling = report.scaling
    return Entry(label, one.name, run.cluster.gpus, run.cluster.nodes, run.model.params, report.tokens_per_step, step, rate, each,
                 each / other if run.model == base.run.model else None, scaling.weak if scaling else None, scaling.strong if scaling else None,
                 mfu, report.hfu, communication, exposed, _memory(report),
                 report.training(run.recipe.train_tokens) if run.recipe.train_tokens else None)


def _memory(report: StepReport) -> Memory:
    role = report.fullest
    m: MemoryReport | None = role.memory
    if m is None:
        raise PlanError("report", report.provenance, "a comparison needs the memory of a run.", "Use a prediction.")
    split = {name: m.allocated.by_category[name] for name in CATEGORIES if m.allocated.by_category.get(name)}
    return Memory(role.role, split, m.allocated.total_bytes, m.reserved_bytes, m.device_bytes, m.capacity_bytes, report.verdict)


def _difference(label: str, base: Predicted, one: Predicted) -> Difference:
    """Bars of both, those of `one` for as many tokens a GPU as `base` has.

    MFU = 1 / (1 + Σ loss / ideal), so the difference of two is the sum over bars of (loss/ideal of A - loss/ideal of B) · MFU of A · MFU of B.
    """
    before, after = base.bars, one.bars
    tokens = base.report.tokens_per_step / base.report.world_size
    scale = tokens / (one.report.tokens_per_step / one.report.world_size)
    old, new = ({bar.name: bar for bar in w.bars} for w in (before, after))
    bars = []
    for name in _in_order(list(old), list(new)):
        a, b = (table[name].seconds if name in table else 0.0 for table in (old, new))
        points = (a / before.ideal_s - b / after.ideal_s) * before.mfu * after.mfu
        bars.append(BarDifference(name, meaning(name), a, scale * b, points))
    return Difference(label, tokens, scale, before.step_s, scale * after.step_s, before.mfu, after.mfu, tuple(bars))


def _in_order(first: list[str], second: list[str]) -> list[str]:
    """The names of both, each list's order kept."""
    out = list(first)
    for i, name in enumerate(second):
        if name not in out:
            before = next((second[j] for j in range(i - 1, -1, -1) if second[j] in out), None)
            out.insert(out.index(before) + 1 if before else 0, name)
    return out


def differing_fields(runs: Sequence[Run]) -> dict[str, tuple[Any, ...]]:
    """The fields in which runs differ. Of a model, device, node type or precision with another name, the name stands for all of it."""
    flat = [_flat(run.model_dump(mode="json")) for run in runs]
    paths = dict.fromkeys(path for one in flat for path in one)
    out = {path: tuple(one.get(path) for one in flat) for path in paths if any(one.get(path) != flat[0].get(path) for one in flat)}
    named = [path.removesuffix("name") for path in out if path.endswith(".name") and path != "cluster.name"]
    return {path: values for path, values in out.items() if path.endswith(".name") or not path.startswith(tuple(named))}


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            out |= _flat(value, f"{prefix}{key}.")
        elif key not in ("levels", "shape_rule", "source", "confidence"):  # what follows from others, and remarks
            out[f"{prefix}{key}"] = value
    return out
