"""FSDP2 (`fully_shard`), PyTorch's ZeRO-3, and HSDP: each layer is a group, the rest is the root group.

State is split by dim 0 of every parameter, padded to a multiple of the group. A layer's parameters are gathered before use
(all-gather in the compute dtype), freed after forward (`reshard_after_forward`) and gathered again in backward, where the next
layer's gather is prefetched; its gradients are reduce-scattered in the reduce dtype after its backward. The root stays gathered
from forward to the end of backward. Sends 3Ψ elements per micro-batch (2Ψ without resharding); HSDP adds an all-reduce of every
gradient shard over dp_replicate. All its collectives are called without async_op: on a GPU they
hold up their own stream, under gloo the whole rank. Source: torch/distributed/fsdp/_fully_shard (_fsdp_param_group.py, _fsdp_collectives.py), 2.13.
"""

from collections.abc import Iterator

from costmodel.program.host import DTENSOR, FSDP_HOOK, work
from costmodel.program.inventory import Inventory, UnitParams, nbytes
from costmodel.program.ir import Op, Tensor
from costmodel.program.layers import Numbers
from costmodel.program.optimizer import Update, clip_ops
from costmodel.program.parallel.base import LAST, LAYER, MIDDLE, ONLY, Strategy, collective, element_bytes
from costmodel.program.tape import GradReady
from costmodel.program.zerobubble import ADDS, ANEW, IDLE, OPENS
from costmodel.spec import PlanError, Run

ROOT = "root"
DENSE = "dense layer"
"""The group of a layer before those that hold a mixture of experts, where a model has both."""
FINISH = "finish"
"""In place of a class of micro-batch: all are done."""


class FSDP(Strategy):
    """FSDP2, and HSDP where dp_replicate > 1."""

    name = "fsdp"
    reads = ("reshard_after_forward", "backward_prefetch")
    sharded = ("parameters", "gradients", "optimizer")
    axis = "dp_shard"

    def __init__(self, run: Run, numbers: Numbers, inventory: Inventory) -> None:
        super().__init__(run, numbers, inventory)
        self.n = run.plan.state_shards
        self.last_in_layer = LAYER
        """The group of a layer that is gathered last in its forward."""
        self.reshard = run.plan.reshard_after_forward
        self.pipelined = run.plan.pp > 1
        self.sync_each = run.plan.sync_each_micro_batch and not self.pipelined
        p = self.precision
        self.low = numbers.weight
        self.casts = self.low != p.parameter or p.fp8_gather
        root = UnitParams(inventory.embedding.params + inventory.head.params, inventory.embedding.numel + inventory.head.numel)
        self.groups = {LAYER: inventory.layer, ROOT: root}
        self.count = {LAYER: inventory.stretches[-1][1], ROOT: 1}
        """How many groups of each name there are."""
        self.dense = inventory.layers - self.count[LAYER]
        """Leading layers that are groups named DENSE."""
        if inventory.several:
            self.groups[DENSE], self.count[DENSE] = inventory.several[0]
        self.size = dict.fromkeys(self.groups, self.n)
        """Ranks over which each group is sharded."""
        self.axes = dict.fromkeys(self.groups, self.axis)
        self.shard = {name: g.sharded_numel(self.n) for name, g in self.groups.items()}
        self.local = {name: sum(_local(param.shape[0], self.n) * (param.numel // param.shape[0]) for param in g.params)
                      for name, g in self.groups.items()}
        matrices = [q for q in inventory.layer.params if len(q.shape) == 2] if p.fp8_gather else []
        self.bytes_saved = sum(-(-q.shape[0] // self.n) * q.shape[1] for q in matrices) * (element_bytes(self.low) - 1)
        """Of a layer's shard as it is gathered, where matrices travel in fp8."""

    def refusals(self) -> Iterator[PlanError]:
        o = self.recipe.optimizer
        if o.name in ("sgd", "momentum") and o.implementation == "fused":
            yield PlanError("recipe.optimizer", f"{o.name}:fused", "PyTorch's fused SGD takes no sharded (DTensor) parameters.", f"Use {o.name}:foreach.")

    # -- state -----------------------------------------------------------------------------------------------------------

    def _total(self, per_group: dict[str, int]) -> int:
        return sum(each * self.count[group] for group, each in per_group.items())

    def of(self, index: int) -> str:
        """The group of a layer."""
        return DENSE if index < self.dense else LAYER

    def last_of(self, index: int) -> str:
        """The group that is gathered last in the forward of a layer."""
        return DENSE if index < self.dense else self.last_in_layer

    def persistent(self, role: str) -> list[Tensor]:
        return [Tensor("parameters (shard)", "parameters", nbytes(self._total(self.shard), self.precision.parameter))]

    def update(self, role: str) -> Update:
        p = self.precision
        largest = max(_local(q.shape[0], self.n) * (q.numel // q.shape[0]) for g in self.groups.values() for q in g.params)
        return Update(self._total(self.local), self.inventory.tensors, largest, p.parameter, p.gradient, p.optimizer_state,
                      steps_on_device=self.steps_on_device, placed=True)

    def kept_gradients(self) -> list[Tensor]:
        return [Tensor("gradients (shard)", "gradients", nbytes(self._total(self.shard), self.precision.gradient), "reduce")]

    # -- gathers ---------------------------------------------------------------------------------------------------------

    def _bytes(self, group: str, dtype: str, *, whole: bool = True) -> int:
        return self.shard[group] * (self.size[group] if whole else 1) * element_bytes(dtype)

    def _weights(self, group: str, *, whole: bool = True) -> int:
        """Bytes of a group's parameters as they are gathered."""
        each = self._bytes(group, self.low, whole=False) - (self.bytes_saved if group == LAYER else 0)
        return each * (self.size[group] if whole else 1)

    def _buffer(self, group: str) -> Tensor:
        return Tensor(f"all_gather({group})", "communication", self._weights(group), "gather")

    def _params(self, group: str) -> Tensor:
        return Tensor(f"unsharded({group})", "communication", self._weights(group))

    def _gather(self, group: str, event: str) -> list[Op]:
        """Cast the shard, copy it into the gather buffer, gather."""
        axis, n = self.axes[group], self.size[group]
        if n == 1 or not self.groups[group].numel:
            return []
        shard_bytes = float(self._weights(group, whole=False))
        ops: list[Op] = []
        cast: tuple[Tensor, ...] = ()
        if self.casts:
            cast = (Tensor(f"cast({group})", "communication", int(shard_bytes), "gather"),)
        moved = 2.0 * shard_bytes
        if self.casts:
            moved += self._bytes(group, self.precision.parameter, whole=False) + shard_bytes
        ops.append(Op(f"fsdp.copy_in({group})", "side", nbytes=moved, dtype=self.low, kernels=2 if self.casts else 1,
                      allocs=(*cast, self._buffer(group)), axis=axis, detached=True))
        ops.append(collective(axis, "all-gather", n, self._weights(group), self.low, event=event,
                              name=f"all_gather({group})", frees=cast, detached=True, inline=True))
        return ops

    def _pre_hook(self, group: str) -> list[Op]:
        """The host's work in a group's pre-forward or pre-backward."""
        return [work(f"fsdp.pre_hook({group})", FSDP_HOOK)] if self.groups[group].numel else []

    def _copy_out(self, group: str, event: str, free: tuple[Tensor, ...]) -> list[Op]:
        if not self.groups[group].numel:
            return []
        moved = 2.0 * self._weights(group)
        count = len(self.groups[group].params)
        wait = [] if self.size[group] == 1 else [Op(f"fsdp.wait({group})", "wait", kernels=0, event=event)]
        return [*wait, Op(f"fsdp.copy_out({group})", "memory", nbytes=moved, dtype=self.low, kernels=1 + count // 8,
                          allocs=(self._params(group),), frees=free)]

    # -- forward ---------------------------------------------------------------------------------------------------------

    def gathers_in_forward(self, micro: str) -> bool:
        """Under a pipeline, parameters are gathered by the first micro-batch and stay."""
        return not self.pipelined or micro in (ONLY, "first")

    def forward_key(self, micro: str) -> object:
        return self.gathers_in_forward(micro)

    def forward_begin(self, micro: str) -> list[Op]:
        if not self.gathers_in_forward(micro):
            return []
        return [*self._pre_hook(ROOT), *self._gather(ROOT, "gather"), *self._copy_out(ROOT, "gather", ()), self._record("copied")]

    def _record(self, event: str) -> Op:
        return Op(f"fsdp.record({event})", "record", kernels=0, event=event)

    def _hold(self, event: str, axis: str = "") -> Op:
        return Op(f"fsdp.hold({event})", "hold", kernels=0, event=event, axis=axis or self.axis)

    def like(self, micro: str) -> str:
        return LAST if micro == MIDDLE and self.sync_each else micro

    def layer_variants(self, phase: str, micro: str) -> list[object]:
        """The first layer frees the root's gather buffer and prefetches nothing; in backward the last waits for no reduce-scatter."""
        rest: list[object] = ["middle"] * (self.inventory.layers - 1)
        if phase == "backward" and rest:
            rest[-1] = "last"
        found = ["first" if rest else "only", *rest][:self.inventory.layers]
        if self.dense:  # and what a layer's neighbours gather and reduce
            found = [(word, self.of(i - 1), self.of(i), self.of(i + 1)) for i, word in enumerate(found)]
        return found

    def gradient_key(self, micro: str, variant: object) -> object:
        return self.name

    def before_forward(self, unit: str, index: int, micro: str) -> list[Op]:
        """Gather, then let the gather stream wait until the previous layer's copy-out is done, then copy out.

        The buffer of the previous gather is freed only now, so that its copy-out may overlap this gather.
        """
        if unit != LAYER or not self.gathers_in_forward(micro):
            return []
        group = self.of(index)
        ops = [*self._pre_hook(group), *self._gather(group, "gather")]
        if self.n > 1:
            hold = self._hold("copied")
            previous = (self._buffer(ROOT if index == 0 else self.last_of(index - 1)),) if index or self.groups[ROOT].numel else ()
            ops.append(hold._replace(frees=previous))
        return [*ops, *self._copy_out(group, "gather", ()), self._record("copied")]

    def after_forward(self, unit: str, index: int, micro: str) -> list[Op]:
        if unit != LAYER or not self.reshard:
            return []
        return [work("fsdp.post_hook", FSDP_HOOK).freeing((self._params(self.of(index)),))]

    def forward_end(self, micro: str) -> list[Op]:
        """The last gather buffer goes when the root's forward ends."""
        if self.n == 1 or not self.gathers_in_forward(micro):
            return []
        last = self.last_of(self.inventory.layers - 1) if self.inventory.layers else ROOT
        return [Op("fsdp.forward_end", "host", kernels=0, frees=(self._buffer(last),))]

    # -- backward --------------------------------------------------------------------------------------------------------

    def backward_begin(self, micro: str) -> list[Op]:
        """The root, still gathered, prefetches the last layer."""
        last = self.inventory.layers - 1
        return self._gather(self.of(last), "gather") if self.reshard and self.plan.backward_prefetch and last >= 0 else []

    def before_backward(self, unit: str, index: int, micro: str) -> list[Op]:
        if unit != LAYER or not self.reshard:
            return []
        group = self.of(index)
        ops = self._pre_hook(group)
        if not self.plan.backward_prefetch:
            ops += self._gather(group, "gather")
        ops += self._copy_out(group, "gather", (self._buffer(group),) if self.n > 1 else ())
        ops.append(self._record("copied"))
        if self.n > 1:
            ops.append(self._hold("copied"))
        if self.plan.backward_prefetch and index > 0:
            ops += self._gather(self.of(index - 1), "gather")
        return ops

    def before_recompute(self, index: int, micro: str, first: int, last: int) -> list[Op]:
        """A checkpointed group: its last layer's pre-backward comes first, then each layer gathers as in forward, but keeps its
        parameters; its gather buffer goes when it has run."""
        if first == last or not self.reshard:
            return super().before_recompute(index, micro, first, last)
        ops = self.before_backward(LAYER, last, micro) if index == first else []
        if index > first and self.n > 1:
            ops.append(Op("fsdp.recomputed", "host", kernels=0, frees=(self._buffer(LAYER),)))
        if index == last:
            return ops
        prefetched = index == last - 1 and self.plan.backward_prefetch
        ops += self._pre_hook(LAYER)
        ops += [] if prefetched else self._gather(LAYER, "gather")
        return [*ops, *self._copy_out(LAYER, "gather", ()), self._record("copied")]

    def before_recomputed_backward(self, index: int, micro: str, first: int, last: int) -> list[Op]:
        """The first layer of a group prefetches the last one of the group before it."""
        if first == last or index > first or index == 0 or not (self.reshard and self.plan.backward_prefetch):
            return []
        return self._gather(LAYER, "gather")

    def on_grad(self, unit: str, index: int, ready: GradReady, micro: str) -> tuple[tuple[Tensor, ...], list[Op]]:
        """Autograd leaves the unsharded gradient in the compute dtype; the layer's post-backward takes it. A second pass of a split backward adds to
        what the one before left."""
        if micro == ADDS:
            made = Tensor(f"{ready.param.name}.new_grad", "temporaries", ready.nbytes)
            return (made,), [Op(f"{ready.param.name}.accumulate_grad", "memory", nbytes=3.0 * ready.nbytes, dtype=ready.dtype, frees=(made,))]
        return (Tensor(f"{ready.param.name}.unsharded_grad", "communication", ready.nbytes),), []

    # A split backward: post-backward runs in the first pass, when no gradient of a weight is there but what earlier second passes left. Of the dtype
    # that is reduced, they are left where they are, and summed there.

    @property
    def _sums_in_place(self) -> bool:
        return self.numbers.param == self.precision.reduce

    def first_pass(self, word: str) -> str:
        return IDLE if self._sums_in_place else word

    def second_pass(self, word: str) -> str:
        return ADDS if word == ANEW and self._sums_in_place else word

    def take_up(self, unit: str, word: str) -> list[Op]:
        """Gradients go, in the reduce dtype, into the sum of all micro-batches."""
        return [] if word == IDLE else self._reduce(LAYER if unit == LAYER else ROOT, "first" if word == OPENS else MIDDLE, None)

    def _unsharded_grads(self, group: str) -> tuple[Tensor, ...]:
        extra = self.inventory.whole_lookups if group == ROOT else 0
        return (Tensor(f"unsharded_grads({group})", "communication", nbytes(self.groups[group].numel + extra, self.numbers.param)),)

    def _cut_lookups(self, group: str) -> tuple[Tensor, ...]:
        """DTensor's whole gradient of a looked-up table is cut to the tp rank's part, a copy, before it is reduced."""
        if group != ROOT or not self.inventory.whole_lookups:
            return ()
        return (Tensor("lookup gradients, cut", "communication", nbytes(self.inventory.lookups, self.numbers.param)),)

    def _reduce(self, group: str, micro: str, previous: str | None, left: str = IDLE) -> list[Op]:
        """Post-backward of a group: reshard, wait for the previous reduce-scatter, copy in, reduce-scatter, keep the shard. `left`: gradients that a second
        pass left are added first, or are all there is."""
        p, axis, n = self.precision, self.axes[group], self.size[group]
        if not self.groups[group].numel:
            return []
        finishing = micro == FINISH
        reduces = finishing or (not self.pipelined and (self.sync_each or micro in (ONLY, LAST)))
        first = micro in (ONLY, "first")
        whole = self.groups[group].numel
        free_params: tuple[Tensor, ...] = (self._params(group),)
        extra = self.inventory.whole_lookups if group == ROOT else 0
        accumulated = Tensor(f"accumulated_grads({group})", "communication", nbytes(whole + extra, p.reduce))
        grads = self._unsharded_grads(group)
        if not reduces:
            if self.pipelined:
                free_params = ()
            moved, hook = float(nbytes(whole, self.numbers.param) + nbytes(whole, p.reduce)), work(f"fsdp.post_hook({group})", FSDP_HOOK)
            if first:
                return [hook, Op(f"fsdp.accumulate({group})", "memory", nbytes=moved, dtype=p.reduce, allocs=(accumulated,), frees=grads + free_params)]
            return [hook, Op(f"fsdp.accumulate({group})", "memory", nbytes=moved + nbytes(whole, p.reduce), dtype=p.reduce, frees=grads + free_params)]
        ops: list[Op] = self._late_norm_sums(group) if finishing else []
        source = grads
        in_dtype = self.numbers.param
        if finishing and left == ADDS:
            ops += self._reduce(group, MIDDLE, None)
        if finishing and left != OPENS:
            source, in_dtype = (accumulated,), p.reduce
        elif finishing:
            pass
        elif not self.sync_each and micro == LAST:
            moved = float(nbytes(whole, in_dtype) + 2 * nbytes(whole, p.reduce))
            ops.append(Op(f"fsdp.accumulate({group})", "memory", nbytes=moved, dtype=p.reduce, frees=grads))
            ops += self._late_norm_sums(group)
            source, in_dtype = (accumulated,), p.reduce
        ops.append(work(f"fsdp.post_hook({group})", FSDP_HOOK).freeing(free_params))
        rs_in = Tensor(f"reduce_scatter_in({group})", "communication", self._bytes(group, p.reduce))
        rs_out = Tensor(f"reduce_scatter_out({group})", "communication", self._bytes(group, p.reduce, whole=False), "reduce")
        if previous:
            ops.append(Op("fsdp.wait_reduce", "wait", kernels=0, event="reduce",
                          frees=(Tensor(f"reduce_scatter_in({previous})", "communication", self._bytes(previous, p.reduce)),)))
        ops.append(Op(f"fsdp.reduce_copy_in({group})", "memory", nbytes=float(nbytes(whole, in_dtype) + rs_in.nbytes), dtype=p.reduce,
                      kernels=2, allocs=(*self._cut_lookups(group), rs_in), frees=(*source, *self._cut_lookups(group))))
        shard = Tensor(f"{group}.grad_shard", "gradients", self._bytes(group, p.gradient, whole=False), "reduce")
        fresh = first or finishing or (not self.sync_each and micro == LAST)
        same = p.reduce == p.gradient
        keep = (shard,) if fresh else ()
        replicate = self.plan.dp_replicate
        if n > 1:
            done = "" if replicate > 1 else "reduce"
            ops.append(collective(axis, "reduce-scatter", n, self._bytes(group, p.reduce), p.reduce, event=done or "scattered",
                                  name=f"reduce_scatter({group})", allocs=(rs_out,), inline=True))
        else:
            ops.append(Op(f"fsdp.reduce_copy({group})", "memory", nbytes=2.0 * rs_out.nbytes, dtype=p.reduce, allocs=(rs_out,)))
        if replicate > 1:
            if n > 1:
                ops.append(Op("fsdp.hold(scattered)", "hold", kernels=0, event="scattered", axis="dp_replicate"))
            ops.append(collective("dp_replicate", "all-reduce", replicate, rs_out.nbytes, p.reduce, event="reduce", name=f"all_reduce({group})",
                                  inline=True))
        holds = replicate > 1 and not (fresh and same) and not self.pipelined
        tail = 0.0 if same and fresh else 2.0 * shard.nbytes + (shard.nbytes if not fresh else 0)
        ops.append(Op(f"fsdp.shard_grad({group})", "side", nbytes=tail, dtype=p.gradient, kernels=0 if tail == 0 else 1,
                      allocs=keep, frees=() if holds else (rs_out,), axis=axis))
        if holds and group == ROOT:
            held = sum(self._bytes(g, p.reduce, whole=False) * self.count[g] for g in self.groups)
            ops.append(Op("fsdp.release_all_reduced", "host", kernels=0, frees=(rs_out._replace(nbytes=held),)))
        return ops

    def _late_norm_sums(self, group: str) -> list[Op]:
        """Norm gradients that were accumulated as partial sums over tp, summed in the reduce dtype when they are reduced."""
        if self.plan.tp == 1:
            return []
        dtype = self.precision.reduce
        params = [q for q in self.groups[group].params if "norm" in q.name and self.partial_over_tp(q)]
        sums = [collective("tp", "all-reduce", self.plan.tp, nbytes(q.numel, dtype), dtype, name="norm_gradient.all_reduce") for q in params]
        return [work("norm_gradient.dtensor", DTENSOR, len(sums)), *sums] if sums else []

    def after_backward(self, unit: str, index: int, micro: str) -> list[Op]:
        if unit != LAYER:
            return []
        top = index == self.inventory.layers - 1
        return self._reduce(self.of(index), micro, None if top else self.of(index + 1))

    def backward_end(self, micro: str) -> list[Op]:
        """The root's gradients are reduced last; then everything in flight is waited for."""
        ops = self._reduce(ROOT, micro, self.of(0) if self.inventory.layers else None)
        if self.pipelined:
            return ops
        if self.sync_each or micro in (ONLY, LAST):
            last = Tensor(f"reduce_scatter_in({ROOT})", "communication", self._bytes(ROOT, self.precision.reduce))
            ops.append(Op("fsdp.wait_all", "wait", kernels=0, event="reduce", frees=(last,)))
        return ops

    def after_micro_batches(self, left: str) -> list[tuple[list[Op], int]]:
        """Every group's whole gradients are reduced, the root's first; parameters are resharded."""
        if not self.pipelined:
            return []
        left = IDLE if self._sums_in_place or not left else left
        root = self._reduce(ROOT, FINISH, None, left)
        out = [(root, 1)]
        previous = ROOT if root else None
        for group, layers in ((DENSE, self.dense), (LAYER, self.count[LAYER])):
            if layers:
                out += [(self._reduce(group, FINISH, previous, left), 1), (self._reduce(group, FINISH, group, left), layers - 1)]
                previous = group
        if previous:
            last = Tensor(f"reduce_scatter_in({previous})", "communication", self._bytes(previous, self.precision.reduce))
            out.append(([Op("fsdp.wait_all", "wait", kernels=0, event="reduce", frees=(last,))], 1))
        return out

    def clip(self, u: Update) -> list[Op]:
        """Norms of the local shards, and one all-reduce of all of them over each mesh axis (a partial DTensor: an element a parameter)."""
        ops = clip_ops(u.numel, u.tensors, u.grad, placed=u.placed)
        if self.n > 1:
            ops.insert(1, collective(self.axis, "all-reduce", self.n, element_bytes(u.grad) * u.tensors, u.grad, name="clip.all_reduce"))
        if self.plan.tp > 1:
            ops.insert(1, collective("tp", "all-reduce", self.plan.tp, element_bytes(u.grad) * u.tensors, u.grad, name="clip.all_reduce"))
        return ops

    def after_step(self, role: str) -> list[tuple[list[Op], int]]:
        """The scales of the next step's fp8 weights: the largest magnitude of every matrix, found on the shards and reduced all at once."""
        if not self.precision.fp8_gather:
            return []
        layers, (numel, tensors) = self.inventory.layers, self.inventory.matrices
        held = nbytes(-(-numel // self.n), self.precision.parameter)
        ops = [Op("fp8.scales", "memory", nbytes=float(held), dtype=self.precision.parameter, kernels=3 + tensors // 30)]
        if self.n > 1:
            ops.append(collective(self.axis, "all-reduce", self.n, 4 * tensors, "fp32", name="fp8.scales_all_reduce"))
        return [(ops, 1)] if layers else []

    def notes(self) -> list[str]:
        small = [q.name for group in (LAYER, ROOT) for q in self.groups[group].params if q.shape[0] < self.n]
        if small:
            return [f"{len(small)} kind{'s' if len(small) > 1 else ''} of parameter {'have' if len(small) > 1 else 'has'} fewer rows than the {self.n} shards; "
                    "ranks beyond them hold padding."]
        return []


def _local(rows: int, n: int) -> int:
    """Rows that rank 0 holds, without padding."""
    return min(rows, -(-rows // n))
