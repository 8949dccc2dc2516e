"""Pipeline parallelism: each rank holds some of the layers, micro-batches stream through.

Divides layers (and their state); stores nothing twice, except a tied embedding, of which first and last stage hold a copy each and
all-reduce its gradient. Sends, per stage boundary, micro-batch and direction, one message of the residual stream. PyTorch's stages keep
a receive buffer for every micro-batch, in both directions, from the first step on, and hold each stage's output until its backward;
Megatron receives into fresh memory and drops an output once it is sent. With data parallelism, gradients are reduced in the last
micro-batch's backward; under FSDP2 parameters stay gathered and gradients whole until all micro-batches are done.
Sources: torch/distributed/pipelining/stage.py (2.13); NVIDIA/Megatron-LM core/pipeline_parallel/schedules.py.
"""

from collections.abc import Iterator
from typing import NamedTuple

from costmodel.program.ir import Comm, Op, Tensor
from costmodel.program.schedule import PREDICTED
from costmodel.spec import DTYPE_BYTES, PlanError, Run

AXIS = "pp"
ONLY, FIRST, LAST = "only", "first", "last"
EMBEDDING_AXIS = "embedding"


class Stage(NamedTuple):
    """One stage of the model: its place and its layers."""

    number: int
    layers: int
    first: bool
    last: bool


WHOLE = -1
"""Number of the only stage of a run without pipeline."""


def stages_of(run: Run) -> list[Stage]:
    """All stages in order of the model: `plan.stage_layers`, or as even as can be, earlier stages larger."""
    p = run.plan
    count = p.pp * p.virtual_stages
    if count == 1:
        return [Stage(WHOLE, run.model.layers, True, True)]
    each, more = divmod(run.model.layers, count)
    layers = p.stage_layers or [each + (i < more) for i in range(count)]
    return [Stage(i, n, i == 0, i == count - 1) for i, n in enumerate(layers)]


def refusals(run: Run) -> Iterator[PlanError]:
    """What pipeline parallelism cannot do, or not yet."""
    p, r, m = run.plan, run.recipe, run.model
    if p.pp == 1:
        return
    torch = p.framework == "pytorch"
    if p.schedule not in PREDICTED:
        yield PlanError("plan.schedule", p.schedule, "this schedule: not predicted yet.", f"Use one of {', '.join(PREDICTED)}.")
    if p.framework == "deepspeed":
        yield PlanError("plan.pp", p.pp, "DeepSpeed's pipeline: not predicted yet.", "Use framework = pytorch or megatron.")
    if torch and p.zero in (1, 2):
        yield PlanError("plan.zero", p.zero, "ZeRO-1 and -2 do not go with torch.distributed.pipelining.", "Use zero = 3, or zero = 0.")
    if torch and p.zero == 3 and p.reshard_after_forward:
        yield PlanError("plan.reshard_after_forward", True, "under a pipeline FSDP2 keeps parameters gathered for all micro-batches.",
                        "Use reshard_after_forward = false.")
    if torch and r.precision.autocast:
        yield PlanError("recipe.precision", r.precision.name, "torch.autocast under a pipeline: not predicted yet.",
                        "Use bf16-pure, fp32, or zero = 3 (whose mixed precision is per module).")
    if torch and m.tied_embeddings:
        yield PlanError("model.tied_embeddings", True, "torch.distributed.pipelining does not tie weights across stages.",
                        "Use model.tied_embeddings = false, or framework = megatron.")
    if torch and p.schedule == "1f1b" and r.grad_accum < p.pp:
        yield PlanError("recipe.grad_accum", r.grad_accum, f"PyTorch's 1F1B needs at least as many micro-batches as stages, {p.pp}.",
                        f"Use grad_accum = {p.pp}, or schedule = gpipe.")
    if r.loss in ("chunked", "fused") and torch:
        yield PlanError("recipe.loss", r.loss, "a pipeline's last stage hands out logits: not predicted with this loss.", "Use loss = eager or bf16.")


class Links:
    """The messages of one stage: what is received and sent around a forward and a backward, and what that keeps."""

    __slots__ = ("stage", "message", "dtype", "torch", "micro_batches", "group", "schedule")

    def __init__(self, run: Run, stage: Stage, rows: int, dtype: str) -> None:
        self.stage = stage
        self.dtype = dtype
        self.message = rows * run.model.hidden * DTYPE_BYTES[dtype]
        self.torch = run.plan.framework == "pytorch" and run.plan.pp > 1
        self.micro_batches = run.micro_batches
        self.group = run.plan.pp
        self.schedule = run.plan.schedule

    @property
    def keeps_last_output(self) -> bool:
        """The schedule's loop still names the output of the last forward when its backward is done (Schedule1F1B, ScheduleGPipe)."""
        return self.torch and self.schedule in ("1f1b", "gpipe")

    @property
    def keeps_until_next(self) -> bool:
        """On 1F1B's last rank every backward follows its own forward, so each output lives until the next forward returns."""
        return self.keeps_last_output and self.schedule == "1f1b" and self.stage.last

    @property
    def keeps_sent_gradient(self) -> bool:
        """1F1B's loop names the gradient that was sent until the next one is (schedules.py, `bwd_sends`)."""
        return self.torch and self.schedule == "1f1b" and not self.stage.first

    def drops_output(self, micro: str) -> bool:
        """Whether the output of a micro-batch goes with its backward."""
        return not self.keeps_until_next and not (self.keeps_last_output and micro in (LAST, ONLY))

    def at_end(self, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What the schedule's loop lets go of when it returns."""
        gradient = (Tensor("grad:hidden", "temporaries", self.message),) if self.keeps_sent_gradient else ()
        return (*(output if self.keeps_last_output else ()), *gradient)

    @property
    def borrows_input(self) -> bool:
        """The stage's input lives in a receive buffer that is never freed."""
        return self.torch and not self.stage.first

    @property
    def borrows_gradient(self) -> bool:
        """So does the gradient of its output."""
        return self.torch and not self.stage.last

    def buffers(self) -> list[Tensor]:
        """Receive buffers that live from the first step on."""
        count = (self.borrows_input + self.borrows_gradient) * self.micro_batches
        return [Tensor("pipeline receive buffers", "communication", count * self.message)] if count else []

    def _op(self, name: str, kind: str, allocs: tuple[Tensor, ...] = (), frees: tuple[Tensor, ...] = ()) -> Op:
        m = self.message
        comm = Comm(AXIS, kind, m, m if kind == "send" else 0, m if kind == "recv" else 0, self.dtype, self.group)
        return Op(name, "collective", dtype=self.dtype, allocs=allocs, frees=frees, comm=comm, event="p2p")

    def before_forward(self) -> list[Op]:
        if self.stage.first:
            return []
        fresh = () if self.torch else (Tensor("hidden", "activations", self.message),)
        return [self._op("receive activation", "recv", fresh)]

    def after_forward(self) -> list[Op]:
        if self.stage.last:
            return []
        drop = () if self.torch else (Tensor("hidden", "activations", self.message),)
        return [self._op("send activation", "send", frees=drop)]

    def before_backward(self) -> list[Op]:
        if self.stage.last:
            return []
        fresh = () if self.torch else (Tensor("grad:hidden", "temporaries", self.message),)
        return [self._op("receive gradient", "recv", fresh)]

    def after_backward(self, micro: str, output: tuple[Tensor, ...]) -> list[Op]:
        """PyTorch lets go of the stage's output only now; the gradient of the input is sent and freed."""
        ops: list[Op] = []
        if output and self.drops_output(micro):
            ops.append(Op("drop output", "host", kernels=0, frees=output))
        if not self.stage.first:
            late = self.keeps_sent_gradient and micro in (FIRST, ONLY)
            ops.append(self._op("send gradient", "send", frees=() if late else (Tensor("grad:hidden", "temporaries", self.message),)))
        return ops
