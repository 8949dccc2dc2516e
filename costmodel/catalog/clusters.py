"""Clusters: a number of GPUs on nodes of one shape, with the topology that follows."""

from costmodel.catalog.accelerators import AcceleratorEntry, accelerator, accelerator_entry, list_accelerators
from costmodel.catalog.nodes import NodeShape, node_shape
from costmodel.spec.base import PlanError
from costmodel.spec.cluster import Accelerator, Cluster, Level


def cluster(gpus: int | None = None, gpu: str | None = None, name: str | None = None, gpus_per_node: int | None = None,
            nodes: int | None = None) -> Cluster:
    """A cluster of `gpus` ranks, or of `nodes` nodes where only they are given.

    name: a node shape ("dgx_h100"); gpu: an accelerator ("h100"), whose default node shape is used where no name is
    given. gpus_per_node and nodes may use nodes in part. A level of the topology that would join one rank is left out.
    A CPU host takes any number of ranks, each with an equal share of its cores and memory.
    """
    for field, count in (("gpus", gpus), ("nodes", nodes), ("gpus_per_node", gpus_per_node)):
        if count is not None and count < 1:
            raise PlanError(f"cluster.{field}", count, "a job has at least one rank on one node.", f"Use {field} = 1.")
    device, shape = _device_and_shape(gpu, name)
    if gpus is None:
        if nodes is None:
            raise PlanError("cluster.gpus", None, "a cluster needs a number of GPUs or of nodes.", f"Use gpus = {shape.gpus_per_node}.")
        gpus = nodes * (gpus_per_node or shape.gpus_per_node)
    per_node = _gpus_per_node(gpus, shape, gpus_per_node, nodes)
    in_node = min(gpus, per_node)
    if shape.shared_host:
        device = _share_of_host(device, shape, in_node)
    return Cluster(name=shape.name, accelerator=device, gpus=gpus, gpus_per_node=per_node,
                   levels=_levels(device, shape, gpus, in_node), host_memory_bytes=shape.host_memory_bytes)


def _device_and_shape(gpu: str | None, name: str | None) -> tuple[Accelerator, NodeShape]:
    if gpu is None and name is None:
        raise PlanError("cluster.gpu", None, "a cluster needs an accelerator or a node shape.",
                        'Use gpu = "h100" or name = "dgx_h100".')
    if name is None:
        assert gpu is not None
        return accelerator(gpu), node_shape(accelerator_entry(gpu).node)
    shape = node_shape(name)
    if gpu is None:
        if not shape.accelerator:
            raise PlanError("cluster.gpu", None, f"{shape.name} takes any PCIe card, so the card must be named.", 'Use gpu = "l4".')
        return accelerator(shape.accelerator), shape
    entry = accelerator_entry(gpu)
    if not _fits(entry, shape):
        holds = shape.accelerator or "PCIe cards"
        family = entry.name.partition("_")[0]
        cards = [e.name for e in list_accelerators() if e.name.startswith(f"{family}_") and _fits(e, shape)]
        card = shape.accelerator or min(cards, key=lambda card: "pcie" not in card, default="l4")
        use = f'gpu = "{card}"'
        raise PlanError("cluster.gpu", gpu, f"{shape.name} holds {holds}, not {entry.name}.",
                        f'Use {use}, or name = "{entry.node}".')
    return accelerator(gpu), shape


def _fits(entry: AcceleratorEntry, shape: NodeShape) -> bool:
    """A node takes its own accelerator, one that calls it its default, or on a vendor-neutral server one of the same board."""
    if not shape.accelerator:
        return entry.form_factor == "pcie"
    if entry.name == shape.accelerator or entry.node == shape.name:
        return True
    return shape.kind in ("server", "board") and entry.node == accelerator_entry(shape.accelerator).node


def _gpus_per_node(gpus: int, shape: NodeShape, gpus_per_node: int | None, nodes: int | None) -> int:
    if nodes is not None and gpus_per_node is not None and nodes * gpus_per_node != gpus:
        raise PlanError("cluster.gpus", gpus, f"nodes * gpus_per_node = {nodes} * {gpus_per_node} = {nodes * gpus_per_node}.",
                        f"Use gpus = {nodes * gpus_per_node}, or leave one of the three out.")
    if nodes is not None and gpus % nodes:
        low = max(1, gpus // nodes) * nodes
        raise PlanError("cluster.gpus", gpus, f"{nodes} nodes are used evenly, so gpus must be a multiple of nodes.",
                        f"Use gpus = {low}, or leave nodes out.")
    default = gpus if shape.shared_host else shape.gpus_per_node
    per_node = gpus_per_node or (gpus // nodes if nodes else default)
    if per_node > shape.gpus_per_node and not shape.shared_host:
        field, value = ("gpus_per_node", per_node) if gpus_per_node else ("nodes", nodes)
        fix = shape.gpus_per_node if gpus_per_node else -(-gpus // shape.gpus_per_node)
        raise PlanError(f"cluster.{field}", value, f"one {shape.name} node holds {shape.gpus_per_node} GPUs, not {per_node}.",
                        f"Use {field} = {fix}, or another node shape.")
    if gpus > per_node and gpus % per_node:
        low = gpus // per_node * per_node
        raise PlanError("cluster.gpus", gpus, f"more than one node is used whole: gpus must be a multiple of gpus_per_node = {per_node}.",
                        f"Use gpus = {low} or {low + per_node}.")
    return per_node


def _share_of_host(device: Accelerator, shape: NodeShape, ranks: int) -> Accelerator:
    """One rank's share of a CPU host. A rank runs on one core at most; memory and its rate divide evenly."""
    part = shape.gpus_per_node / ranks
    return device.model_copy(update={
        "memory_bytes": shape.host_memory_bytes // ranks,
        "memory_bytes_per_s": device.memory_bytes_per_s * part,
        "flops_per_s": {dtype: rate * min(1.0, part) for dtype, rate in device.flops_per_s.items()},
        "link_bytes_per_s": device.link_bytes_per_s * part,
        "peer_bytes_per_s": device.peer_bytes_per_s * part,
    })


def _levels(device: Accelerator, shape: NodeShape, gpus: int, in_node: int) -> tuple[Level, ...]:
    """Innermost first: the scale-up link as far as it reaches, PCIe between the boards of a node that it does not join, then the network where
    these do not reach all."""
    domain = min(gpus, in_node * max(1, shape.scale_up_domain // shape.gpus_per_node)) if not shape.shared_host else in_node
    board = min(domain, shape.scale_up_domain) if not shape.shared_host else domain
    levels = []
    if board > 1:
        levels.append(Level(name=shape.scale_up, kind=shape.scale_up, domain=board, bytes_per_s=_scale_up_bytes_per_s(device, shape, board),
                            switch_reduces=device.switch_reduces and shape.scale_up_switched))
    if board < domain:
        levels.append(Level(name="boards", kind="pcie", domain=domain, bytes_per_s=device.pcie_bytes_per_s))
    if domain < gpus:
        levels.append(Level(name="network", kind=shape.network, domain=gpus, bytes_per_s=shape.network_bytes_per_s(in_node)))
    return tuple(levels)


def _scale_up_bytes_per_s(device: Accelerator, shape: NodeShape, domain: int) -> float:
    """One device's one-way rate: its whole scale-up rate behind a switch, its links to the peers in use on a mesh."""
    if shape.scale_up == "pcie":
        return device.pcie_bytes_per_s
    return min(device.link_bytes_per_s, device.peer_bytes_per_s * (domain - 1))
