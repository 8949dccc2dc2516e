"""Megatron's data parallel: one contiguous gradient buffer, with or without the distributed optimizer.

Parameters 16-bit, gradients in a persistent buffer (fp32 by default: 18 bytes a parameter with master weights and Adam; with the
distributed optimizer 6 + 12/n). Without it, gradients are all-reduced (2Ψ); with it reduce-scattered and the updated 16-bit
parameters all-gathered (2Ψ). Several instances of the distributed optimizer (dp_replicate > 1) shard state and gather parameters
within an instance, and all-reduce the shard of every bucket across instances after its reduce-scatter. A gradient buffer of 16
bits is copied to fp32 at the step. Sources: NVIDIA/Megatron-LM core/distributed/param_and_grad_buffer.py (bucket size
max(40 M, 1 M x dp) parameters; inter_distributed_optimizer_instance_group), core/optimizer; issue 654 (maintainer's bytes per
parameter). There is no dry run of this dialect. DeepSpeed without ZeRO keeps the same buffer: in bf16 fp32 gradients beside
16-bit parameters, and although the stage is 0 each rank has the master weights and moments of its slice only, all-reduces whole
gradients and gathers the updated parameters (deepspeed/runtime/bf16_optimizer.py; DeepSpeed issue 2352).
"""

from costmodel.program import float8
from costmodel.program.inventory import Inventory, nbytes
from costmodel.program.ir import Op, Tensor
from costmodel.program.layers import Numbers
from costmodel.program.optimizer import Update, clip_ops
from costmodel.program.parallel.base import FIRST, LAST, MIDDLE, ONLY, Strategy, collective, element_bytes, repeated
from costmodel.program.parallel.ddp import Bucketed, Buckets
from costmodel.program.tape import GradReady
from costmodel.spec import Run
from costmodel.spec.parameters import Param

WHOLE_WITH_SEQUENCE = ("attention.out.bias", "mlp.down.bias", "router.weight", "router.bias", "attention.q_a.weight",
                       "attention.kv_a.weight")
"""Weights beside the norms that every tp rank holds and, under sequence parallelism, sees a part of the tokens with."""


def fusion_dummies(s: Strategy) -> list[Tensor]:
    """Where GEMMs write weight gradients into the buffer, autograd is handed a tensor of each shape that nobody reads (Transformer Engine)."""
    if not s.recipe.grad_accum_fusion:
        return []
    shapes = {q.shape[-2:] for unit in (*(layer for layer, _ in s.inventory.stretches), s.inventory.head) for q in unit.params if len(q.shape) >= 2}
    return [Tensor("weight-gradient dummies", "temporaries", nbytes(sum(r * c for r, c in shapes), s.precision.parameter))]


def shared_over_tp(s: Strategy) -> int:
    """Elements that every tp rank holds, and of whose gradient it has a part."""
    if s.plan.tp == 1:
        return 0
    inv = s.inventory
    total = sum(p.numel * n for p, n in inv.norms if s.partial_over_tp(p))
    if s.plan.sequence_parallel:
        total += sum(n * p.numel for layer, n in inv.stretches for p in layer.params if p.name in WHOLE_WITH_SEQUENCE)
    return total


class MegatronDP(Bucketed):
    """Contiguous gradient buffer; distributed optimizer where zero = 1."""

    name = "megatron"

    def __init__(self, run: Run, numbers: Numbers, inventory: Inventory) -> None:
        super().__init__(run, numbers, inventory)
        self.distributed = run.plan.zero == 1
        self.axis = "dp_shard" if self.distributed else "dp_replicate"
        self.reads = ("overlap_grad_reduce", "bucket_bytes" if run.plan.framework == "deepspeed" else "overlap_param_gather" if self.distributed else "")
        self.n = run.plan.dp * run.plan.cp
        self.group = run.plan.state_shards if self.distributed else self.n
        """Ranks that scatter gradients and gather parameters: one instance of the distributed optimizer, or all."""
        self.instances = run.plan.dp_replicate if self.distributed else 1
        slices = run.plan.framework == "deepspeed" and self.precision.master is not None and self.precision.parameter == "bf16"
        self.shards = run.plan.state_shards if self.distributed else self.n if slices else 1
        self.sharded = ("master_weights", "optimizer") if self.distributed or slices else ()
        self.local = -(-inventory.numel // self.shards)
        element = element_bytes(self.precision.reduce)
        cap = max(40_000_000, 1_000_000 * self.n) * element if run.plan.framework == "megatron" else run.plan.bucket_bytes
        self.buckets = Buckets(inventory, element, cap, cap, run)

    def persistent(self, role: str) -> list[Tensor]:
        p, inv = self.precision, self.inventory
        cast = inv.cast_weights[0] if p.fp8_parameters else 0
        out = [Tensor("parameters", "parameters", nbytes(inv.numel - cast, p.parameter)),
               Tensor("gradient buffer", "gradients", nbytes(inv.numel, p.gradient))]
        if p.master:
            out.append(Tensor("master weights", "master_weights", nbytes(self.local, p.master)))
        out += fusion_dummies(self)
        if self.numbers.fp8:
            style = float8.style_of(self.run)
            out.append(Tensor("fp8 weights", "parameters" if p.fp8_parameters else "framework", style.layouts * style.stored(inv.cast_weights[0])))
        return out

    def update(self, role: str) -> Update:
        p, inv = self.precision, self.inventory
        return Update(self.local, inv.tensors, min(self.local, inv.largest), p.master or p.parameter, "fp32" if p.master else p.gradient,
                      p.optimizer_state, p.parameter if p.master else None, self.steps_on_device)

    def begin_step(self, first: bool) -> list[Op]:
        """The buffer is zeroed, not freed. Transformer Engine casts fp8 weights once a step; where they are the parameters and have one scale, each
        rank casts its slice of the master weights, and of mxfp8 all that it has gathered in 16 bits."""
        total = float(nbytes(self.inventory.numel, self.precision.gradient))
        ops = [Op("zero_grad", "memory", nbytes=total, dtype=self.precision.gradient)]
        if self.numbers.fp8:
            style, (numel, tensors) = float8.style_of(self.run), self.inventory.cast_weights
            own = self.precision.fp8_parameters and self._gathers_fp8
            moved = style.cast_bytes(-(-numel // self.shards), 4) if own else style.cast_bytes(numel, element_bytes(self.precision.parameter))
            ops.append(Op("fp8.cast_weights", "memory", nbytes=moved, dtype="fp8", kernels=tensors * style.kernels))
        return ops

    def kept_gradients(self) -> list[Tensor]:
        return []

    def like(self, micro: str) -> str:
        """Every micro-batch adds into the buffer; the last also sends, and the first may gather."""
        return micro if self.syncs(micro) or self.forward_key(micro) else MIDDLE

    def gradient_key(self, micro: str, variant: object) -> object:
        return (self.name, self.syncs(micro), variant)

    def syncs(self, micro: str) -> bool:
        return micro in (ONLY, LAST) and self.n > 1

    def on_grad(self, unit: str, index: int, ready: GradReady, micro: str) -> tuple[tuple[Tensor, ...], list[Op]]:
        """Fused, the weight-gradient GEMM adds into the buffer; else a 16-bit gradient is made, added and dropped."""
        buffer = nbytes(ready.param.numel, self.precision.gradient)
        if self.recipe.grad_accum_fusion and len(ready.param.shape) > 1:
            allocs: tuple[Tensor, ...] = ()
            ops: list[Op] = []
        else:
            made = Tensor(f"{ready.param.name}.new_grad", "temporaries", ready.nbytes)
            allocs = (made,)
            ops = [Op(f"{ready.param.name}.to_buffer", "memory", nbytes=float(ready.nbytes + 2 * buffer), dtype=self.precision.gradient, frees=(made,))]
        if self.syncs(micro):
            flush = self.completes(unit, index, ready)
            if flush and self.plan.overlap_grad_reduce:
                ops += self._reduce(flush.nbytes, "grads", ready.param)
        return allocs, ops

    def _reduce(self, size: int, event: str, param: Param | None = None) -> list[Op]:
        """One bucket's reduction; `param` is in it."""
        return self._sends(self.axis, self.group, size, event)

    def _sends(self, axis: str, group: int, size: int, event: str) -> list[Op]:
        """An all-reduce; or a reduce-scatter, and with several instances an all-reduce of the shard across them, which the next bucket waits for: Megatron
        launches both on one stream."""
        dtype = self.precision.reduce
        if self.instances == 1:
            kind = "reduce-scatter" if self.distributed else "all-reduce"
            return [collective(axis, kind, group, size, dtype, event=event, name=f"bucket.{kind.replace('-', '_')}")]
        across = collective("dp_replicate", "all-reduce", self.instances, size // group, dtype, event=event, name="instances.all_reduce")
        if group == 1:
            return [across]
        within = collective(axis, "reduce-scatter", group, size, dtype, event=event and f"{event} scattered", name="bucket.reduce_scatter")
        if not event:
            return [within, across]
        return [Op("megatron.hold", "hold", kernels=0, event=event, axis=axis), within,
                Op("megatron.hold", "hold", kernels=0, event=f"{event} scattered", axis="dp_replicate"), across]

    @property
    def gathers_in_forward(self) -> bool:
        """In a pipeline all stages launch their gathers together (align_param_gather) while the first fills it: there they outlive the step instead."""
        return self.distributed and self.group > 1 and self.plan.overlap_param_gather and self.plan.pp == 1

    def forward_key(self, micro: str) -> object:
        return self.gathers_in_forward and micro in (ONLY, FIRST)

    def forward_begin(self, micro: str) -> list[Op]:
        """overlap_param_gather: the first forward gathers what the last update left in slices. Compute waits for the first layers' bucket, and for the
        others, in order, while it works: here at the end."""
        if not self.forward_key(micro):
            return []
        first, *others = reversed(self.buckets.sizes)
        return [self._gather(first, "first_params"), *(self._gather(size, "params") for size in others),
                Op("megatron.wait_params", "wait", kernels=0, event="first_params")]

    def forward_end(self, micro: str) -> list[Op]:
        waits = self.forward_key(micro) and len(self.buckets.sizes) > 1
        return [Op("megatron.wait_params", "wait", kernels=0, event="params")] if waits else []

    def _gather(self, size: int, event: str) -> Op:
        """The all-gather of the updated parameters of one bucket, whose gradients have `size` bytes."""
        p = self.precision
        message = size // element_bytes(p.reduce) * element_bytes(p.parameter)
        if p.fp8_parameters and self._gathers_fp8:
            message -= message * self.inventory.cast_weights[0] // self.inventory.numel // element_bytes(p.parameter)
        return collective(self.axis, "all-gather", self.group, message, p.parameter, event=event, name="gather_parameters")

    @property
    def _gathers_fp8(self) -> bool:
        """Parameters in fp8 travel in fp8, but those of mxfp8 in 16 bits (reuse_grad_buf_for_mxfp8_param_ag). A bucket counts its share of them."""
        return self.precision.fp8_recipe != "mxfp8"

    def backward_end(self, micro: str) -> list[Op]:
        """A pipeline's stage first sends its gradient on: its reductions are waited for when all micro-batches are done."""
        if not self.syncs(micro) or self.plan.pp > 1:
            return []
        if self.plan.overlap_grad_reduce:
            return [Op("megatron.wait", "wait", kernels=0, event="grads")]
        return [op for size in self.buckets.sizes for op in self._reduce(size, "")]

    def after_micro_batches(self, left: str) -> list[tuple[list[Op], int]]:
        """core/distributed/finalize_model_grads.py, which the schedules call last."""
        if self.n == 1 or self.plan.overlap_grad_reduce:
            return []
        return repeated(self.buckets.sizes, lambda size: self._reduce(size, ""))

    @property
    def late_norms(self) -> bool:
        return self.plan.tp > 1

    def norm_sums(self) -> list[Op]:
        """Gradients of what every tp rank holds, flat, in one all-reduce (core/distributed/finalize_model_grads.py): norms, and under
        sequence parallelism the biases of row-parallel matmuls; queries' and keys' norms always."""
        total, dtype = shared_over_tp(self), self.precision.gradient
        if not total:
            return []
        return [collective("tp", "all-reduce", self.plan.tp, nbytes(total, dtype), dtype, name="norm_gradients.all_reduce")]

    def clip(self, u: Update) -> list[Op]:
        ops = clip_ops(u.numel, u.tensors, u.grad)
        if self.shards > 1:
            ops.insert(1, collective(self.axis, "all-reduce", self.shards, 4, "fp32", name="clip.all_reduce"))
        return [*self.norm_sums(), *ops]

    def step(self, role: str, first: bool) -> list[Op]:
        sums = [] if self.recipe.clip_norm else self.norm_sums()
        return [*sums, *self.update_in_fp32(role, first)]

    def after_step(self, role: str) -> list[tuple[list[Op], int]]:
        """Where the update is in slices, the updated parameters are all-gathered, bucket by bucket."""
        if not self.sharded or self.group == 1 or self.gathers_in_forward:
            return []
        event = "params" if self.plan.overlap_param_gather else ""
        return repeated(self.buckets.sizes, lambda size: [self._gather(size, event)])
