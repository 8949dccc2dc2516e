"""PyTorch's ZeRO-1 and ZeRO-2.

ZeRO-1 is DDP with `ZeroRedundancyOptimizer`: whole parameters are given to ranks greedily, largest first, each to the rank with
the least so far; a rank keeps optimizer state for its own and broadcasts them after the step. Sends 3Ψ (all-reduce + broadcast).
ZeRO-2 reduce-scatters buckets of gradients in backward, updates the local slice of every bucket and all-gathers the parameters:
2Ψ, with gradients and optimizer state at 1/n. Sources: torch/distributed/optim/zero_redundancy_optimizer.py
(_partition_parameters, _sync_params); arXiv 1910.02054.
"""

import heapq

from costmodel.program.inventory import Inventory, nbytes
from costmodel.program.ir import Op, Tensor
from costmodel.program.layers import Numbers
from costmodel.program.optimizer import Update, clip_ops, update_ops
from costmodel.program.parallel.base import EMBEDDING, HEAD, LAST, ONLY, collective, element_bytes, repeated
from costmodel.program.parallel.ddp import DDP, Bucketed, Buckets
from costmodel.program.tape import GradReady
from costmodel.spec import Run


def greedy_partition(numels: list[int], n: int) -> list[tuple[int, int, int]]:
    """(elements, tensors, largest) of each rank that gets any, when the largest tensors go first, each to the emptiest rank."""
    if n == 1:
        return [(sum(numels), len(numels), max(numels))]
    ranks = min(n, len(numels))
    heap = [(0, r) for r in range(ranks)]
    counts, largest = [0] * ranks, [0] * ranks
    totals = [0] * ranks
    for numel in sorted(numels, reverse=True):
        total, r = heap[0]
        heapq.heapreplace(heap, (total + numel, r))
        totals[r] = total + numel
        if not counts[r]:
            largest[r] = numel
        counts[r] += 1
    return list(zip(totals, counts, largest, strict=True))


class Zero1(DDP):
    """DDP + ZeroRedundancyOptimizer."""

    name = "zero1"
    sharded = ("optimizer",)
    axis = "dp_shard"

    def __init__(self, run: Run, numbers: Numbers, inventory: Inventory) -> None:
        super().__init__(run, numbers, inventory)
        numels = [p.numel for p in inventory.embedding.params + inventory.head.params]
        for layer, count in inventory.stretches:
            numels += [p.numel for p in layer.params] * count
        parts = greedy_partition(numels, self.group)
        least = min(parts) if len(parts) == self.group else (0, 0, 0)
        self.parts = {"fullest shard": max(parts), "emptiest shard": least}
        self.rank = {"fullest shard": parts.index(max(parts)), "emptiest shard": parts.index(least) if least in parts else self.group - 1}

    def roles(self) -> list[tuple[str, int, int]]:
        ranks = self.run.cluster.gpus
        if ranks == 1 or self.parts["fullest shard"] == self.parts["emptiest shard"]:
            return [("fullest shard", ranks, 0)]
        return [("fullest shard", ranks - 1, self.rank["fullest shard"]), ("emptiest shard", 1, self.rank["emptiest shard"])]

    def update(self, role: str) -> Update:
        numel, tensors, largest = self.parts[role]
        return super().update(role)._replace(numel=numel, tensors=tensors, largest=largest)

    def clip(self, u: Update) -> list[Op]:
        inv = self.inventory
        return clip_ops(inv.numel, inv.tensors, self.precision.gradient)

    def step(self, role: str, first: bool) -> list[Op]:
        """Update the parameters that are ours."""
        return update_ops(self.recipe.optimizer, self.update(role), first=first)

    def after_step(self, role: str) -> list[tuple[list[Op], int]]:
        """Every rank broadcasts its own parameters: Ψ elements, one broadcast a tensor."""
        if self.group == 1:
            return []
        inv = self.inventory
        units = ((inv.embedding, 1), *inv.stretches, (inv.head, 1))
        sends = [([self._broadcast(p.numel) for p in unit.params], count) for unit, count in units]
        return [*sends, ([Op("zero.wait", "wait", kernels=0, event="broadcast")], 1)]

    def _broadcast(self, numel: int) -> Op:
        return collective(self.axis, "broadcast", self.group, nbytes(numel, self.dtype), self.dtype, event="broadcast", name="broadcast_parameters")


class Zero2(Bucketed):
    """Bucketed reduce-scatter of gradients, a sharded step, an all-gather of parameters."""

    name = "zero2"
    reads = ("bucket_bytes",)
    sharded = ("gradients", "optimizer")
    axis = "dp_shard"

    def __init__(self, run: Run, numbers: Numbers, inventory: Inventory) -> None:
        super().__init__(run, numbers, inventory)
        self.group = run.plan.state_shards
        self.dtype = self.precision.parameter
        self.buckets = Buckets(inventory, element_bytes(self.dtype), run.plan.bucket_bytes, run.plan.bucket_bytes, run, by_arrival=False,
                               autocast=numbers.autocast)
        element = element_bytes(self.dtype)
        self.shards = [-(-(size // element) // self.group) for size in self.buckets.sizes]
        self.local = sum(self.shards)

    def update(self, role: str) -> Update:
        return super().update(role)._replace(numel=self.local, tensors=len(self.shards), largest=max(self.shards, default=0))

    def persistent(self, role: str) -> list[Tensor]:
        """Parameters live in flat padded buffers, one a bucket, so that they can be gathered in place."""
        return [Tensor("parameters", "parameters", nbytes(self.local * self.group, self.dtype))]

    def kept_gradients(self) -> list[Tensor]:
        return [Tensor("gradients (shard)", "gradients", nbytes(self.local, self.dtype))]

    def on_grad(self, unit: str, index: int, ready: GradReady, micro: str) -> tuple[tuple[Tensor, ...], list[Op]]:
        if not self.syncs(micro):
            return super().on_grad(unit, index, ready, micro)
        grad = Tensor(f"{ready.param.name}.grad", "gradients", ready.nbytes)
        allocs: tuple[Tensor, ...] = (grad,)
        ops: list[Op] = []
        if not self.plan.sync_each_micro_batch and micro == LAST:
            allocs, ops = super().on_grad(unit, index, ready, micro)
        flush = self.completes(unit, index, ready)
        if not flush:
            return allocs, ops
        flat, shard = self._flat(flush.nbytes), self._shard(flush.nbytes)
        grads = Tensor("bucket gradients", "gradients", flush.nbytes)
        fresh = micro in (ONLY, "first") or not self.plan.sync_each_micro_batch
        if flush.previous and self.group > 1:
            ops = [*ops, *self._land(flush.previous, fresh)]
        ops = [*ops, Op("zero2.flatten", "memory", nbytes=2.0 * flush.nbytes, dtype=self.dtype, kernels=2, allocs=(flat,), frees=(grads,)),
               Op("zero2.slice", "memory", dtype=self.dtype, kernels=0, allocs=(shard,))]
        if self.group > 1:
            ops.append(collective(self.axis, "reduce-scatter", self.group, flat.nbytes, self.dtype, event="zero2", name="bucket.reduce_scatter"))
        else:
            ops += [Op("zero2.copy", "memory", nbytes=2.0 * flush.nbytes, dtype=self.dtype), *self._land(flush.nbytes, fresh)]
        return allocs, ops

    def _flat(self, bucket_bytes: int) -> Tensor:
        return Tensor("zero2.bucket", "communication", self._shard(bucket_bytes).nbytes * self.group)

    def _shard(self, bucket_bytes: int) -> Tensor:
        element = element_bytes(self.dtype)
        return Tensor("gradients (shard)", "gradients", -(-(bucket_bytes // element) // self.group) * element)

    def _land(self, bucket_bytes: int, fresh: bool) -> list[Op]:
        """Wait for the reduce-scatter in flight; its flat gradient goes, its slice stays or is added."""
        wait = [Op("zero2.wait", "wait", kernels=0, event="zero2", frees=(self._flat(bucket_bytes),))]
        if fresh:
            return wait
        shard = self._shard(bucket_bytes)
        return [*wait, Op("zero2.accumulate", "memory", nbytes=3.0 * shard.nbytes, dtype=self.dtype, frees=(shard,))]

    def backward_end(self, micro: str) -> list[Op]:
        if not self.syncs(micro) or self.group == 1:
            return []
        fresh = micro in (ONLY, "first") or not self.plan.sync_each_micro_batch
        return self._land(self.buckets.sizes[-1], fresh)

    def clip(self, u: Update) -> list[Op]:
        ops = clip_ops(u.numel, u.tensors, u.grad)
        if self.group > 1:
            ops.insert(1, collective(self.axis, "all-reduce", self.group, element_bytes(u.grad), u.grad, name="clip.all_reduce"))
        return ops

    def after_step(self, role: str) -> list[tuple[list[Op], int]]:
        """All-gather every bucket of parameters, in place."""
        if self.group == 1:
            return []
        element = element_bytes(self.dtype)

        def gather(shard: int) -> list[Op]:
            return [collective(self.axis, "all-gather", self.group, shard * self.group * element, self.dtype, event="gather", name="gather_parameters")]

        return [*repeated(self.shards, gather), ([Op("zero2.wait_gather", "wait", kernels=0, event="gather")], 1)]


__all__ = ["EMBEDDING", "HEAD", "Zero1", "Zero2", "greedy_partition"]
