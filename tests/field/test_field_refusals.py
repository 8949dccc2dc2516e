"""Runs that cannot be, and what they are told. Each test names its case (C76) and public source."""

from typing import Any

import pytest
from asked import run_of

from costmodel import PlanError, predict


@pytest.mark.parametrize(("model", "tp", "message"), [
    ({"kv_heads": 2}, 4, "plan.tp = 4: model.kv_heads = 2 must be a multiple of tp. Use tp = 2."),
    ({"hidden": 3328, "heads": 52}, 8, "plan.tp = 8: model.heads = 52 must be a multiple of tp. Use tp = 4.")])
def test_heads_must_divide_over_tp(model: dict[str, Any], tp: int, message: str) -> None:
    """C76, pytorch/torchtitan#2577, deepspeedai/DeepSpeed#3634: refused with both numbers, not a reshape error or a fraction of a head."""
    with pytest.raises(PlanError) as refused:
        run_of(model={"layers": 4, "hidden": 256, "heads": 8, "ffn": 512, "vocab": 1024, **model}, gpus=tp, plan={"tp": tp})
    assert str(refused.value) == message


def test_latent_attention_has_no_kv_heads_to_divide() -> None:
    """C76: tp = 8 divides the query heads of DeepSeek-V3, and nothing else is asked."""
    assert run_of(model="deepseek-v3", gpus=8, gpu="h100", plan={"tp": 8, "framework": "megatron"}).plan.tp == 8


def test_experts_need_ranks_that_they_divide() -> None:
    """F11, NVIDIA/Megatron-LM, examples/mixtral/train_mixtral_8x7b_distributed.sh: pp 4, ep 8. The default of one node leaves dp = 2, which 8 experts' ranks do
    not divide; four nodes do."""
    def mixtral(gpus: int) -> Any:
        return run_of(model="mixtral-8x7b", gpus=gpus, gpu="h100", plan={"framework": "megatron", "zero": 1, "pp": 4, "ep": 8}, micro_batch=1, global_batch=256)

    with pytest.raises(PlanError) as refused:
        mixtral(8)
    assert str(refused.value) == "plan.ep = 8: ep must divide dp_shard x cp = 2. Use ep = 2."
    assert mixtral(32).model.params == pytest.approx(46.70e9, abs=0.01e9)


@pytest.mark.parametrize(("named", "given"), [
    ("dualpipev", {"plan": {"framework": "megatron", "pp": 2, "schedule": "dualpipev", "virtual_stages": 2}}),
    ("zb-h1", {"plan": {"framework": "megatron", "pp": 2, "schedule": "zb-h1"}}),
    ("offload", {"plan": {"framework": "deepspeed", "zero": 3, "offload": "optimizer"}})])
def test_what_other_cases_wait_for_is_refused_by_name(named: str, given: dict[str, Any]) -> None:
    """docs/accuracy.md lists the cases. Once one of these is predicted, its cases can be tests."""
    with pytest.raises(PlanError, match=named):
        predict(run_of(**{"model": "llama-3-8b", "gpus": 8, "gpu": "h100", **given}), scaling=False)
