# mypy: disable-error-code="no-untyped-call, no-any-return, misc"
"""Initial values that do not depend on how a model is spread: GPT-2's rule, drawn from the name of a parameter, each rank its own part."""

import zlib

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, distribute_tensor

from execute import compat
from execute.experts import Experts
from execute.model import Transformer
from execute.strategies.pipeline import Stages

DEVIATION = 0.02
BLOCK = 1 << 20
"""Values drawn from one seed: whole rows, about this many."""


@torch.no_grad()
def init_weights(model: Transformer | Stages, seed: int = 0) -> None:
    """Matrices from N(0, 0.02), biases 0, norms 1; and the constants. For parameters that have storage without values."""
    experts = {id(p): module for module in model.modules() if isinstance(module, Experts) for p in module.parameters()}
    for name, p in model.named_parameters():
        mine = p.to_local() if isinstance(p, compat.DTensor) else p
        if p.dim() == 1:
            mine.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            whole = model.name_in_model(name) if isinstance(model, Stages) else name
            own = experts.get(id(p))
            if own is None:
                _draw(mine, p.shape, _held(p, 0), _held(p, 1), zlib.crc32(f"{seed} {whole}".encode()))
            else:
                _draw_experts(mine, p, own, f"{seed} {whole}")
    for part in model.stages if isinstance(model, Stages) else [model]:
        part.init_constants()


def _held(p: Tensor, dim: int) -> Tensor:
    """Which indices of a dim of the whole parameter this rank holds, in its order."""
    shape = [1] * p.dim()
    shape[dim] = p.shape[dim]
    indices = torch.arange(p.shape[dim], device=p.device).view(shape)
    if isinstance(p, compat.DTensor):
        placements = [q if getattr(q, "dim", None) == dim else Replicate() for q in p.placements]
        indices = distribute_tensor(indices, p.device_mesh, placements, src_data_rank=None).to_local()
    return indices.flatten()


def _draw(mine: Tensor, shape: torch.Size, rows: Tensor, columns: Tensor, seed: int) -> None:
    """Fill this rank's rows and columns of a matrix; every block of rows has its own seed, so that nobody draws the whole."""
    height = max(1, BLOCK // shape[1])
    blocks = rows // height
    for block in blocks.unique().tolist():
        generator = torch.Generator(mine.device).manual_seed(seed + block)
        first = block * height
        values = torch.empty(min(height, shape[0] - first), shape[1], device=mine.device).normal_(0.0, DEVIATION, generator=generator)
        here = blocks == block
        mine[here] = values[rows[here] - first][:, columns].to(mine.dtype)


def _draw_experts(mine: Tensor, p: Tensor, experts: Experts, name: str) -> None:
    """Fill this rank's rows of its experts' matrices; every expert has a seed of its own, whoever holds it."""
    rows, columns = _held(p, 1), torch.arange(p.shape[2], device=p.device)
    for i, expert in enumerate(_held(p, 0).tolist()):
        _draw(mine[i], p.shape[1:], rows, columns, zlib.crc32(f"{name} {experts.first + expert}".encode()))
