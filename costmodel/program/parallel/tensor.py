"""Tensor parallelism, with and without sequence parallelism, in DTensor's dialect (PyTorch) and Megatron's.

Shards work and weights: query, key, value, gate and up by column (heads and inner width over the ranks), out and down by row, the
embedding and the head by vocabulary. Sends, per layer and micro-batch, over the tp group: without sequence parallelism an all-reduce
after out and after down in forward, and of the gradient entering each block in backward (2 + 2); with it, an all-gather before and a
reduce-scatter after each block instead, and the mirror of that in backward; the residual stream, norms and dropout then work on 1/t of
the tokens. Megatron saves the 1/t input and gathers it again in backward (4 all-gathers + 2 reduce-scatters); DTensor keeps the gathered
one. Under sequence parallelism the gradients of replicated weights (norms) are all-reduced: by Megatron once a step, all together.
Sources: arXiv 1909.08053 (f and g), arXiv 2205.05198 (sequence parallelism); torch/distributed/tensor/parallel/style.py;
NVIDIA/Megatron-LM core/tensor_parallel/layers.py.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from costmodel.program.host import DTENSOR, record
from costmodel.program.ir import Comm
from costmodel.program.tape import Back, Value
from costmodel.spec import DTYPE_BYTES, PlanError, Run
from costmodel.spec.parameters import Param

if TYPE_CHECKING:
    from costmodel.program.layers import Walk

AXIS = "tp"
COLUMN = ("attention.q.", "attention.k.", "attention.v.", "attention.qkv.", "attention.q_b.", "attention.kv_b.",
          "mlp.gate.", "mlp.up.", "shared.gate.", "shared.up.")
ROW = ("attention.out.weight", "mlp.down.weight", "shared.down.weight")
VOCABULARY = ("embedding.weight", "head.")


def local_param(p: Param, t: int, framework: str) -> Param:
    """The part of a weight on the fullest tp rank: columns and vocabulary by dim 0, rows by dim 1, the rest whole.

    DTensor's row-wise embedding cuts learned positions too; Megatron keeps them whole.
    """
    if t == 1:
        return p
    rows = (*VOCABULARY, "positions.") if framework == "pytorch" else VOCABULARY
    if p.name.startswith(COLUMN) or p.name.startswith(rows):
        return Param(p.name, (-(-p.shape[0] // t), *p.shape[1:]))
    if p.name in ROW:
        return Param(p.name, (p.shape[0], p.shape[1] // t))
    return p


class TensorParallel:
    """What one rank of a tp group computes and sends; with tp = 1 it does nothing."""

    __slots__ = ("t", "sp", "megatron", "fsdp", "late", "loss_parallel", "dispatches")

    def __init__(self, run: Run) -> None:
        p = run.plan
        self.t = p.tp
        self.sp = p.sequence_parallel and p.tp > 1
        self.megatron = p.framework == "megatron"
        self.late = self.megatron or p.zero != 3 or p.pp > 1 or run.micro_batches > 1 and not p.sync_each_micro_batch
        self.loss_parallel = p.tp > 1 and (p.loss_parallel or self.megatron)
        self.dispatches = p.tp > 1 and not self.megatron
        """DTensor dispatches in Python; in a compiled layer it did so when that was traced."""

    @staticmethod
    def refusals(run: Run) -> Iterator[PlanError]:
        """What tensor parallelism cannot do, or not yet."""
        m, p, r = run.model, run.plan, run.recipe
        if p.tp == 1:
            return
        if m.norm_placement == "post":
            yield PlanError("plan.tp", p.tp, "tensor parallelism of post-norm layers: not predicted yet.", "Use tp = 1.")
        if p.framework == "deepspeed" or p.zero in (1, 2) and p.framework == "pytorch" or p.zero == 0 and p.dp * p.cp > 1 and p.framework == "pytorch":
            torch = p.framework == "pytorch"
            yield PlanError("plan.tp", p.tp, "PyTorch's tensor parallelism goes with FSDP or HSDP alone." if torch else
                            "DeepSpeed's tensor parallelism: not predicted yet.",
                            f"Use {'zero = 3' if torch else 'framework = pytorch'}, or framework = megatron.")
        if r.precision.autocast:
            yield PlanError("recipe.precision", r.precision.name, "torch.autocast under DTensor: not predicted yet.",
                            "Use bf16-pure, fp32, or zero = 3 (whose mixed precision is per module).")
        if r.loss in ("chunked", "fused", "inplace") and p.framework == "pytorch" or r.loss in ("chunked", "fused"):
            yield PlanError("recipe.loss", r.loss, "this loss under tensor parallelism: not predicted yet.", "Use loss = eager or bf16.")
        if p.framework == "pytorch" and m.fused_qkv:
            yield PlanError("model.fused_qkv", True, "DTensor would cut a fused query-key-value matrix across them.",
                            "Use model.fused_qkv = false, tp = 1, or framework = megatron.")
        if m.qk_norm == "full":
            yield PlanError("model.qk_norm", "full", "a norm over all heads would span the tp ranks.", "Use tp = 1, or qk_norm = per_head.")

    def dispatch(self, w: "Walk", name: str, forward: int = 1, backward: int = 1) -> None:
        """The host's work in DTensor for a module, or for a redistribution in forward or backward."""
        if self.dispatches:
            record(w.tape, f"{name}.dtensor", DTENSOR, forward, backward)

    def comm(self, kind: str, nbytes: int, dtype: str) -> Comm:
        """A collective of the tp group; `nbytes` is the whole tensor."""
        part = nbytes // self.t
        inside, outside = {"all-gather": (part, nbytes), "reduce-scatter": (nbytes, part)}.get(kind, (nbytes, nbytes))
        return Comm(AXIS, kind, nbytes, inside, outside, dtype, self.t)

    def enter(self, w: "Walk", x: Value, name: str) -> Value:
        """Before a column-parallel matmul: gather the sequence, or mark that the gradient must be summed over the ranks."""
        if self.t == 1:
            return x
        self.dispatch(w, f"{name}.in", int(self.sp))
        if not self.sp:
            x.grad_comm = self.comm("all-reduce", x.nbytes, x.dtype)
            x.grad_in_place = self.megatron
            return x
        full = w.tape.value(f"{name}.gathered", x.numel * self.t, x.dtype)
        copy = 0 if self.megatron else full.nbytes
        w.tape.record(f"{name}.all_gather", "collective", (x,), (full,), comm=self.comm("all-gather", full.nbytes, x.dtype), temp_bytes=copy,
                      dtype=x.dtype, backs=(Back("reduce_scatter", "collective", 0, comm=self.comm("reduce-scatter", full.nbytes, x.dtype),
                                                 dtype=x.dtype, temp_bytes=copy),))
        if self.megatron:
            full.regather = x
        return full

    def leave(self, w: "Walk", y: Value, name: str) -> Value:
        """After a row-parallel matmul, whose output is a partial sum: all-reduce it, or reduce-scatter over the sequence."""
        if self.t == 1:
            return y
        self.dispatch(w, f"{name}.out", 1, int(self.sp))
        if self.sp:
            out = w.tape.value(f"{name}.scattered", y.numel // self.t, y.dtype)
            copy = 0 if self.megatron else y.nbytes
            back = Back("all_gather", "collective", 0, comm=self.comm("all-gather", y.nbytes, y.dtype), dtype=y.dtype, temp_bytes=copy)
            w.tape.record(f"{name}.reduce_scatter", "collective", (y,), (out,), comm=self.comm("reduce-scatter", y.nbytes, y.dtype),
                          temp_bytes=copy, dtype=y.dtype, backs=(back,))
            if not self.megatron:
                w.cached.append(len(w.tape.nodes) - 1)
            return out
        out = w.tape.value(f"{name}.reduced", y.numel, y.dtype)
        w.tape.record(f"{name}.all_reduce", "collective", (y,), (out,), comm=self.comm("all-reduce", y.nbytes, y.dtype), dtype=y.dtype,
                      backs=(Back("grad", "memory", 0, alias=True),))
        return out

    def gather_logits(self, w: "Walk", logits: Value) -> Value:
        """Without a vocabulary-parallel loss, every rank gathers all logits."""
        if self.t == 1 or self.loss_parallel:
            return logits
        self.dispatch(w, "logits.out")
        full = w.tape.value("logits.gathered", logits.numel * self.t, logits.dtype)
        w.tape.record("logits.all_gather", "collective", (logits,), (full,), comm=self.comm("all-gather", full.nbytes, logits.dtype),
                      temp_bytes=full.nbytes, dtype=logits.dtype, backs=(Back("slice", "memory", 0, nbytes=2.0 * logits.nbytes, dtype=logits.dtype),))
        return full

    def lookup(self, local: Param, rows: int) -> int:
        """Elements of the gradient of a looked-up table: DTensor's lookup makes the whole one on every rank
        (torch/distributed/tensor/_ops/_embedding_ops.py has no row-wise rule for embedding_dense_backward)."""
        return local.numel if self.t == 1 or self.megatron else rows * local.shape[1]

    @property
    def sums_norms_late(self) -> bool:
        """Where no FSDP reduces in every micro-batch, DTensor leaves a norm's gradient a partial sum until somebody asks for it, and
        Megatron until all micro-batches are done."""
        return self.t > 1 and self.late

    def loss_sums(self, w: "Walk", tokens: int, name: str, dtype: str = "fp32") -> None:
        """The small all-reduces of a vocabulary-parallel cross-entropy: the largest logit, the sum of exponentials, the target's."""
        if not self.loss_parallel:
            return
        each = tokens * DTYPE_BYTES[dtype]
        self.dispatch(w, name, 1, 0)
        w.tape.record(name, "collective", (), (), comm=self.comm("all-reduce", each, dtype), dtype=dtype, temp_bytes=each)
