"""What a way of spreading work answers, with the answers of a single GPU.

A strategy file says what it shards (`persistent`, `update`), what it sends and when (the hooks around units and gradients),
and what it forbids (`refusals`). The builder walks the step and asks.
"""

from collections.abc import Callable, Iterator

from costmodel.program.host import DTENSOR, work
from costmodel.program.inventory import Inventory, nbytes
from costmodel.program.ir import Comm, Op, Tensor, periods
from costmodel.program.layers import Numbers, batch_tensors
from costmodel.program.muon import updates as muon_updates
from costmodel.program.optimizer import STATES, Update, clip_ops, update_ops
from costmodel.program.tape import GradReady
from costmodel.spec import DTYPE_BYTES, PlanError, Run
from costmodel.spec.parameters import Param

EMBEDDING, LAYER, HEAD = "embedding", "layer", "head"
ONLY, FIRST, MIDDLE, LAST = "only", "first", "middle", "last"


OPTIONAL = ("bucket_bytes", "first_bucket_bytes", "gradient_as_bucket_view", "reshard_after_forward", "backward_prefetch", "overlap_grad_reduce",
            "overlap_param_gather", "prefetch_bucket_params", "max_live_params", "allgather_bucket_params", "double_buffer", "communication_unit_params")
"""Fields of a plan that only some strategies read."""


class Strategy:
    """Single GPU: everything whole, nothing sent."""

    name = "single"
    sharded: tuple[str, ...] = ()
    """What it stores in pieces, of: parameters, gradients, master_weights, optimizer."""
    reads: tuple[str, ...] = ()
    """Fields of the plan, of OPTIONAL, that change what it does."""

    def __init__(self, run: Run, numbers: Numbers, inventory: Inventory) -> None:
        self.run = run
        self.plan = run.plan
        self.recipe = run.recipe
        self.precision = run.recipe.precision
        self.numbers = numbers
        self.inventory = inventory

    # -- what it forbids -------------------------------------------------------------------------------------------------

    def refusals(self) -> Iterator[PlanError]:
        """What this strategy cannot do."""
        return iter(())

    # -- what lives on a rank --------------------------------------------------------------------------------------------

    def roles(self) -> list[tuple[str, int, int]]:
        """(role, ranks, example rank) of the ranks that differ."""
        return [("every rank", self.run.cluster.gpus, self.first_rank)]

    @property
    def first_rank(self) -> int:
        """The first rank that runs this program: the last one of a cp group."""
        return (self.plan.cp - 1) * self.plan.tp

    def persistent(self, role: str) -> list[Tensor]:
        """State that exists before the first step."""
        state = [Tensor("parameters", "parameters", nbytes(self.inventory.numel, self.precision.parameter))]
        if not self.recipe.zero_set_to_none:
            state += self.kept_gradients()
        if self.precision.master:
            state.append(Tensor("master weights", "master_weights", nbytes(self.inventory.numel, self.precision.master)))
        return state

    def host_persistent(self, role: str) -> list[Tensor]:
        """State in host memory before the first step."""
        return []

    def host_slack_bytes(self) -> int:
        """What page-locked blocks of host memory hold beyond their tensors."""
        return 0

    def batch(self) -> tuple[Tensor, ...]:
        """What a micro-batch puts on this rank."""
        return batch_tensors(self.run)

    def update(self, role: str) -> Update:
        """What this rank's optimizer updates."""
        p, inv = self.precision, self.inventory
        return Update(inv.numel, inv.tensors, inv.largest, p.master or p.parameter, p.gradient, p.optimizer_state,
                      p.parameter if p.master else None, self.steps_on_device, *(inv.matrices if self.recipe.optimizer.name == "muon" else (0, 0)),
                      self.tensor_alone)

    @property
    def steps_on_device(self) -> bool:
        return self.numbers.table == "cpu" or self.recipe.optimizer.implementation == "fused"

    # -- hooks of the step -----------------------------------------------------------------------------------------------

    def like(self, micro: str) -> str:
        """The class of micro-batch that this one behaves like."""
        return LAST if micro == MIDDLE else micro

    def layer_variants(self, phase: str, micro: str) -> list[object]:
        """A key for each layer, equal for layers whose hooks do the same in this phase."""
        return [None] * self.inventory.layers

    def unit_variant(self, unit: str, micro: str) -> object:
        """The same of embedding and head, in backward."""
        return None

    def forward_key(self, micro: str) -> object:
        """Equal where the hooks of forward do the same."""
        return None

    def gradient_key(self, micro: str, variant: object) -> object:
        """Equal where `on_grad` does the same to a unit's gradients: for layers of that variant, in that class of micro-batch, on any
        stage of a pipeline, and under any strategy."""
        return ("accumulate", micro in (ONLY, FIRST))

    def begin_step(self, first: bool) -> list[Op]:
        """zero_grad(set_to_none=True): the gradients of the previous step go."""
        if not self.recipe.zero_set_to_none:
            total = sum(t.nbytes for t in self.kept_gradients())
            return [Op("zero_grad", "memory", nbytes=float(total), dtype=self.gradient_dtype, kernels=max(1, self.inventory.tensors // 30))]
        if first:
            return []
        frees = tuple(self.kept_gradients())
        return [Op("zero_grad", "host", kernels=0, frees=frees)] if frees else []

    def kept_gradients(self) -> list[Tensor]:
        """Gradients that live from backward to the next step's zero_grad."""
        out: list[Tensor] = []
        for unit, count in ((self.inventory.embedding, 1), *self.inventory.stretches, (self.inventory.head, 1)):
            total = sum(nbytes(p.numel, self.gradient_dtype) for p in unit.params)
            if total:
                out.append(Tensor("gradients", "gradients", total * count))
        if self.inventory.whole_lookups:
            out.append(Tensor("whole lookup gradients", "gradients", nbytes(self.inventory.whole_lookups, self.gradient_dtype)))
        return out

    def norm_sums(self) -> list[Op]:
        """DTensor's norm gradients, summed over the tp ranks when they are asked for."""
        tp, dtype = self.plan.tp, self.gradient_dtype
        parts = [(p, n) for p, n in self.inventory.norms if self.partial_over_tp(p)]
        sums = [collective("tp", "all-reduce", tp, nbytes(p.numel, dtype), dtype, name="norm_gradient.all_reduce") for p, n in parts for _ in range(n)]
        return [work("norm_gradient.dtensor", DTENSOR, len(sums)), *sums] if sums else []

    def partial_over_tp(self, norm: Param) -> bool:
        """Whether each tp rank has only a part of the gradient of a norm's weight: it saw part of the tokens, or of the heads."""
        return self.plan.sequence_parallel or ".q_norm" in norm.name or ".k_norm" in norm.name

    @property
    def tensor_alone(self) -> bool:
        """Tensor parallelism in DTensor's dialect without FSDP."""
        return self.plan.tp > 1 and self.plan.framework == "pytorch" and self.plan.zero != 3

    @property
    def late_norms(self) -> bool:
        """Norm gradients are summed over the tp ranks when they are clipped or used."""
        return self.tensor_alone

    @property
    def gradient_dtype(self) -> str:
        return self.precision.gradient

    def forward_begin(self, micro: str) -> list[Op]:
        return []

    def forward_end(self, micro: str) -> list[Op]:
        return []

    def before_forward(self, unit: str, index: int, micro: str) -> list[Op]:
        return []

    def after_forward(self, unit: str, index: int, micro: str) -> list[Op]:
        return []

    def backward_begin(self, micro: str) -> list[Op]:
        return []

    def before_backward(self, unit: str, index: int, micro: str) -> list[Op]:
        return []

    def before_recompute(self, index: int, micro: str, first: int, last: int) -> list[Op]:
        """Before a layer of the checkpoint `first`..`last` runs forward again."""
        return self.before_backward(LAYER, index, micro)

    def before_recomputed_backward(self, index: int, micro: str, first: int, last: int) -> list[Op]:
        """Before the backward of a layer that was just computed again."""
        return []

    def after_backward(self, unit: str, index: int, micro: str) -> list[Op]:
        return []

    def backward_end(self, micro: str) -> list[Op]:
        return []

    def after_micro_batches(self, left: str) -> list[tuple[list[Op], int]]:
        """Under a pipeline, what waits until the last micro-batch is done: ops, and how often they repeat. `left`: what a second pass of a split
        backward left over (zerobubble.left_over), if any."""
        return []

    # A backward in two passes, whose words are those of costmodel.program.zerobubble: `first_pass` and `second_pass` make words one that mean the
    # same here; `take_up` is what a first pass that has gone through a unit does with gradients that an earlier second pass left.

    def first_pass(self, word: str) -> str:
        return ""

    def second_pass(self, word: str) -> str:
        return FIRST if word == "opens" else LAST

    def take_up(self, unit: str, word: str) -> list[Op]:
        return []

    def at_mark(self, mark: str, phase: str, index: int, micro: str, *, again: bool) -> list[Op]:
        """What happens inside a layer, where it marked a place; in backward `again` says that the layer was computed again before it."""
        return []

    def on_grad(self, unit: str, index: int, ready: GradReady, micro: str) -> tuple[tuple[Tensor, ...], list[Op]]:
        """The gradient of a parameter is there: what the op that made it allocates, and what runs next.

        The engine keeps the first gradient as `.grad`; a later micro-batch adds into it and drops its own. Gradients that are zeroed in
        place count as present from the start.
        """
        if micro in (ONLY, FIRST) and self.recipe.zero_set_to_none:
            return (Tensor(f"{ready.param.name}.grad", "gradients", ready.nbytes),), []
        made = Tensor(f"{ready.param.name}.new_grad", "temporaries", ready.nbytes)
        return (made,), [Op(f"{ready.param.name}.accumulate_grad", "memory", nbytes=3.0 * ready.nbytes, dtype=ready.dtype, frees=(made,))]

    def clip(self, u: Update) -> list[Op]:
        """Gradient clipping on this rank."""
        ops = clip_ops(u.numel, u.tensors, u.grad, placed=u.placed)
        if self.tensor_alone:
            e = element_bytes(u.grad)
            ops[1:1] = [*self.norm_sums(), collective("tp", "all-reduce", self.plan.tp, e * u.tensors, u.grad, name="clip.all_reduce")]
        return ops

    def unscale(self, u: Update) -> list[Op]:
        """torch.amp.GradScaler: gradients are divided by the loss scale and checked in one pass, ranks agree (torch.distributed.fsdp's
        ShardedGradScaler; execute's step.py), and the host asks whether to update."""
        if not self.precision.loss_scaling or self.plan.framework != "pytorch":
            return []
        numel = u.numel if self.plan.zero > 1 else self.inventory.numel
        ops = [Op("unscale", "memory", 1.0 * numel, 2.0 * numel * element_bytes(u.grad), dtype=u.grad, kernels=max(1, u.tensors // 30))]
        p = self.plan
        shards, copies = (p.state_shards, p.dp_replicate) if p.zero else (1, p.dp * p.cp)
        for axis, ranks in (("dp_replicate", copies), ("dp_shard", shards), ("tp", p.tp)):
            if ranks > 1:
                ops.append(collective(axis, "all-reduce", ranks, 4, "fp32", name="unscale.all_reduce"))
        return [*ops, Op("unscale.sync", "sync", kernels=0)]

    def step(self, role: str, first: bool) -> list[Op]:
        """The optimizer step. DTensor gives every gradient the placement of its parameter, anew for each pass that reads it: a fused
        update has one, an unfused Adam two (the second takes it twice)."""
        spec = self.recipe.optimizer
        ops = update_ops(spec, self.update(role), first=first)
        if not self.tensor_alone or not ops:
            return ops
        cut = (Tensor("lookup gradients, cut", "temporaries", nbytes(self.inventory.lookups, self.gradient_dtype)),) if self.inventory.whole_lookups else ()
        placed = Op("redistribute", "memory", nbytes=float(2 * sum(t.nbytes for t in cut)), dtype=self.gradient_dtype, kernels=len(cut), allocs=cut)
        done, sums = Op("redistribute.release", "host", kernels=0, frees=cut), self.norm_sums()
        if STATES[spec.name] == 2 and spec.implementation != "fused":
            return [ops[0], placed, *sums, done, placed, *sums, placed, *sums, done, done, *ops[1:]]
        return [placed, *sums, *ops, done]

    def updates(self, role: str, first: bool) -> list[tuple[list[Op], int]]:
        """The optimizer step as ops and how often they repeat; the first part once."""
        spec = self.recipe.optimizer
        if spec.name == "muon":
            return muon_updates(spec, self.update(role), self.inventory, first=first)
        return [(self.step(role, first), 1)]

    def update_in_fp32(self, role: str, first: bool) -> list[Op]:
        """The update of master weights, before which 16-bit gradients are copied to fp32."""
        u, p = self.update(role), self.precision
        ops = update_ops(self.recipe.optimizer, u, first=first)
        if not p.master or p.gradient == "fp32":
            return ops
        copy = (Tensor("fp32 gradient copy", "temporaries", nbytes(u.numel, "fp32")),)
        moved = float(nbytes(u.numel, p.gradient) + nbytes(u.numel, "fp32"))
        return [Op("gradient.to_fp32", "memory", nbytes=moved, dtype="fp32", allocs=copy), *ops, Op("gradient.release", "host", kernels=0, frees=copy)]

    def after_step(self, role: str) -> list[tuple[list[Op], int]]:
        """What is sent when the update is done: ops, and how often they repeat."""
        return []

    # -- for reports -----------------------------------------------------------------------------------------------------

    def notes(self) -> list[str]:
        return []


def collective(axis: str, kind: str, group: int, message: int, dtype: str, *, event: str = "", name: str = "",
               allocs: tuple[Tensor, ...] = (), frees: tuple[Tensor, ...] = (), detached: bool = False, inline: bool = False) -> Op:
    """A collective in the field's message convention, with what goes in and comes out on one rank."""
    if kind == "all-gather":
        inside, outside = message // group, message
    elif kind == "reduce-scatter":
        inside, outside = message, message // group
    else:
        inside = outside = message
    return Op(name or kind, "collective", dtype=dtype, event=event, allocs=allocs, frees=frees, detached=detached, inline=inline,
              comm=Comm(axis, kind, message, inside, outside, dtype, group))


def repeated(sizes: list[int], send: Callable[[int], list[Op]]) -> list[tuple[list[Op], int]]:
    """What is sent for each size, as stretches of ops that repeat."""
    return [([op for size in sizes[start:start + length] for op in send(size)], count) for start, length, count in periods(sizes)]


def element_bytes(dtype: str) -> int:
    return DTYPE_BYTES[dtype]
