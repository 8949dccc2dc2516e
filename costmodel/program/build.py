"""From a Run to the program of each rank role: the units are recorded once, the strategy adds what it sends and keeps."""

from collections.abc import Iterator
from dataclasses import dataclass

from costmodel.program.inventory import Inventory, inventory_of
from costmodel.program.ir import Block, Op, Part, RankProgram, Seq, Tensor, seq
from costmodel.program.layers import Numbers, Unit, embedding_unit, head_unit, layer_unit, numbers_of
from costmodel.program.parallel.base import EMBEDDING, FIRST, HEAD, LAST, LAYER, MIDDLE, ONLY, Strategy
from costmodel.program.parallel.ddp import DDP
from costmodel.program.parallel.deepspeed import DeepSpeedZero, DeepSpeedZero3
from costmodel.program.parallel.fsdp import FSDP
from costmodel.program.parallel.megatron import MegatronDP
from costmodel.program.parallel.zero import Zero1, Zero2
from costmodel.program.tape import GradReady
from costmodel.spec import PlanError, Run


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
    recomputed: float
    """Share of the layers that backward computes again."""
    builder: "Builder"

    @property
    def model_flops(self) -> float:
        """FLOPs that one micro-batch needs on one rank: backward is twice forward."""
        return 3.0 * (self.layer_flops + self.head_flops)

    @property
    def hardware_flops(self) -> float:
        """With activation recompute, and the head's where the loss is chunked."""
        again = self.recomputed * self.layer_flops + (self.head_flops if self.builder.run.recipe.loss == "chunked" else 0.0)
        return self.model_flops + again


def strategy_of(run: Run, numbers: Numbers, inventory: Inventory) -> Strategy:
    """The strategy that a plan names."""
    p = run.plan
    if p.framework == "megatron":
        return MegatronDP(run, numbers, inventory)
    if p.framework == "deepspeed" and p.zero:
        return (DeepSpeedZero3 if p.zero == 3 else DeepSpeedZero)(run, numbers, inventory)
    if p.zero == 3:
        return FSDP(run, numbers, inventory)
    if p.zero == 2:
        return Zero2(run, numbers, inventory)
    if p.zero == 1:
        return Zero1(run, numbers, inventory)
    return DDP(run, numbers, inventory) if p.dp > 1 else Strategy(run, numbers, inventory)


def refusals(run: Run) -> Iterator[PlanError]:
    """What can be described but not predicted yet."""
    m, p, r = run.model, run.plan, run.recipe
    for on, field, value, what, fix in (
            (m.moe is not None, "model", m.name, "mixture of experts", "Use a dense model."),
            (m.mla is not None, "model", m.name, "multi-head latent attention", "Use a model with ordinary attention."),
            (m.mtp_depth > 0, "model.mtp_depth", m.mtp_depth, "multi-token prediction", "Use mtp_depth = 0."),
            (bool(m.hybrid), "model.hybrid", m.hybrid, f"{m.hybrid or 'hybrid'} layers", "Use a pure Transformer."),
            (m.attention_sinks, "model.attention_sinks", True, "attention sinks", "Use a model without sinks."),
            (m.norms_per_layer == 3, "model.norms_per_layer", 3, "three norms a layer", "Use 1, 2 or 4."),
            (m.embedding_dim != m.hidden, "model.embedding_dim", m.embedding_dim, "an embedding narrower than the model", "Use embedding_dim = hidden."),
            (0 < m.sliding_window < r.seq_len, "recipe.seq_len", r.seq_len, f"sliding-window attention (window {m.sliding_window})",
             f"Use seq_len <= {m.sliding_window}, or model.sliding_window = 0 to count full attention."),
            (p.tp > 1, "plan.tp", p.tp, "tensor parallelism", "Use tp = 1."),
            (p.pp > 1, "plan.pp", p.pp, "pipeline parallelism", "Use pp = 1."),
            (p.cp > 1, "plan.cp", p.cp, "context parallelism", "Use cp = 1."),
            (p.ep > 1, "plan.ep", p.ep, "expert parallelism", "Use ep = 1."),
            (p.single_process, "plan.strategy", "dataparallel", "DataParallel", "Use DDP."),
            (p.framework == "nanochat", "plan.framework", "nanochat", "nanochat's distributed optimizer", "Use framework = pytorch."),
            (p.offload != "none", "plan.offload", p.offload, "offload to host memory", "Use offload = none."),
            (p.activation_offload, "plan.activation_offload", True, "activation offload", "Use activation_offload = false."),
            (p.checkpointing.mode == "selective", "plan.checkpointing", "selective", "selective checkpointing", "Use none, full, full:g or every:k."),
            (r.precision.compute == "fp8", "recipe.precision", r.precision.name, "fp8 arithmetic", "Use bf16-mixed."),
            (r.optimizer.name == "muon", "recipe.optimizer", "muon", "Muon", "Use adamw."),
            (p.framework == "pytorch" and r.precision.master is not None, "recipe.precision.master", r.precision.master,
             "a master copy in the PyTorch dialect", "Use parameter = fp32, or framework = megatron."),
            (r.cuda_graphs and r.compile is False, "recipe.cuda_graphs", True, "CUDA graphs of eager code", "Use compile = true with it.")):
        if on:
            yield PlanError(field, value, f"{what}: not predicted yet.", fix)


class Builder:
    """Assembles one role's step; equal blocks are made once."""

    def __init__(self, run: Run, numbers: Numbers, strategy: Strategy, inventory: Inventory, units: dict[str, Unit] | None = None) -> None:
        self.run = run
        self.numbers = numbers
        self.strategy = strategy
        self.layers = inventory.layers
        self.unit: dict[str, Unit] = units or {EMBEDDING: embedding_unit(run, numbers), LAYER: layer_unit(run, numbers),
                                               HEAD: head_unit(run, numbers)}
        self.blocks: dict[object, Block] = {}
        self.raw: dict[object, list[Op]] = {}
        self.raw_backward: dict[str, list[Op | GradReady]] = {}
        c = run.plan.checkpointing
        self.group = c.group if c.mode == "full" else 1
        self.every = c.every if c.mode == "full" else 1
        self.checkpoints = c.mode == "full"

    def checkpointed(self, index: int) -> bool:
        return self.checkpoints and index % self.every == 0

    def block(self, key: object, name: str, phase: str, ops: list[Op]) -> Block:
        if key not in self.blocks:
            self.blocks[key] = Block(name, phase, tuple(ops))
        return self.blocks[key]

    # -- forward -----------------------------------------------------------------------------------------------------------

    def _forward_ops(self, unit: str, *, save: bool, drop: bool, until: int | None = None) -> list[Op]:
        key = (unit, save, drop, until)
        if key not in self.raw:
            u = self.unit[unit]
            self.raw[key] = u.tape.forward((u.exit,) if until is None else (), save=save, until=until, drop=u.entry if drop else None)
        return self.raw[key]

    def _saves_entry(self, unit: str) -> bool:
        entry = self.unit[unit].entry
        return entry is not None and entry.saves > 0

    def forward_layer(self, index: int, micro: str) -> Block:
        s, chk = self.strategy, self.checkpointed(index)
        inner = chk and self.group > 1 and index % self.group != 0
        drop = inner or (not chk and not self._saves_entry(LAYER))
        key = ("forward", micro if self._micro_matters else "", chk, drop, s.layer_variant("forward", micro, index))
        if key not in self.blocks:
            ops = [*s.before_forward(LAYER, index, micro), *self._forward_ops(LAYER, save=not chk, drop=drop), *s.after_forward(LAYER, index, micro)]
            self.block(key, "layer", "forward", ops)
        return self.blocks[key]

    _micro_matters = True

    def forward_edge(self, unit: str, micro: str) -> list[Op]:
        drop = unit == HEAD and not self._saves_entry(HEAD)
        return [*self.strategy.before_forward(unit, 0, micro), *self._forward_ops(unit, save=True, drop=drop), *self.strategy.after_forward(unit, 0, micro)]

    # -- backward ----------------------------------------------------------------------------------------------------------

    def _with_gradients(self, unit: str, index: int, micro: str) -> list[Op]:
        """The unit's backward, with what the strategy does as each gradient appears.

        The engine holds the head's gradient of a tied embedding until the lookup's has been added to it.
        """
        if unit not in self.raw_backward:
            u = self.unit[unit]
            self.raw_backward[unit] = u.tape.backward(u.exit, u.entry, free_entry=self._saves_entry(unit))
        out: list[Op] = []
        for item in self.raw_backward[unit]:
            if isinstance(item, Op):
                out.append(item)
                continue
            tied = self.run.model.tied_embeddings and item.param.name == "embedding.weight"
            first_use = Tensor("tied embedding gradient", "temporaries", item.nbytes)
            if tied and unit == HEAD:
                out[-1] = out[-1]._replace(allocs=(*out[-1].allocs, first_use))
                continue
            allocs, ops = self.strategy.on_grad(unit, index, item, micro)
            if allocs:
                out[-1] = out[-1]._replace(allocs=out[-1].allocs + allocs)
            if tied:
                out.append(Op("embedding.accumulate_tied", "memory", nbytes=3.0 * item.nbytes, dtype=item.dtype, frees=(first_use,)))
            out.extend(ops)
        return out

    def backward_layers(self, micro: str) -> Iterator[Block]:
        """Blocks of the layers' backward, last layer first; a checkpointed group is computed again first."""
        s = self.strategy
        index = self.layers - 1
        while index >= 0:
            if not self.checkpointed(index):
                key = ("backward", micro, s.layer_variant("backward", micro, index))
                if key not in self.blocks:
                    ops = [*s.before_backward(LAYER, index, micro), *self._with_gradients(LAYER, index, micro), *s.after_backward(LAYER, index, micro)]
                    self.block(key, "layer", "backward", ops)
                yield self.blocks[key]
                index -= 1
                continue
            first = index - index % self.group if self.group > 1 else index
            yield from self._checkpointed(first, index, micro)
            index = first - 1

    def _checkpointed(self, first: int, last: int, micro: str) -> Iterator[Block]:
        """Recompute layers first..last, then run their backward."""
        s, u = self.strategy, self.unit[LAYER]
        stop = u.tape.recompute_until
        for i in range(first, last + 1):
            variant = s.layer_variant("backward", micro, i)
            alone = first == last
            key = ("recompute", micro, i == last, alone, variant)
            if key not in self.blocks:
                enter = s.before_backward(LAYER, i, micro)
                drop = i > first and not self._saves_entry(LAYER)
                ops = self._forward_ops(LAYER, save=True, drop=drop, until=stop if i == last else None)
                self.block(key, "layer", "recompute", [*enter, *ops])
            yield self.blocks[key]
        for i in range(last, first - 1, -1):
            variant = s.layer_variant("backward", micro, i)
            key = ("backward after recompute", micro, i == first and not self._saves_entry(LAYER), variant)
            if key not in self.blocks:
                ops = self._with_gradients(LAYER, i, micro)
                if i == first and not self._saves_entry(LAYER) and u.entry is not None:
                    ops = [*ops, Op("checkpoint.release", "host", kernels=0, frees=(Tensor(u.entry.name, "activations", u.entry.nbytes),))]
                self.block(key, "layer", "backward", [*ops, *s.after_backward(LAYER, i, micro)])
            yield self.blocks[key]

    def backward_edge(self, unit: str, micro: str) -> list[Op]:
        s = self.strategy
        return [*s.before_backward(unit, 0, micro), *self._with_gradients(unit, 0, micro), *s.after_backward(unit, 0, micro)]

    # -- step --------------------------------------------------------------------------------------------------------------

    def micro_batch(self, micro: str) -> Seq:
        """One forward and backward."""
        s = self.strategy
        loss = Tensor("grad:loss", "temporaries", self.unit[HEAD].exit.nbytes)
        value = Tensor("loss", "activations", self.unit[HEAD].exit.nbytes)
        start = self.block(("embedding", micro), "embedding", "forward", [*s.forward_begin(micro), *self.forward_edge(EMBEDDING, micro)])
        head = self.block(("head", micro), "head", "forward", [*self.forward_edge(HEAD, micro), *s.forward_end(micro)])
        back = self.block(("head backward", micro), "head", "backward",
                          [Op("loss.grad", "memory", nbytes=8.0, allocs=(loss,)), *s.backward_begin(micro), *self.backward_edge(HEAD, micro)])
        end = self.block(("embedding backward", micro), "embedding", "backward",
                         [*self.backward_edge(EMBEDDING, micro), Op("loss.release", "host", kernels=0, frees=(value,)), *s.backward_end(micro)])
        forward = compress([self.forward_layer(i, micro) for i in range(self.layers)])
        backward = compress(list(self.backward_layers(micro)))
        return seq(start, forward, head, back, backward, end)

    def step(self, role: str, first: bool, micro_batches: int | None = None) -> Seq:
        """A step of the run's micro-batches, or of another number of them."""
        s, m = self.strategy, micro_batches or self.run.micro_batches
        parts: list[Part | tuple[Part, int]] = [self.block(("begin", first), "zero_grad", "optimizer", s.begin_step(first))]
        if m == 1:
            parts.append(self.micro_batch(ONLY))
        else:
            parts.append(self.micro_batch(FIRST))
            if m > 2:
                parts.append((self.micro_batch(MIDDLE), m - 2))
            parts.append(self.micro_batch(LAST))
        update = s.clip(role) if self.run.recipe.clip_norm else []
        parts.append(self.block(("update", role, first), "update", "optimizer", [*update, *s.step(role, first)]))
        return seq(*parts)


def compress(blocks: list[Block]) -> Seq:
    """Blocks in order as a Seq with repeats: runs of one block, else the shortest period (up to 16) that repeats."""
    parts: list[tuple[Part, int]] = []
    i, n = 0, len(blocks)
    while i < n:
        best_period, best_count = 1, 1
        for period in range(1, 17):
            if i + 2 * period > n:
                break
            count = 1
            while i + (count + 1) * period <= n and all(blocks[i + k] is blocks[i + count * period + k] for k in range(period)):
                count += 1
            if count > 1:
                best_period, best_count = period, count
                break
        if best_period == 1:
            parts.append((blocks[i], best_count))
        else:
            parts.append((Seq(tuple((b, 1) for b in blocks[i:i + best_period])), best_count))
        i += best_period * best_count
    return Seq(tuple(parts))


def build(run: Run, like: Program | None = None) -> Program:
    """The program of every rank role. Raises PlanError for what is not predicted yet.

    `like` is a program of the same model, recipe and kernels, whose recorded units are used again.
    """
    for error in refusals(run):
        raise error
    numbers, inventory = numbers_of(run), inventory_of(run)
    strategy = strategy_of(run, numbers, inventory)
    for error in strategy.refusals():
        raise error
    units = like.builder.unit if like and like.numbers == numbers else None
    builder = Builder(run, numbers, strategy, inventory, units)
    roles: list[RankProgram] = []
    for role, ranks, example in strategy.roles():
        roles.append(RankProgram(role, ranks, example, tuple(strategy.persistent(role)), builder.step(role, False), builder.step(role, True)))
    layer = builder.unit[LAYER]
    recomputed = 0.0 if not builder.checkpoints else sum(builder.checkpointed(i) for i in range(inventory.layers)) / inventory.layers
    return Program(tuple(roles), strategy, inventory, numbers, inventory.layers * (layer.matmul_flops + layer.attention_flops),
                   builder.unit[HEAD].matmul_flops, recomputed, builder)
