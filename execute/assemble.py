# mypy: disable-error-code="no-untyped-call, no-any-return, misc"
"""One rank's program, put together: the model, spread by the plan's strategy, on its device, with values and an optimizer."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from costmodel.spec import Run
from execute import compat
from execute.checkpoint import Around
from execute.dtypes import DTYPES
from execute.kernels import TABLES
from execute.model import Context, Transformer
from execute.scaling import LossScale
from execute.strategies import Prepared, Region, no_region, strategy
from execute.strategies.context import shared_sequence
from execute.strategies.pipeline import Stages
from execute.weights import init_weights


def assemble(run: Run, device: str, seed: int = 0) -> Prepared:
    """What a real training step needs, in the caller's process group: `device` is "cpu" or this rank's "cuda:0"."""
    model = outline(run, torch.device(device).type, real=True)
    give_storage(model, device)
    init_weights(model, seed)
    return prepare(run, model, device=device)


def outline(run: Run, device_type: str = "cpu", *, real: bool = False, around: Around = nullcontext) -> Transformer | Stages:
    """The model without storage, spread for a kind of device."""
    model = build(run, "meta", real=real, around=around)
    if real and run.recipe.compile:
        compile_layers(model)
    strategy(run).shard(run, model, device_type)
    return model


def give_storage(model: Transformer | Stages, device: str = "cpu") -> None:
    """Empty memory for what was outlined, on fake tensors or real ones."""
    compat.materialise(model, lambda t: torch.empty(t.shape, dtype=t.dtype, device=device))


def prepare(run: Run, model: Transformer | Stages, *, dry: bool = False, device: str = "cpu", region: Region = no_region) -> Prepared:
    """The strategy's wrapping, the optimizer, and the loss scale where the precision has one."""
    prepared: Prepared = strategy(run).prepare(run, model, dry=dry, region=region)
    if model.context.sequence:
        prepared.axes = {**prepared.axes, "cp": model.context.sequence.group}
    if run.recipe.precision.loss_scaling:
        prepared.loss_scale = LossScale(device)
    return prepared


def build(run: Run, device: str, *, real: bool = False, around: Around = nullcontext) -> Transformer | Stages:
    """The model of a run (under a pipeline, this rank's stages) in the dtype of its parameters.

    `device` is "meta" where storage comes later; `real` says that values will be computed, which the kernels of a CUDA dry run do not.
    """
    table = TABLES.cuda if device == "meta" and not real and run.cluster.accelerator.kernel_table == "cuda" else TABLES.plain
    context = Context(run.model, run.recipe, run.plan.checkpointing, table, around, shared_sequence(run, table), run.plan.ep)
    with torch.device(device), default_dtype(DTYPES[run.recipe.precision.parameter]):
        return Stages(run, context) if run.plan.pp > 1 else Transformer(context)


def compile_layers(model: Transformer | Stages) -> None:
    """torch.compile, layer by layer: what a layer does, inside the hooks that a strategy puts around it."""
    for stage in model.stages if isinstance(model, Stages) else [model]:
        for layer in stage.layers:
            layer.forward = torch.compile(layer.forward)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Build parameters in a dtype (a fake module cannot be cast afterwards)."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
