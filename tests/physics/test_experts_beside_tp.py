"""Experts that are cut over other ranks than tensor parallelism's (Megatron's expert_tensor_parallel_size), counted by hand.

Groups: NVIDIA/Megatron-LM core/parallel_state.py numbers the ranks of experts etp, ep, edp, pp, innermost first, beside tp, cp, dp, pp of the rest. Tokens:
core/transformer/moe/token_dispatcher.py, each rank of a tp group routes the S/tp x B tokens that sequence parallelism leaves it; all-to-all over ep, then
all-gather over etp. State: 6 + 12/n bytes a parameter under the distributed optimizer, n of the experts' own ranks.
"""

from typing import Any

import pytest
from steps import states, step

from costmodel import PlanError, build_run, predict
from costmodel.explain import explain
from costmodel.mesh import mesh_of
from costmodel.report import RoleReport, StepReport

H, F, E, K, V, L, T = 256, 128, 8, 2, 1024, 4, 64
MIXTURE: dict[str, Any] = {"layers": L, "hidden": H, "heads": 8, "ffn": 512, "vocab": V, "moe": {"experts": E, "top_k": K, "expert_ffn": F}}
EXPERTS = L * E * 3 * H * F
MEGATRON = {"framework": "megatron", "zero": 1, "sequence_parallel": True}


def rest(tp: int) -> int:
    """Parameters on one rank beside the experts: vocabulary and attention cut over tp, norms and router whole."""
    return 2 * V // tp * H + H + L * (4 * H * H // tp + 2 * H + E * H)


def reported(gpus: int, **plan: Any) -> StepReport:
    return step(MIXTURE, gpus, plan={**MEGATRON, **plan}, clip_norm=0.0)


def moved(role: RoleReport, axis: str) -> set[tuple[str, str, int, int, int]]:
    """(kind, phase, group, count, message bytes) of an axis, the counts of rows left out."""
    return {(c.kind, c.phase, c.group, c.count, c.message_bytes) for c in role.collectives or () if c.axis == axis and c.dtype != "int64"}


@pytest.mark.parametrize(("gpus", "plan", "etp", "ep", "edp"), [
    (16, {"tp": 2, "etp": 1, "ep": 4}, None, [0, 1, 2, 3], [0, 4, 8, 12]),
    (8, {"tp": 4, "etp": 2, "ep": 2, "pp": 2}, [0, 1], [0, 2], [0]),
    (16, {"tp": 4, "etp": 2, "ep": 2, "pp": 2}, [0, 1], [0, 2], [0, 4]),
    (8, {"tp": 2, "etp": 4, "ep": 2}, [0, 1, 2, 3], [0, 4], [0])])
def test_the_groups_are_those_of_megatrons_second_rank_order(gpus: int, plan: dict[str, int], etp: list[int] | None, ep: list[int], edp: list[int]) -> None:
    mesh = mesh_of(build_run(model=MIXTURE, cluster={"gpus": gpus, "gpu": "h100"}, plan={**MEGATRON, **plan}, recipe={"seq_len": T, "grad_accum": 2}))
    found = {axis: list(mesh.groups_of(axis).members(0)) for axis in ("etp", "ep", "edp") if plan["etp"] > 1 or axis != "etp"}
    assert (found.get("etp"), found["ep"], found["edp"]) == (etp, ep, edp)
    for axis, members in found.items():
        assert mesh.groups_of(axis).count * len(members) == gpus


@pytest.mark.parametrize(("gpus", "tp", "etp", "ep"), [(8, 2, 1, 4), (8, 4, 1, 8), (8, 2, 1, 1), (8, 4, 2, 2), (2, 2, 1, 1), (4, 4, 2, 2)])
def test_a_rank_holds_its_experts_whole_and_shards_them_over_their_own_ranks(gpus: int, tp: int, etp: int, ep: int) -> None:
    found = states(reported(gpus, tp=tp, etp=etp, ep=ep))
    mine, replicas = EXPERTS // (ep * etp), gpus // (ep * etp)
    assert found["parameters"] == 2 * (rest(tp) + mine)
    assert found["gradients"] == 4 * (rest(tp) + mine)
    assert found["master_weights"] + found["optimizer"] == pytest.approx(12 * (rest(tp) * tp / gpus + mine / replicas), rel=1e-3)


def test_whole_experts_get_their_rows_from_all_tp_ranks_by_the_exchange_alone() -> None:
    """8 GPUs, tp 2: each rank routes 32 of the 64 tokens twice; what tp sends is the attention's (2 + 2 forward and backward, 1 regather of the input of
    q, k, v) and nothing of the experts."""
    role = reported(8, tp=2, etp=1, ep=4).roles[0]
    rows = T // 2 * K
    assert moved(role, "ep") == {("all-to-all", phase, 4, 2 * L, rows * H * 2) for phase in ("forward", "backward")}
    cut = reported(8, tp=2, ep=4).roles[0]
    of_experts = {(c.kind, c.phase, c.message_bytes): c.count for c in cut.collectives or () if c.axis == "tp"}
    for c in role.collectives or ():
        if c.axis == "tp":
            of_experts[c.kind, c.phase, c.message_bytes] -= c.count
    sent = {key: count for key, count in of_experts.items() if count}
    assert sent == {(kind, phase, 2 * rows * H * 2): L for kind in ("all-gather", "reduce-scatter") for phase in ("forward", "backward")}


def test_experts_cut_over_half_of_tp_gather_the_rows_of_two_ranks() -> None:
    """4 GPUs, tp 4, etp 2, ep 2: 16 tokens a rank twice, 32 rows; a rank's half of an expert works on those of both ranks that cut it."""
    role = reported(4, tp=4, etp=2, ep=2).roles[0]
    rows = T // 4 * K
    assert moved(role, "ep") == {("all-to-all", phase, 2, 2 * L, rows * H * 2) for phase in ("forward", "backward")}
    assert moved(role, "etp") == {(kind, phase, 2, L, 2 * rows * H * 2) for kind in ("all-gather", "reduce-scatter") for phase in ("forward", "backward")}
    assert not moved(role, "edp") and not moved(role, "dp_shard")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("gpus", "ep", "replicas"), [(2, 1, 2), (4, 2, 2), (8, 2, 4)])
def test_gradients_of_experts_are_reduced_over_the_ranks_that_have_them(gpus: int, ep: int, replicas: int, overlap: bool) -> None:
    """fp32 gradients scattered and 16-bit parameters gathered once a step: on 2 GPUs, where there is no data parallelism, the experts' alone."""
    role = reported(gpus, tp=2, etp=1, ep=ep, overlap_grad_reduce=overlap, overlap_param_gather=overlap).roles[0]
    for axis, size, numel in (("edp", replicas, EXPERTS // ep), ("dp_shard", gpus // 2, rest(2))):
        total: dict[str, int] = {}
        for c in role.collectives or ():
            if c.axis == axis:
                assert c.group == size
                total[c.kind] = total.get(c.kind, 0) + c.count * c.message_bytes
        assert total == ({"reduce-scatter": 4 * numel, "all-gather": 2 * numel} if size > 1 else {})


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather", "flex"])
@pytest.mark.parametrize("etp", [0, 1, 2])
def test_a_step_computes_the_same_whatever_cuts_the_experts(etp: int, dispatcher: str) -> None:
    """FLOPs of the matmuls: 6 a token and parameter, of which tp ranks have a part each."""
    report = reported(8, tp=4, etp=etp, ep=2, ep_dispatcher=dispatcher)
    uncut = reported(2, tp=1, ep=2, sequence_parallel=False)
    assert report.roles[0].time is not None and uncut.roles[0].time is not None
    assert report.model_flops == uncut.model_flops and sum((uncut.roles[0].time.flops or {}).values()) > 0
    assert sum((report.roles[0].time.flops or {}).values()) == pytest.approx(sum((uncut.roles[0].time.flops or {}).values()) / 4, rel=1e-6)


@pytest.mark.parametrize("plan", [{"tp": 2, "etp": 1, "ep": 4}, {"tp": 4, "etp": 2, "ep": 2, "pp": 2}, {"tp": 2, "etp": 1, "ep": 8}], ids=str)
def test_the_explanation_lists_every_axis_that_a_step_sends_over(plan: dict[str, int]) -> None:
    run = build_run(model=MIXTURE, cluster={"gpus": 8, "gpu": "h100"}, plan={**MEGATRON, **plan}, recipe={"seq_len": T, "grad_accum": 2})
    found = explain(run)
    report = predict(run, scaling=False)
    exposed = report.fullest.time.exposed_s if report.fullest.time else {}
    for axis in {"ep", *(("etp",) if plan["etp"] > 1 else ())}:
        assert sum(m.exposed_s for m in found.movements if m.axis == axis) == pytest.approx(exposed.get(axis, 0.0), rel=0.02)
        assert axis in {a.name for a in found.axes}


@pytest.mark.parametrize(("field", "gpus", "plan"), [
    ("plan.etp", 8, {"tp": 2, "etp": 3}), ("plan.ep", 8, {"tp": 2, "etp": 1, "ep": 16}),
    ("plan.etp", 8, {"framework": "pytorch", "zero": 3, "tp": 2, "etp": 1}),
    ("plan.ep", 6, {"tp": 2, "etp": 1, "ep": 4})])
def test_experts_that_do_not_fit_on_the_ranks_are_refused(field: str, gpus: int, plan: dict[str, Any]) -> None:
    with pytest.raises(PlanError) as refused:
        predict(build_run(model=MIXTURE, cluster={"gpus": gpus, "gpu": "h100"}, plan={**MEGATRON, "sequence_parallel": plan.get("tp", 1) > 1, **plan},
                          recipe={"seq_len": T}), scaling=False)
    assert refused.value.field == field


def test_a_dense_model_has_nothing_to_cut() -> None:
    dense = {key: value for key, value in MIXTURE.items() if key != "moe"}
    with pytest.raises(PlanError, match=r"plan\.etp = 1: .* has no experts\. Use etp = 0\."):
        build_run(model=dense, cluster={"gpus": 8, "gpu": "h100"}, plan={**MEGATRON, "tp": 2, "etp": 1}, recipe={"seq_len": T})
