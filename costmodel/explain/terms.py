"""Bytes per parameter of a recipe, term by term: what one rank would hold that spreads nothing, and what this rank holds."""

from collections import Counter
from dataclasses import dataclass

from costmodel.program.build import Builder
from costmodel.program.ir import Tensor
from costmodel.program.optimizer import Update, state_tensors
from costmodel.program.parallel.base import EMBEDDING, HEAD
from costmodel.spec import DTYPE_BYTES

NAMES = {"exp_avg": "first moment", "exp_avg_sq": "second moment", "step": "step counters"}


@dataclass(frozen=True, slots=True)
class Term:
    """One kind of state, in bytes per parameter."""

    name: str
    category: str
    dtype: str
    whole: float
    """Where nothing is spread; 0 for what only spreading needs (buckets)."""
    here: float
    """On this rank, for each parameter that it works with: shards made it smaller, tensor and pipeline parallelism gave it fewer
    parameters."""
    between_steps: bool
    """It lives from step to step; else it exists during forward and backward alone, or until the update."""


def terms(builders: list[Builder], roles: list[str], states: dict[str, int], *, until_update: bool = False) -> tuple[Term, ...]:
    """The terms of a rank; `states` are its bytes between steps, by category, which the terms of each sum to; `until_update`: gradients go then.

    Categories without a parameter (tables, workspaces) are left out.
    """
    numel = sum(b.strategy.inventory.numel for b in builders)
    first = builders[0]
    p = first.run.recipe.precision
    updates = [b.strategy.update(role) for b, role in zip(builders, roles, strict=True)]
    out: list[Term] = []

    def term(name: str, category: str, dtype: str, whole: float, nbytes: float, between: bool = True) -> None:
        if whole or nbytes:
            out.append(Term(name, category, dtype, whole, nbytes / numel, between))

    term("parameters", "parameters", p.parameter, DTYPE_BYTES[p.parameter], states.get("parameters", 0))
    if p.master or states.get("master_weights"):
        term("master weights", "master_weights", p.master or p.parameter, DTYPE_BYTES[p.master] if p.master else 0.0, states.get("master_weights", 0))
    term("gradients", "gradients", p.gradient, DTYPE_BYTES[p.gradient], states.get("gradients", 0), not until_update)
    for name, whole, here in _optimizer(first, updates, numel):
        term(NAMES.get(name, name), "optimizer", "int8" if first.run.recipe.optimizer.name == "adam8bit" else p.optimizer_state, whole, here)
    received = sum(t.nbytes for b in builders for t in b.links.buffers())
    term("buffers of communication", "communication", p.reduce, 0.0, states.get("communication", 0) - received)
    term("receive buffers of the pipeline", "communication", first.links.dtype, 0.0, received)
    if first.numbers.autocast:
        cast = sum(_weights_cast(b) for b in builders)
        term("copies that autocast makes of weights", "activations", first.numbers.act, 0.0, cast, False)
    return tuple(out)


def _optimizer(builder: Builder, updates: list[Update], numel: int) -> list[tuple[str, float, float]]:
    """(tensor, bytes per parameter unspread, bytes here) of the optimizer's state."""
    spec = builder.run.recipe.optimizer
    here: dict[str, int] = {}
    for u in updates:
        for t in state_tensors(spec, u):
            here[t.name] = here.get(t.name, 0) + t.nbytes
    matrices = builder.strategy.inventory.matrices[0] if updates[0].matrices else 0
    whole: list[Tensor] = state_tensors(spec, updates[0]._replace(numel=numel, matrices=matrices))
    return [(t.name, 0.0 if t.name == "step" else t.nbytes / numel, here.get(t.name, 0)) for t in whole]


def _weights_cast(b: Builder) -> int:
    units = ((EMBEDDING, b.stage.first), (HEAD, b.stage.last), *Counter(b.names).items())
    return sum(int(n) * b.unit[unit].weights_cast_bytes for unit, n in units)
