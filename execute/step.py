# mypy: disable-error-code="no-untyped-call, no-any-return, misc"
"""One training step, the same code on fake tensors and on real ones."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from costmodel.spec import Run
from execute import compat
from execute.dtypes import DTYPES
from execute.strategies import Prepared


class Marks(Protocol):
    """Who wants to know which phase runs."""

    def forward(self, phase: str = "forward") -> AbstractContextManager[Any]: ...
    def phase_of(self, name: str) -> AbstractContextManager[Any]: ...
    def backward_ended(self) -> None: ...


class NoMarks:
    """Nobody."""

    def forward(self, phase: str = "forward") -> AbstractContextManager[Any]:
        return nullcontext()

    def phase_of(self, name: str) -> AbstractContextManager[Any]:
        return nullcontext()

    def backward_ended(self) -> None:
        return None


def train_step(run: Run, prepared: Prepared, batch: Callable[[], tuple[Tensor, Tensor]], marks: Marks | None = None) -> Tensor:
    """zero_grad; forward, loss and backward of each micro-batch; clip; update. Returns the last micro-batch's mean loss."""
    marks = marks or NoMarks()
    recipe, device = run.recipe, "cpu"
    (prepared.zero_grad or prepared.optimizer.zero_grad)(recipe.zero_set_to_none)
    for i in range(run.micro_batches):
        last = i == run.micro_batches - 1
        with prepared.micro_batch(last):
            with marks.forward():
                tokens, targets = batch()
                with torch.autocast(device, DTYPES[recipe.precision.compute], enabled=recipe.precision.autocast):
                    loss = prepared.model(tokens, targets)
                if run.micro_batches > 1:
                    loss = loss / run.micro_batches
                if prepared.loss_scale is not None:
                    loss = prepared.loss_scale.scaled(loss)
            with marks.phase_of("backward"):
                loss.backward()
                prepared.after_backward(last)
                marks.backward_ended()
        loss = loss.detach()
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


def _clip(prepared: Prepared, max_norm: float) -> None:
    if prepared.clip is not None:
        prepared.clip(max_norm)
    else:
        torch.nn.utils.clip_grad_norm_(prepared.model.parameters(), max_norm)


def _unscale(prepared: Prepared) -> bool:
    """Unscale the gradients and adapt the scale; False where the update must be skipped (never on fake tensors, which have no values)."""
    assert prepared.loss_scale is not None
    grads = [p.grad for group in prepared.optimizer.param_groups for p in group["params"] if p.grad is not None]
    found = prepared.loss_scale.unscale(list(compat.inner_tensors(grads)))
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX)
    prepared.loss_scale.update(found)
    return isinstance(found, compat.FakeTensor) or not found.item()
