"""What the answer notes about a run."""

from typing import Any

import pytest

from costmodel import build_run, predict


@pytest.mark.parametrize(("plan", "recipe", "fields"), [
    ({"schedule": "gpipe"}, {}, "plan.schedule"),
    ({"tp_overlap": "async", "framework": "megatron"}, {}, "plan.tp_overlap"),
    ({"overlap_param_gather": True}, {"grad_accum_fusion": True}, "plan.overlap_param_gather, recipe.grad_accum_fusion"),
    ({"zero": 3, "bucket_mb": 50}, {}, "plan.bucket_bytes"),
    ({"gradient_as_bucket_view": True, "framework": "deepspeed", "zero": 2}, {}, "plan.gradient_as_bucket_view"),
    ({"allgather_bucket_params": 10**7, "framework": "deepspeed", "zero": 2}, {}, "plan.allgather_bucket_params"),
    ({"checkpointing": {"every": 2}}, {"loss_chunks": 4, "moe_imbalance": 1.5}, "plan.checkpointing.every, recipe.loss_chunks, recipe.moe_imbalance"),
    ({"reshard_after_forward": False}, {}, "plan.reshard_after_forward")])
def test_settings_without_effect_are_noted(plan: dict[str, Any], recipe: dict[str, Any], fields: str) -> None:
    report = predict(build_run(params="1B", cluster={"gpus": 8}, plan=plan, recipe=recipe), scaling=False)
    assert f"Given, but nothing here reads it: {fields}." in report.notes


@pytest.mark.parametrize("plan", [
    {"bucket_mb": 50, "gradient_as_bucket_view": True, "first_bucket_bytes": 1 << 31}, {"zero": 1, "bucket_mb": 50}, {"zero": 2, "bucket_mb": 50},
    {"zero": 3, "reshard_after_forward": False, "backward_prefetch": False},
    {"framework": "deepspeed", "zero": 2, "bucket_mb": 50, "overlap_grad_reduce": True},
    {"framework": "deepspeed", "zero": 3, "prefetch_bucket_params": 0, "max_live_params": 0},
    {"framework": "megatron", "zero": 1, "overlap_grad_reduce": False, "overlap_param_gather": True},
    {"framework": "megatron", "tp": 2, "pp": 2, "schedule": "gpipe", "tp_overlap": "async"}])
def test_a_setting_that_is_not_noted_changes_the_answer(plan: dict[str, Any]) -> None:
    """Each of these, taken back to its default, moves memory or time."""
    def answer(fields: dict[str, Any]) -> Any:
        report = predict(build_run(params="1B", cluster={"gpus": 8}, plan=fields, recipe={"seq_len": 1024, "grad_accum": 4}), scaling=False)
        assert not any("nothing here reads" in note for note in report.notes)
        return [(r.memory.allocated, r.time) for r in report.roles if r.memory]

    structure = {k: v for k, v in plan.items() if k in ("zero", "framework", "tp", "pp")}
    for name, value in plan.items():
        if name not in structure:
            assert answer({**structure, name: value}) != answer(structure), name


def test_groups_larger_than_the_model_are_noted() -> None:
    notes = predict(build_run(params="1B", plan={"checkpointing": "full:100"}), scaling=False).notes
    assert notes == ("plan.checkpointing.group = 100 is more than the 14 layers: it does what 14 does.",)
