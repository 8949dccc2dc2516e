# mypy: disable-error-code="no-untyped-call, no-any-return, misc"
"""ZeRO-2 in plain PyTorch, which has none: gradients and optimizer state sharded, parameters whole.

The parameters of a bucket (in reverse order of registration, up to plan.bucket_bytes) are views of one flat tensor, padded to a
multiple of the ranks. In backward, when the last gradient of a bucket arrives, the bucket's gradients are copied into a flat one and
freed; it is reduce-scattered while backward goes on, and freed when the next bucket is full; each rank keeps its 1/n. The optimizer
updates this rank's slice of the flat parameters, and an all-gather in place restores the rest. Sends a reduce-scatter and an all-gather
of each bucket. Without plan.sync_each_micro_batch, gradients of earlier micro-batches accumulate whole.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from costmodel.spec import Run
from execute import compat
from execute.optim import make_optimizer
from execute.strategies import Prepared, Region, no_region


def shard(run: Run, model: nn.Module, device: str = "cpu") -> None:
    """Nothing on the meta device: flat buffers are made when the parameters have storage."""


def prepare(run: Run, model: nn.Module, *, dry: bool, region: Region = no_region) -> Prepared:
    """The model over flat parameters, the optimizer over this rank's slices."""
    reducer = ShardingReducer(list(model.parameters()), run.plan.bucket_bytes, region)
    optimizer = make_optimizer(run.recipe.optimizer, [b.shard for b in reducer.buckets])
    every = run.plan.sync_each_micro_batch

    @contextmanager
    def micro_batch(last: bool) -> Iterator[None]:
        reducer.syncing = last or every
        yield

    def step() -> None:
        optimizer.step()
        reducer.gather()

    def zero_grad(set_to_none: bool) -> None:
        optimizer.zero_grad(set_to_none)
        model.zero_grad(set_to_none)

    return Prepared(model, optimizer, micro_batch=micro_batch, after_backward=lambda last: reducer.finish(), clip=reducer.clip, step=step,
                    zero_grad=zero_grad, axes={"dp_shard": dist.group.WORLD})


class _Bucket:
    """A flat parameter tensor and this rank's slice of it."""

    def __init__(self, params: list[nn.Parameter], world: int, rank: int) -> None:
        self.params = params
        numel = sum(p.numel() for p in params)
        self.slice = -(-numel // world)
        with torch.no_grad():
            self.flat = params[0].new_zeros(self.slice * world)
            self.offset: dict[nn.Parameter, int] = {}
            at = 0
            for p in params:
                self.offset[p] = at
                view = self.flat[at:at + p.numel()].view(p.shape)
                view.copy_(p)
                p.data = view
                at += p.numel()
        self.shard = nn.Parameter(self.flat[rank * self.slice:(rank + 1) * self.slice])
        self.pending = len(params)


class ShardingReducer:
    """The hooks and buckets of ZeRO-2."""

    def __init__(self, params: list[nn.Parameter], bucket_bytes: int, region: Region) -> None:
        self.region, self.syncing = region, True
        self.world, rank = dist.get_world_size(), dist.get_rank()
        backward_order = params[::-1]
        groups = compat.bucket_assignment(list(backward_order), [bucket_bytes], list(range(len(params))))
        self.buckets = [_Bucket([backward_order[i] for i in group], self.world, rank) for group in groups]
        self.bucket_of = {p: b for b in self.buckets for p in b.params}
        self.flying: tuple[_Bucket, Tensor, Tensor, dist.Work] | None = None
        for p in params:
            p.register_post_accumulate_grad_hook(self._ready)

    def _ready(self, p: nn.Parameter) -> None:
        if not self.syncing:
            return
        bucket = self.bucket_of[p]
        bucket.pending -= 1
        if bucket.pending == 0:
            bucket.pending = len(bucket.params)
            self._reduce(bucket)

    @torch.no_grad()
    def _reduce(self, bucket: _Bucket) -> None:
        """Free the flat gradient in flight, flatten this bucket's gradients, start their reduce-scatter."""
        self._land()
        with self.region("zero2.flatten"):
            flat = torch.empty_like(bucket.flat)
            for p, at in bucket.offset.items():
                assert p.grad is not None
                flat[at:at + p.numel()].view(p.shape).copy_(p.grad)
                p.grad = None
            flat[sum(p.numel() for p in bucket.params):].zero_()
            mine = flat.new_empty(bucket.slice)
        work = compat.reduce_scatter(mine, flat, op=dist.ReduceOp.AVG, async_op=True)
        self.flying = bucket, flat, mine, work

    def _land(self) -> None:
        """Wait for the reduce-scatter in flight, keep its slice, free its flat gradient."""
        if self.flying is None:
            return
        bucket, _, mine, work = self.flying
        self.flying = None
        work.wait()
        if bucket.shard.grad is None:
            bucket.shard.grad = mine
        else:
            bucket.shard.grad += mine

    @torch.no_grad()
    def finish(self) -> None:
        self._land()

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        """Clip by the norm over all ranks: each rank's norm squared, summed by an all-reduce of one number."""
        shards = [b.shard for b in self.buckets]
        square = get_total_norm([s.grad for s in shards if s.grad is not None]).square()
        dist.all_reduce(square)
        total = square.sqrt()
        clip_grads_with_norm_(shards, max_norm, total)
        return total

    @torch.no_grad()
    def gather(self) -> None:
        """Restore the whole parameters from the updated slices, in place."""
        for bucket in self.buckets:
            compat.all_gather(bucket.flat, bucket.shard.data)
