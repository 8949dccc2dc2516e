# mypy: disable-error-code="no-untyped-call, no-any-return"
"""The device mesh of a run, with the axes that it uses: tp innermost, then dp_shard, dp_replicate, and pp outermost.

cp lies between tp and the data-parallel axes and is a part of them: state is sharded over dp_shard x cp, or gradients averaged over dp_replicate x cp.
"""

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from costmodel.spec import Run

ORDER = ("pp", "dp_replicate", "dp_shard", "tp")


def mesh_of(run: Run, device: str) -> DeviceMesh:
    """All axes above 1; and dp_shard where the plan shards parameters, whatever its degree."""
    p = run.plan
    sizes = {name: getattr(p, name) for name in ORDER}
    sizes["dp_shard" if p.zero else "dp_replicate"] *= p.cp
    names = tuple(name for name in ORDER if sizes[name] > 1 or name == "dp_shard" and p.zero == 3)
    return init_device_mesh(device, tuple(sizes[name] for name in names), mesh_dim_names=names)


def expert_mesh_of(run: Run, device: str) -> DeviceMesh:
    """The ranks once more, with ep, the innermost, apart from the ranks that have the same experts."""
    p = run.plan
    degrees = {name: degree for name, degree in (("pp", p.pp), ("dp_replicate", p.dp_replicate)) if degree > 1}
    degrees = {**degrees, "edp": p.expert_replicas, "ep": p.ep}
    return init_device_mesh(device, tuple(degrees.values()), mesh_dim_names=tuple(degrees))


def expert_group_of(run: Run, mesh: DeviceMesh) -> Any:
    """This rank's ep group: one of its own also where a mesh would take that of dp_shard, so that rows need not queue behind parameters."""
    if run.plan.ep < run.plan.state_shards:
        return mesh.get_group("ep")
    return dist.new_subgroups_by_enumeration(mesh.mesh.view(-1, run.plan.ep).tolist())[0]


def groups_of(mesh: DeviceMesh) -> dict[str, Any]:
    """The process group of this rank along each axis."""
    return {name: mesh.get_group(name) for name in mesh.mesh_dim_names or ()}
