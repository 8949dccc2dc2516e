# mypy: disable-error-code="no-untyped-call, no-any-return, misc"
"""Tensor parallelism with DTensor, as torchtitan applies it, alone or under FSDP2 and HSDP.

Shards: query, key, value, gate and up by column, out and down by row, embedding and head by vocabulary, learned positions by row. With
sequence parallelism the residual stream and the norms work on 1/t of the tokens: an all-gather before, a reduce-scatter after each
block; without it the stream is whole on every rank and an all-reduce follows each block. `loss_parallel` leaves the logits split by
vocabulary. Source: torchtitan, models/llama3/infra/parallelize.py, apply_tp; the embedding of positions:
torch/testing/_internal/distributed/_tensor/common_dtensor.py, Transformer.parallelize; norms without sequence parallelism:
torchtitan, distributed/tensor_parallel.py, NoParallel.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from costmodel.spec import Run
from execute.strategies import Prepared, Region, fsdp, no_region, single
from execute.strategies.mesh import groups_of, mesh_of


def shard(run: Run, model: nn.Module, device: str = "cpu", mesh: DeviceMesh | None = None) -> None:
    """Tensor parallelism, then FSDP2 on the other axes of the same mesh."""
    mesh = mesh or mesh_of(run, device)
    parallelize(run, model, mesh["tp"])
    if run.plan.zero == 3:
        fsdp.shard(run, model, device, mesh)


def prepare(run: Run, model: nn.Module, *, dry: bool, region: Region = no_region) -> Prepared:
    """The model with its optimizer; forward and backward of each micro-batch know of the split logits."""
    prepared = (fsdp if run.plan.zero == 3 else single).prepare(run, model, dry=dry, region=region)
    inner = prepared.micro_batch

    @contextmanager
    def micro_batch(last: bool) -> Iterator[None]:
        with inner(last), split_logits(run):
            yield

    prepared.micro_batch = micro_batch
    prepared.axes = groups_of(root_mesh(model))
    return prepared


def split_logits(run: Run) -> Any:
    """The context in which cross_entropy takes logits that are split by vocabulary."""
    return loss_parallel() if run.plan.loss_parallel else nullcontext()


def root_mesh(model: nn.Module) -> DeviceMesh:
    """The mesh of all axes, read off a parameter."""
    first = next(model.parameters())
    assert isinstance(first, DTensor)
    mesh = first.device_mesh
    return mesh._get_root_mesh()


class Replicated(ParallelStyle):
    """A module that every rank runs whole, its parameters DTensors like all others."""

    def __init__(self) -> None:
        self.layout = (Replicate(),)

    def _enter(self, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        x, *rest = inputs
        return (x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, self.layout, run_check=False), *rest)

    @staticmethod
    def _leave(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return output.to_local()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, None, self._enter, self._leave)


def parallelize(run: Run, model: nn.Module, mesh: DeviceMesh) -> None:
    """parallelize_module with the styles of a whole model, or of those modules that a pipeline stage has."""
    present = dict(model.named_modules())
    plan = {name: style for name, style in (*_edges(run), *_layers(run, len(list(model.get_submodule("layers").children()))))
            if name in present}
    parallelize_module(model, mesh, plan, src_data_rank=None)


def _norm(run: Run) -> ParallelStyle:
    return SequenceParallel() if run.plan.sequence_parallel else Replicated()


def _edges(run: Run) -> Iterator[tuple[str, ParallelStyle]]:
    """Embedding, positions, norms outside the layers, head."""
    sp, split = run.plan.sequence_parallel, run.plan.loss_parallel
    stream = Shard(1) if sp else Replicate()
    yield "embedding", RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
    yield "positions", RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0) if sp else Replicate())
    yield "embedding_norm", SequenceParallel(use_local_output=True) if sp else Replicated()
    yield "final_norm", _norm(run)
    yield "head", ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1) if split else Replicate(), use_local_output=not split)


def _layers(run: Run, layers: int) -> Iterator[tuple[str, ParallelStyle]]:
    """The modules of every layer: blocks take the whole sequence, and give back their stream's layout."""
    stream = Shard(1) if run.plan.sequence_parallel else Replicate()
    local_norm = SequenceParallel(use_local_output=True) if run.plan.sequence_parallel else Replicated()
    for i in range(layers):
        at = f"layers.{i}"
        for norm in ("attention_norm", "mlp_norm"):
            yield f"{at}.{norm}", _norm(run)
        for norm in ("attention_post_norm", "mlp_post_norm"):
            yield f"{at}.{norm}", local_norm
        for norm in ("attention.q_norm", "attention.k_norm"):
            yield f"{at}.{norm}", SequenceParallel(sequence_dim=2, use_local_output=True)
        yield f"{at}.attention", PrepareModuleInput(input_layouts=(stream, None), desired_input_layouts=(Replicate(), None))
        yield f"{at}.mlp", PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),))
        for column in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"):
            yield f"{at}.{column}", ColwiseParallel()
        for row in ("attention.out", "mlp.down"):
            yield f"{at}.{row}", RowwiseParallel(output_layouts=stream)
