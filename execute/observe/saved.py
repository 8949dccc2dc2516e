"""What autograd saves in one layer, operation by operation, read off the graph's nodes on fake tensors.

    python -m execute.observe.saved RUN.toml [FIELD=VALUE…]
"""

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from costmodel.spec import Run
from execute import compat
from execute.assemble import build
from execute.dtypes import DTYPES, word
from execute.model import Layer, Transformer


class Saved(NamedTuple):
    """One tensor that a node of the graph keeps."""

    op: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    """Bytes of its storage."""
    storage: int
    """Equal for tensors that share a storage."""
    first: bool
    """The first to keep this storage; a layer's bytes are the sum over these that are activations."""
    role: str
    """input (the layer's own input), parameter, constant (rotary tables, mask) or activation."""


def saved_bytes_by_op(run: Run) -> list[Saved]:
    """Every tensor that autograd saves in one layer of the run's model, in the order of the forward pass."""
    one = run.model_copy(update={"model": run.model.model_copy(update={"layers": 1})})
    precision, shape = run.recipe.precision, (run.recipe.micro_batch, run.recipe.seq_len, run.model.hidden)
    stream = precision.parameter if precision.autocast else precision.compute
    parameter = DTYPES[precision.parameter if precision.autocast or run.plan.zero != 3 else precision.compute]
    model = build(one, "meta")
    assert isinstance(model, Transformer)
    with compat.FakeTensorMode():
        compat.materialise(model, lambda t: torch.empty(t.shape, dtype=parameter if t.dtype == DTYPES[precision.parameter] else t.dtype))
        layer = next(iter(model.layers))
        assert isinstance(layer, Layer)
        layer.checkpointed = False
        x = torch.empty(shape, dtype=DTYPES[stream], requires_grad=True)
        with torch.autocast("cpu", DTYPES[precision.compute], enabled=precision.autocast):
            y = layer(x, model.tables())
        roles = {compat.storage_key(t.untyped_storage()): "parameter" for t in model.parameters()}
        roles |= {compat.storage_key(t.untyped_storage()): "constant" for t in model.buffers()}
        roles[compat.storage_key(x.untyped_storage())] = "input"
        return _walk(y.grad_fn, roles)


def layer_saved_bytes(run: Run) -> int:
    """Bytes that one layer adds to what is alive at the end of forward: its saved activations and its input."""
    return sum(s.nbytes for s in saved_bytes_by_op(run) if s.first and s.role in ("activation", "input"))


def _walk(root: Any, roles: dict[int, str]) -> list[Saved]:
    nodes, seen, stack = [], set(), [root]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes.append(node)
        stack += [parent for parent, _ in node.next_functions]
    nodes.sort(key=lambda n: n._sequence_nr())
    out: list[Saved] = []
    numbers: dict[int, int] = {}
    for node in nodes:
        for name, tensor in _saved_tensors(node):
            key = compat.storage_key(tensor.untyped_storage())
            first = key not in numbers
            number = numbers.setdefault(key, len(numbers))
            out.append(Saved(node.name().removesuffix("Backward0"), name, tuple(tensor.shape), word(tensor.dtype), tensor.untyped_storage().nbytes(),
                             number, first, roles.get(key, "activation")))
    return out


def _saved_tensors(node: Any) -> list[tuple[str, Tensor]]:
    if hasattr(node, "saved_tensors"):
        return [(f"saved[{i}]", t) for i, t in enumerate(node.saved_tensors) if t is not None]
    found = []
    for attribute in dir(node):
        if attribute.startswith("_saved_"):
            value = getattr(node, attribute)
            values = value if isinstance(value, (list, tuple)) else [value]
            found += [(attribute.removeprefix("_saved_"), t) for t in values if isinstance(t, Tensor)]
    return found


def render(run: Run) -> str:
    """A table for people."""
    rows = saved_bytes_by_op(run)
    lines = [f"{'operation':<42} {'saved as':<14} {'shape':<22} {'dtype':<9} {'bytes':>14}  role"]
    for s in rows:
        note = s.role if s.first else f"{s.role}, storage seen above"
        lines.append(f"{s.op:<42} {s.name:<14} {'x'.join(map(str, s.shape)) or '-':<22} {s.dtype:<9} {s.nbytes:>14,}  {note}")
    return "\n".join([*lines, f"one layer keeps {layer_saved_bytes(run):,} bytes (its input included, parameters and constants not)"])


if __name__ == "__main__":
    from pathlib import Path

    from costmodel.cli.options import collect
    print(render(collect(Path(sys.argv[1]), {}, sys.argv[2:]).resolve().run))
