# mypy: disable-error-code="no-untyped-call, no-any-return, misc"
"""DDP's gradient buckets, re-enacted in Python with gradient hooks: the C++ reducer refuses fake tensors.

What torch.nn.parallel.DistributedDataParallel's reducer allocates, copies and sends, in its order
(torch/csrc/distributed/c10d/reducer.cpp: initialize_buckets, mark_variable_ready_dense, mark_bucket_ready, finalize_bucket_dense,
rebuild_buckets), without its map of used parameters (4 bytes each, on host and device). Checked against the real one in tests/execute/test_real_ddp.py.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from costmodel.spec import Plan
from execute import compat
from execute.strategies import Region


class _Bucket:
    """Some parameters and the flat tensor that carries their gradients."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params
        self.flat = torch.empty(sum(p.numel() for p in params), dtype=params[0].dtype, device=params[0].device)
        self.views: dict[nn.Parameter, Tensor] = {}
        offset = 0
        for p in params:
            self.views[p] = self.flat[offset:offset + p.numel()].view(p.shape)
            offset += p.numel()
        self.pending = len(params)
        self.work: dist.Work | None = None


class EmulatedReducer:
    """Buckets of one replica. `first_pass` has a single bucket; the second is rebuilt in the order in which gradients arrived."""

    def __init__(self, params: list[nn.Parameter], plan: Plan, region: Region, group: dist.ProcessGroup | None = None) -> None:
        self.params, self.plan, self.region = params, plan, region
        self.group, self.world = group, dist.get_world_size(group)
        self.arrived: list[nn.Parameter] = []
        self.rebuilt = False
        self.syncing = True
        self.next_bucket = 0
        self.buckets: list[_Bucket] = []
        self.bucket_of: dict[nn.Parameter, _Bucket] = {}
        self._build(params, [sys.maxsize], reverse=True)
        for p in params:
            p.register_post_accumulate_grad_hook(self._ready)

    def _build(self, params: list[nn.Parameter], limits: list[int], *, reverse: bool) -> None:
        groups = compat.bucket_assignment(list(params), limits, [] if reverse else list(range(len(params))))
        self.buckets, self.bucket_of = [], {}
        with self.region("ddp.buckets"):
            for group in reversed(groups) if reverse else groups:
                self.buckets.append(_Bucket([params[i] for i in group]))
        self.bucket_of = {p: b for b in self.buckets for p in b.params}
        if self.plan.gradient_as_bucket_view:
            for p in params:
                if p.grad is not None:
                    p.grad = self.bucket_of[p].views[p]

    def before_forward(self) -> None:
        """Rebuild once, when a synchronised backward has told the order."""
        if not self.rebuilt and len(self.arrived) == len(self.params):
            self.rebuilt = True
            first, cap = self.plan.first_bucket_bytes, self.plan.bucket_bytes
            self._build(self.arrived, [first, cap], reverse=False)

    @torch.no_grad()
    def _ready(self, p: nn.Parameter) -> None:
        if not self.syncing:
            return
        if not self.rebuilt:
            self.arrived.append(p)
        bucket = self.bucket_of[p]
        view = bucket.views[p]
        assert p.grad is not None
        if compat.storage_key(p.grad.untyped_storage()) == compat.storage_key(view.untyped_storage()):
            view.div_(self.world)
        else:
            torch.mul(p.grad, 1.0 / self.world, out=view)
            if self.plan.gradient_as_bucket_view:
                p.grad = view
        bucket.pending -= 1
        while self.next_bucket < len(self.buckets) and self.buckets[self.next_bucket].pending == 0:
            ready = self.buckets[self.next_bucket]
            ready.work = dist.all_reduce(ready.flat, group=self.group, async_op=True)
            self.next_bucket += 1

    @torch.no_grad()
    def finish(self) -> None:
        """The end of a synchronised backward: wait, and copy the reduced buckets back unless gradients are views of them."""
        if not self.syncing:
            return
        for bucket in self.buckets:
            assert bucket.work is not None
            bucket.work.wait()
            bucket.work, bucket.pending = None, len(bucket.params)
            if not self.plan.gradient_as_bucket_view:
                for p in bucket.params:
                    assert p.grad is not None
                    p.grad.copy_(bucket.views[p])
        self.next_bucket = 0

    @contextmanager
    def micro_batch(self, sync: bool) -> Iterator[None]:
        """Around the forward and backward of a micro-batch; without `sync` it is DDP's no_sync."""
        self.syncing = sync
        self.before_forward()
        yield
        self.syncing = True
