"""The dry run against the same program on real tensors: one process, watched and unwatched, and two ranks under gloo."""

import gc
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from gloo_ranks import perform_once  # noqa: E402
from small_runs import GPT, LLAMA, cpu_run  # noqa: E402

from execute.assemble import build  # noqa: E402
from execute.data import random_batch  # noqa: E402
from execute.dryrun import observe, observe_real, report  # noqa: E402
from execute.observe.trace import load_trace  # noqa: E402
from execute.step import train_step  # noqa: E402
from execute.strategies import single  # noqa: E402
from execute.weights import init_weights  # noqa: E402

DEEP, DEEP_GPT = {**LLAMA, "vocab": 64}, {**GPT, "vocab": 64}
MIXTURE = {**DEEP, "moe": {"experts": 8, "top_k": 2, "expert_ffn": 352, "shared_experts": 1, "shared_ffn": 344}}
LATENT = {**DEEP, "kv_heads": 4, "mla": {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}}
ALONE = {
    "llama": cpu_run(LLAMA), "llama, peak in a layer": cpu_run(DEEP), "gpt, dropout, eager": cpu_run(DEEP_GPT, recipe={"dropout": 0.1, "attention": "eager"}),
    "autocast": cpu_run(DEEP, recipe={"precision": "bf16-mixed"}), "full checkpointing": cpu_run(DEEP, checkpointing="full"),
    "groups": cpu_run({**DEEP, "layers": 4}, checkpointing="full:2"), "chunked loss": cpu_run(LLAMA, recipe={"loss": "chunked"}),
    "windows": cpu_run({**DEEP, "sliding_window": 32}, recipe={"attention": "eager"}),
    "latent": cpu_run(LATENT), "latent, autocast": cpu_run(LATENT, recipe={"precision": "bf16-mixed"}),
    "dense first": cpu_run({**MIXTURE, "layers": 3, "moe": {**MIXTURE["moe"], "first_dense_layers": 1}}),
    "moe": cpu_run(MIXTURE), "moe, autocast": cpu_run(MIXTURE, recipe={"precision": "bf16-mixed"}),
    "muon": cpu_run(DEEP, recipe={"optimizer": "muon"}), "nanochat": cpu_run(DEEP, framework="nanochat"),
    "accumulation": cpu_run(DEEP, recipe={"grad_accum": 2}), "foreach": cpu_run(DEEP, recipe={"optimizer": "adamw:foreach"}),
}
UNWATCHED = ("llama, peak in a layer", "gpt, dropout, eager", "autocast", "full checkpointing", "chunked loss", "moe")
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp", "bucket_mb": 2}, "ddp views": {"strategy": "ddp", "bucket_mb": 2, "gradient_as_bucket_view": True},
    "ddp views accumulate": {"strategy": "ddp", "gradient_as_bucket_view": True, "recipe": {"grad_accum": 2}},
    "zero1": {"strategy": "zero1"}, "zero2": {"strategy": "zero2", "bucket_mb": 2}, "fsdp": {"strategy": "fsdp"},
    "fsdp full checkpointing": {"strategy": "fsdp", "checkpointing": "full"},
    "cp ring": {"strategy": "ddp", "cp": 2}, "cp ring fsdp": {"strategy": "fsdp", "cp": 2},
    "cp all-gather fsdp": {"strategy": "fsdp", "cp": 2, "cp_kind": "allgather"}, "cp ulysses fsdp": {"strategy": "fsdp", "cp": 2, "cp_kind": "ulysses"},
    "tp": {"strategy": "ddp", "tp": 2}, "tp sp loss": {"strategy": "ddp", "tp": 2, "sequence_parallel": True, "loss_parallel": True},
    "pp 1f1b": {"strategy": "ddp", "pp": 2, "recipe": {"grad_accum": 2}},
    "pp gpipe": {"strategy": "ddp", "pp": 2, "schedule": "gpipe", "recipe": {"grad_accum": 2}},
    "nanochat": {"strategy": "muon-distributed", "recipe": {"grad_accum": 2}},
}
BUCKETS = {"many buckets": {"bucket_bytes": 1 << 20, "first_bucket_bytes": 1 << 18}, "one bucket": {"bucket_bytes": 1 << 30, "first_bucket_bytes": 1 << 30}}
CPU_PAIR = {"gpu": "cpu_epyc_2core", "gpus": 2}


@lru_cache
def dry(name: str) -> Any:
    return observe(ALONE[name])


@pytest.mark.parametrize("name", ALONE)
def test_real_tensors_take_the_bytes_of_the_dry_run(name: str) -> None:
    fake, real = (report(seen, 0).roles[0].memory for seen in (dry(name), observe_real(ALONE[name])))
    assert fake is not None and real is not None
    assert real.states == fake.states
    assert real.activations_bytes == fake.activations_bytes
    assert real.allocated.total_bytes == fake.allocated.total_bytes
    assert real.allocated.by_category == fake.allocated.by_category


@pytest.mark.parametrize("name", UNWATCHED)
def test_pytorch_unwatched_rises_as_high_as_the_dry_run_says(name: str) -> None:
    """The profiler's own memory events of a step without the tracker. Its few bytes more are scalars that no operation returns."""
    from torch.profiler import ProfilerActivity, profile
    run = ALONE[name]
    model = build(run, "cpu")
    init_weights(model)
    prepared = single.prepare(run, model, dry=False)
    train_step(run, prepared, lambda: random_batch(run))
    prepared.optimizer.zero_grad()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        train_step(run, prepared, lambda: random_batch(run))
    now = highest = 0
    for event in sorted((e for e in trace.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        highest = max(highest, now)
    seen = dry(name)
    before = sum(v for k, v in seen.states.items() if k != "gradients")
    assert highest == pytest.approx(seen.tracker.peak("steady step").total_bytes - before, abs=64)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two real ranks saw."""
    recipe = {"seq_len": 128, "micro_batch": 2, "precision": "fp32"}
    cases: dict[str, Any] = {}
    for name, given in STRATEGIES.items():
        plan = {k: v for k, v in given.items() if k != "recipe"}
        cases[name] = "seen", {"model": LLAMA, "cluster": CPU_PAIR, "plan": plan, "recipe": {**recipe, **given.get("recipe", {})}}
    for name, plan in BUCKETS.items():
        cases[name] = "trace", {"model": LLAMA, "cluster": CPU_PAIR, "plan": {"strategy": "ddp", **plan}, "recipe": recipe}
    seen, where = perform_once(cases, 2, tmp_path_factory, "real_runs")
    return {name: done["result"] or where / str(done["number"]) for name, done in seen.items()}


@pytest.mark.parametrize("name", STRATEGIES)
def test_two_real_ranks_take_the_bytes_and_send_the_collectives_of_the_dry_run(name: str, pair: dict[str, Any]) -> None:
    """For DDP: the real reducer's buckets against the re-enacted ones, after the rebuild."""
    real = pair[name]
    plan = dict(STRATEGIES[name])
    role = report(observe(cpu_run(LLAMA, plan.pop("strategy"), 2, **plan)), 0).roles[0]
    assert role.memory is not None
    late = real["states"].pop("temporaries", 0)  # gloo's thread may still hold the last tensor that was reduced
    assert late <= max((c.message_bytes for c in role.collectives or () if c.phase == "optimizer"), default=4)
    assert real["states"] == role.memory.states
    assert real["activations"] == role.memory.activations_bytes
    assert real["phases"]["steady step"] == role.memory.allocated.total_bytes
    assert real["collectives"] == sorted([c.kind, c.message_bytes, c.count, c.group, c.dtype] for c in role.collectives or ())


def backward_after_first_all_reduce(folder: Path, rank: int) -> tuple[int, int]:
    """From a rank's trace of a step: its all-reduces, and the nodes of autograd that begin after the first of them has begun."""
    events = [e for e in load_trace(folder / f"trace{rank}.json")["traceEvents"] if e.get("ph") == "X"]
    sent = [e["ts"] for e in events if e["name"] == "c10d::allreduce_"]
    nodes = [e["ts"] for e in events if e["name"].startswith("autograd::engine::evaluate_function")]
    return len(sent), sum(ts > min(sent) for ts in nodes)


def test_ddp_reduces_buckets_while_backward_goes_on_and_one_big_bucket_after_it(pair: dict[str, Any]) -> None:
    """As torch's profiler saw it on both ranks: gradients of the first layer are computed when the last layer's are on their way."""
    for rank in range(2):
        sent, after = backward_after_first_all_reduce(pair["many buckets"], rank)
        assert sent > 2
        assert after > 20
        assert backward_after_first_all_reduce(pair["one bucket"], rank) == (1, 0)
