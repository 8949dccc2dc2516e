"""From a Run to the program of each rank role: the units are recorded once, the strategy adds what it sends and keeps."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from costmodel.program import float8
from costmodel.program.halves import Halves
from costmodel.program.host import COMPILE, work
from costmodel.program.inventory import Inventory, inventory_of
from costmodel.program.ir import Block, Op, Part, RankProgram, Seq, Tensor, periods, seq
from costmodel.program.latent import refusals as latent_refusals
from costmodel.program.layers import (
    Numbers,
    Unit,
    constant_tensors,
    embedding_unit,
    head_unit,
    layer_unit,
    numbers_of,
    resolved_attention,
)
from costmodel.program.parallel.base import EMBEDDING, FIRST, HEAD, LAST, LAYER, MIDDLE, ONLY, Strategy
from costmodel.program.parallel.context import ContextParallel
from costmodel.program.parallel.dataparallel import DataParallel
from costmodel.program.parallel.ddp import DDP
from costmodel.program.parallel.deepspeed import DeepSpeedZero, DeepSpeedZero3
from costmodel.program.parallel.deepspeed_offload import OffloadedZero, OffloadedZero3
from costmodel.program.parallel.expert import refusals as expert_refusals
from costmodel.program.parallel.expert_fsdp import ExpertFSDP
from costmodel.program.parallel.expert_megatron import MegatronExperts
from costmodel.program.parallel.fsdp import FSDP
from costmodel.program.parallel.fsdp_offload import OffloadedFSDP
from costmodel.program.parallel.megatron import MegatronDP
from costmodel.program.parallel.megatron_fsdp import MegatronFSDP
from costmodel.program.parallel.nanochat import Nanochat
from costmodel.program.parallel.offload import refusals as offload_refusals
from costmodel.program.parallel.pipeline import WHOLE, Links, Stage
from costmodel.program.parallel.pipeline import refusals as pipeline_refusals
from costmodel.program.parallel.tensor import TensorParallel
from costmodel.program.parallel.zero import Zero1, Zero2
from costmodel.program.tape import GradReady
from costmodel.program.windows import refusals as window_refusals
from costmodel.spec import PlanError, Run
from costmodel.spec.kinds import LayerKind, layer_kinds


@dataclass(frozen=True, slots=True)
class Program:
    """The programs of a run's rank roles, and the totals of one micro-batch that utilisation needs."""

    roles: tuple[RankProgram, ...]
    strategy: Strategy
    inventory: Inventory
    numbers: Numbers
    layer_flops: float
    """Forward FLOPs of all layers' matmuls and of attention over the whole square, one micro-batch on one rank."""
    head_flops: float
    """Forward FLOPs of the output matrix, one micro-batch on one rank."""
    recomputed_flops: float
    """Forward FLOPs that backward computes again, one micro-batch on one rank."""
    builder: "Builder"
    pipeline: tuple[Any, ...] = ()
    """The pipeline's ranks (costmodel.program.stages.PipelineRank); empty without pipeline parallelism."""

    @property
    def model_flops(self) -> float:
        """FLOPs that one micro-batch needs on one rank: backward is twice forward."""
        return 3.0 * (self.layer_flops + self.head_flops)

    @property
    def hardware_flops(self) -> float:
        """With activation recompute, and the head's where the loss is chunked."""
        again = self.recomputed_flops + (self.head_flops if self.builder.run.recipe.loss == "chunked" else 0.0)
        return self.model_flops + again


def strategy_of(run: Run, numbers: Numbers, inventory: Inventory) -> Strategy:
    """The strategy that a plan names."""
    p = run.plan
    if p.framework == "megatron" and p.zero == 3:
        return MegatronFSDP(run, numbers, inventory)
    if p.framework == "megatron" or (p.framework == "deepspeed" and not p.zero):
        return (MegatronExperts if p.experts_apart else MegatronDP)(run, numbers, inventory)
    if p.framework == "nanochat":
        return Nanochat(run, numbers, inventory)
    if p.framework == "deepspeed":
        if p.offload != "none":
            return (OffloadedZero3 if p.zero == 3 else OffloadedZero)(run, numbers, inventory)
        return (DeepSpeedZero3 if p.zero == 3 else DeepSpeedZero)(run, numbers, inventory)
    if p.zero == 3:
        return (OffloadedFSDP if p.offload != "none" else ExpertFSDP if p.ep > 1 else FSDP)(run, numbers, inventory)
    if p.zero == 2:
        return Zero2(run, numbers, inventory)
    if p.zero == 1:
        return Zero1(run, numbers, inventory)
    if p.single_process and p.dp > 1:
        return DataParallel(run, numbers, inventory)
    return DDP(run, numbers, inventory) if p.dp * p.cp > 1 else Strategy(run, numbers, inventory)


def refusals(run: Run) -> Iterator[PlanError]:
    """What can be described but not predicted yet."""
    m, p, r = run.model, run.plan, run.recipe
    for on, field, value, what, fix in (
            (m.mtp_depth > 0, "model.mtp_depth", m.mtp_depth, "multi-token prediction", "Use mtp_depth = 0."),
            (bool(m.hybrid), "model.hybrid", m.hybrid, f"{m.hybrid or 'hybrid'} layers", "Use a pure Transformer."),
            (m.attention_sinks, "model.attention_sinks", True, "attention sinks", "Use a model without sinks."),
            (m.norms_per_layer not in ((1, 2) if m.parallel_residual else (4,) if m.norm_placement == "sandwich" else (2,)),
             "model.norms_per_layer", m.norms_per_layer, f"that many norms with norm_placement {m.norm_placement}"
             f"{' and a parallel residual' if m.parallel_residual else ''}",
             "Use 2; 4 with norm_placement = sandwich; 1 or 2 with a parallel residual."),
            (m.embedding_dim != m.hidden, "model.embedding_dim", m.embedding_dim, "an embedding narrower than the model", "Use embedding_dim = hidden."),
            (run.cluster.accelerator.kind not in ("cuda", "rocm", "cpu"), "cluster.accelerator", run.cluster.accelerator.name,
             f"the kernels of this kind of device ({run.cluster.accelerator.kind})", "Use a GPU or a CPU."),
            (p.framework == "megatron" and p.zero == 3 and p.pp > 1, "plan.pp", p.pp, "a pipeline with Megatron-FSDP", "Use pp = 1, or zero = 1."),
            (p.forward_prefetch > 0, "plan.forward_prefetch", p.forward_prefetch, "explicit prefetching in forward", "Use forward_prefetch = 0."),
            (p.framework == "pytorch" and r.precision.gradient != r.precision.parameter, "recipe.precision.gradient", r.precision.gradient,
             f"gradients of another dtype than their parameters ({r.precision.parameter})", f"Use gradient = {r.precision.parameter}."),
            (m.extra_params > 0, "model.extra_params", m.extra_params, f"parameters outside this scheme ({m.extra_params_note or 'not said which'})",
             "Use model.extra_params = 0 to leave them out."),
            (not r.zero_set_to_none and (p.zero >= 2 or p.framework != "pytorch"), "recipe.zero_set_to_none", False,
             "gradients zeroed in place under this strategy", "Use zero_set_to_none = true."),
            (p.checkpointing.mode == "selective" and not {*p.checkpointing.ops} < {"attention", "op", ""} or len(p.checkpointing.ops) > 1,
             "plan.checkpointing.ops", list(p.checkpointing.ops), "this list of operations", 'Use ["attention"] or ["op"].'),
            (r.optimizer.name == "muon" and (p.framework not in ("pytorch", "nanochat") or p.framework == "pytorch" and p.zero > 0 or p.tp * p.pp > 1),
             "recipe.optimizer", "muon", "Muon where matrices are split, or in this dialect", "Use ddp, the strategy muon-distributed, or adamw."),
            (p.framework == "pytorch" and r.precision.master is not None, "recipe.precision.master", r.precision.master,
             "a master copy in the PyTorch dialect", "Use parameter = fp32, or framework = megatron."),
            (r.cuda_graphs and r.compile is False and not (m.moe and p.framework == "megatron"), "recipe.cuda_graphs", True, "CUDA graphs of eager code",
             "Use compile = true with it.")):
        if on:
            yield PlanError(field, value, f"{what}: not predicted yet.", fix)
    if r.precision.compute == "fp8" or r.precision.fp8_gather or r.precision.fp8_parameters:
        yield from float8.refusals(run)
    yield from latent_refusals(run)
    yield from window_refusals(run)
    if run.plan.offload != "none" or run.plan.activation_offload:
        yield from offload_refusals(run)
    yield from expert_refusals(run)
    yield from TensorParallel.refusals(run)
    yield from ContextParallel.refusals(run, resolved_attention(run))
    yield from pipeline_refusals(run)


Marked = tuple[list[Op], list[tuple[int, GradReady]]]
"""Ops, and the gradients that are there after so many of them."""


EDGES = (EMBEDDING, HEAD)
"""Units that are no layers."""


def titled(unit: str) -> str:
    """A unit as strategies and readers know it: layers of every kind are layers."""
    return unit if unit in EDGES else LAYER


def named_kinds(run: Run) -> tuple[dict[LayerKind, str], tuple[str, ...]]:
    """The kinds of a model's layers with the names of their units, that of the last layer first, called LAYER; and the unit of each layer."""
    each = layer_kinds(run.model, run.recipe.seq_len)
    kinds = {each[-1]: LAYER}
    for kind in sorted(set(each)):
        kinds.setdefault(kind, f"{LAYER} of kind {len(kinds) + 1}")
    return kinds, (LAYER,) * len(each) if len(kinds) == 1 else tuple(kinds[kind] for kind in each)


def layer_flops(units: Mapping[str, Unit], names: Sequence[str]) -> float:
    """Forward FLOPs of the matmuls and of the attention (every pair) of layers, by the names of their units."""
    return sum(n * (units[name].matmul_flops + units[name].attention_flops) for name, n in Counter(names).items())


class Builder:
    """Assembles one role's step; equal blocks are made once."""

    def __init__(self, run: Run, numbers: Numbers, strategy: Strategy, inventory: Inventory, like: "Builder | None" = None,
                 stage: Stage | None = None, *, busiest: bool = True) -> None:
        self.run = run
        self.stage = stage or Stage(WHOLE, inventory.layers, True, True)
        self.tied = run.model.tied_embeddings and self.stage.first and self.stage.last
        """Lookup and head share a matrix on this rank."""
        self.numbers = numbers
        self.strategy = strategy
        self.layers = inventory.layers
        kinds, names = named_kinds(run)
        first = self.stage.begins
        self.names = names[first:first + self.layers]
        """Of each layer the unit of its kind; strategies call all of them LAYER."""
        self.unit: dict[str, Unit] = like.unit if like else {EMBEDDING: embedding_unit(run, numbers), HEAD: head_unit(run, numbers), **{
            name: layer_unit(run, numbers, kind, busiest=busiest) for kind, name in kinds.items()}}
        self.blocks: dict[object, Block] = {}
        self.cores: dict[object, Block] = like.cores if like else {}
        """Forward and recompute of a unit, the same under every strategy; its backward, the same on every stage."""
        self.places: dict[int, list[int]] = like.places if like else {}
        """Where in a backward the tape's own ops are, by its identity."""
        self.parts: dict[object, Part] = {}
        self.slots: dict[tuple[object, ...], Seq] = {}
        self.sends: dict[str, list[tuple[Part, int]]] = {}
        self.raw: dict[object, list[Op]] = like.raw if like else {}
        self.raw_backward: dict[object, Marked] = like.raw_backward if like else {}
        self.halves: dict[object, Halves] = like.halves if like else {}
        layer = self.unit[LAYER]
        assert layer.entry is not None
        self.links = Links(run, self.stage, layer.entry.numel // run.model.hidden, layer.entry.dtype)
        self.borrowed = self._borrowed()
        """Layers whose input, and whose output's gradient, belong to a receive buffer."""
        c = run.plan.checkpointing
        self.group = c.group if c.mode == "full" else 1
        self.every = c.every if c.mode == "full" else 1
        self.by_op = c.mode == "selective" and c.ops == ("op",)
        self.checkpoints = c.mode == "full" or self.by_op
        pattern = [True] + [False] * (self.every - 1)
        self.checkpointed = (pattern * (self.layers // self.every + 1))[:self.layers] if self.checkpoints else [False] * self.layers

    def _borrowed(self) -> list[tuple[bool, bool]]:
        out = [(False, False)] * self.layers
        if out and self.links.borrows_gradient:
            out[-1] = False, True
        if out and self.links.borrows_input:
            out[0] = True, out[0][1]
        return out

    def block(self, key: object, name: str, phase: str, ops: list[Op]) -> Block:
        if key not in self.blocks:
            self.blocks[key] = Block(name, phase, tuple(ops))
        return self.blocks[key]

    def small(self, name: str, phase: str, ops: Iterable[Op]) -> Block:
        """A block of a few ops, one object wherever it occurs in the program."""
        made = tuple(ops)
        key = (name, phase, made)
        if key not in self.cores:
            self.cores[key] = Block(name, phase, made)
        return self.cores[key]

    def wrapped(self, name: str, phase: str, before: list[Op], core: Block, after: list[Op]) -> Part:
        """A unit's own block between what the strategy does around it; a compiled layer is entered by a call."""
        if self.numbers.compiled and name == LAYER:
            before = [*before, work("compiled.call", COMPILE)]
        if not before and not after:
            return core
        around = [[(self.small(name, phase, ops), 1)] if ops else [] for ops in (before, after)]
        return Seq((*around[0], (core, 1), *around[1]))

    @property
    def recomputed_flops(self) -> float:
        """Forward FLOPs that backward computes again, over this stage's layers, one micro-batch."""
        c, units = self.run.plan.checkpointing, self.unit
        if self.by_op:
            return sum(n * (units[name].matmul_flops - units[name].cached_flops) for name, n in Counter(self.names).items())
        if c.mode == "selective":
            return sum(n * units[name].attention_flops for name, n in Counter(self.names).items())
        return layer_flops(units, self._checkpointed_names())

    def _checkpointed_names(self) -> tuple[str, ...]:
        return self.names if all(self.checkpointed) else tuple(name for name, chk in zip(self.names, self.checkpointed, strict=True) if chk)

    # -- forward -----------------------------------------------------------------------------------------------------------

    def _forward_ops(self, unit: str, *, save: bool, drop: bool, until: int | None = None, phase: str = "forward") -> list[Op]:
        again = until is not None or phase == "recompute"
        cached = self.unit[unit].cached if self.by_op and unit not in EDGES and (again or not save) else frozenset()
        key = (unit, save, drop, until, bool(cached))
        if key not in self.raw:
            u = self.unit[unit]
            self.raw[key] = u.tape.forward((u.exit, *u.kept) if until is None else (), save=save, until=until, drop=u.entry if drop else None,
                                           cached=cached)
        return self.raw[key]

    def saves_entry(self, unit: str) -> bool:
        entry = self.unit[unit].entry
        return entry is not None and entry.saves > 0

    def _runs(self, phase: str, micro: str) -> Iterator[tuple[int, int, bool, object]]:
        """Stretches of layers of one kind that are treated alike: (first layer, how many, checkpointed, the strategy's key)."""
        keys = zip(self.checkpointed, self.strategy.layer_variants(phase, micro), self.borrowed, self.names, strict=True)
        index = 0
        for (chk, variant, *_), run in groupby(keys):
            n = len(list(run))
            yield index, n, chk, variant
            index += n

    def forward_layers(self, micro: str) -> list[tuple[Part, int]]:
        """Blocks of the layers' forward. A checkpointed layer keeps its input alone; inside a group not even that."""
        parts: list[tuple[Part, int]] = []
        for first, n, chk, variant in self._runs("forward", micro):
            if chk and self.group > 1:
                parts += [(self._forward_block(i, micro, chk, i % self.group != 0, variant), 1) for i in range(first, first + n)]
            else:
                drop = not chk and not self.saves_entry(self.names[first]) and not self.borrowed[first][0]
                parts.append((self._forward_block(first, micro, chk, drop, variant), n))
        return parts

    def _forward_block(self, index: int, micro: str, chk: bool, drop: bool, variant: object) -> Part:
        name = self.names[index]
        key = ("forward", name, chk, drop, variant, self.strategy.forward_key(micro))
        if key not in self.parts:
            s, core = self.strategy, self.forward_core(name, save=not chk, drop=drop, micro=micro)
            after = s.after_forward(LAYER, index, micro)
            if chk and self.numbers.autocast:
                after = [Op("autocast.cache", "host", kernels=0, allocs=(self._autocast_cache((name,)),)), *after]
            self.parts[key] = self.wrapped(LAYER, "forward", s.before_forward(LAYER, index, micro), core, after)
        return self.parts[key]

    def _autocast_cache(self, names: tuple[str, ...]) -> Tensor:
        """Low-precision weights that autocast keeps until forward ends, of layers (their units) whose graph does not hold them."""
        return Tensor("autocast cache", "temporaries", sum(n * self.unit[name].weights_cast_bytes for name, n in Counter(names).items()))

    def forward_core(self, unit: str, *, save: bool, drop: bool, micro: str = ONLY) -> Block:
        key = (unit, "forward", save, drop, self.strategy.forward_key(micro) if self.unit[unit].tape.marked else None)
        if key not in self.cores:
            ops = self._forward_ops(unit, save=save, drop=drop)
            self.cores[key] = Block(titled(unit), "forward", tuple(self._placed(unit, ops, "forward", micro=micro)))
        return self.cores[key]

    def _placed(self, unit: str, ops: list[Op], phase: str, index: int = 0, micro: str = ONLY) -> list[Op]:
        """The ops of a unit, with what the strategy does at its marks."""
        if not self.unit[unit].tape.marked:
            return ops
        again = phase == "backward" and self.checkpointed[index]
        return [each for op in ops for each in (self.strategy.at_mark(op.name, phase, index, micro, again=again) if op.kind == "mark" else (op,))]

    def forward_edge(self, unit: str, micro: str, before: list[Op], after: list[Op], *, replaces: bool = False) -> Part:
        alone = self.layers == 0 and self.links.borrows_input
        s, drop = self.strategy, unit == HEAD and not self.saves_entry(HEAD) and not alone
        core = self.forward_core(unit, save=True, drop=drop)
        if replaces:
            core = self._replacing(core)
        return self.wrapped(unit, "forward", [*before, *s.before_forward(unit, 0, micro)], core, [*s.after_forward(unit, 0, micro), *after])

    def _replacing(self, head: Block) -> Block:
        """A head whose logits, once made, take the place of the previous micro-batch's in the schedule's loop."""
        kept = {t.name for t in self.kept_output()}
        ops = [op.freeing(tuple(self.kept_output())) if kept & {t.name for t in op.allocs} else op for op in head.ops]
        return self.block((HEAD, "forward", "replaces"), head.name, head.phase, ops)

    # -- backward ----------------------------------------------------------------------------------------------------------

    def _raw_backward(self, unit: str, borrowed: tuple[bool, bool]) -> Marked:
        """The unit's backward as the tape derives it, and which gradients are there after so many of its ops."""
        key = (unit, borrowed)
        if key not in self.raw_backward:
            u, frees = self.unit[unit], self.saves_entry(unit)
            if borrowed[0] and frees:
                assert u.entry is not None
                ops, marks = self._raw_backward(unit, (False, borrowed[1]))
                self.raw_backward[key] = _keeping(ops, Tensor(u.entry.name, "activations", u.entry.own_bytes)), marks
            else:
                ops, marks = _marked(u.tape.backward(u.exit, u.entry, free_entry=frees, owned=not borrowed[1]))
                if borrowed[1]:
                    own = self._raw_backward(unit, (borrowed[0], False))[0]
                    ops = [a if a == b else b for a, b in zip(own, ops, strict=True)]
                self.raw_backward[key] = ops, marks
        return self.raw_backward[key]

    def with_gradients(self, unit: str, index: int, micro: str, items: Sequence[Op | GradReady]) -> list[Op]:
        """A unit's backward, with what the strategy does as each gradient appears."""
        return self._with_gradients(unit, index, micro, _marked(items))[0]

    def _with_gradients(self, unit: str, index: int, micro: str, items: Marked) -> tuple[list[Op], list[int]]:
        """A unit's backward, with what the strategy does as each gradient appears, and where in it the tape's own ops are.

        The engine holds the head's gradient of a tied embedding until the lookup's has been added to it, out of place.
        """
        out: list[Op] = []
        ops, marks = items
        done = 0
        places: list[int] = []
        for at, item in marks:
            places += range(len(out), len(out) + at - done)
            out += self._placed(unit, ops[done:at], "backward", index, micro)
            done = at
            tied = self.tied and item.param.name == "embedding.weight"
            first_use = Tensor("tied embedding gradient", "temporaries", item.nbytes)
            if tied and unit == HEAD:
                out[-1] = out[-1].taking((first_use,))
                continue
            allocs, more = self.strategy.on_grad(titled(unit), index, item, micro)
            if tied:
                lookup = Tensor("lookup gradient", "temporaries", item.nbytes)
                out[-1] = out[-1].taking((lookup,))
                out.append(Op("embedding.accumulate_tied", "memory", nbytes=3.0 * item.nbytes, dtype=item.dtype, allocs=allocs,
                              frees=(first_use, lookup)))
            elif allocs:
                out[-1] = out[-1].taking(allocs)
            out += more
        places += range(len(out), len(out) + len(ops) - done)
        return out + self._placed(unit, ops[done:], "backward", index, micro), places

    def backward_layers(self, micro: str) -> list[tuple[Part, int]]:
        """Blocks of the layers' backward, last layer first; a checkpointed layer or group is computed again before its own."""
        parts: list[tuple[Part, int]] = []
        variants = self.strategy.layer_variants("backward", micro)
        for first, n, chk, variant in reversed(list(self._runs("backward", micro))):
            if not chk:
                parts.append((self._backward_block(first, micro, variant), n))
            elif self.group == 1:
                again = self._recompute_block(first, micro, variant, (first, first))
                back = self._backward_block(first, micro, variant, (first, first))
                both = ("both", id(again), id(back))
                if both not in self.parts:
                    self.parts[both] = Seq(((again, 1), (back, 1)))
                parts.append((self.parts[both], n))
        if self.checkpoints and self.group > 1:
            starts = range(0, self.layers, self.group)
            for start in reversed(starts):
                members = range(start, min(start + self.group, self.layers))
                span = start, members[-1]
                parts += [(self._recompute_block(i, micro, variants[i], span), 1) for i in members]
                parts += [(self._backward_block(i, micro, variants[i], span), 1) for i in reversed(members)]
        return parts

    def _recompute_block(self, index: int, micro: str, variant: object, span: tuple[int, int]) -> Part:
        """A layer of the checkpoint `span` (its first and last layer) runs forward again, saving; the last one stops early."""
        first, last = span
        name = self.names[index]
        drop = index > first and not self.saves_entry(name)
        key = ("recompute", name, micro, drop, variant, *self._place(index, span))
        if key not in self.parts:
            core_key = (name, "recompute", drop, index == last)
            if core_key not in self.cores:
                stop = self.unit[name].tape.recompute_until if index == last else None
                again = self._forward_ops(name, save=True, drop=drop, until=stop, phase="recompute")
                self.cores[core_key] = Block(LAYER, "recompute", tuple(self._placed(name, again, "recompute")))
            self.parts[key] = self.wrapped(LAYER, "recompute", self.strategy.before_recompute(index, micro, first, last), self.cores[core_key], [])
        return self.parts[key]

    def _place(self, index: int, span: tuple[int, int]) -> tuple[bool, ...]:
        """Where a layer stands in its checkpoint, and its checkpoint in the model."""
        first, last = span
        return index == first, index == last, index == last - 1, first == 0, last == self.layers - 1

    def _backward_block(self, index: int, micro: str, variant: object, span: tuple[int, int] | None = None) -> Part:
        """Backward of a layer, of the checkpoint `span` if it was computed again; the checkpoint's input goes with its first."""
        s, name = self.strategy, self.names[index]
        u = self.unit[name]
        borrowed = self.borrowed[index]
        release = span is not None and index == span[0] and not self.saves_entry(name) and not borrowed[0]
        key = ("backward", name, micro, release, borrowed, variant, *(self._place(index, span) if span else ()))
        if key not in self.parts:
            before = s.before_recomputed_backward(index, micro, *span) if span else s.before_backward(LAYER, index, micro)
            after = s.after_backward(LAYER, index, micro)
            if self.by_op:
                after = [Op("checkpoint.release", "host", kernels=0, frees=self._never_used(u)), *after]
            if release and u.entry is not None:
                after = [Op("checkpoint.release", "host", kernels=0, frees=(Tensor(u.entry.name, "activations", u.entry.nbytes),)), *after]
            self.parts[key] = self.wrapped(LAYER, "backward", before, self.backward_core(name, index, micro, variant, borrowed), after)
        return self.parts[key]

    def _never_used(self, unit: Unit) -> tuple[Tensor, ...]:
        """What per-operation checkpointing kept beyond the point where the recompute stops."""
        tape = unit.tape
        return tuple(t for i in sorted(unit.cached) if i >= tape.recompute_until for node in (tape.nodes[i],)
                     for t in (*(Tensor(v.name, "activations", v.own_bytes) for v in node.outputs), *(node.extra if node.kind != "matmul" else ())))

    def backward_core(self, unit: str, index: int, micro: str, variant: object, borrowed: tuple[bool, bool] = (False, False)) -> Block:
        """A unit's own backward, with what happens to its gradients as they appear; the same on every stage."""
        marked = self.unit[unit].tape.marked
        again = unit not in EDGES and marked and self.checkpointed[index]
        key = (unit, "backward", self.strategy.gradient_key(micro, variant), unit != LAYER and self.tied, again, borrowed)
        core = self.cores.get(key)
        if core is None:
            own = self.backward_core(unit, index, micro, variant) if any(borrowed) else None
            if own is not None and not marked:
                core = Block(titled(unit), "backward", self._borrowing(unit, own.ops, self.places[id(own)], borrowed), own)
            else:
                ops, places = self._with_gradients(unit, index, micro, self._raw_backward(unit, borrowed))
                core = Block(titled(unit), "backward", tuple(ops), own)
                self.places[id(core)] = places
            self.cores[key] = core
        return core

    def _borrowing(self, unit: str, own: tuple[Op, ...], places: list[int], borrowed: tuple[bool, bool]) -> tuple[Op, ...]:
        """A unit's backward where its input, or its output's gradient, is not its own to free: other ops of the tape in the same places."""
        ops = list(own)
        before, after = self._raw_backward(unit, (False, False))[0], self._raw_backward(unit, borrowed)[0]
        for mine, other, at in zip(before, after, places, strict=True):
            if other is not mine:
                ops[at] = other.taking(ops[at].allocs[len(mine.allocs):])
        return tuple(ops)

    def backward_edge(self, unit: str, micro: str, before: list[Op], after: list[Op]) -> Part:
        s = self.strategy
        return self.wrapped(unit, "backward", [*before, *s.before_backward(unit, 0, micro)], self.backward_core(unit, 0, micro, s.unit_variant(unit, micro)),
                            [*s.after_backward(unit, 0, micro), *after])

    # -- step --------------------------------------------------------------------------------------------------------------

    def forward_slot(self, micro: str) -> Seq:
        """Forward of one micro-batch through this stage."""
        key = ("forward", self.strategy.forward_key(micro), self._replaces(micro))
        if key not in self.slots:
            self.slots[key] = self._forward(micro)
        return self.slots[key]

    def backward_slot(self, micro: str) -> Seq:
        """Its backward."""
        micro = self._class(micro)
        key = ("backward", micro)
        if key not in self.slots:
            self.slots[key] = self._backward(micro)
        return self.slots[key]

    def _class(self, micro: str) -> str:
        """The class of micro-batch that this one's backward behaves like, for the strategy and for the schedule's loop."""
        return micro if self.links.keeps_last_output else self.strategy.like(micro)

    def _replaces(self, micro: str) -> bool:
        """Whether the output of this micro-batch takes the place of the previous one's."""
        return self.links.keeps_until_next and micro not in (FIRST, ONLY)

    def _forward(self, micro: str) -> Seq:
        s, stage, links = self.strategy, self.stage, self.links
        whole = stage.number == WHOLE
        batch = self.strategy.batch() if whole else ()
        enter = [Op("batch", "host", kernels=0, allocs=batch), *links.before_forward(), *s.forward_begin(micro)]
        leave = [*s.forward_end(micro), *links.after_forward()]
        if self.numbers.autocast and any(self.checkpointed):
            leave.append(Op("autocast.exit", "host", kernels=0, frees=(self._autocast_cache(self._checkpointed_names()),)))
        parts: list[Part | tuple[Part, int]] = []
        if stage.first:
            parts.append(self.forward_edge(EMBEDDING, micro, enter, []))
        else:
            parts.append(self.small("stage", "forward", enter))
        parts += compress(self.forward_layers(micro))
        if stage.last:
            parts.append(self.forward_edge(HEAD, micro, [], leave, replaces=self._replaces(micro)))
        else:
            parts.append(self.small("stage", "forward", leave))
        return seq(*parts)

    def _backward(self, micro: str) -> Seq:
        s, stage, links, head = self.strategy, self.stage, self.links, self.unit[HEAD]
        whole = stage.number == WHOLE
        parts: list[Part | tuple[Part, int]] = []
        ending: list[Op] = []
        if stage.last:
            loss = Tensor("grad:loss", "temporaries", head.exit.nbytes)
            start = [Op("loss.grad", "memory", nbytes=8.0, allocs=(loss,)), *s.backward_begin(micro)]
            parts.append(self.backward_edge(HEAD, micro, start, []))
            done = (Tensor("loss", "activations", head.exit.nbytes), *(s.batch() if whole else ()))
            ending.append(Op("loss.release", "host", kernels=0, frees=done))
        else:
            parts.append(self.small("stage", "backward", (*links.before_backward(), *s.backward_begin(micro))))
        parts += compress(self.backward_layers(micro))
        ending += [*links.after_backward(micro, self.kept_output()), *s.backward_end(micro)]
        parts.append(self.backward_edge(EMBEDDING, micro, [], ending) if stage.first else self.small("stage", "backward", ending))
        return seq(*parts)

    def kept_output(self) -> tuple[Tensor, ...]:
        """What is held of a micro-batch from its forward to its backward: by PyTorch's pipeline the stage's output, the last one's logits; the
        logits that DataParallel gathered."""
        if not (self.links.torch or self.run.plan.single_process):
            return ()
        if self.stage.last:
            return tuple(Tensor(v.name, "activations", v.own_bytes) for v in self.unit[HEAD].kept)
        return () if self.links.local_after else (Tensor("hidden", "activations", self.links.message),)

    def micro_batch(self, micro: str) -> Seq:
        """One forward and backward."""
        halves = self.forward_slot(micro), self.backward_slot(micro)
        key = ("both", *map(id, halves))
        if key not in self.slots:
            self.slots[key] = seq(*halves)
        return self.slots[key]

    def begin(self, first: bool) -> Block:
        """What happens before the first micro-batch."""
        return self.block(("begin", first), "zero_grad", "optimizer", self.strategy.begin_step(first))

    def update(self, role: str, first: bool, *, clips: bool = True) -> Seq:
        """Clipping, the optimizer step and what is sent after it."""
        s = self.strategy
        updated = s.update(role)
        clip = s.clip(updated) if self.run.recipe.clip_norm and clips else []
        (begin, _), *rest = s.updates(role, first)
        parts: list[tuple[Part, int]] = [(self.block(("update", role, first), "update", "optimizer", [*s.unscale(updated), *clip, *begin]), 1)]
        parts += [(self.block(("update", role, first, i), "update", "optimizer", ops), n) for i, (ops, n) in enumerate(rest)]
        if role not in self.sends:
            self.sends[role] = [(Block("update", "optimizer", tuple(ops)), n) for ops, n in s.after_step(role)]
        return seq(*parts, *self.sends[role])

    def step(self, role: str, first: bool, micro_batches: int | None = None) -> Seq:
        """A step of the run's micro-batches, or of another number of them."""
        m = micro_batches or self.run.micro_batches
        parts: list[Part | tuple[Part, int]] = [self.begin(first)]
        if m == 1:
            parts.append(self.micro_batch(ONLY))
        else:
            parts.append(self.micro_batch(FIRST))
            if m > 2:
                parts.append((self.micro_batch(MIDDLE), m - 2))
            parts.append(self.micro_batch(LAST))
        parts.append(self.update(role, first))
        return seq(*parts)


def _marked(items: Sequence[Op | GradReady]) -> Marked:
    """Ops and the gradients between them, apart."""
    at = [i for i, item in enumerate(items) if isinstance(item, GradReady)]
    return [item for item in items if isinstance(item, Op)], [(i - before, items[i]) for before, i in enumerate(at)]  # type: ignore[misc]


def _keeping(ops: list[Op], tensor: Tensor) -> list[Op]:
    """The ops without the release of a tensor."""
    out = list(ops)
    for i, op in enumerate(ops):
        if tensor in op.frees:
            frees = list(op.frees)
            frees.remove(tensor)
            out[i] = op._replace(frees=tuple(frees))
    return out


def compress(parts: list[tuple[Part, int]]) -> list[tuple[Part, int]]:
    """Parts with counts, in which neighbours that are the same part, and a period of parts that repeats, are one part."""
    joined: list[tuple[Part, int]] = []
    for part, n in parts:
        if joined and joined[-1][0] is part:
            n += joined.pop()[1]
        joined.append((part, n))
    if len(joined) < 4:
        return joined
    out: list[tuple[Part, int]] = []
    for start, length, count in periods([(id(p), n) for p, n in joined]):
        out.append(joined[start] if count == 1 else (Seq(tuple(joined[start:start + length])), count))
    return out


def single_builder(run: Run, like: Program) -> Builder:
    """A builder for one GPU that spreads nothing, with the same model, recipe and kernels as `like`; it uses the recorded units and
    their ops again where both run the same local shapes."""
    spread = like.builder.run.plan
    same = ((spread.tp, spread.cp, spread.ep, spread.expert_tp) == (run.plan.tp, run.plan.cp, run.plan.ep, run.plan.expert_tp)
            and like.inventory.layers == run.model.layers and not spread.single_process)
    inventory = like.inventory if same else inventory_of(run)
    alone = Nanochat if run.plan.framework == "nanochat" else Strategy
    return Builder(run, like.numbers, alone(run, like.numbers, inventory), inventory, like.builder if same else None)


def refuse(run: Run) -> None:
    """Raise the first reason why a run is not predicted yet."""
    for error in refusals(run):
        raise error


def _by_experts(run: Run, builder: Builder, role: str, ranks: int, example: int) -> list[tuple[str, int, int, Builder]]:
    """(role, ranks, example rank, builder): where the router sends more rows to some ranks of an ep group, those with the busiest experts and the others."""
    p, r = run.plan, run.recipe
    if p.ep == 1 or r.moe_imbalance == 1.0 or r.moe_capacity_factor is not None:
        return [(role, ranks, example, builder)]
    others = Builder(run, builder.numbers, builder.strategy, builder.strategy.inventory, busiest=False)
    return [("busiest experts", ranks // p.ep, example, builder), ("other experts", ranks - ranks // p.ep, example + p.expert_tp, others)]


def build(run: Run) -> Program:
    """The program of every rank role of a run without pipeline. Raises PlanError for what is not predicted yet."""
    refuse(run)
    numbers, inventory = numbers_of(run), inventory_of(run)
    strategy = strategy_of(run, numbers, inventory)
    for error in strategy.refusals():
        raise error
    builder = Builder(run, numbers, strategy, inventory)
    roles: list[RankProgram] = []
    for role, ranks, example in strategy.roles():
        persistent = (*strategy.persistent(role), *constant_tensors(run, numbers))
        host, slack = tuple(strategy.host_persistent(role)), strategy.host_slack_bytes()
        roles += [RankProgram(name, n, first, persistent, one.step(role, False), one.step(role, True), host, slack)
                  for name, n, first, one in _by_experts(run, builder, role, ranks, example)]
    return Program(tuple(roles), strategy, inventory, numbers, layer_flops(builder.unit, builder.names),
                   builder.unit[HEAD].matmul_flops, builder.recomputed_flops, builder)
