"""The dry run: states, collectives and moments that follow from the strategy, and its speed."""

from collections import Counter
from typing import Any

import pytest

pytest.importorskip("torch")

from small_runs import GPT, LLAMA, cpu_run, small_run

from costmodel.inputs import build_run
from costmodel.spec import PlanError
from execute.dryrun import dry_run, observe, timeline


def memory(run: Any) -> Any:
    return dry_run(run).roles[0].memory


def sent(run: Any) -> Counter[tuple[str, str, int]]:
    out: Counter[tuple[str, str, int]] = Counter()
    for c in dry_run(run).roles[0].collectives:
        out[(c.phase, c.kind, c.message_bytes)] += c.count
    return out


def test_fsdp_shards_every_state() -> None:
    run = small_run(strategy="fsdp", gpus=4)
    states, psi = memory(run).states, run.model.params
    assert states["parameters"] == states["gradients"] == psi * 4 // 4
    assert states["optimizer"] == 2 * psi * 4 // 4 + 4 * 21


def test_ddp_keeps_buckets_unless_gradients_are_views_of_them() -> None:
    psi = small_run().model.params
    plain = memory(small_run(strategy="ddp", gpus=2)).states
    views = memory(small_run(strategy="ddp", gpus=2, gradient_as_bucket_view=True)).states
    assert (plain["gradients"], plain["communication"]) == (psi * 4, psi * 4)
    assert (views["gradients"], views.get("communication", 0)) == (psi * 4, 0)


def test_zero2_holds_a_share_of_gradients_and_optimizer_and_whole_parameters() -> None:
    run = small_run(strategy="zero2", gpus=4)
    states, psi = memory(run).states, run.model.params
    assert states["parameters"] == psi * 4
    assert states["gradients"] == psi
    assert states["optimizer"] == pytest.approx(2 * psi, abs=100)


def test_zero1_ranks_hold_the_whole_optimizer_between_them() -> None:
    run = small_run(strategy="zero1", gpus=2)
    parts = [dry_run(run, rank).roles[0].memory.states["optimizer"] for rank in range(2)]
    assert sum(parts) == 2 * run.model.params * 4 + 4 * 21
    assert parts[0] != parts[1]


def test_bf16_parameters_have_bf16_optimizer_states() -> None:
    run = small_run(recipe={"precision": "bf16-pure"})
    states, psi = memory(run).states, run.model.params
    assert (states["parameters"], states["gradients"]) == (psi * 2, psi * 2)
    assert states["optimizer"] == 2 * psi * 2 + 4 * 21


def test_step_counters_of_foreach_adam_stay_on_the_host_of_a_gpu() -> None:
    recipe = {"optimizer": "adamw:foreach"}
    psi = small_run().model.params
    assert memory(small_run(recipe=recipe)).states["optimizer"] == 8 * psi
    assert memory(cpu_run(recipe=recipe)).states["optimizer"] == 8 * psi + 4 * 21


@pytest.mark.parametrize(("word", "per_parameter"), [("sgd:foreach", 0), ("momentum:fused", 4), ("adam:for-loop", 8), ("muon:foreach", None)])
def test_every_optimizer_of_torch_runs(word: str, per_parameter: int | None) -> None:
    run = small_run(recipe={"optimizer": word})
    held = memory(run).states.get("optimizer", 0)
    if per_parameter is None:
        assert 4 * run.model.params < held < 8 * run.model.params
    else:
        assert held == per_parameter * run.model.params


def test_fsdp_gathers_each_layer_forward_and_backward_and_scatters_it_once() -> None:
    run = small_run(strategy="fsdp", gpus=4, recipe={"precision": "bf16-mixed"})
    layer, root = 725_504 * 2, 262_400 * 2
    expected = {("forward", "all-gather", layer): 2, ("backward", "all-gather", layer): 2, ("forward", "all-gather", root): 1,
                ("backward", "reduce-scatter", layer * 2): 2, ("backward", "reduce-scatter", root * 2): 1, ("optimizer", "all-reduce", 84): 1}
    assert sent(run) == expected


def test_fsdp_kept_unsharded_gathers_once() -> None:
    kept = sent(small_run(strategy="fsdp", gpus=4, reshard_after_forward=False))
    assert not any(phase == "backward" and kind == "all-gather" for phase, kind, _ in kept)


def test_no_sync_reduces_once_a_step() -> None:
    each = sent(small_run(strategy="ddp", gpus=4, recipe={"grad_accum": 3}, sync_each_micro_batch=True))
    last = sent(small_run(strategy="ddp", gpus=4, recipe={"grad_accum": 3}))
    assert each == Counter({k: 3 * n for k, n in last.items()})


def test_hsdp_all_reduces_shards_over_the_replicas() -> None:
    report = dry_run(small_run(strategy="hsdp", gpus=8, dp_shard=4))
    reduced = [c for c in report.roles[0].collectives if c.kind == "all-reduce" and c.axis == "dp_replicate"]
    assert [c.group for c in reduced] == [2, 2]
    assert sum(c.count for c in reduced) == 3


def test_uneven_shards_are_padded_on_the_wire() -> None:
    run = small_run(GPT, strategy="fsdp", gpus=7, recipe={"precision": "bf16-mixed"})
    gathered = {c.message_bytes for c in dry_run(run).roles[0].collectives if c.kind == "all-gather"}
    assert all(n % (7 * 2) == 0 for n in gathered)
    assert max(gathered) > 2 * 256 * (512 + 128)


def test_checkpointing_lowers_activations_and_keeps_states() -> None:
    recipe = {"precision": "bf16-mixed", "micro_batch": 8}
    none, full = memory(small_run(GPT, recipe=recipe)), memory(small_run(GPT, recipe=recipe, checkpointing="full"))
    assert full.activations_bytes < none.activations_bytes / 2
    assert full.states == none.states


@pytest.mark.parametrize("loss", ["eager", "bf16", "chunked", "fused"])
def test_losses_keep_less_the_less_of_the_logits_they_materialise(loss: str) -> None:
    model = {**LLAMA, "vocab": 32_000}
    peaks = {kind: memory(small_run(model, recipe={"precision": "bf16-pure", "loss": kind})).activations_bytes for kind in ("eager", loss)}
    assert loss == "eager" or peaks[loss] < peaks["eager"]


def test_the_timeline_s_highest_instant_is_the_peak() -> None:
    run = small_run(strategy="fsdp", gpus=4)
    instants = timeline(run)
    assert max(i.total_bytes for i in instants) == memory(run).allocated.total_bytes
    assert all(i.total_bytes == sum(i.by_category.values()) for i in instants)


def test_a_steady_step_ends_with_what_it_began_with() -> None:
    seen = observe(small_run(strategy="fsdp", gpus=4, recipe={"grad_accum": 2, "precision": "fp16-mixed"}))
    before = seen.tracker.timeline("first step")[-1].total_bytes
    assert sum(seen.states.values()) == pytest.approx(before, abs=8)


@pytest.mark.parametrize(("given", "field"), [({"gpus": 2, "cp": 2, "strategy": "ddp", "recipe": {"precision": "bf16-pure", "dropout": 0.1}}, "recipe.dropout"),
                                              ({"recipe": {"optimizer": "adam8bit"}}, "recipe.optimizer"),
                                              ({"recipe": {"compile": True}}, "recipe.compile")])
def test_what_is_not_performed_is_refused_by_name(given: dict[str, Any], field: str) -> None:
    with pytest.raises(PlanError) as error:
        dry_run(small_run(**given))
    assert error.value.field == field


@pytest.mark.slow
def test_llama_3_8b_on_1024_gpus_sends_what_fully_shard_sends() -> None:
    """Counts of a run tried by hand: 32 gathers each way of 436,224,000 bytes, 33 reduce-scatters in float32, padded root."""
    run = build_run(model="llama-3-8b", cluster={"gpu": "h100_sxm", "gpus": 1024}, plan={"strategy": "fsdp"}, recipe={"seq_len": 8192})
    counts = sent(run)
    assert counts[("forward", "all-gather", 436_224_000)] == counts[("backward", "all-gather", 436_224_000)] == 32
    assert counts[("forward", "all-gather", 2_113_937_408)] == 1
    assert sum(n for (_, kind, _), n in counts.items() if kind == "reduce-scatter") == 33
