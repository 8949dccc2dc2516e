"""What one layer saves for backward, against published closed forms."""

import pytest

pytest.importorskip("torch")

from small_runs import GPT, LLAMA, cpu_run, small_run

from execute.observe.saved import layer_saved_bytes, saved_bytes_by_op


@pytest.mark.parametrize("micro_batch", [2, 4])
def test_gpt_layer_with_dropout_saves_korthikanti_s_34_sbh_and_5_as2b(micro_batch: int) -> None:
    """arXiv 2205.05198, equation 2: sbh(34 + 5as/h) in 16 bits; plus LayerNorm's float32 statistics, which it leaves out."""
    run = small_run(GPT, recipe={"precision": "bf16-pure", "dropout": 0.1, "attention": "eager", "micro_batch": micro_batch})
    s, b, h, a = 128, micro_batch, 256, 4
    statistics = 2 * 2 * s * b * 4
    scalar = 8  # the scale of the scores, a number in host memory
    assert layer_saved_bytes(run) == s * b * h * 34 + 5 * a * s * s * b + statistics + scalar


def test_gpt_layer_with_flash_attention_has_no_quadratic_term() -> None:
    run = small_run(GPT, recipe={"precision": "bf16-pure", "dropout": 0.1})
    s, b, h, a = 128, 2, 256, 4
    scores = [x for x in saved_bytes_by_op(run) if x.shape[-2:] == (s, s)]
    assert not scores
    statistics, lse, rng = 2 * 2 * s * b * 4, 4 * a * s * b, 24
    assert layer_saved_bytes(run) == s * b * h * 34 + statistics + lse + rng


def test_llama_layer_with_float_cast_norms_saves_20_plus_4g_plus_8f() -> None:
    """Eager Llama as first published, with grouped queries: bytes per element of [s, b, h], plus the log-sum-exp and the norms' rstd."""
    run = small_run(LLAMA, recipe={"precision": "bf16-pure", "fused_norm": False})
    u, g, f = 128 * 2 * 256, 2 / 4, 688 / 256
    lse, rstd, rng = 4 * 4 * 128 * 2, 2 * 4 * 128 * 2, 24
    assert layer_saved_bytes(run) == u * (20 + 4 * g + 8 * f) + lse + rstd + rng


def test_fused_rms_norm_saves_its_input_and_one_float_a_row_on_cuda_and_two_float_copies_on_cpu() -> None:
    cuda = [x for x in saved_bytes_by_op(small_run(recipe={"precision": "bf16-pure"})) if x.op.startswith("FusedRMSNorm")]
    assert [(x.dtype, x.role) for x in cuda[:3]] == [("bf16", "input"), ("bf16", "parameter"), ("fp32", "activation")]
    cpu = [x for x in saved_bytes_by_op(cpu_run(recipe={"precision": "bf16-pure"})) if x.op in ("Pow", "Mul") and x.first and x.dtype == "fp32"]
    wide = 128 * 2 * 256 * 4
    assert sum(x.nbytes for x in cpu if x.nbytes == wide) >= 2 * wide


def test_dropout_masks_are_one_byte_on_cuda_and_the_dtype_on_cpu() -> None:
    recipe = {"precision": "bf16-pure", "dropout": 0.1, "attention": "eager"}
    cuda = [x for x in saved_bytes_by_op(small_run(GPT, recipe=recipe)) if x.op == "NativeDropout"]
    assert {x.dtype for x in cuda} == {"bool"}
    cpu = [x for x in saved_bytes_by_op(cpu_run(GPT, recipe=recipe)) if x.op.startswith("Mul") and x.shape == (2, 128, 256)]
    assert {x.dtype for x in cpu} == {"bf16"}


def test_float32_attention_with_grouped_queries_keeps_scores_on_cuda() -> None:
    """The memory-efficient kernel takes no grouped queries, so scaled_dot_product_attention falls back to the math path."""
    saved = saved_bytes_by_op(small_run(LLAMA, recipe={"precision": "fp32"}))
    assert any(x.shape[-2:] == (128, 128) and x.dtype == "fp32" for x in saved)
    whole = saved_bytes_by_op(small_run({**LLAMA, "kv_heads": 4}, recipe={"precision": "fp32"}))
    assert not any(x.shape[-2:] == (128, 128) for x in whole)
