"""FLOPs of a measured step: execute's closed form against torch's own counter on the model that execute builds, and against the prediction's walk."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from small_runs import GPT, LLAMA, cpu_run  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from costmodel.prediction import predict  # noqa: E402
from execute.assemble import assemble  # noqa: E402
from execute.data import random_batch  # noqa: E402
from execute.flops import hardware_flops, model_flops  # noqa: E402

EAGER = {"attention": "eager", "clip_norm": 0.0}
LATENT: dict[str, Any] = {**LLAMA, "kv_heads": 4, "mla": {
    "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16}}
ALONE: dict[str, Any] = {"latent": cpu_run(LATENT, recipe=EAGER), "llama": cpu_run(LLAMA, recipe=EAGER), "gpt": cpu_run(GPT, recipe=EAGER),
                         "full checkpointing": cpu_run(LLAMA, recipe=EAGER, checkpointing="full"),
                         "chunked loss": cpu_run(LLAMA, recipe={**EAGER, "loss": "chunked"})}
SPREAD: dict[str, Any] = {"accumulating": cpu_run(LLAMA, "fsdp", 2, recipe={"grad_accum": 3}), "every second layer": cpu_run(LLAMA, checkpointing="every:2"),
                          "attention again": cpu_run(LLAMA, checkpointing="selective"), "tp": cpu_run(LLAMA, "ddp", 2, tp=2, dp=1),
                          "windows": cpu_run({**LLAMA, "layers": 4, "sliding_window": 32, "window_pattern": "SSL"}, recipe=EAGER, checkpointing="full"),
                          "pp": cpu_run(LLAMA, "ddp", 2, pp=2, dp=1, recipe={"grad_accum": 2})}


@pytest.mark.parametrize("name", ALONE)
def test_what_runs_is_what_torch_counts(name: str) -> None:
    """torch.utils.flop_counter over forward and backward of the real model, recompute included: PyTorch stops it before a layer's last product, which
    the convention counts (72 becomes 96 of arXiv 2205.05198)."""
    run = ALONE[name]
    prepared = assemble(run, "cpu")
    with FlopCounterMode(display=False) as counter:
        prepared.model(*random_batch(run)).backward()
    stopped = run.model.layers * 2 * run.tokens_per_step * run.model.ffn * run.model.hidden if run.plan.checkpointing.mode == "full" else 0
    assert hardware_flops(run) == counter.get_total_flops() + stopped


@pytest.mark.parametrize("name", [*ALONE, *SPREAD])
def test_the_prediction_walks_to_the_same(name: str) -> None:
    run = {**ALONE, **SPREAD}[name]
    report = predict(run, scaling=False)
    assert model_flops(run) == report.model_flops
    assert hardware_flops(run) == report.hardware_flops


def test_operations_picked_one_by_one_have_no_hardware_flops() -> None:
    assert hardware_flops(cpu_run(LLAMA, checkpointing="selective:op")) is None
