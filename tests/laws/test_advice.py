"""Advice: applied, a change gives exactly the promised figures; what is said to be enough is; each is the mildest of its kind."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import examples, runs
from test_solve import on_a_small_card

from costmodel import Run, build_run, predict
from costmodel.advice import Advice, advise
from costmodel.changes import changed
from costmodel.solve import fits
from costmodel.solve.trials import held_bytes, worst


def applied_gives_the_promised_figures(run: Run, advice: Advice) -> None:
    for s in (*advice.fit, *advice.together, *advice.helps, *advice.faster):
        again = changed(run, s.changes, s.keep)
        report = predict(again, scaling=False)
        memory = worst(report).memory
        assert memory is not None
        assert (again, report) == (s.run, s.report)
        assert (held_bytes(memory), memory.headroom_bytes) == (s.needs_after, s.headroom_bytes)
        assert (report.step_s, report.tokens_per_s) == (s.step_after, s.tokens_per_s_after)
        if s.keep == "global_batch":
            assert again.tokens_per_step == run.tokens_per_step
    assert all(fits(s.report) for s in (*advice.fit, *advice.together, *advice.faster))
    assert not any(fits(s.report) for s in advice.helps)
    assert all(s.needs_after < s.needs_before for s in advice.helps)
    assert all(s.step_after < s.step_before for s in advice.faster)


@examples(20)
@given(runs(st.sampled_from([1, 2, 8])), st.sampled_from([0.3, 0.8, 1.0, 2.0]))
def test_a_change_applied_gives_the_promised_figures(run: Run, share: float) -> None:
    run = on_a_small_card(run, share)
    advice = advise(run)
    assert not (advice.faster if advice.report.verdict != "fits" else advice.fit or advice.together or advice.helps)
    applied_gives_the_promised_figures(run, advice)


LLAMA = {"model": "llama-3-8b", "recipe": {"seq_len": 8192, "micro_batch": 4, "global_batch": 64}}
CASES: dict[str, dict[str, Any]] = {
    "one change": {**LLAMA, "cluster": {"gpus": 64}, "plan": {"strategy": "fsdp"}, "recipe": {"seq_len": 8192, "micro_batch": 2}},
    "a pair": {**LLAMA, "cluster": {"gpus": 8}, "plan": {"strategy": "fsdp"}},
    "more gpus": {"model": "llama-3-70b", "cluster": {"gpus": 8}, "plan": {"strategy": "fsdp"}},
    "a pipeline": {"model": "llama-3-70b", "cluster": {"gpus": 64}, "plan": {"framework": "megatron", "zero": 1, "tp": 8, "pp": 2},
                   "recipe": {"global_batch": 64, "micro_batch": 1, "seq_len": 8192}},
    "a long sequence": {"model": "llama-3-8b", "cluster": {"gpus": 8}, "plan": {"strategy": "fsdp", "checkpointing": "full"},
                        "recipe": {"seq_len": 524288, "loss": "fused"}},
    "faster": {"params": "1B", "cluster": {"gpus": 8}, "plan": {"zero": 3, "checkpointing": "full"}},
}


@pytest.mark.parametrize("case", CASES)
def test_known_runs(case: str) -> None:
    run = build_run(**CASES[case])
    advice = advise(run)
    applied_gives_the_promised_figures(run, advice)
    found = {name for name in ("fit", "together", "helps", "faster") if getattr(advice, name)}
    assert found >= {"one change": {"fit"}, "a pair": {"together", "helps"}, "more gpus": {"together"}, "a pipeline": {"fit"}, "a long sequence": {"fit"},
                     "faster": {"faster"}}[case]
    assert case != "a long sequence" or {s.run.plan.cp for s in advice.fit} == {8}


TWO_CARDS: dict[str, Any] = {"model": "llama-3-8b", "cluster": {"gpu": "rtx_a6000", "gpus": 2}, "plan": {"strategy": "fsdp", "checkpointing": "full"},
                             "recipe": {"seq_len": 8192}}


def words(advice: Advice) -> str:
    return " | ".join(s.words for s in (*advice.fit, *advice.together, *advice.faster))


def test_two_cards_of_48_gb_need_more_of_them() -> None:
    """torchtitan issue 620: 16 bytes a parameter over two cards of 48 GB; checkpointing and batch are no help, more GPUs are."""
    advice = advise(build_run(**TWO_CARDS))
    assert advice.states_alone
    assert not any("checkpointing" in s.words or "micro-batch" in s.words for s in advice.fit)
    assert any("GPUs" in s.words for s in advice.fit)
    [here] = advice.together
    assert here.run.cluster.gpus == 2, "beside more GPUs alone: what is enough on these"
    assert here.remark, "16 bytes a parameter of two moments, gradients and weights in fp32 leave no other way"
    assert any(s.changes == {"plan.offload": "params"} for s in advice.fit), "or the host's memory holds them"
    applied_gives_the_promised_figures(build_run(**TWO_CARDS), advice)


def test_the_foreach_optimizers_copies_go_with_the_fused_kernel() -> None:
    """meta-llama/llama-cookbook issue 234: Llama-2-7B on eight V100 of 16 GB died in the multi-tensor AdamW's temporaries."""
    run = build_run(model="llama-2-7b", cluster={"gpu": "v100", "gpus": 8}, plan={"strategy": "fsdp", "checkpointing": "full"},
                    recipe={"seq_len": 128, "precision": "fp16-mixed", "optimizer": "adamw:foreach"})
    advice = advise(run)
    assert advice.report.verdict != "fits"
    saved = next(s for s in (*advice.fit, *advice.helps) if s.changes == {"recipe.optimizer.implementation": "fused"})
    before, after = (r.fullest.memory.phases["optimizer step"].total_bytes if r.fullest.memory else 0 for r in (advice.report, saved.report))
    shard = 6_738_415_616 / 8 * 4
    assert before - after == pytest.approx(shard, rel=0.01)


def test_checkpointing_goes_where_there_is_room() -> None:
    advice = advise(build_run(**CASES["faster"]))
    assert "no checkpointing" in words(advice)


def test_only_the_mildest_micro_batch_is_proposed() -> None:
    run = build_run(params="1B", cluster={"gpus": 8}, plan={"zero": 3}, recipe={"micro_batch": 16})
    smaller = [s for s in advise(run).fit if "recipe.micro_batch" in s.changes]
    assert len(smaller) == 1
    assert smaller[0].run.recipe.micro_batch == 4, "8 does not fit, 6 and 7 do not divide 16"
    assert not fits(predict(changed(run, {"recipe.micro_batch": 8}, "global_batch"), scaling=False))


def test_it_can_be_stopped() -> None:
    run = build_run(model="llama-3-70b", cluster={"gpus": 8}, plan={"strategy": "fsdp"})
    left = iter([True] * 5)
    assert advise(run, watch=lambda _: next(left, False)).stopped


def test_an_absurd_batch_gets_an_answer() -> None:
    """A slip of the keyboard, not a run: what is tried does not grow with the number."""
    asked = {"params": "100M", "cluster": {"gpus": 1}}
    large = advise(build_run(**asked, recipe={"micro_batch": 10**12}))
    assert large.report.verdict == "does not fit"
    assert any(s.run.recipe.micro_batch * s.run.recipe.grad_accum == 10**12 for s in large.fit)
    assert advise(build_run(**asked, recipe={"grad_accum": 10**12})).report.verdict == "fits"
