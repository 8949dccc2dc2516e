# mypy: disable-error-code="no-untyped-call, no-any-return, misc"
"""FSDP2 (ZeRO-3): fully_shard on every layer and on the root, which holds the embedding, the final norm and the head.

Shards: parameters, gradients, optimizer state, dim 0 of each tensor over dp_shard. Sends, per micro-batch: an all-gather of each group
before its forward and, where it was resharded, before its backward; a reduce-scatter of its gradients after it. HSDP: a mesh
(dp_replicate, dp_shard) adds an all-reduce of the sharded gradients.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from costmodel.spec import Run
from execute.dtypes import DTYPES
from execute.optim import make_optimizer
from execute.strategies import Prepared, Region, no_region
from execute.strategies.mesh import groups_of, mesh_of


def shard(run: Run, model: nn.Module, device: str = "cpu", mesh: DeviceMesh | None = None) -> None:
    """fully_shard each layer, then the root. Called on the meta device: no memory, and quick at any world size.

    `mesh` has all axes of the run; the data-parallel ones are taken from it.
    """
    p, precision = run.plan, run.recipe.precision
    mesh = mesh or mesh_of(run, device)
    mesh = mesh["dp_replicate", "dp_shard"] if p.dp_replicate > 1 else mesh["dp_shard"]
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[precision.compute], reduce_dtype=DTYPES[precision.reduce])
    layers = list(model.get_submodule("layers").children())
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=p.reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    sharded: list[FSDPModule] = [layer for layer in layers if isinstance(layer, FSDPModule)]
    for i, one in enumerate(sharded):
        if p.forward_prefetch:
            one.set_modules_to_forward_prefetch(sharded[i + 1:i + 1 + p.forward_prefetch])
        if not p.backward_prefetch:
            one.set_modules_to_backward_prefetch([one])  # itself, already gathered: nothing ahead


def prepare(run: Run, model: nn.Module, *, dry: bool, region: Region = no_region) -> Prepared:
    """The sharded model with its optimizer over the shards."""
    assert isinstance(model, FSDPModule)

    @contextmanager
    def micro_batch(last: bool) -> Iterator[None]:
        sync = last or run.plan.sync_each_micro_batch
        model.set_requires_gradient_sync(sync)
        yield

    first = next(model.parameters())
    assert isinstance(first, DTensor)
    return Prepared(model, make_optimizer(run.recipe.optimizer, model.parameters()), micro_batch=micro_batch, axes=groups_of(first.device_mesh))
