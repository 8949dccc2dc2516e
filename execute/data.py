"""Batches: random tokens, the same in every mode."""

import torch
from torch import Tensor

from costmodel.spec import Run
from execute.dtypes import DTYPES


def random_batch(run: Run, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Tokens and targets of one micro-batch of one rank."""
    return random_tokens(run, device), random_targets(run, device)


def pipeline_batch(run: Run, ends: tuple[bool, bool], device: str = "cpu") -> tuple[Tensor | None, Tensor | None]:
    """Tokens of all micro-batches where the first stage is, targets where the last is."""
    first, last = ends
    return (random_tokens(run, device, run.micro_batches) if first else None, random_targets(run, device, run.micro_batches) if last else None)


def random_tokens(run: Run, device: str = "cpu", micro_batches: int = 1) -> Tensor:
    shape = run.recipe.micro_batch * micro_batches, run.recipe.seq_len
    return torch.randint(run.model.vocab, shape, dtype=DTYPES[run.recipe.token_dtype], device=device)


def random_targets(run: Run, device: str = "cpu", micro_batches: int = 1) -> Tensor:
    return torch.randint(run.model.vocab, (run.recipe.micro_batch * micro_batches, run.recipe.seq_len), device=device)
