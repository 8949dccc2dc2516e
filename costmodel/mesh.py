"""The device mesh of a run: where every rank sits, and who shares a process group with whom.

Ranks are numbered with tp innermost, then cp, dp_shard, dp_replicate, and pp outermost, so

    rank = tp + tp_degree x (cp + cp_degree x (dp_shard + ...))

and a rank's node is rank // gpus_per_node, its local rank the remainder, as torchrun numbers them. Ranks that differ in one coordinate
alone form a process group: members root, root + stride, ..., whose root is the lowest. Nothing here lists ranks: a group is three numbers,
so a mesh of 100,000 GPUs costs what one of 8 does.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

from costmodel.cost.prices import AXIS_ORDER, EMBEDDING_AXIS, EXPERT_AXIS, EXPERT_TENSOR_AXIS, REPLICA_AXIS, axis_groups
from costmodel.program.parallel.pipeline import stages_of
from costmodel.program.schedule import stages_on
from costmodel.spec import PlanError, Run

STATE_AXIS = "dp_shard x cp"
"""The ranks over which sharded state is split, where cp > 1."""
GRADIENT_AXIS = "dp_replicate x cp"
"""The ranks that average whole gradients, where cp > 1 and nothing is sharded."""
SERVES = {
    "tp": "share every matmul and its weights", "cp": "share one sequence", "dp_shard": "share the state, each reads other sequences",
    "dp_replicate": "hold copies of the state, each reads other sequences", "pp": "share the layers, in stages",
    STATE_AXIS: "share the state: its shards span both axes", GRADIENT_AXIS: "average gradients: copies of the state and parts of a sequence",
    EXPERT_AXIS: "share the experts of each layer, each has tokens of its own", REPLICA_AXIS: "have the same experts",
    EXPERT_TENSOR_AXIS: "share every matrix of an expert",
    EMBEDDING_AXIS: "first and last stage, which share the tied embedding"}
"""What the ranks of a group have to do with one another."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """A level of the topology that joins some groups of an axis, and no level below it does."""

    level: str
    kind: str
    bytes_per_s: float
    """One-way rate of one GPU."""
    domain: int
    """Ranks that reach one another at this level."""
    groups: int
    """How many groups it joins."""


@dataclass(frozen=True, slots=True)
class Groups:
    """All process groups of one axis. Group i has the members root(i), root(i) + stride, ..., `size` of them."""

    axis: str
    size: int
    stride: int
    count: int
    crosses: tuple[Crossing, ...]
    """The links, innermost first; more than one where groups lie unevenly on the nodes."""

    def root(self, index: int) -> int:
        """The lowest rank of a group, which is the root of its broadcasts and reductions."""
        return index // self.stride * self.stride * self.size + index % self.stride

    def members(self, index: int) -> range:
        """The ranks of a group, lowest first."""
        root = self.root(index)
        return range(root, root + self.size * self.stride, self.stride)

    def index_of(self, rank: int) -> int | None:
        """The group a rank is in; None where it is in none (a middle stage has no part in a tied embedding)."""
        index = rank // (self.stride * self.size) * self.stride + rank % self.stride
        return index if index < self.count and rank in self.members(index) else None


@dataclass(frozen=True, slots=True)
class Mesh:
    """The ranks of a run: their order, and the process groups that exist before any collective is called."""

    world_size: int
    gpus_per_node: int
    nodes: int
    degrees: dict[str, int]
    """By axis, innermost first."""
    strides: dict[str, int]
    """How far apart two neighbours on an axis are in the rank order."""
    groups: tuple[Groups, ...]
    """One entry per axis, a degree of 1 included, and the groups that span two axes."""
    stages: tuple[tuple[int, ...], ...]
    """By pipeline rank: the layers of each of its stages."""
    numbers: tuple[tuple[int, ...], ...]
    """By pipeline rank: its stages, by their place in the model."""

    @property
    def folded(self) -> bool:
        """The stages go there and back: the first rank holds the last one too."""
        return len(self.numbers) > 1 and self.numbers[0][-1] == 2 * len(self.numbers) - 1

    def node(self, rank: int) -> int:
        return rank // self.gpus_per_node

    def local_rank(self, rank: int) -> int:
        """Index of a rank in its node: the device it drives."""
        return rank % self.gpus_per_node

    def coordinates(self, rank: int) -> dict[str, int]:
        """A rank's place on every axis, outermost first."""
        return {axis: rank // self.strides[axis] % self.degrees[axis] for axis in reversed(AXIS_ORDER)}

    def groups_of(self, axis: str) -> Groups:
        """The groups of an axis, by its name; hyphens and underscores, x and spaces are the same."""
        for groups in self.groups:
            if _key(groups.axis) == _key(axis):
                return groups
        raise PlanError("axis", axis, "the mesh has no such axis.", f"Use one of {', '.join(g.axis.replace(' ', '') for g in self.groups)}.")

    def data_index(self, rank: int) -> int:
        """Which share of the global batch a rank reads, of dp_replicate x dp_shard."""
        at = self.coordinates(rank)
        return at["dp_replicate"] * self.degrees["dp_shard"] + at["dp_shard"]


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank's place in one of its groups."""

    axis: str
    index: int
    members: range
    place: int
    link: Crossing | None
    """None where it is alone."""


def _key(axis: str) -> str:
    return axis.lower().replace("-", "_").replace(" ", "").replace("×", "x")


def mesh_of(run: Run) -> Mesh:
    """The mesh of a run."""
    p, world = run.plan, run.cluster.gpus
    degrees = {"tp": p.tp, "cp": p.cp, "dp_shard": p.dp_shard, "dp_replicate": p.dp_replicate, "pp": p.pp}
    strides: dict[str, int] = {}
    stride = 1
    for axis in AXIS_ORDER:
        strides[axis] = stride
        stride *= degrees[axis]
    found = [_groups(run, axis, degrees[axis], strides[axis], world // degrees[axis]) for axis in reversed(AXIS_ORDER)]
    if p.cp > 1:
        # the groups that the collectives of sharded and of replicated state use: cost.prices spans cp the same way
        axis = "dp_shard" if p.zero else "dp_replicate"
        size = axis_groups(run)[axis].size
        if size > p.cp:
            found.append(_groups(run, STATE_AXIS if axis == "dp_shard" else GRADIENT_AXIS, size, strides["cp"], world // size))
    if p.experts_apart:
        found += [_groups(run, EXPERT_TENSOR_AXIS, p.expert_tp, 1, world // p.expert_tp)] if p.expert_tp != p.tp else []
        found += [_groups(run, EXPERT_AXIS, p.ep, p.expert_tp, world // p.ep),
                  _groups(run, REPLICA_AXIS, p.expert_replicas, p.expert_tp * p.ep, world // p.expert_replicas)]
    if p.pp > 1 and run.model.tied_embeddings:
        found.append(_groups(run, EMBEDDING_AXIS, 2, world // p.pp * (p.pp - 1), world // p.pp))
    layers = [s.layers for s in stages_of(run)]
    numbers = tuple(stages_on(p.schedule, p.pp, p.virtual_stages, r) for r in range(p.pp))
    stages = tuple(tuple(layers[s] for s in mine) for mine in numbers)
    return Mesh(world, run.cluster.gpus_per_node, run.cluster.nodes, degrees, strides, tuple(found), stages, numbers)


def _groups(run: Run, axis: str, size: int, stride: int, count: int) -> Groups:
    crosses: list[Crossing] = []
    below = 0
    for level in run.cluster.levels if size > 1 else ():
        within = _within(Groups(axis, size, stride, count, ()), level.domain)
        if within > below:
            crosses.append(Crossing(level.name, level.kind, level.bytes_per_s * run.cluster.link_factor(level), level.domain, within - below))
            below = within
    return Groups(axis, size, stride, count, tuple(crosses))


def _within(groups: Groups, domain: int) -> int:
    """How many groups lie whole in one domain of `domain` consecutive ranks.

    A group does where root mod domain + (size - 1) x stride < domain. Roots come in blocks of `stride` consecutive ranks, and blocks
    repeat against the domains after domain / gcd(block, domain) of them: one period is counted, not every group.
    """
    size, stride, count = groups.size, groups.stride, groups.count
    room = domain - (size - 1) * stride
    if room <= 0:
        return 0
    if groups.members(count - 1)[-1] < domain:
        return count
    block = size * stride
    blocks, rest = divmod(count, stride)
    period = domain // gcd(block, domain)
    turns, more = divmod(blocks, period)
    each = [_low(b * block % domain, stride, room, domain) for b in range(min(blocks, period))]
    return turns * sum(each) + sum(each[:more]) + _low(blocks * block % domain, rest, room, domain)


def _low(start: int, length: int, room: int, domain: int) -> int:
    """How many of the `length` numbers from `start` on are below `room` modulo `domain`."""
    def up_to(n: int) -> int:
        return n // domain * room + min(n % domain, room)

    return up_to(start + length) - up_to(start)


def seats(mesh: Mesh, rank: int) -> Iterator[Seat]:
    """Every group a rank is in: its members, the rank's place among them, and the link they cross."""
    if not 0 <= rank < mesh.world_size:
        raise PlanError("rank", rank, f"the ranks are 0 to {mesh.world_size - 1}.", f"Use rank = {min(max(rank, 0), mesh.world_size - 1)}.")
    for groups in mesh.groups:
        index = groups.index_of(rank)
        if index is not None:
            members = groups.members(index)
            yield Seat(groups.axis, index, members, members.index(rank), link_of(groups, members))


def link_of(groups: Groups, members: range) -> Crossing | None:
    """The innermost level of the topology that joins these members."""
    return next((c for c in groups.crosses if members[0] // c.domain == members[-1] // c.domain), None)


def neighbours(mesh: Mesh, rank: int) -> tuple[int | None, int | None]:
    """The ranks a pipeline rank receives activations from and sends them to; with several stages a rank, p apart, the last sends to the first."""
    p, stride = mesh.degrees["pp"], mesh.strides["pp"]
    at = mesh.coordinates(rank)["pp"]
    ring = p > 1 and len(mesh.stages[0]) > 1 and not mesh.folded
    before = rank - stride if at else rank + (p - 1) * stride if ring else None
    after = rank + stride if at < p - 1 else rank - (p - 1) * stride if ring else None
    return before, after
