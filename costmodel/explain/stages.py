"""Which layers are on which pipeline rank, and how many micro-batches each has in flight."""

from dataclasses import dataclass

from costmodel.program.parallel.pipeline import stages_of
from costmodel.program.schedule import most_held, rank_of, rank_order
from costmodel.spec import Run


@dataclass(frozen=True, slots=True)
class StageHeld:
    """One stage of a pipeline."""

    stage: int
    rank: int
    """Pipeline rank that holds it."""
    first_layer: int
    layers: int
    embedding: bool
    head: bool


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The stages of a run, in order of the model, and what each pipeline rank keeps for them."""

    schedule: str
    micro_batches: int
    stages: tuple[StageHeld, ...]
    in_flight: tuple[int, ...]
    """By pipeline rank: the most pairs of micro-batch and stage whose activations it holds at once."""


def pipeline(run: Run) -> Pipeline:
    """The stages of a run with pp > 1."""
    p, m = run.plan, run.micro_batches
    out, first = [], 0
    for s in stages_of(run):
        out.append(StageHeld(s.number, rank_of(p.schedule, s.number, p.pp), first, s.layers, s.first, s.last))
        first += s.layers
    return Pipeline(p.schedule, m, tuple(out), tuple(most_held(rank_order(p.schedule, p.pp, p.virtual_stages, m, rank)) for rank in range(p.pp)))
