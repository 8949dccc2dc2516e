"""Bytes per parameter of every strategy and dialect, and the ZeRO paper's table, through a Run and predict().

Sources: ZeRO paper (arXiv 1910.02054), section 3 and table 1; Megatron-LM, docs dist_optimizer (bytes per parameter) and
issue 654; torch.optim and torch.distributed.optim.ZeroRedundancyOptimizer for what PyTorch keeps; bitsandbytes' block size.
"""

from typing import Any

import pytest
from steps import GPT, LLAMA, LLAMA_PARAMS, LLAMA_TENSORS, memory, most, states, step

from costmodel import PlanError, build_run, predict

N = 8
BF16_GRADIENTS = {"base": "bf16-mixed", "gradient": "bf16", "reduce": "bf16"}


def row(parameters: float, gradients: float, optimizer: float, master: float = 0, buckets: float = 0) -> dict[str, float]:
    """Bytes per parameter by category."""
    given = {"parameters": parameters, "gradients": gradients, "optimizer": optimizer, "master_weights": master, "communication": buckets}
    return {k: v for k, v in given.items() if v}


@pytest.mark.parametrize(("plan", "precision", "expected"), [
    ({}, "fp32", row(4, 4, 8, buckets=4)),
    ({}, "bf16-mixed", row(4, 4, 8, buckets=4)),
    ({}, "fp16-mixed", row(4, 4, 8, buckets=4)),
    ({"gradient_as_bucket_view": True}, "fp32", row(4, 4, 8)),
    ({"gradient_as_bucket_view": True}, "bf16-mixed", row(4, 4, 8)),
    ({}, "bf16-pure", row(2, 2, 4, buckets=2)),
    ({"zero": 2}, "bf16-mixed", row(4, 4 / N, 8 / N)),
    ({"zero": 2}, "bf16-pure", row(2, 2 / N, 4 / N)),
    ({"zero": 3}, "fp32", row(4 / N, 4 / N, 8 / N)),
    ({"zero": 3}, "bf16-mixed", row(4 / N, 4 / N, 8 / N)),
    ({"zero": 3}, "bf16-pure", row(2 / N, 2 / N, 4 / N)),
    ({"strategy": "hsdp", "dp_shard": 4}, "bf16-mixed", row(1, 1, 2)),
])
def test_pytorch_keeps_the_bytes_of_its_optimizers_and_wrappers(plan: dict[str, Any], precision: str, expected: dict[str, float]) -> None:
    """torch.optim: states and gradients in the parameter's dtype; DDP: one bucket byte a gradient byte unless gradients are views."""
    report = step(LLAMA, N, plan=plan, precision=precision)
    assert states(report) == {k: v * LLAMA_PARAMS for k, v in expected.items()}


@pytest.mark.parametrize(("precision", "expected"), [
    ("fp32", row(4, 4, 8)), ("bf16-mixed", row(4, 4, 8)), ("fp16-mixed", row(4, 4, 8)), ("bf16-pure", row(2, 2, 4))])
def test_one_gpu_keeps_16_bytes_a_parameter_or_8_in_pure_bf16(precision: str, expected: dict[str, float]) -> None:
    report = step(LLAMA, 1, plan={"strategy": "single"}, precision=precision)
    assert states(report) == {k: v * LLAMA_PARAMS for k, v in expected.items()}


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed"])
@pytest.mark.parametrize(("zero", "expected"), [
    (1, row(2, 2, 8 / N, 4 / N)), (2, row(2, 2 / N, 8 / N, 4 / N)), (3, row(2 / N, 2 / N, 8 / N, 4 / N))])
def test_deepspeed_keeps_the_zero_papers_bytes(zero: int, precision: str, expected: dict[str, float]) -> None:
    """arXiv 1910.02054, section 3.1: 2 + 2 + K with K = 12, of which stage 1 divides K, stage 2 also gradients, stage 3 all.

    Gradients of stages 1 and 2 are gone when the update is done, so they are counted where they are most; stage 2 keeps whole the parameters
    that a slice touches, here the head. Stage 3 also has whole what has no more than 100,000 elements (stage3_param_persistence_threshold).
    """
    plan = {"framework": "deepspeed", "zero": zero}
    run = build_run(model=LLAMA, cluster={"gpus": N, "gpu": "a100"}, plan=plan, recipe={"seq_len": 64, "optimizer": "adamw:foreach", "precision": precision})
    found = states(predict(run, scaling=False))
    bucket = found.pop("communication", 0)
    assert (bucket > 0) is (zero == 3)
    small = {3: 4 * (4 * 256**2 + 2 * 256) + 256}.get(zero, 0)
    assert found["parameters"] == expected["parameters"] * LLAMA_PARAMS + 2 * small
    assert {k: found[k] for k in ("optimizer", "master_weights")} == {k: expected[k] * LLAMA_PARAMS for k in ("optimizer", "master_weights")}
    slice_bytes, most_bytes = expected["gradients"] * LLAMA_PARAMS, most(run, "gradients")
    assert slice_bytes <= most_bytes <= slice_bytes + (2 * 2 * 1024 * 256 if zero == 2 else 0)
    assert ("gradients" in found) is (zero == 3)


def test_deepspeed_stage_0_keeps_whole_gradients() -> None:
    """deepspeed/runtime/bf16_optimizer.py: bf16 parameters, whole fp32 gradient buffers, fp32 master and moments."""
    found = states(step(LLAMA, N, plan={"framework": "deepspeed", "zero": 0}, precision="bf16-mixed"))
    assert found["gradients"] == 4 * LLAMA_PARAMS


@pytest.mark.parametrize("n", [1, 8, 64])
@pytest.mark.parametrize(("precision", "whole", "divided"), [("bf16-mixed", 6, 12), (BF16_GRADIENTS, 4, 12), ("fp32", 8, 8)])
def test_megatron_keeps_18_bytes_or_6_and_12_over_d(n: int, precision: Any, whole: int, divided: int) -> None:
    """Megatron-LM docs, dist_optimizer: bf16 parameters with fp32 gradients 18, or 6 + 12/d; fp32 16, or 8 + 8/d; issue 654."""
    plain = states(step(LLAMA, n, plan={"framework": "megatron"}, precision=precision))
    distributed = states(step(LLAMA, n, plan={"framework": "megatron", "zero": 1}, precision=precision))
    assert sum(plain.values()) == (whole + divided) * LLAMA_PARAMS
    assert sum(distributed.values()) == (whole + divided / n) * LLAMA_PARAMS


def test_instances_of_megatrons_distributed_optimizer_shard_within_themselves() -> None:
    """6 + 12/d bytes, d the ranks of one of 4 instances (NVIDIA/Megatron-LM, --num-distributed-optimizer-instances)."""
    found = states(step(LLAMA, 16, plan={"framework": "megatron", "zero": 1, "dp_replicate": 4}, precision="bf16-mixed"))
    assert sum(found.values()) == (6 + 12 / 4) * LLAMA_PARAMS


@pytest.mark.parametrize(("zero", "n"), [(0, 8), (1, 8), (1, 64)])
def test_megatron_in_fp16_needs_20_bytes_or_4_and_16_over_d_at_the_step(zero: int, n: int) -> None:
    """Megatron-LM docs, dist_optimizer: fp16 parameters and gradients 20, or 4 + 16/d, of which 4 are the step's fp32 gradients."""
    report = step(LLAMA, n, plan={"framework": "megatron", "zero": zero}, precision="fp16-mixed", optimizer="adamw:fused", seq_len=8)
    here = memory(report).phases["optimizer step"].total_bytes - memory(report).states.get("framework", 0)
    shards = n if zero else 1
    counters = states(report)["optimizer"] - 8 * LLAMA_PARAMS // shards
    assert 0 < counters <= 4 * LLAMA_TENSORS
    assert here - counters == (4 + 16 / shards) * LLAMA_PARAMS


def test_zero_1_places_whole_tensors_on_the_emptiest_rank() -> None:
    """ZeroRedundancyOptimizer._partition_parameters by hand: 192 128 128 64 64 64 64 8 8 8 over two ranks, largest first.

    Rank 0: 192 + 64 + 64 + 64 = 384; rank 1: 128 + 128 + 64 + 8 + 8 + 8 = 344.
    """
    tiny = {"layers": 1, "hidden": 8, "heads": 2, "ffn": 16, "vocab": 24, "gated": False, "tied_embeddings": True}
    report = step(tiny, 2, plan={"zero": 1}, precision="fp32", seq_len=8)
    assert sorted(r.memory.states["optimizer"] for r in report.roles if r.memory) == [8 * 344, 8 * 384]
    assert all(r.memory.states["parameters"] == r.memory.states["gradients"] == 4 * 728 for r in report.roles if r.memory)
    fused = step(tiny, 2, plan={"zero": 1}, precision="fp32", seq_len=8, optimizer="adamw:fused")
    assert sorted(r.memory.states["optimizer"] for r in fused.roles if r.memory) == [8 * 344 + 4 * 6, 8 * 384 + 4 * 4]


def test_zero_1_shards_one_nth_only_on_average() -> None:
    report = step(LLAMA, N, plan={"zero": 1}, precision="fp32")
    kept = [(r.memory.states["optimizer"], r.ranks) for r in report.roles if r.memory]
    assert max(k for k, _ in kept) > 8 * LLAMA_PARAMS / N > min(k for k, _ in kept)


def test_fsdp_pads_each_parameter_to_whole_rows() -> None:
    """fully_shard splits dim 0: over 3 ranks 1024 rows become 342, 256 become 86 and 512 become 171 on rank 0."""
    h = 256
    layer = 4 * 86 * h + 2 * 171 * h + 86 * 512 + 2 * 86
    rank_0 = 2 * 342 * h + 86 + 4 * layer
    assert states(step(LLAMA, 3, plan={"zero": 3}, precision="fp32")) == {"parameters": 4 * rank_0, "gradients": 4 * rank_0, "optimizer": 8 * rank_0}


def test_a_parameter_with_fewer_rows_than_ranks_still_takes_one_row() -> None:
    """2048 GPUs: every matrix of 256 columns holds one row of each tensor, the norms one element."""
    one_row = 2 * 256 + 1 + 4 * (6 * 256 + 512 + 2)
    assert states(step(LLAMA, 2048, plan={"zero": 3}, precision="fp32"))["parameters"] == 4 * one_row


@pytest.mark.parametrize(("optimizer", "bytes_per_parameter"), [
    ("sgd", 0), ("momentum", 4), ("adam:foreach", 8), ("adamw:foreach", 8), ("adam8bit:foreach", 2 + 2 * 4 / 256)])
def test_optimizers_keep_their_states(optimizer: str, bytes_per_parameter: float) -> None:
    """No state, a momentum buffer, two moments; 8-bit Adam two bytes and two fp32 scales a block of 256 (bitsandbytes)."""
    found = states(step(LLAMA, 1, precision="fp32", optimizer=optimizer))
    assert found.get("optimizer", 0) == bytes_per_parameter * LLAMA_PARAMS


def test_a_fused_adam_also_keeps_a_step_counter_for_each_tensor() -> None:
    """torch.optim.Adam(fused=True): `step` is a 4-byte tensor on the device."""
    found = states(step(LLAMA, 1, precision="fp32", optimizer="adamw:fused"))
    assert found["optimizer"] == 8 * LLAMA_PARAMS + 4 * LLAMA_TENSORS


def test_pytorch_gradients_have_the_dtype_of_their_parameters() -> None:
    """autograd accumulates into .grad in the parameter's dtype; a recipe that asks for another is refused."""
    with pytest.raises(PlanError, match="gradients of another dtype"):
        step(LLAMA, 1, precision={"base": "fp32", "gradient": "bf16"})


def test_gradients_that_are_zeroed_in_place_stay_one_copy() -> None:
    """optimizer.zero_grad(set_to_none=False) writes zeros; the next backward adds into the same tensors."""
    assert states(step(LLAMA, 1, precision="fp32", zero_set_to_none=False))["gradients"] == 4 * LLAMA_PARAMS


TABLE_1: dict[str, dict[int, tuple[str, str, str]]] = {
    "7.5B": {1: ("120", "120", "120"), 4: ("52.5", "41.3", "30"), 16: ("35.6", "21.6", "7.5"), 64: ("31.4", "16.6", "1.88"),
             256: ("30.4", "15.4", "0.47"), 1024: ("30.1", "15.1", "0.12")},
    "128B": {1: ("2048", "2048", "2048"), 4: ("896", "704", "512"), 16: ("608", "368", "128"), 64: ("536", "284", "32"),
             256: ("518", "263", "8"), 1024: ("513", "257", "2")},
    "1T": {1: ("16000", "16000", "16000"), 4: ("7000", "5500", "4000"), 16: ("4750", "2875", "1000"), 64: ("4187", "2218", "250"),
           256: ("4046", "2054", "62.5"), 1024: ("4011", "2013", "15.6")}}
"""GB for each data-parallel degree: P_os, P_os+g, P_os+g+p, as printed (some cells are cut, not rounded)."""


@pytest.mark.parametrize("size", TABLE_1)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_papers_table_1(size: str, stage: int) -> None:
    """arXiv 1910.02054, table 1. The shapes land within 1% of the count, so figures are scaled to it; one unit of the last digit."""
    nominal = {"7.5B": 7.5e9, "128B": 128e9, "1T": 1e12}[size]
    for n, cells in TABLE_1[size].items():
        run = build_run(params=size, cluster={"gpus": n, "gpu": "v100"}, plan={"framework": "deepspeed", "zero": stage},
                        recipe={"seq_len": 64, "precision": "fp16-mixed", "optimizer": "adam:foreach"})
        found = states(predict(run, scaling=False))
        found.pop("communication", None)
        if stage < 3:  # gone between steps
            found["gradients"] = 2 * -(-run.model.params // (n if stage == 2 else 1))
            assert most(run, "gradients") >= found["gradients"]
        printed = cells[stage - 1]
        unit = 10 ** -len(printed.partition(".")[2])
        assert sum(found.values()) / 1e9 * nominal / run.model.params == pytest.approx(float(printed), abs=unit), (size, stage, n)


@pytest.mark.parametrize(("name", "published"), [
    ("llama-3-8b", 8_030_261_248), ("llama-2-7b", 6_738_415_616), ("gpt2", 124_439_808), ("gpt2-xl", 1_557_611_200)])
def test_a_published_parameter_count_is_what_fp32_states_hold(name: str, published: int) -> None:
    """Hugging Face safetensors (Llama) and OpenAI's released checkpoints (GPT-2), tied embeddings counted once."""
    report = step(name, 1, gpu="h100", precision="fp32", seq_len=8)
    assert states(report)["parameters"] == 4 * published


def test_the_first_step_begins_without_optimizer_state_and_the_second_with_it() -> None:
    """torch.optim creates state lazily at the first step()."""
    m = memory(step(GPT, 1, precision="fp32", seq_len=8))
    assert set(m.phases["init"].by_category) == {"parameters"}
    assert m.states["optimizer"] == 2 * m.states["parameters"]
