"""Expert parallelism: the experts of each layer are dealt out to the ranks of an ep group; tokens travel to them and back.

Divides the experts' work and their weights; adds no ranks: an ep group is ep consecutive ranks of dp_shard x cp (with Megatron's tp inside it), so
everything outside the experts stays data-parallel over all of them. Sends, per layer and micro-batch, over the ep group: two all-to-alls in forward
(rows to their experts, results back) and two in backward, each of tokens x top_k x hidden elements; and once in forward how many rows each rank sends,
which the host waits for. The gradients of an expert are reduced over the ranks that have the same experts (axis "edp"), those of all other weights over
all data-parallel ranks. Routing decides how many rows a rank gets: recipe.moe_imbalance is the busiest rank's share over the even one.
Sources: arXiv 2006.16668 (dispatch and combine, auxiliary loss, capacity); torchtitan, distributed/expert_parallel.py;
NVIDIA/Megatron-LM core/transformer/moe/token_dispatcher.py.
"""

from collections.abc import Iterator
from math import comb

from costmodel.program.ir import Comm
from costmodel.spec import DTYPE_BYTES, PlanError, Run
from costmodel.spec.parameters import Param
from costmodel.spec.routing import busiest_rows, slots

AXIS, REPLICAS = "ep", "edp"
"""Ranks that share the experts; ranks that have the same ones."""
COUNTS = "int64"
"""dtype in which ranks tell one another how many rows they send."""


def is_expert(p: Param) -> bool:
    """Whether a weight belongs to routed experts."""
    return p.name.startswith("experts.")


def local_expert(p: Param, ep: int, t: int) -> Param:
    """The part of a weight that one rank of an ep group holds: whole experts, whose inner width Megatron cuts over tp."""
    if ep * t == 1 or not is_expert(p):
        return p
    experts, rows, columns = p.shape
    down = p.name.startswith("experts.down.")
    return Param(p.name, (experts // ep, rows if down else rows // t, columns // t if down else columns))


class ExpertParallel:
    """What one rank of an ep group holds and gets; with ep = 1 it sends nothing."""

    __slots__ = ("n", "experts", "top_k", "imbalance", "hooks", "busiest", "event", "dispatcher", "capacity")

    def __init__(self, run: Run, *, busiest: bool = True) -> None:
        assert run.model.moe is not None
        self.n = run.plan.ep
        self.experts = run.model.moe.experts // self.n
        """Experts on this rank."""
        self.top_k = run.model.moe.top_k
        self.imbalance = run.recipe.moe_imbalance
        self.busiest = busiest
        self.capacity = run.recipe.moe_capacity_factor
        """Slots of each expert over the even share; None: no token is dropped, and nobody knows how many rows come."""
        self.dispatcher = run.plan.ep_dispatcher
        self.event = "experts" if run.plan.ep_overlap and self.n > 1 else ""
        """What the all-to-alls signal when done; empty where compute waits for each."""
        self.hooks = self.n > 1 and run.plan.framework == "pytorch"
        """The strategy gathers and reduces the experts' weights apart from the layer's."""

    def sent(self, rows: int) -> int:
        """Rows that this rank sends to experts, of `rows` that the router chose: all of them, or as many as there are slots."""
        return rows if self.capacity is None else self.experts * self.n * slots(rows, self.experts * self.n, self.capacity)

    def received(self, rows: int) -> int:
        """Rows for this rank's experts, of the whole group, where each rank routes `rows` of them."""
        if self.n == 1 or self.capacity is not None:
            return self.sent(rows)
        first = busiest_rows(rows, self.n, self.imbalance)
        return self.n * first if self.busiest else -(-self.n * (rows - first) // (self.n - 1))

    def copies(self, tokens: int) -> int:
        """Copies of `tokens` tokens that travel where each is sent once to every rank with some of its experts: n (1 - C(E - E/n, k) / C(E, k)) of each, as
        the k experts are drawn evenly."""
        every = self.experts * self.n
        return round(tokens * self.n * (1 - comb(every - self.experts, self.top_k) / comb(every, self.top_k)))

    def exchange(self, sent: int, received: int, dtype: str) -> Comm:
        """An all-to-all of the group: elements that this rank sends and gets."""
        e = DTYPE_BYTES[dtype]
        return Comm(AXIS, "all-to-all", sent * e, sent * e, received * e, dtype, self.n)

    def exchange_all(self, numel: int, dtype: str) -> tuple[Comm, Comm]:
        """The all-gather of the tokens of all ranks, `numel` elements in all, and the reduce-scatter back."""
        whole = numel * DTYPE_BYTES[dtype]
        part = whole // self.n
        return Comm(AXIS, "all-gather", whole, part, whole, dtype, self.n), Comm(AXIS, "reduce-scatter", whole, whole, part, dtype, self.n)

    def counts(self) -> Comm:
        """Every rank tells each other how many rows it sends to each of its experts."""
        nbytes = self.n * self.experts * DTYPE_BYTES[COUNTS]
        return Comm(AXIS, "all-to-all", nbytes, nbytes, nbytes, COUNTS, self.n)


def refusals(run: Run) -> Iterator[PlanError]:
    """What a mixture of experts cannot do, or not yet."""
    m, p, r = run.model, run.plan, run.recipe
    if m.moe is None:
        return
    pytorch, word = p.framework == "pytorch", f"{m.name}: a mixture of experts"
    for on, field, value, what, fix in (
            (m.moe.first_dense_layers >= m.layers, "model.moe.first_dense_layers", m.moe.first_dense_layers,
             f"a mixture of experts in none of {m.layers} layers", f"Use first_dense_layers < {m.layers}."),
            (m.moe.first_dense_layers > 0 and p.zero == 3 and p.checkpointing.group > 1, "plan.checkpointing.group", p.checkpointing.group,
             "checkpoints of several layers, of which some are dense, under FSDP", "Use checkpointing = full, or first_dense_layers = 0."),
            (m.moe.first_dense_layers > 0 and p.single_process, "model.moe.first_dense_layers", m.moe.first_dense_layers,
             "dense layers before a mixture of experts in DataParallel", "Use ddp."),
            (m.moe.expert_bias, "model.moe.expert_bias", True, "biases of experts", "Use expert_bias = false."),
            (m.moe.shared_experts > 0 and not m.moe.shared_ffn, "model.moe.shared_ffn", 0, "shared experts without their width",
             "Use shared_ffn = shared_experts x the width of one."),
            (p.framework == "deepspeed", "plan.framework", p.framework, f"{word} in this dialect", "Use framework = pytorch or megatron."),
            (r.moe_capacity_factor is not None and p.ep_dispatcher != "alltoall", "recipe.moe_capacity_factor", r.moe_capacity_factor,
             f"capacities with the {p.ep_dispatcher} dispatcher", "Use ep_dispatcher = alltoall."),
            (pytorch and p.cp > 1, "plan.cp", p.cp, f"{word} under PyTorch's context parallelism", "Use cp = 1, or framework = megatron."),
            (pytorch and p.tp > 1, "plan.tp", p.tp, f"{word} under PyTorch's tensor parallelism", "Use tp = 1, or framework = megatron."),
            (pytorch and p.ep > 1 and p.zero != 3, "plan.ep", p.ep, "PyTorch's expert parallelism without FSDP", "Use zero = 3, or ep = 1."),
            (pytorch and p.ep > 1 and p.pp > 1, "plan.ep", p.ep, "PyTorch's expert parallelism in a pipeline", "Use pp = 1, ep = 1, or framework = megatron."),
            (pytorch and p.ep_overlap and p.ep > 1, "plan.ep_overlap", True, "all-to-alls that overlap compute in PyTorch's dialect",
             "Use ep_overlap = false, or framework = megatron."),
            (p.ep_dispatcher != "alltoall" and p.framework != "megatron", "plan.ep_dispatcher", p.ep_dispatcher, "another dispatcher than the all-to-all",
             "Use ep_dispatcher = alltoall, or framework = megatron."),
            (p.ep_dispatcher == "allgather" and p.ep_overlap, "plan.ep_overlap", True, "all-gathers of tokens that overlap compute",
             "Use ep_overlap = false."),
            (r.optimizer.name == "muon", "recipe.optimizer", "muon", f"Muon over the stacked matrices of {word}", "Use adamw."),
            (m.moe.aux_loss_coefficient > 0 and r.precision.loss_scaling, "model.moe.aux_loss_coefficient", m.moe.aux_loss_coefficient,
             "an auxiliary loss under loss scaling", "Use a bf16 precision, or aux_loss_coefficient = 0.")):
        if on:
            yield PlanError(field, value, f"{what}: not predicted yet.", fix)
    if m.moe.expert_ffn % p.tp:
        yield PlanError("plan.tp", p.tp, f"model.moe.expert_ffn = {m.moe.expert_ffn} must be a multiple of tp.", "Use a tp that divides it.")
    if p.tp > 1 and not p.sequence_parallel:
        yield PlanError("plan.sequence_parallel", False, "Megatron runs a mixture of experts under tensor parallelism with sequence parallelism only.",
                        "Use sequence_parallel = true, or tp = 1.")
