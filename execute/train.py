"""The steps of a real training run: its samples and its learning rate, step by step."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from costmodel.spec import Run
from execute.data import Source, batches_of_step
from execute.learning_rate import learning_rate, set_learning_rate
from execute.step import train_step
from execute.strategies import Prepared
from execute.strategies.pipeline import Stages


class Training(NamedTuple):
    """One rank's part of a training run."""

    run: Run
    prepared: Prepared
    source: Source
    rank: int
    device: str
    steps: int
    """Of the whole run; the learning rate ends with them."""


def make_ready(job: Training, step: int) -> Callable[..., Tensor | None]:
    """Read the samples and set the learning rate of a step; what is returned performs it, and returns this rank's mean loss where it knows it."""
    run, model = job.run, job.prepared.model
    batch: Callable[[], Any] = batches_of_step(run, job.source, step, job.rank, job.device, model.ends if isinstance(model, Stages) else None)
    set_learning_rate(job.prepared.optimizer, learning_rate(run.recipe, step, job.steps))
    return partial(train_step, run, job.prepared, batch)
