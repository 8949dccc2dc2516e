"""What each strategy sends in a step, counted by hand, and the textbook ring and tree, through a Run and predict().

Sources: ZeRO paper (arXiv 1910.02054), section 7 (2Ψ for stages 1 and 2, 3Ψ for stage 3); PyTorch's DDP reducer, fully_shard and
ZeroRedundancyOptimizer; deepspeed/runtime/zero/stage_1_and_2.py; Megatron-LM's distributed optimizer; NVIDIA/nccl-tests
doc/PERFORMANCE.md (ring) and Sanders, Speck and Träff 2009 (double tree).
"""

from dataclasses import replace
from typing import Any

import pytest
from steps import LLAMA, LLAMA_PARAMS, MIB, sent, step

from costmodel import build_run, predict
from costmodel.catalog.profiles import load_profile
from costmodel.report import RoleReport

N = 8
LAYERS = 4 * (4 * 256**2 + 3 * 256 * 512 + 2 * 256)
"""Parameters of LLAMA's layers; the rest is the embedding, the last norm and the head."""


def role(plan: dict[str, Any], model: Any = LLAMA, gpus: int = N, **recipe: Any) -> RoleReport:
    """The first role, without the small collectives of gradient clipping (a norm, and DeepSpeed's flag, which it sends whether it clips or not)."""
    found = step(model, gpus, plan=plan, **{"clip_norm": 0.0, "precision": "fp32", **recipe}).roles[0]
    return replace(found, collectives=tuple(c for c in found.collectives or () if plan.get("framework") != "deepspeed" or c.message_bytes > 8))


def psi(found: dict[str, int]) -> float:
    """Volume in parameters: a ring all-reduce moves its message twice, every other collective once."""
    return sum((2 if kind == "all-reduce" else 1) * n for kind, n in found.items()) / LLAMA_PARAMS


@pytest.mark.parametrize(("plan", "precision", "wire", "expected"), [
    ({}, "fp32", 4, {"all-reduce": LLAMA_PARAMS}),
    ({}, "bf16-pure", 2, {"all-reduce": LLAMA_PARAMS}),
    ({"zero": 1}, "fp32", 4, {"all-reduce": LLAMA_PARAMS, "broadcast": LLAMA_PARAMS}),
    ({"zero": 2}, "fp32", 4, {"reduce-scatter": LLAMA_PARAMS, "all-gather": LLAMA_PARAMS}),
    ({"zero": 3}, "fp32", 4, {"all-gather": LLAMA_PARAMS + LAYERS, "reduce-scatter": LLAMA_PARAMS}),
    ({"zero": 3, "reshard_after_forward": False}, "fp32", 4, {"all-gather": LLAMA_PARAMS, "reduce-scatter": LLAMA_PARAMS}),
    ({"framework": "deepspeed", "zero": 1}, "bf16-mixed", 2, {"all-reduce": LLAMA_PARAMS, "all-gather": LLAMA_PARAMS}),
    ({"framework": "deepspeed", "zero": 2}, "bf16-mixed", 2, {"all-reduce": LLAMA_PARAMS, "all-gather": LLAMA_PARAMS}),
    ({"framework": "deepspeed", "zero": 3, "max_live_params": 0}, "bf16-mixed", 2, {"all-gather": LLAMA_PARAMS, "reduce-scatter": LLAMA_PARAMS}),
    ({"framework": "megatron"}, "fp32", 4, {"all-reduce": LLAMA_PARAMS}),
    ({"framework": "megatron", "zero": 1}, "fp32", 4, {"reduce-scatter": LLAMA_PARAMS, "all-gather": LLAMA_PARAMS}),
])
def test_elements_sent_by_collective(plan: dict[str, Any], precision: str, wire: int, expected: dict[str, int]) -> None:
    """By hand: Ψ elements in each; FSDP gathers layers in forward and in backward, the root (embedding, norm, head) once. DeepSpeed's stage 3 keeps
    what is used again within 1e9 parameters (stage3_max_reuse_distance), and gathers those of up to 100,000 elements once, after the update."""
    assert sent(role(plan, precision=precision), wire) == expected


def test_volumes_are_those_of_the_zero_paper() -> None:
    """Section 7: DDP 2Ψ; stages 1 and 2 with reduce-scatter 2Ψ; stage 3 1.5 times that. As shipped, PyTorch's stage 1 and DeepSpeed's
    1 and 2 all-reduce and then send parameters, 3Ψ."""
    def volume(plan: dict[str, Any], precision: str = "fp32") -> float:
        return psi(sent(role(plan, precision=precision), 4 if precision == "fp32" else 2))

    assert volume({}) == volume({"zero": 2}) == volume({"framework": "megatron", "zero": 1}) == 2
    assert volume({"zero": 1}) == volume({"framework": "deepspeed", "zero": 1}, "bf16-mixed") == 3
    assert volume({"framework": "deepspeed", "zero": 2}, "bf16-mixed") == 3
    assert volume({"zero": 3, "reshard_after_forward": False}) == 2
    assert volume({"zero": 3}) == pytest.approx(3, abs=0.2)


def test_fsdp_gathers_in_the_compute_dtype_and_reduces_in_fp32() -> None:
    """MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=fp32): 2 bytes out, 4 bytes back."""
    found = sent(role({"zero": 3}, precision="bf16-mixed"))
    assert found == {"all-gather": 2 * (LLAMA_PARAMS + LAYERS), "reduce-scatter": 4 * LLAMA_PARAMS}


def test_megatron_reduces_fp32_gradients_and_gathers_16_bit_parameters() -> None:
    found = sent(role({"framework": "megatron", "zero": 1}, precision="bf16-mixed"))
    assert found == {"reduce-scatter": 4 * LLAMA_PARAMS, "all-gather": 2 * LLAMA_PARAMS}


@pytest.mark.parametrize("overlap", [True, False])
def test_instances_of_megatrons_distributed_optimizer_all_reduce_the_shard_of_every_bucket(overlap: bool) -> None:
    """core/distributed/param_and_grad_buffer.py, start_grad_sync: reduce-scatter over the 4 ranks of an instance, then all-reduce of a quarter across 2."""
    plan = {"framework": "megatron", "zero": 1, "dp_replicate": 2, "overlap_grad_reduce": overlap}
    found = role(plan, precision="bf16-mixed", grad_accum=3)
    assert sent(found) == {"reduce-scatter": 4 * LLAMA_PARAMS, "all-reduce": 4 * LLAMA_PARAMS // 4, "all-gather": 2 * LLAMA_PARAMS}
    groups = {c.kind: (c.axis, c.group) for c in found.collectives or ()}
    assert groups == {"reduce-scatter": ("dp_shard", 4), "all-reduce": ("dp_replicate", 2), "all-gather": ("dp_shard", 4)}


def test_as_many_instances_as_ranks_all_reduce_whole_gradients() -> None:
    plan = {"framework": "megatron", "zero": 1, "dp_replicate": 8}
    assert sent(role(plan, precision="bf16-mixed")) == {"all-reduce": 4 * LLAMA_PARAMS}


def test_hsdp_adds_an_all_reduce_of_the_gradient_shard_between_replicas() -> None:
    """fully_shard on a 2-d mesh: reduce-scatter over 4, then all-reduce of a quarter over 2."""
    found = role({"strategy": "hsdp", "dp_shard": 4})
    assert sent(found, 4) == {"all-gather": LLAMA_PARAMS + LAYERS, "reduce-scatter": LLAMA_PARAMS, "all-reduce": LLAMA_PARAMS // 4}
    groups = {c.kind: (c.axis, c.group) for c in found.collectives or ()}
    assert groups["all-reduce"] == ("dp_replicate", 2)
    assert groups["reduce-scatter"] == ("dp_shard", 4)


ACCUMULATED = {
    "ddp": ({}, "fp32", 4, {"all-reduce": 1}),
    "ddp, reducing each": ({"sync_each_micro_batch": True}, "fp32", 4, {"all-reduce": 3}),
    "zero 1": ({"zero": 1}, "fp32", 4, {"all-reduce": 1, "broadcast": 1}),
    "zero 2": ({"zero": 2}, "fp32", 4, {"reduce-scatter": 3, "all-gather": 1}),
    "zero 2, no sync": ({"zero": 2, "sync_each_micro_batch": False}, "fp32", 4, {"reduce-scatter": 1, "all-gather": 1}),
    "deepspeed 1": ({"framework": "deepspeed", "zero": 1}, "bf16-mixed", 2, {"all-reduce": 1, "all-gather": 1}),
    "deepspeed 2": ({"framework": "deepspeed", "zero": 2}, "bf16-mixed", 2, {"all-reduce": 3, "all-gather": 1}),
    "megatron 1": ({"framework": "megatron", "zero": 1}, "fp32", 4, {"reduce-scatter": 1, "all-gather": 1})}


@pytest.mark.parametrize("case", ACCUMULATED)
def test_three_micro_batches_send_gradients_once_or_each_time(case: str) -> None:
    """no_sync (DDP, Megatron, stage 1) reduces after the last micro-batch; stage 2 and FSDP reduce each; parameters go out once."""
    plan, precision, wire, times = ACCUMULATED[case]
    assert sent(role(plan, precision=precision, grad_accum=3), wire) == {kind: n * LLAMA_PARAMS for kind, n in times.items()}


def test_fsdp_sends_everything_again_for_each_micro_batch() -> None:
    """3Ψ a micro-batch; without reducing each, gathers repeat and the reduction comes last."""
    each = sent(role({"zero": 3}, grad_accum=3), 4)
    assert each == {"all-gather": 3 * (LLAMA_PARAMS + LAYERS), "reduce-scatter": 3 * LLAMA_PARAMS}
    last = sent(role({"zero": 3, "sync_each_micro_batch": False}, grad_accum=3), 4)
    assert last == {"all-gather": 3 * (LLAMA_PARAMS + LAYERS), "reduce-scatter": LLAMA_PARAMS}


BUCKETED = {"layers": 3, "hidden": 512, "heads": 8, "ffn": 2048, "vocab": 8192, "gated": False}


def test_ddp_fills_buckets_in_the_order_in_which_gradients_arrive() -> None:
    """reducer.cpp by hand. fp32: head 16 MiB alone passes the first cap of 1 MiB. Then the last norm (2 KiB), layers 3 and 2 (12 MiB
    and 4 KiB each) and the next layer's down projection (4 MiB) pass 25 MiB; the rest (8 MiB, 4 KiB) goes with the embedding (16 MiB).
    """
    found = sorted(c.message_bytes for c in role({}, BUCKETED).collectives or () for _ in range(c.count))
    assert found == sorted([16 * MIB, 28 * MIB + 10 * 1024, 24 * MIB + 4 * 1024])


def test_larger_ddp_buckets_are_fewer() -> None:
    """A cap of 100 MiB leaves two: the head, and all else."""
    found = [(c.message_bytes, c.count) for c in role({"bucket_mb": 100}, BUCKETED).collectives or ()]
    assert sorted(found) == [(16 * MIB, 1), (52 * MIB + 14 * 1024, 1)]


def test_fsdp_issues_one_gather_a_layer_and_pass_and_one_for_the_root() -> None:
    """fully_shard on each of 4 layers and the root: 4 + 1 gathers in forward, 4 in backward, 5 reduce-scatters."""
    counts: dict[tuple[str, str], int] = {}
    for c in role({"zero": 3}).collectives or ():
        counts[c.phase, c.kind] = counts.get((c.phase, c.kind), 0) + c.count
    assert counts == {("forward", "all-gather"): 5, ("backward", "all-gather"): 4, ("backward", "reduce-scatter"): 5}


@pytest.mark.parametrize("plan", [{"zero": 3}, {"zero": 2}, {"framework": "deepspeed", "zero": 3}, {"framework": "megatron", "zero": 1}])
def test_gathers_and_scatters_have_one_shard_on_the_small_side(plan: dict[str, Any]) -> None:
    for c in role(plan).collectives or ():
        small, large = (c.in_bytes, c.out_bytes) if c.kind == "all-gather" else (c.out_bytes, c.in_bytes)
        assert (small * N, large) == (c.message_bytes, c.message_bytes)


def test_clipping_sends_a_few_numbers() -> None:
    """clip_grad_norm_: whole gradients need no communication, sharded ones reduce their norms (4 bytes a tensor at most)."""
    def clipped(plan: dict[str, Any]) -> int:
        return sum(sent(role(plan, clip_norm=1.0)).values()) - sum(sent(role(plan)).values())

    assert clipped({}) == clipped({"zero": 1}) == 0
    assert 4 <= clipped({"zero": 2}) <= 4 * 39
    assert 4 <= clipped({"zero": 3}) <= 4 * 39


ONE_LINE = {"share": 1.0, "base_s": 0.0, "group_loss": 0.0, "small_share": 1.0, "mid_share": 1.0, "mid_hop_factor": 1.0, "tree_share": 1.0}


def all_reduce_s(gpus: int, gpus_per_node: int, hop_s: float, bytes_per_s: float) -> tuple[float, int]:
    """Seconds and bytes of a step's only collective, over one ideal link with one protocol."""
    kind = "nvlink" if gpus_per_node > 1 else "infiniband"
    levels = [{"name": "node", "kind": "nvlink", "domain": gpus_per_node, "bytes_per_s": bytes_per_s}]
    if gpus_per_node < gpus:
        levels.append({"name": "network", "kind": "infiniband", "domain": gpus, "bytes_per_s": bytes_per_s})
    run = build_run(model=LLAMA, cluster={"gpu": "a100", "gpus": gpus, "gpus_per_node": gpus_per_node, "levels": levels},
                    plan={"bucket_mb": 1000, "first_bucket_bytes": 1000 * MIB}, recipe={"seq_len": 64, "precision": "fp32", "clip_norm": 0.0})
    constants = {f"link.{kind}.{key}": value for key, value in ONE_LINE.items()}
    constants |= {f"link.{kind}.hop_s": hop_s, f"link.{kind}.hop_large_s": hop_s}
    profile = load_profile(run)
    known = {k: v for k, v in constants.items() if k in profile.constants}
    (only,) = predict(run, profile.replace(known), scaling=False).roles[0].collectives or ()
    assert (only.kind, only.count, only.message_bytes) == ("all-reduce", 1, 4 * LLAMA_PARAMS)
    assert only.total_s is not None
    return only.total_s, only.message_bytes


@pytest.mark.parametrize("n", [2, 4, 8])
def test_one_bucket_over_one_link_takes_the_time_of_the_ring(n: int) -> None:
    """2(n-1)/n · M/B + 2(n-1) · a (nccl-tests, PERFORMANCE.md; Patarasuk and Yuan 2009), with B = 300 GB/s and a = 1 us."""
    seconds, nbytes = all_reduce_s(n, n, 1e-6, 300e9)
    assert seconds == pytest.approx(2 * (n - 1) / n * nbytes / 300e9 + 2 * (n - 1) * 1e-6)


@pytest.mark.parametrize("n", [16, 256])
def test_between_many_nodes_a_slow_hop_makes_the_tree_win(n: int) -> None:
    """2 · M/B + 2 · log2(n) · a (Sanders, Speck and Träff 2009), one GPU a node, B = 25 GB/s and a = 1 ms."""
    seconds, nbytes = all_reduce_s(n, 1, 1e-3, 25e9)
    depth = n.bit_length() - 1
    assert seconds == pytest.approx(2 * nbytes / 25e9 + 2 * depth * 1e-3)
    assert seconds < 2 * (n - 1) / n * nbytes / 25e9 + 2 * (n - 1) * 1e-3
