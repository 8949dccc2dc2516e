"""FSDP2 with CPUOffloadPolicy: sharded parameters, their gradients and the optimizer's state live in host memory, page-locked but for the state.

Before a gather the shard of each parameter is copied to the device, on the stream on which it is cast and copied into the gather's buffer; nothing of
it stays once the parameter is freed. A reduced gradient is copied to the host from the stream of its reduction, so the next reduction waits
for the copy; the first gradient of a step goes into page-locked memory while the host goes on, a later one (micro-batches that reduce each) into
plain memory, and is added there while the host waits. The backward ends when the last copy has arrived; clipping and the update are the CPU's. A group of one
rank copies when the parameters are needed, on the compute stream, so that nothing is hidden.

Source: torch/distributed/fsdp/_fully_shard (_fsdp_param.py all_gather_inputs, _fsdp_collectives.py foreach_all_gather and foreach_reduce,
_fsdp_param_group.py finalize_backward), 2.13.
"""

from collections.abc import Iterable, Iterator

from costmodel.program.inventory import nbytes
from costmodel.program.ir import Op, Tensor
from costmodel.program.optimizer import Update
from costmodel.program.parallel.base import Strategy, element_bytes
from costmodel.program.parallel.fsdp import FSDP, local_rows
from costmodel.program.parallel.offload import D2H, H2D, on_host, pinned_slack, to_device, to_host
from costmodel.program.zerobubble import IDLE
from costmodel.spec.parameters import Param


class OffloadedFSDP(FSDP):
    """FSDP2 and HSDP with their state in host memory."""

    keeps_shards = False

    # -- state -----------------------------------------------------------------------------------------------------------

    def persistent(self, role: str) -> list[Tensor]:
        return []

    def host_persistent(self, role: str) -> list[Tensor]:
        return [Tensor("parameters (shard)", "parameters", nbytes(self._total(self.shard), self.precision.parameter))]

    def host_slack_bytes(self) -> int:
        """Of parameters, padded, and of gradients, each a block of its own."""
        def sizes(name: str) -> Iterator[int]:
            for q in self.groups[name].params:
                row = q.numel // q.shape[0]
                yield -(-q.shape[0] // self.n) * row * element_bytes(self.precision.parameter)
                yield local_rows(q.shape[0], self.n) * row * element_bytes(self.precision.gradient)

        return self._total({name: pinned_slack(sizes(name)) for name in self.groups})

    def update(self, role: str) -> Update:
        """Every step counter is in host memory, as all state is."""
        return super().update(role)._replace(steps_on_device=True)

    def kept_gradients(self) -> list[Tensor]:
        """In host memory, without padding."""
        return [Tensor("gradients (shard)", "gradients", nbytes(self._total(self.local), self.precision.gradient))]

    def begin_step(self, first: bool) -> list[Op]:
        return on_host(super().begin_step(first))

    # -- parameters come ---------------------------------------------------------------------------------------------------

    def _gather(self, group: str, event: str) -> list[Op]:
        """Copy each parameter's shard to the device, and cast it there."""
        ops = super()._gather(group, event)
        if not ops:
            return []
        copy_in, gather = ops
        arrived = (Tensor(f"cast({group})", "communication", self._weights(group, whole=False), "gather"),)
        count = len(self.groups[group].params)
        kernels = 1 + (count if self.casts else 0)
        return [to_device(f"fsdp.to_device({group})", self._bytes(group, self.precision.parameter, whole=False), tensors=count)._replace(allocs=arrived),
                Op(f"fsdp.hold({H2D})", "hold", kernels=0, event=H2D, axis=self.axes[group]),
                copy_in._replace(kernels=kernels, allocs=(self._buffer(group),)), gather._replace(frees=arrived)]

    def _copy_out(self, group: str, event: str, free: tuple[Tensor, ...]) -> list[Op]:
        """Where nothing is gathered, the copies come here, one after the other between the parameters that take them."""
        ops = super()._copy_out(group, event, free)
        if self.size[group] > 1 or not ops:
            return ops
        params = self.groups[group].params
        staged = (Tensor(f"staging({group})", "communication", self._staging(params)),)
        copy = to_device(f"fsdp.to_device({group})", self._bytes(group, self.precision.parameter), tensors=len(params), detached=False)
        wait = Op(f"fsdp.wait({H2D})", "wait", kernels=0, event=H2D)
        return [copy, wait, *(op._replace(allocs=(*op.allocs, *staged), frees=(*op.frees, *staged)) for op in ops)]

    def _staging(self, params: Iterable[Param]) -> int:
        """Bytes that are held at once beyond all parameters, while each is copied, cast and copied out in turn; the one before is still referred to."""
        full, low = element_bytes(self.precision.parameter), element_bytes(self.low)
        live = before = peak = 0
        for q in params:
            peak = max(peak, live + before + q.numel * (full + (low if self.casts else 0)))
            live += q.numel * low
            before = q.numel * low
            peak = max(peak, live + before)
        return peak - live

    def _holding(self, ops: list[Op]) -> list[Op]:
        """Copies wait for what gathers wait for: the parameters before them are copied out."""
        return [each for op in ops for each in ((op, op._replace(axis=H2D, frees=())) if op.kind == "hold" and op.event == "copied" else (op,))]

    def before_forward(self, unit: str, index: int, micro: str) -> list[Op]:
        return self._holding(super().before_forward(unit, index, micro))

    def before_backward(self, unit: str, index: int, micro: str) -> list[Op]:
        return self._holding(super().before_backward(unit, index, micro))

    # -- gradients go ------------------------------------------------------------------------------------------------------

    def _reduce(self, group: str, micro: str, previous: str | None, left: str = IDLE) -> list[Op]:
        """A reduction begins when the copies from its stream are done."""
        ops = super()._reduce(group, micro, previous, left)
        at = next((i for i, op in reversed(list(enumerate(ops))) if op.comm is not None and op.comm.kind in ("reduce-scatter", "all-reduce")
                   and op.comm.axis != "tp"), None)
        if at is None:
            return ops
        comm = ops[at].comm
        assert comm is not None
        return [*ops[:at], Op(f"fsdp.hold({D2H})", "hold", kernels=0, event=D2H, axis=comm.axis), *ops[at:]]

    def _keep_shard(self, group: str, rs_out: Tensor, *, fresh: bool, holds: bool) -> list[Op]:
        """Cast the reduced shard on the device, copy it to the host; the device keeps nothing of it."""
        p, axis, n = self.precision, self.axes[group], self.size[group]
        ops: list[Op] = []
        sent = () if holds else (rs_out,)
        event = "reduce"
        if p.reduce != p.gradient:
            cast = Tensor(f"grad_cast({group})", "communication", self._bytes(group, p.gradient, whole=False), "reduce")
            ops.append(Op(f"fsdp.cast_grad({group})", "side", nbytes=float(rs_out.nbytes + cast.nbytes), dtype=p.gradient, allocs=(cast,), frees=sent,
                          axis="dp_replicate" if self.plan.dp_replicate > 1 else axis, event="cast"))
            sent, event = (cast,), "cast"
        numel, count = self.local[group], len(self.groups[group].params)
        shard = Tensor(f"{group}.grad_shard", "gradients", nbytes(numel, p.gradient))
        largest = max(local_rows(q.shape[0], n) * (q.numel // q.shape[0]) for q in self.groups[group].params)
        made = shard if fresh else Tensor(f"{group}.new_grad", "temporaries", nbytes(largest, p.gradient))
        moved = to_host(f"fsdp.to_host({group})", shard.nbytes, tensors=count, detached=n > 1 or self.plan.dp_replicate > 1, pinned=fresh)
        ops += [Op(f"fsdp.hold({event})", "hold", kernels=0, event=event, axis=D2H), moved._replace(frees=sent, host_allocs=(made,))]
        if not fresh:
            ops += [self._arrived(), Op(f"fsdp.add_on_host({group})", "cpu", nbytes=3.0 * shard.nbytes, dtype=p.gradient, kernels=count, host_frees=(made,))]
        return ops

    def _arrived(self) -> Op:
        return Op(f"fsdp.wait({D2H})", "wait", kernels=0, event=D2H)

    def backward_end(self, micro: str) -> list[Op]:
        return [*super().backward_end(micro), self._arrived()]

    # -- the update ------------------------------------------------------------------------------------------------------

    def clip(self, u: Update) -> list[Op]:
        return on_host(super().clip(u))

    def step(self, role: str, first: bool) -> list[Op]:
        return on_host(Strategy.step(self, role, first))

    def notes(self) -> list[str]:
        exposed = ["A group of one rank copies its parameters when they are needed: nothing of it is hidden."] if self.n == 1 else []
        return [*super().notes(), *exposed]

