"""A run written as an input resolves to itself, and a change is what somebody would have written."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import examples, runs

from costmodel import PlanError, Run, build_run, resolve
from costmodel.changes import as_input, changed


@examples(200)
@given(runs())
def test_the_input_of_a_run_resolves_to_it(run: Run) -> None:
    assert resolve(as_input(run)).run == run
    assert changed(run, {}) == run


@examples(100)
@given(runs(), st.sampled_from([1, 2, 3, 8, 16]), st.sampled_from([1, 2, 4]))
def test_a_change_there_and_back_gives_the_run_again(run: Run, micro_batch: int, grad_accum: int) -> None:
    sizes = {"recipe.micro_batch": micro_batch, "recipe.grad_accum": grad_accum}
    before = {"recipe.micro_batch": run.recipe.micro_batch, "recipe.grad_accum": run.recipe.grad_accum, "recipe.loss_chunks": run.recipe.loss_chunks}
    try:
        there = changed(run, sizes)
    except PlanError:  # a schedule takes not every number of micro-batches
        return
    assert there.recipe.global_batch == micro_batch * grad_accum * run.plan.dp
    assert changed(there, before) == run


def test_the_input_is_short() -> None:
    run = build_run(model="llama-3-8b", cluster={"gpus": 64}, plan={"zero": 3, "tp": 4, "checkpointing": "full"}, recipe={"precision": "bf16-mixed"})
    assert as_input(run) == {"model": "llama-3-8b", "cluster": {"gpu": "h100_sxm", "gpus": 64}, "plan": {"zero": 3, "tp": 4, "checkpointing": "full"},
                             "recipe": {"seq_len": 4096, "micro_batch": 1, "grad_accum": 1, "precision": "bf16-mixed", "optimizer": "adamw"}}


BASE: dict[str, Any] = {"model": "llama-3-8b", "cluster": {"gpus": 64}, "plan": {"zero": 3}, "recipe": {"global_batch": 512, "micro_batch": 1}}


@pytest.mark.parametrize(("changes", "same"), [
    ({"plan.tp": 4}, {"plan": {"zero": 3, "tp": 4}, "recipe": {"micro_batch": 1, "grad_accum": 8}}),
    ({"cluster.gpus": 8}, {"cluster": {"gpus": 8}, "recipe": {"micro_batch": 1, "grad_accum": 8}}),
    ({"cluster.gpu": "a100"}, {"cluster": {"gpus": 64, "gpu": "a100"}}),
    ({"cluster.nodes": 4}, {"cluster": {"nodes": 4}, "recipe": {"micro_batch": 1, "grad_accum": 8}}),
    ({"plan.strategy": "ddp"}, {"plan": {"strategy": "ddp"}}),
    ({"plan.framework": "megatron", "plan.zero": 1}, {"plan": {"framework": "megatron", "zero": 1}}),
    ({"plan.pp": 4, "plan.schedule": "interleaved"}, {"plan": {"zero": 3, "pp": 4, "schedule": "interleaved", "virtual_stages": 2},
                                                       "recipe": {"micro_batch": 1, "grad_accum": 8}}),
    ({"plan.dp_shard": 8}, {"plan": {"zero": 3, "dp_shard": 8}}),
    ({"recipe.global_batch": 1024}, {"recipe": {"global_batch": 1024, "micro_batch": 1}}),
    ({"recipe.precision": "bf16-pure"}, {"recipe": {**BASE["recipe"], "precision": "bf16-pure"}}),
    ({"model.layers": 40}, {"model": {"base": "llama-3-8b", "layers": 40}}),
    ({"params": "1B"}, {"model": None, "params": "1B"}),
])
def test_a_change_equals_the_run_written_so(changes: dict[str, Any], same: dict[str, Any]) -> None:
    assert changed(build_run(**BASE), changes) == build_run(**{**BASE, **same})


def test_the_accumulation_follows_where_the_global_batch_is_kept() -> None:
    run = build_run(**BASE)
    assert changed(run, {"cluster.gpus": 128}, keep="global_batch").recipe.grad_accum == 4
    assert changed(run, {"recipe.micro_batch": 4}, keep="global_batch").recipe.grad_accum == 2
    assert changed(run, {"recipe.grad_accum": 2}, keep="global_batch").recipe.micro_batch == 4
    with pytest.raises(PlanError, match="multiple of micro_batch 3"):
        changed(run, {"recipe.micro_batch": 3}, keep="global_batch")


def test_what_has_lost_its_meaning_goes() -> None:
    run = build_run(params="1B", cluster={"gpus": 16}, plan={"tp": 2, "sequence_parallel": True, "pp": 2, "schedule": "interleaved", "virtual_stages": 2},
                    recipe={"grad_accum": 4})
    assert not changed(run, {"plan.tp": 1}).plan.sequence_parallel
    assert changed(run, {"plan.pp": 1}).plan.virtual_stages == 1
    assert changed(run, {"plan.schedule": "1f1b"}).plan.virtual_stages == 1
    hybrid = build_run(params="1B", cluster={"gpus": 16}, plan={"strategy": "hsdp"})
    assert (hybrid.plan.dp_replicate, hybrid.plan.dp_shard) == (2, 8)
    assert changed(hybrid, {"plan.zero": 0}).plan.dp_replicate == 16
    assert changed(hybrid, {"plan.tp": 4}).plan.dp_shard == 4, "8 does not divide what is left"


def test_a_cluster_of_ones_own_keeps_its_links() -> None:
    run = build_run(params="1B", cluster={"gpus": 16, "gpu": "a100"})
    level = run.cluster.levels[-1].model_copy(update={"bytes_per_s": 1.5e10})
    own = run.model_copy(update={"cluster": run.cluster.model_copy(update={"name": "ours", "levels": (run.cluster.levels[0], level)})})
    more = changed(own, {"cluster.gpus": 64}).cluster
    assert [(lv.domain, lv.bytes_per_s) for lv in more.levels] == [(8, run.cluster.levels[0].bytes_per_s), (64, 1.5e10)]
    assert [lv.domain for lv in changed(own, {"cluster.gpus": 4}).cluster.levels] == [4]
    assert changed(own, {"cluster.gpus": 1}).cluster.levels == ()
    fabric = own.cluster.levels[-1].model_copy(update={"name": "fabric"})
    half = {"levels": (own.cluster.levels[0], fabric), "link_factors": {"fabric": 0.5, "inter": 0.5}}
    slow = own.model_copy(update={"cluster": own.cluster.model_copy(update=half)})
    assert changed(slow, {"cluster.gpus": 64}).cluster.link_factors == {"fabric": 0.5, "inter": 0.5}
    assert changed(slow, {"cluster.gpus": 4}).cluster.link_factors == {"inter": 0.5}
    assert changed(slow, {"cluster.memory_bytes": 10**10}).cluster.accelerator.memory_bytes == 10**10


def test_a_part_that_is_none_is_refused() -> None:
    with pytest.raises(PlanError, match="no such part"):
        changed(build_run(params="1B"), {"plans.tp": 2})
    with pytest.raises(PlanError, match=r"plan\.tpp"):
        changed(build_run(params="1B"), {"plan.tpp": 2})


def test_a_device_of_other_memory_stays_in_the_catalogue() -> None:
    run = build_run(params="1B", cluster={"gpus": 8, "gpu": "h100", "memory_bytes": 10**10})
    assert run.cluster.accelerator.memory_bytes == 10**10
    assert as_input(run)["cluster"] == {"gpu": "h100_sxm", "gpus": 8, "memory_bytes": 10**10}
    more = changed(run, {"cluster.gpus": 64}).cluster
    assert (more.nodes, more.accelerator.memory_bytes) == (8, 10**10)
    assert changed(run, {"cluster.gpu": "a100"}).cluster.accelerator.memory_bytes > 10**10


def test_a_field_inside_a_table_changes_alone() -> None:
    run = build_run(**BASE)
    assert changed(run, {"recipe.precision.reduce": "bf16"}).recipe.precision.model_dump() == {
        **run.recipe.precision.model_dump(), "name": "bf16-mixed, changed", "reduce": "bf16"}
    foreach = changed(run, {"recipe.optimizer.implementation": "foreach", "recipe.optimizer.lr": 0.1}).recipe.optimizer
    assert (foreach.name, foreach.implementation, foreach.lr) == ("adamw", "foreach", 0.1)
    assert changed(run, {"plan.checkpointing.group": 4}).plan.checkpointing.group == 4
    with pytest.raises(PlanError, match=r"recipe\.precision\.redcue"):
        changed(run, {"recipe.precision.redcue": "bf16"})
