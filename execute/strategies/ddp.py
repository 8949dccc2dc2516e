# mypy: disable-error-code="no-untyped-call, no-any-return, misc"
"""DistributedDataParallel: every rank has all state; gradients are all-reduced in buckets during backward.

Shards nothing. Sends an all-reduce of each bucket, in the dtype of the parameters, overlapping backward; with accumulation once per step
(no_sync), unless plan.sync_each_micro_batch.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch.distributed as dist
from torch import nn

from costmodel.spec import Plan, Run
from execute import compat
from execute.optim import hidden_matrices, make_optimizer
from execute.strategies import Prepared, Region, no_region
from execute.strategies.buckets import EmulatedReducer


def shard(run: Run, model: nn.Module, device: str = "cpu") -> None:
    """Nothing."""


def prepare(run: Run, model: nn.Module, *, dry: bool, region: Region = no_region) -> Prepared:
    """The replicated model with its optimizer."""
    prepared = replicate(run, model, dry=dry, region=region)
    prepared.optimizer = make_optimizer(run.recipe.optimizer, model.parameters(), hidden_matrices(model))
    return prepared


def replicate(run: Run, model: nn.Module, *, dry: bool, region: Region) -> Prepared:
    """DDP around a model, without an optimizer: the real one, or its buckets re-enacted on fake tensors."""
    axis = "dp_shard" if run.plan.zero else "dp_replicate"
    axes = {axis: dist.group.WORLD}
    every = run.plan.sync_each_micro_batch
    if dry:
        reducer = EmulatedReducer(list(model.parameters()), run.plan, region)
        return Prepared(model, None, micro_batch=lambda last: reducer.micro_batch(last or every),  # type: ignore[arg-type]
                        after_backward=lambda last: reducer.finish() if last or every else None, axes=axes)
    replica = real_ddp(model, run.plan, region)

    @contextmanager
    def micro_batch(last: bool) -> Iterator[None]:
        with nullcontext() if last or every else replica.no_sync():
            yield

    return Prepared(replica, None, micro_batch=micro_batch, axes=axes)  # type: ignore[arg-type]


def real_ddp(model: nn.Module, plan: Plan, region: Region = no_region, group: dist.ProcessGroup | None = None) -> nn.parallel.DistributedDataParallel:
    """torch's DDP with the plan's bucket caps; the model's buffers are constants and are not broadcast.

    Its reducer allocates buckets when it is built and, once, at the start of a forward: `region` is told of both.
    """
    with compat.ddp_bucket_caps(plan.first_bucket_bytes, plan.bucket_bytes), warnings.catch_warnings(), region("ddp.buckets"):
        warnings.simplefilter("ignore", FutureWarning)
        replica = nn.parallel.DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=plan.gradient_as_bucket_view,
                                                      broadcast_buffers=False)
    compat.around_ddp_forward(replica, lambda: region("ddp.buckets"))
    return replica
