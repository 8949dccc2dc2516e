"""Megatron-FSDP counted by hand from its own rules (NVIDIA/Megatron-LM, megatron/core/distributed/fsdp/src: README.md, megatron_fsdp.py,
param_and_grad_buffer.py) and from the ZeRO paper's 3Ψ (arXiv 1910.02054, section 7)."""

from typing import Any

import pytest
from steps import LLAMA, LLAMA_PARAMS, memory, most, sent, states, step

from costmodel import PlanError, build_run, predict

N = 8
LAYER = -(-(4 * 256**2 + 3 * 256 * 512 + 2 * 256) // (N * 512)) * N * 512
"""Elements of a layer's bucket: padded so that every rank has whole rows, 512 wide at most (down projection); 256-wide rows divide those."""
ROOT = -(-(2 * 1024 * 256 + 256) // (N * 256)) * N * 256
ALL = 4 * LAYER + ROOT
PLAN: dict[str, Any] = {"framework": "megatron", "zero": 3}
BF16_GRADIENTS = {"base": "bf16-mixed", "gradient": "bf16", "reduce": "bf16"}


def of(plan: dict[str, Any] | None = None, gpus: int = N, **recipe: Any) -> Any:
    """The prediction, without the small collective of gradient clipping."""
    return step(LLAMA, gpus, plan={**PLAN, **(plan or {})}, **{"clip_norm": 0.0, "precision": "bf16-mixed", **recipe})


def run_of(plan: dict[str, Any] | None = None, **recipe: Any) -> Any:
    return build_run(model=LLAMA, cluster={"gpus": N, "gpu": "h100"}, plan={**PLAN, **(plan or {})}, recipe={"seq_len": 8, "micro_batch": 1, **recipe})


@pytest.mark.parametrize(("precision", "each"), [("bf16-mixed", 18), (BF16_GRADIENTS, 16), ("fp32", 16)])
def test_all_state_is_in_pieces(precision: Any, each: int) -> None:
    """optim_grads_params: parameters, main gradients, master weights and both moments over n ranks; fp32 has no master copy."""
    assert sum(states(of(precision=precision)).values()) == each * ALL / N
    assert pytest.approx(LLAMA_PARAMS, rel=0.01) == ALL


def test_replicas_do_not_share_state() -> None:
    """num_distributed_optimizer_instances, outer_dp_sharding_strategy no_shard: 8 of 16 ranks share, as they do alone."""
    assert states(of({"dp_replicate": 2}, 16)) == states(of())


@pytest.mark.parametrize("accumulated", [1, 3])
def test_layers_are_gathered_twice_and_everything_reduced_in_every_micro_batch(accumulated: int) -> None:
    """Hooks of megatron_fsdp.py: a layer before forward and before backward, what is no layer once a step; sharded gradients are reduced by every backward."""
    found = sent(of(grad_accum=accumulated).roles[0])
    assert found == {"all-gather": 2 * (ROOT + 2 * accumulated * 4 * LAYER), "reduce-scatter": 4 * accumulated * ALL}


def test_a_micro_batch_sends_the_zero_papers_three_times_the_parameters() -> None:
    deep = {**LLAMA, "layers": 96}
    found = sent(step(deep, N, plan=PLAN, clip_norm=0.0, precision="fp32").roles[0], 4)
    psi = 96 * (4 * 256**2 + 3 * 256 * 512 + 2 * 256) + 2 * 1024 * 256 + 256
    assert sum(found.values()) / psi == pytest.approx(3, rel=0.02)


def test_gradients_travel_in_the_dtype_that_they_are_reduced_in() -> None:
    """grad_comm_dtype bf16 beside fp32 main gradients."""
    found = of(precision={"base": "bf16-mixed", "reduce": "bf16"})
    assert sent(found.roles[0])["reduce-scatter"] == 2 * ALL
    assert states(found)["gradients"] == 4 * ALL // N


def test_replicas_sum_their_main_gradients_once_a_step() -> None:
    found = of({"dp_replicate": 2}, 16, grad_accum=3)
    assert sent(found.roles[0])["all-reduce"] == 4 * ALL // N
    assert {(c.axis, c.group) for c in found.roles[0].collectives if c.kind == "all-reduce" and c.group > 1} == {("dp_replicate", 2)}


def test_the_default_communication_unit_gathers_a_small_model_at_once_and_waits_for_no_bucket() -> None:
    """Within 1e9 elements: when backward begins all layers are gathered, when it ends all buckets are full; the root's is open throughout."""
    assert most(run_of(), "communication") == pytest.approx(max(2 * ALL + 4 * ROOT + 4 * LAYER, 2 * (ROOT + LAYER) + 4 * ALL), rel=0.05)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_the_smallest_communication_unit_gathers_one_layer_ahead_and_leaves_one_bucket_behind(checkpointing: str) -> None:
    """Two layers' parameters, two layers' buckets, and what is no layer."""
    found = most(run_of({"communication_unit_params": 1, "checkpointing": checkpointing}), "communication")
    assert found == 2 * (ROOT + 2 * LAYER) + 4 * (ROOT + 2 * LAYER)


def test_double_buffers_are_there_from_the_start() -> None:
    """FixedPoolAllocator, UB_BUFFER_NUM = 2: two of a layer's parameters, two of its gradients; what is no layer comes and goes."""
    run = run_of({"double_buffer": True})
    held = memory(predict(run, scaling=False)).states["communication"]
    assert held == 2 * (2 + 4) * LAYER
    assert most(run, "communication") == held + (2 + 4) * ROOT


def test_a_large_embedding_and_head_are_reduced_apart() -> None:
    """Buckets of max(40 M, 1 M x dp) parameters: 65,536 rows of 1,024 fill one, the head another."""
    wide = {"layers": 2, "hidden": 1024, "heads": 8, "ffn": 1024, "vocab": 65_536}
    found = [c for c in step(wide, N, plan=PLAN, clip_norm=0.0, precision="bf16-mixed").roles[0].collectives or () if c.kind == "reduce-scatter"]
    sizes = sorted(c.message_bytes for c in found for _ in range(c.count))
    assert len(sizes) == 4 and sizes[2:] == [4 * 65_536 * 1024, 4 * (65_536 * 1024 + N * 1024)]


def test_fp8_parameters_are_kept_and_gathered_in_one_byte() -> None:
    """fp8_param_gather: matrices of the layers in fp8, norms (512 elements, padded to a row a rank), embedding and head in bf16."""
    matrices = -(-(4 * 256**2 + 3 * 256 * 512) // (N * 512)) * N * 512
    found = step(LLAMA, N, gpu="h100", plan=PLAN, clip_norm=0.0, precision={"base": "fp8", "fp8_parameters": True})
    layer = matrices + 2 * 512
    assert states(found)["parameters"] == (4 * layer + 2 * ROOT) // N
    assert sent(found.roles[0])["all-gather"] == 2 * ROOT + 2 * 4 * layer


def test_tensor_parallelism_shards_what_each_tp_rank_holds() -> None:
    """tp 2 in front of 4 shards: half of every matrix, whole norms; under sequence parallelism the shards of the norms' gradients are summed over tp."""
    found = of({"tp": 2, "sequence_parallel": True})
    half = LLAMA_PARAMS / 2 + (4 * 2 + 1) * 256 / 2
    assert sum(states(found).values()) == pytest.approx(18 * half / 4, rel=0.01)
    norms = [c for c in found.roles[0].collectives if c.axis == "tp" and c.kind == "all-reduce" and c.phase == "optimizer"]
    assert [c.message_bytes for c in norms] == [4 * (4 * 2 + 1) * 256 // 4]


def test_communication_hides_behind_compute_but_for_the_ends() -> None:
    """A fast network leaves the first gather of each pass and the last reduction exposed; one 100 times slower is waited for from end to end."""
    def times(factor: float) -> Any:
        run = build_run(model="llama-3-8b", cluster={"gpus": 8, "gpu": "h100", "link_factors": {"nvlink": factor}}, plan=PLAN,
                        recipe={"seq_len": 8192, "attention": "cudnn"})
        return predict(run, scaling=False).roles[0].time

    fast, slow = times(1.0), times(0.01)
    assert 0 < fast.exposed_s["dp_shard"] < 0.35 * fast.communication_s["dp_shard"]
    assert slow.exposed_s["dp_shard"] > 0.9 * (slow.communication_s["dp_shard"] - fast.step_s)
    assert slow.step_s >= slow.communication_s["dp_shard"]


@pytest.mark.parametrize(("plan", "recipe", "field"), [
    ({"zero": 2}, {}, "plan.zero"), ({"pp": 2}, {"grad_accum": 2}, "plan.pp"), ({"reshard_after_forward": False}, {}, "plan.reshard_after_forward"),
    ({"sync_each_micro_batch": False}, {}, "plan.sync_each_micro_batch"), ({"checkpointing": "full:2"}, {}, "plan.checkpointing.group"),
    ({}, {"precision": "fp8"}, "recipe.precision.fp8_parameters"), ({"dp_replicate": 8}, {}, "plan.dp_shard")])
def test_what_is_not_predicted_is_refused_by_name(plan: dict[str, Any], recipe: dict[str, Any], field: str) -> None:
    with pytest.raises(PlanError) as refused:
        predict(run_of(plan, **recipe), scaling=False)
    assert refused.value.field == field
