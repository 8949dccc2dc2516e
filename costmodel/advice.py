"""What to change: the smallest changes that make a run fit, each with its price; for one that fits, what would make it faster.

Every proposal is a change of fields and its prediction: applied, it gives exactly the figures that it promises. The global batch stays, so
steps can be compared; only more GPUs bring more sequences.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

from costmodel.catalog.profiles import Profile
from costmodel.changes import Keep
from costmodel.program.layers import resolved_attention
from costmodel.report import StepReport
from costmodel.solve import Watch, fewest_gpus, fits
from costmodel.solve.trials import Stopped, Trial, Trials, held_bytes, worst
from costmodel.spec import Run

ENOUGH = 0.002
"""A change that saves a smaller part of the memory, or of the step, is not worth its line."""
DEGREES = ("tp", "pp")
"""Ladders that spread the model."""
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
    """Where no single change is enough: changes that are, on the same GPUs and on more."""
    helps: tuple[Suggestion, ...] = ()
    """Single changes that need less memory and are not enough, the strongest first."""
    faster: tuple[Suggestion, ...] = ()
    """Of a run that fits: single changes that fit as well and are faster, the fastest first."""
    states_alone: bool = False
    """The model state alone exceeds the device."""
    stopped: bool = False


class Change(NamedTuple):
    """A change to try. Of one ladder only the mildest that is enough is proposed."""

    ladder: str
    words: str
    changes: dict[str, Any]
    remark: str = ""


Picked = dict[str, Change]
"""Changes to apply together, by ladder."""


def advise(run: Run, profile: Profile | str | None = None, *, watch: Watch | None = None) -> Advice:
    """What makes a run fit where it does not or is risky, and what makes it faster where it fits.

    Some thirty predictions, a few times as many where several changes are needed; `watch` is told before each and may stop it.
    """
    trials = Trials(run, profile, keep="global_batch", watch=watch)
    start = trials.try_({})
    if start.report is None:
        assert start.refusal is not None
        raise start.refusal
    if fits(start.report):
        return _faster(trials, start.report)
    return _fitting(trials, start.report)


# -- how a change is judged ------------------------------------------------------------------------------------------------------


def _suggestion(trials: Trials, before: StepReport, words: str, changes: dict[str, Any], remark: str, keep: Keep = "global_batch") -> Suggestion | None:
    """The change with its prediction; None where there is no such run."""
    trial = trials.try_(changes, words) if keep == trials.keep else Trials(trials.run, trials.profile, keep=keep, watch=trials.watch).try_(changes, words)
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
        more = _more_gpus(trials, before, {})
        if more is not None:
            single.enough.append(more)
        if not single.enough:
            together = _together(trials, before, single)
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
        if change.ladder in done:
            continue
        s = _suggestion(trials, before, change.words, change.changes, change.remark)
        if s is None:
            continue
        if fits(s.report):
            enough.append(s)
            done.add(change.ladder)
            helps.pop(change.ladder, None)
        elif s.needs_after < s.needs_before * (1 - ENOUGH) and (change.ladder not in helps or s.needs_after < helps[change.ladder][1].needs_after):
            helps[change.ladder] = change, s


def _more_gpus(trials: Trials, before: StepReport, picked: Picked) -> Suggestion | None:
    """The fewest GPUs that are enough after some changes, where more of them shard more; changes that the GPUs make needless go."""
    changes = _merged(picked)
    run = trials.try_(changes).run if picked else trials.run
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


def _together(trials: Trials, before: StepReport, single: _Singles) -> list[Suggestion]:
    """Changes that are enough together: the cheapest of pairs and of as many as it takes; and what is enough on more GPUs."""
    by_help = [change for change, _ in sorted(single.helps.values(), key=lambda cs: cs[1].needs_after)][:PAIRED]
    sets: list[Picked] = [{a.ladder: a, b.ladder: b} for a, b in combinations(by_help, 2)]
    plain = _greedy(trials, before, {}, lambda change: not change.remark and change.ladder not in DEGREES)
    spread = _greedy(trials, before, plain, lambda change: not change.remark)
    sets += [plain, spread]
    found = [s for s in (_milder(trials, before, picked) for picked in sets) if s is not None]
    if not found:
        sets = [_greedy(trials, before, plain, lambda change: change.ladder not in DEGREES), _greedy(trials, before, spread, lambda change: True)]
        found = [s for s in (_milder(trials, before, picked) for picked in sets) if s is not None]
    more = _more_gpus(trials, before, plain)
    return sorted([*([min(found, key=_price)] if found else []), *([more] if more is not None else [])], key=_price)


def _greedy(trials: Trials, before: StepReport, picked: Picked, allowed: Callable[[Change], bool]) -> Picked:
    """More and more changes, at each turn the one that saves most, until it fits or nothing more saves."""
    picked = dict(picked)
    trial = trials.try_(_merged(picked))
    while trial.run is not None and trial.report is not None and not fits(trial.report):
        best: tuple[int, Change, Trial] | None = None
        for change in savings(trial.run):
            if allowed(change):
                other = trials.try_(_merged({**picked, change.ladder: change}), change.words)
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


def savings(run: Run) -> Iterator[Change]:
    """Changes that may save memory, the mildest of each ladder first."""
    for make in (_sharding, _checkpointing, _smaller_batch, _kernels, _losses, _numbers, _tensor_parallel, _pipelines):
        yield from make(run)


def _sharding(run: Run) -> Iterator[Change]:
    p = run.plan
    if p.dp * p.cp > 1:
        names = {"pytorch": {1: "ZeRO-1: optimizer state sharded", 2: "ZeRO-2: gradients sharded as well", 3: "FSDP2: parameters, gradients and state sharded"},
                 "deepspeed": {n: f"DeepSpeed ZeRO-{n}" for n in (1, 2, 3)}, "megatron": {1: "Megatron's distributed optimizer"}}.get(p.framework, {})
        for stage, words in names.items():
            if stage > p.zero:
                yield Change("sharding", words, {"plan.zero": stage, **_keeps_gathered(run, stage, p.pp)})
    if p.zero == 3 and p.dp_replicate > 1:
        yield Change("shards", f"shard over all {p.dp} data-parallel ranks", {"plan.dp_shard": p.dp})
    if p.zero == 3 and not p.reshard_after_forward and p.pp == 1:
        yield Change("reshard", "free gathered parameters after forward", {"plan.reshard_after_forward": True})
    if p.zero == 3 and not p.sync_each_micro_batch and run.recipe.grad_accum > 1 and p.pp == 1:
        yield Change("sync", "reduce gradients after every micro-batch", {"plan.sync_each_micro_batch": True})
    if p.zero == 0 and p.framework == "pytorch" and p.dp > 1 and not p.gradient_as_bucket_view:
        yield Change("buckets", "gradients as views of DDP's buckets", {"plan.gradient_as_bucket_view": True})


def _keeps_gathered(run: Run, zero: int, pp: int) -> dict[str, Any]:
    """FSDP2 under a pipeline keeps its parameters gathered."""
    p = run.plan
    return {"plan.reshard_after_forward": False} if p.framework == "pytorch" and zero == 3 and pp > 1 and p.reshard_after_forward else {}


def _checkpointing(run: Run) -> Iterator[Change]:
    c = run.plan.checkpointing
    if c.mode == "none":
        yield Change("checkpointing", "recompute attention (selective checkpointing)", {"plan.checkpointing": "selective"})
    if c.mode == "none" or c.mode == "selective" and "op" not in c.ops:
        yield Change("checkpointing", "keep every other matmul (selective:op checkpointing)", {"plan.checkpointing": "selective:op"})
    if c.mode != "full" or c.every > 1:
        yield Change("checkpointing", "recompute every layer (full checkpointing)", {"plan.checkpointing": "full"})


def _smaller_batch(run: Run) -> Iterator[Change]:
    r = run.recipe
    each = r.micro_batch * r.grad_accum
    for micro_batch in (n for n in range(r.micro_batch - 1, 0, -1) if each % n == 0):
        yield Change("micro_batch", f"micro-batch {micro_batch}, accumulated {each // micro_batch} times", {"recipe.micro_batch": micro_batch})


def _kernels(run: Run) -> Iterator[Change]:
    r, o = run.recipe, run.recipe.optimizer
    if resolved_attention(run) == "eager" and r.attention == "eager":
        yield Change("attention", "fused attention (sdpa)", {"recipe.attention": "sdpa"})
    if o.name in ("adam", "adamw") and o.implementation == "foreach":
        yield Change("optimizer kernel", f"fused {o.name}: no temporary copies", {"recipe.optimizer.implementation": "fused"})
    if r.allocator == "default":
        yield Change("allocator", "expandable segments: less fragmentation", {"recipe.allocator": "expandable"})
    if not r.compile:
        yield Change("compile", "torch.compile", {"recipe.compile": True})
    if not r.fused_norm:
        yield Change("norm", "fused norms", {"recipe.fused_norm": True})
    if r.expand_kv:
        yield Change("kv", "attention that shares keys and values", {"recipe.expand_kv": False})


def _losses(run: Run) -> Iterator[Change]:
    p = run.plan
    if run.recipe.loss in ("eager", "bf16", "inplace"):
        yield Change("loss", "head and loss by chunks", {"recipe.loss": "chunked"})
        yield Change("fused loss", "loss fused with the head", {"recipe.loss": "fused"})
    if p.tp > 1 and not p.loss_parallel and p.framework == "pytorch":
        yield Change("loss_parallel", "loss over logits split by vocabulary", {"plan.loss_parallel": True})
    if p.tp > 1 and not p.sequence_parallel:
        yield Change("sequence_parallel", "sequence parallelism", {"plan.sequence_parallel": True})


def _numbers(run: Run) -> Iterator[Change]:
    precision, o = run.recipe.precision, run.recipe.optimizer
    if precision.compute in ("fp32", "tf32") and "bf16" in run.cluster.accelerator.flops_per_s:
        yield Change("precision", "bf16-mixed", {"recipe.precision": "bf16-mixed"}, "computes in bf16")
    if o.name in ("adam", "adamw", "momentum") and precision.optimizer_state == "fp32":
        yield Change("optimizer state", "optimizer state in bf16", {"recipe.precision.optimizer_state": "bf16"}, "rounds the optimizer's moments to bf16")
    if o.name in ("adam", "adamw"):
        yield Change("optimizer state", "8-bit Adam", {"recipe.optimizer": "adam8bit"}, "quantises the optimizer's moments to 8 bits")
    if precision.name != "bf16-pure" and precision.compute == "bf16":
        yield Change("precision", "all in bf16 (bf16-pure)", {"recipe.precision": "bf16-pure"}, "keeps weights and moments in bf16 alone")


def _tensor_parallel(run: Run) -> Iterator[Change]:
    p = run.plan
    tp = 2 * p.tp
    while tp <= run.cluster.gpus_in_node:
        stage = {"plan.zero": 3} if p.framework == "pytorch" and p.zero != 3 else {}
        yield Change("tp", f"tensor and sequence parallelism over {tp}" + (" with FSDP2" if stage else ""),
                     {"plan.tp": tp, "plan.sequence_parallel": True, **stage})
        tp *= 2


def _pipelines(run: Run) -> Iterator[Change]:
    p = run.plan
    pp = 2 * p.pp
    while pp <= min(run.cluster.gpus, run.model.layers):
        yield Change("pp", f"a pipeline of {pp} stages", {"plan.pp": pp, **_keeps_gathered(run, p.zero, pp)})
        pp *= 2
    if p.pp > 1 and p.schedule in ("gpipe", "interleaved"):
        yield Change("schedule", "the 1F1B schedule: fewer micro-batches in flight", {"plan.schedule": "1f1b"})


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


def speedups(run: Run) -> Iterator[Change]:
    """Changes that may make a step faster with memory that is to spare."""
    makers: tuple[Callable[[Run], Iterator[Change]], ...] = (_less_recompute, _other_batches, _quicker_kernels, _less_sharding, _less_model_parallel)
    for make in makers:
        yield from make(run)


def _less_recompute(run: Run) -> Iterator[Change]:
    c = run.plan.checkpointing
    if c.mode != "none":
        yield Change("checkpointing", "no checkpointing: nothing is computed again", {"plan.checkpointing": "none"})
    if c.mode == "full":
        yield Change("checkpointing", "selective checkpointing in place of full", {"plan.checkpointing": "selective"})
        yield Change("checkpointing", "checkpointing that keeps every other matmul", {"plan.checkpointing": "selective:op"})
        yield Change("checkpointing", "checkpoint each second layer only", {"plan.checkpointing": "every:2"})


def _other_batches(run: Run) -> Iterator[Change]:
    r = run.recipe
    each = r.micro_batch * r.grad_accum
    for micro_batch in (n for n in range(1, each + 1) if each % n == 0 and n != r.micro_batch and (n & (n - 1) == 0 or each <= 64)):
        yield Change("micro_batch", f"micro-batch {micro_batch}, accumulated {each // micro_batch} times", {"recipe.micro_batch": micro_batch})


def _quicker_kernels(run: Run) -> Iterator[Change]:
    r, o = run.recipe, run.recipe.optimizer
    if not r.compile:
        yield Change("compile", "torch.compile", {"recipe.compile": True})
    elif not r.cuda_graphs:
        yield Change("compile", "CUDA graphs", {"recipe.cuda_graphs": True})
    if r.attention == "eager":
        yield Change("attention", "fused attention (sdpa)", {"recipe.attention": "sdpa"})
    if r.attention in ("sdpa", "fa1", "fa2") and run.cluster.accelerator.architecture == "hopper":
        yield Change("attention", "FlashAttention-3", {"recipe.attention": "fa3"})
    if o.name in ("adam", "adamw") and o.implementation != "fused":
        yield Change("optimizer kernel", f"fused {o.name}", {"recipe.optimizer.implementation": "fused"})
    if r.loss in ("eager", "chunked"):
        yield Change("loss", "loss fused with the head", {"recipe.loss": "fused"})
    if not r.fused_norm:
        yield Change("norm", "fused norms", {"recipe.fused_norm": True})
    if r.precision.compute in ("fp32", "tf32") and "bf16" in run.cluster.accelerator.flops_per_s:
        yield Change("precision", "bf16-mixed", {"recipe.precision": "bf16-mixed"}, "computes in bf16")


def _less_sharding(run: Run) -> Iterator[Change]:
    p = run.plan
    if p.zero == 3 and p.reshard_after_forward:
        yield Change("reshard", "keep gathered parameters until backward", {"plan.reshard_after_forward": False})
    node = run.cluster.gpus_in_node // p.tp
    if p.zero == 3 and p.framework == "pytorch" and p.dp_replicate == 1 and 1 < node < p.dp and p.dp % node == 0:
        yield Change("sharding", f"shard within a node ({node} ranks), replicate across (HSDP)", {"plan.dp_shard": node})
    for stage in range(p.zero):
        yield Change("sharding", "DDP: nothing sharded" if stage == 0 and p.framework == "pytorch" else f"ZeRO-{stage} in place of {p.zero}",
                     {"plan.zero": stage})
    if not p.overlap_grad_reduce and p.dp > 1:
        yield Change("overlap", "reduce gradients during backward", {"plan.overlap_grad_reduce": True})
    if not p.backward_prefetch and p.zero == 3:
        yield Change("prefetch", "gather the next layer during backward", {"plan.backward_prefetch": True})
    if p.zero == 3 and p.sync_each_micro_batch and run.recipe.grad_accum > 1 and p.pp == 1:
        yield Change("sync", "reduce gradients once a step", {"plan.sync_each_micro_batch": False})


def _less_model_parallel(run: Run) -> Iterator[Change]:
    p = run.plan
    for tp in (n for n in range(1, p.tp) if p.tp % n == 0):
        yield Change("tp", f"tensor parallelism over {tp}" if tp > 1 else "no tensor parallelism", {"plan.tp": tp})
    if p.tp > 1 and not p.sequence_parallel:
        yield Change("sequence_parallel", "sequence parallelism", {"plan.sequence_parallel": True})
    for pp in (n for n in range(1, p.pp) if p.pp % n == 0):
        yield Change("pp", f"a pipeline of {pp} stages" if pp > 1 else "no pipeline", {"plan.pp": pp})
    if p.pp > 1 and p.schedule != "interleaved":
        yield Change("schedule", "the interleaved schedule: a smaller bubble", {"plan.schedule": "interleaved"})
