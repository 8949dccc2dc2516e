"""Node shapes of the catalogue: servers, cloud instances, racks and hosts, and the links of their GPUs."""

from dataclasses import dataclass
from functools import cache

from costmodel.catalog.files import entry_names, read_entry
from costmodel.catalog.names import resolve
from costmodel.spec.cluster import LinkKind


@dataclass(frozen=True, slots=True)
class NodeShape:
    """One node: its GPUs, the link between them, and the network between nodes. Rates are one way."""

    name: str
    kind: str
    """server, cloud, rack, board, workstation or host."""
    accelerator: str
    """Empty: any PCIe card."""
    gpus_per_node: int
    scale_up: LinkKind
    scale_up_switched: bool
    """The scale-up link is a switch (NVSwitch)."""
    scale_up_domain: int
    """GPUs that the scale-up link joins; more than a node's in a rack."""
    network: LinkKind
    fabric: str
    nics: int
    """Network interfaces of one node."""
    nic_bytes_per_s: float
    rail_optimised: str
    host_memory_bytes: int
    vcpus: int
    """0 where unknown."""
    source: str
    confidence: str
    """read, partly_read, recalled, inferred (a representative build) or measured (CPU hosts)."""
    note: str = ""
    shared_host: bool = False
    """CPU hosts: every rank of the node has an equal share of the cores and the memory."""
    price_usd_per_hour: float = 0.0
    """Of one node, on demand; 0 where unknown."""
    price_date: str = ""
    price_source: str = ""

    def network_bytes_per_s(self, ranks_in_node: int) -> float:
        """One rank's share of the node's network.

        A full node divides its NICs evenly. A rank of a node in part use still drives no more than the NICs beside
        it, or one NIC where the node has fewer NICs than GPUs.
        """
        node = self.nics * self.nic_bytes_per_s
        return min(node / ranks_in_node, max(self.nic_bytes_per_s, node / self.gpus_per_node))


def node_shape(name: str) -> NodeShape:
    """A node shape by its name or an alias ("dgx-h100", "p5.48xlarge", "nvl72")."""
    return _node_shape(resolve("nodes", name))


@cache
def _node_shape(name: str) -> NodeShape:
    return NodeShape(**read_entry("nodes", name))


def list_clusters() -> tuple[NodeShape, ...]:
    """Every node shape, by name. Reads every file."""
    return tuple(_node_shape(name) for name in entry_names("nodes"))
