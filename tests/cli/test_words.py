"""Moments in words: none that a prediction names stays in code."""

import re

import pytest

from costmodel import build_run, predict
from costmodel.render.words import moment


@pytest.mark.parametrize(("name", "words"), [
    ("backward of head: loss.log_softmax.grad", "backward of the loss (log-softmax)"),
    ("backward of layer: mlp.gate.dgrad", "backward of a layer, feed-forward gate: input gradient"),
    ("forward of layer: attention:fa2", "forward of a layer, attention (fa2)"),
    ("backward of head: loss.chunked.chunk0.wgrad", "backward of the loss (head and loss by chunks): chunk 1, weight gradient"),
    ("backward of embedding: fsdp.reduce_copy_in(layer)", "backward of the embedding: gradients copied for the reduce-scatter"),
    ("optimizer of update: optimizer.host", "optimizer step: optimizer state created")])
def test_an_operation_reads_as_words(name: str, words: str) -> None:
    assert moment(name) == words


@pytest.mark.parametrize("name", ["at rest", "backward of the head, last micro-batch", "backward of layer: new.kind.of_op", "nothing: at.all"])
def test_what_is_not_known_stays_as_it_is(name: str) -> None:
    assert moment(name) == name


PLANS = (
    {}, {"zero": 1}, {"zero": 2}, {"zero": 3}, {"zero": 3, "checkpointing": "full"}, {"zero": 3, "tp": 2, "sequence_parallel": True},
    {"framework": "deepspeed", "zero": 2}, {"framework": "deepspeed", "zero": 3}, {"framework": "megatron", "zero": 1}, {"framework": "megatron", "pp": 2})


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("recipe", [{}, {"attention": "eager", "dropout": 0.1, "micro_batch": 2}, {"loss": "bf16", "optimizer": "adamw:foreach"}])
def test_every_moment_of_a_prediction_has_words(plan: dict[str, object], recipe: dict[str, object]) -> None:
    report = predict(build_run(model="llama-3.2-1b", cluster={"gpus": 8}, plan=plan, recipe=recipe))
    for role in report.roles:
        assert role.memory
        for peak in (role.memory.allocated, *role.memory.phases.values()):
            assert not re.search(r"\w[._]\w", moment(peak.moment)), peak.moment
