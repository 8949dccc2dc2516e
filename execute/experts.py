# mypy: disable-error-code="no-untyped-call, no-any-return, misc"
"""A mixture of experts: router, permutation, grouped matrix products, and the exchange with the other ranks of an expert-parallel group.

No token is dropped unless recipe.moe_capacity_factor gives every expert so many slots. The rows of a token travel sorted by expert; how many go where is
read from the counts by the host, where it is not given by the slots. On fake tensors, which have no values, every expert gets its even share, and the
busiest rank recipe.moe_imbalance times that.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from costmodel.spec import Model, Recipe
from costmodel.spec.routing import rows_by_rank, slots
from execute import compat
from execute.kernels import Kernels


class Matrices(nn.Module):
    """One matrix of every expert of this rank: [experts, out, width]."""

    def __init__(self, experts: int, out: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, out, width))


class Experts(nn.Module):
    """The routed experts of one layer that this rank holds: `first` is the number of its first one."""

    def __init__(self, model: Model, recipe: Recipe, ranks: int, compute: torch.dtype, kernels: Kernels, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        assert model.moe is not None
        self.recipe, self.kernels, self.activation, self.compute = recipe, kernels, activation, compute
        self.ranks, self.all = ranks, model.moe.experts
        here, inner = self.all // ranks, model.moe.expert_ffn
        self.here = here
        self.group: Any = None
        """The ep group, told by the strategy that spreads the experts."""
        if model.gated:
            self.gate = Matrices(here, inner, model.hidden)
        self.up = Matrices(here, inner, model.hidden)
        self.down = Matrices(here, model.hidden, inner)
        self.gated = model.gated

    @property
    def first(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group) * self.here

    def forward(self, x: Tensor, token: Tensor, counts: Tensor, weights: Tensor) -> Tensor:
        """x [n, hidden]; `token` [n k]: the token of each routed row, sorted by expert (or of each slot); `counts` [all]: rows of each expert; `weights`
        [n k, 1]. The results of the rows, times their weights."""
        return self.results(x, token, counts) * weights

    def results(self, x: Tensor, token: Tensor, counts: Tensor) -> Tensor:
        """What the experts make of the rows, wherever they are."""
        rows = Rows.apply(x.to(self.compute), token)
        if self.group is None:
            return self.block(rows, counts)
        theirs = counts
        if self.recipe.moe_capacity_factor is None:
            theirs = torch.empty_like(counts)
            dist.all_to_all_single(theirs, counts, group=self.group)
        send, receive = self.splits(len(token), counts, theirs)
        rows = compat.all_to_all(rows, receive, send, self.group)
        if self.here == 1:
            return compat.all_to_all(self.block(rows, theirs.sum(0, keepdim=True)), send, receive, self.group)
        order = self.order(theirs, len(rows))
        rows = Rows.apply(rows, order)
        rows = self.block(rows, theirs.view(self.ranks, self.here).sum(0))
        rows = Unsorted.apply(rows, order)
        return compat.all_to_all(rows, send, receive, self.group)

    def splits(self, rows: int, counts: Tensor, theirs: Tensor) -> tuple[list[int], list[int]]:
        """How many rows this rank sends to each rank of the group, and gets from it."""
        if self.recipe.moe_capacity_factor is not None:
            return ([rows // self.ranks] * self.ranks,) * 2
        if isinstance(counts, compat.FakeTensor):
            send = rows_by_rank(rows, self.ranks, self.recipe.moe_imbalance)
            return send, [send[dist.get_rank(self.group)]] * self.ranks
        both = torch.stack((counts, theirs)).view(2, self.ranks, self.here).sum(-1).tolist()
        return both[0], both[1]

    def order(self, theirs: Tensor, rows: int) -> Tensor:
        """The order that sorts rows, which come sorted by sender and then by expert, by expert alone."""
        expert = torch.arange(self.here, device=theirs.device).repeat(self.ranks)
        return expert.repeat_interleave(theirs, output_size=rows).argsort(stable=True)

    def block(self, rows: Tensor, counts: Tensor) -> Tensor:
        """The experts' matrices around their activation; `counts` [here]."""
        ends = counts.cumsum(0, dtype=torch.int32)
        up, down = self.up.weight.to(self.compute), self.down.weight.to(self.compute)
        grouped = self.kernels.grouped
        if self.gated:
            return grouped(self.activation(grouped(rows, self.gate.weight.to(self.compute), ends)) * grouped(rows, up, ends), down, ends)
        return grouped(self.activation(grouped(rows, up, ends)), down, ends)


def route(logits: Tensor, top_k: int, score: str) -> tuple[Tensor, Tensor, Tensor]:
    """Scores [n, experts] in fp32, and of the k largest their share [n, k] (one alone: its score, or it would have no gradient) and their number."""
    scores = logits.float()
    scores = scores.softmax(-1) if score == "softmax" else scores.sigmoid()
    top, chosen = scores.topk(top_k, -1)
    return scores, top / top.sum(-1, keepdim=True) if top_k > 1 else top, chosen


def mixture(x: Tensor, router: nn.Linear, experts: Experts, top_k: int, score: str, aux_loss: float) -> Tensor:
    """The routed feed-forward block: x [batch, tokens, hidden] -> the same shape."""
    flat = x.view(-1, x.shape[-1])
    scores, share, chosen = route(router(flat), top_k, score)
    chosen = chosen.flatten()
    order = chosen.argsort(stable=True)
    token = order // top_k
    counts = torch.zeros(experts.all, dtype=chosen.dtype, device=x.device).scatter_add_(0, chosen, torch.ones_like(chosen))
    if aux_loss:
        share = AuxiliaryLoss.apply(share, aux_loss * balance(scores, counts))
    sorted_share = share.flatten()[order]
    if experts.recipe.moe_capacity_factor is not None:
        slot, each = slots_of(chosen[order], counts, experts.recipe.moe_capacity_factor)
        token = _placed(token, slot, each * experts.all)
        sorted_share = _placed(sorted_share, slot, each * experts.all)
        counts = torch.full_like(counts, each)
        del slot
    weights = sorted_share.unsqueeze(-1).to(experts.compute)
    del chosen, scores, share, sorted_share, order
    return Summed.apply(experts(flat, token, counts, weights), token, len(flat)).view(x.shape)


def slots_of(expert: Tensor, counts: Tensor, factor: float) -> tuple[Tensor, int]:
    """The slot of each row, given its expert in ascending order, and how many slots an expert has; rows beyond them share one more slot, the last."""
    each = slots(len(expert), len(counts), factor)
    place = torch.arange(len(expert), device=expert.device) - (counts.cumsum(0) - counts)[expert]
    return torch.where(place < each, expert * each + place, each * len(counts)), each


def _placed(values: Tensor, slot: Tensor, slots_: int) -> Tensor:
    """[slots]: values in their slots, zeros in those that stay empty; what is in the last slot of all is dropped."""
    return values.new_zeros(slots_ + 1).scatter(0, slot, values)[:-1]


def balance(scores: Tensor, counts: Tensor) -> Tensor:
    """E Σ f_i P_i: the share of the routed rows that expert i gets, times its mean score, summed; 1 where both are even (arXiv 2101.03961)."""
    return scores.shape[-1] * (counts / counts.sum() * scores.mean(0)).sum()


class AuxiliaryLoss(torch.autograd.Function):
    """Adds a loss that is not returned: its gradient enters where `x` has its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.dtype, loss.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        dtype, device = ctx.like
        return grads[0], torch.ones((), dtype=dtype, device=device)


class Rows(torch.autograd.Function):
    """Rows of x by index; backward adds them back, in place into zeros (autograd's own does so where nobody watches)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = len(x)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        index, = ctx.saved_tensors
        grad = grads[0]
        return grad.new_zeros(ctx.rows, grad.shape[1]).index_add_(0, index, grad), None


class Summed(torch.autograd.Function):
    """[n, hidden]: row i of x added to row index[i] of zeros; index_add would keep x, of which backward needs nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, n: int) -> Tensor:
        ctx.save_for_backward(index)
        return x.new_zeros(n, x.shape[1]).index_add_(0, index, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        index, = ctx.saved_tensors
        return grads[0].index_select(0, index), None, None


class Unsorted(torch.autograd.Function):
    """Row i of x becomes row index[i]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        return torch.empty_like(x).index_copy_(0, index, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        index, = ctx.saved_tensors
        return grads[0].index_select(0, index), None
