"""One process: nothing is sharded, nothing is sent."""

from torch import nn

from costmodel.spec import Run
from execute.optim import hidden_matrices, make_optimizer
from execute.strategies import Prepared, Region, no_region


def shard(run: Run, model: nn.Module, device: str = "cpu") -> None:
    """Nothing."""


def prepare(run: Run, model: nn.Module, *, dry: bool, region: Region = no_region) -> Prepared:
    """The model as it is."""
    return Prepared(model, make_optimizer(run.recipe.optimizer, model.parameters(), hidden_matrices(model)))
