"""Batches: random tokens, the same in every mode."""

import torch
from torch import Tensor

from costmodel.spec import Run
from execute.dtypes import DTYPES


def random_batch(run: Run, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Tokens and targets of one micro-batch of one rank."""
    shape, vocab = (run.recipe.micro_batch, run.recipe.seq_len), run.model.vocab
    tokens = torch.randint(vocab, shape, dtype=DTYPES[run.recipe.token_dtype], device=device)
    return tokens, torch.randint(vocab, shape, device=device)
