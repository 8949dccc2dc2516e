"""Dynamic loss scaling for fp16 gradients, on tensors, so that it runs on fake ones too (torch.amp.GradScaler reads values)."""

from collections.abc import Iterable

import torch
from torch import Tensor

INITIAL, GROWTH, BACKOFF, INTERVAL = 65536.0, 2.0, 0.5, 2000
"""torch.amp.GradScaler's defaults."""


class LossScale:
    """The scale, and the two operators with which torch.amp.GradScaler unscales and adapts (torch/amp/grad_scaler.py)."""

    def __init__(self, device: str = "cpu") -> None:
        self.scale = torch.full((), INITIAL, dtype=torch.float32, device=device)
        self.growth_tracker = torch.zeros((), dtype=torch.int32, device=device)

    def scaled(self, loss: Tensor) -> Tensor:
        return loss * self.scale

    @torch.no_grad()
    def unscale(self, grads: Iterable[Tensor]) -> Tensor:
        """Divide gradients by the scale in place; 1.0 where any was not finite."""
        found = torch.zeros_like(self.scale)
        inverse = self.scale.double().reciprocal().float()
        torch._amp_foreach_non_finite_check_and_unscale_(list(grads), found, inverse)
        return found

    @torch.no_grad()
    def update(self, found: Tensor) -> None:
        torch._amp_update_scale_(self.scale, self.growth_tracker, found, GROWTH, BACKOFF, INTERVAL)
