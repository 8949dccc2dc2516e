"""Activation memory against Korthikanti et al. and what users of Megatron measured, through a Run and predict().

Sources: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), equations 1 and 2,
sections 4.1 and 5, table 3; NVIDIA/Megatron-LM issues 965 (memory printed around each op) and 1226 (group size).
C04 and C34 are ids of tests/field/cases.toml.
"""

from typing import Any

import pytest
from steps import GPT, MIB, memory, step


def activations(layers: int, model: dict[str, Any], plan: dict[str, Any] | None = None, **recipe: Any) -> int:
    """Highest sum of saved activations of a step in 16 bits, with dropout."""
    report = step({**model, "layers": layers}, 1, gpu="h100", plan=plan, **{"precision": "bf16-pure", "dropout": 0.1, **recipe})
    found = memory(report).activations_bytes
    assert found is not None
    return found


def per_layer(model: dict[str, Any], plan: dict[str, Any] | None = None, **recipe: Any) -> int:
    """What one layer more keeps."""
    return activations(6, model, plan, **recipe) - activations(5, model, plan, **recipe)


def gpt(hidden: int, heads: int) -> dict[str, Any]:
    return {**GPT, "hidden": hidden, "heads": heads, "ffn": 4 * hidden}


SHAPES = [(6144, 64, 2048, 4), (12288, 96, 2048, 1), (20480, 128, 2048, 1), (1024, 16, 512, 2)]
"""h, a, s, b: the 22B, 175B (GPT-3) and 530B (MT-NLG) models of table 3, and a small one."""


@pytest.mark.parametrize(("h", "a", "s", "b"), SHAPES)
def test_an_eager_layer_keeps_34_sbh_and_5_as2b(h: int, a: int, s: int, b: int) -> None:
    """Equation 1: sbh(34 + 5as/h). Beside it each LayerNorm keeps an fp32 mean and rstd a token, which the paper neglects."""
    statistics = 2 * 2 * 4 * s * b
    assert per_layer(gpt(h, a), seq_len=s, micro_batch=b, attention="eager") == 34 * s * b * h + 5 * a * s * s * b + statistics


@pytest.mark.parametrize(("h", "a", "s", "b"), SHAPES)
def test_a_flash_layer_keeps_34_sbh_and_a_log_sum_exp(h: int, a: int, s: int, b: int) -> None:
    """Section 5 without the attention term: q, k, v and the output stay, and an fp32 log-sum-exp a head and token."""
    statistics = 2 * 2 * 4 * s * b
    assert per_layer(gpt(h, a), seq_len=s, micro_batch=b, attention="fa2") == 34 * s * b * h + 4 * a * s * b + statistics


@pytest.mark.parametrize("attention", ["eager", "fa2"])
@pytest.mark.parametrize(("h", "a", "s", "b"), SHAPES)
def test_a_fully_checkpointed_layer_keeps_its_input(h: int, a: int, s: int, b: int, attention: str) -> None:
    """Section 4.1 (and table 2, full recomputation): 2sbh a layer."""
    assert per_layer(gpt(h, a), {"checkpointing": "full"}, seq_len=s, micro_batch=b, attention=attention) == 2 * s * b * h


@pytest.mark.parametrize(("h", "a", "saved"), [(12288, 96, 0.70), (20480, 128, 0.65)])
def test_the_score_tensors_are_70_percent_of_gpt_3_and_65_percent_of_mt_nlg(h: int, a: int, saved: float) -> None:
    """Section 5: dropping the attention term saves 70% of the activations of GPT-3 and 65% of MT-NLG 530B."""
    eager, flash = (per_layer(gpt(h, a), seq_len=2048, attention=kernel) for kernel in ("eager", "fa2"))
    assert (eager - flash) / eager == pytest.approx(saved, abs=0.01)


def test_without_dropout_the_masks_are_gone() -> None:
    """Equation 1's terms one by one: two masks of sbh outside attention; as²b of mask and 2as²b of dropped scores inside."""
    h, a, s = 1024, 16, 512
    kept = [per_layer(gpt(h, a), seq_len=s, attention="eager", dropout=p) for p in (0.1, 0.0)]
    assert kept[0] - kept[1] == 2 * s * h + 3 * a * s * s


@pytest.mark.parametrize(("heads", "batch", "per_score"), [(16, 1, 5), (2, 2, 5), (2, 1, 7), (3, 2, 7)])
def test_scores_are_kept_wide_where_megatron_s_softmax_kernel_does_not_take_them(heads: int, batch: int, per_score: int) -> None:
    """megatron/core/fusions/fused_softmax.py: the kernel runs where 4 divides batch x heads of a rank; else the softmax of an fp32 copy stays, 4 bytes
    instead of 2, beside the mask of dropout and the dropped scores. vTrain's runs with two heads a rank are a quarter slower than their neighbours."""
    h, s = 64 * heads, 512
    kept = [per_layer(gpt(h, heads), {"framework": "megatron"}, seq_len=s, micro_batch=batch, attention=kernel, precision="bf16-mixed")
            for kernel in ("eager", "fa2")]
    assert kept[0] - kept[1] == heads * batch * (per_score * s * s - 4 * s)


PHI_3 = {"hidden": 3072, "heads": 32, "ffn": 8192, "vocab": 32064}


def test_the_attention_scores_of_a_phi_3_layer_take_2560_mib() -> None:
    """C04, Megatron-LM issue 965: softmax output 1024, dropout output 1024 and mask 512 MiB; a flash kernel has none of it."""
    eager, flash = (per_layer(PHI_3, seq_len=4096, attention=kernel) for kernel in ("eager", "fa2"))
    log_sum_exp = 32 * 4096 * 4
    assert eager - (flash - log_sum_exp) == 2560 * MIB


def test_the_rest_of_a_phi_3_layer_takes_36_sbh() -> None:
    """C04: 4040 - 1024 - 2584 = 432 MiB beyond the scores, with Megatron's fused SwiGLU (here: compiled)."""
    rest = per_layer(PHI_3, seq_len=4096, attention="fa2", compile=True) - 32 * 4096 * 4
    assert 408 * MIB <= rest <= 440 * MIB


def test_an_unfused_gate_keeps_one_more_product_of_the_ffn() -> None:
    """Eager silu(gate)·up saves the activated gate as well: 2·s·b·ffn bytes."""
    eager, fused = (per_layer(PHI_3, seq_len=4096, attention="fa2", compile=c) for c in (False, True))
    assert eager - fused == 2 * 4096 * 8192


@pytest.mark.parametrize(("group", "expected"), [(1, 98), (2, 100), (4, 152), (8, 280), (32, 1090)])
def test_larger_checkpoint_groups_do_not_lower_the_peak(group: int, expected: int) -> None:
    """C34, Megatron-LM issue 1226: peak(g) = 2sbh·L/g + 34sbh·g for L = 32. The first input of a group is both terms' at most once."""
    h, a, s, b = 1024, 16, 512, 2
    peak = activations(32, gpt(h, a), {"checkpointing": f"full:{group}"}, seq_len=s, micro_batch=b, attention="fa2")
    assert peak / (s * b * h) == pytest.approx(expected, abs=2.1)


def test_every_second_layer_checkpointed_keeps_half_of_the_rest() -> None:
    """A layer that is not checkpointed keeps 34sbh, one that is 2sbh: two layers more add their sum."""
    h, a, s = 1024, 16, 512
    plan = {"checkpointing": "every:2"}
    two = activations(8, gpt(h, a), plan, seq_len=s, attention="fa2") - activations(6, gpt(h, a), plan, seq_len=s, attention="fa2")
    assert two == 36 * s * h + 4 * a * s + 16 * s


def test_logits_cost_their_compute_copy_and_fp32_in_the_loss() -> None:
    """CrossEntropyLoss on bf16 logits cast to fp32: the log-softmax saved for backward, 4 bytes a logit, beyond what the vocabulary
    of one row keeps; chunked losses keep that of one chunk of eight, while its backward runs."""
    s, step_rows = 512, 4096
    sizes = {loss: [activations(2, {**gpt(1024, 16), "vocab": v}, seq_len=s, loss=loss) for v in (32000, 32000 + step_rows)]
             for loss in ("eager", "chunked")}
    assert sizes["eager"][1] - sizes["eager"][0] >= 4 * s * step_rows
    assert sizes["chunked"][1] - sizes["chunked"][0] == 4 * s // 8 * step_rows


def test_grouped_queries_keep_smaller_keys_and_values() -> None:
    """Llama-3-8B: 8 of 32 heads; k and v are a quarter of q, so a flash layer keeps 2·(2·sbh) · 3/4 less."""
    base = {"hidden": 1024, "heads": 32, "ffn": 4096, "vocab": 512}
    many, few = (per_layer({**base, "kv_heads": k}, seq_len=512, attention="fa2") for k in (32, 8))
    assert many - few == 2 * 2 * 512 * 1024 * 3 // 4
