"""Pipeline parallelism: each rank holds some of the layers, micro-batches stream through.

Divides layers (and their state); stores nothing twice, except a tied embedding, of which first and last stage hold a copy each and
all-reduce its gradient. Sends, per stage boundary, micro-batch and direction, one message of the residual stream. PyTorch's stages keep
a receive buffer for every micro-batch, in both directions, from the first step on, and hold each stage's output until its backward;
Megatron receives into fresh memory and drops an output once it is sent. With data parallelism, gradients are reduced in the last
micro-batch's backward; under FSDP2 parameters stay gathered and gradients whole until all micro-batches are done. Where a V-shaped schedule puts
two neighbouring stages on one rank, what they exchange takes the place of the receive buffer, and nothing is sent. Where backward is split, the
gradient that was sent stays on its receive buffer until the next step begins (stage_backward_input sets `.grad`; clear_runtime_states).
Sources: torch/distributed/pipelining/stage.py (2.13); NVIDIA/Megatron-LM core/pipeline_parallel/schedules.py.
"""

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from costmodel.program.ir import Comm, Op, Tensor
from costmodel.program.schedule import PREDICTED, rank_of
from costmodel.spec import DTYPE_BYTES, PlanError, Run
from costmodel.spec.kinds import layer_kinds
from costmodel.spec.pipelining import torch_pipeline_refusals
from costmodel.spec.run import SPLIT

AXIS = "pp"
ONLY, FIRST, LAST = "only", "first", "last"
EMBEDDING_AXIS = "embedding"


class Stage(NamedTuple):
    """One stage of the model: its place and its layers."""

    number: int
    layers: int
    first: bool
    last: bool
    begins: int = 0
    """Its first layer, of the model's."""


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
    return [Stage(i, n, i == 0, i == count - 1, begins) for i, (n, begins) in enumerate(zip(layers, accumulate((0, *layers)), strict=False))]


def refusals(run: Run) -> Iterator[PlanError]:
    """What pipeline parallelism cannot do, or not yet."""
    p, r = run.plan, run.recipe
    if p.pp == 1:
        return
    torch = p.framework == "pytorch"
    if p.schedule not in PREDICTED:
        yield PlanError("plan.schedule", p.schedule, "this schedule: not predicted yet.", f"Use one of {', '.join(PREDICTED)}.")
    if p.framework == "deepspeed":
        yield PlanError("plan.pp", p.pp, "DeepSpeed's pipeline: not predicted yet.", "Use framework = pytorch or megatron.")
    yield from torch_pipeline_refusals(run)
    if torch and r.precision.autocast:
        yield PlanError("recipe.precision", r.precision.name, "torch.autocast under a pipeline: not predicted yet.",
                        "Use bf16-pure, fp32, or zero = 3 (whose mixed precision is per module).")
    if p.schedule in SPLIT:
        yield from _split_refusals(run)
    if r.loss in ("chunked", "fused") and torch:
        yield PlanError("recipe.loss", r.loss, "a pipeline's last stage hands out logits: not predicted with this loss.", "Use loss = eager or bf16.")


def _split_refusals(run: Run) -> Iterator[PlanError]:
    """What a backward in two passes does not go with, or not yet."""
    p, r = run.plan, run.recipe
    if p.framework != "pytorch":
        yield PlanError("plan.schedule", p.schedule, "Megatron's core has no zero-bubble schedule.", "Use 1f1b or interleaved, or framework = pytorch.")
    if r.compile:
        yield PlanError("recipe.compile", True, "torch.distributed.pipelining does not split the backward of compiled stages.",
                        "Use compile = false, or schedule = 1f1b or interleaved.")
    for on, field, value, what, fix in (
            (p.zero == 3 and p.schedule == "dualpipev", "plan.zero", p.zero, "FSDP2", "Use schedule = zbv, or dp = 1."),
            (r.precision.compute == "fp8", "recipe.precision", r.precision.name, "fp8 arithmetic", "Use bf16-mixed, or schedule = 1f1b or interleaved."),
            (run.model.moe is not None, "model", run.model.name, "a mixture of experts", "Use a dense model, or schedule = 1f1b or interleaved."),
            (len(set(layer_kinds(run.model, r.seq_len))) > 1, "model.attention_pattern", run.model.attention_pattern, "layers of several kinds",
             "Use attention_pattern = global or sliding, or schedule = 1f1b or interleaved."),
            (p.cp > 1, "plan.cp", p.cp, "context parallelism", "Use cp = 1, or schedule = 1f1b or interleaved.")):
        if on:
            yield PlanError(field, value, f"{what} with a backward in two passes: not predicted yet.", fix)


def local(run: Run, stage: int) -> bool:
    """Whether a stage is on the rank of the stage before it."""
    p = run.plan
    return p.pp > 1 and rank_of(p.schedule, stage, p.pp) == rank_of(p.schedule, stage - 1, p.pp)


class Links:
    """The messages of one stage: what is received and sent around a forward and a backward, and what that keeps."""

    __slots__ = ("stage", "message", "dtype", "torch", "micro_batches", "group", "schedule", "local_before", "local_after")

    def __init__(self, run: Run, stage: Stage, rows: int, dtype: str) -> None:
        self.stage = stage
        self.dtype = dtype
        self.message = rows * run.model.hidden * DTYPE_BYTES[dtype]
        self.torch = run.plan.framework == "pytorch" and run.plan.pp > 1
        self.micro_batches = run.micro_batches
        self.group = run.plan.pp
        self.schedule = run.plan.schedule
        self.local_before = not stage.first and local(run, stage.number)
        """The stage before is on this rank; so is the one after it."""
        self.local_after = not stage.last and local(run, stage.number + 1)

    @property
    def splits(self) -> bool:
        """Backward runs in two passes."""
        return self.schedule in SPLIT and self.group > 1

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
        m = self.micro_batches * self.message
        kinds = ((self.borrows_input, "activations" if self.local_before else "communication"),
                 (self.borrows_gradient, "temporaries" if self.local_after else "communication"))
        return [Tensor("pipeline receive buffers", category, m) for borrows, category in kinds if borrows]

    def _op(self, name: str, kind: str, allocs: tuple[Tensor, ...] = (), frees: tuple[Tensor, ...] = ()) -> Op:
        m = self.message
        comm = Comm(AXIS, kind, m, m if kind == "send" else 0, m if kind == "recv" else 0, self.dtype, self.group)
        return Op(name, "collective", dtype=self.dtype, allocs=allocs, frees=frees, comm=comm, event="p2p")

    def before_forward(self) -> list[Op]:
        if self.stage.first or self.local_before:
            return []
        fresh = () if self.torch else (Tensor("hidden", "activations", self.message),)
        return [self._op("receive activation", "recv", fresh)]

    def after_forward(self) -> list[Op]:
        if self.stage.last:
            return []
        if self.local_after:
            return [Op("hand on activation", "host", kernels=0, frees=(Tensor("hidden", "activations", self.message),))]
        drop = () if self.torch else (Tensor("hidden", "activations", self.message),)
        return [self._op("send activation", "send", frees=drop)]

    def before_backward(self) -> list[Op]:
        if self.stage.last or self.local_after:
            return []
        fresh = () if self.torch else (Tensor("grad:hidden", "temporaries", self.message),)
        return [self._op("receive gradient", "recv", fresh)]

    def after_backward(self, micro: str, output: tuple[Tensor, ...]) -> list[Op]:
        """PyTorch lets go of the stage's output only now; the gradient of the input is sent and freed."""
        ops: list[Op] = []
        if output and self.drops_output(micro):
            ops.append(Op("drop output", "host", kernels=0, frees=output))
        return [*ops, *self._gradient_on(micro)]

    def after_inputs(self) -> list[Op]:
        """The first pass of a split backward is done."""
        return self._gradient_on("", kept=True)

    def sent_gradients(self, count: int) -> tuple[Tensor, ...]:
        """What `count` first passes leave until the next step begins."""
        kept = self.splits and not self.stage.first and not self.local_before
        return (Tensor("grad:hidden", "temporaries", count * self.message),) if kept and count else ()

    def _gradient_on(self, micro: str, *, kept: bool = False) -> list[Op]:
        """The gradient of the stage's input goes to the stage before."""
        gradient = (Tensor("grad:hidden", "temporaries", self.message),)
        if self.local_before:
            return [Op("hand on gradient", "host", kernels=0, frees=gradient)]
        if not self.stage.first:
            late = kept or (self.keeps_sent_gradient and micro in (FIRST, ONLY))
            return [self._op("send gradient", "send", frees=() if late else gradient)]
        return []
