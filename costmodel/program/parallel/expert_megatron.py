"""Megatron's data parallelism with expert parallelism: the experts have gradient buffers of their own.

The gradients of experts are reduced, and with the distributed optimizer their master weights and moments sharded, over the ranks that have the same
experts (edp = dp x cp / ep, of one instance); everything else over all of dp x cp. Source: NVIDIA/Megatron-LM core/distributed/distributed_data_parallel.py
(expert_parallel_buffers), core/optimizer/__init__.py (expert parameters have their own groups).
"""

from costmodel.program.inventory import Inventory, UnitParams, nbytes, without_experts
from costmodel.program.ir import Op
from costmodel.program.layers import Numbers
from costmodel.program.parallel.base import EMBEDDING, HEAD, LAYER, collective, element_bytes, repeated
from costmodel.program.parallel.ddp import Buckets, Flush
from costmodel.program.parallel.expert import REPLICAS, is_expert
from costmodel.program.parallel.megatron import MegatronDP
from costmodel.program.tape import GradReady
from costmodel.spec import Run
from costmodel.spec.parameters import Param

NOTHING = UnitParams((), 0)


class MegatronExperts(MegatronDP):
    """Two kinds of buffers: of the experts, and of the rest."""

    def __init__(self, run: Run, numbers: Numbers, inventory: Inventory) -> None:
        super().__init__(run, numbers, inventory)
        self.edp = run.plan.expert_replicas
        self.copies = self.edp * self.instances
        """Ranks that reduce the gradients of the same experts."""
        parts = [(*without_experts(layer), n) for layer, n in inventory.stretches]
        rest, experts, mixtures = parts[-1]
        self.dense = inventory.layers - mixtures
        """Leading layers without experts: those of a model come first."""
        if not experts.params:
            self.dense, mixtures, experts = inventory.layers, 0, NOTHING
        element = element_bytes(self.precision.reduce)
        caps = [max(40_000_000, 1_000_000 * n) * element for n in (self.n, self.edp)]
        several = tuple((each, n) for each, _, n in parts) if inventory.several else ()
        self.buckets = Buckets(inventory._replace(layer=rest, several=several), element, caps[0], caps[0], run)
        self.expert_buckets = Buckets(Inventory(NOTHING, experts, NOTHING, mixtures), element, caps[1], caps[1], run)
        self.expert = experts.params[0] if mixtures else None
        spread = mixtures * experts.numel
        self.local = -(-(inventory.numel - spread) // self.shards) + -(-spread // (self.edp if self.distributed else 1))

    def layer_variants(self, phase: str, micro: str) -> list[object]:
        found = super().layer_variants(phase, micro)
        if phase != "backward" or not self.syncs(micro):
            return found
        return list(zip(found, [()] * self.dense + self.expert_buckets.layers, strict=True))

    def completes(self, unit: str, index: int, ready: GradReady) -> Flush | None:
        if unit in (EMBEDDING, HEAD) or not is_expert(ready.param):
            return super().completes(unit, index, ready)
        return self.expert_buckets.flush.get((LAYER, index - self.dense), {}).get(ready.param.name) if self.copies > 1 else None

    def _reduce(self, size: int, event: str, param: Param | None = None) -> list[Op]:
        if param is None or not is_expert(param):
            return super()._reduce(size, event, param)
        return self._sends(REPLICAS, self.edp, size, f"expert {event}" if event else "")

    def _of_experts(self, size: int) -> list[Op]:
        return self._reduce(size, "", self.expert)

    def backward_end(self, micro: str) -> list[Op]:
        ops = super().backward_end(micro)
        if not ops or self.copies == 1:
            return ops
        if self.plan.overlap_grad_reduce:
            return [*ops, Op("megatron.wait_experts", "wait", kernels=0, event="expert grads")]
        return [*ops, *(op for size in self.expert_buckets.sizes for op in self._of_experts(size))]

    def after_micro_batches(self, left: str) -> list[tuple[list[Op], int]]:
        sends = super().after_micro_batches(left)
        return [*sends, *repeated(self.expert_buckets.sizes, self._of_experts)] if sends and self.copies > 1 else sends

    def forward_begin(self, micro: str) -> list[Op]:
        ops = super().forward_begin(micro)
        if not ops or self.edp == 1:
            return ops
        return [ops[0], *(self._expert_gather(size, "params") for size in self.expert_buckets.sizes), *ops[1:]]

    def forward_end(self, micro: str) -> list[Op]:
        waits = self.forward_key(micro) and (len(self.buckets.sizes) > 1 or self.edp > 1)
        return [Op("megatron.wait_params", "wait", kernels=0, event="params")] if waits else []

    def _expert_gather(self, size: int, event: str) -> Op:
        p = self.precision
        message = nbytes(size // element_bytes(p.reduce), p.parameter)
        return collective(REPLICAS, "all-gather", self.edp, message, p.parameter, event=event, name="gather_parameters")

    def after_step(self, role: str) -> list[tuple[list[Op], int]]:
        sends = super().after_step(role)
        if not sends or self.edp == 1:
            return sends
        event = "params" if self.plan.overlap_param_gather else ""
        return [*sends, *repeated(self.expert_buckets.sizes, lambda size: [self._expert_gather(size, event)])]
