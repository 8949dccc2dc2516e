"""DeepSpeed's ZeRO: 16-bit parameters, an fp32 master copy and Adam's moments split over the ranks (12/n bytes a parameter).

Stages 1 and 2 keep the parameters in one flat buffer, padded to a multiple of 2n, of which each rank updates a slice through a copy of its
own, also where the parameters are fp32. Gradients are copied into a flat bucket of reduce_bucket_size elements, which exists from the first
gradient of a backward to its end, however small the model; a gradient that does not fit first sends what is there. Stage 1 keeps whole
gradients until the last micro-batch's backward is over and only then reduces, unless overlap_comm is on; stage 2 reduces while each backward
runs; neither call is asynchronous: overlap_comm gives them a stream of their own on a GPU. A bucket that spans the slices of several ranks is
flattened anew and all-reduced; each rank keeps the gradients of all parameters that touch its slice, whole, until the step. The step sends a
flag of overflow (16-bit parameters) and a norm, flattens its slice of the gradients, makes fp32 of it, updates, and gathers the parameters in
one piece: 3Ψ with the all-reduce. Nothing of a gradient outlives it.

Stage 3 slices each parameter by itself, and gathers it before use: 3Ψ per micro-batch where it was released in between, 2Ψ where all is used
again within stage3_max_reuse_distance. Parameters of at most 100,000 elements are whole, and gathered one by one after the update. A gather
fills one buffer, out of which each parameter is copied; a model within stage3_prefetch_bucket_size is gathered at once, and the buffer goes
when the last of it is used; of a larger one gathers are counted layer by layer, where DeepSpeed cuts them at its prefetch bucket (the same
bytes in other pieces). Its bucket and its slice of the gradients exist from the start.

Sources: deepspeed/runtime/zero/stage_1_and_2.py, stage3.py, config.py (defaults), utils.py (all_gather_dp_groups) of 0.19.8;
arXiv 1910.02054 Table 1. Checked against DeepSpeed itself in tests/execute/test_deepspeed.py.
"""

from costmodel.program.inventory import Inventory, nbytes
from costmodel.program.ir import Op, Tensor
from costmodel.program.layers import Numbers
from costmodel.program.optimizer import Update, update_ops
from costmodel.program.parallel.base import EMBEDDING, FIRST, HEAD, LAST, LAYER, ONLY, Strategy, collective, element_bytes
from costmodel.program.parallel.ddp import Bucketed, Flush, arrival_order
from costmodel.program.tape import GradReady
from costmodel.spec import Run
from costmodel.spec.parameters import Param

PERSISTENT = 100_000
"""stage3_param_persistence_threshold: parameters of no more elements stay whole (deepspeed/runtime/zero/config.py)."""
REUSE_DISTANCE = 1_000_000_000
"""stage3_max_reuse_distance: parameters used again within this many others stay gathered (deepspeed/runtime/zero/config.py)."""


class Ipg:
    """DeepSpeed's reduce bucket: a gradient that does not fit any more first sends what is in it; what is left goes when backward is over.

    `flush` tells by unit and parameter what its arrival sends; layers repeat as soon as what the bucket holds does.
    """

    def __init__(self, inventory: Inventory, element: int, cap: int, run: Run, *, by_arrival: bool) -> None:
        def order(params: tuple[Param, ...], takes_head: bool = False) -> list[tuple[str, int]]:
            arrived = arrival_order(params, run.model, weight_first=takes_head) if by_arrival else params
            return [(p.name, p.numel * element) for p in arrived]

        self.size, self.cap, self.sizes = 0, cap * element, list[int]()
        self.flush: dict[tuple[str, int], dict[str, Flush]] = {}
        units = [(HEAD, order(inventory.head.params, run.recipe.loss in ("chunked", "fused"))), (LAYER, order(inventory.layer.params)),
                 (EMBEDDING, order(inventory.embedding.params))]
        for unit, params in units if by_arrival else reversed(units):
            if unit != LAYER:
                self.flush[unit, 0] = self._unit(params)
                continue
            for i, flushes in enumerate(self._layers(params, inventory.layers)):
                self.flush[LAYER, inventory.layers - 1 - i if by_arrival else i] = flushes
        self.rest = self.size
        """Bytes that are left for the end of backward."""
        if self.rest:
            self.sizes.append(self.rest)
        self.layers = [tuple(self.flush[LAYER, i].items()) for i in range(inventory.layers)]
        """What is sent in each layer: a key that is equal for layers that send alike."""

    def _layers(self, params: list[tuple[str, int]], layers: int) -> list[dict[str, Flush]]:
        filled: list[dict[str, Flush]] = []
        seen: dict[tuple[int, int], int] = {}
        while len(filled) < layers:
            state = self.size, self.sizes[-1] if self.sizes else 0
            if state in seen:
                period = filled[seen[state]:]
                times = (layers - len(filled)) // len(period)
                if times:
                    filled += period * times
                    self.sizes += [f.nbytes for flushes in period for f in flushes.values()] * times
                seen = {}
                if len(filled) == layers:
                    break
            seen[state] = len(filled)
            filled.append(self._unit(params))
        return filled

    def _unit(self, params: list[tuple[str, int]]) -> dict[str, Flush]:
        flushes: dict[str, Flush] = {}
        for name, size in params:
            if self.size and self.size + size > self.cap:
                flushes[name] = Flush(self.size, self.sizes[-1] if self.sizes else 0)
                self.sizes.append(self.size)
                self.size = 0
            self.size += size
        return flushes


class DeepSpeedZero(Bucketed):
    """Stages 1 and 2."""

    name = "deepspeed"
    axis = "dp_shard"
    reads: tuple[str, ...] = ("bucket_bytes", "overlap_grad_reduce")

    def __init__(self, run: Run, numbers: Numbers, inventory: Inventory) -> None:
        super().__init__(run, numbers, inventory)
        p = self.precision
        self.stage, self.n = run.plan.zero, run.plan.state_shards
        self.sharded = ("master_weights", "optimizer", "gradients", "parameters")[:max(2, self.stage + 1)]
        self.grad, self.master = p.gradient, p.master or p.parameter
        self.shard = 2 * -(-inventory.numel // (2 * self.n))
        self.bucket_elements = max(1, run.plan.bucket_bytes // element_bytes(self.grad))
        self.bucket_bytes = self.bucket_elements * element_bytes(p.parameter)
        self.buckets: Ipg = Ipg(inventory, element_bytes(p.parameter), self.bucket_elements, run, by_arrival=self.stage > 1 or self.during)  # type: ignore[assignment]

    @property
    def during(self) -> bool:
        """Gradients are reduced while backward runs."""
        return self.stage > 1 or self.plan.overlap_grad_reduce

    def roles(self) -> list[tuple[str, int, int]]:
        """The last rank is the one whose gradients come first in backward."""
        return [("every rank", self.run.cluster.gpus, self.run.cluster.gpus - 1)]

    def persistent(self, role: str) -> list[Tensor]:
        p = self.precision
        return [Tensor("parameters", "parameters", nbytes(self.shard * self.n, p.parameter)),
                Tensor("master weights (shard)", "master_weights", nbytes(self.shard, self.master))]

    def update(self, role: str) -> Update:
        p = self.precision
        return Update(self.shard, 1, self.shard, self.master, self.master, p.optimizer_state, p.parameter, self.steps_on_device)

    # -- gradients -------------------------------------------------------------------------------------------------------------

    def kept_gradients(self) -> list[Tensor]:
        """From the reduction to the step: the gradients of the parameters that touch the last rank's slice, whole; its slice alone where
        they are wider than the parameters."""
        elements = self.shard if self.grad != self.precision.parameter else self._touched()
        return [Tensor("gradients (shard)", "gradients", nbytes(elements, self.grad))]

    def _touched(self) -> int:
        """Elements of the parameters that the last slice of the flat buffer touches."""
        inv, left = self.inventory, self.inventory.numel - self.shard * (self.n - 1)
        if self.n == 1 or left <= 0:
            return inv.numel if self.n == 1 else 0
        covered = 0
        for params, count in ((inv.head.params, 1), (inv.layer.params, inv.layers), (inv.embedding.params, 1)):
            unit = sum(p.numel for p in params)
            whole = min(count, (left - covered) // unit) if unit else count
            covered += whole * unit
            if whole == count:
                continue
            for p in reversed(params):
                if covered >= left:
                    return covered
                covered += p.numel
            return covered
        return covered

    def buffers(self) -> tuple[Tensor, ...]:
        """The bucket, or with overlap_comm two, between which it alternates."""
        return (Tensor("reduce buckets", "communication", self.bucket_bytes * (2 if self.plan.overlap_grad_reduce and self.stage < 3 else 1)),)

    def syncs(self, micro: str) -> bool:
        return self.stage >= 2 or micro in (ONLY, LAST)

    def layer_variants(self, phase: str, micro: str) -> list[object]:
        return super().layer_variants(phase, micro) if self.during else Strategy.layer_variants(self, phase, micro)

    def unit_variant(self, unit: str, micro: str) -> object:
        return super().unit_variant(unit, micro) if self.during else None

    def gradient_key(self, micro: str, variant: object) -> object:
        return (self.name, micro, variant)

    def begin_step(self, first: bool) -> list[Op]:
        """The step before has left no gradients."""
        return []

    def on_grad(self, unit: str, index: int, ready: GradReady, micro: str) -> tuple[tuple[Tensor, ...], list[Op]]:
        if not (self.during and self.syncs(micro)):
            return Strategy.on_grad(self, unit, index, ready, micro)
        if self.stage == 1 and micro not in (ONLY, FIRST):
            allocs, added = Strategy.on_grad(self, unit, index, ready, micro)
            made = Tensor(f"{ready.param.name}.grad", "gradients", ready.nbytes)
        else:
            made, added = Tensor(f"{ready.param.name}.new_grad", "temporaries", ready.nbytes), []
            allocs = (made,)
        flush = self.completes(unit, index, ready)
        sent = self._reduce(flush.nbytes, micro, first=not flush.previous) if flush else []
        copied = Op(f"{ready.param.name}.to_bucket", "memory", nbytes=2.0 * ready.nbytes, dtype=ready.dtype, frees=(made,))
        return allocs, [*added, *sent, copied]

    def _reduce(self, bucket_bytes: int, micro: str, *, first: bool) -> list[Op]:
        """Send what is in the bucket, and copy what is this rank's; the first one of a backward makes the place for it."""
        return [*self._send(bucket_bytes), *(self._make_place(micro) if first else [])]

    def _send(self, bucket_bytes: int) -> list[Op]:
        if self.n == 1:
            return []
        flat = (Tensor("flat bucket", "communication", bucket_bytes),)
        dtype, event = self.precision.parameter, "grads" if self.plan.overlap_grad_reduce else ""
        return [Op("bucket.flatten", "memory", nbytes=4.0 * bucket_bytes, dtype=dtype, kernels=2, allocs=flat),
                collective(self.axis, "all-reduce", self.n, bucket_bytes, self.precision.reduce, event=event, name="bucket.all_reduce", inline=True),
                Op("bucket.keep", "memory", nbytes=4.0 * bucket_bytes / self.n, dtype=dtype, kernels=2, frees=flat)]

    def _make_place(self, micro: str) -> list[Op]:
        return [Op("gradient slice", "host", kernels=0, allocs=self._place(micro))]

    def _place(self, micro: str) -> tuple[Tensor, ...]:
        kept = tuple(self.kept_gradients())
        return kept if micro in (ONLY, FIRST) or self.stage == 1 else tuple(t._replace(name="new gradients (shard)", category="temporaries") for t in kept)

    def after_backward(self, unit: str, index: int, micro: str) -> list[Op]:
        """The bucket is made when the first gradient appears: after the loss, here after the head."""
        if unit != HEAD or not (self.stage > 1 or micro in (ONLY, FIRST)):
            return []
        return [Op("deepspeed.buckets", "host", kernels=0, allocs=self.buffers())]

    def backward_end(self, micro: str) -> list[Op]:
        if not self.syncs(micro):
            return []
        ops: list[Op] = []
        if self.during:
            ops += self._reduce(self.buckets.rest, micro, first=len(self.buckets.sizes) == 1) if self.buckets.rest else []
        else:
            for i, size in enumerate(self.buckets.sizes):
                whole = (Tensor("gradients", "gradients", size),)
                ops.append(Op("gradients.to_bucket", "memory", nbytes=2.0 * size, dtype=self.grad, kernels=self.inventory.tensors, frees=whole))
                ops += self._reduce(size, micro, first=i == len(self.buckets.sizes) - 1)
        if self.n > 1 and self.plan.overlap_grad_reduce:
            ops.append(Op("deepspeed.wait", "wait", kernels=0, event="grads"))
        if micro not in (ONLY, FIRST) and self.stage > 1:
            new = self._place(micro)
            moved = 3.0 * sum(t.nbytes for t in new)
            ops.append(Op("gradients.accumulate", "memory", nbytes=moved, dtype=self.grad, frees=new))
        return [*ops, Op("deepspeed.release_buckets", "host", kernels=0, frees=self.buffers())]

    # -- the step --------------------------------------------------------------------------------------------------------------

    def clip(self, u: Update) -> list[Op]:
        """In the step."""
        return []

    def step(self, role: str, first: bool) -> list[Op]:
        p, kept = self.precision, tuple(self.kept_gradients())
        flat = Tensor("flat gradients", "temporaries", nbytes(self.shard, self.grad))
        wide = Tensor("fp32 gradients", "temporaries", nbytes(self.shard, self.master))
        copies = self.grad != self.master
        ops = self._norm()
        if self.grad == p.parameter or self.stage == 3:
            ops.append(Op("gradients.flatten", "memory", nbytes=2.0 * flat.nbytes, dtype=self.grad, allocs=(flat,)))
        if copies:
            ops.append(Op("gradients.to_fp32", "memory", nbytes=float(flat.nbytes + wide.nbytes), dtype=self.master, allocs=(wide,), frees=(flat,)))
        ops.append(Op("gradients.release", "host", kernels=0, frees=self._released(kept)))
        if self.recipe.clip_norm > 0 or p.loss_scaling:
            ops.append(Op("clip.scale", "memory", 1.0 * self.shard, 2.0 * wide.nbytes, dtype=self.master))
        left = wide if copies else flat if self.grad == p.parameter or self.stage == 3 else None
        ops += [*update_ops(self.recipe.optimizer, self.update(role), first=first),
                Op("gradients.forget", "host", kernels=0, frees=(left,) if left else kept)]
        return [*ops, *self._gather_updated()]

    def _released(self, kept: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Gradients that go once they are flat; wider ones are flat already, and go with the update."""
        return kept if self.grad == self.precision.parameter else ()

    def _norm(self) -> list[Op]:
        """The flag of 16-bit parameters that overflow, and the norm, which is taken whether it clips or not."""
        g, low = float(nbytes(self.shard, self.grad)), self.precision.parameter in ("bf16", "fp16")
        ops = [Op("overflow.check", "memory", 2.0 * self.shard, 2.0 * g, dtype=self.grad, kernels=4)] if low else []
        if low and self.n > 1:
            ops.append(collective(self.axis, "all-reduce", self.n, 1, "uint8", name="overflow.all_reduce"))
        ops.append(Op("clip.norm", "memory", 2.0 * self.shard, g, dtype=self.grad, kernels=4))
        if self.n > 1:
            ops.append(collective(self.axis, "all-reduce", self.n, 4, "fp32", name="clip.all_reduce"))
        return ops

    def _gather_updated(self) -> list[Op]:
        if self.n == 1:
            return []
        whole = nbytes(self.shard * self.n, self.precision.parameter)
        return [collective(self.axis, "all-gather", self.n, whole, self.precision.parameter, name="gather_parameters")]


class DeepSpeedZero3(DeepSpeedZero):
    """Stage 3: parameters are split too, and gathered layer by layer."""

    reads = ("bucket_bytes", "overlap_grad_reduce", "prefetch_bucket_params", "max_live_params")

    def __init__(self, run: Run, numbers: Numbers, inventory: Inventory) -> None:
        super().__init__(run, numbers, inventory)
        units = ((inventory.embedding, 1), (inventory.layer, inventory.layers), (inventory.head, 1))
        self.shard = sum(-(-p.numel // self.n) * count for unit, count in units for p in unit.params)
        small = [(p.numel, count) for unit, count in units for p in unit.params if p.numel <= PERSISTENT]
        self.small = [numel for numel, count in small for _ in range(count)] if self.n > 1 else []
        """Elements of the parameters that each rank has whole, beside its slices of them."""
        self.resident = self.n == 1
        """Parameters are where they are used."""
        self.at_once = inventory.numel - sum(self.small) <= min(self.plan.prefetch_bucket_params, self.plan.max_live_params)
        """Entering the model prefetches all of it at once, and it stays until its backward."""
        per = max(1, inventory.layer.numel)
        self.kept_layers = min(inventory.layers, REUSE_DISTANCE // 2 // per)
        """Layers at the end that stay gathered from forward to backward, whatever max_live_params says: that limits what is fetched ahead."""

    def roles(self) -> list[tuple[str, int, int]]:
        return Strategy.roles(self)

    def persistent(self, role: str) -> list[Tensor]:
        """The slices and the small parameters whole, the copy that is updated, the gradients' slice, the bucket."""
        p = self.precision
        return [Tensor("parameters (shard)", "parameters", nbytes(self.shard, p.parameter)), *self._whole(),
                Tensor("master weights (shard)", "master_weights", nbytes(self.shard, self.master)),
                Tensor("gradients (shard)", "gradients", nbytes(self.shard, self.grad)), *self.buffers()]

    def _whole(self) -> tuple[Tensor, ...]:
        small = nbytes(sum(self.small), self.precision.parameter)
        return (Tensor("small parameters", "parameters", small),) if small else ()

    def step(self, role: str, first: bool) -> list[Op]:
        """The small parameters go before the update, and are gathered after it."""
        return [Op("small.release", "host", kernels=0, frees=self._whole()), *super().step(role, first)]

    def kept_gradients(self) -> list[Tensor]:
        """Their slice is there from the start."""
        return []

    # -- gathering -------------------------------------------------------------------------------------------------------------

    def _gathered(self, unit: str) -> int:
        """Elements of a unit that are gathered before use."""
        params = {LAYER: self.inventory.layer, EMBEDDING: self.inventory.embedding, HEAD: self.inventory.head}[unit].params
        tied = self.inventory.embedding.params[0].numel if unit == HEAD and self.run.model.tied_embeddings and not self.at_once else 0
        return sum(p.numel for p in params if p.numel > PERSISTENT) + tied

    def _params(self, unit: str) -> Tensor:
        return Tensor(f"gathered({unit})", "communication", nbytes(self._gathered(unit), self.precision.parameter))

    def _buffer(self, key: str, numel: int) -> Tensor:
        return Tensor(f"gather buffer({key})", "communication", nbytes(numel, self.precision.parameter))

    def _gather(self, key: str, numel: int) -> list[Op]:
        """An all-gather into one flat buffer."""
        flat = self._buffer(key, numel)
        return [collective(self.axis, "all-gather", self.n, flat.nbytes, self.precision.parameter, event=f"gather.{key}", name=f"all_gather({key})",
                           allocs=(flat,), detached=True)] if numel else []

    def _wait(self, key: str, numel: int, held: tuple[Tensor, ...]) -> list[Op]:
        """Wait for a gather, and copy each parameter out of the buffer, which goes."""
        if not numel:
            return []
        return [Op(f"deepspeed.wait({key})", "wait", kernels=0, event=f"gather.{key}"),
                Op(f"deepspeed.copy_out({key})", "memory", nbytes=2.0 * nbytes(numel, self.precision.parameter), dtype=self.precision.parameter,
                   allocs=held, frees=(self._buffer(key, numel),))]

    def _keeps(self, index: int) -> bool:
        return self.at_once or index >= self.inventory.layers - self.kept_layers

    def layer_variants(self, phase: str, micro: str) -> list[object]:
        last = self.inventory.layers - 1
        below = super().layer_variants(phase, micro)
        return [(self._keeps(i), i == 0, i == last, i == last - self.kept_layers, below[i]) for i in range(last + 1)]

    def _prefetches(self) -> bool:
        return self.plan.prefetch_bucket_params >= 1 and self.plan.max_live_params > self.inventory.layer.numel and not self.resident

    def before_forward(self, unit: str, index: int, micro: str) -> list[Op]:
        if self.resident:
            return []
        if self.at_once:
            return self._at_once(unit)
        numel, last = self._gathered(unit), self.inventory.layers - 1
        fetched = self._prefetches() and unit == LAYER and index > 0
        ops = [] if fetched else self._gather(unit, numel)
        ops += self._wait(unit, numel, (self._params(unit),))
        if self._prefetches() and unit == LAYER and index < last:
            ops += self._gather(LAYER, numel)
        return ops

    def _at_once(self, unit: str) -> list[Op]:
        """The handle of the gather, and with it the buffer, is kept until the last of its parameters is asked for."""
        numel = self._gathered(EMBEDDING) + self.inventory.layers * self._gathered(LAYER) + self._gathered(HEAD)
        if not numel or unit == LAYER:
            return []
        if unit == HEAD:
            return [Op("deepspeed.release_buffer", "host", kernels=0, frees=(self._buffer("model", numel),))]
        held = (Tensor("gathered(model)", "communication", nbytes(numel, self.precision.parameter)),)
        return [*self._gather("model", numel), *(op._replace(frees=()) for op in self._wait("model", numel, held))]

    def after_forward(self, unit: str, index: int, micro: str) -> list[Op]:
        if self.resident or self.at_once or (unit == LAYER and self._keeps(index)) or unit == HEAD:
            return []
        return [Op("deepspeed.release", "host", kernels=0, frees=(self._params(unit),))]

    def before_backward(self, unit: str, index: int, micro: str) -> list[Op]:
        if self.resident or unit in (HEAD, EMBEDDING) or self._keeps(index):
            return []
        numel, first_missing = self._gathered(LAYER), self.inventory.layers - self.kept_layers - 1
        fetched = self._prefetches() and index < first_missing
        ops = [] if fetched else self._gather(LAYER, numel)
        ops += self._wait(LAYER, numel, (self._params(LAYER),))
        if self._prefetches() and index > 0:
            ops += self._gather(LAYER, numel)
        return ops

    def after_backward(self, unit: str, index: int, micro: str) -> list[Op]:
        if self.resident or (unit == EMBEDDING and not self.at_once) or not self._gathered(unit):
            return []
        return [Op("deepspeed.release", "host", kernels=0, frees=(self._params(unit),))]

    def _send(self, bucket_bytes: int) -> list[Op]:
        """As stage 2, with a reduce-scatter on the wire, whose slice is copied or added to the gradients'."""
        sent = [op._replace(name="bucket.reduce_scatter", comm=op.comm._replace(kind="reduce-scatter", out_bytes=op.comm.nbytes // self.n))
                if op.comm else op for op in super()._send(bucket_bytes)]
        return sent or [Op("bucket.keep", "memory", nbytes=2.0 * bucket_bytes, dtype=self.grad)]

    def _make_place(self, micro: str) -> list[Op]:
        return []

    def backward_end(self, micro: str) -> list[Op]:
        ops = self._reduce(self.buckets.rest, micro, first=False) if self.buckets.rest else []
        return [*ops, Op("deepspeed.wait", "wait", kernels=0, event="grads")] if self.n > 1 else ops

    def _norm(self) -> list[Op]:
        """The norm, in double precision; of bf16 parameters no flag."""
        ops = [op for op in super()._norm() if self.precision.parameter == "fp16" or not op.name.startswith("overflow")]
        double = collective(self.axis, "all-reduce", self.n, 8, "float64", name="clip.all_reduce")
        return [double if op.name == "clip.all_reduce" else op for op in ops]

    def _gather_updated(self) -> list[Op]:
        """The small parameters, one by one: they stay whole."""
        ops = [collective(self.axis, "all-gather", self.n, nbytes(-(-numel // self.n) * self.n, self.precision.parameter), self.precision.parameter,
                           event="gather.small", name="gather_small") for numel in self.small]
        return [ops[0]._replace(allocs=self._whole()), *ops[1:], Op("gather_small.wait", "wait", kernels=0, event="gather.small")] if ops else []
