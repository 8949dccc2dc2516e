"""From what each rank of a job saw to one report: ranks that run the same program play one role, named as the prediction names it."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import fmean

from costmodel.report import RoleReport, StepReport
from costmodel.spec import Run
from execute.flops import hardware_flops, model_flops
from execute.job import RankResult


def report_of(run: Run, ranks: Mapping[int, RankResult]) -> StepReport:
    """The report of a job that came through."""
    notes = tuple(dict.fromkeys(note for r in ranks.values() for note in r.notes))
    roles = roles_of(run, [r.role for r in ranks.values() if r.role is not None])
    return StepReport("run", roles, run.plan.world_size, run.tokens_per_step, model_flops(run), hardware_flops(run),
                      None if any(r.elsewhere for r in ranks.values()) else peak_flops_per_s(run), notes=notes,
                      basis={"memory": "exact", "collectives": "exact", "model_flops": "exact"})


def peak_flops_per_s(run: Run) -> float | None:
    """Of one GPU that the run describes."""
    return run.cluster.accelerator.flops_per_s.get(run.recipe.precision.compute)


def roles_of(run: Run, ranks: Iterable[RoleReport]) -> tuple[RoleReport, ...]:
    """Pipeline rank by pipeline rank; else every rank, or where shards are uneven the fullest and the emptiest."""
    ranks = sorted(ranks, key=lambda r: r.example_rank)
    if run.plan.pp > 1:
        size = run.plan.world_size // run.plan.pp
        return tuple(_role(f"pipeline rank {p}", ranks[p * size:(p + 1) * size]) for p in range(run.plan.pp))
    least = min(map(states_bytes, ranks))
    emptiest = [r for r in ranks if states_bytes(r) == least]
    others = [r for r in ranks if states_bytes(r) > least]
    return (_role("fullest shard", others), _role("emptiest shard", emptiest)) if others else (_role("every rank", ranks),)


def _role(name: str, ranks: list[RoleReport]) -> RoleReport:
    """The fullest of them stands for all; a step, and what it sends, takes as long as the slowest of them."""
    fullest = max(ranks, key=states_bytes)
    slowest = max(ranks, key=lambda r: r.time.step_s if r.time else 0.0)
    return replace(fullest, role=name, ranks=len(ranks), time=slowest.time, collectives=slowest.collectives)


def states_bytes(rank: RoleReport) -> int:
    """What a rank holds between steps, without what is still on its way."""
    return sum(size for category, size in rank.memory.states.items() if category != "temporaries") if rank.memory else 0


def mean_losses(ranks: Mapping[int, RankResult]) -> list[float]:
    """The mean loss of each step, over the ranks that know it."""
    by_step = zip(*(r.losses for r in ranks.values()), strict=True)
    return [fmean(loss for loss in losses if loss is not None) for losses in by_step]
