"""ZeRO-1 as PyTorch has it: DDP, and ZeroRedundancyOptimizer over it.

Shards the optimizer state, by whole parameters: each goes to the rank that holds least so far, the largest first, so ranks are uneven.
Sends DDP's all-reduces, and after the update a broadcast of every parameter from the rank that updated it.
"""

from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from costmodel.spec import Run
from execute.optim import optimizer_class
from execute.strategies import Prepared, Region, no_region
from execute.strategies.ddp import replicate


def shard(run: Run, model: nn.Module, device: str = "cpu") -> None:
    """Nothing before the optimizer exists."""


def prepare(run: Run, model: nn.Module, *, dry: bool, region: Region = no_region) -> Prepared:
    """The replicated model with the sharded optimizer."""
    prepared = replicate(run, model, dry=dry, region=region)
    kind, arguments = optimizer_class(run.recipe.optimizer)
    prepared.optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=kind, **arguments)
    return prepared
