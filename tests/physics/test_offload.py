"""State in host memory: what stays on the device, what the host holds, and what copies and the CPU's update cost.

Oracles: FSDP2's CPUOffloadPolicy as PyTorch documents it, PCIe's rate, what a node of the catalogue holds.
"""

from typing import Any

import pytest
from steps import GIB, LLAMA, LLAMA_PARAMS, LLAMA_TENSORS, memory, states, step

from costmodel import PlanError
from costmodel.report import HostMemory, StepReport

N = 8
OFFLOADED = {"strategy": "fsdp", "offload": "params"}


def host(report: StepReport) -> HostMemory:
    found = memory(report).host
    assert found is not None
    return found


@pytest.mark.parametrize(("gpus", "precision", "each"), [(N, "bf16-mixed", 4), (N, "fp32", 4), (1, "bf16-mixed", 4), (N, "bf16-pure", 2)])
def test_fsdp_offloads_parameters_gradients_and_optimizer_and_leaves_no_state_on_the_device(gpus: int, precision: str, each: int) -> None:
    """torch.distributed.fsdp.CPUOffloadPolicy: "offloads parameters, gradients and optimizer states to CPU"; foreach Adam counts steps in 4 bytes a tensor."""
    report = step(LLAMA, gpus, plan=OFFLOADED, precision=precision)
    shard = LLAMA_PARAMS * each // gpus
    assert states(report) == {}
    assert host(report).states == {"parameters": shard, "gradients": shard, "optimizer": 2 * shard + 4 * LLAMA_TENSORS}


def test_what_is_offloaded_is_what_the_device_held_without() -> None:
    plain, offloaded = (step(LLAMA, N, plan={**OFFLOADED, "offload": where}) for where in ("none", "params"))
    counters = 4 * LLAMA_TENSORS
    assert sum(states(plain).values()) == sum(host(offloaded).states.values()) - counters
    assert memory(plain).host is None


def test_page_locked_blocks_are_powers_of_two() -> None:
    """at::CachingHostAllocator rounds up; parameters and gradients are page-locked, each by itself, the optimizer's state is not."""
    exact = {**LLAMA, "ffn": 512}
    rows = {"hidden": 256, "vocab": 1024, "ffn": 512}
    assert all(n & (n - 1) == 0 for n in rows.values())
    assert host(step(exact, N, plan=OFFLOADED)).held_bytes == host(step(exact, N, plan=OFFLOADED)).allocated.total_bytes
    wider = step({**LLAMA, "ffn": 513 * N}, N, plan=OFFLOADED)
    block = 513 * 256 * 4
    slack = (1 << (block - 1).bit_length()) - block  # of two of a layer's three matrices; the third has 32 rows of 513 * 8
    down = 32 * 513 * N * 4
    slack_down = (1 << (down - 1).bit_length()) - down
    assert (host(wider).held_bytes or 0) - host(wider).allocated.total_bytes == 2 * 4 * (2 * slack + slack_down)


def test_a_node_whose_memory_its_ranks_exceed_does_not_fit() -> None:
    """70.55e9 parameters at 16 bytes are 1.03 TiB; a server with eight L40S has 1 TiB, a DGX H100 two."""
    large: dict[str, Any] = {"plan": {**OFFLOADED, "checkpointing": "full"}, "micro_batch": 1}
    small_host, large_host = (step("llama-3-70b", N, gpu, **large) for gpu in ("l40s", "h100"))
    assert (memory(small_host).headroom_bytes or -1) > 0 and (host(small_host).node_bytes or 0) > 1024 * GIB
    assert (host(small_host).verdict, small_host.verdict) == ("does not fit", "does not fit")
    assert (host(large_host).verdict, large_host.verdict) == ("fits", "fits")


def test_copies_take_at_least_the_bytes_over_pcie_and_are_hidden_where_groups_gather() -> None:
    """Parameters come twice a micro-batch where they are freed after forward (the root's once), gradients go once; PCIe 5 x16 carries 63 GB/s at most."""
    report = step("llama-3-8b", N, "h100", plan={**OFFLOADED, "checkpointing": "full"}, seq_len=8192)
    time, shard = report.roles[0].time, 8_030_261_248 * 4 / N
    assert time is not None
    layers = 32 * 218_112_000 * 4 / N
    assert (shard + layers) / 63e9 < time.communication_s["h2d"] < 1.5 * (shard + layers) / 63e9
    assert shard / 63e9 < time.communication_s["d2h"] < 1.5 * shard / 63e9
    assert time.exposed_s.get("h2d", 0.0) < 0.1 * time.communication_s["h2d"]


def test_one_rank_waits_for_every_copy_of_its_parameters() -> None:
    time = step("llama-3-8b", 1, "h100", plan={**OFFLOADED, "checkpointing": "full"}, seq_len=4096).roles[0].time
    assert time is not None
    assert time.exposed_s["h2d"] == pytest.approx(time.communication_s["h2d"], rel=0.01)


def test_later_micro_batches_add_their_gradients_on_the_cpu() -> None:
    def breakdown(grad_accum: int) -> dict[str, float]:
        time = step("llama-3-8b", N, "h100", plan=OFFLOADED, grad_accum=grad_accum).roles[0].time
        assert time is not None
        return time.breakdown

    one, three = breakdown(1), breakdown(3)
    assert "cpu" not in one and three["cpu"] == pytest.approx(2 * 3 * 8.03e9 * 4 / N / 1e10, rel=0.01)  # reads both, writes one, at a thread's 10 GB/s
    assert three["optimizer"] == pytest.approx(one["optimizer"], rel=0.01)


@pytest.mark.parametrize(("plan", "field", "words"), [
    ({"strategy": "ddp", "offload": "params"}, "plan.offload", "FSDP2 alone"),
    ({"strategy": "fsdp", "offload": "optimizer"}, "plan.offload", "together"),
    ({"strategy": "fsdp", "offload": "params", "pp": 2}, "plan.offload", "pp = 2"),
    ({"framework": "megatron", "zero": 1, "offload": "optimizer"}, "plan.offload", "Megatron"),
    ({"framework": "deepspeed", "zero": 2, "offload": "params"}, "plan.offload", "stage 3"),
    ({"strategy": "fsdp", "activation_offload": True}, "plan.activation_offload", "activation offload"),
])
def test_what_does_not_offload_is_refused_by_name(plan: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(PlanError) as refused:
        step(LLAMA, N, plan=plan)
    assert refused.value.field == field and words in str(refused.value)


def test_a_cpu_has_nowhere_to_offload_to() -> None:
    with pytest.raises(PlanError, match="share one memory"):
        step(LLAMA, 2, "cpu_epyc_2core", plan=OFFLOADED)


# -- DeepSpeed ---------------------------------------------------------------------------------------------------------------

BF16 = {"base": "bf16-mixed", "gradient": "bf16", "reduce": "bf16"}
GPT: dict[str, Any] = {"gated": False, "activation": "gelu", "norm": "layernorm", "norm_bias": True, "qkv_bias": True, "attention_out_bias": True,
                       "mlp_bias": True, "fused_qkv": True, "tied_embeddings": True, "positions": "learned", "position_rows": 1024, "heads": 32,
                       "hidden": 4096, "ffn": 16384, "vocab": 50304}
"""The paper's layers; 50 of them are its 10B."""


def deepspeed(gpus: int, zero: int, offload: str, model: Any = "llama-3-8b", **recipe: Any) -> StepReport:
    plan = {"framework": "deepspeed", "zero": zero, "offload": offload, "checkpointing": "full"}
    return step(model, gpus, "h100", plan=plan, **{"precision": BF16, "seq_len": 512, **recipe})


GPTJ = {"layers": 28, "hidden": 4096, "heads": 16, "ffn": 16384, "vocab": 50400, "gated": False, "activation": "gelu", "norm": "layernorm",
        "parallel_residual": True, "norms_per_layer": 1}
PARAMS = 8_030_261_248
LARGEST = 128_256 * 4096


@pytest.mark.parametrize("gpus", [1, 8])
@pytest.mark.parametrize("zero", [1, 2])
def test_zero_offload_keeps_2_bytes_a_parameter_on_the_device_and_16_in_the_host_beside_buffers(zero: int, gpus: int) -> None:
    """deepspeed.runtime.zero.stage_1_and_2.estimate_zero2_model_states_mem_needs with cpu_offload: gpu_mem 2P, cpu_mem 16P (4 gradients, 4 master, 8 Adam)
    times 1.5 for buffers; arXiv 2101.06840 section 4: 16-bit parameters on the GPU, the rest on the CPU."""
    report = deepspeed(gpus, zero, "optimizer")
    kept, found = states(report), host(report).states
    assert kept == {"parameters": 2 * PARAMS, "communication": 2 * LARGEST}
    assert (found["master_weights"], found["gradients"]) == (4 * PARAMS / gpus, 4 * PARAMS / gpus)
    assert found["optimizer"] == pytest.approx(8 * PARAMS / gpus, abs=8)
    assert 16 * PARAMS < (host(report).node_bytes or 0) < 1.5 * 16 * PARAMS + (gpus - 1) * 4 * LARGEST


@pytest.mark.parametrize("gpus", [1, 8])
@pytest.mark.parametrize(("offload", "device", "cpu"), [("optimizer", 2, 16), ("params", 0, 18)])
def test_stage_3_offloads_parameters_too(gpus: int, offload: str, device: int, cpu: int) -> None:
    """estimate_zero3_model_states_mem_needs, zero_init: 2P/n or nothing on the GPU beside the largest layer, 16P or 18P times 1.5 on the CPUs."""
    report = deepspeed(gpus, 3, offload)
    small = 65 * 4096 * 2
    assert states(report).get("parameters", 0) == pytest.approx(device * PARAMS / gpus, abs=small + 1)
    assert {"master_weights", "optimizer", "gradients"}.isdisjoint(states(report))
    assert cpu * PARAMS < sum(host(report).states.values()) * gpus < 1.5 * cpu * PARAMS
    assert (host(report).states.get("parameters", 0) > 0) == (offload == "params")


def test_the_estimate_of_stage_3_is_of_states_alone() -> None:
    """C56, deepspeedai/DeepSpeed#4527, #4093, #2864: the estimator says 0.49 GB a GPU for 6.8B parameters with both offloads; reduce bucket, gathered
    layers and context alone are several times that. (What was seen, 13 to 20 GB, is mostly a whole 16-bit copy, there before it was sharded.)"""
    report = deepspeed(4, 3, "params", GPTJ)
    assert 4 * 0.49e9 < (memory(report).device_bytes or 0) < 13e9


def test_10b_parameters_train_at_about_40_tflops_on_a_v100() -> None:
    """arXiv 2101.06840, abstract and section 6: 40 TFLOP/s of a 10B model on one V100, batch 512; 13B parameters train on one of 32 GB."""
    plan = {"framework": "deepspeed", "zero": 2, "offload": "optimizer", "checkpointing": "full"}
    recipe: dict[str, Any] = {"seq_len": 1024, "precision": "fp16-mixed", "optimizer": "adamw:fused"}
    ten = step({**GPT, "layers": 50}, 1, "v100_sxm2_32gb", plan=plan, micro_batch=8, grad_accum=64, **recipe)
    assert (ten.model_flops or 0) / (ten.step_s or 1) == pytest.approx(40e12, rel=0.25)
    thirteen, alone = (step({**GPT, "layers": 65}, 1, "v100_sxm2_32gb", plan={**plan, "offload": where}, **recipe) for where in ("optimizer", "none"))
    assert thirteen.verdict != "does not fit" and alone.verdict == "does not fit"


def test_accumulated_gradients_go_to_the_host_and_back() -> None:
    """stage_1_and_2.py, async_accumulate_grad_in_cpu_via_gpu: 2 bytes out of every micro-batch, 2 back before all but the first, 4 out with the last."""
    def copied(grad_accum: int) -> tuple[float, float]:
        time = deepspeed(1, 2, "optimizer", grad_accum=grad_accum).roles[0].time
        assert time is not None
        return time.communication_s["d2h"], time.communication_s["h2d"]

    (out_1, back_1), (out_3, back_3) = copied(1), copied(3)
    rate = 63e9 * 0.87
    assert out_1 == pytest.approx(4 * PARAMS / rate, rel=0.02) and back_1 == pytest.approx(2 * PARAMS / rate, rel=0.02)
    assert out_3 - out_1 == pytest.approx(6 * PARAMS / rate, rel=0.05) and back_3 - back_1 == pytest.approx(4 * PARAMS / rate, rel=0.05)
