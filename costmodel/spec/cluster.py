"""Cluster: the accelerators of a job and the links between them."""

import math
from typing import Literal, get_args

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from costmodel.spec.base import PlanError, Spec

NETWORKS = ("infiniband", "roce", "efa", "ethernet", "tcpx")
"""Kinds of link that leave the scale-up domain."""
LinkKind = Literal["nvlink", "xgmi", "pcie", "infiniband", "roce", "efa", "ethernet", "tcpx", "ici", "shm"]

LINK_WORDS = frozenset({"intra", "inter", "network", *get_args(LinkKind)})
"""What may name links of any cluster."""


class Accelerator(Spec):
    """One device, as its data sheet states it. Rates are dense peaks; links are one-way."""

    name: str
    vendor: str = "nvidia"
    kind: Literal["cuda", "rocm", "hpu", "tpu", "cpu"] = "cuda"
    architecture: str = ""
    memory_bytes: PositiveInt
    """What the device offers to programs, which is less than its label."""
    memory_bytes_per_s: PositiveFloat
    flops_per_s: dict[str, float] = Field(default_factory=dict)
    """Dense peak by dtype: fp32, tf32, fp16, bf16, fp8, fp4. A missing dtype is not supported."""
    units: int = Field(0, ge=0)
    """Streaming multiprocessors (compute units on AMD, cores on a CPU)."""
    l2_bytes: int = Field(0, ge=0)
    link: LinkKind = "pcie"
    link_bytes_per_s: NonNegativeFloat = 0.0
    """Scale-up rate of one device, one way."""
    peer_bytes_per_s: NonNegativeFloat = 0.0
    """Rate between one pair; equal to the scale-up rate behind a switch."""
    switch_reduces: bool = False
    """The scale-up switch can reduce (NVLS)."""
    pcie_bytes_per_s: NonNegativeFloat = 0.0
    host_link_bytes_per_s: NonNegativeFloat = 0.0
    """To the memory of its host, one way, where that link is not PCIe (NVLink-C2C)."""
    tdp_w: NonNegativeFloat = 0.0
    confidence: str = "read"
    source: str = ""

    @property
    def kernel_table(self) -> Literal["cuda", "cpu"]:
        """Which kernels run, and so what autograd saves."""
        return "cpu" if self.kind == "cpu" else "cuda"


class Level(Spec):
    """One level of the topology: the ranks it joins and what one of them can send."""

    name: str
    kind: LinkKind
    domain: PositiveInt
    """Ranks that reach one another at this level."""
    bytes_per_s: PositiveFloat
    """One-way rate of one GPU."""
    latency_s: NonNegativeFloat | None = None
    """None: the profile's latency of this kind of link."""
    switch_reduces: bool = False


class Cluster(Spec):
    """The GPUs of one job: device, count, and topology levels, innermost first."""

    name: str = "custom"
    accelerator: Accelerator
    gpus: PositiveInt
    """World size: the ranks of the job."""
    gpus_per_node: PositiveInt
    levels: tuple[Level, ...] = ()
    host: str = "generic"
    """Which host constants of the profiles apply."""
    host_memory_bytes: int = Field(0, ge=0)
    """Host memory of one node; 0 where unknown."""
    slow_rank: float = Field(1.0, ge=1)
    """What if: one rank's kernels take this many times as long, and the others wait for it; 1: none is slower."""
    link_factors: dict[str, PositiveFloat] = Field(default_factory=dict)
    """What if: links have this part of their rate; by the name or kind of a level, or `intra` (scale-up links) and `inter` (networks)."""

    @model_validator(mode="after")
    def _nodes_are_full(self) -> "Cluster":
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            low = self.gpus // self.gpus_per_node * self.gpus_per_node
            raise PlanError("cluster.gpus", self.gpus, f"more than one node is used whole: gpus must be a multiple of "
                            f"gpus_per_node = {self.gpus_per_node}.", f"Use gpus = {low} or {low + self.gpus_per_node}.")
        reach = max((level.domain for level in self.levels), default=1)
        if reach < self.gpus:
            raise PlanError("cluster.levels", reach, f"no level of the topology joins all {self.gpus} GPUs.",
                            f"Add a level with domain = {self.gpus}.")
        known = {*LINK_WORDS, *(level.name for level in self.levels)}
        for name in self.link_factors:
            if name not in known:
                raise PlanError("cluster.link_factors", name, "no link is called that.",
                                f"Use inter, intra{''.join(f', {level.kind}' for level in self.levels)}, or another kind of link.")
        return self

    def link_factor(self, level: Level) -> float:
        """The part of its rate that a level has."""
        names = {level.name, level.kind, "inter" if level.kind in NETWORKS else "intra"}
        return math.prod(factor for name, factor in self.link_factors.items() if name in names)

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)

    @property
    def gpus_in_node(self) -> int:
        """Ranks of the job in one node."""
        return min(self.gpus, self.gpus_per_node)
