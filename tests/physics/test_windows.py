"""Sliding windows: pairs counted one by one, the FLOPs that trainers count, what stays, what gets faster, and what is refused."""

from typing import Any

import pytest
from steps import LLAMA, memory, step

from costmodel import PlanError, build_run, predict
from costmodel.catalog.profiles import load_profile
from costmodel.cost.compute import ComputeCosts, compute_costs
from costmodel.program.build import build
from costmodel.program.ir import expand

WIDE: dict[str, Any] = {**LLAMA, "hidden": 1024}
MISTRAL = "mistral-7b-v0.1"


def kernel(window: int, seq: int = 4096, **recipe: Any) -> Any:
    """The attention kernel of a layer's forward."""
    run = build_run(model={**WIDE, "sliding_window": window}, cluster={"gpu": "h100"}, recipe={"seq_len": seq, "attention": "fa2", **recipe})
    return next(op for block in expand(build(run).roles[0].step) for op in block.ops if op.kind == "attention" and not op.dims[-1])


def costs_of(seq: int) -> ComputeCosts:
    run = build_run(model=WIDE, cluster={"gpu": "h100"}, recipe={"seq_len": seq})
    return compute_costs(run.cluster.accelerator, load_profile(run), run.recipe)


@pytest.mark.parametrize("window", [64, 1000, 2048, 4000])
def test_the_kernel_computes_the_pairs_that_are_seen(window: int) -> None:
    """Counted token by token: min(i + 1, w) keys for token i; a smooth count is within half a pair a token, as s²/2 is without a window."""
    seq = 4096
    pairs = sum(min(i + 1, window) for i in range(seq))
    assert kernel(window).flops / (4.0 * 1024) == pytest.approx(pairs, abs=seq / 2)


def test_model_flops_are_those_that_trainers_count() -> None:
    """C64, PrimeIntellect-ai/prime-rl#778, and OLMo-core's num_flops_per_token: 6 a parameter of a matrix, and 12·L·a·d·min(w, s) a token."""
    for seq, seen in ((4096, 4096), (16384, 4096)):
        report = predict(build_run(model=MISTRAL, cluster={"gpu": "h100", "gpus": 8}, plan={"strategy": "fsdp"}, recipe={"seq_len": seq}), scaling=False)
        matrices = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 32000 * 4096
        assert report.model_flops == pytest.approx((6 * matrices + 12 * 32 * 4096 * seen) * report.tokens_per_step, rel=1e-9)


def test_a_window_saves_time_and_no_bytes() -> None:
    """FlashAttention keeps q, k, v, its output and log-sum-exps, of every token, whatever it sees."""
    reports = [step({**WIDE, **({"sliding_window": w} if w else {})}, gpu="h100", seq_len=16384, attention="fa2") for w in (0, 8192, 2048, 512)]
    assert len({memory(r).allocated.total_bytes for r in reports}) == 1
    times = [r.step_s for r in reports]
    assert times == sorted(times, reverse=True) and times[0] > 1.5 * times[-1]


def test_a_window_of_the_whole_sequence_is_none() -> None:
    costs = costs_of(4096)
    assert costs.op_s(kernel(4095)) == pytest.approx(costs.op_s(kernel(4096)), rel=0.002)
    assert kernel(4096) == kernel(8192)


def test_short_windows_pay_for_whole_blocks() -> None:
    """A window of one block of 128 queries touches two blocks of keys: twice the pairs that it needs, at least."""
    costs = costs_of(32768)
    short, long = kernel(128, 32768, micro_batch=8), kernel(16384, 32768, micro_batch=8)
    rate = [op.flops / (costs.op_s(op) - costs.attention_fixed_s) for op in (short, long)]
    assert rate[0] < rate[1] / 2


def test_eager_attention_computes_every_pair() -> None:
    some, every = (step({**LLAMA, **window}, gpu="h100", seq_len=1024, attention="eager") for window in ({"sliding_window": 64}, {}))
    assert some.step_s == every.step_s
    assert memory(some).allocated == memory(every).allocated


@pytest.mark.parametrize(("recipe", "plan", "named"), [
    ({"attention": "sdpa"}, {}, "scaled_dot_product_attention"), ({"attention": "cudnn"}, {}, "cuDNN"), ({"attention": "fa1"}, {}, "FlashAttention-1"),
    ({"causal": False}, {}, "looks ahead"), ({}, {"strategy": "fsdp", "cp": 2}, "ring")])
def test_what_has_no_windows_is_refused_by_name(recipe: dict[str, Any], plan: dict[str, Any], named: str) -> None:
    run = build_run(model=MISTRAL, cluster={"gpu": "h100", "gpus": 2}, plan=plan or {"strategy": "fsdp"}, recipe={"seq_len": 8192, **recipe})
    with pytest.raises(PlanError, match=named):
        predict(run)


def test_a_window_needs_a_pattern_that_slides() -> None:
    with pytest.raises(PlanError, match="every layer sees all"):
        build_run(model={**LLAMA, "sliding_window": 64, "attention_pattern": "global"})
    with pytest.raises(PlanError, match="letters beside"):
        build_run(model={**LLAMA, "sliding_window": 64, "window_pattern": "SXL"})


def test_megatrons_kernel_has_windows() -> None:
    """Transformer Engine's attention takes window_size; the word sdpa is Megatron's own choice there."""
    runs = [build_run(model={**WIDE, "sliding_window": w}, cluster={"gpu": "h100"}, plan={"framework": "megatron"},
                      recipe={"seq_len": 8192, "attention": "sdpa"}) for w in (512, 8192)]
    short, whole = (predict(run, scaling=False) for run in runs)
    assert short.step_s < whole.step_s
