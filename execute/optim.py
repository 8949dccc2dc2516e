"""The optimizers of the catalogue that PyTorch has, with the recipe's figures."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

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


class Several(torch.optim.Optimizer):
    """Optimizers over disjoint parameters, used as one."""

    def __init__(self, *each: torch.optim.Optimizer) -> None:
        self.each = each

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for one in self.each for group in one.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        return {key: value for one in self.each for key, value in one.state.items()}

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self.each:
            one.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.each:
            one.step()


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """What Muon updates: the matrices of the layers. AdamW has the rest: tables, head, norms, biases."""
    return [p for p in model.get_submodule("layers").parameters() if p.dim() == 2]


def make_optimizer(spec: OptimizerSpec, parameters: Iterable[Tensor], matrices: Iterable[Tensor] = ()) -> torch.optim.Optimizer:
    """The optimizer over some parameters, given in order of registration; of them, Muon updates the `matrices`, and AdamW the rest."""
    parameters = list(parameters)
    if spec.name != "muon":
        kind, arguments = optimizer_class(spec)
        return kind(parameters, **arguments)
    matrices = list(matrices)
    chosen = {id(p) for p in matrices}
    rest = [p for p in parameters if id(p) not in chosen]
    kind, arguments = optimizer_class(spec.model_copy(update={"name": "adamw"}))
    return Several(torch.optim.Muon(matrices, lr=spec.lr, weight_decay=spec.weight_decay, momentum=spec.momentum), kind(rest, **arguments))


def state_tensors(optimizer: torch.optim.Optimizer) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors of an optimizer's state: those beside the parameters, and step counters that PyTorch keeps in host memory.

    torch.optim.adam: the `step` of foreach and for-loop is a host tensor unless capturable; a fused one lies with the parameter.
    """
    optimizer = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer holds its local part there
    fused = any(group.get("fused") for group in optimizer.param_groups)
    device: list[Tensor] = []
    host: list[Tensor] = []
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor):
                (host if name == "step" and not fused else device).append(value)
    return device, host
