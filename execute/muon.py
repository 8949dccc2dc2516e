# mypy: disable-error-code="no-untyped-call, no-any-return, misc"
"""Muon over stacks of matrices of one shape: momentum, and Newton-Schulz iterations of a whole stack at once.

The mathematics is torch.optim.Muon's (Nesterov, five iterations in bfloat16, the learning rate times sqrt(max(1, rows / columns)), decoupled
decay), the layout karpathy/nanochat's: the update replaces the gradient, and a stack is updated in place.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Of the quintic iteration (https://kellerjordan.github.io/posts/muon/)."""
ITERATIONS = 5
EPS = 1e-7


def orthogonalised(stack: Tensor) -> Tensor:
    """The matrices of a stack [matrices, rows, columns] with singular values near 1, in bfloat16; a zero matrix stays zero."""
    tall = stack.shape[1] > stack.shape[2]
    x = stack.bfloat16()
    if tall:
        x = x.mT
    x.div_(x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS))
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x


class StackedMuon(torch.optim.Optimizer):
    """Muon over parameters that are stacks; its momentum exists from the start."""

    def __init__(self, stacks: Iterable[Tensor], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(stacks, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                grad, momentum = p.grad, self.state[p]["momentum_buffer"]
                momentum.lerp_(grad, 1 - group["momentum"])
                update = orthogonalised(grad.lerp_(momentum, group["momentum"]))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * max(1.0, p.shape[1] / p.shape[2]) ** 0.5)
