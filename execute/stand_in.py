# mypy: disable-error-code="no-untyped-call, no-any-return, misc, override, assignment"
"""A process group of one process that plays one rank of many: what the others would send is made up, and nobody waits for them.

A gathered or received tensor is random, like initial weights, so that kernels see neither zeros nor NaNs (a GPU runs faster on values that
it can predict). A reduction leaves what this rank gave. Made-up values are copied on the stream that asked for them, at the speed of the
device's memory, as NCCL writes what it receives.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from execute import compat

BACKEND = "stand_in"
DEVIATION = 0.02
POOL = 1 << 23
"""Random values kept to copy from, by dtype: a large allocation of its own, which is left out of what is measured."""


class Others:
    """The random values of the ranks that are not here."""

    def __init__(self) -> None:
        self.pools: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    @torch.no_grad()
    def fill(self, tensor: Tensor) -> None:
        """Write random values into a contiguous floating tensor. No operation of the program, so nobody watches."""
        with compat.unwatched():
            self._fill(tensor)

    def _fill(self, tensor: Tensor) -> None:
        key = tensor.device, tensor.dtype
        if key not in self.pools:
            self.pools[key] = torch.empty(POOL, dtype=tensor.dtype, device=tensor.device).normal_(0.0, DEVIATION)
            if tensor.is_cuda:
                torch.cuda.synchronize(tensor.device)  # every stream may read it from now on
        pool, flat = self.pools[key], tensor.view(-1)
        whole = flat.numel() // POOL * POOL
        if whole:
            rows = flat[:whole].view(-1, POOL)
            rows.copy_(pool.expand_as(rows))
        flat[whole:].copy_(pool[:flat.numel() - whole])

    @property
    def bytes(self) -> int:
        """What the values themselves take."""
        return sum(pool.nbytes for pool in self.pools.values())


class StandIn(dist.ProcessGroup):
    """Answers every collective at once. PyTorch has two names for some of them, by version."""

    others = Others()

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._rank, self._size = rank, size

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        return compat.registered_name(self)

    # what is already so

    def allreduce(self, tensors: list[Tensor], *options: Any, **more: Any) -> Any:
        """The only one whose result is read off its work: DDP's reducer does."""
        return compat.finished_work(tensors)

    def nothing(self, *arguments: Any, **options: Any) -> Any:
        return compat.finished_work([])

    allreduce_coalesced = broadcast = reduce = send = barrier = nothing

    # this rank's part of a sum

    def reduce_scatter(self, mine: list[Tensor], parts: list[list[Tensor]], *options: Any, **more: Any) -> Any:
        for own, each in zip(mine, parts, strict=True):
            own.copy_(each[self._rank])
        return self.nothing()

    def reduce_scatter_single(self, mine: Tensor, full: Tensor, *options: Any, **more: Any) -> Any:
        mine.copy_(full.view(self._size, -1)[self._rank].view_as(mine))
        return self.nothing()

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, mine: list[Tensor], full: list[Tensor], *options: Any, **more: Any) -> Any:
        for own, whole in zip(mine, full, strict=True):
            self.reduce_scatter_single(own, whole)
        return self.nothing()

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # what the others would send

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], *options: Any, **more: Any) -> Any:
        for parts, mine in zip(outputs, inputs, strict=True):
            for rank, part in enumerate(parts):
                if rank == self._rank or not part.is_floating_point():
                    part.copy_(mine)
                else:
                    self.others.fill(part)
        return self.nothing()

    def all_gather_single(self, full: Tensor, mine: Tensor, *options: Any, **more: Any) -> Any:
        """`mine` may lie inside `full`. Where a gather is of bytes, not of numbers, this rank's part is repeated: random bytes may be NaNs."""
        rows = full.view(self._size, -1)
        for theirs in (rows[:self._rank], rows[self._rank + 1:]):
            if full.is_floating_point():
                self.others.fill(theirs)
            else:
                theirs.copy_(mine.reshape(1, -1).expand_as(theirs))
        own = rows[self._rank]
        if own.data_ptr() != mine.data_ptr():
            own.copy_(mine.reshape(-1))
        return self.nothing()

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, full: list[Tensor], mine: list[Tensor], *options: Any, **more: Any) -> Any:
        for one, part in zip(full, mine, strict=True):
            self.all_gather_single(one, part)
        return self.nothing()

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def all_to_all_single(self, theirs: Tensor, mine: Tensor, receive: Sequence[int] = (), send: Sequence[int] = (), *options: Any, **more: Any) -> Any:
        """Equal parts, or rows as the splits say. Whole numbers are counts of what will be exchanged: the others send as much as they get."""
        if not theirs.is_floating_point():
            theirs.copy_(mine)
            return self.nothing()
        parts, own = (list(t.split(list(sizes)) if sizes else t.view(self._size, -1)) for t, sizes in ((theirs, receive), (mine, send)))
        for rank, part in enumerate(parts):
            if rank == self._rank:
                part.copy_(own[rank])
            else:
                self.others.fill(part)
        return self.nothing()

    alltoall_base = all_to_all_single

    def recv(self, tensors: list[Tensor], *options: Any, **more: Any) -> Any:
        """A whole number is 1: with it the stages of a pipeline agree that each knows what it will receive."""
        for tensor in tensors:
            if tensor.is_floating_point():
                self.others.fill(tensor)
            else:
                tensor.fill_(1)
        return self.nothing()


@contextmanager
def stand_in_world(world_size: int, rank: int) -> Iterator[Others]:
    """A process group of any size in this process, for real tensors of the CPU or a GPU."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, lambda store, rank, size, timeout: StandIn(rank, size), devices=["cpu", "cuda"])
    StandIn.others = Others()
    try:
        with compat.world_of(BACKEND, world_size, rank):
            yield StandIn.others
    finally:
        StandIn.others = Others()
