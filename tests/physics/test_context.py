"""Context parallelism against closed forms and papers, through a Run and predict().

Sources: ring attention passes c-1 parts of keys and values (Liu et al., arXiv 2310.01889, section 3); Ulysses exchanges q, k, v and the output in
four all-to-alls (Jacobs et al., arXiv 2309.14509, section 3.1), each rank's whole buffer; a contiguous split of a causal sequence leaves the last
rank (2c-1)/c of the mean work (zhuzilin/ring-flash-attention, issue 2). The longest sequences of Arctic Long Sequence Training: arXiv 2506.13996 and
snowflakedb/ArcticTraining, projects/sequence-parallelism.
"""

from typing import Any

import pytest
from steps import memory, sent, step

from costmodel import PlanError, StepReport, build_run, predict
from costmodel.program.build import build
from costmodel.program.ir import Op, expand

MODEL: dict[str, Any] = {"layers": 3, "hidden": 1024, "heads": 16, "kv_heads": 8, "ffn": 2048, "vocab": 512}
S, B = 4096, 2
KEYS = B * S * 8 * 64
"""Elements of one layer's keys of the whole sequence."""
QUERIES = 2 * KEYS


def shared(c: int, kind: str = "ring", gpus: int = 0, recipe: dict[str, Any] | None = None, **plan: Any) -> StepReport:
    return step(MODEL, gpus or c, "h100", {"strategy": "ddp", "cp": c, "cp_kind": kind, **plan},
                **{"seq_len": S, "micro_batch": B, "precision": "bf16-pure", **(recipe or {})})


def messages(report: StepReport, axis: str = "cp") -> dict[tuple[str, str, str], int]:
    """Elements by phase, collective and dtype, of each layer."""
    wide = {"bf16": 2, "fp32": 4}
    out: dict[tuple[str, str, str], int] = {}
    for m in report.roles[0].collectives or ():
        if m.axis == axis:
            key = m.phase, m.kind, m.dtype
            out[key] = out.get(key, 0) + m.count * m.message_bytes // wide[m.dtype] // MODEL["layers"]
    return out


@pytest.mark.parametrize("c", [2, 4, 8])
def test_a_ring_passes_keys_and_values_c_minus_1_times_and_their_gradients_c_times(c: int) -> None:
    found = messages(shared(c))
    assert found["forward", "send", "bf16"] == found["backward", "send", "bf16"] == (c - 1) * 2 * KEYS // c
    assert found["backward", "send", "fp32"] == c * 2 * KEYS // c
    assert {kind for _, kind, _ in found} == {"send", "recv"}


@pytest.mark.parametrize("c", [2, 4, 8])
def test_all_gather_brings_keys_and_values_once_each_way(c: int) -> None:
    found = messages(shared(c, "allgather"))
    assert found == {("forward", "all-gather", "bf16"): 2 * KEYS, ("backward", "all-gather", "bf16"): 2 * KEYS,
                     ("backward", "reduce-scatter", "fp32"): 2 * KEYS}


@pytest.mark.parametrize("c", [2, 4, 8])
def test_ulysses_exchanges_queries_keys_values_and_outputs_in_four_all_to_alls(c: int) -> None:
    report = shared(c, "ulysses")
    assert messages(report) == {(phase, "all-to-all", "bf16"): 2 * (KEYS + QUERIES) // c for phase in ("forward", "backward")}
    assert sum(m.count for m in report.roles[0].collectives or () if m.axis == "cp") == 8 * MODEL["layers"]


def attention(c: int, **plan: Any) -> list[Op]:
    """The attention kernels of a step on the rank that has most to do."""
    run = build_run(model=MODEL, cluster={"gpus": c, "gpu": "h100"}, plan={"strategy": "ddp", "cp": c, **plan}, recipe={"seq_len": S, "precision": "bf16-pure"})
    return [op for block in expand(build(run).roles[0].step) for op in block.ops if op.kind == "attention"]


@pytest.mark.parametrize("c", [2, 4, 8])
def test_a_contiguous_split_of_a_causal_sequence_leaves_the_last_rank_2c_minus_1_over_c_of_the_work(c: int) -> None:
    """C74: 1.5, 1.75 and 1.875 times the attention of a balanced split, whose ranks all have 1/c of one GPU's."""
    balanced, plain = (sum(op.flops for op in attention(c, cp_balance=on)) for on in (True, False))
    assert plain / balanced == (2 * c - 1) / c
    assert balanced == sum(op.flops for op in attention(1)) / c


@pytest.mark.parametrize("kind", ["ring", "allgather"])
def test_what_a_rank_saves_is_its_share_of_one_gpu_s(kind: str) -> None:
    """bf16: q, k, v, output, log-sum-exp and all else by tokens."""
    alone, spread = memory(step(MODEL, 1, "h100", seq_len=S, micro_batch=B, precision="bf16-pure")), memory(shared(4, kind))
    assert alone.activations_bytes is not None and spread.activations_bytes is not None
    assert spread.activations_bytes == pytest.approx(alone.activations_bytes / 4, rel=1e-6)


def test_ulysses_saves_the_output_before_and_after_its_all_to_all() -> None:
    """What the kernel saves and what the output projection saves are two tensors: 2 bytes an element more a layer."""
    spread = [memory(shared(4, kind)).activations_bytes for kind in ("ring", "ulysses")]
    assert spread[0] is not None and spread[1] is not None
    assert spread[1] - spread[0] == MODEL["layers"] * 2 * QUERIES // 4


def test_state_shards_over_cp_and_gradients_are_averaged_over_it() -> None:
    """FSDP over dp_shard x cp: the parameters of a rank are 1/8 of the model's; DDP's buckets go around all 8 ranks, the batch is that of dp."""
    whole, sharded = memory(shared(4, gpus=8)).states, memory(shared(4, gpus=8, strategy="fsdp")).states
    assert sharded["parameters"] * 8 == pytest.approx(whole["parameters"], rel=1e-3)
    report = shared(4, gpus=8)
    assert {m.group for m in report.roles[0].collectives or () if m.kind == "all-reduce"} == {8}
    assert sent(report.roles[0], 2)["all-reduce"] >= whole["parameters"] // 2
    assert report.tokens_per_step == 2 * B * S


def test_a_ring_s_exchange_hides_behind_long_sequences_and_not_behind_short_ones() -> None:
    """Attention grows with the square of a part, its messages with the part: over slow links a short sequence waits for most of them, a long one for
    little more than the last, that of summed gradients, which nothing is beside."""
    found = []
    for length in (8192, 262144):
        run = build_run(model=MODEL, cluster={"gpus": 8, "gpu": "h100", "link_factors": {"nvlink": 0.05}}, plan={"strategy": "ddp", "cp": 8},
                        recipe={"seq_len": length, "micro_batch": 8, "precision": "bf16-pure", "compile": True})
        time = predict(run, scaling=False).roles[0].time
        assert time is not None
        found.append(time.exposed_s.get("cp", 0.0) / time.communication_s["cp"])
    assert found[0] > 0.5 > 0.1 > found[1]


@pytest.mark.parametrize(("field", "given"), [
    ("recipe.seq_len", {"cp": 4, "recipe": {"seq_len": 4100}}), ("plan.cp", {"cp": 16, "cp_kind": "ulysses"}),
    ("recipe.attention", {"cp": 2, "recipe": {"attention": "eager"}}), ("recipe.dropout", {"cp": 2, "recipe": {"dropout": 0.1}}),
    ("plan.checkpointing", {"cp": 2, "checkpointing": "selective:op"})])
def test_what_has_no_such_form_is_refused(field: str, given: dict[str, Any]) -> None:
    recipe = given.pop("recipe", {})
    with pytest.raises(PlanError) as refused:
        shared(given.pop("cp"), given.pop("cp_kind", "ring"), recipe=recipe, **given)
    assert refused.value.field == field


def test_1_1_million_tokens_of_llama_8b_fill_eight_h100s_under_ulysses() -> None:
    """run-h100-sp8-llama-8b-no-mlp-no-act-offload.yml: the longest that runs on 8 x 80 GB, with full checkpointing and a fused loss, without tiled
    feed-forward blocks or offloaded activations; Adam's states and master weights lie in host memory, so they are taken off what is predicted."""
    report = step("llama-3.1-8b", 8, "h100", {"framework": "deepspeed", "zero": 3, "cp": 8, "cp_kind": "ulysses", "checkpointing": "full"},
                  seq_len=1_100_000, loss="fused", precision="bf16-mixed", allocator="expandable", optimizer="adam")
    found = memory(report)
    assert found.device_bytes is not None and found.capacity_bytes is not None
    on_device = found.device_bytes - found.states["optimizer"] - found.states["master_weights"]
    assert 0.85 < on_device / found.capacity_bytes <= 1.0


def test_the_first_all_to_all_of_ulysses_makes_nccl_keep_buffers() -> None:
    """NVIDIA/nccl#1685: 1.06 GB outside PyTorch's tensors become 4.34 GB around the first all_to_all_single of 8 H100s."""
    ring, ulysses = (memory(shared(8, kind)).outside["nccl"] for kind in ("ring", "ulysses"))
    assert ulysses - ring == pytest.approx((4.34 - 1.06) * 1e9, rel=0.25)
