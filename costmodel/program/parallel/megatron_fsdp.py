"""Megatron-FSDP (`--use-megatron-fsdp`, optim_grads_params), Megatron's ZeRO-3: every layer is a unit; embedding, last norm and head are buckets of their own.

16-bit parameters, main gradients, master weights and moments lie in flat buffers sharded over dp_shard x cp, 18/n bytes a parameter with fp32 gradients, each
bucket padded to whole rows of its matrices on every rank. A layer is gathered before its forward and again before its backward, as many layers ahead as half
of the communication unit takes (at least one; with double buffers one), and freed after each; what is no layer stays gathered until the step's last backward
is done. A gradient is copied into its unit's bucket of the reduce dtype (fused, the GEMM writes there). The full bucket is reduce-scattered in every
micro-batch, and the shard (in double buffers a part of the bucket) added to the main gradients; the bucket is freed when more than a communication unit waits
behind it, or at the end of backward, which waits for all. Sends 3Ψ elements a micro-batch less what stays gathered. dp_replicate > 1 (instances of the
distributed optimizer) all-reduces the main gradients' shards in the last micro-batch. Megatron overlaps all of it whatever overlap_grad_reduce says. There is
no dry run of it. Source: NVIDIA/Megatron-LM core/distributed/fsdp/src: README.md, megatron_fsdp/megatron_fsdp.py (hooks) and
megatron_fsdp/param_and_grad_buffer.py (GradReducePipeline, AllGatherPipeline, FixedPoolAllocator).
"""

from collections.abc import Iterator, Sequence
from math import lcm
from typing import NamedTuple

from costmodel.program import float8
from costmodel.program.inventory import Inventory, nbytes
from costmodel.program.ir import Op, Tensor
from costmodel.program.layers import Numbers
from costmodel.program.optimizer import Update, clip_ops
from costmodel.program.parallel.base import EMBEDDING, FIRST, HEAD, LAST, LAYER, MIDDLE, ONLY, Strategy, collective
from costmodel.program.parallel.ddp import arrival_order
from costmodel.program.parallel.megatron import fusion_dummies, shared_over_tp
from costmodel.program.tape import GradReady
from costmodel.spec import PlanError, Run
from costmodel.spec.parameters import Param

ROOT = "root"
"""The one bucket of what is no layer, where that is small."""
LEAST_UNIT = 1_000_000_000
"""Elements of the communication unit, unless two layers are more (megatron_fsdp.py, _init_fsdp_param_and_grad_buffer)."""


class Unit(NamedTuple):
    """What is gathered and reduced at once; elements, with padding."""

    wide: int
    """Kept and gathered in the parameters' dtype."""
    fp8: int

    @property
    def numel(self) -> int:
        return self.wide + self.fp8


class MegatronFSDP(Strategy):
    """Megatron-FSDP, and its hybrid where dp_replicate > 1."""

    name = "megatron-fsdp"
    sharded = ("parameters", "gradients", "master_weights", "optimizer")
    reads = ("double_buffer", "communication_unit_params")
    axis = "dp_shard"

    def __init__(self, run: Run, numbers: Numbers, inventory: Inventory) -> None:
        super().__init__(run, numbers, inventory)
        self.n, self.layers = run.plan.state_shards, inventory.layers
        self.style = float8.style_of(run) if numbers.fp8 else None
        least = max(40_000_000, 1_000_000 * run.plan.dp * run.plan.cp)
        apart = inventory.embedding.numel >= least and bool(inventory.head.params)
        self.home = {EMBEDDING: EMBEDDING if apart else ROOT, LAYER: LAYER, HEAD: HEAD if apart else ROOT}
        """The bucket of each unit's parameters."""
        outside = [inventory.embedding.params, inventory.head.params]
        buckets = {EMBEDDING: outside[0], HEAD: outside[1]} if apart else {ROOT: (*outside[0], *outside[1])}
        self.units = {LAYER: self._unit(inventory.layer.params), **{name: self._unit(params) for name, params in buckets.items()}}
        self.first = {unit: self._first_gradient(unit) for unit in (EMBEDDING, LAYER, HEAD)}
        self.double = run.plan.double_buffer
        layer = max(1, self.units[LAYER].numel)
        self.capacity = run.plan.communication_unit_params or max(LEAST_UNIT, 2 * layer)
        """Elements of gradients that may wait to be reduced; half as many parameters are gathered ahead."""
        self.ahead = 1 if self.double else max(1, -(-(self.capacity // 2) // layer))
        """Layers gathered ahead."""
        self.reached = self._reached()
        self.early, self.late, self.left = self._queue()
        lags = [j - i for popped in (self.early, self.late) for i, found in popped.items() if isinstance(i, int) for j in found if isinstance(j, int)]
        self.lag = max(1, *lags) if lags else 1
        """Layers after whose reduction one is waited for: as many events of reductions are apart."""

    def _unit(self, params: Sequence[Param]) -> Unit:
        own = [q for q in params if self.precision.fp8_parameters and len(q.shape) > 1 and q.name.startswith(("attention.", "mlp."))]
        return Unit(self._padded([q for q in params if q not in own]), self._padded(own))

    def _padded(self, params: Sequence[Param]) -> int:
        whole = self.n * rows_of(params)
        return -(-sum(q.numel for q in params) // whole) * whole

    def _first_gradient(self, unit: str) -> str:
        """The parameter whose gradient opens its bucket."""
        params = {EMBEDDING: self.inventory.embedding, LAYER: self.inventory.layer, HEAD: self.inventory.head}[unit].params
        if not params or unit == EMBEDDING and self.home[HEAD] == ROOT and self.inventory.head.params:
            return ""
        return arrival_order(params, self.run.model, weight_first=unit == HEAD and self.recipe.loss in ("chunked", "fused"))[0].name

    def _reached(self) -> list[int]:
        """The last layer that is gathered when forward is in each; first, of the embedding."""
        outside = self.units[HEAD].numel if HEAD in self.units else 0
        layer, half = max(1, self.units[LAYER].numel), self.capacity // 2
        start = 1 if self.double else max(0, -(-(half - outside) // layer))
        out = [min(self.layers, start) - 1]
        for i in range(self.layers):
            out.append(max(out[-1], min(self.layers - 1, i + self.ahead)))
        return out

    def _queue(self) -> tuple[dict[int | str, tuple[int | str, ...]], dict[int | str, tuple[int | str, ...]], list[int | str]]:
        """Which reductions are waited for before the bucket of a layer (by its number) or of what is no layer is opened, and before it is reduced; which are
        left when all are under way. A new bucket leaves one other in double buffers; more than the capacity waits for the oldest."""
        queue: list[int | str] = []
        early: dict[int | str, tuple[int | str, ...]] = {}
        late: dict[int | str, tuple[int | str, ...]] = {}
        waiting = 0

        def pop(count: int) -> tuple[int | str, ...]:
            nonlocal waiting
            found = tuple(queue[:count])
            waiting -= sum(self._of(item).numel for item in found)
            del queue[:count]
            return found

        order: list[int | str] = [*([HEAD] if HEAD in self.units else []), *reversed(range(self.layers)), self.home[EMBEDDING]]
        for item in order:
            early[item] = pop(len(queue) - 1) if self.double and isinstance(item, int) and queue else ()
            late[item] = ()
            while waiting > self.capacity:
                late[item] += pop(1)
            queue.append(item)
            waiting += self._of(item).numel
        return early, late, queue

    def _of(self, item: int | str) -> Unit:
        return self.units[item if isinstance(item, str) else LAYER]

    def refusals(self) -> Iterator[PlanError]:
        p, r = self.plan, self.recipe
        for on, field, value, rule, fix in (
                (self.n == 1, "plan.dp_shard", p.dp_shard, "Megatron-FSDP has nothing to shard over one rank.", "Use zero = 1, or more dp_shard."),
                (not p.reshard_after_forward, "plan.reshard_after_forward", False, "Megatron-FSDP frees every layer after its forward.",
                 "Use reshard_after_forward = true."),
                (not p.sync_each_micro_batch, "plan.sync_each_micro_batch", False, "Megatron-FSDP reduces gradients in every micro-batch.",
                 "Use sync_each_micro_batch = true, or zero = 1."),
                (p.checkpointing.mode == "full" and p.checkpointing.group > 1, "plan.checkpointing.group", p.checkpointing.group,
                 "checkpoints of several layers under Megatron-FSDP: not predicted yet.", "Use checkpointing = full."),
                (self.run.model.moe is not None, "plan.zero", p.zero, "a mixture of experts under Megatron-FSDP: not predicted yet.", "Use zero = 1."),
                (self.numbers.fp8 and not r.precision.fp8_parameters, "recipe.precision.fp8_parameters", False,
                 "Megatron-FSDP with fp8 copies of 16-bit parameters: not predicted yet.", "Use fp8_parameters = true."),
                (self.numbers.fp8 and r.precision.fp8_recipe not in ("tensorwise", "delayed"), "recipe.precision.fp8_recipe", r.precision.fp8_recipe,
                 "Megatron-FSDP with parameters scaled by blocks: not predicted yet.", "Use fp8_recipe = tensorwise.")):
            if on:
                yield PlanError(field, value, rule, fix)

    # -- state -----------------------------------------------------------------------------------------------------------

    def _local(self, each: dict[str, int]) -> int:
        """A rank's part of all units."""
        return sum(size * (self.layers if name == LAYER else 1) for name, size in each.items()) // self.n

    @property
    def local(self) -> int:
        """Elements of which this rank has the state."""
        return self._local({name: unit.numel for name, unit in self.units.items()})

    def _weights(self, unit: str) -> int:
        """Bytes of a unit's parameters as they are gathered."""
        return nbytes(self.units[unit].wide, self.precision.parameter) + self.units[unit].fp8

    def persistent(self, role: str) -> list[Tensor]:
        p = self.precision
        out = [Tensor("parameters (shard)", "parameters", self._local({name: self._weights(name) for name in self.units})),
               Tensor("main gradients (shard)", "gradients", nbytes(self.local, p.gradient))]
        if p.master:
            out.append(Tensor("master weights (shard)", "master_weights", nbytes(self.local, p.master)))
        if self.double:
            each = self._weights(LAYER) + nbytes(self.units[LAYER].numel, p.reduce)
            out.append(Tensor("double buffers", "communication", min(2, self.layers) * each))
        return [*out, *fusion_dummies(self)]

    def update(self, role: str) -> Update:
        p, inv = self.precision, self.inventory
        return Update(self.local, inv.tensors, min(self.local, inv.largest), p.master or p.parameter, "fp32" if p.master else p.gradient, p.optimizer_state,
                      p.parameter if p.master else None, self.steps_on_device)

    def kept_gradients(self) -> list[Tensor]:
        return []

    def begin_step(self, first: bool) -> list[Op]:
        """Main gradients are zeroed; each rank casts its slice of the master weights to fp8, with scales that all ranks agree on."""
        ops = [Op("zero_grad", "memory", nbytes=float(nbytes(self.local, self.precision.gradient)), dtype=self.precision.gradient)]
        if self.style:
            tensors = self.inventory.cast_weights[1]
            own = self.layers * self.units[LAYER].fp8 // self.n
            if self.style.finds_amax:
                ops.append(collective(self.axis, "all-reduce", self.n, 4 * tensors, "fp32", name="fp8.scales_all_reduce"))
            ops.append(Op("fp8.cast_weights", "memory", nbytes=self.style.cast_bytes(own, 4), dtype="fp8", kernels=tensors * self.style.kernels))
        return ops

    # -- which micro-batches and layers are alike ---------------------------------------------------------------------------

    def like(self, micro: str) -> str:
        return micro if micro in (ONLY, LAST) else MIDDLE

    def forward_key(self, micro: str) -> object:
        return micro in (ONLY, FIRST)

    def gradient_key(self, micro: str, variant: object) -> object:
        return self.name

    def layer_variants(self, phase: str, micro: str) -> list[object]:
        k, top = self.ahead, self.layers - 1
        if phase == "forward":
            return [(i % k, self.reached[i + 1] - self.reached[i], i > self.reached[i]) for i in range(self.layers)]
        return [(i % k, i == top, min(i, k) if i == top else i >= k, i % self.lag, self._places(i, self.early[i]), self._places(i, self.late[i]))
                for i in range(self.layers)]

    @staticmethod
    def _places(i: int, popped: tuple[int | str, ...]) -> tuple[int | str, ...]:
        return tuple(j if isinstance(j, str) else j - i for j in popped)

    # -- parameters ------------------------------------------------------------------------------------------------------

    def _gathered(self, unit: str) -> tuple[Tensor, ...]:
        """Where a unit is gathered to, unless that is a buffer that stays."""
        fixed = self.double and unit == LAYER
        return () if fixed else (Tensor(f"unsharded({unit})", "communication", self._weights(unit), "gather"),)

    def _gather(self, unit: str, event: str) -> Op:
        return collective(self.axis, "all-gather", self.n, self._weights(unit), self.precision.parameter, event=event, name=f"all_gather({unit})",
                          allocs=self._gathered(unit))

    def _gather_layers(self, layers: Sequence[int]) -> list[Op]:
        return [self._gather(LAYER, f"gather {i % self.ahead}") for i in layers]

    def _wait_gather(self, event: str) -> Op:
        return Op("fsdp.wait", "wait", kernels=0, event=f"gather {event}")

    def forward_begin(self, micro: str) -> list[Op]:
        """What is no layer is gathered in a step's first micro-batch; then the first layers, as far ahead as the embedding reaches."""
        layers = self._gather_layers(range(self.reached[0] + 1))
        if not self.forward_key(micro):
            return layers
        outside = [self._gather(name, f"gather {name}") for name in self.units if name != LAYER]
        return [*outside, *layers, self._wait_gather(self.home[EMBEDDING])]

    def before_forward(self, unit: str, index: int, micro: str) -> list[Op]:
        if unit == HEAD and HEAD in self.units and self.forward_key(micro):
            return [self._wait_gather(HEAD)]
        if unit != LAYER:
            return []
        new = range(self.reached[index] + 1, self.reached[index + 1] + 1)
        return [*self._gather_layers([i for i in new if i <= index]), self._wait_gather(str(index % self.ahead)),
                *self._gather_layers([i for i in new if i > index])]

    def _reshard(self, unit: str) -> list[Op]:
        return [Op("fsdp.reshard", "host", kernels=0, frees=self._gathered(unit))]

    def after_forward(self, unit: str, index: int, micro: str) -> list[Op]:
        return self._reshard(LAYER) if unit == LAYER else []

    def _arrive(self, index: int) -> list[Op]:
        """The parameters of a layer that backward has come to: the last layer's are gathered now, the others' were ahead."""
        now = [index] if index == self.layers - 1 else []
        return [*self._gather_layers(now), self._wait_gather(str(index % self.ahead))]

    def _open(self, index: int) -> list[Op]:
        """Before a layer's backward: the layers after it are gathered ahead, its transposed fp8 weights are made."""
        top = self.layers - 1
        following = range(top - 1, max(-1, top - 1 - self.ahead), -1) if index == top else [index - self.ahead] if index >= self.ahead else []
        ops = [*self._gather_layers(following), *self._wait_reduced(self.early[index])]
        if self.style and self.style.layouts == 2:
            fp8 = self.units[LAYER].fp8
            ops.append(Op("fp8.transpose_weights", "memory", nbytes=2.0 * fp8, dtype="fp8", kernels=self.inventory.cast_weights[1] // self.layers,
                          allocs=self._transposed()))
        return ops

    def _transposed(self) -> tuple[Tensor, ...]:
        return (Tensor("fp8 weights, transposed", "temporaries", self.units[LAYER].fp8),) if self.style and self.style.layouts == 2 else ()

    def before_backward(self, unit: str, index: int, micro: str) -> list[Op]:
        return [*self._arrive(index), *self._open(index)] if unit == LAYER else []

    def before_recompute(self, index: int, micro: str, first: int, last: int) -> list[Op]:
        """Computed again, a layer gathers nothing ahead, and keeps its parameters for the backward that follows."""
        return self._arrive(index)

    def before_recomputed_backward(self, index: int, micro: str, first: int, last: int) -> list[Op]:
        return self._open(index)

    # -- gradients -------------------------------------------------------------------------------------------------------

    def _bucket(self, unit: str) -> tuple[Tensor, ...]:
        """The gradients of a unit before they are reduced, unless they lie in a buffer that stays."""
        fixed = self.double and unit == LAYER
        return () if fixed else (Tensor(f"gradient_bucket({unit})", "communication", nbytes(self.units[unit].numel, self.precision.reduce)),)

    def on_grad(self, unit: str, index: int, ready: GradReady, micro: str) -> tuple[tuple[Tensor, ...], list[Op]]:
        """The first gradient of a unit opens its bucket. Fused, the weight-gradient GEMM writes there; else the gradient is copied, and dropped."""
        opened = self._bucket(self.home[unit]) if ready.param.name == self.first[unit] else ()
        if self.recipe.grad_accum_fusion and len(ready.param.shape) > 1:
            return opened, []
        made = Tensor(f"{ready.param.name}.new_grad", "temporaries", ready.nbytes)
        moved = float(ready.nbytes + nbytes(ready.param.numel, self.precision.reduce))
        return (made, *opened), [Op(f"{ready.param.name}.to_bucket", "memory", nbytes=moved, dtype=self.precision.reduce, frees=(made,))]

    def _event(self, item: int | str) -> str:
        return f"reduced {item % self.lag if isinstance(item, int) else item}"

    def _wait_reduced(self, items: Sequence[int | str]) -> list[Op]:
        return [Op("fsdp.wait_reduce", "wait", kernels=0, event=self._event(i), frees=self._bucket(i if isinstance(i, str) else LAYER)) for i in items]

    def _reduce(self, item: int | str, micro: str) -> list[Op]:
        """A unit's gradients, averaged over the ranks: reduce-scatter, add the shard to the main gradients; in the last micro-batch, sum those over the
        replicas. NCCL divides fp32 gradients on the way, 16-bit ones are divided first."""
        p, unit = self.precision, item if isinstance(item, str) else LAYER
        whole, main = nbytes(self.units[unit].numel, p.reduce), nbytes(self.units[unit].numel // self.n, p.gradient)
        shard = () if self.double else (Tensor(f"reduced({unit})", "communication", whole // self.n, "reduce"),)
        across = self.plan.dp_replicate > 1 and micro in (ONLY, LAST)
        event = f"scattered {unit}" if across else self._event(item)
        ops = self._wait_reduced(self.late[item])
        if p.reduce != "fp32":
            ops.append(Op(f"fsdp.divide({unit})", "side", nbytes=2.0 * whole, dtype=p.reduce, axis=self.axis))
        ops += [collective(self.axis, "reduce-scatter", self.n, whole, p.reduce, event=event, name=f"reduce_scatter({unit})", allocs=shard),
                Op(f"fsdp.add_shard({unit})", "side", nbytes=float(whole // self.n + 2 * main), dtype=p.gradient, axis=self.axis, event=event, frees=shard)]
        if across:
            ops += [Op("fsdp.hold", "hold", kernels=0, event=event, axis="dp_replicate"),
                    collective("dp_replicate", "all-reduce", self.plan.dp_replicate, main, p.gradient, event=self._event(item), name=f"all_reduce({unit})")]
        return ops

    def after_backward(self, unit: str, index: int, micro: str) -> list[Op]:
        if unit == LAYER:
            return [*self._reduce(index, micro), Op("fsdp.reshard", "host", kernels=0, frees=(*self._gathered(LAYER), *self._transposed()))]
        return self._reduce(HEAD, micro) if unit == HEAD and HEAD in self.units else []

    def backward_end(self, micro: str) -> list[Op]:
        """The embedding's bucket comes last, and all are waited for; in a step's last micro-batch what is no layer is let go."""
        last = self.home[EMBEDDING]
        wait = Op("fsdp.wait_all", "wait", kernels=0, event=self._event(last), frees=tuple(
            t for item in self.left for t in self._bucket(item if isinstance(item, str) else LAYER)))
        gone = [op for name in self.units if name != LAYER for op in self._reshard(name)] if micro in (ONLY, LAST) else []
        return [*self._reduce(last, micro), wait, *gone]

    # -- step ------------------------------------------------------------------------------------------------------------

    def norm_sums(self) -> list[Op]:
        """The shards of gradients of what every tp rank holds, summed over tp (core/distributed/finalize_model_grads.py)."""
        total, dtype = -(-shared_over_tp(self) // self.n), self.precision.gradient
        return [collective("tp", "all-reduce", self.plan.tp, nbytes(total, dtype), dtype, name="norm_gradients.all_reduce")] if total else []

    def clip(self, u: Update) -> list[Op]:
        ops = clip_ops(u.numel, u.tensors, u.grad)
        ops.insert(1, collective(self.axis, "all-reduce", self.n, 4, "fp32", name="clip.all_reduce"))
        return [*self.norm_sums(), *ops]

    def step(self, role: str, first: bool) -> list[Op]:
        sums = [] if self.recipe.clip_norm else self.norm_sums()
        return [*sums, *self.update_in_fp32(role, first)]


def rows_of(params: Sequence[Param]) -> int:
    """Elements of which a rank's part of a bucket is a multiple: whole rows of every matrix, but for tensors smaller than that
    (_get_parameter_groups, chunk_size_factor)."""
    grain = 1
    for columns, numel in sorted(((q.numel // q.shape[0], q.numel) for q in params), key=lambda each: -each[0]):
        if grain == 1:
            grain = columns
        elif numel >= grain and (grain % columns or numel % grain):
            grain = lcm(grain, columns)
    return grain
