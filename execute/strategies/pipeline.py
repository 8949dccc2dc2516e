# mypy: disable-error-code="no-untyped-call, no-any-return, misc"
"""Pipeline parallelism with torch.distributed.pipelining: each rank runs its stages of the model in the order of a schedule.

Divides layers over the ranks of pp; tensor parallelism and FSDP2, or DDP, work inside each stage. Sends the residual stream forward and its
gradient backward at every boundary, once per micro-batch. The last stage gives logits and the schedule calls the loss, divided by the
number of micro-batches (torchtitan, components/loss.py, rescale_accumulated_loss); no outputs are returned. One optimizer per stage;
gradients are clipped by the norm over all stages (torchtitan, distributed/utils.py, clip_grad_norm_).
"""

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from costmodel.spec import Run
from costmodel.spec.run import V_SHAPED
from execute import compat
from execute.dtypes import DTYPES
from execute.losses import loss_of_logits
from execute.marks import Marks, NoMarks
from execute.model import Context, Part, Transformer
from execute.optim import Several, make_optimizer
from execute.strategies import Prepared, Region, fsdp, no_region, tensor
from execute.strategies.buckets import EmulatedReducer
from execute.strategies.ddp import real_ddp
from execute.strategies.mesh import groups_of, mesh_of


class Stages(nn.ModuleDict):
    """The stages of one rank, in order of the model."""

    mesh: DeviceMesh

    def __init__(self, run: Run, context: Context) -> None:
        self.numbers = stages_on(run, pipeline_rank(run))
        parts = parts_of(run)
        self.first_layer = [sum(part.layers for part in parts[:s]) for s in range(len(parts))]
        """Where each stage of the pipeline begins in the model."""
        super().__init__({f"stage{s}": Transformer(context, parts[s]) for s in self.numbers})
        self.context = context

    @property
    def stages(self) -> list[Transformer]:
        return [stage for stage in self.values() if isinstance(stage, Transformer)]

    @property
    def ends(self) -> tuple[bool, bool]:
        """Whether the first and the last stage of the pipeline are here."""
        parts = [stage.part for stage in self.stages]
        return any(p.first for p in parts), any(p.last for p in parts)

    def name_in_model(self, name: str) -> str:
        """The name in the whole model of a parameter of a stage: "stage1.layers.0.mlp.up.weight" -> "layers.4.mlp.up.weight"."""
        stage, _, inner = name.partition(".")
        if not inner.startswith("layers."):
            return inner
        _, layer, rest = inner.split(".", 2)
        return f"layers.{self.first_layer[int(stage.removeprefix('stage'))] + int(layer)}.{rest}"


def pipeline_rank(run: Run) -> int:
    """pp is the outermost axis."""
    return dist.get_rank() // (run.plan.world_size // run.plan.pp)


def stages_on(run: Run, rank: int) -> list[int]:
    """The stages of a pipeline rank, in order of the model: round robin, or there and back as a V."""
    p = run.plan
    return [rank, 2 * p.pp - 1 - rank] if p.schedule in V_SHAPED else list(range(rank, p.pp * p.virtual_stages, p.pp))


def parts_of(run: Run) -> list[Part]:
    """All stages: `plan.stage_layers`, or as even as can be, earlier stages larger."""
    count = run.plan.pp * run.plan.virtual_stages
    each, more = divmod(run.model.layers, count)
    layers = run.plan.stage_layers or [each + (i < more) for i in range(count)]
    return [Part(n, i == 0, i == count - 1, sum(layers[:i])) for i, n in enumerate(layers)]


def shard(run: Run, model: nn.Module, device: str = "cpu") -> None:
    """What shards each stage, on one mesh of all axes."""
    assert isinstance(model, Stages)
    model.mesh = mesh_of(run, device)
    for stage in model.stages:
        if run.plan.tp > 1:
            tensor.shard(run, stage, device, model.mesh)
        elif run.plan.zero == 3:
            fsdp.shard(run, stage, device, model.mesh)


def prepare(run: Run, model: nn.Module, *, dry: bool, region: Region = no_region) -> Prepared:
    """The stages under their schedule, with an optimizer each."""
    assert isinstance(model, Stages)
    groups = groups_of(model.mesh)
    stages = [_stage(run, number, module, groups, dry=dry, region=region) for number, module in zip(model.numbers, model.stages, strict=True)]
    loss = Loss(run)
    schedule = _schedule(run, stages, loss)
    if dry:
        compat.assume_static(schedule)

    def micro_batches(batch: Callable[[], tuple[Tensor | None, Tensor | None]], marks: Marks) -> Tensor | None:
        loss.marks = marks
        for stage in stages:
            stage.marks = marks
        with marks.forward():
            tokens, targets = batch()
        losses: list[Tensor] = []
        with tensor.split_logits(run), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)  # nobody adds to the logits in place
            schedule.step(*(() if tokens is None else (tokens,)), target=targets, losses=losses, return_outputs=False)
        marks.backward_ended()
        return torch.stack(losses).detach().sum() if losses else None

    optimizer = Several(*(make_optimizer(run.recipe.optimizer, stage.parameters()) for stage in model.stages))
    return Prepared(model, optimizer, micro_batches=micro_batches, clip=lambda norm: clip(model, norm, groups["pp"]), axes=groups)


class Loss:
    """The recipe's loss of one micro-batch, as a share of the step's."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.marks: Marks = NoMarks()

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        with self.marks.forward():
            return loss_of_logits(self.run.recipe, logits, targets, self.run.model.logit_softcap) / self.run.micro_batches


class Stage(compat.QuietStage):
    """A PipelineStage that tells which phase runs, and re-enacts DDP in a dry run."""

    marks: Marks = NoMarks()
    reducer: EmulatedReducer | None = None

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.marks.forward():
            if self.reducer is not None:
                self.reducer.before_forward()
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False) -> None:
        with ExitStack() as around:
            around.enter_context(self.marks.phase_of("backward"))
            if self.reducer is not None:
                around.enter_context(self.reducer.micro_batch(last_backward))
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
            if self.reducer is not None and last_backward:
                self.reducer.finish()
            self.marks.backward_ended()

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self.marks.phase_of("backward"):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
            self.marks.backward_ended()

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        with self.marks.phase_of("backward"):
            super().perform_reduce_grad(grad_scale_factor)


def _stage(run: Run, number: int, module: Transformer, groups: dict[str, Any], *, dry: bool, region: Region) -> Stage:
    """A stage with static metadata: shapes and dtypes of what it receives and sends."""
    r, plan = run.recipe, run.plan
    tokens = r.seq_len // plan.cp
    rows = tokens // plan.tp if plan.sequence_parallel else tokens
    hidden = torch.empty(r.micro_batch, rows, run.model.hidden, dtype=DTYPES[r.precision.compute], device="meta", requires_grad=True)
    ids = torch.empty(r.micro_batch, tokens, dtype=DTYPES[r.token_dtype], device="meta")
    logits = torch.empty(r.micro_batch, tokens, run.model.vocab, dtype=DTYPES[r.precision.compute], device="meta", requires_grad=True)
    replicated = plan.zero == 0 and plan.dp_replicate * plan.cp > 1
    whole: nn.Module = real_ddp(module, plan, region, groups["dp_replicate"]) if replicated and not dry else module
    stage = Stage(whole, number, plan.pp * plan.virtual_stages, next(module.parameters()).device, group=groups["pp"],
                  input_args=ids if module.part.first else hidden, output_args=logits if module.part.last else hidden)
    stage.region = region
    if replicated and dry:
        stage.reducer = EmulatedReducer(list(module.parameters()), plan, region, groups["dp_replicate"])
    return stage


class ScheduleNaive(PipelineScheduleSingle):
    """One micro-batch after another: forward through all stages, then backward, before the next begins."""

    def _step_microbatches(self, arg_mbs: Any = None, kwarg_mbs: Any = None, target_mbs: Any = None, losses: Any = None, return_outputs: bool = True,
                           loss_kwargs: Any = None) -> None:
        arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        self._initialize_stage(arg_mbs[0], kwarg_mbs[0], None if target_mbs is None else target_mbs[0], loss_kwargs)
        stage = self._stage
        for i in range(self._n_microbatches):
            compat.exchange(stage.get_fwd_recv_ops(i))
            output = stage.forward_one_chunk(i, arg_mbs[i], kwarg_mbs[i], save_forward_output=return_outputs)
            compat.exchange(stage.get_fwd_send_ops(i))
            self._maybe_compute_loss(stage, output, target_mbs, i, loss_kwargs)
            del output
            compat.exchange(stage.get_bwd_recv_ops(i))
            stage.backward_one_chunk(i, loss=self._maybe_get_loss(stage, i), last_backward=i == self._n_microbatches - 1)
            compat.exchange(stage.get_bwd_send_ops(i))
        self._update_losses(stage, losses)
        stage.perform_reduce_grad(self._n_microbatches if self.scale_grads else 1)


SCHEDULES = {"naive": ScheduleNaive, "gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B,
             "zb-h1": ScheduleInterleavedZeroBubble, "interleaved-zb": ScheduleInterleavedZeroBubble, "zbv": ScheduleZBVZeroBubble,
             "dualpipev": ScheduleDualPipeV}
"""torch.distributed.pipelining has no ZB-H1 by name: it is the interleaved one with one stage a rank."""


def _schedule(run: Run, stages: list[Stage], loss: Loss) -> Any:
    """The loss is scaled already, gradients are not scaled again."""
    kind = SCHEDULES[run.plan.schedule]
    alone = issubclass(kind, PipelineScheduleSingle)
    return kind(stages[0] if alone else stages, run.micro_batches, loss_fn=loss, scale_grads=False)


@torch.no_grad()
def clip(model: nn.Module, max_norm: float, group: Any) -> Tensor:
    """Clip by the norm over all stages: the square of this rank's norm, summed over pp. The same for all parts of a rank."""
    parameters = list(model.parameters())
    total = get_total_norm([p.grad for p in parameters if p.grad is not None])
    if isinstance(total, DTensor):
        total = total.full_tensor()
    total = total ** 2.0
    dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
    total = total ** 0.5
    clip_grads_with_norm_(parameters, max_norm, total)
    return total
