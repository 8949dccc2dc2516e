"""What must not grow, and what must not shrink, when one field of a run changes."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import built, examples, inputs, models, runs

from costmodel import Run, StepReport, build_run, predict
from costmodel.catalog.profiles import load_profile
from costmodel.explain import explain

STATES = ("parameters", "gradients", "master_weights", "optimizer")
EIGHTS = ("vocab", "ffn")
"""Dims that are rounded up to a multiple of 8 where padding must not matter."""


def state_bytes(report: StepReport) -> int:
    """Model state of the fullest rank, in its host's memory too, without buffers."""
    return max(sum(kept.get(c, 0) for kept in (r.memory.states, r.memory.host.states if r.memory.host else {}) for c in STATES)
               for r in report.roles if r.memory)


def traffic(report: StepReport) -> int:
    """Message bytes of a step over all ranks."""
    return sum(r.ranks * c.count * c.message_bytes for r in report.roles for c in r.collectives or () if c.group > 1)


def predicted(given: dict[str, Any], **changes: dict[str, Any]) -> StepReport:
    """The prediction of an input with fields of its sections changed."""
    merged = {key: {**section, **changes.get(key, {})} for key, section in given.items()}
    return predict(built(merged), scaling=False)


@examples(50)
@given(model=models(), gpus=st.sampled_from([1, 2, 4, 8]), data=st.data())
def test_state_memory_never_grows_with_the_zero_stage(model: dict[str, Any], gpus: int, data: st.DataObject) -> None:
    """PyTorch's dialect, same dtypes and ranks; dims are multiples of 8, for shards are padded, and step counters stay on the host."""
    shape = {**model, **{dim: -(-model[dim] // 8) * 8 for dim in EIGHTS}}
    precision = data.draw(st.sampled_from(["fp32", "bf16-pure", "bf16-mixed", "fp16-mixed"]))
    optimizer = data.draw(st.sampled_from(["sgd:foreach", "momentum:foreach", "adam:foreach", "adamw:for-loop"]))
    sizes = [state_bytes(predict(build_run(model=shape, cluster={"gpus": gpus, "gpu": "a100"}, plan={"zero": stage},
                                           recipe={"seq_len": 16, "precision": precision, "optimizer": optimizer}), scaling=False))
             for stage in range(4)]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("gpus", [2, 8, 64])
def test_deepspeeds_stages_hold_less_and_less_of_a_large_model(gpus: int) -> None:
    """Gradients counted, which its stages 1 and 2 keep until the update and stage 3 always. Of a small model stage 3 may hold more: it keeps what has
    no more than 100,000 elements whole beside the slices; and in fp32 every stage keeps a copy of its slice that stage 0 does not have."""
    runs = [build_run(model="llama-2-7b", cluster={"gpus": gpus}, plan={"framework": "deepspeed", "zero": stage}) for stage in range(4)]
    sizes = [sum(t.here for t in explain(run).terms if t.category in STATES) for run in runs]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[3] == pytest.approx(16 / gpus, rel=1e-3)


@examples(50)
@given(given_=inputs(st.sampled_from([1, 2, 4, 8])), more=st.sampled_from([2, 4]))
def test_more_ranks_never_hold_more_state_each(given_: dict[str, Any], more: int) -> None:
    given_["plan"].pop("dp_shard", None)
    gpus = given_["cluster"]["gpus"]
    given_["model"] |= {dim: -(-given_["model"][dim] // 64) * 64 for dim in EIGHTS}
    if given_["cluster"]["gpu"].startswith("cpu") or given_["plan"].get("bucket_bytes") or gpus * more > 8:
        return
    few, many = predicted(given_), predicted(given_, cluster={"gpus": gpus * more})
    if gpus == 1:  # a wrapper of one rank may hold less than the wrapper of many: it has no buckets
        return
    assert state_bytes(many) <= state_bytes(few)


@examples(60)
@given(given_=inputs(st.sampled_from([1, 2, 4, 8, 16, 64, 512])))
def test_twice_the_ranks_at_the_same_micro_batch_send_at_least_twice_as_much(given_: dict[str, Any]) -> None:
    given_["plan"].pop("dp_shard", None)
    if given_["cluster"]["gpu"].startswith("cpu"):
        given_["cluster"]["gpu"], given_["recipe"]["precision"] = "h100", "fp32"
    few, many = predicted(given_), predicted(given_, cluster={"gpus": 2 * given_["cluster"]["gpus"]})
    assert traffic(many) >= 2 * traffic(few)


@examples(60)
@given(runs(), st.sampled_from([0.1, 0.5]))
def test_a_slower_network_never_speeds_a_step_up(run: Run, slower: float) -> None:
    """Without contention: a transfer that starts later may overlap less compute, which is a gain of nanoseconds."""
    profile = load_profile(run).replace({"overlap.contention": 0.0})
    links = [k for k in profile.constants if k.startswith("link.") and k.rpartition(".")[2] in ("share", "nvls_share")]
    fast, slow = (predict(run, profile.replace({k: profile.value(k) * f for k in links}), scaling=False).step_s or 0.0 for f in (1.0, slower))
    assert slow >= fast * (1 - 1e-9)


@examples(60)
@given(runs(), st.sampled_from(["bandwidth.share", "matmul.fixed_s", "host.eager.forward_s", "host.multiplier", "host.collective_s"]))
def test_a_slower_machine_never_speeds_a_step_up(run: Run, constant: str) -> None:
    profile = load_profile(run)
    worse = profile.value(constant) * (0.5 if constant.endswith("share") else 2.0)
    fast, slow = (predict(run, p, scaling=False).step_s or 0.0 for p in (profile, profile.replace({constant: worse})))
    assert slow >= fast * (1 - 1e-9)


@examples(50)
@given(given_=inputs())
def test_another_micro_batch_never_shortens_the_step_or_lowers_the_peak(given_: dict[str, Any]) -> None:
    n = given_["recipe"]["grad_accum"]
    one, two = predicted(given_), predicted(given_, recipe={"grad_accum": n + 1})
    assert one.step_s is not None and two.step_s is not None
    assert two.step_s > one.step_s
    assert peak(two) >= peak(one)


def peak(report: StepReport) -> int:
    return max(r.memory.allocated.total_bytes for r in report.roles if r.memory)


@examples(50)
@given(given_=inputs())
def test_a_longer_sequence_never_needs_less(given_: dict[str, Any]) -> None:
    given_["recipe"]["seq_len"] = 32
    given_["recipe"]["loss_chunks"] = 1
    short, long = predicted(given_), predicted(given_, recipe={"seq_len": 64})
    assert peak(long) >= peak(short)
    assert (long.model_flops or 0) > (short.model_flops or 0)


@examples(50)
@given(given_=inputs())
def test_one_layer_more_never_needs_less(given_: dict[str, Any]) -> None:
    layers = given_["model"]["layers"]
    given_["plan"]["checkpointing"] = "none"
    given_["plan"].pop("max_live_params", None)
    small, large = predicted(given_), predicted(given_, model={"layers": layers + 1})
    assert peak(large) >= peak(small)
    assert traffic(large) >= traffic(small)
    assert large.step_s is not None and small.step_s is not None
    if (given_["plan"]["framework"], given_["plan"]["zero"]) != ("pytorch", 1):  # whose ranks may each update fewer tensors
        assert large.step_s > small.step_s


@examples(50)
@given(given_=inputs())
def test_optimizers_with_more_states_hold_more(given_: dict[str, Any]) -> None:
    held = [state_bytes(predicted(given_, recipe={"optimizer": name})) for name in ("sgd:foreach", "momentum:foreach", "adamw:foreach")]
    assert held == sorted(held)
    assert held[0] < held[2]


@pytest.mark.parametrize("gpus", [1, 8, 4096])
def test_the_states_of_all_ranks_sum_to_the_model_or_a_little_padding(gpus: int) -> None:
    """Sharded parameters over all ranks are the model: 16 bytes a parameter together, more by what rows are padded to."""
    report = predict(build_run(params="1B", cluster={"gpus": gpus, "gpu": "h100"}, plan={"zero": 3}, recipe={"optimizer": "adamw:foreach"}))
    params = build_run(params="1B").model.params
    assert 16 * params <= sum(r.ranks * state_bytes(report) for r in report.roles) <= 16 * params * 1.01 + 16 * 4096 * 200_000
