"""Layers of one kind: what tells the layers of a model apart, and which layer is of which kind."""

from typing import NamedTuple

from costmodel.spec.base import PlanError
from costmodel.spec.model import Model

LETTERS = {"global": "L", "sliding": "S", "alternating": "SL"}
"""The window pattern that an attention pattern stands for; "mixed" has letters of its own."""


class LayerKind(NamedTuple):
    """What a layer has that another layer of the model may not have."""

    moe: bool
    """Its feed-forward block is a mixture of experts."""
    window: int
    """Tokens that a token sees, itself the last of them; 0: all before it."""


def layer_kinds(model: Model, seq_len: int) -> tuple[LayerKind, ...]:
    """The kind of each layer, at a sequence length: a window as long as the sequence is none."""
    window = model.sliding_window if 0 < model.sliding_window < seq_len else 0
    dense = model.layers if model.moe is None else min(model.moe.first_dense_layers, model.layers)
    letters = (model.window_pattern or LETTERS.get(model.attention_pattern, "")) if window else "L"
    if not letters:
        raise PlanError("model.window_pattern", "", "layers with and without a window are mixed here, and which is which is not said.",
                        "Use window_pattern = SSSL, say: S a layer with a window, L one without, repeated over the layers.")
    if len(set(letters)) == 1 and dense in (0, model.layers):
        return (LayerKind(model.moe is not None and not dense, window if letters[0] == "S" else 0),) * model.layers
    kinds = {(moe, letter): LayerKind(moe, window if letter == "S" else 0) for moe in (False, True) for letter in "SL"}
    return tuple(kinds[i >= dense, letters[i % len(letters)]] for i in range(model.layers))
