"""Seconds of collectives: where a process group lies in the topology, and what each algorithm takes on it.

An algorithm in one of its protocols is a line t = latency + bytes x seconds_per_byte; a collective takes the fastest
line that the communication library offers, so its bandwidth rises with the message as the measured curves do. Lines
depend on the placement alone and are kept per group; nothing here loops over ranks.

Messages follow costmodel.program.ir.Comm: all-reduce and broadcast, the per-rank buffer; all-gather and
reduce-scatter, the full tensor; all-to-all, one rank's send buffer; send, the message.
"""

from dataclasses import dataclass, field
from math import log2
from typing import NamedTuple

from costmodel.catalog.profiles import Profile
from costmodel.spec.base import PlanError
from costmodel.spec.cluster import Cluster, Level

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter", "send")


class Group(NamedTuple):
    """A process group's placement: its size and how many of its ranks share a domain of each topology level."""

    size: int
    stride: int
    ranks: tuple[int, ...]
    """Ranks of the group within one domain of each level of the cluster, innermost first; the last equals `size`."""

    @property
    def spans(self) -> int:
        """Index of the innermost level that joins the whole group."""
        return next(i for i, r in enumerate(self.ranks) if r >= self.size)


class Line(NamedTuple):
    """One algorithm and protocol: t = latency_s + message bytes x s_per_byte."""

    latency_s: float
    s_per_byte: float


def group_of(cluster: Cluster, size: int, stride: int = 1) -> Group:
    """The placement of a process group whose ranks are `stride` apart in the rank order.

    A domain of D consecutive ranks holds max(1, D // stride) of them, at most `size`. Groups are taken to start at a
    domain's edge, as the axes of a device mesh do.
    """
    if size < 1 or stride < 1 or size * stride > cluster.gpus:
        raise PlanError("group", f"size {size} x stride {stride}", f"the cluster has {cluster.gpus} GPUs.",
                        f"Use a group of at most {max(1, cluster.gpus // max(1, stride))} ranks.")
    ranks = tuple(min(size, max(1, level.domain // stride)) for level in cluster.levels)
    if size > 1 and (not ranks or ranks[-1] < size):
        ranks = (*ranks[:-1], size)
    return Group(size, stride, ranks)


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """One level's link with the profile's constants applied; rates are of one rank, one way."""

    bytes_per_s: float
    """Sustained by a large message in a large group."""
    peer_bytes_per_s: float
    """Sustained between one pair; infinite behind a switch."""
    base_s: float
    hop_s: tuple[float, float, float]
    """Latency of a ring hop in the low-latency, the 128-byte and the bulk protocol."""
    share: tuple[float, float, float]
    """Rate of each protocol over the bulk rate."""
    peer_s: float
    group_loss: float
    group_exponent: float
    tree_share: float
    nvls_bytes_per_s: float
    """Message bytes per second through a switch that reduces; 0 where it does not."""
    nvls_s: float
    nvls_min_group: int
    factors: dict[str, float]
    """Rate of a collective over the ring's, where it differs."""
    reduce_scatter_is_all_reduce: bool

    def rate(self, members: int) -> float:
        """Ring rate of one rank among `members` ranks of a domain: fewer peers use fewer channels or links."""
        shrink: float = (2 / members) ** self.group_exponent
        return min(self.bytes_per_s * (1 - self.group_loss / members) * shrink, self.peer_bytes_per_s * (members - 1))


@dataclass(frozen=True, slots=True)
class NetworkCosts:
    """Prices every collective of one cluster; `network_costs` builds it."""

    cluster: Cluster
    links: tuple[LinkCosts, ...]
    _lines: dict[tuple[str, Group], tuple[Line, ...]] = field(default_factory=dict, repr=False, compare=False)

    def collective_s(self, kind: str, nbytes: float, group: Group) -> float:
        """Seconds of a collective on a group; exactly 0 for one rank or no bytes.

        The fastest of the algorithms that apply: ring (each in three protocols); for an all-reduce also a tree between
        nodes, and reduction in the switch (NVLS) with a tree above it. Valid for one collective at a time on its
        links; groups that run at once on one node share its NICs, which the per-rank rate already says.
        """
        if group.size == 1 or nbytes <= 0:
            return 0.0
        key = (kind, group)
        lines = self._lines.get(key)
        if lines is None:
            lines = self._lines[key] = self.lines(kind, group)
        best = float("inf")
        for latency, per_byte in lines:
            t = latency + per_byte * nbytes
            if t < best:
                best = t
        return best

    def lines(self, kind: str, group: Group) -> tuple[Line, ...]:
        """The algorithms offered for a collective on a group of more than one rank."""
        name = kind.replace("-", "_")
        if name not in KINDS:
            raise PlanError("collective", kind, "this collective is not known.", f"Use one of {', '.join(KINDS)}.")
        if name == "send":
            return self._send(group)
        if name == "all_to_all":
            return self._all_to_all(group)
        if name == "reduce_scatter" and self.links[group.spans].reduce_scatter_is_all_reduce:
            return self._ring("all_reduce", group, self.links[group.spans].factors.get(name, 1.0))
        lines = self._ring(name, group, self.links[group.spans].factors.get(name, 1.0))
        if name == "all_reduce":
            lines += self._tree(group) + self._in_switch(group)
        return lines

    def _inner(self, group: Group) -> int:
        """Index of the innermost level at which the group has a peer."""
        return next(i for i, r in enumerate(group.ranks) if r > 1)

    def _bandwidth(self, group: Group) -> float:
        """Ring rate: the slowest level crossed, each with the links of all the group's ranks in the domain below it.

        A group that spans nodes moves min(scale-up link, NIC share of a rank x its ranks in the node).
        """
        rate, below = float("inf"), 1
        for link, members in zip(self.links, group.ranks, strict=True):
            if members > below:
                rate = min(rate, link.rate(-(-members // below)) * below)
                below = members
        return rate

    def _hops(self, group: Group, protocol: int) -> float:
        """Latency of going once around the ring: n/below - n/members hops at each level."""
        total, below, n = 0.0, 1, group.size
        for link, members in zip(self.links, group.ranks, strict=True):
            if members > below:
                total += (n / below - n / members) * link.hop_s[protocol]
                below = members
        return total

    def _share(self, group: Group, protocol: int) -> float:
        """The protocol's rate over the bulk rate, at the level that joins the group."""
        return self.links[group.spans].share[protocol]

    def _ring(self, name: str, group: Group, factor: float) -> tuple[Line, ...]:
        """Ring algorithms. A broadcast or reduction is a pipelined chain; gather and scatter load the root's link."""
        n, bandwidth, base = group.size, self._bandwidth(group) * factor, self.links[self._inner(group)].base_s
        turns = 2 if name == "all_reduce" else 1
        volume = 1.0 if name in ("broadcast", "reduce") else turns * (n - 1) / n
        return tuple(Line(base + turns * self._hops(group, p), volume / (bandwidth * self._share(group, p))) for p in range(3))

    def _tree(self, group: Group) -> tuple[Line, ...]:
        """Chain inside the node, double binary tree between nodes: base + 2((r-1)·intra + log2(nodes)·inter) + 2·M/B.

        Source: NVIDIA/nccl src/graph/tuning.cc. Offered only between nodes: within one, the chain is a ring without its bandwidth.
        """
        top = group.spans
        inside = group.ranks[top - 1] if top else 1
        if not top or inside >= group.size:
            return ()
        outer, inner = self.links[top], self.links[self._inner(group)]
        depth = log2(group.size / inside)
        bandwidth, base = self._bandwidth(group) * outer.tree_share, inner.base_s
        return tuple(Line(base + 2 * ((inside - 1) * inner.hop_s[p] + depth * outer.hop_s[p]), 2 / (bandwidth * outer.share[p]))
                     for p in range(3))

    def _in_switch(self, group: Group) -> tuple[Line, ...]:
        """All-reduce inside the scale-up switch, with a tree over the network above it (NVLS, NVLS-tree).

        nvls latency + 2·log2(nodes)·inter + M / min(switch rate, half of the node's NICs).
        """
        level = self._inner(group)
        link, members = self.links[level], group.ranks[level]
        if not link.nvls_bytes_per_s or members < link.nvls_min_group or group.spans > level + 1:
            return ()
        if members == group.size:
            return (Line(link.nvls_s, 1 / link.nvls_bytes_per_s),)
        outer = self.links[group.spans]
        rate = min(link.nvls_bytes_per_s, outer.bytes_per_s * members * outer.tree_share / 2)
        latency = link.nvls_s + 2 * log2(group.size / members) * outer.hop_s[2]
        return (Line(latency, 1 / rate),)

    def _all_to_all(self, group: Group) -> tuple[Line, ...]:
        """Every rank sends 1/n of its buffer to each: the level that most bytes per unit of rate leave through decides.

        Through a level pass the bytes for the ranks that it joins and the level below does not, (members - below)/n · M;
        latency is two hops and a start per peer. Source: NVIDIA/nccl-tests doc/PERFORMANCE.md for one level, where it is
        (n-1)/n · M/B; taking the slowest of several levels is ours.
        """
        n, top = group.size, self.links[group.spans]
        per_byte, below = 0.0, 1
        for link, members in zip(self.links, group.ranks, strict=True):
            if members > below:
                per_byte = max(per_byte, (members - below) / n / (link.rate(-(-members // below)) * link.factors.get("all_to_all", 1.0)))
                below = members
        base = self.links[self._inner(group)].base_s + (n - 1) * top.peer_s
        return tuple(Line(base + 2 * top.hop_s[p], per_byte / self._share(group, p)) for p in range(3))

    def _send(self, group: Group) -> tuple[Line, ...]:
        """One message to the next rank of the group over the slowest level between neighbours: M/B + a."""
        link = self.links[group.spans]
        rate = min(link.bytes_per_s * link.factors.get("send", 1.0), link.peer_bytes_per_s)
        base = self.links[self._inner(group)].base_s
        return tuple(Line(base + link.hop_s[p], 1 / (rate * link.share[p])) for p in range(3))


def network_costs(cluster: Cluster, profile: Profile) -> NetworkCosts:
    """The links of a cluster, level by level, with the profile's shares and latencies."""
    return NetworkCosts(cluster, tuple(_link(cluster, level, profile, i) for i, level in enumerate(cluster.levels)))


def collective_s(kind: str, nbytes: float, group: Group, costs: NetworkCosts) -> float:
    """Seconds of one collective; `costs.collective_s` as a function."""
    return costs.collective_s(kind, nbytes, group)


def _link(cluster: Cluster, level: Level, profile: Profile, index: int) -> LinkCosts:
    prefix = f"link.{level.kind}."
    factor = cluster.link_factor(level)
    level = level.model_copy(update={"bytes_per_s": level.bytes_per_s * factor})
    share, hop = profile.value(prefix + "share"), profile.value(prefix + "hop_s")
    large = profile.value(prefix + "hop_large_s")
    if level.latency_s is not None:
        large, hop = (large * level.latency_s / hop if hop else large), level.latency_s
    accelerator = cluster.accelerator
    peer = factor * accelerator.peer_bytes_per_s if index == 0 and level.kind == accelerator.link else 0.0
    mesh = 0 < peer < level.bytes_per_s
    nvls = profile.get(prefix + "nvls_share", 0.0) if level.switch_reduces else 0.0
    names = {kind: profile.get(f"{prefix}{kind}_factor", 1.0) for kind in KINDS}
    return LinkCosts(
        bytes_per_s=level.bytes_per_s * share,
        peer_bytes_per_s=peer * share if mesh else float("inf"),
        base_s=profile.value(prefix + "base_s"),
        hop_s=(hop, hop * profile.value(prefix + "mid_hop_factor"), large),
        share=(profile.value(prefix + "small_share"), profile.value(prefix + "mid_share"), 1.0),
        peer_s=profile.value(prefix + "peer_s"),
        group_loss=profile.get(prefix + "group_loss", 0.0),
        group_exponent=profile.get(prefix + "group_exponent", 0.0),
        tree_share=profile.value(prefix + "tree_share"),
        nvls_bytes_per_s=level.bytes_per_s * nvls,
        nvls_s=profile.get(prefix + "nvls_s", 0.0),
        nvls_min_group=int(profile.get(prefix + "nvls_min_group", 2)),
        factors={kind: f for kind, f in names.items() if f != 1.0},
        reduce_scatter_is_all_reduce=level.kind == "shm",
    )
