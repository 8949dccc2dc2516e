"""What a real step is fed: samples, initial values, learning rates."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from small_runs import LLAMA, cpu_run  # noqa: E402

from costmodel.spec import PlanError  # noqa: E402
from execute.data import Synthetic, Text, batches_of_step, data_rank, sample_numbers, source_of  # noqa: E402
from execute.learning_rate import learning_rate, set_learning_rate  # noqa: E402


@pytest.mark.parametrize("plan", [{"strategy": "ddp", "gpus": 4}, {"strategy": "fsdp", "gpus": 8, "tp": 2}, {"strategy": "ddp", "gpus": 8, "pp": 2}])
def test_data_parallel_ranks_share_out_the_batch_and_their_peers_share_a_part(plan: dict[str, Any]) -> None:
    run = cpu_run({**LLAMA, "kv_heads": 4}, recipe={"grad_accum": 2}, **plan)
    for step in range(2):
        of_rank = {rank: [n for micro_batch in sample_numbers(run, step, rank) for n in micro_batch] for rank in range(run.plan.world_size)}
        by_share = {data_rank(run, rank): numbers for rank, numbers in of_rank.items()}
        assert all(numbers == by_share[data_rank(run, rank)] for rank, numbers in of_rank.items())
        together = sorted(n for numbers in by_share.values() for n in numbers)
        assert together == list(range(step * run.recipe.global_batch, (step + 1) * run.recipe.global_batch))


def test_tp_peers_are_neighbours_and_stages_are_far_apart() -> None:
    run = cpu_run({**LLAMA, "kv_heads": 4}, "ddp", 8, tp=2, pp=2, recipe={"grad_accum": 2, "precision": "fp32"})
    assert [data_rank(run, rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_a_target_is_the_next_token() -> None:
    run = cpu_run(recipe={"seq_len": 4, "micro_batch": 2})
    text = Text(torch.arange(100, dtype=torch.uint8))
    tokens, targets = batches_of_step(run, text, 1, 0, "cpu")()
    assert tokens.tolist() == [[8, 9, 10, 11], [12, 13, 14, 15]]
    assert targets.tolist() == [[9, 10, 11, 12], [13, 14, 15, 16]]


def test_a_text_begins_again_at_its_end() -> None:
    text = Text(torch.arange(10, dtype=torch.uint8))
    assert text(2, 5).tolist() == text(0, 5).tolist() == [0, 1, 2, 3, 4]


def test_random_samples_follow_from_seed_and_number() -> None:
    assert Synthetic(512, 1)(7, 9).tolist() == Synthetic(512, 1)(7, 9).tolist()
    assert Synthetic(512, 1)(7, 9).tolist() != Synthetic(512, 2)(7, 9).tolist() != Synthetic(512, 2)(8, 9).tolist()


@pytest.mark.parametrize(("content", "field"), [(b"short", "data"), (b"\xff" * 500, "model.vocab"), (None, "data")])
def test_a_text_that_does_not_serve_is_refused(content: bytes | None, field: str, tmp_path: Path) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PlanError) as error:
        source_of(cpu_run({**LLAMA, "vocab": 128}), path)
    assert error.value.field == field


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_learning_rates_are_those_of_torch_s_schedulers(kind: str) -> None:
    """LinearLR from lr / warm-up, then CosineAnnealingLR or LinearLR down to zero, in sequence."""
    from torch.optim import lr_scheduler as torch_lr
    warmup, steps, peak = 4, 20, 0.1
    recipe = cpu_run(recipe={"warmup_steps": warmup, "schedule": kind, "optimizer": {"base": "sgd:foreach", "lr": peak}}).recipe
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    up = torch_lr.LinearLR(optimizer, 1 / warmup, total_iters=warmup - 1)
    down = {"cosine": torch_lr.CosineAnnealingLR(optimizer, steps - warmup), "linear": torch_lr.LinearLR(optimizer, 1.0, 0.0, steps - warmup),
            "constant": torch_lr.ConstantLR(optimizer, 1.0)}[kind]
    schedule = torch_lr.SequentialLR(optimizer, [up, down], [warmup])
    for step in range(steps + 1):
        assert learning_rate(recipe, step, steps) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12), step
        optimizer.step()
        schedule.step()


def test_warm_up_peak_and_end() -> None:
    recipe = cpu_run(recipe={"warmup_steps": 10, "optimizer": {"base": "adamw", "lr": 1.0}}).recipe
    assert [learning_rate(recipe, step, 110) for step in (0, 9, 10, 60, 110)] == pytest.approx([0.1, 1.0, 1.0, 0.5, 0.0])


def test_every_group_gets_the_rate() -> None:
    optimizer = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))]}, {"params": [torch.nn.Parameter(torch.zeros(1))]}], lr=1.0)
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
