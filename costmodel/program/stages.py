"""The programs of a pipeline's ranks: the slots of each stage, in the order of the schedule."""

from dataclasses import dataclass
from typing import NamedTuple

from costmodel.program.actions import FORWARD, INPUT, WEIGHT
from costmodel.program.build import Builder, Program, layer_flops, named_kinds, refuse, strategy_of
from costmodel.program.inventory import inventory_of
from costmodel.program.ir import Block, Comm, Op, Part, RankProgram, Seq, Tensor, seq
from costmodel.program.layers import batch_tensors, constant_tensors, numbers_of
from costmodel.program.parallel.base import HEAD
from costmodel.program.parallel.pipeline import EMBEDDING_AXIS, Stage, local, stages_of
from costmodel.program.schedule import Slot, rank_of, rank_order, slot_counts, slot_pattern
from costmodel.program.split import input_slot, weight_slot
from costmodel.program.zerobubble import left_over
from costmodel.spec import DTYPE_BYTES, Run
from costmodel.spec.run import SPLIT


@dataclass(frozen=True, slots=True)
class PipelineRank:
    """One pipeline rank: its slots, its stages, and what surrounds the micro-batches."""

    builders: dict[int, Builder]
    """By stage."""
    slots: dict[Slot, Seq]
    before: Seq
    after: Seq
    """A steady step: what happens when the last micro-batch is done (gradients reduced, parameters updated)."""
    parts: Seq
    """A steady step by what it runs, not by when; ranks that run the same have the same object."""
    last: Slot
    """What it runs last of the schedule."""

    def part(self, slot: Slot) -> Seq:
        """The program of a slot."""
        return self.slots.get(slot) or _part(self.builders, slot)


def _part(builders: dict[int, Builder], slot: Slot) -> Seq:
    builder = builders[slot.stage]
    if slot.kind in (INPUT, WEIGHT):
        return (input_slot if slot.kind == INPUT else weight_slot)(builder, slot.micro)
    return builder.forward_slot(slot.micro) if slot.kind == FORWARD else builder.backward_slot(slot.micro)


def build_pipeline(run: Run) -> Program:
    """The program of every pipeline rank; each is a role of its own."""
    refuse(run)
    p, numbers, m = run.plan, numbers_of(run), run.micro_batches
    like: Builder | None = None
    slots: dict[int, dict[tuple[str, str], Seq]] = {}
    """By the identity of a builder: stages that are alike run the same."""
    kinds: dict[tuple[object, ...], Builder] = {}
    by_stage: dict[int, Builder] = {}
    names = named_kinds(run)[1]
    several = len(set(names)) > 1

    def held(stage: Stage) -> tuple[str, ...]:
        """The kinds of a stage's layers, where a model has several."""
        return names[stage.begins:stage.begins + stage.layers] if several else ()

    for stage in stages_of(run):
        key = stage.layers, stage.first, stage.last, local(run, stage.number), local(run, stage.number + 1), held(stage)
        if key not in kinds:
            inventory = inventory_of(run, stage.layers, begins=stage.begins, embedding=stage.first, head=stage.last,
                                     like=like.strategy.inventory if like else None)
            strategy = strategy_of(run, numbers, inventory)
            for error in strategy.refusals():
                raise error
            kinds[key] = Builder(run, numbers, strategy, inventory, like, stage)
            like = like or kinds[key]
        by_stage[stage.number] = kinds[key]
    assert like is not None
    ranks, roles = [], []
    around: dict[tuple[object, ...], _Around] = {}
    same: dict[tuple[tuple[int, int], ...], Seq] = {}
    """Sequences by the identity of their parts, so that equal ones are one object and are read once."""

    def one(parts: list[tuple[Seq, int]]) -> Seq:
        return same.setdefault(tuple([(id(part), n) for part, n in parts]), Seq(tuple(parts)))

    def joined(parts: list[tuple[Seq, int]]) -> Seq:
        """Neighbours that are the same part are one stretch of it."""
        out: list[tuple[Seq, int]] = []
        for part, n in parts:
            if out and out[-1][0] is part:
                n += out.pop()[1]
            out.append((part, n))
        return one(out)

    for r in range(p.pp):
        mine = {s: b for s, b in by_stage.items() if rank_of(p.schedule, s, p.pp) == r}
        order = p.schedule, p.pp, p.virtual_stages, m, r
        sent = tuple(sum(n for slot, n in slot_counts(*order) if slot.kind == INPUT and slot.stage == s) for s in mine)
        over = left_over(rank_order(*order)) if p.schedule in SPLIT else {}
        left = tuple("" if s == 0 else over.get(s, "") for s in mine)
        alike = *(id(b) for b in mine.values()), *sent, *left
        if alike not in around:
            around[alike] = _around(run, mine, sent, left)
        a = around[alike]
        by_slot: dict[Slot, Seq] = {}
        counts: dict[int, tuple[Seq, int]] = {}
        for slot, n in slot_counts(*order):
            known, place = slots.setdefault(id(mine[slot.stage]), {}), (slot.kind, slot.micro)
            part = known.get(place) or known.setdefault(place, _part(mine, slot))
            by_slot[slot] = part
            counts[id(part)] = part, n + counts.get(id(part), (part, 0))[1]
        parts = one([(a.before, 1), *counts.values(), (a.after, 1)])
        pattern = slot_pattern(*order)
        middle = joined([(by_slot[slots[0]] if len(slots) == 1 else one([(by_slot[slot], 1) for slot in slots]), count) for slots, count in pattern])
        step, first_step = Seq((*a.before.parts, (middle, 1), (a.after, 1))), Seq((*a.first_before.parts, (middle, 1), (a.first_after, 1)))
        ranks.append(PipelineRank(mine, by_slot, a.before, a.after, parts, pattern[-1][0][-1]))
        ranks_of = run.cluster.gpus // p.pp
        roles.append(RankProgram(f"pipeline rank {r}", ranks_of, r * ranks_of + like.strategy.first_rank, a.persistent, step, first_step))
    recomputed = sum(b.recomputed_flops for b in by_stage.values())
    whole = inventory_of(run, like=like.strategy.inventory)
    return Program(tuple(roles), like.strategy, whole, numbers, layer_flops(like.unit, names),
                   like.unit[HEAD].matmul_flops, recomputed, like, tuple(ranks))


def _ends(run: Run, mine: dict[int, Builder]) -> tuple[bool, bool]:
    """Whether a rank holds the first and the last stage of a pipeline."""
    return any(b.stage.first for b in mine.values()), any(b.stage.last for b in mine.values())


def _inputs(run: Run, mine: dict[int, Builder]) -> tuple[Tensor, ...]:
    """Token ids of all micro-batches on the first stage's rank, targets on the last's."""
    tokens, targets = batch_tensors(run)
    first, last = _ends(run, mine)
    kept = [t for t, on in ((tokens, first), (targets, last)) if on]
    return tuple(t._replace(nbytes=t.nbytes * run.micro_batches) for t in kept)


class _Around(NamedTuple):
    """What a rank holds, and what surrounds its micro-batches in a steady step and in the first."""

    persistent: tuple[Tensor, ...]
    before: Seq
    after: Seq
    first_before: Seq
    first_after: Seq


def _around(run: Run, mine: dict[int, Builder], sent: tuple[int, ...], left: tuple[str, ...]) -> _Around:
    """`sent`: how many gradients each stage sends in first passes, which stay until the next step begins; `left`: what its last second pass
    leaves over."""
    builders = list(mine.values())
    inputs = _inputs(run, mine)
    kept = tuple(t for b, n in zip(builders, sent, strict=True) for t in b.links.sent_gradients(n))
    done = _done(run, builders, inputs, any(_ends(run, mine)), left)
    before, first_before = (seq(*(b.begin(first) for b in builders), Block("batch", "forward", (
        Op("batch", "host", kernels=0, allocs=inputs, frees=() if first else kept),))) for first in (False, True))
    after, first_after = (seq(*done, *(b.update(_role(b), first, clips=False) for b in builders)) for first in (False, True))
    return _Around(tuple(_persistent(run, builders)), before, after, first_before, first_after)


def _role(builder: Builder) -> str:
    return builder.strategy.roles()[0][0]


def _persistent(run: Run, builders: list[Builder]) -> list[Tensor]:
    out: list[Tensor] = []
    for b in builders:
        out += [*b.strategy.persistent(_role(b)), *b.links.buffers(), *constant_tensors(run, b.numbers)]
    return out


def _done(run: Run, builders: list[Builder], inputs: tuple[Tensor, ...], ends: bool, left: tuple[str, ...]) -> list[Part | tuple[Part, int]]:
    """When the last micro-batch is: reduce what waits for it, sum a tied embedding's gradient, clip. `left`: what each stage's last second pass
    left over."""
    released = (*inputs, *(t for b in builders for t in b.links.at_end(b.kept_output())))
    parts: list[Part | tuple[Part, int]] = [Block("batch", "backward", (Op("batch.release", "host", kernels=0, frees=released),))]
    for b, word in zip(builders, left, strict=True):
        parts += [(Block("stage", "backward", tuple(ops)), n) for ops, n in b.strategy.after_micro_batches(word)]
    if run.model.tied_embeddings and ends:
        table = builders[0].strategy.inventory.tied_numel(run)
        dtype = run.recipe.precision.gradient
        nbytes = table * DTYPE_BYTES[dtype]
        parts.append(Block("stage", "backward", (Op("embedding.all_reduce", "collective", dtype=dtype, comm=Comm(
            EMBEDDING_AXIS, "all-reduce", nbytes, nbytes, nbytes, dtype, 2)),)))
    if run.recipe.clip_norm:
        parts.append(Block("update", "optimizer", tuple(_clip(run, builders))))
    return parts


def _clip(run: Run, builders: list[Builder]) -> list[Op]:
    """Gradients of all stages of a rank are clipped together, by a norm that is summed over the pipeline in their dtype."""
    strategies = [b.strategy for b in builders]
    updates = [b.strategy.update(_role(b)) for b in builders]
    whole = updates[0]._replace(numel=sum(u.numel for u in updates), tensors=sum(u.tensors for u in updates))
    ops = strategies[0].clip(whole)
    for s in strategies[1:]:
        ops[1:1] = s.norm_sums() if s.late_norms else []
    each = DTYPE_BYTES[whole.grad]
    total = Comm("pp", "all-reduce", each, each, each, whole.grad, run.plan.pp)
    return [*ops[:-1], Op("clip.all_reduce", "collective", dtype=whole.grad, comm=total), *ops[-1:]]


__all__ = ["PipelineRank", "Stage", "build_pipeline"]
