"""The bars of a step sum to it, for every legal run; and each is what its name says where that can be told without the model of time."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import examples, runs

from costmodel import PlanError, Run, build_run, predict
from costmodel.program.layers import resolved_attention
from costmodel.waterfall import IDEAL, UNEXPLAINED, Waterfall, waterfall


def bars(w: Waterfall) -> dict[str, float]:
    return {bar.name: bar.seconds for bar in w.bars}


def sums(run: Run, measured_s: float | None = None) -> None:
    report = predict(run, scaling=False)
    w = waterfall(run, report, measured_s=measured_s)
    assert report.step_s is not None and report.mfu is not None
    assert w.step_s == (measured_s or w.predicted_s)
    assert math.isclose(w.predicted_s, report.step_s, rel_tol=1e-9)
    assert math.isclose(sum(bar.seconds for bar in w.bars), w.step_s, rel_tol=1e-9)
    assert math.isclose(sum(bar.share for bar in w.bars), 1.0, rel_tol=1e-9)
    assert math.isclose(w.mfu * w.step_s, report.mfu * report.step_s, rel_tol=1e-9)
    assert math.isclose(w.bars[-1].left, w.mfu, rel_tol=1e-6, abs_tol=1e-9)
    assert (UNEXPLAINED in bars(w)) == (measured_s is not None)


@examples(80)
@given(runs(), st.one_of(st.none(), st.floats(1e-4, 100.0)))
def test_the_bars_sum_to_the_step(run: Run, measured_s: float | None) -> None:
    sums(run, measured_s)


@pytest.mark.parametrize("plan", [
    {"tp": 4, "framework": "megatron"}, {"tp": 2, "zero": 3, "sequence_parallel": True}, {"pp": 4, "framework": "megatron", "zero": 1},
    {"pp": 2, "tp": 2, "framework": "megatron", "tp_overlap": "async", "sequence_parallel": True}, {"pp": 4, "schedule": "gpipe"},
    {"pp": 2, "schedule": "interleaved", "virtual_stages": 2, "framework": "megatron", "checkpointing": "full"}, {"pp": 4, "stage_layers": [3, 2, 2, 1]},
    {"pp": 2, "zero": 3, "reshard_after_forward": False, "checkpointing": "selective"}, {"pp": 4, "schedule": "naive", "framework": "megatron"}])
def test_the_bars_sum_to_the_step_where_work_is_divided(plan: dict[str, Any]) -> None:
    model = {"layers": 8, "hidden": 1024, "heads": 16, "kv_heads": 8, "ffn": 4096, "vocab": 4096}
    run = build_run(model=model, cluster={"gpus": 16}, plan=plan, recipe={"seq_len": 1024, "grad_accum": 4, "precision": "bf16-pure"})
    sums(run)
    sums(run, 1.0)
    found = waterfall(run, predict(run, scaling=False))
    square = 4.0 * 1024 ** 2 * 1024 * 8 * run.recipe.global_batch / 16
    assert bars(found)["attention counted"] == pytest.approx(-1.25 * square / found.peak_flops_per_s, rel=1e-6)


@examples(80)
@given(runs())
def test_nothing_but_the_convention_of_attention_makes_a_step_shorter(run: Run) -> None:
    w = waterfall(run, predict(run, scaling=False))
    for bar in w.bars:
        if bar.name != "attention counted":
            assert bar.seconds > 0, bar
            assert bar.without > w.mfu


@examples(80)
@given(runs())
def test_matmuls_run_the_flops_that_are_counted_and_attention_what_its_kernel_needs(run: Run) -> None:
    """Flash kernels: 4·s²·d a head forward and 2.5 times that backward (arXiv 2307.08691), of which causality skips half; MFU counts the
    whole square three times. Eager attention runs what is counted. Matmuls always do."""
    m, r = run.model, run.recipe
    square = 4.0 * r.seq_len ** 2 * m.heads * m.head_dim * m.layers * r.global_batch / run.cluster.gpus
    flash = resolved_attention(run) not in ("eager", "math")
    runs_squares = 3.5 * (0.5 if r.causal else 1.0) if flash else 3.0
    report = predict(run, scaling=False)
    w = waterfall(run, report)
    expected = (runs_squares - 3.0) * square / w.peak_flops_per_s
    assert math.isclose(bars(w).get("attention counted", 0.0), expected, rel_tol=1e-6, abs_tol=1e-9 * w.ideal_s)


def test_the_bars_of_a_pipeline_are_of_the_mean_gpu_and_split_its_idle_time() -> None:
    """Equal stages idle (p - 1)/m of their work in 1F1B (arXiv 2104.04473, section 2.2); what embedding and head add is unevenness.

    Stages of 1, 1, 1 and 5 layers: the last runs 8 times 5 layers, after 3 others: (43 - 16)/16 of the mean work is idle, 6/16 of it by schedule.
    """
    run = build_run(model={"layers": 8, "hidden": 4096, "heads": 32, "ffn": 16384, "vocab": 128, "tied_embeddings": False}, cluster={"gpus": 4},
                    plan={"pp": 4}, recipe={"grad_accum": 8, "precision": "bf16-pure", "clip_norm": 0})
    report = predict(run, scaling=False)
    found = bars(waterfall(run, report))
    work = sum(sum(t.phases[name] for name in ("forward", "backward")) for t in (role.time for role in report.roles) if t) / 4
    assert found["bubble"] == pytest.approx(3 / 8 * work)
    assert 0 < found["uneven ranks"] < 0.1 * found["bubble"]
    lopsided = build_run(model=run.model, cluster={"gpus": 4}, plan={"pp": 4, "stage_layers": [1, 1, 1, 5]},
                         recipe={"grad_accum": 8, "precision": "bf16-pure", "clip_norm": 0})
    other = bars(waterfall(lopsided, predict(lopsided, scaling=False)))
    assert other["bubble"] == pytest.approx(found["bubble"], rel=0.02)
    assert other["uneven ranks"] == pytest.approx(21 / 6 * found["bubble"], rel=0.05)


def test_compiled_code_moves_fewer_bytes_and_a_larger_batch_waits_less_for_the_host() -> None:
    recipes = ({}, {"micro_batch": 32}, {"compile": True})
    small = [build_run(params="50M", cluster={"gpus": 1}, recipe={"seq_len": 512, **recipe}) for recipe in recipes]
    eager, large, compiled = (waterfall(run, predict(run, scaling=False)) for run in small)
    assert bars(compiled)["memory-bound"] < bars(eager)["memory-bound"]
    assert bars(large).get("host wait", 0.0) / large.step_s < bars(eager)["host wait"] / eager.step_s
    assert large.mfu > eager.mfu


@pytest.mark.parametrize("measured_s", [0.0, -1.0, float("nan")])
def test_a_measured_step_is_positive(measured_s: float) -> None:
    run = build_run(params="50M", cluster={"gpus": 1})
    with pytest.raises(PlanError, match="measured = "):
        waterfall(run, predict(run, scaling=False), measured_s=measured_s)


def test_the_first_bar_is_the_model_flops_at_the_peak() -> None:
    """GPT-2 small (124,475,904 parameters in matmuls with the head: 12·12·768² + 50304·768), one sequence of 1,024 tokens on an A100 (312 TFLOP/s)."""
    run = build_run(model="gpt2", cluster={"gpus": 1, "gpu": "a100"}, recipe={"seq_len": 1024})
    m = run.model
    per_token = 6 * (12 * 12 * 768 ** 2 + m.vocab * 768) + 12 * 12 * 768 * 1024
    w = waterfall(run, predict(run, scaling=False))
    assert w.bars[0].name == IDEAL
    assert w.ideal_s == pytest.approx(per_token * 1024 / 312e12)
