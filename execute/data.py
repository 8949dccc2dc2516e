"""What a step is fed: random tokens for a dry run; for a real one, samples that depend on their number in the training run and not on the ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from costmodel.spec import PlanError, Run
from execute.dtypes import DTYPES
from execute.strategies.context import places


def random_batch(run: Run, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Tokens and targets of one micro-batch of one rank."""
    return random_tokens(run, device), random_targets(run, device)


def pipeline_batch(run: Run, ends: tuple[bool, bool], device: str = "cpu") -> tuple[Tensor | None, Tensor | None]:
    """Tokens of all micro-batches where the first stage is, targets where the last is."""
    first, last = ends
    return (random_tokens(run, device, run.micro_batches) if first else None, random_targets(run, device, run.micro_batches) if last else None)


def random_tokens(run: Run, device: str = "cpu", micro_batches: int = 1) -> Tensor:
    shape = run.recipe.micro_batch * micro_batches, run.recipe.seq_len // run.plan.cp
    return torch.randint(run.model.vocab, shape, dtype=DTYPES[run.recipe.token_dtype], device=device)


def random_targets(run: Run, device: str = "cpu", micro_batches: int = 1) -> Tensor:
    return torch.randint(run.model.vocab, (run.recipe.micro_batch * micro_batches, run.recipe.seq_len // run.plan.cp), device=device)


class Source(Protocol):
    """Where samples come from: `source(i, n)` is sample i, [n] int64."""

    def __call__(self, index: int, length: int) -> Tensor: ...


class Synthetic(NamedTuple):
    """Random tokens; a sample follows from the seed and its number."""

    vocab: int
    seed: int = 0

    def __call__(self, index: int, length: int) -> Tensor:
        return torch.randint(self.vocab, (length,), generator=torch.Generator().manual_seed(self.seed * 1_000_003 + index))


class Text(NamedTuple):
    """A text whose bytes are the tokens; samples follow one another in it, and begin again at its end."""

    tokens: Tensor
    """[bytes] uint8."""

    def __call__(self, index: int, length: int) -> Tensor:
        windows = max(1, (len(self.tokens) - 1) // (length - 1))  # a sample's last target is the next one's first token
        start = index % windows * (length - 1)
        return self.tokens[start:start + length].long()


def source_of(run: Run, path: Path | None = None, seed: int = 0) -> Source:
    """A text file's bytes, or random tokens. Raises PlanError where the file does not serve the run."""
    if path is None:
        return Synthetic(run.model.vocab, seed)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PlanError("data", str(path), f"it cannot be read ({error.strerror}).", "Give a text file, or leave it out for random tokens.") from None
    if len(data) <= run.recipe.seq_len:
        raise PlanError("data", str(path), f"it has {len(data)} bytes, and one sample takes seq_len + 1 = {run.recipe.seq_len + 1}.",
                        "Use a longer text, or a smaller recipe.seq_len.")
    if max(data) >= run.model.vocab:
        raise PlanError("model.vocab", run.model.vocab, f"the text has a byte of value {max(data)}, and each byte is a token.", "Use model.vocab = 256.")
    return Text(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def data_rank(run: Run, rank: int) -> int:
    """Which share of the batch a rank trains on: tp and cp are inside dp, pp is outside; their peers share it."""
    p = run.plan
    return rank // (p.tp * p.cp) % p.dp


def sample_numbers(run: Run, step: int, rank: int) -> list[list[int]]:
    """The samples of each of a rank's micro-batches in a step, by number.

    Micro-batch i of all ranks together is what micro-batch i of a single process of `micro_batch` x dp sequences is.
    """
    r, dp = run.recipe, run.plan.dp
    starts = (step * r.global_batch + (i * dp + data_rank(run, rank)) * r.micro_batch for i in range(r.grad_accum))
    return [list(range(start, start + r.micro_batch)) for start in starts]


def batches_of_step(run: Run, source: Source, step: int, rank: int, device: str, ends: tuple[bool, bool] | None = None) -> Callable[[], Any]:
    """Reads a rank's samples of a step; what is returned copies the next micro-batch to the device at each call.

    With `ends` (whether the first and the last stage of a pipeline are here) it copies all of them at its one call.
    """
    dtype = DTYPES[run.recipe.token_dtype]
    numbers = sample_numbers(run, step, rank)
    if ends is not None:
        numbers = [[n for micro_batch in numbers for n in micro_batch]]
    read = [torch.stack([source(n, run.recipe.seq_len + 1) for n in micro_batch]) for micro_batch in numbers]
    mine = places(run, rank)
    waiting = iter([(rows[:, mine].to(dtype), rows[:, mine + 1]) for rows in read])
    first, last = ends or (True, True)

    def batch() -> tuple[Tensor | None, Tensor | None]:
        tokens, targets = next(waiting)
        return tokens.to(device, copy=True) if first else None, targets.to(device, copy=True) if last else None

    return batch
