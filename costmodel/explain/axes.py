"""Parallelism against sharding: the work that each axis divides, and the tensors that it only stores in pieces.

An axis divides work where its ranks compute different things: other sequences, other columns of a matmul, other layers. It shards where
they compute the same with tensors of which each keeps a piece between uses: a shard of a parameter is gathered before the matmul that
needs it. What it neither divides nor shards, every one of its ranks has whole.
"""

from dataclasses import dataclass
from typing import Literal

from costmodel.mesh import SERVES, Mesh
from costmodel.program.build import Builder
from costmodel.program.ir import Tensor
from costmodel.program.layers import batch_tensors
from costmodel.report import MemoryReport, TimeReport
from costmodel.spec import Run

Placement = Literal["divided", "sharded", "partly divided", "copied", "at the ends", "on GPU 0"]
"""divided: a rank only ever needs its own part; sharded: stored in pieces, brought together to be used; copied: whole on each; at the ends:
a pipeline's first stage has the tokens, its last the targets; on GPU 0: DataParallel's other GPUs have none of it between micro-batches."""
STATE = ("parameters", "gradients", "master_weights", "optimizer")
BATCH, ACTIVATIONS = "batch", "activations"


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the mesh with more than one rank."""

    name: str
    degree: int
    stride: int
    link: str
    """The slowest level of the topology that its groups cross."""
    serves: str
    """What its ranks have to do with one another."""
    divides: tuple[str, ...]
    """The work that its ranks share."""
    shards: tuple[str, ...]
    """Tensors of which each rank keeps a piece, though it works with, or for, the whole."""
    owns: tuple[str, ...]
    """Tensors of which a rank has the part that its work needs, and no more."""
    copies: tuple[str, ...]
    """Tensors that each of its ranks has whole."""
    communication_s: float
    exposed_s: float


@dataclass(frozen=True, slots=True)
class Holding:
    """A kind of tensor on one rank."""

    name: str
    """batch, parameters, gradients, master_weights, optimizer, activations."""
    here_bytes: int
    """State between two steps (gradients: until the update, where it drops them); of a batch, one micro-batch; of activations, the most that are saved
    at once."""
    whole_bytes: int | None
    """What one rank would hold that spreads nothing; of a batch, that of the whole step. None for activations, which depend on when."""
    placements: dict[str, Placement]
    """By axis of more than one rank."""


def placements(builder: Builder, mesh: Mesh) -> dict[str, dict[str, Placement]]:
    """How each kind of tensor lies on each axis of more than one rank."""
    p = builder.run.plan
    sharded = builder.strategy.sharded
    shard_axes = [axis for axis in ("dp_shard", "cp") if axis in mesh.degrees]
    out: dict[str, dict[str, Placement]] = {}
    for name in (BATCH, *STATE, ACTIVATIONS):
        of: dict[str, Placement] = {}
        work: Placement = "divided" if name in (BATCH, ACTIVATIONS) else "partly divided"
        shared: Placement = "copied" if name == BATCH and p.tp % p.expert_tp == 0 else work
        of |= {axis: shared if axis == "etp" else work for axis, on in (("etp", p.expert_tp not in (1, p.tp)), ("ep", p.ep > 1)) if on}
        for axis, degree in reversed(mesh.degrees.items()):
            if degree == 1:
                continue
            data = axis in ("dp_replicate", "dp_shard", "cp")
            if name == BATCH:
                of[axis] = "divided" if data else "at the ends" if axis == "pp" else "copied"
            elif name == ACTIVATIONS:
                of[axis] = "partly divided" if axis == "tp" and not p.sequence_parallel else "divided"
            elif data:
                alone = p.single_process and name != "parameters"
                of[axis] = "on GPU 0" if alone else "sharded" if name in sharded and axis in shard_axes else "copied"
            elif axis == "tp" and p.expert_tp != p.tp:
                of[axis] = "partly divided"
            else:
                of[axis] = "divided"
        out[name] = of
    return out


def axes(run: Run, mesh: Mesh, where: dict[str, dict[str, Placement]], links: dict[str, str], time: TimeReport | None,
         held: tuple[str, ...]) -> tuple[Axis, ...]:
    """The axes of more than one rank, innermost first. `links`: what the groups of each cross; `held`: the kinds of tensor there are."""
    out = []
    degrees, strides = {**mesh.degrees}, {**mesh.strides}
    if run.plan.experts_apart:
        etp = run.plan.expert_tp
        cut = etp if etp != run.plan.tp else 1
        degrees, strides = {"tp": degrees.pop("tp"), "etp": cut, "ep": run.plan.ep, **degrees}, {**strides, "etp": 1, "ep": etp}
    for name, degree in degrees.items():
        if degree == 1:
            continue
        of = {kind: placed[name] for kind, placed in where.items() if kind in held}
        updates = of.get("optimizer") == "sharded" or of.get("master_weights") == "sharded"
        divides = {"tp": _tensor_work(run), "pp": ("layers",), "cp": ("tokens of a sequence",), "etp": ("matmuls of the experts",),
                   "ep": ("the experts of a layer, and the rows of tokens that go to them",)}.get(name, ("sequences of the batch",))
        out.append(Axis(name, degree, strides[name], links[name], SERVES[name], (*divides, *(("the update",) if updates else ())),
                        _of(of, "sharded"), tuple(kind for kind in of if of[kind] in ("divided", "partly divided") and kind != BATCH), _of(of, "copied"),
                        time.communication_s.get(name, 0.0) if time else 0.0, time.exposed_s.get(name, 0.0) if time else 0.0))
    return tuple(out)


def _tensor_work(run: Run) -> tuple[str, ...]:
    return ("heads", "matmuls of a layer", "vocabulary", *(("tokens between the matmuls",) if run.plan.sequence_parallel else ()))


def _of(placed: dict[str, Placement], kind: Placement) -> tuple[str, ...]:
    return tuple(name for name, where in placed.items() if where == kind)


def holdings(run: Run, builders: list[Builder], where: dict[str, dict[str, Placement]], memory: MemoryReport, whole: dict[str, float]) -> tuple[Holding, ...]:
    """What the rank holds of each kind; `whole`: bytes per parameter of each kind of state where nothing is spread."""
    ends = any(b.stage.first for b in builders), any(b.stage.last for b in builders)
    tensors: tuple[Tensor, ...] = batch_tensors(run)
    batch = sum(t.nbytes for t, on in zip(tensors, ends, strict=True) if on)
    job = sum(t.nbytes for t in tensors) * run.micro_batches * run.plan.dp * run.plan.cp
    out = [Holding(BATCH, batch, job, where[BATCH])]
    for name in STATE:
        here = memory.states.get(name, 0)
        if here or name in whole:
            out.append(Holding(name, here, round(whole.get(name, 0.0) * run.model.params), where[name]))
    out.append(Holding(ACTIVATIONS, memory.activations_bytes or 0, None, where[ACTIVATIONS]))
    return tuple(out)
