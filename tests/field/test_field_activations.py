"""Activations, checkpointing, logits. Each test names its case (C25) and public source.

C04 (NVIDIA/Megatron-LM#965) and C34 (NVIDIA/Megatron-LM#1226) are in tests/physics/test_activations.py.
"""

from typing import Any

import pytest
from asked import GIB, activations, memory, predicted

SMALL: dict[str, Any] = {"layers": 1, "hidden": 256, "heads": 8, "ffn": 512}
"""So small that logits are nearly all there is."""


# -- logits ------------------------------------------------------------------------------------------------------------------


def logits(vocab: int, tokens: int, **given: Any) -> int:
    """Bytes that rise with the vocabulary alone at the peak: what one word costs, times the words."""
    few, many = (memory(predicted(model={**SMALL, "vocab": v}, gpu="h100", seq_len=tokens, precision="bf16-pure", **given)).allocated.by_category
                 for v in (vocab // 2, vocab))
    return 2 * sum(many.get(k, 0) - few.get(k, 0) for k in ("activations", "temporaries"))


def kept_logits(vocab: int, tokens: int, **given: Any) -> int:
    """The same of what forward keeps for backward."""
    few, many = (activations(predicted(model={**SMALL, "vocab": v}, gpu="h100", seq_len=tokens, precision="bf16-pure", **given))
                 for v in (vocab // 2, vocab))
    return 2 * (many - few)


def test_a_loss_in_fp32_keeps_twice_what_one_in_bf16_does() -> None:
    """C25, huggingface/transformers#30860: logits of 16384 tokens x 128256 words in fp32 are 7.83 GiB, in bf16 3.91; the upcast was 43% of a peak."""
    assert kept_logits(128256, 16384, loss="eager") / GIB == pytest.approx(7.83, abs=0.01)
    assert kept_logits(128256, 16384, loss="bf16") / GIB == pytest.approx(3.91, abs=0.01)
    assert kept_logits(128256, 16384, loss="chunked") == 4 * 128256 * 16384 // 8, "the log-softmax of one chunk, while its backward runs"
    assert kept_logits(128256, 16384, loss="fused") == 0


def test_the_peak_of_an_eager_loss_has_three_fp32_copies() -> None:
    """C25 and C26, unslothai/unsloth#824: beside the log-softmax its gradient and the softmax's, 12 bytes a logit; in bf16 half."""
    assert logits(128256, 16384, loss="eager") == 12 * 128256 * 16384
    assert logits(128256, 16384, loss="bf16") == 6 * 128256 * 16384


def test_four_times_the_vocabulary_costs_more_than_ten_gib() -> None:
    """C26, axolotl-ai-cloud/axolotl#1641: Llama-3-8B (128256 words) needs far more than Llama-2-7B (32000) at 16384 tokens, though it is one size class."""
    given: dict[str, Any] = {"gpus": 8, "gpu": "h100", "plan": {"strategy": "fsdp", "checkpointing": "full"}, "seq_len": 16384}
    small, large = (memory(predicted(model=name, **given)).allocated for name in ("llama-2-7b", "llama-3-8b"))
    assert "loss" in small.moment and "loss" in large.moment
    assert (large.total_bytes - small.total_bytes) / GIB >= 10
    assert large.by_category["temporaries"] / small.by_category["temporaries"] == pytest.approx(128256 / 32000, rel=0.01)


@pytest.mark.parametrize(("tp", "gib"), [(1, 4.64), (2, 2.32), (4, 1.16), (8, 0.58)])
def test_a_vocabulary_parallel_loss_divides_its_working_set(tp: int, gib: float) -> None:
    """C28, ISEEKYAN/Megatron-LM#132: 8192 tokens x 151936 words in fp32 are 4.638 GiB, divided by tp."""
    report = predicted(model={**SMALL, "vocab": 151936}, gpus=tp, gpu="h100", plan={"framework": "megatron", "tp": tp}, seq_len=8192)
    base = predicted(model={**SMALL, "vocab": 128 * tp}, gpus=tp, gpu="h100", plan={"framework": "megatron", "tp": tp}, seq_len=8192)
    assert (activations(report) - activations(base)) / GIB == pytest.approx(gib, abs=0.01)


def test_a_chunked_loss_works_on_one_chunk() -> None:
    """C28: in chunks of 1024 tokens 0.58 GiB; three of them at the peak (log-softmax, softmax's gradient, its product) instead of three of 4.64."""
    def held(vocab: int) -> int:
        peak = memory(predicted(model={**SMALL, "vocab": vocab}, gpu="h100", seq_len=8192, precision="bf16-pure", loss="chunked", loss_chunks=8)).allocated
        return peak.by_category["temporaries"] + peak.by_category["activations"]
    assert (held(151936) - held(75968)) / GIB == pytest.approx(3 * 0.58 / 2, rel=0.01)


# -- checkpointing -----------------------------------------------------------------------------------------------------------


def test_eager_attention_grows_with_the_square_of_the_sequence_unless_checkpointed() -> None:
    """C29, NVIDIA-NeMo/Automodel#2585, Gemma-2-9B with eager attention: the score part is four times as much at each doubling, of 42 layers without
    checkpointing, of one with. (transformers' own eager attention also keeps an fp32 softmax and the soft cap.)"""
    def kept(seq_len: int, checkpointing: str) -> int:
        return activations(predicted(model="gemma-2-9b", gpus=8, gpu="h100", plan={"strategy": "fsdp", "checkpointing": checkpointing}, seq_len=seq_len,
                                     attention="eager", loss="fused"))

    def square(seq_len: int, checkpointing: str) -> int:
        return kept(2 * seq_len, checkpointing) - 2 * kept(seq_len, checkpointing)

    assert square(2048, "none") / square(1024, "none") == pytest.approx(4, rel=0.02)
    scores_of_42_layers = 42 * 16 * 2 * 2048**2
    assert square(1024, "none") == pytest.approx(scores_of_42_layers / 2, rel=0.02)
    assert square(1024, "full") <= scores_of_42_layers / 2 / 42 * 1.1


def test_full_recompute_keeps_a_sixteenth_of_a_layer() -> None:
    """C35, NVIDIA/Megatron-LM#1368, Llama-2-7B: 2sbh instead of about 34 (the gate fused, as there); a batch that cannot grow is a framework's defect."""
    def layer(checkpointing: str) -> int:
        plan = {"strategy": "fsdp", "checkpointing": checkpointing}
        few, many = (activations(predicted(model={"base": "llama-2-7b", "layers": n}, gpus=8, gpu="h100", plan=plan, seq_len=4096, compile=True))
                     for n in (8, 9))
        return many - few

    assert layer("full") == 2 * 4096 * 4096
    assert 15 <= layer("none") / layer("full") <= 17


@pytest.mark.parametrize(("cp", "boundaries"), [(1, 157.5), (4, 39.4), (8, 19.7)])
def test_even_fully_checkpointed_a_256k_sequence_keeps_its_boundaries(cp: int, boundaries: float) -> None:
    """C46, hiyouga/LlamaFactory#10474: 60 layers x 262144 tokens x 5376 x 2 bytes = 157.5 GiB, of which a cp group's ranks share the tokens."""
    shape: dict[str, Any] = {"hidden": 5376, "heads": 32, "kv_heads": 16, "head_dim": 128, "ffn": 21504, "vocab": 1024}
    reports = [predicted(model={**shape, "layers": n}, gpus=64, gpu="h100", plan={"strategy": "fsdp", "cp": cp, "checkpointing": "full"}, seq_len=262144,
                         loss="fused") for n in (59, 60)]
    assert 60 * (activations(reports[1]) - activations(reports[0])) / GIB == pytest.approx(boundaries, abs=0.1)
    assert cp > 1 or reports[1].verdict == "does not fit"


def test_keeping_gathered_inputs_costs_more_than_gathering_again() -> None:
    """C44, huggingface/nanotron#203: a 70B layer under tp = 8 with sequence parallelism. DTensor keeps the two gathered inputs, 4(t-1)/t sbh bytes more
    than Megatron, which gathers again; nanotron kept the two scattered outputs as well, twice that."""
    shape: dict[str, Any] = {"hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672, "vocab": 1024}

    def layer(framework: str, precision: str) -> int:
        few, many = (activations(predicted(model={**shape, "layers": n}, gpus=8, gpu="h100", plan={"framework": framework, "tp": 8, "sequence_parallel": True},
                                           seq_len=8192, precision=precision, attention="fa2")) for n in (3, 4))
        return many - few

    more = layer("pytorch", "bf16-pure") - layer("megatron", "bf16-mixed")
    two_gathered = 4 * 8192 * 8192 * 7 // 8
    assert two_gathered <= more < 2 * two_gathered
