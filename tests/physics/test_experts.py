"""A mixture of experts and expert parallelism, counted by hand: parameters, FLOPs, what is kept, what is sent, and who is fullest.

Sources: arXiv 2006.16668 (dispatch and combine), arXiv 2401.04088 (Mixtral), the model cards named below; NVIDIA/Megatron-LM (6 + 12/n bytes a parameter
under its distributed optimizer, with n of its own for the experts).
"""

from typing import Any

import pytest
from steps import memory, sent, states, step

from costmodel import PlanError, build_run, predict
from costmodel.catalog.models import model
from costmodel.catalog.profiles import constants_at
from costmodel.explain import explain
from costmodel.mesh import mesh_of
from costmodel.spec.parameters import active_parameter_count

H, F, E, K, V, L, T = 256, 128, 8, 2, 1024, 4, 64
MIXTURE: dict[str, Any] = {"layers": L, "hidden": H, "heads": 8, "ffn": 512, "vocab": V, "moe": {"experts": E, "top_k": K, "expert_ffn": F}}
EXPERT = 3 * H * F
REST = 2 * V * H + H + L * (4 * H * H + 2 * H + E * H)
MEGATRON = {"framework": "megatron", "zero": 1}
PURE = {"precision": "bf16-pure"}


@pytest.mark.parametrize(("name", "total", "active"), [
    ("mixtral-8x7b", 46.7e9, 12.9e9),       # arXiv 2401.04088, section 1: 47B and 13B; the announcement's 46.7B and 12.9B
    ("qwen3-30b-a3b", 30.5e9, 3.3e9),       # Qwen3 model card
    ("deepseek-v2-lite", 15.7e9, 2.4e9),    # arXiv 2405.04434, appendix B; the active count leaves the embedding out
])
def test_published_totals_and_active_parameters(name: str, total: float, active: float) -> None:
    m = model(name)
    used = active_parameter_count(m)
    if name == "deepseek-v2-lite":
        used -= m.vocab * m.hidden
    assert m.params == pytest.approx(total, rel=0.005)
    assert used == pytest.approx(active, rel=0.025)


def test_gpt_oss_counts_as_its_model_card_does() -> None:
    """arXiv 2508.10925, table 1: 20.9B in all, 3.61B active with the output matrix and without the embedding."""
    m = model("gpt-oss-20b")
    assert m.params == pytest.approx(20.91e9, rel=0.001)
    assert active_parameter_count(m) - m.vocab * m.hidden == pytest.approx(3.61e9, rel=0.005)


def test_flops_are_those_of_the_active_parameters() -> None:
    """6 FLOPs a token for each parameter of a matmul that it uses, and attention, 12 L s h a token."""
    report = step(MIXTURE, **PURE)
    matmuls = V * H + L * (4 * H * H + E * H + K * EXPERT)
    assert report.model_flops == 6 * T * matmuls + 12 * L * T * T * H


def test_a_layer_keeps_the_routed_copies_and_the_inner_activations() -> None:
    """Each of the k experts of a token keeps its own copies: row h, gate, its activation, up and their product 4 f, result h; in 16 bits. The
    router: scores in fp32, two fp32 and three int64 numbers a routed row (its weight in 16 bits too)."""
    def kept(k: int, f: int) -> int:
        small = {**MIXTURE, "vocab": 256, "moe": {"experts": E, "top_k": k, "expert_ffn": f}}
        return memory(step(small, **PURE)).activations_bytes or 0

    rows = T * K
    assert kept(2 * K, F) - kept(K, F) == L * rows * (2 * (2 * H + 4 * F) + 4 + 2 + 3 * 8)
    assert kept(K, 2 * F) - kept(K, F) == L * rows * 2 * 4 * F


@pytest.mark.parametrize("ep", [2, 4, 8])
def test_fsdp_shards_experts_over_their_replicas_and_all_else_over_all_ranks(ep: int) -> None:
    report = step(MIXTURE, 8, plan={"zero": 3, "ep": ep}, precision="fp32")
    mine = (REST + L * E * EXPERT) / 8
    assert states(report) == {"parameters": 4 * mine, "gradients": 4 * mine, "optimizer": 8 * mine}


def test_four_all_to_alls_a_layer_carry_every_token_k_times() -> None:
    role = step(MIXTURE, 8, plan={"zero": 3, "ep": 4}, precision="fp32").roles[0]
    moved = [c for c in role.collectives or () if c.kind == "all-to-all" and c.dtype == "fp32"]
    assert {(c.axis, c.group, c.message_bytes) for c in moved} == {("ep", 4, T * K * H * 4)}
    assert {c.phase: c.count for c in moved} == {"forward": 2 * L, "backward": 2 * L}


def test_experts_are_gathered_and_reduced_over_their_replicas_alone() -> None:
    """Elements: FSDP's 3 Ψ of the layers over 8 ranks, the root's 2, and 3 Ψ of a quarter of the experts over the 2 that have them."""
    role = step(MIXTURE, 8, plan={"zero": 3, "ep": 4}, precision="fp32", clip_norm=0.0).roles[0]
    by_axis: dict[str, int] = {}
    for c in role.collectives or ():
        by_axis[c.axis] = by_axis.get(c.axis, 0) + c.count * c.message_bytes // 4
    layers = L * (4 * H * H + 2 * H + E * H)
    assert by_axis["dp_shard"] == 3 * layers + 2 * (REST - layers)
    assert by_axis["edp"] == 3 * L * E * EXPERT // 4


def test_one_rank_of_an_ep_group_sends_nothing() -> None:
    kinds = sent(step(MIXTURE, 8, plan={"zero": 3, "ep": 1}, precision="fp32").roles[0])
    assert "all-to-all" not in kinds


@pytest.mark.parametrize("ep", [2, 8])
def test_megatron_holds_18_bytes_less_what_each_group_shards(ep: int) -> None:
    """2 + 4 of what the rank works with, 12 of its shards: n = 8 for all else, 8 / ep for the experts."""
    report = step(MIXTURE, 8, plan={**MEGATRON, "ep": ep})
    experts = L * E * EXPERT // ep
    found = states(report)
    assert found["parameters"] == 2 * (REST + experts)
    assert found["gradients"] == 4 * (REST + experts)
    assert found["master_weights"] + found["optimizer"] == pytest.approx(12 * (REST / 8 + experts / (8 // ep)), rel=1e-3)


def test_instances_of_the_distributed_optimizer_reduce_experts_across_them() -> None:
    """2 instances of 4 ranks, 2 groups of 2 experts' ranks each: fp32 gradients of the experts are scattered over 2, their halves summed across instances;
    where an instance has no two ranks with the same experts, they are only summed across."""
    def reduced(ep: int) -> dict[tuple[str, str, int], int]:
        found = step(MIXTURE, 8, plan={**MEGATRON, "ep": ep, "dp_replicate": 2}, clip_norm=0.0).roles[0]
        out: dict[tuple[str, str, int], int] = {}
        for c in found.collectives or ():
            if c.axis in ("dp_shard", "dp_replicate", "edp") and c.kind != "all-gather" and c.group > 1:
                out[c.axis, c.kind, c.group] = out.get((c.axis, c.kind, c.group), 0) + c.count * c.message_bytes
        return out

    def experts(ep: int) -> int:
        return 4 * L * E * EXPERT // ep

    assert reduced(2) == {("dp_shard", "reduce-scatter", 4): 4 * REST, ("edp", "reduce-scatter", 2): experts(2),
                          ("dp_replicate", "all-reduce", 2): REST + experts(2) // 2}
    assert reduced(4) == {("dp_shard", "reduce-scatter", 4): 4 * REST, ("dp_replicate", "all-reduce", 2): REST + experts(4)}


def test_the_busiest_rank_is_the_fullest_and_the_mean_rank_has_the_even_share() -> None:
    even = step(MIXTURE, 8, plan={"zero": 3, "ep": 4}, micro_batch=8, **PURE)
    skewed = step(MIXTURE, 8, plan={"zero": 3, "ep": 4}, micro_batch=8, moe_imbalance=2.0, **PURE)
    busiest, others = skewed.roles
    assert (busiest.role, busiest.ranks, others.role, others.ranks) == ("busiest experts", 2, "other experts", 6)
    kept = [r.memory.activations_bytes for r in (*even.roles, busiest, others) if r.memory]
    assert skewed.fullest is busiest
    assert (kept[1] + 3 * kept[2]) / 4 == pytest.approx(kept[0], rel=1e-3)


def test_a_capacity_factor_pads_every_expert_to_its_slots() -> None:
    """arXiv 2006.16668, section 3.2: 64 tokens x 2 of 8 experts are 16 rows each; 1.25 of them 20: 160 rows travel for 128, and no counts."""
    role = step(MIXTURE, 8, plan={"zero": 3, "ep": 4}, precision="fp32", moe_capacity_factor=1.25).roles[0]
    moved = [c for c in role.collectives or () if c.kind == "all-to-all"]
    assert {(c.dtype, c.message_bytes, c.out_bytes) for c in moved} == {("fp32", 160 * H * 4, 160 * H * 4)}


def test_a_skewed_exchange_takes_as_long_as_the_larger_side() -> None:
    many = {**MIXTURE, "moe": {"experts": 16, "top_k": K, "expert_ffn": F}}

    def seconds(imbalance: float) -> float:
        time = step(many, 16, plan={"zero": 3, "ep": 16}, gpu="h100_sxm", micro_batch=64, moe_imbalance=imbalance, **PURE).roles[0].time
        assert time is not None
        return time.communication_s["ep"]

    assert 1.5 < seconds(3.0) / seconds(1.0) < 3.0


def test_groups_lie_side_by_side_and_replicas_across() -> None:
    """16 GPUs, tp 2, ep 4: consecutive ranks but for tp share the experts; those with the same ones are tp x ep apart."""
    run = build_run(model=MIXTURE, cluster={"gpus": 16, "gpu": "h100"}, plan={**MEGATRON, "tp": 2, "sequence_parallel": True, "ep": 4}, recipe={"seq_len": T})
    mesh = mesh_of(run)
    ep, edp = mesh.groups_of("ep"), mesh.groups_of("edp")
    assert list(ep.members(0)) == [0, 2, 4, 6] and list(ep.members(1)) == [1, 3, 5, 7] and ep.count == 4
    assert list(edp.members(0)) == [0, 8] and edp.count == 8


def test_megatrons_host_waits_for_the_router_in_both_passes_of_every_layer() -> None:
    """moe.layer_s and, a local expert, moe.local_expert_s of software.pytorch, per layer and micro-batch."""
    each = constants_at("software.pytorch")["moe.local_expert_s"].value

    def host(ep: int) -> float:
        time = step(MIXTURE, 8, plan={**MEGATRON, "ep": ep}, gpu="h100").roles[0].time
        assert time is not None
        return time.host_s

    assert host(2) - host(4) == pytest.approx(L * each * (E // 2 - E // 4), rel=0.05)


@pytest.mark.parametrize("plan", [{"ep": 4}, {"ep": 4, "ep_overlap": True}, {"ep": 4, "cp": 2},
                                  {"ep": 2, "tp": 2, "sequence_parallel": True, "pp": 2}], ids=str)
def test_the_explanation_and_the_timeline_lay_out_what_is_predicted(plan: dict[str, Any]) -> None:
    """The waits that a timeline finds on each axis are those of the report."""
    run = build_run(model=MIXTURE, cluster={"gpus": 8, "gpu": "h100"}, plan={**MEGATRON, **plan}, recipe={"seq_len": T, "grad_accum": 2})
    found = explain(run)
    report = predict(run, scaling=False)
    exposed = report.fullest.time.exposed_s if report.fullest.time else {}
    assert sum(m.exposed_s for m in found.movements if m.axis == "ep") == pytest.approx(exposed.get("ep", 0.0), rel=0.02)


def test_graphs_hide_most_of_that_wait() -> None:
    """moe.graph_factor of software.pytorch is what they leave of it."""
    given = constants_at("software.pytorch")
    left, layer, each = (given[f"moe.{name}"].value for name in ("graph_factor", "layer_s", "local_expert_s"))

    def stalled(graphs: bool) -> float:
        time = step(MIXTURE, 8, plan={**MEGATRON, "ep": 8}, gpu="h100", cuda_graphs=graphs).roles[0].time
        assert time is not None and time.host_s is not None
        return time.host_s

    assert stalled(False) - stalled(True) == pytest.approx((1 - left) * L * (layer + each), rel=1e-6)
    assert left < 0.5


def test_the_all_gather_dispatcher_brings_every_token_of_the_group_to_every_rank() -> None:
    """Two all-gathers and two reduce-scatters a layer of ep x T x h elements, where the exchange moves k x T x h four times."""
    role = step(MIXTURE, 8, plan={**MEGATRON, "ep": 4, "ep_dispatcher": "allgather"}).roles[0]
    found = {(c.phase, c.kind): (c.count, c.message_bytes) for c in role.collectives or () if c.axis == "ep"}
    whole = 4 * T * H * 2
    assert found == {(phase, kind): (L, whole) for phase in ("forward", "backward") for kind in ("all-gather", "reduce-scatter")}


def test_the_flex_dispatcher_sends_a_token_once_to_each_rank() -> None:
    """Of 8 experts on 4 ranks two are drawn: with chance 1 in 7 both are on one rank, so 2 - 1/7 copies travel where the exchange sends 2."""
    role = step(MIXTURE, 8, plan={**MEGATRON, "ep": 4, "ep_dispatcher": "flex"}, seq_len=448).roles[0]
    assert {c.message_bytes for c in role.collectives or () if c.axis == "ep"} == {448 * 13 // 7 * H * 2}


def test_overlapped_exchanges_hide_behind_compute() -> None:
    def exposed(overlap: bool) -> float:
        plan = {**MEGATRON, "ep": 8, "ep_overlap": overlap}
        time = step("qwen3-30b-a3b", 64, plan=plan, gpu="h100", seq_len=4096).roles[0].time
        assert time is not None
        return time.exposed_s.get("ep", 0.0) / time.communication_s["ep"]

    assert exposed(False) == pytest.approx(1.0, abs=0.01)
    assert exposed(True) < 0.5


@pytest.mark.parametrize(("field", "given"), [
    ("plan.ep", {"plan": {"ep": 2}}), ("plan.ep", {"plan": {"zero": 3, "ep": 2, "pp": 2}}), ("plan.tp", {"plan": {"zero": 3, "tp": 2}}),
    ("plan.sequence_parallel", {"plan": {**MEGATRON, "tp": 2}}),
    ("recipe.moe_capacity_factor", {"plan": {**MEGATRON, "ep": 2, "ep_dispatcher": "allgather"}, "recipe": {"moe_capacity_factor": 1.25}}),
    ("plan.framework", {"plan": {"framework": "deepspeed", "zero": 1}}), ("plan.ep", {"plan": {"zero": 3, "ep": 3}, "cluster": {"gpus": 6}}),
    ("recipe.moe_imbalance", {"plan": {"zero": 3, "ep": 2}, "recipe": {"moe_imbalance": 3.0}}),
    ("model.moe.expert_bias", {"model": {**MIXTURE, "moe": {**MIXTURE["moe"], "expert_bias": True}}})])
def test_what_does_not_go_together_is_refused_by_name(field: str, given: dict[str, Any]) -> None:
    whole = {"model": MIXTURE, "cluster": {"gpus": 8, "gpu": "h100"}, **given, "recipe": {"seq_len": T, **given.get("recipe", {})}}
    with pytest.raises(PlanError) as refused:
        predict(build_run(**whole), scaling=False)
    assert refused.value.field == field
