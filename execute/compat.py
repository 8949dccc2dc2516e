# mypy: disable-error-code="no-untyped-call, no-any-return, misc"
"""Every private import from PyTorch, and every patch of it, in one place; tests hold it against the pinned version."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass

__all__ = ["DTensor", "FSDPParamGroup", "FakeTensor", "FakeTensorMode", "Partial", "QuietStage", "TorchDispatchMode", "all_gather", "all_to_all",
           "allocator_settings", "around_ddp_forward", "assume_static", "bucket_assignment", "clear_cublas_workspaces", "ddp_bucket_caps",
           "engine_would_add_in_place", "exchange", "fake_world", "finished_work", "fsdp_groups", "group_by_name", "inner_tensors",
           "materialise", "reduce_scatter", "registered_name", "storage_key", "unsharded_gradients", "unwatched", "waits_for_fake",
           "watch_fsdp", "watch_resize", "watch_sharding_propagation", "watch_transfers", "world_of"]

Mark = Callable[[str], AbstractContextManager[Any]]


def fake_world(world_size: int, rank: int) -> AbstractContextManager[None]:
    """A process group of any size in this process; its collectives return at once and move nothing."""
    return world_of("fake", world_size, rank)


@contextlib.contextmanager
def world_of(backend: str, world_size: int, rank: int) -> Iterator[None]:
    """A process group of any size that lives in this process alone: no store is asked for the others.

    DTensor's cached decisions name process groups, so they end with the world; that a mesh of several axes is reduced axis by axis is known.
    """
    redistribution = logging.getLogger("torch.distributed.tensor._redistribute")
    level = redistribution.level
    redistribution.setLevel(logging.ERROR)
    dist.init_process_group(backend, store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()
        redistribution.setLevel(level)


def group_by_name(name: str) -> dist.ProcessGroup | None:
    """The process group that a functional collective names; None where it is no group's name."""
    try:
        return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]
    except (ValueError, RuntimeError, LookupError):
        return None


def registered_name(group: dist.ProcessGroup) -> str:
    """The name under which a process group written in Python is known."""
    name: str = dist.distributed_c10d._world.pg_names[group]
    return name


def finished_work(tensors: list[Tensor]) -> dist.Work:
    """What a collective returns that is done, with its results: DDP reads them."""
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=list({t.device for t in tensors if t.is_cuda}))
    future.set_result(tensors)
    return _create_work_from_future(future)


def allocator_settings(words: str) -> None:
    """Settings of the GPU's caching allocator, as PYTORCH_CUDA_ALLOC_CONF writes them; for what is allocated from now on."""
    torch._C._accelerator_setAllocatorSettings(words)


def clear_cublas_workspaces() -> None:
    """Give cuBLAS's workspaces back to the caching allocator."""
    torch._C._cuda_clearCublasWorkspaces()


def unwatched() -> AbstractContextManager[Any]:
    """What happens inside is no operation of the program: no dispatch mode sees it."""
    return _disable_current_modes()


@contextlib.contextmanager
def watch_transfers(around: Callable[[Tensor], AbstractContextManager[Any]]) -> Iterator[None]:
    """FSDP2's copies between a device and its host (`Tensor.to(device, non_blocking=...)`), made where both are the CPU, and PyTorch would make none.

    A patch, not a torch function mode: the engine runs FSDP2's backward hooks without those.
    """
    plain = torch.Tensor.to

    @functools.wraps(plain)
    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if "non_blocking" in kwargs and len(args) == 1 and isinstance(args[0], torch.device):
            with around(self):
                return self.clone()
        return plain(self, *args, **kwargs)

    torch.Tensor.to = to  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del torch.Tensor.to


def storage_key(storage: torch.UntypedStorage) -> int:
    """What two views of one storage have in common while it lives."""
    return storage._cdata


def inner_tensors(value: Any) -> Iterator[Tensor]:
    """The plain tensors inside a result: lists are walked, DTensor and other wrappers opened."""
    if isinstance(value, Tensor):
        if is_traceable_wrapper_subclass(value):
            for name in value.__tensor_flatten__()[0]:
                yield from inner_tensors(getattr(value, name))
        else:
            yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from inner_tensors(item)


def materialise(model: nn.Module, make: Callable[[Tensor], Tensor]) -> None:
    """Give a model built on the meta device its storage: `make` gets each (local) tensor and returns its replacement.

    `to_empty` fails inside FakeTensorMode, and shards must come back as DTensors.
    """
    def replace(t: Tensor) -> Tensor:
        if not isinstance(t, DTensor):
            return make(t)
        return DTensor.from_local(make(t._local_tensor), t.device_mesh, t.placements, run_check=False, shape=t.shape, stride=t.stride())

    with torch.no_grad():
        model._apply(replace)


def fsdp_groups(model: nn.Module) -> list[FSDPParamGroup]:
    """The parameter groups of an FSDP2 model, one per fully_shard call."""
    groups = []
    for module in model.modules():
        state = getattr(module, "_get_fsdp_state", lambda: None)()
        if state is not None:
            groups += list(getattr(state, "_fsdp_param_groups", None) or [g for g in [getattr(state, "_fsdp_param_group", None)] if g])
    return groups


@contextlib.contextmanager
def _patched(owner: type, names: tuple[str, ...], wrap: Callable[[str, Any], Any]) -> Iterator[None]:
    originals = {name: owner.__dict__[name] for name in names}
    for name, original in originals.items():
        setattr(owner, name, wrap(name, original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(owner, name, original)


FSDP_METHODS = ("unshard", "wait_for_unshard", "reshard", "pre_forward", "post_forward", "pre_backward", "post_backward", "finalize_backward",
                "lazy_init")


@contextlib.contextmanager
def watch_fsdp(mark: Mark, before: Callable[[FSDPParamGroup, str], None]) -> Iterator[None]:
    """Run FSDP2's hooks inside `mark("fsdp.<hook>")`, after telling `before` which group and hook; backward's closing hook too."""
    def wrap(name: str, original: Any) -> Any:
        @functools.wraps(original)
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            before(self, name)
            with mark(f"fsdp.{name}"):
                return original(self, *args, **kwargs)
        return hook

    def wrap_final(name: str, original: Any) -> Any:
        @functools.wraps(original)
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            with mark("fsdp.end_of_backward"):
                return original(self, *args, **kwargs)
        return hook

    with _patched(FSDPParamGroup, FSDP_METHODS, wrap), _patched(FSDPState, ("_root_post_backward_final_callback",), wrap_final):
        yield


@contextlib.contextmanager
def watch_sharding_propagation(pause: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Run DTensor's shape propagation inside `pause()`: it makes fake tensors of global shape that are no memory of the step."""
    def wrap(name: str, original: Any) -> Any:
        @functools.wraps(original)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            with pause():
                return original(self, *args, **kwargs)
        return method

    with _patched(ShardingPropagator, ("_propagate_tensor_meta_non_cached", "propagate_op_sharding_non_cached"), wrap):
        yield


@contextlib.contextmanager
def watch_resize(after: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Tell `after` about every storage that is resized: FSDP2 frees that way, and it is not a dispatched operation."""
    original = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        result = original(self, size)
        after(self)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]


def unsharded_gradients(group: FSDPParamGroup) -> list[Tensor]:
    """The whole gradients that an FSDP2 group holds until it has reduced them."""
    found = []
    for p in group.fsdp_params:
        found += [p.unsharded_accumulated_grad, p._unsharded_param.grad if hasattr(p, "_unsharded_param") else None]
    return [g for g in found if g is not None]


def bucket_assignment(tensors: list[Tensor], limits: list[int], order: list[int]) -> list[list[int]]:
    """DDP's buckets over `tensors`, taken as they come (`order` gives their indices), by its own C++ function."""
    groups: list[list[int]] = dist._compute_bucket_assignment_by_size(tensors, limits, [False] * len(tensors), order)[0]  # type: ignore[attr-defined]
    return groups


@contextlib.contextmanager
def ddp_bucket_caps(first_bytes: int, bytes_cap: int) -> Iterator[None]:
    """DDP's default bucket caps inside; given as an argument, a cap would hold for the first bucket too."""
    from torch.nn.parallel import distributed as module
    defaults: tuple[tuple[Any, str, float], ...] = ((dist, "_DEFAULT_FIRST_BUCKET_BYTES", first_bytes),
                                                    (module, "_DEFAULT_BUCKET_CAP_MB", bytes_cap / (1 << 20)))
    before = [getattr(owner, name) for owner, name, _ in defaults]
    for owner, name, value in defaults:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name, _), value in zip(defaults, before, strict=True):
            setattr(owner, name, value)


def around_ddp_forward(replica: nn.parallel.DistributedDataParallel, around: Callable[[], AbstractContextManager[Any]]) -> None:
    """Run what DDP does before a forward (it rebuilds its buckets once) inside `around()`."""
    before = replica._pre_forward

    def pre_forward(*args: Any, **kwargs: Any) -> Any:
        with around():
            return before(*args, **kwargs)

    replica._pre_forward = pre_forward  # type: ignore[method-assign]


def all_gather(full: Tensor, mine: Tensor, group: Any = None, async_op: bool = False) -> Any:
    """dist.all_gather_into_tensor, which newer versions call all_gather_single."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(full, mine, group=group, async_op=async_op)


def all_to_all(x: Tensor, receive: list[int], send: list[int], group: Any) -> Tensor:
    """Rows to and from each rank of a group, waited for; its backward is the exchange back."""
    from torch.distributed._functional_collectives import all_to_all_single_autograd
    return all_to_all_single_autograd(x, receive, send, group).contiguous()


def reduce_scatter(mine: Tensor, full: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
    """dist.reduce_scatter_tensor, which newer versions call reduce_scatter_single."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(mine, full, op=op, group=group, async_op=async_op)


SEEN_FROM_DISPATCH = 4, 2
"""References to a tensor and to its storage, read inside __torch_dispatch__, when the engine's buffer holds the only real one."""


def engine_would_add_in_place(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether autograd's engine is adding a second gradient to one that it alone holds: then it adds in place.

    It does so for plain tensors only, so a dispatch mode or a fake tensor changes what is allocated.
    Source: torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace.
    """
    if func is not torch.ops.aten.add.Tensor or kwargs or len(args) != 2 or torch.is_grad_enabled() or torch._C._current_graph_task_id() == -1:
        return False
    old, new = args
    if not (isinstance(old, Tensor) and isinstance(new, Tensor)) or old.shape != new.shape or old.dtype != new.dtype:
        return False
    references: Any = old
    held = references._use_count(), torch._C._storage_Use_Count(storage_key(old.untyped_storage()))
    return held == SEEN_FROM_DISPATCH and bool(torch.ops.aten.is_non_overlapping_and_dense(old))


def waits_for_fake(func: Any, args: Any) -> bool:
    """Whether a functional collective on fake tensors is waited for: the real operation returns its argument, its meta kernel a copy.

    Source: torch/csrc/distributed/c10d/Functional.cpp, wait_tensor; torch/distributed/_functional_collectives.py, _wait_tensor_meta.
    """
    return func is torch.ops._c10d_functional.wait_tensor.default and isinstance(args[0], FakeTensor)


class QuietStage(PipelineStage):
    """A PipelineStage that makes its receive buffers inside `region`."""

    region: Mark = contextlib.nullcontext

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self.region("pipeline.buffers"):
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self.region("pipeline.buffers"):
            return super()._prepare_backward_infra(*args, **kwargs)


def assume_static(schedule: Any) -> None:
    """Let a pipeline's stages trust the metadata they were given: the vote on it reads values, which fake tensors do not have."""
    from torch.distributed.pipelining._utils import InferenceMode  # not in every version, and nothing else needs it

    def warmup(stages: list[PipelineStage], has_backward: bool, p2p_done: bool) -> None:
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    schedule._warmup_p2p = warmup


def exchange(operations: list[dist.P2POp]) -> None:
    """Send and receive, and wait for it."""
    from torch.distributed.pipelining.schedules import _batch_p2p, _wait_batch_p2p
    _wait_batch_p2p(_batch_p2p(operations))
