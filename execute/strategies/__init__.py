"""Ways to spread a step, one file each: what wraps the model, which optimizer updates what, which hooks run when."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from costmodel.spec import Run
from execute.marks import Marks
from execute.scaling import LossScale

Region = Callable[[str], AbstractContextManager[Any]]
"""Marks what a strategy does for communication; an observer passes its own, everyone else `no_region`."""


def no_region(name: str) -> AbstractContextManager[Any]:
    return nullcontext()


def _nothing(last: bool) -> None:
    return None


def _no_context(last: bool) -> AbstractContextManager[Any]:
    return nullcontext()


@dataclass
class Prepared:
    """A model made ready by a strategy: what step.py calls, in the order in which it calls it."""

    model: nn.Module
    """Called with tokens and targets; returns the mean loss."""
    optimizer: torch.optim.Optimizer
    micro_batch: Callable[[bool], AbstractContextManager[Any]] = _no_context
    """Around the forward and backward of a micro-batch; told whether it is the last of the step."""
    after_backward: Callable[[bool], None] = _nothing
    micro_batches: Callable[[Callable[[], Any], Marks], Tensor | None] | None = None
    """Runs all micro-batches of a step in an order of its own; None: execute.step runs one after the other."""
    clip: Callable[[float], Tensor | None] | None = None
    """Clips gradients by their norm; None: torch.nn.utils.clip_grad_norm_ on the model's parameters."""
    step: Callable[[], None] | None = None
    """Updates the parameters; None: optimizer.step()."""
    zero_grad: Callable[[bool], None] | None = None
    loss_scale: LossScale | None = None
    """Dynamic loss scaling (fp16)."""
    holds: Callable[[], Iterable[tuple[str, Any]]] = tuple
    """(category, tensors) of what lives between steps and that neither the model nor the optimizer shows, for whoever watches."""
    axes: Mapping[str, Any] = field(default_factory=dict)
    """Process groups by axis of the Run."""


def strategy_name(run: Run) -> str:
    """Which file of this folder performs a plan."""
    if run.plan.framework in ("deepspeed", "nanochat"):
        return run.plan.framework
    if run.plan.pp > 1:
        return "pipeline"
    if run.plan.tp > 1:
        return "tensor"
    if run.plan.zero == 3:
        return "fsdp"
    if run.plan.zero in (1, 2):
        return f"zero{run.plan.zero}"
    return "ddp" if run.plan.dp * run.plan.cp > 1 else "single"


def strategy(run: Run) -> Any:
    """The module of a plan's strategy: `shard(run, model, device)` while the model has no storage, for the kind of device that it will
    lie on ("cpu", "cuda"); then, with storage, `prepare(run, model, ...)`."""
    return import_module(f"execute.strategies.{strategy_name(run)}")
