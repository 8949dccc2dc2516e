"""Laws of programs whose sequences are shared: they net to zero, free nothing that is not there, and fold as they expand."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import built, examples, inputs
from walks import net, walk_memory, walk_time

from costmodel import Run
from costmodel.catalog.profiles import load_profile
from costmodel.cost.prices import RunPrices
from costmodel.memory import memory_of
from costmodel.program.build import build
from costmodel.simulate import step_time


@st.composite
def sharing(draw: st.DrawFn) -> dict[str, Any]:
    """A run of any model, dialect and recipe that shares its sequences."""
    found = draw(inputs(st.sampled_from([2, 4, 8, 48])))
    plan, recipe, model = found["plan"], found["recipe"], found["model"]
    kind = draw(st.sampled_from(["ring", "allgather", "ulysses"] if plan["framework"] != "deepspeed" else ["ulysses"]))
    c = draw(st.sampled_from([2, 4] if found["cluster"]["gpus"] > 2 else [2]))
    plan |= {"cp": c, "cp_kind": kind, "cp_balance": draw(st.booleans())}
    plan.pop("dp_shard", None)
    if plan["checkpointing"] == "selective:op":
        plan["checkpointing"] = "full"
    recipe["seq_len"] = 2 * c * draw(st.integers(1, 8))
    if kind == "ulysses":
        model |= {"heads": 8, "kv_heads": draw(st.sampled_from([4, 8]))}
    else:
        found["cluster"]["gpu"] = "h100"
        recipe |= {"attention": "sdpa", "dropout": 0.0, "precision": draw(st.sampled_from(["bf16-mixed", "bf16-pure", "fp16-mixed"]))}
    return found


@examples(80)
@given(sharing().map(built))
def test_a_program_that_shares_sequences_nets_to_zero_and_folds_as_it_expands(run: Run) -> None:
    prices = RunPrices(run, load_profile(run))
    for role in build(run).roles:
        assert net(role.step) == {}
        assert net(role.first_step).keys() <= {"gradients", "optimizer"}
        folded, walked = memory_of(role), walk_memory(role)
        assert walked.lowest == {}
        assert (folded.peak.total_bytes, folded.activations) == (walked.peak, walked.activations)
        scanned, in_turn = step_time(role.step, prices), walk_time(role.step, prices)
        assert scanned.compute == pytest.approx(in_turn.compute, rel=1e-6)
        assert scanned.comm == pytest.approx(in_turn.comm, rel=1e-6)
