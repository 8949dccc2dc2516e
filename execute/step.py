# mypy: disable-error-code="no-untyped-call, no-any-return, misc"
"""One training step, the same code on fake tensors and on real ones."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from costmodel.spec import Run
from execute import compat
from execute.dtypes import DTYPES
from execute.marks import Marks, NoMarks
from execute.strategies import Prepared


def train_step(run: Run, prepared: Prepared, batch: Callable[[], Any], marks: Marks | None = None) -> Tensor | None:
    """zero_grad; forward, loss and backward of the micro-batches; clip; update. Returns this rank's mean loss, where it knows it."""
    marks = marks or NoMarks()
    recipe = run.recipe
    (prepared.zero_grad or prepared.optimizer.zero_grad)(recipe.zero_set_to_none)
    loss = (prepared.micro_batches or partial(_one_after_another, run, prepared))(batch, marks)
    finite = True
    if prepared.loss_scale is not None:
        with marks.phase_of("unscale"):
            finite = _unscale(prepared)
    if recipe.clip_norm > 0:
        with marks.phase_of("clip"):
            _clip(prepared, recipe.clip_norm)
    if finite:
        with marks.phase_of("optimizer"):
            (prepared.step or prepared.optimizer.step)()
    return loss


def _one_after_another(run: Run, prepared: Prepared, batch: Callable[[], tuple[Tensor, Tensor]], marks: Marks) -> Tensor:
    recipe = run.recipe
    total: Tensor | None = None
    for i in range(run.micro_batches):
        last = i == run.micro_batches - 1
        with prepared.micro_batch(last):
            with marks.forward():
                tokens, targets = batch()
                with torch.autocast(tokens.device.type, DTYPES[recipe.precision.compute], enabled=recipe.precision.autocast):
                    loss = prepared.model(tokens, targets)
                if run.micro_batches > 1:
                    loss = loss / run.micro_batches
                total = loss.detach() if total is None else total + loss.detach()
                if prepared.loss_scale is not None:
                    loss = prepared.loss_scale.scaled(loss)
            with marks.phase_of("backward"):
                loss.backward()
                prepared.after_backward(last)
                marks.backward_ended()
        del loss
    assert total is not None
    return total


def _clip(prepared: Prepared, max_norm: float) -> None:
    if prepared.clip is not None:
        prepared.clip(max_norm)
    else:
        torch.nn.utils.clip_grad_norm_(prepared.model.parameters(), max_norm)


def _unscale(prepared: Prepared) -> bool:
    """Unscale the gradients and adapt the scale; False where the update must be skipped (never on fake tensors, which have no values). All ranks agree,
    axis by axis, as with torch.distributed.fsdp's ShardedGradScaler."""
    assert prepared.loss_scale is not None
    grads = [p.grad for group in prepared.optimizer.param_groups for p in group["params"] if p.grad is not None]
    found = prepared.loss_scale.unscale(list(compat.inner_tensors(grads)))
    if torch.distributed.is_initialized():
        for group in [prepared.axes[axis] for axis in ("dp_replicate", "dp_shard", "tp") if axis in prepared.axes] or [torch.distributed.group.WORLD]:
            if torch.distributed.get_world_size(group) > 1:
                torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX, group=group)
    prepared.loss_scale.update(found)
    return isinstance(found, compat.FakeTensor) or not found.item()
