"""Tensor and pipeline parallelism in the dry run: counts made by hand, what stages keep, what is refused."""

from collections import Counter
from typing import Any

import pytest

pytest.importorskip("torch")

from small_runs import GPT, LLAMA, small_run

from costmodel.spec import PlanError
from execute.dryrun import dry_run

TOKENS, HIDDEN, LAYERS = 2 * 128, 256, 2
STREAM = TOKENS * HIDDEN * 4
"""Bytes of the residual stream of a small run in float32."""


def split_run(gpus: int = 2, strategy: str = "ddp", **given: Any) -> Any:
    return small_run(given.pop("model", None), strategy, gpus, **given)


def sent(run: Any, rank: int = 0) -> Counter[tuple[str, str, str, int]]:
    out: Counter[tuple[str, str, str, int]] = Counter()
    for c in dry_run(run, rank).roles[0].collectives or ():
        out[(c.axis, c.phase, c.kind, c.message_bytes)] += c.count
    return out


def memory(run: Any, rank: int = 0) -> Any:
    return dry_run(run, rank).roles[0].memory


def test_tensor_parallelism_reduces_twice_forward_and_twice_backward_a_layer() -> None:
    """Megatron-LM (arXiv 1909.08053), section 3: two all-reduces each way; and the embedding's in forward, the head's in backward."""
    seen = sent(split_run(tp=2))
    assert seen[("tp", "forward", "all-reduce", STREAM)] == seen[("tp", "backward", "all-reduce", STREAM)] == 2 * LAYERS + 1


def test_sequence_parallelism_gathers_and_scatters_instead() -> None:
    """arXiv 2205.05198, section 4.2.2: the same volume; DTensor keeps the gathered input, so backward gathers no third time."""
    seen = sent(split_run(tp=2, sequence_parallel=True, loss_parallel=True))
    for phase in ("forward", "backward"):
        assert seen[("tp", phase, "all-gather", STREAM)] == seen[("tp", phase, "reduce-scatter", STREAM)] == 2 * LAYERS + 1
        assert ("tp", phase, "all-reduce", STREAM) not in seen


def test_a_parallel_loss_sends_three_numbers_a_token_and_no_logits() -> None:
    whole, split = (sent(split_run(tp=2, sequence_parallel=True, loss_parallel=on)) for on in (False, True))
    logits = TOKENS * 512 * 4
    assert whole[("tp", "forward", "all-gather", logits)] == 1
    assert ("tp", "forward", "all-gather", logits) not in split
    assert split[("tp", "forward", "all-reduce", TOKENS * 4)] == 3


@pytest.mark.parametrize("model", [LLAMA, {**GPT, "fused_qkv": False}])
def test_tp_ranks_hold_a_share_of_matrices_and_whole_norms(model: dict[str, Any]) -> None:
    run = split_run(model=model, tp=2, sequence_parallel=True)
    whole = dry_run(small_run(model)).roles[0].memory.states["parameters"]
    norms = (2 * LAYERS + 1) * HIDDEN * 4 * (2 if model is not LLAMA else 1)
    row_biases = 2 * LAYERS * HIDDEN * 4 if model is not LLAMA else 0
    assert memory(run).states["parameters"] == (whole + norms + row_biases) // 2


def test_a_row_parallel_embedding_has_a_whole_gradient() -> None:
    """DTensor knows no row-wise embedding_dense_backward (torch/distributed/tensor/_ops/_embedding_ops.py)."""
    states = memory(split_run(tp=2)).states
    assert states["gradients"] - states["parameters"] == 512 * HIDDEN * 4 // 2


def test_fsdp_and_tp_shard_over_both() -> None:
    states = memory(split_run(8, "fsdp", tp=2, sequence_parallel=True)).states
    norms = (2 * LAYERS + 1) * HIDDEN * 4
    assert states["parameters"] == states["gradients"] == (split_run(1, "single").model.params * 4 - norms) // 8 + norms // 4


@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("interleaved", 2)])
def test_stages_sum_to_the_model(schedule: str, virtual: int) -> None:
    run = split_run(model={**LLAMA, "layers": 5}, pp=2, schedule=schedule, virtual_stages=virtual, recipe={"grad_accum": 2, "seq_len": 32})
    assert sum(memory(run, rank).states["parameters"] for rank in range(2)) == run.model.params * 4


def test_a_stage_keeps_a_receive_buffer_for_every_micro_batch_and_direction() -> None:
    run = split_run(3, model={**LLAMA, "layers": 3}, pp=3, recipe={"grad_accum": 4})
    ranks = [dry_run(run, rank).roles[0] for rank in range(3)]
    assert [r.memory.states["communication"] for r in ranks if r.memory] == [4 * STREAM, 8 * STREAM, 4 * STREAM]
    sent_by_middle = {kind: sum(c.count for c in ranks[1].collectives or () if c.kind == kind) for kind in ("send", "recv")}
    assert sent_by_middle == {"send": 8, "recv": 8}


def test_1f1b_holds_fewer_micro_batches_the_later_the_stage_and_gpipe_all() -> None:
    """arXiv 2006.09503: rank r of p holds p - r micro-batches, of m; GPipe holds m on every rank."""
    def kept(schedule: str, rank: int) -> int:
        run = split_run(4, model={**LLAMA, "layers": 4, "vocab": 64}, pp=4, schedule=schedule, recipe={"grad_accum": 8, "precision": "bf16-pure"})
        return int(memory(run, rank).activations_bytes)

    second, third = kept("1f1b", 1), kept("1f1b", 2)
    assert second == pytest.approx(third * 3 / 2, rel=0.15)
    assert kept("gpipe", 1) == pytest.approx(second * 8 / 3, rel=0.15)


@pytest.mark.parametrize(("given", "field"), [
    ({"tp": 2, "model": GPT}, "model.fused_qkv"), ({"tp": 2, "recipe": {"precision": "bf16-mixed"}}, "recipe.precision"),
    ({"tp": 2, "recipe": {"loss": "chunked"}}, "recipe.loss"), ({"tp": 2, "strategy": "zero1", "gpus": 4}, "plan.tp"),
    ({"pp": 2, "model": {**LLAMA, "tied_embeddings": True}, "recipe": {"grad_accum": 2}}, "model.tied_embeddings"),
    ({"pp": 2, "recipe": {"grad_accum": 1}}, "recipe.grad_accum"), ({"pp": 2, "schedule": "zb-h1", "checkpointing": "full"}, "plan.checkpointing"),
    ({"pp": 2, "gpus": 4, "strategy": "fsdp", "reshard_after_forward": True, "recipe": {"grad_accum": 2}}, "plan.reshard_after_forward"),
])
def test_what_pytorch_cannot_combine_is_refused_by_name(given: dict[str, Any], field: str) -> None:
    with pytest.raises(PlanError) as error:
        dry_run(split_run(**given))
    assert error.value.field == field
