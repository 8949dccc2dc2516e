"""Why a run costs what it costs: what is replicated, what is sharded, what is communicated, and what each figure rests on.

Everything is read off the program of one rank role and the prediction made from it.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

from costmodel.catalog.profiles import Profile, load_profile
from costmodel.cost.prices import RunPrices
from costmodel.explain.axes import Axis, Holding, Placement, axes, holdings, placements
from costmodel.explain.constants import Weight, constants
from costmodel.explain.layer import Fall, LayerSplit, WeightCut, layer_split
from costmodel.explain.stages import Pipeline, StageHeld, pipeline
from costmodel.explain.terms import Term, terms
from costmodel.explain.traffic import Movement, link_words, movements
from costmodel.mesh import mesh_of
from costmodel.prediction import predict, single_gpu
from costmodel.program.build import Builder, Program, single_builder
from costmodel.program.ir import block_counts
from costmodel.report import Basis, RoleReport, StepReport
from costmodel.repricing import program_of
from costmodel.spec import PlanError, Run
from costmodel.timeline import timeline

__all__ = ["Axis", "Explanation", "Fall", "Holding", "LayerSplit", "Movement", "Pipeline", "Placement", "StageHeld", "Term", "Weight", "WeightCut",
           "constants", "explain"]


@dataclass(frozen=True, slots=True)
class Explanation:
    """One rank role of a run: the fullest."""

    role: str
    ranks: int
    example_rank: int
    model_params: int
    params: int
    """Parameters that the rank works with: the model's, divided by tensor and pipeline parallelism."""
    axes: tuple[Axis, ...]
    """Axes of more than one rank, innermost first."""
    holdings: tuple[Holding, ...]
    movements: tuple[Movement, ...]
    """Every collective of a step of the rank."""
    terms: tuple[Term, ...]
    """Bytes per parameter."""
    layer: LayerSplit | None
    """Under tensor parallelism."""
    pipeline: Pipeline | None
    on_host: tuple[str, ...]
    """Kinds of state that live in host memory."""
    basis: dict[str, Basis]
    """How sure each kind of figure is."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data with stable keys (docs/report.md)."""
        return asdict(self)


def explain(run: Run, report: StepReport | None = None, profile: Profile | str | None = None) -> Explanation:
    """The explanation of a run's fullest role; `report` is its prediction. Raises PlanError where something is not predicted yet."""
    base = profile if isinstance(profile, Profile) else load_profile(run, profile)
    report = report or predict(run, base, scaling=False)
    index = report.roles.index(report.fullest)
    role = report.roles[index]
    if role.memory is None:
        raise PlanError("report", report.provenance, "an explanation needs the memory of a run.", "Use a prediction.")
    program = program_of(run)
    builders, names = _builders(program, index, role)
    step = program.pipeline[index].parts if run.plan.pp > 1 else program.roles[index].step
    mesh, prices = mesh_of(run), RunPrices(run, base)
    links = {groups.axis: link_words(groups) for groups in mesh.groups}
    where = placements(builders[0], mesh)
    passing = sum(t.nbytes for b in builders for t in b.strategy.kept_gradients()) if "gradients" not in role.memory.states and not role.memory.host else 0
    kept = role.memory.host.states if role.memory.host else {}
    states = {**role.memory.states, **({"gradients": passing} if passing else {})}
    states |= {name: states.get(name, 0) + here for name, here in kept.items()}
    memory = replace(role.memory, states=states) if states != role.memory.states else role.memory
    each = terms(builders, names, memory.states, until_update=passing > 0)
    whole: dict[str, float] = {}
    for term in each:
        if (term.between_steps or term.category == "gradients") and term.category != "communication":
            whole[term.category] = whole.get(term.category, 0.0) + term.whole
    held = holdings(run, builders, where, memory, whole)
    sent = movements(block_counts(step), prices, mesh, timeline(run, base, role=index), role.time.exposed_s if role.time else {})
    split = layer_split(builders[0], step, single_builder(single_gpu(run), program)) if run.plan.tp > 1 else None
    return Explanation(role.role, role.ranks, role.example_rank, run.model.params, sum(b.strategy.inventory.numel for b in builders),
                       axes(run, mesh, where, links, role.time, tuple(h.name for h in held)), held, sent, each, split,
                       pipeline(run) if run.plan.pp > 1 else None, tuple(kept), dict(report.basis))


def _builders(program: Program, index: int, role: RoleReport) -> tuple[list[Builder], list[str]]:
    """The builders of a role's stages, and the name of the role in each one's strategy."""
    if not program.pipeline:
        return [program.builder], [role.role]
    mine = list(program.pipeline[index].builders.values())
    return mine, [b.strategy.roles()[0][0] for b in mine]
