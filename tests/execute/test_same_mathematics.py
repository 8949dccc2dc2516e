"""Every way to spread a step computes what one process computes with the whole batch: gradients of the first step, losses of five."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

from gloo_ranks import perform_once  # noqa: E402

from costmodel.inputs import build_run  # noqa: E402

LLAMA: dict[str, Any] = {"layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 60, "vocab": 66}
"""Sizes that four ranks do not divide: shards are uneven and padded."""
GPT: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 4, "ffn": 64, "vocab": 66, "gated": False, "activation": "gelu", "norm": "layernorm",
                       "norm_bias": True, "positions": "learned", "position_rows": 16, "qkv_bias": True, "attention_out_bias": True,
                       "mlp_bias": True, "fused_qkv": True, "tied_embeddings": True}
MIXTURE: dict[str, Any] = {**LLAMA, "moe": {"experts": 4, "top_k": 2, "expert_ffn": 20, "shared_experts": 1, "shared_ffn": 12}}
LATENT: dict[str, Any] = {**LLAMA, "kv_heads": 4, "mla": {"q_lora_rank": 10, "kv_lora_rank": 6, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}}
FIRST: dict[str, Any] = {**MIXTURE, "moe": {**MIXTURE["moe"], "first_dense_layers": 2}}
OPTIMIZERS = {"sgd": {"base": "sgd:foreach", "lr": 1.0}, "adamw": {"base": "adamw", "lr": 0.01, "weight_decay": 0.1}}
CLIPPED = 0.5
"""Below the norm of these models' gradients: every step is clipped."""
SMALL_BUCKETS = {"bucket_bytes": 8192, "first_bucket_bytes": 4096}


class Case(NamedTuple):
    """A plan, and how many micro-batches."""

    plan: dict[str, Any]
    grad_accum: tuple[int, ...] = (1, 2)
    model: dict[str, Any] = LLAMA
    clip_norm: float = CLIPPED
    optimizers: tuple[str, ...] = ("sgd", "adamw")
    recipe: Mapping[str, Any] = MappingProxyType({})


TWO = {
    "ddp": Case({"strategy": "ddp", **SMALL_BUCKETS}), "ddp views, every micro-batch": Case(
        {"strategy": "ddp", "gradient_as_bucket_view": True, "sync_each_micro_batch": True}, (2,)),
    "zero1": Case({"strategy": "zero1"}), "zero2": Case({"strategy": "zero2", "bucket_bytes": 8192}),
    "zero2, no sync": Case({"strategy": "zero2", "sync_each_micro_batch": False}, (2,)),
    "fsdp": Case({"strategy": "fsdp"}), "fsdp, no sync, kept": Case({"strategy": "fsdp", "sync_each_micro_batch": False,
                                                                     "reshard_after_forward": False}, (2,)),
    "gpt, fsdp, checkpointed": Case({"strategy": "fsdp", "checkpointing": "full"}, (1,), GPT),
    "gpt, zero1, unclipped": Case({"strategy": "zero1"}, (2,), GPT, 0.0),
    "cp ring": Case({"strategy": "fsdp", "cp": 2}, (2,)), "cp all-gather": Case({"strategy": "fsdp", "cp": 2, "cp_kind": "allgather"}, (1,)),
    "cp ulysses": Case({"strategy": "fsdp", "cp": 2, "cp_kind": "ulysses"}, (1,)),
    "gpt, cp ring, unbalanced, checkpointed": Case({"strategy": "zero1", "cp": 2, "cp_balance": False, "checkpointing": "full"}, (1,), GPT),
    "tp": Case({"strategy": "ddp", "tp": 2}), "tp, sequence and loss parallel": Case(
        {"strategy": "ddp", "tp": 2, "sequence_parallel": True, "loss_parallel": True}, (2,)),
    "pp naive": Case({"strategy": "ddp", "pp": 2, "schedule": "naive"}, (2,)), "pp gpipe": Case({"strategy": "ddp", "pp": 2, "schedule": "gpipe"}, (1, 4)),
    "pp 1f1b": Case({"strategy": "ddp", "pp": 2}, (2, 4)), "pp 1f1b, uneven": Case({"strategy": "ddp", "pp": 2, "stage_layers": [3, 1]}, (2,)),
    "moe, ddp": Case({"strategy": "ddp", **SMALL_BUCKETS}, (1,), MIXTURE), "moe, fsdp x ep 2": Case({"strategy": "fsdp", "ep": 2}, (1, 2), MIXTURE),
    "moe, fsdp x ep 2, slots for all": Case({"strategy": "fsdp", "ep": 2}, (1,), MIXTURE, recipe={"moe_capacity_factor": 2.0}),
    "moe, fsdp x ep 2, checkpointed": Case({"strategy": "fsdp", "ep": 2, "checkpointing": "full"}, (1,), MIXTURE),
    "pp interleaved": Case({"strategy": "ddp", "pp": 2, "schedule": "interleaved", "virtual_stages": 2}, (2, 4)),
    "pp zb-h1": Case({"strategy": "ddp", "pp": 2, "schedule": "zb-h1"}, (4,)), "pp interleaved-zb": Case(
        {"strategy": "ddp", "pp": 2, "schedule": "interleaved-zb", "virtual_stages": 2}, (2,)),
    "pp zbv": Case({"strategy": "ddp", "pp": 2, "schedule": "zbv"}, (4,)), "pp dualpipev": Case({"strategy": "ddp", "pp": 2, "schedule": "dualpipev"}, (4,)),
    "windows, fsdp": Case({"strategy": "fsdp", "checkpointing": "full"}, (1,), {**LLAMA, "sliding_window": 5}, recipe={"attention": "eager"}),
    "dense first, fsdp x ep 2": Case({"strategy": "fsdp", "ep": 2}, (1,), FIRST), "dense first, pp 1f1b": Case(
        {"strategy": "ddp", "pp": 2, "stage_layers": [1, 3]}, (2,), FIRST),
    "windows in some layers, pp gpipe": Case({"strategy": "ddp", "pp": 2, "schedule": "gpipe"}, (2,), {
        **LLAMA, "sliding_window": 5, "window_pattern": "SSL"}, recipe={"attention": "eager"}),
    "latent, fsdp": Case({"strategy": "fsdp", "checkpointing": "full"}, (1,), LATENT), "latent, ddp": Case({"strategy": "ddp", **SMALL_BUCKETS}, (1,), {
        **LATENT, "mla": {**LATENT["mla"], "q_lora_rank": 0}}),
    "nanochat": Case({"strategy": "muon-distributed"}, (2,), LLAMA, 0.0, ("adamw",)),
}
FOUR = {
    "ddp of 4": Case({"strategy": "ddp", **SMALL_BUCKETS}, (1,)), "zero1 of 4": Case({"strategy": "zero1"}, (1,)),
    "zero2 of 4": Case({"strategy": "zero2", "bucket_bytes": 8192}, (2,)), "fsdp of 4": Case({"strategy": "fsdp"}, (2,)),
    "hsdp 2 x 2": Case({"strategy": "fsdp", "dp_replicate": 2, "dp_shard": 2}), "fsdp 2 x tp 2": Case(
        {"strategy": "fsdp", "tp": 2, "sequence_parallel": True}, (2,)),
    "cp 4 ring": Case({"strategy": "ddp", "cp": 4}, (1,)), "fsdp 2 x cp 2 ring": Case({"strategy": "fsdp", "cp": 2}, (1,)),
    "pp 2 x cp 2 ulysses": Case({"strategy": "ddp", "pp": 2, "cp": 2, "cp_kind": "ulysses"}, (2,)),
    "moe, fsdp 4 x ep 2": Case({"strategy": "fsdp", "ep": 2}, (2,), MIXTURE), "moe, hsdp 2 x 2 x ep 2": Case(
        {"strategy": "fsdp", "dp_replicate": 2, "dp_shard": 2, "ep": 2}, (1,), MIXTURE),
    "moe, fsdp 4 x ep 2, cut by rows": Case({"strategy": "fsdp", "ep": 2}, (1,), {**MIXTURE, "moe": {**MIXTURE["moe"], "experts": 2, "top_k": 1}}),
    "pp 4 1f1b": Case({"strategy": "ddp", "pp": 4}, (4,)), "pp 2 x ddp 2": Case({"strategy": "ddp", "pp": 2}, (2,)),
    "pp 2 x fsdp 2": Case({"strategy": "fsdp", "pp": 2, "reshard_after_forward": False}, (2,)),
    "pp 2 x fsdp 2 zbv": Case({"strategy": "fsdp", "pp": 2, "schedule": "zbv"}, (4,)),
    "pp 2 x tp 2 zb-h1": Case({"strategy": "ddp", "pp": 2, "tp": 2, "schedule": "zb-h1", "sequence_parallel": True}, (2,)),
    "pp 2 x tp 2": Case({"strategy": "ddp", "pp": 2, "tp": 2, "schedule": "gpipe"}, (2,)),
}
SCALED = ("ddp", "zero1", "zero2", "fsdp")


def given(case: Case, gpus: int, grad_accum: int, optimizer: str) -> dict[str, Any]:
    recipe = {"seq_len": 16, "micro_batch": 2, "grad_accum": grad_accum, "precision": "fp32", "optimizer": OPTIMIZERS[optimizer],
              "clip_norm": case.clip_norm, "warmup_steps": 2, **case.recipe}
    return {"model": case.model, "cluster": {"gpu": "cpu_epyc_2core", "gpus": gpus}, "plan": case.plan, "recipe": recipe}


def rows(cases: dict[str, Case]) -> dict[str, tuple[Case, int, str]]:
    return {f"{name}, {m} micro-batches, {optimizer}": (case, m, optimizer) for name, case in cases.items() for m in case.grad_accum
            for optimizer in case.optimizers}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    cases: dict[str, Any] = {name: ("learn", given(case, 2, m, optimizer)) for name, (case, m, optimizer) in rows(TWO).items()}
    for strategy in SCALED:
        recipe = {"seq_len": 16, "micro_batch": 2, "precision": "fp16-mixed", "optimizer": "sgd:foreach"}
        cases[f"overflow {strategy}"] = "overflow", {"model": LLAMA, "cluster": {"gpu": "v100_sxm2_16gb", "gpus": 2}, "plan": {"strategy": strategy},
                                                     "recipe": recipe}
    return perform_once(cases, 2, tmp_path_factory, "two_ranks")


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    cases = {name: ("learn", given(case, 4, m, optimizer)) for name, (case, m, optimizer) in rows(FOUR).items()}
    return perform_once(cases, 4, tmp_path_factory, "four_ranks")


def alone(case: Case, gpus: int, grad_accum: int, optimizer: str, keep: Path) -> tuple[list[float], dict[str, Any]]:
    """One process with micro-batches of all ranks' sequences."""
    from gloo_worker import learn
    spread = given(case, gpus, grad_accum, optimizer)
    dp = build_run(**spread).plan.dp
    recipe = {**spread["recipe"], "micro_batch": 2 * dp}
    run = build_run(model=case.model, cluster={"gpu": "cpu_epyc_2core", "gpus": 1}, plan={"strategy": "single"}, recipe=recipe)
    return learn(run, keep), torch.load(keep / "0.pt")


def same(done: tuple[dict[str, Any], Path], name: str, row: tuple[Case, int, str], gpus: int, keep: Path) -> None:
    outcome, where = done[0][name], done[1]
    losses, gradients = alone(row[0], gpus, row[1], row[2], keep)
    assert max(losses) - min(losses) > 1e-2 * losses[0]
    assert outcome["result"] == pytest.approx(losses, rel=1e-4)
    found: dict[str, Any] = {}
    for rank in range(gpus):
        found |= torch.load(where / str(outcome["number"]) / f"{rank}.pt")
    assert found.keys() == gradients.keys()
    for parameter, gradient in gradients.items():
        assert torch.linalg.vector_norm(found[parameter] - gradient) <= 1e-4 * torch.linalg.vector_norm(gradient), parameter


@pytest.mark.parametrize("name", rows(TWO))
def test_two_ranks_compute_what_one_process_computes(name: str, two: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    same(two, name, rows(TWO)[name], 2, tmp_path)


@pytest.mark.parametrize("name", rows(FOUR))
def test_four_ranks_compute_what_one_process_computes(name: str, four: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    same(four, name, rows(FOUR)[name], 4, tmp_path)


@pytest.mark.parametrize("strategy", SCALED)
def test_an_overflow_on_one_rank_skips_the_step_on_all(strategy: str, two: tuple[dict[str, Any], Path]) -> None:
    """torch.amp.GradScaler halves its scale of 65536 and skips; the next step trains."""
    for rank in two[0][f"overflow {strategy}"]["result"]["ranks"]:
        assert rank["moved"][0] == 0 < rank["moved"][1]
        assert rank["scales"] == [32768, 32768]
