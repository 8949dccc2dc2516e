"""What a change does to a run, without a screen."""

import pytest

from costmodel import build_run, predict
from costmodel.spec import PlanError
from tui.fields import FIELDS
from tui.presets import PRESETS, START
from tui.repair import suggestions
from tui.state import attempt, dismissed, opened, stepped, undone


def test_every_preset_is_predicted() -> None:
    for preset in PRESETS:
        assert opened(preset.given).report.step_s, preset.name


def test_the_figures_are_those_of_predict() -> None:
    state = attempt(opened(START), {"recipe.micro_batch": 2})
    alone = predict(build_run(**{**START, "recipe": {"seq_len": 8192, "micro_batch": 2}}))
    assert (state.report.step_s, state.report.fullest.memory) == (alone.step_s, alone.fullest.memory)


def test_a_step_of_tp_keeps_the_gpus_and_the_derived_degree_follows() -> None:
    state = stepped(opened(START), "plan.tp", 1)
    assert (state.run.plan.tp, state.run.plan.dp_shard, state.run.cluster.gpus) == (2, 4, 8)
    assert state.problem is None


def test_a_step_passes_over_values_that_make_no_run() -> None:
    """Llama 3 8B has 8 KV heads: tp = 16 divides none of them, and there is no larger one to go to."""
    state = opened({**START, "cluster": {"gpus": 16}, "plan": {"strategy": "fsdp", "tp": 8, "checkpointing": "full"}})
    after = stepped(state, "plan.tp", 1)
    assert after.problem is not None
    assert after.problem.error.field in ("plan.tp", "plan")
    assert after.run == state.run


def test_a_failed_change_keeps_the_last_run_and_its_repair_makes_it_whole() -> None:
    state = stepped(opened(START), "plan.pp", 1)
    assert state.problem is not None
    assert state.run.plan.pp == 1
    assert state.values["plan.pp"] == 2
    assert state.problem.repair == {"recipe.grad_accum": 2}
    mended = attempt(state, {**state.problem.changes, **state.problem.repair})
    assert (mended.run.plan.pp, mended.problem) == (2, None)


def test_undo_returns_the_run_and_first_drops_a_failed_change() -> None:
    first = opened(START)
    second = stepped(first, "recipe.seq_len", -1)
    failed = stepped(second, "plan.pp", 1)
    assert undone(failed).run == second.run
    assert undone(undone(failed)).run == first.run
    assert undone(first) == first
    assert dismissed(failed).problem is None


@pytest.mark.parametrize("given", [preset.given for preset in PRESETS], ids=[preset.name for preset in PRESETS])
def test_every_step_of_every_field_gives_a_run_or_a_message(given: dict[str, object]) -> None:
    state = opened(given)
    for field in FIELDS:
        for by in (-1, 1):
            after = stepped(state, field.path, by)
            if after.problem is not None:
                assert after.problem.error.rule
                assert after.run == state.run
                if after.problem.repair is not None:
                    assert attempt(after, {**after.problem.changes, **after.problem.repair}).problem is None
            else:
                assert after.report.step_s


def test_suggestions_read_the_words_of_an_error() -> None:
    error = PlanError("plan.tp", 2, "rule.", "Use zero = 3, or framework = megatron.")
    assert list(suggestions(error))[:2] == [{"plan.zero": 3}, {"plan.framework": "megatron"}]
    error = PlanError("recipe.precision", "x", "rule.", "Use bf16-pure, fp32, or zero = 3 (whose mixed precision is per module).")
    assert {"plan.zero": 3} in list(suggestions(error))
    assert {"recipe.precision": "bf16-pure"} in list(suggestions(error))
    error = PlanError("recipe.global_batch", 7, "rule.", "Use a multiple of 8, for example 8, and leave grad_accum out.")
    assert {"recipe.global_batch": 8} in list(suggestions(error))
    error = PlanError("plan", "tp x pp x cp = 2", "it must divide the 7 GPUs.", "Use --gpus 8.")
    assert {"cluster.gpus": 8} in list(suggestions(error))
