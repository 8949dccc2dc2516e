"""Does it fit: states, the optimizer step, first steps, reserved memory, and what lives outside the allocator.

Each test names its case (C02) and public source.
"""

from typing import Any

import pytest
from asked import GB, GIB, GPT, MIB, kept, memory, predicted, run_of, states, with_capacity

from costmodel import StepReport, predict
from costmodel.advice import advise
from costmodel.oom import diagnose, read_message
from costmodel.solve import fewest_gpus


def llama_3_8b(gpus: int, **recipe: Any) -> StepReport:
    run = run_of(model="llama-3-8b", gpus=gpus, gpu="l40s", plan={"strategy": "fsdp", "checkpointing": "full"}, **{"seq_len": 8192, "micro_batch": 1, **recipe})
    return predict(with_capacity(run, 47.48), scaling=False)


def test_llama_3_8b_does_not_fit_two_cards_of_48_gb_whatever_the_activations() -> None:
    """C02, pytorch/torchtitan#620: out of memory with batch 1 and full checkpointing. 16 bytes a parameter over 2 ranks are 59.8 GiB."""
    report = llama_3_8b(2)
    assert report.verdict == "does not fit"
    assert kept(report) / GIB == pytest.approx(59.8, abs=0.3)
    assert llama_3_8b(2, seq_len=128).verdict == "does not fit"


def test_three_cards_of_48_gb_hold_the_states_of_llama_3_8b() -> None:
    """C02: 39.9 GiB a rank at 3."""
    assert kept(llama_3_8b(3)) / GIB == pytest.approx(39.9, abs=0.1)


def test_more_gpus_or_the_hosts_memory_are_the_only_advice_where_states_exceed_the_card() -> None:
    """C02: activations cannot help; at least 3 cards of 48 GB are needed for the states alone, or they live in host memory."""
    run = run_of(model="llama-3-8b", gpus=2, gpu="l40s", plan={"strategy": "fsdp", "checkpointing": "full"}, seq_len=8192)
    advice = advise(run)
    assert advice.states_alone
    assert sorted(list(s.changes) for s in advice.fit) == [["cluster.gpus"], ["plan.offload"]]
    found = fewest_gpus(run, risky=True)
    assert found.value is not None and found.value >= 3


def test_the_failed_request_is_a_shard_of_the_mlp_and_comes_with_the_second_moment() -> None:
    """C02: it died at 45.56 GiB asking for 112 MiB: parameters, gradients and the first moment are 44.9 GiB."""
    found = states(llama_3_8b(2))
    assert (found["parameters"] + found["gradients"] + found["optimizer"] / 2) / GIB == pytest.approx(44.9, abs=0.1)
    shard_of_14336_by_4096 = 14336 // 2 * 4096 * 4
    assert shard_of_14336_by_4096 == 112 * MIB


def llama_2_7b(optimizer: str) -> StepReport:
    run = run_of(model="llama-2-7b", gpus=8, gpu="v100", plan={"strategy": "fsdp", "checkpointing": "full"}, seq_len=128, micro_batch=1,
                 precision="fp16-mixed", optimizer=optimizer)
    return predict(with_capacity(run, 15.77), scaling=False)


def test_foreach_adam_breaks_a_16_gb_card_at_the_first_step() -> None:
    """C05, meta-llama/llama-cookbook#234: Llama-2-7B over 8 V100 of 15.77 GiB, out of memory in _multi_tensor_adamw's square root."""
    report = llama_2_7b("adamw:foreach")
    m = memory(report)
    assert 15.6 <= m.phases["optimizer step"].total_bytes / GIB <= 16.0
    assert m.phases["optimizer step"].by_category["temporaries"] / GIB == pytest.approx(3.14, abs=0.02)
    assert "update" in m.allocated.moment
    assert report.verdict == "does not fit"


def test_fused_adam_leaves_the_states_alone() -> None:
    """C05: without the temporaries the step peaks at the states, 16 bytes a parameter over 8 ranks = 12.55 GiB."""
    m = memory(llama_2_7b("adamw:fused"))
    peak = m.phases["optimizer step"]
    assert peak.total_bytes / GIB == pytest.approx(12.55, abs=0.1)
    assert peak.total_bytes + sum(m.outside.values()) < 15.77 * GIB
    assert m.allocated.total_bytes < memory(llama_2_7b("adamw:foreach")).allocated.total_bytes


def test_what_a_run_does_not_explain_is_said() -> None:
    """C58, mosaicml/llm-foundry#183: MPT-7B on 2 cards of 79.21 GiB died at 77.52 GiB allocated. Its states are 49.5, and with one sequence a rank the rest of
    this run is small: something else lived there."""
    run = run_of(model="mpt-7b-released", gpus=2, gpu="a100_sxm_80gb", plan={"strategy": "fsdp"}, seq_len=2048)
    message = "CUDA out of memory. Tried to allocate 256.00 MiB (GPU 0; 79.21 GiB total capacity; 77.52 GiB already allocated)"
    assert diagnose(run, read_message(message)).cause == "not described"


def test_the_first_step_lacks_the_optimizers_state() -> None:
    """C07, pytorch/torchtitan#1789, 15.7B parameters over 8 GPUs: 58.28 GiB at step 1 and 73.32 at step 10; Adam's 8 bytes a parameter over 8 are
    14.63. (There a mixture of experts; here a dense model of that count.)"""
    m = memory(predicted(params="15.7B", gpus=8, gpu="h100", plan={"strategy": "fsdp", "checkpointing": "selective:op"}, seq_len=4096, micro_batch=2))
    assert 14.0 <= (m.phases["steady step"].total_bytes - m.phases["first step"].total_bytes) / GIB <= 15.5


def test_a_fresh_first_step_is_below_every_later_one() -> None:
    """C59, deepspeedai/DeepSpeed#1445, NVIDIA/Megatron-LM#4638: Adam's states come after the first backward; a resumed run has them before it, which
    is the steady step."""
    m = memory(predicted(model="llama-3-8b", gpus=8, gpu="h100", plan={"strategy": "fsdp"}, seq_len=4096))
    assert m.phases["first step"].total_bytes < m.phases["steady step"].total_bytes == m.allocated.total_bytes


def test_fsdp2_starts_from_shards() -> None:
    """C19, pytorch/pytorch#152263, Qwen2.5-7B over 8 ranks: FSDP2 shards before it materialises, so no moment of init holds more than a rank's part
    and a layer. (FSDP1's initialisation, which held the whole model, is not described.)"""
    run = run_of(model="qwen2.5-7b", gpus=8, plan={"strategy": "fsdp"}, seq_len=128)
    shard, layer = run.model.params * 4 / 8, (run.model.params - run_of(model={"base": "qwen2.5-7b", "layers": 27}).model.params) * 4
    assert shard <= memory(predict(run, scaling=False)).phases["init"].total_bytes <= shard + layer


# -- the three figures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", ["a100", "h100"])
def test_a_process_shows_more_than_its_tensors(gpu: str) -> None:
    """C23, pytorch/pytorch#20532, #28113 and #107667: context 200 to 700 MB a process, cuBLAS workspaces of 8 to 64 MiB inside the allocator."""
    m = memory(predicted(model={**GPT, "layers": 2, "hidden": 256, "heads": 4, "ffn": 1024, "vocab": 512}, gpu=gpu, seq_len=128))
    assert m.device_bytes is not None and m.workspace_bytes is not None
    assert 0.3 <= (m.device_bytes - m.allocated.total_bytes) / GIB <= 1.2
    assert 8 <= m.workspace_bytes / MIB <= 64


@pytest.mark.parametrize("micro_batch", range(1, 7))
def test_a_run_that_leaves_nothing_for_nccl_is_risky(micro_batch: int) -> None:
    """C20, radixark/miles#2199, NVIDIA/nccl#2416: NCCL and the context are outside the allocator, so tensors near the capacity never simply fit."""
    m = memory(predicted(model="llama-2-7b", gpus=8, gpu="a100_sxm_40gb", plan={"strategy": "fsdp"}, seq_len=1024, micro_batch=micro_batch))
    assert m.capacity_bytes is not None and m.device_bytes is not None and m.reserved_bytes is not None
    outside = sum(m.outside.values())
    assert outside > 0.5 * GIB and m.device_bytes == m.reserved_bytes + outside
    assert (m.verdict == "fits") == (m.device_bytes <= 0.9 * m.capacity_bytes)
    if m.allocated.total_bytes > 0.9 * m.capacity_bytes:
        assert m.verdict != "fits"


def test_llama_2_70b_in_pure_bf16_over_16_gpus() -> None:
    """C16, meta-llama/llama-cookbook#120: 8 bytes x 68.98e9 / 16 = 34.5 GB of states, 42 GB allocated; 16 cards of 32 GB do not do. The batch is not
    stated: one sequence of 4096, fully checkpointed."""
    given: dict[str, Any] = {"model": "llama-2-70b", "gpus": 16, "plan": {"strategy": "fsdp", "checkpointing": "full"}, "seq_len": 4096}
    report = predicted(**given, gpu="a100_sxm_80gb", precision="bf16-pure")
    assert kept(report) / GB == pytest.approx(34.5, abs=0.1)
    assert 38 <= memory(report).allocated.total_bytes / GB <= 46
    assert predicted(**given, gpu="v100_sxm2_32gb", precision="fp16-mixed").verdict == "does not fit"
