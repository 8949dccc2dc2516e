"""What an explanation says is held and sent, against the program itself, performed on fake tensors."""

from collections import Counter
from typing import Any

import pytest

pytest.importorskip("torch")

from small_runs import LLAMA, small_run

from costmodel.explain import explain
from execute.dryrun import dry_run

MIXTURE = {**LLAMA, "moe": {"experts": 4, "top_k": 2, "expert_ffn": 128}}


@pytest.mark.oracle
@pytest.mark.parametrize("given", [
    {"strategy": "fsdp", "gpus": 4}, {"strategy": "ddp", "gpus": 4}, {"strategy": "zero1", "gpus": 4}, {"strategy": "zero2", "gpus": 4},
    {"strategy": "fsdp", "gpus": 4, "ep": 2, "model": MIXTURE},
    {"strategy": "fsdp", "gpus": 4, "tp": 2}, {"strategy": "ddp", "gpus": 2, "tp": 2, "sequence_parallel": True}], ids=str)
def test_state_and_collectives_are_those_of_the_dry_run(given: dict[str, Any]) -> None:
    run = small_run(**given)
    e = explain(run)
    seen = dry_run(run, e.example_rank).roles[0]
    assert {h.name: h.here_bytes for h in e.holdings if h.name not in ("batch", "activations") and h.here_bytes} == {
        name: n for name, n in seen.memory.states.items() if name in ("parameters", "gradients", "master_weights", "optimizer")}
    said, done = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for m in e.movements:
        said[m.axis, m.collective] += m.count * m.message_bytes
    for c in seen.collectives:
        if c.group > 1:
            done[c.axis, c.kind] += c.count * c.message_bytes
    assert said == done
