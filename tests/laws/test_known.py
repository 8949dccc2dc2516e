"""Runs that once broke a law, and some that are refused rather than answered wrongly."""

from typing import Any

import pytest
from walks import net, walk_memory

from costmodel import PlanError, build_run, predict
from costmodel.catalog.profiles import load_profile
from costmodel.cost.prices import RunPrices
from costmodel.program.build import build
from costmodel.simulate import step_time

TINY: dict[str, Any] = {"layers": 2, "hidden": 64, "heads": 4, "ffn": 96, "vocab": 128}


def left(model: dict[str, Any], plan: dict[str, Any], **recipe: Any) -> dict[str, int]:
    """What a steady step takes and does not give back."""
    run = build_run(model=model, cluster={"gpus": 4, "gpu": "h100"}, plan=plan, recipe={"seq_len": 16, **recipe})
    return net(build(run).roles[0].step)


@pytest.mark.parametrize("loss", ["chunked", "fused"])
def test_a_head_with_a_bias_under_a_chunked_loss(loss: str) -> None:
    assert left({**TINY, "head_bias": True}, {}, loss=loss, precision="fp32") == {}


def test_deepspeed_stage_0_in_bf16() -> None:
    assert left(TINY, {"framework": "deepspeed"}, precision="bf16-mixed") == {}


@pytest.mark.parametrize("plan", [{}, {"zero": 1}])
def test_gradients_zeroed_in_place(plan: dict[str, Any]) -> None:
    assert left(TINY, plan, precision="fp32", zero_set_to_none=False) == {}


@pytest.mark.parametrize("zero", [0, 1])
def test_gradients_zeroed_in_place_as_views_of_buckets(zero: int) -> None:
    assert left(TINY, {"zero": zero, "gradient_as_bucket_view": True}, precision="fp32", zero_set_to_none=False) == {}


@pytest.mark.parametrize("plan", [{"zero": 2}, {"zero": 3}, {"framework": "deepspeed", "zero": 1}, {"framework": "megatron"}])
def test_gradients_zeroed_in_place_are_refused_where_they_are_not_kept_whole(plan: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="zero_set_to_none = true"):
        left(TINY, plan, precision="fp32", zero_set_to_none=False)


@pytest.mark.parametrize("norms", [{"norms_per_layer": 1}, {"norms_per_layer": 4, "norm_placement": "post"},
                                   {"norms_per_layer": 4, "parallel_residual": True}])
def test_numbers_of_norms_that_no_layer_has_are_refused(norms: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="norms_per_layer"):
        left({**TINY, **norms}, {}, precision="fp32")


@pytest.mark.parametrize("recipe", [{"precision": "bf16-mixed"}, {"precision": "fp32", "loss": "chunked"}, {"precision": "fp32", "loss": "fused"}])
def test_zero_2_with_a_bucket_for_each_gradient(recipe: dict[str, Any]) -> None:
    """Under autocast, and from a loss that takes the head in, the head's weight arrives before its bias, whose bucket is ahead of it."""
    run = build_run(model={**TINY, "head_bias": True}, cluster={"gpus": 4, "gpu": "h100"}, plan={"zero": 2, "bucket_bytes": 1},
                    recipe={"seq_len": 16, **recipe})
    assert walk_memory(build(run).roles[0]).lowest == {}


def test_every_role_is_timed_and_the_slowest_makes_the_step() -> None:
    """ZeRO-1 with an update tensor by tensor: over two ranks the fullest holds the embedding alone, the other every other tensor."""
    run = build_run(model={**TINY, "vocab": 4000, "tied_embeddings": True}, cluster={"gpus": 2, "gpu": "h100"}, plan={"zero": 1},
                    recipe={"seq_len": 16, "precision": "fp32", "optimizer": "adamw:for-loop"})
    prices = RunPrices(run, load_profile(run))
    times = [step_time(role.step, prices).compute for role in build(run).roles]
    step = predict(run, scaling=False)
    assert times[1] > times[0]
    assert step.step_s == pytest.approx(max(times) * (1 + prices.jitter) + prices.fixed, rel=1e-9)


def test_a_gather_issued_late_at_the_end_of_the_step_is_not_all_exposed() -> None:
    run = build_run(model=TINY, cluster={"gpus": 2, "gpu": "h100"}, plan={"framework": "megatron", "zero": 1, "overlap_param_gather": True},
                    recipe={"seq_len": 16, "precision": "fp32", "clip_norm": 0.0, "optimizer": "sgd:foreach"})
    time = predict(run, scaling=False).roles[0].time
    assert time is not None
    assert time.exposed_s["dp_shard"] <= time.communication_s["dp_shard"] * 1.05
