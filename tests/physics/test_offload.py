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
    large = {"plan": {**OFFLOADED, "checkpointing": "full"}, "micro_batch": 1}
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
