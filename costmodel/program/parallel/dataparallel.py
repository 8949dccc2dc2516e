"""torch.nn.DataParallel: one process, whose GPU 0 owns the model; the other GPUs get a copy of it for each micro-batch.

Divides the batch; GPU 0 holds parameters, gradients and optimizer state, and does the update alone. Each micro-batch: GPU 0 scatters the
tokens, broadcasts all parameters in chunks of 10 MiB (replicate), a thread per GPU runs forward, GPU 0 gathers the logits of all and computes the
loss of the whole batch, scatters its gradient, every GPU runs backward, and when all gradients are there GPU 0 sums them (one autograd node
broadcasts all parameters, so its backward waits for all of them). Between micro-batches the other GPUs hold nothing. The threads share
Python's lock, so that forwards are launched one after the other; backward has a C++ thread per GPU. DataParallel does not average: the loss of
the whole batch does.

Sources, 2.13: torch/nn/parallel/data_parallel.py (forward), replicate.py, scatter_gather.py, _functions.py (Broadcast, ReduceAddCoalesced, Gather,
Scatter), comm.py; torch/csrc/cuda/comm.cpp (broadcast_coalesced: the first device's copies are the parameters themselves);
torch/csrc/utils/tensor_flatten.cpp (take_tensors).
"""

from collections.abc import Iterable, Iterator

from costmodel.program.inventory import Inventory
from costmodel.program.ir import Op, Tensor
from costmodel.program.layers import Numbers
from costmodel.program.optimizer import Update
from costmodel.program.parallel.base import EMBEDDING, FIRST, LAYER, ONLY, Strategy, collective
from costmodel.program.tape import GradReady
from costmodel.spec import DTYPE_BYTES, PlanError, Run
from costmodel.spec.parameters import Param

CHUNK_BYTES = 10485760
"""comm.py, buffer_size of broadcast_coalesced and reduce_add_coalesced."""
GPU_0, OTHERS = "GPU 0", "the other GPUs"
AXIS = "dp_replicate"


class DataParallel(Strategy):
    """One of the two roles: GPU 0, or any other GPU."""

    name = "dataparallel"

    def __init__(self, run: Run, numbers: Numbers, inventory: Inventory, role: str = GPU_0) -> None:
        super().__init__(run, numbers, inventory)
        self.n = run.plan.dp
        self.main = role == GPU_0
        self.replica = numbers.param
        e = DTYPE_BYTES[self.replica]
        self.sizes = [p.numel * e for p in self._parameters()]
        self.broadcasts, self.reductions = _filled(self.sizes), _fitting(self.sizes)

    def _parameters(self) -> list[Param]:
        inv = self.inventory
        return [*inv.embedding.params, *(p for _ in range(inv.layers) for p in inv.layer.params), *inv.head.params]

    def refusals(self) -> Iterator[PlanError]:
        r, acc = self.recipe, self.run.cluster.accelerator
        if acc.kernel_table == "cpu":
            yield PlanError("plan.strategy", "dataparallel", f"DataParallel drives GPUs, and {acc.name} is a CPU.", "Use ddp, or a GPU.")
        if r.loss in ("chunked", "fused", "inplace"):
            yield PlanError("recipe.loss", r.loss, "DataParallel gathers logits, and GPU 0 computes the loss of all of them.", "Use loss = eager or bf16.")
        if self.run.model.moe is not None:
            yield PlanError("model", self.run.model.name, "a mixture of experts under DataParallel: not predicted yet.", "Use a dense model, or ddp.")
        if r.compile:
            yield PlanError("recipe.compile", True, "compiled layers under DataParallel: not predicted yet.", "Use compile = false, or ddp.")
        if not r.zero_set_to_none:
            yield PlanError("recipe.zero_set_to_none", False, "gradients zeroed in place under DataParallel: not predicted yet.",
                            "Use zero_set_to_none = true, or ddp.")

    # -- what lives on a GPU ---------------------------------------------------------------------------------------------

    def roles(self) -> list[tuple[str, int, int]]:
        return [(GPU_0, 1, 0)] if self.main else [(OTHERS, self.n - 1, 1)]

    def persistent(self, role: str) -> list[Tensor]:
        return super().persistent(role) if self.main else []

    def kept_gradients(self) -> list[Tensor]:
        return super().kept_gradients() if self.main else []

    def batch(self) -> tuple[Tensor, ...]:
        """GPU 0 holds the batch of all: its own part of it is a view. The others get their tokens."""
        tokens, targets = super().batch()
        if not self.main:
            return (tokens,)
        return tokens._replace(nbytes=self.n * tokens.nbytes), targets._replace(nbytes=self.n * targets.nbytes)

    # -- the copies of the model -----------------------------------------------------------------------------------------

    def forward_begin(self, micro: str) -> list[Op]:
        """Tokens are scattered, then every parameter is broadcast; small ones are copied together first, on GPU 0."""
        tokens = super().batch()[0].nbytes
        ops = [collective(AXIS, "scatter", self.n, tokens * self.n, self.recipe.token_dtype, name="scatter_tokens")]
        for chunk in self.broadcasts:
            total = sum(chunk)
            flat = Tensor("broadcast chunk", "communication", total)
            together = self.main and len(chunk) > 1
            if together:
                ops.append(Op("replicate.flatten", "memory", nbytes=2.0 * total, dtype=self.replica, allocs=(flat,)))
            copy = () if self.main else (Tensor("replica", "parameters", total),)
            ops.append(collective(AXIS, "broadcast", self.n, total, self.replica, name="broadcast_parameters", allocs=copy, frees=(flat,) if together else ()))
        return ops

    def forward_end(self, micro: str) -> list[Op]:
        """The replicas' modules go when DataParallel.forward returns. What backward needs of their weights stays: not biases and looked-up
        tables, and under autocast, whose graph holds low-precision copies, the norms' alone; of a layer that is computed again, all."""
        return self._release([p for p in self._parameters() if not self._saved(p)])

    def _saved(self, p: Param) -> bool:
        if self.plan.checkpointing.mode != "none" and p in self.inventory.layer.params:
            return True
        lookup = p.name.startswith(("embedding.", "positions.")) and not (self.run.model.tied_embeddings and p.name == "embedding.weight")
        vector = len(p.shape) == 1
        return not lookup and not p.name.endswith(".bias") and (vector or not self.numbers.autocast)

    def _release(self, params: Iterable[Param]) -> list[Op]:
        total = 0 if self.main else sum(p.numel for p in params) * DTYPE_BYTES[self.replica]
        return [Op("replica.release", "host", kernels=0, frees=(Tensor("replica", "parameters", total),))] if total else []

    def after_backward(self, unit: str, index: int, micro: str) -> list[Op]:
        """The weights that this unit's graph held."""
        inv = self.inventory
        params = {EMBEDDING: inv.embedding, LAYER: inv.layer}.get(unit, inv.head).params
        return self._release([p for p in params if self._saved(p) and (unit == EMBEDDING or p.name != "embedding.weight")])

    # -- gradients -------------------------------------------------------------------------------------------------------

    def gradient_key(self, micro: str, variant: object) -> object:
        return self.name

    def on_grad(self, unit: str, index: int, ready: GradReady, micro: str) -> tuple[tuple[Tensor, ...], list[Op]]:
        """Every GPU keeps its own gradients until all of all are there."""
        return (Tensor(f"{ready.param.name}.replica_grad", "temporaries", ready.nbytes),), []

    def backward_end(self, micro: str) -> list[Op]:
        """GPU 0 sums the gradients chunk by chunk into new memory, of which views become `.grad`, or are added to it."""
        own = Tensor("replica gradients", "temporaries", sum(self.sizes))
        ops: list[Op] = []
        for chunk in self.reductions:
            total = sum(chunk)
            flat = Tensor("reduce chunk", "communication", total)
            result = Tensor("summed gradients", "gradients" if micro in (ONLY, FIRST) else "temporaries", total)
            ops.append(Op("reduce.flatten", "memory", nbytes=2.0 * total, dtype=self.replica, allocs=(flat,)))
            ops.append(collective(AXIS, "reduce", self.n, total, self.replica, name="reduce_gradients", allocs=(result,) if self.main else (), frees=(flat,)))
        ops.append(Op("reduce.release", "host", kernels=0, frees=(own,)))
        if self.main and micro not in (ONLY, FIRST):
            whole = float(sum(self.sizes))
            ops.append(Op("accumulate_grad", "memory", nbytes=3.0 * whole, dtype=self.replica, kernels=len(self.sizes),
                          frees=(Tensor("summed gradients", "temporaries", int(whole)),)))
        return ops

    # -- the update ------------------------------------------------------------------------------------------------------

    def clip(self, u: Update) -> list[Op]:
        return super().clip(u) if self.main else []

    def step(self, role: str, first: bool) -> list[Op]:
        """GPU 0 updates its parameters; nobody else has any."""
        return super().step(role, first) if self.main else []

    def notes(self) -> list[str]:
        return ["DataParallel is one process: forwards of all GPUs are launched one after the other, and the update is GPU 0's alone. DDP is quicker, "
                "and no GPU is fuller."]


def _filled(sizes: list[int]) -> list[list[int]]:
    """take_tensors of tensor_flatten.cpp: a chunk is closed by the tensor that fills it."""
    out: list[list[int]] = []
    chunk: list[int] = []
    for size in sizes:
        chunk.append(size)
        if sum(chunk) >= CHUNK_BYTES:
            out.append(chunk)
            chunk = []
    return [*out, chunk] if chunk else out


def _fitting(sizes: list[int]) -> list[list[int]]:
    """_take_tensors of torch/_utils.py: a chunk is closed before the tensor that does not fit."""
    out: list[list[int]] = []
    chunk: list[int] = []
    for size in sizes:
        if chunk and sum(chunk) + size > CHUNK_BYTES:
            out.append(chunk)
            chunk = []
        chunk.append(size)
    return [*out, chunk] if chunk else out

