"""Tensor, sequence and pipeline parallelism against the papers' closed forms, through a Run and predict().

Sources: Shoeybi et al. (arXiv 1909.08053), section 3: two all-reduces a layer in forward and two in backward. Korthikanti et al.
(arXiv 2205.05198), equations 2 and 4 and table 2: activations under tensor and sequence parallelism, selective and full recompute;
section 4.2.2: an all-gather and a reduce-scatter replace each all-reduce, and backward gathers the saved shard again. Narayanan et al.
(arXiv 2104.04473), sections 2.2.1 and 2.2.2: bubbles. DeepSpeed issues 2800 and 4477 (field case C37): micro-batches in flight under 1F1B.
"""

from typing import Any

import pytest
from steps import GPT, memory, sent, step

from costmodel import StepReport

H, A, S, T = 12288, 96, 2048, 8
"""GPT-3's layer on a node of eight."""
SBH, SCORES = S * H, 5 * A * S * S
MEGATRON: dict[str, Any] = {"framework": "megatron", "tp": T}


def tensor(layers: int, plan: dict[str, Any], **recipe: Any) -> StepReport:
    model = {**GPT, "hidden": H, "heads": A, "ffn": 4 * H, "layers": layers}
    return step(model, T, gpu="h100", plan=plan, **{"precision": "bf16-mixed", "seq_len": S, "attention": "eager", "dropout": 0.1, **recipe})


def per_layer(plan: dict[str, Any]) -> int:
    """Saved activations that one layer more adds."""
    kept = [memory(tensor(n, {**MEGATRON, **plan})).activations_bytes for n in (5, 6)]
    assert kept[0] is not None and kept[1] is not None
    return kept[1] - kept[0]


NORMS = 2 * 2 * 4 * S
"""An fp32 mean and rstd a token for each of two LayerNorms, which the paper neglects."""


@pytest.mark.parametrize(("plan", "paper", "norms"), [
    ({}, SBH * 10 + SBH * 24 // T + SCORES // T, NORMS),
    ({"sequence_parallel": True}, SBH * 34 // T + SCORES // T, NORMS // T),
    ({"checkpointing": "selective"}, SBH * 10 + SBH * 24 // T, NORMS),
    ({"sequence_parallel": True, "checkpointing": "selective"}, SBH * 34 // T, NORMS // T),
    ({"checkpointing": "full"}, 2 * SBH, 0),
    ({"sequence_parallel": True, "checkpointing": "full"}, 2 * SBH // T, 0),
])
def test_activations_of_a_layer_are_korthikanti_s(plan: dict[str, Any], paper: int, norms: int) -> None:
    """sbh(10 + 24/t + 5as/ht), sbh/t (34 + 5as/h), sbh(10 + 24/t), 34sbh/t, 2sbh; and 2sbh/t where the input is a shard."""
    assert per_layer(plan) == paper + norms


def counts(report: StepReport, kind: str, phase: str, least: int) -> int:
    """Collectives over the tp group of at least so many bytes."""
    return sum(c.count for c in report.roles[0].collectives or () if (c.axis, c.kind, c.phase) == ("tp", kind, phase) and c.message_bytes >= least)


@pytest.mark.parametrize("framework", ["megatron", "pytorch"])
def test_a_layer_adds_two_all_reduces_each_way(framework: str) -> None:
    """Shoeybi et al., figure 4: operators f and g of attention and of the feed-forward block, of 2sbh bytes each."""
    few, many = (step({**GPT, "hidden": 256, "heads": 8, "ffn": 1024, "layers": n, "fused_qkv": False, "tied_embeddings": False}, 8, gpu="h100",
                      plan={"framework": framework, "tp": 8}, precision="bf16-mixed" if framework == "megatron" else "bf16-pure")
                 for n in (2, 12))
    for phase in ("forward", "backward"):
        assert counts(many, "all-reduce", phase, 2 * 64 * 256) - counts(few, "all-reduce", phase, 2 * 64 * 256) == 10 * 2
    assert {c.message_bytes for c in many.roles[0].collectives or () if c.count >= 20} == {2 * 64 * 256}


@pytest.mark.parametrize(("framework", "again"), [("megatron", 2), ("pytorch", 0)])
def test_sequence_parallelism_puts_a_gather_and_a_scatter_in_place_of_each_all_reduce(framework: str, again: int) -> None:
    """Megatron saves the shard and gathers it once more in backward; DTensor saves what it gathered."""
    few, many = (step({**GPT, "hidden": 256, "heads": 8, "ffn": 1024, "layers": n, "fused_qkv": False, "tied_embeddings": False}, 8, gpu="h100",
                      plan={"framework": framework, "tp": 8, "sequence_parallel": True}, seq_len=512,
                      precision="bf16-mixed" if framework == "megatron" else "bf16-pure") for n in (2, 12))
    whole = 2 * 512 * 256
    more = {(kind, phase): counts(many, kind, phase, whole) - counts(few, kind, phase, whole)
            for kind in ("all-gather", "reduce-scatter", "all-reduce") for phase in ("forward", "backward")}
    assert more == {("all-gather", "forward"): 20, ("reduce-scatter", "forward"): 20, ("all-reduce", "forward"): 0,
                    ("all-gather", "backward"): 10 * (2 + again), ("reduce-scatter", "backward"): 20, ("all-reduce", "backward"): 0}


def test_sequence_parallelism_sends_the_bytes_of_the_all_reduces() -> None:
    """Korthikanti et al., section 4.2.2: an all-reduce is a reduce-scatter and an all-gather; Megatron's second gathers come on top."""
    plain, split = (sent(tensor(4, {**MEGATRON, "sequence_parallel": on}).roles[0]) for on in (False, True))
    again = (2 * 4 + 1) * 2 * SBH
    assert split["all-gather"] + split["reduce-scatter"] == pytest.approx(2 * plain["all-reduce"] + again, rel=1e-3)


EVEN: dict[str, Any] = {**GPT, "hidden": 2048, "heads": 16, "ffn": 8192, "vocab": 128, "tied_embeddings": False, "fused_qkv": False}
"""So small a vocabulary that stages of equal layers are equal."""


def pipeline(pp: int, layers: int, micro_batches: int, schedule: str = "1f1b", framework: str = "megatron", **plan: Any) -> StepReport:
    precision = "bf16-mixed" if framework == "megatron" else "bf16-pure"
    return step({**EVEN, "layers": layers}, pp, gpu="h100", plan={"framework": framework, "pp": pp, "schedule": schedule, **plan}, precision=precision,
                seq_len=2048, grad_accum=micro_batches, attention="fa2")


@pytest.mark.parametrize(("framework", "micro_batches", "in_flight"), [
    ("megatron", 16, [8, 7, 6, 5, 4, 3, 2, 1]), ("pytorch", 16, [8, 7, 6, 5, 4, 3, 2, 1]), ("megatron", 4, [4, 4, 4, 4, 4, 3, 2, 1])])
def test_stage_i_of_1f1b_keeps_min_of_p_minus_i_and_m_micro_batches(framework: str, micro_batches: int, in_flight: list[int]) -> None:
    """Field case C37, in units of the activations of two layers. Beside them a rank keeps less than half a unit: token ids, targets,
    the embedding's mask and logits of 128 words, and what a message costs."""
    plan = {"framework": framework}
    both = [memory(step({**EVEN, "layers": n}, 1, gpu="h100", plan=plan, seq_len=2048, attention="fa2",
                        precision="bf16-mixed" if framework == "megatron" else "bf16-pure")).activations_bytes for n in (16, 14)]
    assert both[0] is not None and both[1] is not None
    kept = [role.memory.activations_bytes / (both[0] - both[1]) for role in pipeline(8, 16, micro_batches, framework=framework).roles
            if role.memory and role.memory.activations_bytes]
    assert [int(k + 1e-9) for k in kept] == in_flight
    assert all(k - n < 0.5 for k, n in zip(kept, in_flight, strict=True))


@pytest.mark.parametrize(("schedule", "virtual"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4)])
@pytest.mark.parametrize("micro_batches", [4, 8, 32])
def test_the_bubble_is_p_minus_1_over_m_v_of_the_work(schedule: str, virtual: int, micro_batches: int) -> None:
    """Narayanan et al.: (p-1)/m for GPipe and 1F1B, (p-1)/(m v) interleaved; 9.4% of the ideal time at p = 4, m = 32. The rank that works
    most has it, but for messages that are not free and stages that are not quite equal."""
    report = pipeline(4, 32, micro_batches, schedule, virtual_stages=virtual)
    shares = []
    for role in report.roles:
        assert role.time is not None
        work = sum(seconds for phase, seconds in role.time.phases.items() if phase in ("forward", "backward"))
        shares.append(role.time.bubble_s / work)
    ideal = 3 / (micro_batches * virtual)
    assert ideal * 0.95 <= min(shares) <= ideal * 1.1 + 0.01


@pytest.mark.parametrize("split", [True, False])
def test_megatron_hides_what_backward_sends_behind_its_matmuls(split: bool) -> None:
    """NVIDIA/Megatron-LM core/tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication: the input is gathered beside the
    matmul for its gradient, and that gradient scattered (or all-reduced) beside the matmul for the weight's. GPT-3's matmuls are longer
    than what is sent, so that of a block's 2 + 3 (1 + 1) collectives, forward and backward, only 2 + 1 (1 + 0) are waited for."""
    time = tensor(8, {**MEGATRON, "sequence_parallel": split}, attention="fa2", dropout=0.0).roles[0].time
    assert time is not None
    share = time.exposed_s["tp"] / time.communication_s["tp"]
    assert share == pytest.approx(3 / 5 if split else 1 / 2, abs=0.1)
