"""Muon's arithmetic, states and messages against closed forms that are not ours."""

from typing import Any

import pytest

from costmodel import PlanError, build_run, predict
from costmodel.program.build import build
from costmodel.program.ir import Op, expand

SQUARE: dict[str, Any] = {"layers": 4, "hidden": 768, "heads": 6, "ffn": 3072, "vocab": 4096, "gated": False, "activation": "relu_squared",
                          "norm": "rmsnorm_no_weight"}
MATRICES = [(768, 768)] * 4 + [(3072, 768), (768, 3072)]
"""Of a layer."""


def update_ops(**given: Any) -> list[Op]:
    role = build(build_run(**given)).roles[0]
    return [op for block in expand(role.step) if block.name == "update" for op in block.ops]


def muon_flops(gpus: int, plan: dict[str, Any]) -> float:
    ops = update_ops(model=SQUARE, cluster={"gpus": gpus}, plan=plan, recipe={"optimizer": "muon", "seq_len": 256, "clip_norm": 0.0})
    return sum(op.flops for op in ops if op.kind == "matmul")


def test_flops_are_those_of_the_post_that_introduced_muon() -> None:
    """https://kellerjordan.github.io/posts/muon/: T = 5 iterations of 2(2nm² + m³) FLOPs for an n x m matrix, m <= n; at most T·m/B of the 6nmB
    FLOPs that training the matrix on B tokens takes; 0.7% for m = 768 and B = 524,288."""
    counted = muon_flops(1, {"strategy": "single"})
    closed = sum(5 * 2 * (2 * max(s) * min(s) ** 2 + min(s) ** 3) for s in MATRICES) * 4
    assert counted == closed
    training = 6 * sum(r * c for r, c in MATRICES) * 4 * 524_288
    assert counted / training <= 5 * 768 / 524_288 == pytest.approx(0.0073, abs=1e-4)


def test_each_rank_orthogonalises_its_share_of_whole_matrices_padding_included() -> None:
    """Four ranks: 16 attention matrices and 4 of each other shape; with 8 ranks the latter are half padding (karpathy/nanochat nanochat/optim.py)."""
    whole = muon_flops(1, {"strategy": "single"})
    assert muon_flops(4, {"strategy": "muon-distributed"}) == whole / 4
    attention, mlp = 5 * 6 * 768**3, 5 * 2 * (2 * 3072 * 768**2 + 768**3)
    assert muon_flops(8, {"strategy": "muon-distributed"}) == 2 * attention + 2 * mlp


def test_states_are_one_for_matrices_and_two_for_the_rest_over_the_ranks() -> None:
    memory = predict(build_run(model=SQUARE, cluster={"gpus": 4}, plan={"strategy": "muon-distributed"}, recipe={"seq_len": 256})).fullest.memory
    assert memory is not None
    matrices, tables = 4 * sum(r * c for r, c in MATRICES), 2 * 4096 * 768
    assert memory.states["parameters"] == memory.states["gradients"] == 4 * (matrices + tables)
    assert memory.states["optimizer"] == matrices + 2 * tables + 2 * 4  # 4 bytes over 4 ranks; a step counter of each table


def test_a_step_sends_each_parameter_twice_and_nothing_in_backward() -> None:
    run = build_run(model=SQUARE, cluster={"gpus": 4}, plan={"strategy": "muon-distributed"}, recipe={"seq_len": 256, "grad_accum": 3})
    sent = predict(run).roles[0].collectives
    assert sent is not None and {c.phase for c in sent} == {"optimizer"}
    whole = 4 * (4 * sum(r * c for r, c in MATRICES) + 2 * 4096 * 768)
    for kind in ("reduce-scatter", "all-gather"):
        assert sum(c.count * c.message_bytes for c in sent if c.kind == kind) == whole


def test_small_vectors_are_all_reduced() -> None:
    normed = {**SQUARE, "norm": "rmsnorm"}
    sent = predict(build_run(model=normed, cluster={"gpus": 4}, plan={"strategy": "muon-distributed"}, recipe={"seq_len": 256})).roles[0].collectives
    assert sent is not None and sum(c.count for c in sent if c.kind == "all-reduce") == 9  # two norms a layer, one before the head; 768 < 1,024


def test_torchs_muon_launches_what_makes_a_matrix_cost_0_4_ms_of_host() -> None:
    """modded-nanogpt, 8 H100: the replicated update of 72 matrices costs 25 ms more than an eighth of it, so 0.4 ms a matrix; eager ops take
    10 to 30 us each."""
    ops = update_ops(model=SQUARE, cluster={"gpus": 1}, plan={"strategy": "single"}, recipe={"optimizer": "muon", "seq_len": 256, "clip_norm": 0.0})
    launches = sum(op.kernels for op in ops if op.name.startswith("muon."))
    assert 10e-6 * launches / 24 < 0.4e-3 < 30e-6 * launches / 24


@pytest.mark.parametrize(("plan", "recipe", "field"), [
    ({"strategy": "fsdp"}, {"optimizer": "muon"}, "recipe.optimizer"), ({"strategy": "zero1"}, {"optimizer": "muon"}, "recipe.optimizer"),
    ({"strategy": "muon-distributed", "tp": 2}, {}, "plan.tp"), ({"strategy": "muon-distributed", "pp": 2}, {}, "plan.pp"),
    ({"framework": "nanochat", "zero": 3}, {}, "plan.zero"), ({"strategy": "muon-distributed"}, {"optimizer": "sgd"}, "recipe.optimizer")])
def test_what_would_split_matrices_is_refused_by_name(plan: dict[str, Any], recipe: dict[str, Any], field: str) -> None:
    with pytest.raises(PlanError) as error:
        predict(build_run(model=SQUARE, cluster={"gpus": 8}, plan=plan, recipe={"seq_len": 256, **recipe}))
    assert error.value.field == field


def test_rows_that_the_ranks_do_not_divide_are_refused() -> None:
    with pytest.raises(PlanError, match="by rows"):
        build_run(model={**SQUARE, "vocab": 4100}, cluster={"gpus": 8}, plan={"strategy": "muon-distributed"}, recipe={"seq_len": 256})


@pytest.mark.parametrize("name", ["nanochat-d20-oct2025", "nanochat-d32-oct2025"])
def test_the_first_release_of_nanochat_is_predicted(name: str) -> None:
    """About 3 hours of pre-training for d20: 21,400 steps of 524,288 tokens, 0.5 s each, at 32 sequences a GPU (karpathy/nanochat discussion 1)."""
    micro = 32 if name == "nanochat-d20-oct2025" else 8
    run = build_run(model=name, cluster={"gpu": "h100", "gpus": 8}, plan={"strategy": "muon-distributed"},
                    recipe={"seq_len": 2048, "micro_batch": micro, "global_batch": 256, "compile": True, "clip_norm": 0.0})
    time = predict(run).fullest.time
    assert time is not None
    if micro == 32:
        assert time.step_s == pytest.approx(3 * 3600 / 21_400, rel=0.25)


@pytest.mark.parametrize("name", ["nanochat-d12", "nanochat-d20", "nanochat-d24", "nanochat-d32"])
def test_later_nanochats_are_refused_by_the_missing_feature(name: str) -> None:
    with pytest.raises(PlanError, match="value embeddings"):
        predict(build_run(model=name, cluster={"gpus": 8}, plan={"strategy": "muon-distributed"}, recipe={"seq_len": 512}))
