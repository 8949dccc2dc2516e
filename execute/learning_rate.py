"""The learning rate of a step: linear warm-up, then the recipe's decay."""

import math

import torch

from costmodel.spec import Recipe


def learning_rate(recipe: Recipe, step: int, steps: int) -> float:
    """The rate of step `step` (from 0) of `steps`.

    Warm-up: lr (step + 1) / warmup_steps. Then constant; or a cosine or a line from lr down to 0, which it reaches after the last step
    (torch.optim.lr_scheduler: LinearLR, CosineAnnealingLR).
    """
    peak, warmup = recipe.optimizer.lr, recipe.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    if recipe.schedule == "constant":
        return peak
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return peak * (1 - done if recipe.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done)))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every group of an optimizer this rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
