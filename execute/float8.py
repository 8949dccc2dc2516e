# mypy: disable-error-code="no-untyped-call, no-any-return, misc"
"""A linear layer whose three matrix multiplications run in fp8, as torchao's Float8Linear does in eager code.

Forward casts input and weight to E4M3 and keeps them in high precision; backward casts the gradient to E5M2, and weight and input again. Scales
follow from the largest magnitude of a tensor, or of each row and column (`rowwise`). torch._scaled_mm multiplies rows with rows, so backward copies
its operands transposed. Source: pytorch/ao torchao/float8 (float8_linear.py, float8_ops.py).
"""

from typing import Any

import torch
from torch import Tensor, nn

from costmodel.spec import Recipe

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GRAIN = 16
"""torch._scaled_mm takes sides that are multiples of it."""
EPS = 1e-12


def cast(x: Tensor, dtype: torch.dtype, dim: int | None) -> tuple[Tensor, Tensor]:
    """x in fp8, and the factor that undoes its scale; a scale for the tensor, or for what lies along `dim`."""
    most = torch.finfo(dtype).max
    amax = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = most / amax.float().clamp(min=EPS)
    return (x * scale.to(x.dtype)).clamp_(-most, most).to(dtype), scale.reciprocal()


def by_columns(x: Tensor) -> Tensor:
    """The same matrix, stored column by column."""
    return x.t().contiguous().t()


class Multiply(torch.autograd.Function):
    """x [rows, in] times weight [out, in] transposed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rowwise: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rowwise = rowwise
        along = -1 if rowwise else None
        low, undo = cast(x, E4M3, along)
        low_weight, undo_weight = cast(weight, E4M3, along)
        return torch._scaled_mm(low, low_weight.t(), scale_a=undo, scale_b=undo_weight.t() if rowwise else undo_weight, out_dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (grad,), rowwise = ctx.saved_tensors, grads, ctx.rowwise
        low, undo = cast(grad, E5M2, -1 if rowwise else None)
        other, undo_other = cast(weight, E4M3, 0 if rowwise else None)
        other = by_columns(other)
        grad_x = torch._scaled_mm(low, other, scale_a=undo, scale_b=undo_other, out_dtype=grad.dtype)
        del other
        if rowwise:
            low, undo = cast(grad, E5M2, 0)
        low = low.t().contiguous()
        other, undo_other = cast(x, E4M3, 0 if rowwise else None)
        other = by_columns(other)
        grad_weight = torch._scaled_mm(low, other, scale_a=undo.t() if rowwise else undo, scale_b=undo_other, out_dtype=grad.dtype)
        return grad_x, grad_weight, None


class Float8Linear(nn.Linear):
    """nn.Linear over fp8 matmuls."""

    def __init__(self, width: int, out: int, bias: bool, rowwise: bool) -> None:
        super().__init__(width, out, bias=bias)
        self.rowwise = rowwise

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        y = Multiply.apply(x.flatten(0, -2), self.weight, self.rowwise).view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def linear(recipe: Recipe, width: int, out: int, *, bias: bool) -> nn.Linear:
    """A layer's linear module: in fp8 where the recipe says so and every side allows it."""
    sides = width, out, recipe.micro_batch * recipe.seq_len
    if recipe.precision.compute != "fp8" or any(side % GRAIN for side in sides):
        return nn.Linear(width, out, bias=bias)
    return Float8Linear(width, out, bias, recipe.precision.fp8_recipe == "rowwise")
