"""Layers of several kinds: which layer is of which, what each stage and rank then holds, and that a model of one kind costs what it did.

Sources: the released configurations (Gemma 2 and 3, gpt-oss, nanochat: window patterns; DeepSeek: first_k_dense_replace).
"""

from collections import Counter
from typing import Any

import pytest
from steps import LLAMA, memory, sent, states, step

from costmodel import PlanError, build_run, predict
from costmodel.catalog.models import model
from costmodel.program.stages import build_pipeline
from costmodel.spec.kinds import layer_kinds

H, F, E, X, V, L, DENSE, T = 256, 512, 8, 128, 1024, 6, 2, 64
FIRST: dict[str, Any] = {"layers": L, "hidden": H, "heads": 8, "ffn": F, "vocab": V, "moe": {
    "experts": E, "top_k": 2, "expert_ffn": X, "first_dense_layers": DENSE}}
DENSE_LAYER, MIXTURE_LAYER = 4 * H * H + 3 * H * F + 2 * H, 4 * H * H + E * H + 3 * E * H * X + 2 * H
MEGATRON = {"framework": "megatron", "zero": 1}


@pytest.mark.parametrize(("name", "letters"), [
    ("gemma-2-2b", "SL" * 13), ("gemma-3-1b", "SSSSSL" * 4 + "SS"), ("gpt-oss-20b", "SL" * 12), ("mistral-7b-v0.1", "S" * 32), ("nanochat-d20", "SSSL" * 5),
    ("llama-3-8b", "L" * 32)])
def test_windows_are_where_the_released_models_have_them(name: str, letters: str) -> None:
    """transformers' configurations (layer_types) and nanochat's gpt.py, whose last layer always sees all."""
    assert "".join("S" if kind.window else "L" for kind in layer_kinds(model(name), 8192)) == letters


def test_first_layers_are_dense() -> None:
    assert [kind.moe for kind in layer_kinds(model("deepseek-v3"), 4096)] == [False] * 3 + [True] * 58


def test_a_pattern_without_letters_is_refused() -> None:
    with pytest.raises(PlanError, match="which is which is not said"):
        predict(build_run(model={**LLAMA, "sliding_window": 32, "attention_pattern": "mixed"}, recipe={"seq_len": 64}))


def test_states_are_those_of_both_kinds() -> None:
    assert states(step(FIRST, precision="fp32"))["parameters"] == 4 * (2 * V * H + H + DENSE * DENSE_LAYER + (L - DENSE) * MIXTURE_LAYER)


def test_model_flops_are_those_of_both_kinds() -> None:
    """A token multiplies by the dense layers' matrices, or by top_k experts' and the router's; PaLM's 12·L·a·d·s for attention."""
    used = DENSE * (4 * H * H + 3 * H * F) + (L - DENSE) * (4 * H * H + E * H + 2 * 3 * H * X) + V * H
    assert step(FIRST).model_flops == (6 * used + 12 * L * H * T) * T


def test_windows_in_some_layers_count_each() -> None:
    report = step({**LLAMA, "layers": 6, "sliding_window": 16, "window_pattern": "SSL"}, gpu="h100", seq_len=T, attention="fa2")
    matrices = 6 * (4 * H * H + 3 * H * 512) + 1024 * H
    assert report.model_flops == (6 * matrices + 12 * H * (4 * 16 + 2 * T)) * T


@pytest.mark.parametrize("stage_layers", [(2, 4), (1, 5), (3, 3)])
def test_stages_hold_the_kinds_of_their_layers(stage_layers: tuple[int, int]) -> None:
    run = build_run(model=FIRST, cluster={"gpus": 2, "gpu": "h100"}, plan={**MEGATRON, "pp": 2, "stage_layers": list(stage_layers)},
                    recipe={"seq_len": T, "grad_accum": 4})
    program = build_pipeline(run)
    held = [rank.builders[i].strategy.inventory.numel for i, rank in enumerate(program.pipeline)]
    dense = [min(stage_layers[0], DENSE), max(0, DENSE - stage_layers[0])]
    expected = [d * DENSE_LAYER + (n - d) * MIXTURE_LAYER for n, d in zip(stage_layers, dense, strict=True)]
    assert held == [expected[0] + V * H, expected[1] + V * H + H]
    assert sum(held) == run.model.params


def test_megatron_reduces_experts_apart_and_of_mixtures_alone() -> None:
    """Distributed optimizer on 4 ranks, ep 2, bf16 gradients in fp32 buffers: experts over 2 ranks, the rest over 4."""
    report = step(FIRST, gpus=4, gpu="h100", plan={**MEGATRON, "ep": 2})
    found = Counter[str]()
    for c in report.roles[0].collectives or ():
        if c.kind == "reduce-scatter":
            found[c.axis] += c.count * c.message_bytes
    experts = (L - DENSE) * 3 * E * H * X
    rest = 2 * V * H + H + DENSE * DENSE_LAYER + (L - DENSE) * MIXTURE_LAYER - experts
    assert found == {"edp": 4 * experts // 2, "dp_shard": 4 * rest}


def test_fsdp_gathers_each_layer_as_wide_as_it_is() -> None:
    report = step({**FIRST, "layers": 4}, gpus=4, gpu="h100", plan={"strategy": "fsdp"}, clip_norm=0.0)
    whole = 2 * V * H + H + 2 * DENSE_LAYER + 2 * MIXTURE_LAYER
    twice = whole + whole - (2 * V * H + H)  # the root stays gathered
    assert sent(report.roles[0])["all-gather"] == 2 * twice
    assert sent(report.roles[0])["reduce-scatter"] == 4 * whole


def test_time_and_memory_lie_between_those_of_the_kinds_alone() -> None:
    """Six layers, of which some slide, against six that all do or none does."""
    wide = {**LLAMA, "layers": 6, "hidden": 1024}
    some, every, none = (step({**wide, **more}, gpu="h100", seq_len=16384, attention="fa2") for more in (
        {"sliding_window": 512, "window_pattern": "SSL"}, {"sliding_window": 512}, {}))
    assert every.step_s < some.step_s < none.step_s
    assert some.step_s == pytest.approx(every.step_s + (none.step_s - every.step_s) / 3, rel=0.02)
    assert memory(some).allocated.total_bytes == memory(none).allocated.total_bytes


@pytest.mark.parametrize(("given", "plan", "named"), [
    ({"layers": 2}, {"strategy": "fsdp"}, "in none of 2 layers"), ({}, {"strategy": "fsdp", "checkpointing": "full:2"}, "checkpoints of several layers"),
    ({}, {"strategy": "dataparallel"}, "DataParallel")])
def test_what_several_kinds_do_not_go_with_is_refused_by_name(given: Any, plan: Any, named: str) -> None:
    with pytest.raises(PlanError, match=named):
        predict(build_run(model={**FIRST, **given}, cluster={"gpus": 2, "gpu": "h100"}, plan=plan))


def test_a_split_backward_takes_one_kind() -> None:
    with pytest.raises(PlanError, match="several kinds"):
        predict(build_run(model={**LLAMA, "sliding_window": 16, "attention_pattern": "alternating"}, cluster={"gpus": 2, "gpu": "h100"},
                          plan={"strategy": "ddp", "pp": 2, "schedule": "zb-h1"}, recipe={"grad_accum": 4, "seq_len": 64}))
