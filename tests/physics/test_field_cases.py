"""Questions that users brought to other projects' issues, with what they measured.

karpathy/llm.c pull request 309; pytorch/torchtitan issue 620; meta-llama/llama-cookbook issue 234; NVIDIA/Megatron-LM issue 654.
(Megatron-LM issues 965 and 1226 are in test_activations.)
"""

from typing import Any

import pytest
from steps import GIB, MIB, memory, states

from costmodel import StepReport, build_run, predict
from costmodel.spec import Run

BF16_GRADIENTS = {"base": "bf16-mixed", "gradient": "bf16", "reduce": "bf16"}


def with_capacity(run: Run, gib: float) -> Run:
    """The run on a card of another size."""
    accelerator = run.cluster.accelerator.model_copy(update={"memory_bytes": int(gib * GIB)})
    return run.model_copy(update={"cluster": run.cluster.model_copy(update={"accelerator": accelerator})})


def llm_c(base: str, zero: int) -> StepReport:
    """llm.c as Megatron's data parallel with bf16 gradients: whole bf16 weights and gradients in one buffer, fp32 m, v and master."""
    run = build_run(model={"base": base, "vocab": 50304}, cluster={"gpus": 4, "gpu": "a100"}, plan={"framework": "megatron", "zero": zero},
                    recipe={"seq_len": 1024, "micro_batch": 4, "precision": BF16_GRADIENTS, "optimizer": "adamw:foreach"})
    return predict(run, scaling=False)


@pytest.mark.parametrize(("base", "params", "saved_mib", "tolerance"), [
    ("gpt2", 124_475_904, 1068, 2), ("gpt2-xl", 1_557_686_400, 13374, 5)])
def test_llm_c_saves_three_quarters_of_the_fp32_states_with_zero_1(base: str, params: int, saved_mib: float, tolerance: float) -> None:
    """llm.c pull request 309, four GPUs: nvidia-smi fell by 1068 MiB (124M) and 13374 MiB (1558M) with stage 1."""
    off, on = llm_c(base, 0), llm_c(base, 1)
    saved = sum(states(off).values()) - sum(states(on).values())
    assert saved / MIB == pytest.approx(saved_mib, abs=tolerance)
    assert states(off)["parameters"] == 2 * params


def test_llm_c_lists_its_buffers() -> None:
    """The same pull request: params 237, grads 237, m 118, v 118, master 118 MiB."""
    found = states(llm_c("gpt2", 1))
    assert found["parameters"] / MIB == pytest.approx(237, abs=1)
    assert found["gradients"] / MIB == pytest.approx(237, abs=1)
    assert found["master_weights"] / MIB == pytest.approx(118.7, abs=0.1)
    assert found["optimizer"] / MIB == pytest.approx(2 * 118.7, abs=0.2)


def llama_3_8b(gpus: int, **recipe: Any) -> StepReport:
    plan = {"strategy": "fsdp", "checkpointing": "full"}
    run = build_run(model="llama-3-8b", cluster={"gpus": gpus, "gpu": "l40s"}, plan=plan, recipe={"seq_len": 8192, "micro_batch": 1, **recipe})
    return predict(with_capacity(run, 47.48), scaling=False)


def test_llama_3_8b_does_not_fit_two_cards_of_48_gb_whatever_the_activations() -> None:
    """torchtitan issue 620: out of memory with batch 1 and full checkpointing. 16 bytes a parameter over 2 ranks are 59.8 GiB."""
    report = llama_3_8b(2)
    assert report.verdict == "does not fit"
    assert sum(states(report).values()) / GIB == pytest.approx(59.8, abs=0.3)
    assert llama_3_8b(2, seq_len=128).verdict == "does not fit"


def test_three_cards_of_48_gb_hold_the_states_of_llama_3_8b() -> None:
    """The same issue: 39.9 GiB a rank at 3."""
    assert sum(states(llama_3_8b(3)).values()) / GIB == pytest.approx(39.9, abs=0.1)


def test_the_failed_request_is_a_shard_of_the_mlp_and_comes_with_the_second_moment() -> None:
    """The same issue: it died at 45.56 GiB asking for 112 MiB: parameters, gradients and the first moment are 44.9 GiB."""
    found = states(llama_3_8b(2))
    assert (found["parameters"] + found["gradients"] + found["optimizer"] / 2) / GIB == pytest.approx(44.9, abs=0.1)
    shard_of_14336_by_4096 = 14336 // 2 * 4096 * 4
    assert shard_of_14336_by_4096 == 112 * MIB


def llama_2_7b(optimizer: str) -> StepReport:
    run = build_run(model="llama-2-7b", cluster={"gpus": 8, "gpu": "v100"}, plan={"strategy": "fsdp", "checkpointing": "full"},
                    recipe={"seq_len": 128, "micro_batch": 1, "precision": "fp16-mixed", "optimizer": optimizer})
    return predict(with_capacity(run, 15.77), scaling=False)


def test_foreach_adam_breaks_a_16_gb_card_at_the_first_step() -> None:
    """llama-cookbook issue 234: Llama-2-7B over 8 V100 of 15.77 GiB, out of memory in _multi_tensor_adamw's square root."""
    report = llama_2_7b("adamw:foreach")
    m = memory(report)
    assert 15.6 <= m.phases["optimizer step"].total_bytes / GIB <= 16.0
    assert m.phases["optimizer step"].by_category["temporaries"] / GIB == pytest.approx(3.14, abs=0.02)
    assert "update" in m.allocated.moment
    assert report.verdict == "does not fit"


def test_fused_adam_leaves_the_states_alone() -> None:
    """The same issue: without the temporaries the step peaks at the states, 16 bytes a parameter over 8 ranks = 12.55 GiB."""
    m = memory(llama_2_7b("adamw:fused"))
    peak = m.phases["optimizer step"]
    assert peak.total_bytes / GIB == pytest.approx(12.55, abs=0.1)
    assert peak.total_bytes + sum(m.outside.values()) < 15.77 * GIB
    assert m.allocated.total_bytes < memory(llama_2_7b("adamw:foreach")).allocated.total_bytes


@pytest.mark.parametrize("d", [1, 8, 64])
@pytest.mark.parametrize(("gradients", "whole"), [("fp32", 6), ("bf16", 4)])
def test_megatrons_distributed_optimizer_leaves_weights_and_gradients_whole(d: int, gradients: str, whole: int) -> None:
    """Megatron-LM issue 654 (maintainer): 2 + 4 + 4 + 8 = 18 bytes a parameter, or 6 + 12/d; with 16-bit gradients 4 + 12/d."""
    precision = {"base": "bf16-mixed", "gradient": gradients, "reduce": gradients}
    run = build_run(params="7B", cluster={"gpus": d, "gpu": "a100"}, plan={"framework": "megatron", "zero": 1},
                    recipe={"seq_len": 128, "precision": precision, "optimizer": "adam:foreach"})
    report = predict(run, scaling=False)
    assert sum(states(report).values()) == pytest.approx((whole + 12 / d) * run.model.params, rel=1e-6)
    off = run.model_copy(update={"plan": run.plan.model_copy(update={"zero": 0, "dp_replicate": d, "dp_shard": 1})})
    assert sum(states(predict(off, scaling=False)).values()) == (whole + 12) * run.model.params


@pytest.mark.parametrize("d", [1, 8])
def test_16_bit_gradients_need_a_passing_fp32_shard_at_the_step(d: int) -> None:
    """The same issue: main gradients are made from the shard of the buffer, 4/d bytes a parameter."""
    def update_peak(gradients: str) -> int:
        run = build_run(params="1B", cluster={"gpus": d, "gpu": "a100"}, plan={"framework": "megatron", "zero": 1},
                        recipe={"seq_len": 128, "precision": {"base": "bf16-mixed", "gradient": gradients, "reduce": gradients}})
        return memory(predict(run, scaling=False)).phases["optimizer step"].by_category.get("temporaries", 0)

    shard = -(-build_run(params="1B").model.params // d)
    assert update_peak("bf16") == 4 * shard
    assert update_peak("fp32") == 0
