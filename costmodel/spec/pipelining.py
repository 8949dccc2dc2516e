"""What torch.distributed.pipelining itself does not go with, whoever predicts or performs the run (torch 2.13, stage.py and schedules.py)."""

from collections.abc import Iterator

from costmodel.spec.base import PlanError
from costmodel.spec.run import SPLIT, Run


def torch_pipeline_refusals(run: Run) -> Iterator[PlanError]:
    """Of a pipeline in PyTorch's dialect; nothing for any other run."""
    p, r = run.plan, run.recipe
    if p.pp == 1 or p.framework != "pytorch":
        return
    if p.zero in (1, 2):
        yield PlanError("plan.zero", p.zero, "ZeRO-1 and -2 do not go with torch.distributed.pipelining.", "Use zero = 3, or zero = 0.")
    if p.zero == 3 and p.reshard_after_forward:
        yield PlanError("plan.reshard_after_forward", True, "under a pipeline FSDP2 keeps parameters gathered for all micro-batches.",
                        "Use reshard_after_forward = false.")
    if run.model.tied_embeddings:
        yield PlanError("model.tied_embeddings", True, "torch.distributed.pipelining does not tie weights across stages.",
                        "Use model.tied_embeddings = false, or framework = megatron.")
    if p.schedule == "1f1b" and r.grad_accum < p.pp:
        yield PlanError("recipe.grad_accum", r.grad_accum, f"PyTorch's 1F1B needs at least as many micro-batches as stages, {p.pp}.",
                        f"Use grad_accum = {p.pp}, or schedule = gpipe.")
    if p.schedule in SPLIT and p.zero == 0 and p.dp > 1:
        yield PlanError("plan.schedule", p.schedule, "DDP's hooks never see gradients that a split backward makes, and would not reduce them.",
                        "Use 1f1b or interleaved, or strategy = fsdp.")
    if p.schedule in SPLIT and p.checkpointing.mode != "none":
        yield PlanError("plan.checkpointing", p.checkpointing.mode,
                        "PyTorch computes a checkpoint again for every group of weights in a backward of two passes, not once.",
                        "Use checkpointing = none, or schedule = 1f1b or interleaved.")
