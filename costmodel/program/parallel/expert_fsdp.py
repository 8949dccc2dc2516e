"""FSDP2 with expert parallelism: the experts of a layer are a group of their own inside the layer's, sharded over fewer ranks.

A rank holds 1/ep of the experts, and of those a shard over the edp = dp_shard / ep ranks that have the same ones: dim 0 (whole experts) where edp
divides their number, else dim 1 of every matrix. The experts' group is gathered when forward reaches them, in backward while the layer's own backward
waits for their results' gradients, and reduced when theirs is done; the layer's group as always, over all of dp_shard. FSDP2 gathers dim 1 into a
temporary and copies gradients once more. Source: torchtitan, models/llama4/infra/parallelize.py (apply_fsdp, experts on their own mesh);
torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, 2.13.
"""

from collections.abc import Iterator

from costmodel.program.experts import ENTER
from costmodel.program.host import FSDP_HOOK, work
from costmodel.program.inventory import Inventory, nbytes, without_experts
from costmodel.program.ir import Op, Tensor
from costmodel.program.layers import Numbers
from costmodel.program.optimizer import Update, clip_ops, update_ops
from costmodel.program.parallel.base import LAST, LAYER, ONLY, collective, element_bytes
from costmodel.program.parallel.expert import AXIS, REPLICAS
from costmodel.program.parallel.fsdp import DENSE, FSDP
from costmodel.spec import PlanError, Run

EXPERTS = "experts"


class ExpertFSDP(FSDP):
    """FSDP2 or HSDP whose layers' experts are spread over an ep group."""

    def __init__(self, run: Run, numbers: Numbers, inventory: Inventory) -> None:
        super().__init__(run, numbers, inventory)
        self.edp = run.plan.expert_replicas
        self.groups[LAYER], self.groups[EXPERTS] = without_experts(inventory.layer)
        self.size[EXPERTS], self.axes[EXPERTS], self.count[EXPERTS] = self.edp, REPLICAS, self.count[LAYER]
        layer, experts = self.groups[LAYER], self.groups[EXPERTS].numel // self.edp
        self.shard |= {LAYER: layer.sharded_numel(self.n), EXPERTS: experts}
        self.local |= {LAYER: sum(min(q.shape[0], -(-q.shape[0] // self.n)) * (q.numel // q.shape[0]) for q in layer.params), EXPERTS: experts}
        self.by_column = any(q.shape[0] % self.edp for q in self.groups[EXPERTS].params)
        """The shards are parts of every expert, not whole ones."""
        self.last_in_layer = EXPERTS if self.edp > 1 else LAYER

    def refusals(self) -> Iterator[PlanError]:
        yield from super().refusals()
        uneven = [q for q in self.groups[EXPERTS].params if self.by_column and q.shape[1] % self.edp]
        if uneven:
            yield PlanError("plan.ep", self.plan.ep, f"{uneven[0].shape[0]} experts of {uneven[0].shape[1]} rows do not divide over the {self.edp} ranks "
                            "that have the same ones: FSDP2 shards no dim but the first unevenly.", "Use another ep or dp_shard.")

    # -- updates -----------------------------------------------------------------------------------------------------------

    def _updates(self) -> tuple[Update, Update]:
        """What the optimizer of all other weights updates, and that of the experts: PyTorch's kernels take no weights of two meshes together."""
        p, layers = self.precision, self.count[EXPERTS]
        whole = super().update("")
        experts = self.groups[EXPERTS]
        mine = layers * self.local[EXPERTS]
        count = layers * len(experts.params)

        def part(numel: int, tensors: int, largest: int) -> Update:
            return Update(numel, tensors, largest, p.parameter, p.gradient, p.optimizer_state, steps_on_device=self.steps_on_device, placed=True)

        return (part(whole.numel - mine, whole.tensors - count, self._largest(tuple(self.groups.keys() - {EXPERTS}))),
                part(mine, count, max(q.numel for q in experts.params) // self.edp))

    def _largest(self, groups: tuple[str, ...]) -> int:
        return max(-(-q.shape[0] // self.n) * (q.numel // q.shape[0]) for g in groups for q in self.groups[g].params)

    def step(self, role: str, first: bool) -> list[Op]:
        return [op for each in self._updates() for op in update_ops(self.recipe.optimizer, each, first=first)]

    def clip(self, u: Update) -> list[Op]:
        """Norms of both kinds of shards, each summed over its mesh; that of the experts over the ep group too."""
        rest, experts = self._updates()
        e, ops = element_bytes(u.grad), clip_ops(u.numel, u.tensors, u.grad, placed=u.placed)
        sums = [collective(self.axis, "all-reduce", self.n, e * rest.tensors, u.grad, name="clip.all_reduce")]
        if self.edp > 1:
            sums.append(collective(REPLICAS, "all-reduce", self.edp, e * experts.tensors, u.grad, name="clip.all_reduce"))
        sums.append(collective(AXIS, "all-reduce", self.plan.ep, e, u.grad, name="clip.all_reduce"))
        return [ops[0], *sums, *ops[1:]]

    # -- gathers and reductions --------------------------------------------------------------------------------------------

    def gradient_key(self, micro: str, variant: object) -> object:
        return (self.name, micro, variant)

    def _gather(self, group: str, event: str) -> list[Op]:
        """FSDP2 gathers all groups on one stream: this one begins when the last one, over whichever ranks, is done."""
        ops = super()._gather(group, event)
        return [self._hold(event, self.axes[group]), *ops] if ops else []

    def _copy_out(self, group: str, event: str, free: tuple[Tensor, ...]) -> list[Op]:
        ops = super()._copy_out(group, event, free)
        if group == EXPERTS and self.by_column:
            temp = Tensor("gathered(experts)", "communication", self._bytes(EXPERTS, self.low))
            again = Op("fsdp.chunk_cat(experts)", "memory", nbytes=2.0 * temp.nbytes, dtype=self.low, kernels=len(self.groups[EXPERTS].params),
                       frees=(temp, *free))
            ops[-1] = ops[-1]._replace(allocs=(*ops[-1].allocs, temp), frees=())
            ops.append(again)
        return ops

    def _backward_gather(self, group: str, following: str | None) -> list[Op]:
        """Before a group's backward: its parameters, gathered ahead, are copied out, and the next group's gather begins."""
        if not self.reshard:
            return []
        ahead = self.plan.backward_prefetch
        ops = [*self._pre_hook(group), *([] if ahead else self._gather(group, "gather"))]
        ops += self._copy_out(group, "gather", (self._buffer(group),) if self.size[group] > 1 else ())
        ops.append(self._record("copied"))
        if self.size[group] > 1:
            ops.append(self._hold("copied", self.axes[group]))
        return [*ops, *(self._gather(following, "gather") if ahead and following else [])]

    def before_backward(self, unit: str, index: int, micro: str) -> list[Op]:
        if unit != LAYER:
            return []
        return self._backward_gather(DENSE, DENSE if index else None) if index < self.dense else self._backward_gather(LAYER, EXPERTS)

    def before_recompute(self, index: int, micro: str, first: int, last: int) -> list[Op]:
        return self.before_backward(LAYER, index, micro)

    def at_mark(self, mark: str, phase: str, index: int, micro: str, *, again: bool) -> list[Op]:
        """Around the experts: gather before, let go after; in backward the other way round, with their reduction at its end."""
        if phase == "forward":
            return self._enter_forward() if mark == ENTER else [work("fsdp.post_hook", FSDP_HOOK).freeing((self._params(EXPERTS),))] if self.reshard else []
        if phase == "recompute":
            return self._enter_again() if mark == ENTER else self._leave_again()
        if mark == ENTER:
            return self._reduce_experts(index, micro)
        following = self.of(index - 1) if index else None
        if again:
            return self._gather(following, "gather") if following and self.reshard and self.plan.backward_prefetch else []
        return self._backward_gather(EXPERTS, following)

    def _enter_forward(self) -> list[Op]:
        ops = [*self._pre_hook(EXPERTS), *self._gather(EXPERTS, "gather")]
        if self.edp > 1:
            ops.append(self._hold("copied", REPLICAS)._replace(frees=(self._buffer(LAYER),)))
        return [*ops, *self._copy_out(EXPERTS, "gather", ()), self._record("copied")]

    def _enter_again(self) -> list[Op]:
        """A recompute gathers as forward does (or finds what was gathered ahead), and keeps the parameters for the backward that follows."""
        if not self.reshard:
            return []
        ahead = [] if self.plan.backward_prefetch else self._gather(EXPERTS, "gather")
        return [*self._pre_hook(EXPERTS), *ahead, *self._copy_out(EXPERTS, "gather", ()), self._record("copied")]

    def _leave_again(self) -> list[Op]:
        kept = (self._buffer(EXPERTS),) if self.reshard and self.edp > 1 else ()
        return [Op("fsdp.recomputed", "host", kernels=0, frees=kept)] if kept else []

    def _reduce_experts(self, index: int, micro: str) -> list[Op]:
        previous = None if index == self.inventory.layers - 1 else self.of(index + 1)
        ops = self._reduce(EXPERTS, micro, previous)
        if not (self.by_column and self.edp > 1):
            return ops
        return [each for op in ops for each in (self._by_rank(op) if op.name == f"fsdp.reduce_copy_in({EXPERTS})" else (op,))]

    def _by_rank(self, copy_in: Op) -> tuple[Op, ...]:
        """Gradients that are cut by columns are first brought into the order of the ranks, a copy of each."""
        moved = Tensor("gradients by rank(experts)", "communication", sum(t.nbytes for t in copy_in.frees))
        cat = Op("fsdp.cat(experts)", "memory", nbytes=2.0 * moved.nbytes, dtype=self.numbers.param, kernels=len(self.groups[EXPERTS].params),
                 allocs=(moved,), frees=copy_in.frees)
        return cat, copy_in._replace(frees=(moved,))

    def after_backward(self, unit: str, index: int, micro: str) -> list[Op]:
        if unit == LAYER and index < self.dense:
            return super().after_backward(unit, index, micro)
        return self._reduce(LAYER, micro, EXPERTS) if unit == LAYER else []

    def backward_end(self, micro: str) -> list[Op]:
        """The mean over all ranks: an expert's gradient is summed over the rows of its ep group, and averaged over its replicas alone."""
        ops = super().backward_end(micro)
        if micro not in (ONLY, LAST):
            return ops
        shards = nbytes(self.count[EXPERTS] * self.local[EXPERTS], self.precision.gradient)
        return [*ops, Op("experts.mean", "memory", nbytes=2.0 * shards, dtype=self.precision.gradient,
                         kernels=max(1, self.count[EXPERTS] * len(self.groups[EXPERTS].params) // 30))]
