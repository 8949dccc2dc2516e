"""The optimizers of the catalogue that PyTorch has, with the recipe's figures."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from costmodel.spec import OptimizerSpec


def optimizer_class(spec: OptimizerSpec) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class and its keyword arguments."""
    how: dict[str, Any] = {"foreach": spec.implementation == "foreach", "fused": spec.implementation == "fused"}
    how = {"fused": True} if how["fused"] else {"foreach": how["foreach"]}
    common = {"lr": spec.lr, "weight_decay": spec.weight_decay, **how}
    if spec.name == "sgd":
        return torch.optim.SGD, common
    if spec.name == "momentum":
        return torch.optim.SGD, {**common, "momentum": spec.momentum}
    if spec.name in ("adam", "adamw"):
        kind = torch.optim.Adam if spec.name == "adam" else torch.optim.AdamW
        return kind, {**common, "betas": spec.betas, "eps": spec.eps}
    raise ValueError(f"PyTorch has no optimizer {spec.name} that this function builds")


def make_optimizer(spec: OptimizerSpec, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The optimizer over some parameters."""
    kind, arguments = optimizer_class(spec)
    return kind(parameters, **arguments)


def state_tensors(optimizer: torch.optim.Optimizer) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors of an optimizer's state: those beside the parameters, and step counters that PyTorch keeps in host memory.

    torch.optim.adam: the `step` of foreach and for-loop is a host tensor unless capturable; a fused one lies with the parameter.
    """
    fused = any(group.get("fused") for group in optimizer.param_groups)
    device, host = [], []
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor):
                (host if name == "step" and not fused else device).append(value)
    return device, host
