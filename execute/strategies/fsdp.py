# mypy: disable-error-code="no-untyped-call, no-any-return, misc"
"""FSDP2 (ZeRO-3): fully_shard on every layer and on the root, which holds the embedding, the final norm and the head.

Shards: parameters, gradients, optimizer state, dim 0 of each tensor over dp_shard. Sends, per micro-batch: an all-gather of each group
before its forward and, where it was resharded, before its backward; a reduce-scatter of its gradients after it. HSDP: a mesh
(dp_replicate, dp_shard) adds an all-reduce of the sharded gradients. Experts spread over an ep group are fully_shard'ed apart, over the ranks that
have the same ones.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from costmodel.spec import Run
from execute.dtypes import DTYPES
from execute.experts import Experts
from execute.optim import Several, make_optimizer
from execute.strategies import Prepared, Region, no_region
from execute.strategies.mesh import expert_group_of, expert_mesh_of, groups_of, mesh_of


class Spread(NamedTuple):
    """The ranks over which experts lie: those that have the same ones, and this rank's ep group."""

    over: DeviceMesh
    group: Any


def spread_of(run: Run, device: str) -> Spread | None:
    """None where every rank has all experts."""
    if run.plan.ep == 1:
        return None
    mesh = expert_mesh_of(run, device)
    return Spread(mesh["dp_replicate", "edp"] if run.plan.dp_replicate > 1 else mesh["edp"], expert_group_of(run, mesh))


def shard(run: Run, model: nn.Module, device: str = "cpu", mesh: DeviceMesh | None = None, spread: Spread | None = None) -> None:
    """fully_shard each layer, then the root. Called on the meta device: no memory, and quick at any world size.

    `mesh` has all axes of the run; the data-parallel ones are taken from it. `spread`: of the stages of one rank, which share it.
    """
    p, precision = run.plan, run.recipe.precision
    mesh = mesh or mesh_of(run, device)
    mesh = mesh["dp_replicate", "dp_shard"] if p.dp_replicate > 1 else mesh["dp_shard"]
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[precision.compute], reduce_dtype=DTYPES[precision.reduce])
    where = CPUOffloadPolicy(pin_memory=False) if p.offload == "params" else OffloadPolicy()  # fake memory cannot be page-locked
    layers = list(model.get_submodule("layers").children())
    if spread := spread or spread_of(run, device):
        shard_experts(run, model, spread, policy)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=p.reshard_after_forward, offload_policy=where)
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=where)
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
    prepared = Prepared(model, optimizer_of(run, model), micro_batch=micro_batch, axes=groups_of(first.device_mesh))
    if run.plan.ep > 1:
        _with_experts(run, prepared)
    return prepared


def shard_experts(run: Run, model: nn.Module, spread: Spread, policy: MixedPrecisionPolicy) -> None:
    """fully_shard the experts of each layer over the ranks that have the same ones: by experts, or where those do not divide by the rows of each."""
    p = run.plan
    for experts in _experts(model):
        experts.group = spread.group
        by_rows = (lambda parameter: Shard(1)) if experts.here % p.expert_replicas else None
        fully_shard(experts, mesh=spread.over, mp_policy=policy, reshard_after_forward=p.reshard_after_forward, shard_placement_fn=by_rows)


def _experts(model: nn.Module) -> list[Experts]:
    return [module for module in model.modules() if isinstance(module, Experts)]


class SpreadExperts:
    """What differs where experts are spread: their own optimizer (fused kernels take no weights of two meshes), the mean of their gradients over all
    ranks (FSDP2 divides by the ranks that have the same ones alone), and a norm over both meshes."""

    def __init__(self, run: Run, model: nn.Module) -> None:
        self.run, experts = run, _experts(model)
        self.spread = [p for one in experts for p in one.parameters()]
        chosen = {id(p) for p in self.spread}
        self.rest = [p for p in model.parameters() if id(p) not in chosen]
        first = self.spread[0]
        assert isinstance(first, DTensor)
        self.group = experts[0].group
        self.axes = {"edp": first.device_mesh.get_group("edp"), "ep": self.group}

    def mean(self) -> None:
        """FSDP2's mean of the experts' gradients becomes that over all ranks."""
        torch._foreach_div_([p.grad for p in self.spread if p.grad is not None], self.run.plan.ep)

    def norm(self) -> Tensor:
        """Of the gradients of all that the ranks of a stage hold."""
        both = [torch.nn.utils.get_total_norm([p.grad for p in part if p.grad is not None]) for part in (self.rest, self.spread)]
        norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in both]
        square = norms[1].square()
        dist.all_reduce(square, group=self.group)
        return (norms[0].square() + square).sqrt()

    def scale(self, max_norm: float, total: Tensor) -> None:
        for part in (self.rest, self.spread):
            torch.nn.utils.clip_grads_with_norm_(part, max_norm, total)


def optimizer_of(run: Run, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a model, or of a stage of one: two where experts are spread."""
    mine = {id(p) for experts in _experts(model) for p in experts.parameters()} if run.plan.ep > 1 else set()
    parts = [[p for p in model.parameters() if (id(p) in mine) is inside] for inside in (False, True)]
    made = [make_optimizer(run.recipe.optimizer, part) for part in parts if part]
    return made[0] if len(made) == 1 else Several(*made)


def _with_experts(run: Run, prepared: Prepared) -> None:
    experts = SpreadExperts(run, prepared.model)
    prepared.axes = {**prepared.axes, **experts.axes}

    def after_backward(last: bool) -> None:
        if last:
            experts.mean()

    @torch.no_grad()
    def clip(max_norm: float) -> Tensor:
        total = experts.norm()
        experts.scale(max_norm, total)
        return total

    prepared.after_backward, prepared.clip = after_backward, clip
