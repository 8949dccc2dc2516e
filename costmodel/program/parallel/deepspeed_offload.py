"""DeepSpeed's ZeRO-Offload: the fp32 copy, its gradients and Adam's moments in host memory, where the CPU updates them (18/n bytes a parameter).

Stages 1 and 2 keep the 16-bit parameters on the device. What a bucket holds of this rank's slice is made fp32 on the device once it is reduced, and
copied into the gradients of the fp32 copy, on the stream of the reduction (without overlap_comm the compute stream, so that nothing is hidden). Where
micro-batches are accumulated, the gradients of all parameters that touch the slice wait for one another in page-locked memory, 16-bit and whole: each
reduction fetches them, adds on the device, and sends them back. Gradients that are wider than the parameters accumulate on the device instead, as without
offload, and go with the last micro-batch. A buffer of the largest parameter stands ready on either side. After the update the CPU writes a 16-bit copy
of its slice, which is copied to the device and gathered.

Stage 3 has its gradients' slice in host memory too, in the dtype in which they accumulate, beside fp32 ones for the update: a reduced gradient is sent,
and fetched again to be made fp32; a later micro-batch's is added on the device. With parameters offloaded as well their 16-bit slices are in page-locked
memory, and each is copied to the device, while the host waits, before it is gathered; else the update converts on the CPU and copies from plain memory.

NVMe (arXiv 2104.07857) is not described. Sources: arXiv 2101.06840; deepspeed/runtime/zero/stage_1_and_2.py (copy_grads_in_partition, step), stage3.py
(partition_grads, _reassign_or_swap_out_partitioned_parameters), partition_parameters.py (all_gather_coalesced) of 0.19.8, where pin_memory is on.
"""

from collections.abc import Iterator

from costmodel.program.inventory import Inventory, nbytes
from costmodel.program.ir import Op, Tensor
from costmodel.program.layers import Numbers
from costmodel.program.optimizer import Update, update_ops
from costmodel.program.parallel.base import FIRST, LAST, ONLY, element_bytes
from costmodel.program.parallel.deepspeed import PERSISTENT, DeepSpeedZero, DeepSpeedZero3
from costmodel.program.parallel.offload import D2H, H2D, on_host, pinned_slack, to_device, to_host
from costmodel.spec import Run

SUB_GROUP = 1_000_000_000
"""sub_group_size: elements of a slice whose fp32 gradients are one block (deepspeed/runtime/zero/config.py)."""


class OffloadedZero(DeepSpeedZero):
    """Stages 1 and 2 with their optimizer in host memory."""

    @property
    def wide(self) -> bool:
        """Gradients accumulate on the device, in a dtype of their own."""
        return self.grad != self.precision.parameter

    @property
    def accumulates_on_host(self) -> bool:
        """Stage 1 keeps gradients on the device until the last micro-batch."""
        return self.stage > 1 and not self.wide and self.recipe.grad_accum > 1

    def persistent(self, role: str) -> list[Tensor]:
        parameters, _ = super().persistent(role)
        return [parameters, self._staging()]

    def _staging(self) -> Tensor:
        """A gradient of the largest parameter, on either side."""
        return Tensor("gradient staging", "communication", nbytes(self.inventory.largest, self.precision.parameter))

    def host_persistent(self, role: str) -> list[Tensor]:
        state = [Tensor("master weights (shard)", "master_weights", nbytes(self.shard, self.master)),
                 Tensor("gradients (shard)", "gradients", nbytes(self.shard, self.master)),
                 Tensor("updated parameters (shard)", "communication", nbytes(self.shard, self.precision.parameter)), self._staging()]
        if self.accumulates_on_host:
            state.append(Tensor("accumulated gradients", "gradients", nbytes(self._touched(), self.grad)))
        return state

    def host_slack_bytes(self) -> int:
        """All but the moments are page-locked; the gradients of each parameter that accumulates by themselves, whose rounding is left out."""
        return pinned_slack(t.nbytes for t in self.host_persistent("") if t.name != "accumulated gradients")

    def update(self, role: str) -> Update:
        return super().update(role)._replace(low=None, steps_on_device=True)

    def kept_gradients(self) -> list[Tensor]:
        return super().kept_gradients() if self.wide else []

    # -- gradients go ------------------------------------------------------------------------------------------------------

    def like(self, micro: str) -> str:
        return micro

    def _reduce(self, bucket_bytes: int, micro: str, *, first: bool) -> list[Op]:
        """Reduce, then send what is this rank's."""
        ops = super()._reduce(bucket_bytes, micro, first=first)
        mine = bucket_bytes // element_bytes(self.precision.parameter) // self.n
        if not mine or self.wide and micro not in (ONLY, LAST):
            return ops
        sent = self._sent(mine, micro)
        if not self.plan.overlap_grad_reduce:
            return [*ops, *(each for op in sent for each in ((op, _until(op.event)) if op.kind == "copy" else (op,)))]
        at = next((i for i, op in enumerate(ops) if op.comm is not None), len(ops))
        return [*ops[:at], _hold(D2H, self.axis), *ops[at:], _hold("grads", D2H), _hold("grads", H2D), *sent]

    def _sent(self, mine: int, micro: str) -> list[Op]:
        """`mine` elements of a reduced bucket: added to what waits in host memory, and with the last micro-batch made fp32 there."""
        beside = self.plan.overlap_grad_reduce
        tensors = max(1, self.inventory.tensors * mine // max(1, self.inventory.numel))
        g, low = self.precision.parameter, nbytes(mine, self.precision.parameter)
        last = micro in (ONLY, LAST)
        ops: list[Op] = []
        if self.accumulates_on_host:
            if micro != FIRST:
                ops += [to_device("gradients.fetch", low, tensors=tensors, detached=beside),
                        self._work("gradients.add", 3.0 * low, g, tensors)]
            ops.append(to_host("gradients.keep", low, tensors=tensors, detached=beside))
        if last:
            wide = Tensor("fp32 gradient", "temporaries", nbytes(min(mine, self.inventory.largest), self.master))
            ops += [self._work("gradients.to_fp32", float(low + nbytes(mine, self.master)), self.master, 2 * tensors)._replace(allocs=(wide,)),
                    to_host("gradients.to_host", nbytes(mine, self.master), tensors=tensors, detached=beside)._replace(frees=(wide,))]
        return ops

    def _work(self, name: str, moved: float, dtype: str, kernels: int) -> Op:
        """Memory-bound work on the stream of the reduction."""
        if self.plan.overlap_grad_reduce:
            return Op(name, "side", nbytes=moved, dtype=dtype, kernels=kernels, axis=self.axis, detached=True)
        return Op(name, "memory", nbytes=moved, dtype=dtype, kernels=kernels)

    # -- the step ----------------------------------------------------------------------------------------------------------

    def step(self, role: str, first: bool) -> list[Op]:
        """The CPU's, once all gradients have arrived; then the parameters come back."""
        p = self.precision
        kept = tuple(self.kept_gradients())
        ops = [_until(D2H), *(op for op in self._norm() if op.comm is not None), *self._clip_on_host(), *self._update_on_host(role, first)]
        ops.append(Op("parameters.narrow", "cpu", nbytes=float(nbytes(self.shard, self.master) + nbytes(self.shard, p.parameter)), dtype=p.parameter))
        ops += [to_device("parameters.to_device", nbytes(self.shard, p.parameter), detached=False), _until(H2D)]
        ops += [Op("gradients.forget", "host", kernels=0, frees=kept)] if kept else []
        return [*ops, *self._gather_updated()]

    def _clip_on_host(self) -> list[Op]:
        scales = self.recipe.clip_norm > 0 or self.precision.loss_scaling
        return [Op("clip.scale", "cpu", 1.0 * self.shard, 2.0 * nbytes(self.shard, self.master), dtype=self.master)] if scales else []

    def _update_on_host(self, role: str, first: bool) -> list[Op]:
        return on_host(update_ops(self.recipe.optimizer, self.update(role), first=first))


class OffloadedZero3(DeepSpeedZero3):
    """Stage 3 with its optimizer, or also its parameters, in host memory."""

    def __init__(self, run: Run, numbers: Numbers, inventory: Inventory) -> None:
        super().__init__(run, numbers, inventory)
        self.fetches = run.plan.offload == "params"
        if self.fetches:
            self.resident = False
            units = ((inventory.embedding, 1), (inventory.layer, inventory.layers), (inventory.head, 1))
            self.small = [p.numel for unit, count in units for p in unit.params if p.numel <= PERSISTENT for _ in range(count)]

    def persistent(self, role: str) -> list[Tensor]:
        """The 16-bit slices, unless they are offloaded, the small parameters whole, the bucket."""
        slices = [] if self.fetches else [Tensor("parameters (shard)", "parameters", nbytes(self.shard, self.precision.parameter))]
        return [*slices, *self._whole(), *self.buffers()]

    def host_persistent(self, role: str) -> list[Tensor]:
        p = self.precision
        slices = [Tensor("parameters (shard)", "parameters", nbytes(self.shard, p.parameter))] if self.fetches else []
        return [*slices, Tensor("master weights (shard)", "master_weights", nbytes(self.shard, self.master)),
                Tensor("gradients (shard)", "gradients", nbytes(self.shard, self.grad)),
                Tensor("fp32 gradients (shard)", "gradients", nbytes(self.shard, self.master))]

    def host_slack_bytes(self) -> int:
        """Parameters and gradients are page-locked, the fp32 gradients sub-group by sub-group; the fp32 copy and the moments are not."""
        def sizes() -> Iterator[int]:
            yield nbytes(self.shard, self.grad)
            if self.fetches:
                yield nbytes(self.shard, self.precision.parameter)
            whole, rest = divmod(self.shard, SUB_GROUP)
            yield from [nbytes(SUB_GROUP, self.master)] * whole
            yield nbytes(rest, self.master)

        return pinned_slack(sizes())

    def update(self, role: str) -> Update:
        return super().update(role)._replace(low=None, steps_on_device=True)

    # -- parameters come ---------------------------------------------------------------------------------------------------

    def _gather(self, key: str, numel: int) -> list[Op]:
        """Offloaded slices are copied to the device first, while the host waits; one rank alone has no more to do."""
        if not self.fetches or not numel:
            return super()._gather(key, numel)
        here = nbytes(-(-numel // self.n), self.precision.parameter)
        tensors = max(1, self.inventory.tensors * numel // max(1, self.inventory.numel))
        if self.n == 1:
            return [to_device(f"deepspeed.fetch({key})", here, tensors=tensors)._replace(event=f"gather.{key}", allocs=(self._buffer(key, numel),))]
        arrived = (Tensor(f"fetched({key})", "communication", here),)
        (gather,) = super()._gather(key, numel)
        return [to_device(f"deepspeed.fetch({key})", here, tensors=tensors)._replace(allocs=arrived),
                Op("deepspeed.fetched", "sync", kernels=0, event=H2D), _hold(H2D, self.axis), gather.freeing(arrived)]

    def _wait(self, key: str, numel: int, held: tuple[Tensor, ...]) -> list[Op]:
        """What one rank fetched is the parameters."""
        ops = super()._wait(key, numel, held)
        return [op._replace(kind="host", nbytes=0.0, kernels=0) if op.kind == "memory" else op for op in ops] if self.n == 1 else ops

    # -- gradients go ------------------------------------------------------------------------------------------------------

    def like(self, micro: str) -> str:
        return micro

    def _reduce(self, bucket_bytes: int, micro: str, *, first: bool) -> list[Op]:
        """A reduced gradient is sent; fetched, where it is added to or made fp32; sent again."""
        ops = super()._reduce(bucket_bytes, micro, first=first)
        mine = bucket_bytes // element_bytes(self.precision.parameter) // self.n
        if not mine:
            return ops
        kept, wide = nbytes(mine, self.grad), nbytes(mine, self.master)
        tensors = max(1, self.inventory.tensors * mine * self.n // max(1, self.inventory.numel))
        piece = min(mine, -(-self.inventory.largest // self.n))
        back = (Tensor("gradient, fetched", "temporaries", nbytes(piece, self.grad) + nbytes(piece, self.master)),)
        at = next((i for i, op in enumerate(ops) if op.comm is not None), len(ops))
        out = [*ops[:at], _hold(D2H, self.axis), *ops[at:], _hold("grads", D2H), _hold("grads", H2D)]
        fetch = to_device("gradients.fetch", kept, tensors=tensors)
        send = to_host("gradients.keep", kept, tensors=tensors)
        add = Op("gradients.add", "side", nbytes=3.0 * kept, dtype=self.grad, kernels=tensors, axis=self.axis, detached=True)
        out += [send, fetch] if micro in (ONLY, FIRST) else [fetch, add, send]
        if micro in (ONLY, LAST):
            convert = Op("gradients.to_fp32", "side", nbytes=float(kept + wide), dtype=self.master, kernels=2 * tensors, axis=self.axis, detached=True)
            out += [convert._replace(allocs=back), to_host("gradients.to_host", wide, tensors=tensors)._replace(frees=back)]
        return out

    # -- the step ----------------------------------------------------------------------------------------------------------

    def step(self, role: str, first: bool) -> list[Op]:
        p = self.precision
        scales = self.recipe.clip_norm > 0 or p.loss_scaling
        ops = [Op("small.release", "host", kernels=0, frees=self._whole()), _until(D2H), *(op for op in self._norm() if op.comm is not None)]
        ops += [Op("clip.scale", "cpu", 1.0 * self.shard, 2.0 * nbytes(self.shard, self.master), dtype=self.master)] if scales else []
        ops += on_host(update_ops(self.recipe.optimizer, self.update(role), first=first))
        low = Tensor("updated parameters (shard)", "temporaries", nbytes(self.shard, p.parameter))
        narrow = Op("parameters.narrow", "cpu", nbytes=float(nbytes(self.shard, self.master) + low.nbytes), dtype=p.parameter)
        if self.fetches:
            return [*ops, narrow, *self._gather_updated()]
        copy = Op("parameters.to_device", "copy", nbytes=float(low.nbytes), dims=(1,), axis=H2D, event=H2D, host_frees=(low,))
        return [*ops, narrow._replace(host_allocs=(low,)), copy, _until(H2D), *self._gather_updated()]

    def _gather_updated(self) -> list[Op]:
        if self.n > 1:
            return super()._gather_updated()
        return [Op("small.keep", "host", kernels=0, allocs=self._whole())] if self.small else []

    def backward_end(self, micro: str) -> list[Op]:
        return [*super().backward_end(micro), _until(D2H)]


def _until(event: str) -> Op:
    return Op(f"wait({event})", "wait", kernels=0, event=event)


def _hold(event: str, axis: str) -> Op:
    return Op(f"hold({event})", "hold", kernels=0, event=event, axis=axis)
