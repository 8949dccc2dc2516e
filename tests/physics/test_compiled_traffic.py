"""What compiled code moves through memory, against torch's own compiler.

Oracle: inductor's scheduler after fusion, `python -m benchmarks.inductor` (torch 2.13, CPU): bytes that the fused kernels of one layer among others,
and of the loss, read and write. The CPU's kernels fuse a sum with the norm that reads it less often than the GPU's.
Megatron's kernels fused by hand: Megatron-LM core/fusions, Transformer Engine's fused rotary embedding.
"""

from typing import Any

import pytest

from costmodel import build_run
from costmodel.program.build import build
from costmodel.program.ir import expand

BATCH, SEQ, HIDDEN, VOCAB = 2, 256, 256, 1024
ELEMENTS, LOGITS = BATCH * SEQ * HIDDEN, BATCH * SEQ * VOCAB
MODEL = {"layers": 4, "hidden": HIDDEN, "heads": 2, "ffn": 1024, "vocab": VOCAB, "positions": "rope", "tied_embeddings": False}
GATED = {**MODEL, "gated": True, "activation": "silu", "norm": "rmsnorm"}
SQUARED = {**MODEL, "gated": False, "activation": "relu_squared", "norm": "rmsnorm_no_weight", "qk_norm": "no_weight"}


def moved(model: dict[str, Any], block: str, phase: str, precision: str, compiled: bool = True) -> float:
    """Bytes of the memory-bound kernels of one block."""
    run = build_run(model=model, cluster={"gpu": "h100", "gpus": 1}, recipe={"micro_batch": BATCH, "seq_len": SEQ, "precision": precision,
                                                                            "compile": compiled})
    blocks = (b for b in expand(build(run).roles[0].step) if b.name == block and b.phase == phase)
    return max(sum(op.nbytes for op in b.ops if op.kind == "memory") for b in blocks)


@pytest.mark.parametrize(("model", "precision", "phase", "inductor"), [
    (GATED, "bf16-pure", "forward", 52.5), (GATED, "bf16-pure", "backward", 84.6),
    (SQUARED, "bf16-mixed", "forward", 101.1), (SQUARED, "bf16-mixed", "backward", 125.3)])
def test_a_compiled_layer_moves_what_inductor_counts(model: dict[str, Any], precision: str, phase: str, inductor: float) -> None:
    assert moved(model, "layer", phase, precision) / ELEMENTS == pytest.approx(inductor, rel=0.12)


def test_a_compiled_loss_moves_eight_bytes_a_logit() -> None:
    """Two reads in forward, one read and the gradient in backward, of 16 bits each: no fp32 copy (4.03 and 4.02 counted)."""
    for phase in ("forward", "backward"):
        norm = 7 * 2 * ELEMENTS  # what the final norm moves, at most
        assert moved(GATED, "head", phase, "bf16-pure") == pytest.approx(4.03 * LOGITS, abs=norm)


def test_megatron_rotates_in_one_kernel_and_drops_and_adds_in_another() -> None:
    """Queries and keys are read and written once each (fused_rope.py); bias_dropout_add reads the branch and the residual, and writes the sum and
    a mask of one byte (fused_bias_dropout.py). Each tensor of the stream has 2 bytes an element."""
    run = build_run(model={**GATED, "kv_heads": 2}, cluster={"gpu": "h100", "gpus": 1}, plan={"framework": "megatron"},
                    recipe={"micro_batch": BATCH, "seq_len": SEQ, "precision": "bf16-mixed", "dropout": 0.1})
    ops = [op for b in expand(build(run).roles[0].step) if b.name == "layer" and b.phase == "forward" for op in b.ops if op.kind == "memory"]
    layers = MODEL["layers"]
    for words, kernels, expected in ((("rope",), 2, 2 * 4), ((".dropout", "hidden", "attention.residual"), 2, 2 * (6 + 1))):
        found = [op for op in ops if op.name.endswith(words)]
        assert sum(op.kernels for op in found) == layers * kernels
        assert sum(op.nbytes for op in found) == layers * expected * ELEMENTS
