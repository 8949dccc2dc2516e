"""An explanation's bytes and seconds are the report's, taken apart; what it says of an axis holds where the axis grows."""

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from runs import examples, runs

from costmodel import Run, build_run, predict
from costmodel.catalog.profiles import load_profile
from costmodel.explain import Explanation, Movement, constants, explain
from costmodel.report import StepReport

SHAPE = {"layers": 8, "hidden": 1024, "heads": 16, "kv_heads": 8, "ffn": 4096, "vocab": 4096}
SPREAD: tuple[dict[str, Any], ...] = (
    {"tp": 4, "framework": "megatron"}, {"tp": 4, "sequence_parallel": True, "framework": "megatron", "zero": 1}, {"tp": 2, "zero": 3},
    {"tp": 2, "sequence_parallel": True, "zero": 3, "loss_parallel": True}, {"pp": 4, "framework": "megatron", "zero": 1},
    {"pp": 2, "tp": 2, "framework": "megatron", "zero": 1}, {"pp": 4, "zero": 3, "reshard_after_forward": False}, {"dp_shard": 4, "zero": 3},
    {"pp": 2, "schedule": "interleaved", "virtual_stages": 2, "framework": "megatron"}, {"zero": 1}, {"zero": 2}, {"strategy": "hsdp", "dp_shard": 4},
    {"strategy": "dataparallel"}, {"pp": 4, "zero": 3, "schedule": "zbv"})


def spread(plan: dict[str, Any]) -> Run:
    return build_run(model=SHAPE, cluster={"gpus": 8 if plan.get("strategy") == "dataparallel" else 16}, plan=plan, recipe={"seq_len": 1024, "grad_accum": 4})


def agrees(run: Run) -> None:
    report = predict(run, scaling=False)
    e = explain(run, report)
    role = next(r for r in report.roles if r.role == e.role)
    assert role.collectives is not None and role.memory is not None and role.time is not None
    counted: Counter[tuple[Any, ...]] = Counter()
    for m in e.movements:
        counted["backward" if m.phase == "recompute" else m.phase, m.axis, m.collective, m.group, m.message_bytes, m.dtype] += m.count
    reported: Counter[tuple[Any, ...]] = Counter()
    for c in role.collectives:
        if c.group > 1:
            reported[c.phase, c.axis, c.kind, c.group, c.message_bytes, c.dtype] += c.count
    assert counted == reported
    for axis in {m.axis for m in e.movements}:
        seconds, exposed = (math.fsum(getattr(m, field) for m in e.movements if m.axis == axis) for field in ("seconds", "exposed_s"))
        assert math.isclose(seconds, role.time.communication_s.get(axis, 0.0), rel_tol=1e-6, abs_tol=1e-12)
        assert math.isclose(exposed, role.time.exposed_s.get(axis, 0.0), rel_tol=1e-3, abs_tol=1e-9)
        assert all(m.exposed_s >= 0 for m in e.movements)
    of_terms: Counter[str] = Counter()
    for t in e.terms:
        of_terms[t.category if t.between_steps else "transient"] += t.here * e.params  # type: ignore[assignment]
    kept = Counter(role.memory.states) + Counter(role.memory.host.states if role.memory.host else {})
    for category, nbytes in kept.items():
        if category not in ("framework", "temporaries"):
            assert of_terms[category] == pytest.approx(nbytes), category
    assert {h.name: h.here_bytes for h in e.holdings if h.name in kept} == {
        name: n for name, n in kept.items() if name in ("parameters", "gradients", "master_weights", "optimizer")}


@examples(60)
@given(runs())
def test_it_takes_the_report_apart(run: Run) -> None:
    agrees(run)


@pytest.mark.parametrize("plan", SPREAD)
def test_it_takes_the_report_apart_where_work_is_divided(plan: dict[str, Any]) -> None:
    agrees(spread(plan))


@pytest.mark.parametrize("plan", [{}, {"zero": 3}, {"zero": 2}, {"framework": "megatron"}, {"framework": "deepspeed", "zero": 3}])
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "bf16-pure"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd:foreach", "momentum:foreach"])
def test_unspread_bytes_per_parameter_are_what_one_gpu_of_the_dialect_holds(plan: dict[str, Any], precision: str, optimizer: str) -> None:
    """Read off another program: that of one GPU with the same dtypes."""
    wide = build_run(model=SHAPE, cluster={"gpus": 8}, plan=plan, recipe={"precision": precision, "optimizer": optimizer})
    numbers = wide.recipe.precision.model_copy(update={"autocast": wide.plan.framework == "pytorch" and precision == "bf16-mixed"})
    alone = build_run(model=SHAPE, cluster={"gpus": 1}, plan={"framework": wide.plan.framework}, recipe={"precision": numbers, "optimizer": optimizer})
    e = explain(wide)
    memory = predict(alone, scaling=False).fullest.memory
    assert memory is not None
    for category in ("parameters", "gradients", "master_weights", "optimizer"):
        whole = sum(t.whole for t in e.terms if t.category == category and t.between_steps)
        assert whole * alone.model.params == pytest.approx(memory.states.get(category, 0), rel=1e-5), category


@pytest.mark.parametrize(("plan", "expected"), [
    ({}, 16), ({"zero": 3}, 2), ({"framework": "megatron"}, 18), ({"framework": "megatron", "zero": 1}, 7.5), ({"framework": "deepspeed", "zero": 3}, 2)])
def test_the_bytes_per_parameter_that_papers_give(plan: dict[str, Any], expected: float) -> None:
    """ZeRO (arXiv 1910.02054, figure 1): 16 bytes, 16/n for stage 3. Megatron with fp32 gradients: 18, and 6 + 12/n with the distributed
    optimizer (NVIDIA/Megatron-LM docs, dist_optimizer.md). PyTorch: fp32 parameters, gradients and two moments, buckets apart."""
    e = explain(build_run(model=SHAPE, cluster={"gpus": 8}, plan=plan))
    kept = sum(t.here for t in e.terms if t.between_steps and t.category != "communication")
    assert kept == pytest.approx(expected, rel=0.01)


def test_what_a_pipeline_receives_has_the_dtype_of_activations() -> None:
    """torch.distributed.pipelining keeps a buffer of tokens x hidden for each of 8 micro-batches, both ways on a middle stage: 2 bytes each in bf16."""
    run = build_run(model={**SHAPE, "tied_embeddings": False}, cluster={"gpus": 4}, plan={"pp": 4, "stage_layers": [1, 5, 1, 1]},
                    recipe={"seq_len": 256, "grad_accum": 8, "precision": "bf16-pure"})
    e = explain(run)
    assert e.role == "pipeline rank 1"
    [buffers] = [t for t in e.terms if t.category == "communication"]
    assert buffers.dtype == "bf16"
    assert buffers.here * e.params == pytest.approx(2 * 8 * 256 * run.model.hidden * 2)


# -- what it says of an axis -------------------------------------------------------------------------------------------------


def states(report: StepReport) -> dict[str, int]:
    memory = report.fullest.memory
    assert memory is not None
    return memory.states


@pytest.mark.parametrize(("plan", "axis"), [
    ({}, "dp_replicate"), ({"zero": 1}, "dp_shard"), ({"zero": 2}, "dp_shard"), ({"zero": 3}, "dp_shard"), ({"framework": "megatron", "zero": 1}, "dp_shard"),
    ({"framework": "deepspeed", "zero": 2}, "dp_shard"), ({"framework": "deepspeed", "zero": 3}, "dp_shard"),
    ({"framework": "megatron", "tp": 4}, "tp"), ({"framework": "megatron", "pp": 4}, "pp")])
def test_what_is_sharded_or_divided_shrinks_with_its_axis_and_what_is_copied_does_not(plan: dict[str, Any], axis: str) -> None:
    """Twice the ranks of the axis, all else the same: two predictions, and what the explanation says of the first."""
    model = {**SHAPE, "vocab": 64, "tied_embeddings": False}
    small, large = (build_run(model=model, cluster={"gpus": 4 * n}, plan={**plan, axis: 4 * n} if axis in ("tp", "pp") else plan,
                              recipe={"seq_len": 256, "grad_accum": 8}) for n in (1, 2))
    first, second = predict(small, scaling=False), predict(large, scaling=False)
    e = explain(small, first)
    assert [a.name for a in e.axes] == [axis]
    for h in e.holdings:
        if h.name not in ("batch", "activations"):
            ratio = h.here_bytes / next(other.here_bytes for other in explain(large, second).holdings if other.name == h.name)
            assert h.here_bytes == states(first).get(h.name, h.here_bytes)
            assert ratio == pytest.approx(1.0 if h.placements[axis] == "copied" else 2.0, rel=0.03), h.name
    flops = [sum(t.flops.values()) for t in (r.roles[0].time for r in (first, second)) if t and t.flops]
    tokens = second.tokens_per_step / first.tokens_per_step
    if "sequences of the batch" in e.axes[0].divides:
        assert (tokens, flops[0] / flops[1]) == (2.0, 1.0)
    else:
        assert tokens == 1.0 and flops[0] / flops[1] == pytest.approx(2.0, rel=0.02)


@pytest.mark.parametrize(("plan", "forward", "backward"), [
    ({"framework": "megatron"}, ["all-reduce"] * 2, ["all-reduce"] * 2),
    ({"zero": 3}, ["all-reduce"] * 2, ["all-reduce"] * 2),
    ({"framework": "megatron", "sequence_parallel": True}, ["all-gather", "reduce-scatter"] * 2, ["all-gather", "all-gather", "reduce-scatter"] * 2),
    ({"zero": 3, "sequence_parallel": True}, ["all-gather", "reduce-scatter"] * 2, ["all-gather", "reduce-scatter"] * 2)])
def test_where_the_collectives_of_a_layer_fall(plan: dict[str, Any], forward: list[str], backward: list[str]) -> None:
    """f and g of arXiv 1909.08053 (figure 3), their sequence-parallel pairs of arXiv 2205.05198 (figure 5); Megatron gathers inputs again. Of
    16 tokens x 1,024 x 64: the residual stream of a micro-batch. The small all-reduces of norms' gradients are left out."""
    run = build_run(model=SHAPE, cluster={"gpus": 8}, plan={"tp": 4, **plan}, recipe={"seq_len": 1024})
    split = explain(run).layer
    assert split is not None
    large = [f for f in split.falls if f.message_bytes > 1 << 20]
    assert {f.message_bytes for f in large} == {1024 * 1024 * 2}
    assert [f.collective for f in large if f.phase == "forward"] == forward
    assert [f.collective for f in large if f.phase == "backward"] == backward
    ends = [f.after for f in large if f.phase == "forward" and f.collective != "all-gather"]
    assert ends == ["attention.out", "mlp.down"]


def test_columns_feed_rows_and_a_rank_has_its_share_of_heads() -> None:
    split = explain(spread({"tp": 4, "sequence_parallel": True, "zero": 3})).layer
    assert split is not None
    cuts = {w.name: w.cut for w in split.weights}
    assert {name for name, cut in cuts.items() if cut == "column"} == {f"{part}.weight" for part in (
        "attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")}
    assert {name for name, cut in cuts.items() if cut == "row"} == {"attention.out.weight", "mlp.down.weight"}
    assert {name for name, cut in cuts.items() if cut == "vocabulary"} == {"embedding.weight", "head.weight"}
    assert (split.heads, split.kv_heads) == (4, 2)
    for w in split.weights:
        assert math.prod(w.shape) == math.prod(w.local) * (1 if w.cut == "whole" else 4)


def test_sequence_parallelism_saves_an_even_share_of_a_layer_and_tensor_parallelism_alone_does_not() -> None:
    """arXiv 2205.05198, table 2: with sequence parallelism every saved tensor is 1/t, without it 10 of 34 bytes stay whole."""
    plain, sequence = (explain(spread({"tp": 4, "sequence_parallel": on, "framework": "megatron"})).layer for on in (False, True))
    assert plain is not None and sequence is not None
    assert sequence.saved_bytes == pytest.approx(sequence.saved_whole_bytes / 4, rel=1e-3)
    assert plain.saved_bytes > 1.3 * sequence.saved_bytes


def test_stages_hold_every_layer_once_and_1f1b_has_p_minus_r_micro_batches_in_flight() -> None:
    """arXiv 2104.04473, section 2.2: at most p micro-batches, p - r on rank r."""
    found = explain(spread({"pp": 4, "framework": "megatron"})).pipeline
    assert found is not None
    layers = [i for s in found.stages for i in range(s.first_layer, s.first_layer + s.layers)]
    assert layers == list(range(8))
    assert found.in_flight == (4, 3, 2, 1)
    assert [s.embedding for s in found.stages] == [True, False, False, False] and [s.head for s in found.stages] == [False, False, False, True]


def moved(e: Explanation) -> dict[str, set[str]]:
    out: dict[str, set[str]] = {}
    for m in e.movements:
        out.setdefault(m.tensor, set()).add(m.collective)
    return out


@pytest.mark.parametrize(("plan", "expected"), [
    ({"zero": 3}, {"parameters": {"all-gather"}, "gradients": {"reduce-scatter"}, "gradient norm": {"all-reduce"}}),
    ({"zero": 1}, {"parameters": {"broadcast"}, "gradients": {"all-reduce"}}),
    ({}, {"gradients": {"all-reduce"}}),
    ({"strategy": "hsdp", "dp_shard": 4}, {"parameters": {"all-gather"}, "gradients": {"reduce-scatter", "all-reduce"}, "gradient norm": {"all-reduce"}}),
    ({"pp": 4, "framework": "megatron"}, {"activations": {"send"}, "gradients of activations": {"recv"}, "gradients": {"all-reduce"},
                                          "gradient norm": {"all-reduce"}})])
def test_which_tensor_travels_by_which_collective(plan: dict[str, Any], expected: dict[str, set[str]]) -> None:
    """Of the fullest rank: in a pipeline the first."""
    assert moved(explain(spread(plan))) == expected


def test_the_same_link_and_ranks_as_the_mesh_says() -> None:
    e = explain(spread({"tp": 4, "framework": "megatron", "zero": 1}))
    found = {(m.axis, m.group, m.stride, m.link) for m in e.movements}
    assert found == {("tp", 4, 1, "nvlink"), ("dp_shard", 4, 4, "infiniband")}


def test_a_ring_sends_what_it_sends() -> None:
    """(n - 1)/n of the message for a gather or scatter, twice that for an all-reduce (NVIDIA/nccl-tests, doc/PERFORMANCE.md)."""
    def one(plan: dict[str, Any]) -> Movement:
        run = build_run(model=SHAPE, cluster={"gpus": 8}, plan=plan, recipe={"precision": "fp32"})
        return next(m for m in explain(run).movements if m.tensor == "gradients")

    for plan, turns in (({"zero": 3}, 1), ({}, 2)):
        m = one(plan)
        assert m.sent_bytes == pytest.approx(m.count * turns * 7 / 8 * m.message_bytes)


# -- constants ---------------------------------------------------------------------------------------------------------------


def test_a_constant_that_is_not_listed_does_not_move_the_step_and_the_listed_ones_move_it_as_they_say() -> None:
    run = spread({"zero": 3})
    profile = load_profile(run)
    weights = {w.key: w for w in constants(run, profile) if w.figure == "step_s"}
    before = predict(run, profile, scaling=False).step_s
    assert before is not None
    for key in profile.keys():  # noqa: SIM118
        c = profile.constant(key)
        if c.value > 10 and float(c.value).is_integer():  # counts
            continue
        after = predict(run, profile.replace({key: c.value * 1.002}), scaling=False).step_s
        assert after is not None
        expected = weights[key].elasticity if key in weights else 0.0
        assert (after / before - 1) / 0.002 == pytest.approx(expected, abs=5e-3), key


def test_on_one_gpu_the_constants_take_the_step_apart() -> None:
    """A step is a sum of times, each over one rate or in one constant of time, so that the elasticities' sizes sum to at most 1; the share of
    matmuls over their rate is the share of matmuls in the step."""
    run = build_run(params="1B", cluster={"gpus": 1}, recipe={"micro_batch": 4})
    weights = {w.key: w.elasticity for w in constants(run) if w.figure == "step_s"}
    time = predict(run, scaling=False).roles[0].time
    assert time is not None
    assert -weights["matmul.bf16.peak_share"] == pytest.approx(time.breakdown["matmul"] / time.step_s, rel=0.02)
    assert -weights["bandwidth.share"] == pytest.approx((time.breakdown["memory-bound"] + time.breakdown["optimizer"]) / time.step_s, rel=0.05)
