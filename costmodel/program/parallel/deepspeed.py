"""DeepSpeed's ZeRO: 16-bit parameters, an fp32 master copy and Adam's moments split over the ranks (12/n bytes a parameter).

Stage 1 and 2 as shipped: gradients are all-reduced in flat buckets (reduce_bucket_size), each rank keeps its slice, updates its
master slice and all-gathers the 16-bit parameters: 3Ψ. Stage 1 keeps whole gradients until the step; stage 2 reduces every
micro-batch and keeps 1/n. Stage 3 also gathers each layer before use: 3Ψ per micro-batch. The step makes an fp32 copy of the
gradient slice (4/n, transient). Sources: deepspeed/runtime/zero/stage_1_and_2.py, stage3.py, config.py (defaults);
arXiv 1910.02054 Table 1. There is no dry run of this dialect.
"""

from collections.abc import Iterator

from costmodel.program.inventory import Inventory, nbytes
from costmodel.program.ir import Op, Tensor
from costmodel.program.layers import Numbers
from costmodel.program.optimizer import Update, clip_ops
from costmodel.program.parallel.base import EMBEDDING, FIRST, HEAD, LAYER, ONLY, collective, element_bytes
from costmodel.program.parallel.ddp import Bucketed, Buckets
from costmodel.program.tape import GradReady
from costmodel.spec import PlanError, Run

REUSE_DISTANCE = 1_000_000_000
"""stage3_max_reuse_distance: parameters used again within this many others stay gathered (deepspeed/runtime/zero/config.py)."""


class DeepSpeedZero(Bucketed):
    """Stages 1 and 2."""

    name = "deepspeed"
    axis = "dp_shard"
    reads: tuple[str, ...] = ("bucket_bytes", "overlap_grad_reduce", "allgather_bucket_params")

    def __init__(self, run: Run, numbers: Numbers, inventory: Inventory) -> None:
        super().__init__(run, numbers, inventory)
        self.stage = run.plan.zero
        self.n = run.plan.state_shards
        self.sharded = ("master_weights", "optimizer", "gradients", "parameters")[:max(2, self.stage + 1)]
        self.grad = self.precision.gradient
        self.shard = -(-inventory.numel // self.n)
        self.buckets = Buckets(inventory, element_bytes(self.precision.reduce), run.plan.bucket_bytes, run.plan.bucket_bytes, run)

    def refusals(self) -> Iterator[PlanError]:
        if self.plan.offload != "none":
            yield PlanError("plan.offload", self.plan.offload, "offload to host memory is not predicted yet.", "Use offload = none.")

    @property
    def keeps_whole_gradients(self) -> bool:
        return self.stage < 2

    def persistent(self, role: str) -> list[Tensor]:
        """With a flat buffer of reduce_bucket_size elements, however small the model; overlapping the reduction, stages 1 and 2 have two."""
        p = self.precision
        buffers = (2 if self.plan.overlap_grad_reduce and self.stage < 3 else 1) * self.plan.bucket_bytes if self.n > 1 else 0
        out = [Tensor("parameters", "parameters", nbytes(self.inventory.numel, p.parameter))]
        if p.master:
            out.append(Tensor("master weights (shard)", "master_weights", nbytes(self.shard, p.master)))
        if buffers:
            out.append(Tensor("reduce buckets", "communication", buffers))
        return out

    def update(self, role: str) -> Update:
        p = self.precision
        return Update(self.shard, 2, self.shard, p.master or p.parameter, "fp32" if p.master else p.gradient, p.optimizer_state,
                      p.parameter if p.master else None, self.steps_on_device)

    def kept_gradients(self) -> list[Tensor]:
        if self.keeps_whole_gradients:
            return super().kept_gradients()
        return [Tensor("gradients (shard)", "gradients", nbytes(self.shard, self.grad))]

    def syncs(self, micro: str) -> bool:
        return self.stage >= 2 or super().syncs(micro)

    def gradient_key(self, micro: str, variant: object) -> object:
        return (self.name, micro, variant)

    def on_grad(self, unit: str, index: int, ready: GradReady, micro: str) -> tuple[tuple[Tensor, ...], list[Op]]:
        if self.keeps_whole_gradients:
            allocs, ops = super().on_grad(unit, index, ready, micro)
        else:
            made = Tensor(f"{ready.param.name}.new_grad", "temporaries", ready.nbytes)
            allocs, ops = (made,), [Op(f"{ready.param.name}.to_bucket", "memory", nbytes=2.0 * ready.nbytes, dtype=ready.dtype, frees=(made,))]
        if not self.syncs(micro) or self.n == 1:
            return allocs, ops
        flush = self.completes(unit, index, ready)
        if flush:
            ops = [*ops, collective(self.axis, "all-reduce", self.n, flush.nbytes, self.precision.reduce,
                                    event="grads" if self.plan.overlap_grad_reduce else "", name="bucket.all_reduce")]
        return allocs, ops

    def backward_begin(self, micro: str) -> list[Op]:
        return self._partition(micro) if self.stage == 3 else []

    def after_backward(self, unit: str, index: int, micro: str) -> list[Op]:
        """Stage 2 makes room for its slice when the first bucket is full (copy_grads_in_partition): after the loss, here after the head."""
        return self._partition(micro) if unit == HEAD and self.stage == 2 else []

    def _partition(self, micro: str) -> list[Op]:
        return [Op("gradient partition", "host", kernels=0, allocs=tuple(self.kept_gradients()))] if micro in (ONLY, FIRST) else []

    def backward_end(self, micro: str) -> list[Op]:
        return [Op("deepspeed.wait", "wait", kernels=0, event="grads")] if self.syncs(micro) and self.n > 1 else []

    def clip(self, u: Update) -> list[Op]:
        ops = clip_ops(u.numel, u.tensors, self.grad)
        if self.n > 1:
            ops.insert(1, collective(self.axis, "all-reduce", self.n, 4, "fp32", name="clip.all_reduce"))
        return ops

    def step(self, role: str, first: bool) -> list[Op]:
        ops = self.update_in_fp32(role, first)
        if self.n == 1 or self.stage == 3:
            return ops
        left, size = self.inventory.numel, max(self.n, self.plan.allgather_bucket_params)
        while left > 0:
            numel = min(left, size)
            ops.append(collective(self.axis, "all-gather", self.n, nbytes(numel, self.precision.parameter), self.precision.parameter,
                                  name="gather_parameters"))
            left -= numel
        return ops


class DeepSpeedZero3(DeepSpeedZero):
    """Stage 3: parameters are split too, and gathered layer by layer."""

    reads = ("bucket_bytes", "overlap_grad_reduce", "prefetch_bucket_params", "max_live_params")

    def __init__(self, run: Run, numbers: Numbers, inventory: Inventory) -> None:
        super().__init__(run, numbers, inventory)
        per = max(1, inventory.layer.numel)
        self.kept_layers = min(inventory.layers, min(self.plan.max_live_params, REUSE_DISTANCE // 2) // per)
        """Layers at the end that stay gathered from forward to backward."""

    def persistent(self, role: str) -> list[Tensor]:
        p = self.precision
        return [Tensor("parameters (shard)", "parameters", nbytes(self.shard, p.parameter)),
                *[t for t in super().persistent(role) if t.category != "parameters"]]

    def _params(self, unit: str) -> Tensor:
        numel = {LAYER: self.inventory.layer.numel, EMBEDDING: self.inventory.embedding.numel, HEAD: self._head_numel}[unit]
        return Tensor(f"gathered({unit})", "communication", nbytes(numel, self.precision.parameter))

    @property
    def _head_numel(self) -> int:
        tied = self.inventory.embedding.params[0].numel if self.run.model.tied_embeddings else 0
        return self.inventory.head.numel + tied

    def _gather(self, unit: str) -> Op:
        held = self._params(unit)
        return collective(self.axis, "all-gather", self.n, held.nbytes, self.precision.parameter, event=f"gather.{unit}",
                          name=f"all_gather({unit})", allocs=(held,), detached=True)

    def _keeps(self, index: int) -> bool:
        return index >= self.inventory.layers - self.kept_layers

    def layer_variants(self, phase: str, micro: str) -> list[object]:
        last = self.inventory.layers - 1
        below = super().layer_variants(phase, micro)
        return [(self._keeps(i), i == 0, i == last, i == last - self.kept_layers, below[i]) for i in range(last + 1)]

    def _wait(self, unit: str) -> Op:
        return Op(f"deepspeed.wait({unit})", "wait", kernels=0, event=f"gather.{unit}")

    def _prefetches(self) -> bool:
        return self.plan.prefetch_bucket_params >= 1 and self.n > 1

    def before_forward(self, unit: str, index: int, micro: str) -> list[Op]:
        if self.n == 1:
            return []
        last = self.inventory.layers - 1
        fetched = self._prefetches() and unit == LAYER and index > 0
        ops = [] if fetched else [self._gather(unit)]
        ops.append(self._wait(unit))
        if self._prefetches() and unit == LAYER and index < last:
            ops.append(self._gather(LAYER))
        return ops

    def after_forward(self, unit: str, index: int, micro: str) -> list[Op]:
        if self.n == 1 or (unit == LAYER and self._keeps(index)) or unit == HEAD:
            return []
        return [Op("deepspeed.release", "host", kernels=0, frees=(self._params(unit),))]

    def before_backward(self, unit: str, index: int, micro: str) -> list[Op]:
        if self.n == 1 or unit in (HEAD, EMBEDDING) or self._keeps(index):
            return []
        first_missing = self.inventory.layers - self.kept_layers - 1
        fetched = self._prefetches() and index < first_missing
        ops = [] if fetched else [self._gather(LAYER)]
        ops.append(self._wait(LAYER))
        if self._prefetches() and index > 0:
            ops.append(self._gather(LAYER))
        return ops

    def after_backward(self, unit: str, index: int, micro: str) -> list[Op]:
        if self.n == 1 or unit == EMBEDDING:
            return []
        return [Op("deepspeed.release", "host", kernels=0, frees=(self._params(unit),))]

    def on_grad(self, unit: str, index: int, ready: GradReady, micro: str) -> tuple[tuple[Tensor, ...], list[Op]]:
        """As stage 2, with a reduce-scatter on the wire."""
        allocs, ops = super().on_grad(unit, index, ready, micro)
        scattered = [op._replace(name="bucket.reduce_scatter", comm=op.comm._replace(kind="reduce-scatter", out_bytes=op.comm.nbytes // self.n))
                     if op.comm else op for op in ops]
        return allocs, scattered
