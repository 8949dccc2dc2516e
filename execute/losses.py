# mypy: disable-error-code="no-untyped-call, no-any-return, misc"
"""Head and loss in one: the four ways from hidden states to a mean cross-entropy."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from costmodel.spec import Recipe
from execute.checkpoint import Around, checkpoint
from execute.dtypes import DTYPES

Head = Callable[[Tensor], Tensor]


def bounded(logits: Tensor, softcap: float) -> Tensor:
    """c·tanh(logits/c) (Gemma 2, nanochat); as they are where c is 0."""
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def eager_loss(hidden: Tensor, head: Head, targets: Tensor, softcap: float = 0.0) -> Tensor:
    """Logits in the compute dtype, a float32 copy, log-softmax. Nothing here outlives the call but what autograd saves."""
    return F.cross_entropy(bounded(head(hidden).float(), softcap).flatten(0, -2), targets.flatten())


def loss_of_logits(recipe: Recipe, logits: Tensor, targets: Tensor, softcap: float = 0.0) -> Tensor:
    """The eager or the bf16 loss of logits that somebody else holds: the last stage of a pipeline."""
    return F.cross_entropy(bounded(logits.float() if recipe.loss == "eager" else logits, softcap).flatten(0, -2), targets.flatten())


def low_precision_loss(hidden: Tensor, head: Head, targets: Tensor, softcap: float = 0.0) -> Tensor:
    """Cross-entropy on the logits as the head gives them, without a float32 copy (autocast is off for it)."""
    logits = head(hidden).flatten(0, -2)
    with torch.autocast(hidden.device.type, enabled=False):
        return F.cross_entropy(bounded(logits, softcap), targets.flatten())


def chunked_loss(hidden: Tensor, head: Head, targets: Tensor, chunks: int, around: Around) -> Tensor:
    """Head and loss over pieces of the tokens, each checkpointed: one piece's logits exist at a time."""
    def piece(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(head(x).float(), y, reduction="sum")

    pieces = zip(hidden.flatten(0, -2).chunk(chunks), targets.flatten().chunk(chunks), strict=True)
    total = sum((checkpoint(piece, x, y, around=around) for x, y in pieces), start=hidden.new_zeros((), dtype=torch.float32))
    return total / targets.numel()


class FusedLinearCrossEntropy(torch.autograd.Function):
    """Loss and the gradient of its logits in one forward pass over pieces; backward only scales what forward kept.

    Keeps the gradients of the hidden states and of the head weight. The logits of a piece become their own gradient in place.
    Source: Liger-Kernel, src/liger_kernel/ops/fused_linear_cross_entropy.py (arXiv 2410.10989, section 3.2).
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunks: int) -> Tensor:
        grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        grad_bias = None if bias is None else torch.zeros_like(bias)
        losses = hidden.new_zeros(hidden.shape[0], dtype=torch.float32)
        size = -(-hidden.shape[0] // chunks)
        for start in range(0, hidden.shape[0], size):
            x, y = hidden[start:start + size], targets[start:start + size]
            logits = F.linear(x, weight, bias)
            target = logits.gather(1, y[:, None])
            top = logits.amax(-1, keepdim=True)
            norm = logits.sub_(top).exp_().sum(-1, keepdim=True, dtype=torch.float32)
            losses[start:start + size] = (norm.log() + top - target).squeeze(1)
            logits.div_(norm).scatter_add_(1, y[:, None], torch.full_like(target, -1.0)).div_(hidden.shape[0])
            grad_hidden[start:start + size] = logits @ weight
            grad_weight += logits.t() @ x
            if grad_bias is not None:
                grad_bias += logits.sum(0)
            del logits
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        return losses.mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        scale = grads[0]
        return hidden.mul_(scale), weight.mul_(scale), None if bias is None else bias.mul_(scale), None, None


def fused_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunks: int, compute: torch.dtype) -> Tensor:
    """The fused loss in the compute dtype, whatever autocast says."""
    with torch.autocast(hidden.device.type, enabled=False):
        low_bias = None if bias is None else bias.to(compute)
        return FusedLinearCrossEntropy.apply(hidden.flatten(0, -2).to(compute), weight.to(compute), low_bias, targets.flatten(), chunks)


def head_and_loss(recipe: Recipe, hidden: Tensor, output: nn.Linear, tied: Tensor | None, targets: Tensor, around: Around,
                  softcap: float = 0.0) -> Tensor:
    """The mean cross-entropy of the recipe's kind. `output` is the head; `tied` is its matrix where it has none."""
    def head(x: Tensor) -> Tensor:
        return output(x, tied=tied)

    if recipe.loss == "chunked":
        return chunked_loss(hidden, head, targets, recipe.loss_chunks, around)
    if recipe.loss == "fused":
        weight = output.weight if tied is None else tied
        return fused_loss(hidden, weight, output.bias, targets, recipe.loss_chunks, DTYPES[recipe.precision.compute])
    return (eager_loss if recipe.loss == "eager" else low_precision_loss)(hidden, head, targets, softcap)
