# mypy: disable-error-code="no-untyped-call, no-any-return, misc"
"""nanochat's data parallelism, as karpathy/nanochat's optimizer has it (nanochat/optim.py, 2026-08): no wrapper, no hooks.

Under Muon the layers' matrices of one shape are views of one stack, padded with zero matrices to a multiple of the ranks, and their gradients are
views of another. Shards the optimizer's state: a rank has whole matrices of each stack, and rows of every other tensor of 1,024 elements or more.
Sends, at the step alone: a reduce-scatter of each stack and of each such tensor (an all-reduce of the smaller ones), in place, and when a part is
updated its all-gather, in place.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from costmodel.spec import Run
from costmodel.spec.run import SMALL_NUMEL
from execute import compat
from execute.muon import StackedMuon
from execute.optim import Several, hidden_matrices, optimizer_class
from execute.strategies import Prepared, Region, no_region


def shard(run: Run, model: nn.Module, device: str = "cpu") -> None:
    """Nothing on the meta device: stacks are made when the parameters have storage."""


def prepare(run: Run, model: nn.Module, *, dry: bool, region: Region = no_region) -> Prepared:
    """The model over stacks, with the optimizer that sends."""
    spread = Spread(run, model)
    axes = {"dp_shard": dist.group.WORLD} if spread.world > 1 else {}
    return Prepared(model, spread.optimizer, step=spread.step, zero_grad=spread.zero_grad, axes=axes)


class Stack:
    """The matrices of one shape, and their gradients; `mine` is this rank's part, a parameter of the optimizer."""

    def __init__(self, matrices: list[nn.Parameter], rank: int, world: int) -> None:
        first = matrices[0]
        owned = -(-len(matrices) // world)
        with torch.no_grad():
            self.whole = first.new_zeros((owned * world, *first.shape))
            self.grads = torch.zeros_like(self.whole)
            for i, p in enumerate(matrices):
                self.whole[i].copy_(p)
                p.data = self.whole[i]
                p.grad = self.grads[i]
        here = slice(rank * owned, (rank + 1) * owned)
        self.mine = nn.Parameter(self.whole[here])
        self.mine.grad = self.my_grads = self.grads[here]


class Rows:
    """Any other tensor: `mine` are this rank's rows of it, or all of a small one."""

    def __init__(self, p: nn.Parameter, rank: int, world: int) -> None:
        self.whole = p
        self.cut = world > 1 and p.numel() >= SMALL_NUMEL
        rows = p.shape[0] // world
        self.here = slice(rank * rows, (rank + 1) * rows) if self.cut else slice(None)
        self.mine = nn.Parameter(p.data[self.here]) if self.cut else p

    def reduce(self) -> dist.Work:
        grad = self.whole.grad
        assert grad is not None
        if not self.cut:
            return dist.all_reduce(grad, op=dist.ReduceOp.AVG, async_op=True)
        self.mine.grad = grad[self.here]
        return compat.reduce_scatter(self.mine.grad, grad, op=dist.ReduceOp.AVG, async_op=True)


class Spread:
    """The parts of a model, the optimizers over this rank's, and the step."""

    def __init__(self, run: Run, model: nn.Module) -> None:
        spec = run.recipe.optimizer
        self.world = run.plan.dp
        rank = dist.get_rank() if self.world > 1 else 0
        by_shape: dict[torch.Size, list[nn.Parameter]] = {}
        for p in hidden_matrices(model) if spec.name == "muon" else ():
            by_shape.setdefault(p.shape, []).append(p)
        stacked = {id(p) for matrices in by_shape.values() for p in matrices}
        self.stacks = [Stack(by_shape[shape], rank, self.world) for shape in sorted(by_shape)]
        self.rest = [Rows(p, rank, self.world) for p in model.parameters() if id(p) not in stacked]
        kind, arguments = optimizer_class(spec.model_copy(update={"name": "adamw"}))
        self.adamw = kind([r.mine for r in self.rest], **arguments)
        self.muons = [StackedMuon([s.mine], spec.lr, spec.momentum, spec.weight_decay) for s in self.stacks]
        self.optimizer = Several(self.adamw, *self.muons)

    @torch.no_grad()
    def step(self) -> None:
        """Issue every reduction; part by part wait, update and issue the gather; wait for the gathers."""
        if self.world == 1:
            self.optimizer.step()
            return
        rest = [r.reduce() for r in self.rest]
        stacks = [compat.reduce_scatter(s.my_grads, s.grads, op=dist.ReduceOp.AVG, async_op=True) for s in self.stacks]
        for work in rest:
            work.wait()
        self.adamw.step()
        gathers = [_gather(r.whole, r.mine) for r in self.rest if r.cut]
        for s, work, muon in zip(self.stacks, stacks, self.muons, strict=True):
            work.wait()
            muon.step()
            gathers.append(_gather(s.whole, s.mine))
        for gather in gathers:
            gather.wait()

    def zero_grad(self, set_to_none: bool) -> None:
        """Stacks are zeroed in place, for their gradients must stay views; the others go."""
        for r in self.rest:
            r.whole.grad = r.mine.grad = None
        for s in self.stacks:
            s.grads.zero_()


def _gather(whole: Tensor, mine: Tensor) -> dist.Work:
    return compat.all_gather(whole.data, mine.data, async_op=True)
