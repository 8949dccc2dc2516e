"""One layer under tensor parallelism: how each weight is cut, the heads of a rank, and where the collectives fall."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from costmodel.memory import read_block
from costmodel.program.build import Builder
from costmodel.program.inventory import inventory_of
from costmodel.program.ir import Block, Part, Seq
from costmodel.program.parallel.base import LAYER

Cut = Literal["column", "row", "vocabulary", "whole"]


@dataclass(frozen=True, slots=True)
class WeightCut:
    """A weight and the part of it on one tp rank; shapes are (out, in)."""

    name: str
    shape: tuple[int, ...]
    local: tuple[int, ...]
    cut: Cut
    """column: its outputs are split, so each rank makes some of the features; row: its inputs are, so each rank makes a partial sum."""


@dataclass(frozen=True, slots=True)
class Fall:
    """A collective of a layer: behind which operation it runs."""

    phase: str
    name: str
    """The operation of the program it belongs to."""
    after: str
    """The matmul or norm that ran last before it; empty where it opens the phase."""
    collective: str
    message_bytes: int
    waits: bool
    """Compute waits for it at once."""


@dataclass(frozen=True, slots=True)
class LayerSplit:
    """A layer on one rank of a tp group."""

    tp: int
    sequence_parallel: bool
    weights: tuple[WeightCut, ...]
    heads: int
    kv_heads: int
    """Per rank."""
    falls: tuple[Fall, ...]
    """In order: forward, then backward."""
    saved_bytes: int
    """What a layer keeps of one micro-batch for backward, on one rank."""
    saved_whole_bytes: int
    """The same without tensor parallelism."""


def layer_split(builder: Builder, step: Part, alone: Builder) -> LayerSplit:
    """A layer of a program with tp > 1; `alone` builds the same model on one GPU."""
    run = builder.run
    return LayerSplit(run.plan.tp, run.plan.sequence_parallel, tuple(_cuts(builder)), run.model.heads // run.plan.tp, run.model.kv_heads // run.plan.tp,
                      tuple(_falls(step)), saved_bytes(builder), saved_bytes(alone))


def saved_bytes(builder: Builder) -> int:
    """Activations that the forward of a layer leaves for its backward, checkpointing aside."""
    return read_block(builder.forward_core(LAYER, save=True, drop=False)).held


def _cuts(builder: Builder) -> Iterator[WeightCut]:
    run = builder.run
    whole = inventory_of(run.model_copy(update={"plan": run.plan.model_copy(update={"tp": 1})}))
    local = inventory_of(run)
    for unit in ("embedding", "layer", "head"):
        for a, b in zip(getattr(whole, unit).params, getattr(local, unit).params, strict=True):
            yield WeightCut(a.name, a.shape, b.shape, _cut(unit, a.shape, b.shape))


def _cut(unit: str, whole: tuple[int, ...], local: tuple[int, ...]) -> Cut:
    if whole == local:
        return "whole"
    if whole[0] == local[0]:
        return "row"
    return "column" if unit == "layer" else "vocabulary"


def _falls(step: Part) -> Iterator[Fall]:
    """The tp collectives of the first layer's forward and backward that the program has."""
    for phase in ("forward", "backward"):
        block = next((b for b in _layers(step) if b.phase == phase and any(op.comm and op.comm.axis == "tp" for op in b.ops)), None)
        last = ""
        for op in block.ops if block else ():
            if op.comm and op.comm.axis == "tp":
                yield Fall(phase, op.name, last, op.comm.kind, op.comm.nbytes, not op.event)
            elif op.kind in ("matmul", "attention") or op.name.removesuffix(".grad").endswith("_norm"):
                last = op.name


def _layers(part: Part) -> Iterator[Block]:
    """The blocks of layers, repeats once."""
    if isinstance(part, Seq):
        for child, _ in part.parts:
            yield from _layers(child)
    elif part.name == LAYER:
        yield part

