"""FLOPs against torch's own counter on the meta device, and the conventions of MFU and HFU.

Sources: torch.utils.flop_counter.FlopCounterMode; PaLM (arXiv 2204.02311), appendix B: 6N + 12·L·H·Q·T a token;
Korthikanti et al. (arXiv 2205.05198), section 6 and appendix A: full recompute adds one forward pass of the layers.
"""

from typing import Any

import pytest
from steps import LLAMA, step

SHAPES: dict[str, dict[str, Any]] = {
    "gpt": {"layers": 3, "hidden": 96, "heads": 6, "ffn": 384, "vocab": 160, "gated": False, "activation": "gelu", "norm": "layernorm",
            "norm_bias": True, "positions": "learned", "position_rows": 64, "qkv_bias": True, "attention_out_bias": True, "mlp_bias": True,
            "tied_embeddings": True},
    "llama": {"layers": 2, "hidden": 96, "heads": 6, "ffn": 256, "vocab": 160},
    "grouped queries": {"layers": 2, "hidden": 128, "heads": 8, "kv_heads": 2, "ffn": 200, "vocab": 300},
    "wide heads": {"layers": 1, "hidden": 64, "heads": 4, "kv_heads": 1, "head_dim": 32, "ffn": 96, "vocab": 64}}


def counted(shape: dict[str, Any], batch: int, seq: int) -> int:
    """FLOPs of forward and backward of a plain Transformer of this shape, eager attention over the whole square."""
    import torch
    from torch import nn
    from torch.utils.flop_counter import FlopCounterMode

    h, heads, ffn, vocab = (shape[k] for k in ("hidden", "heads", "ffn", "vocab"))
    kv, d = shape.get("kv_heads", heads), shape.get("head_dim", h // heads)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = nn.Linear(h, heads * d), nn.Linear(h, kv * d), nn.Linear(h, kv * d)
            self.out = nn.Linear(heads * d, h)
            self.up, self.down = nn.Linear(h, ffn), nn.Linear(ffn, h)
            self.gate = nn.Linear(h, ffn) if shape.get("gated", True) else None
            self.norms = nn.ModuleList([nn.LayerNorm(h), nn.LayerNorm(h)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            n = self.norms[0](x)
            q, k, v = (p(n).view(batch, seq, -1, d).transpose(1, 2) for p in (self.q, self.k, self.v))
            k, v = (t.repeat_interleave(heads // kv, 1) for t in (k, v))
            probs = ((q @ k.transpose(-1, -2)) / d**0.5).softmax(-1)
            x = x + self.out((probs @ v).transpose(1, 2).reshape(batch, seq, heads * d))
            n = self.norms[1](x)
            up = self.up(n)
            return x + self.down(up.relu() if self.gate is None else up * self.gate(n).sigmoid())

    with torch.device("meta"):
        embedding, head = nn.Embedding(vocab, h), nn.Linear(h, vocab)
        layers = nn.Sequential(*[Layer() for _ in range(shape["layers"])])
        tokens = torch.zeros(batch, seq, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            loss = nn.functional.cross_entropy(head(layers(embedding(tokens))).flatten(0, 1), tokens.flatten())
            loss.backward()
    return counter.get_total_flops()


@pytest.mark.oracle
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("batch", "seq"), [(1, 64), (3, 17)])
def test_model_flops_are_what_torch_counts(name: str, batch: int, seq: int) -> None:
    """FlopCounterMode on the meta device over forward and backward; elementwise work is outside both counts."""
    pytest.importorskip("torch")
    report = step(SHAPES[name], 1, precision="fp32", attention="eager", seq_len=seq, micro_batch=batch)
    assert report.model_flops == counted(SHAPES[name], batch, seq)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_model_flops_of_llama_3_8b_are_6_n_and_12_l_a_d_s_a_token(attention: str) -> None:
    """PaLM, appendix B, with N the parameters that are multiplied: all but the embedding (128256 x 4096) and 65 norms of 4096.

    The whole square of attention counts, whatever the kernel skips.
    """
    report = step("llama-3-8b", 8, gpu="h100", plan={"zero": 3}, seq_len=8192, grad_accum=2, attention=attention)
    multiplied = 8_030_261_248 - 128_256 * 4096 - 65 * 4096
    per_token = 6 * multiplied + 12 * 32 * 32 * 128 * 8192
    assert report.tokens_per_step == 8 * 2 * 8192
    assert report.model_flops == per_token * report.tokens_per_step


@pytest.mark.parametrize("plan", [
    {"zero": 3, "cp": 2}, {"zero": 3, "cp": 4, "cp_kind": "allgather"}, {"zero": 3, "cp": 4, "cp_kind": "ulysses"}, {"zero": 3, "cp": 8, "cp_balance": False},
    {"zero": 3, "tp": 8, "sequence_parallel": True}, {"pp": 4}, {"framework": "megatron", "zero": 1, "tp": 2, "cp": 2, "pp": 2}, {"strategy": "dataparallel"},
    {"framework": "deepspeed", "zero": 3}], ids=str)
def test_model_flops_of_a_token_do_not_depend_on_who_computes_it(plan: dict[str, Any]) -> None:
    """PaLM's count, as above, of a job whose ranks split batch, sequence, matrices or layers."""
    report = step("llama-3-8b", 8, gpu="h100", plan=plan, seq_len=8192, grad_accum=4)
    multiplied = 8_030_261_248 - 128_256 * 4096 - 65 * 4096
    assert report.model_flops == pytest.approx((6 * multiplied + 12 * 32 * 32 * 128 * 8192) * report.tokens_per_step, rel=1e-12)


def test_mfu_is_model_flops_a_second_over_the_dense_peak_of_every_gpu() -> None:
    """H100 SXM data sheet: 989.4 TFLOP/s dense in bf16."""
    report = step("llama-3-8b", 8, gpu="h100", plan={"zero": 3}, seq_len=8192)
    assert report.model_flops is not None and report.step_s is not None
    assert report.mfu == pytest.approx(report.model_flops / report.step_s / (8 * 989.4e12), rel=1e-3)
    assert report.hfu == report.mfu


def test_full_recompute_makes_hardware_flops_four_thirds_of_the_layers() -> None:
    """Korthikanti et al., appendix A: 72 becomes 96 in 72·BLsh²(1 + s/6h); the head (6·s·h·V) is not computed again."""
    plain, again = (step(LLAMA, 1, seq_len=256, plan={"checkpointing": c}) for c in ("none", "full"))
    assert plain.model_flops == again.model_flops == plain.hardware_flops
    head = 6 * 256 * 256 * 1024
    assert plain.model_flops is not None and again.hardware_flops is not None
    assert again.hardware_flops - head == pytest.approx(4 / 3 * (plain.model_flops - head))
    assert again.mfu is not None and again.hfu is not None and again.hfu > again.mfu


def test_half_the_layers_recomputed_add_half_as_much() -> None:
    full, half = (step(LLAMA, 1, seq_len=256, plan={"checkpointing": c}) for c in ("full", "every:2"))
    assert full.hardware_flops is not None and half.hardware_flops is not None and full.model_flops is not None
    assert full.hardware_flops - full.model_flops == pytest.approx(2 * (half.hardware_flops - full.model_flops))


def test_a_chunked_loss_computes_the_head_once_more() -> None:
    """Each chunk is checkpointed: forward of the head again, 2·s·h·V."""
    report = step(LLAMA, 1, seq_len=256, loss="chunked")
    assert report.hardware_flops is not None and report.model_flops is not None
    assert report.hardware_flops - report.model_flops == 2 * 256 * 256 * 1024
