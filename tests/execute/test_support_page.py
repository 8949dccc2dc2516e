"""docs/support.md says yes where the code does it, and no where it refuses."""

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from small_runs import LLAMA, cpu_run
from test_same_mathematics import FOUR, TWO, given

from costmodel.inputs import build_run
from costmodel.prediction import predict
from costmodel.records import read_records
from costmodel.spec import PlanError, Run
from execute.strategies import strategy_name
from execute.support import Mode, check_supported

ROOT = Path(__file__).resolve().parents[2]
MODES: dict[str, Mode] = {"dry-run": "dryrun", "one device": "solo", "gloo": "run"}
MOE = {**LLAMA, "moe": {"experts": 4, "top_k": 2, "expert_ffn": 128}}


def example(strategy: str) -> Run:
    """A small run of a strategy in PyTorch's dialect, or in the dialect that has it."""
    plans: dict[str, dict[str, Any]] = {
        "megatron-distributed-optimizer": {"strategy": "megatron"}, "tp": {"strategy": "ddp", "tp": 2},
        "sequence-parallel": {"strategy": "ddp", "tp": 2, "sequence_parallel": True}, "pp": {"strategy": "ddp", "pp": 2},
        "cp": {"strategy": "ddp", "cp": 2}, "ep": {"strategy": "fsdp", "ep": 2}, "hsdp": {"strategy": "fsdp", "dp_replicate": 2, "dp_shard": 2},
        "muon-distributed": {"strategy": "zero1", "framework": "nanochat"}}
    plan = dict(plans.get(strategy, {"strategy": strategy}))
    ranks = {"single": 1, "hsdp": 4}.get(strategy, 2)
    recipe: dict[str, Any] = {"grad_accum": 2} if strategy == "pp" else {"optimizer": "muon:foreach"} if strategy == "muon-distributed" else {}
    return cpu_run(MOE if strategy == "ep" else LLAMA, plan.pop("strategy"), ranks, recipe, **plan)


def rows() -> dict[str, dict[str, str]]:
    """The first table of the page: strategy -> column -> cell."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in (ROOT / "docs" / "support.md").read_text().splitlines() if line.startswith("|")]
    head = lines[0]
    return {re.sub("`", "", line[0]): dict(zip(head, line, strict=True)) for line in lines[2:] if len(line) == len(head) and line[0].startswith("`")}


def does(strategy: str, what: Any) -> bool:
    try:
        what(example(strategy))
    except PlanError:
        return False
    return True


@pytest.mark.parametrize("strategy", rows())
def test_what_is_predicted_is_said_so(strategy: str) -> None:
    assert rows()[strategy]["predicted"].startswith("yes") == does(strategy, predict)


@pytest.mark.parametrize("column", MODES)
@pytest.mark.parametrize("strategy", rows())
def test_what_is_performed_is_said_so(strategy: str, column: str) -> None:
    assert (rows()[strategy][column] != "no") == does(strategy, lambda run: check_supported(run, MODES[column]))


def test_what_runs_on_gloo_is_held_to_one_process() -> None:
    """Every strategy of the column is among those whose gradients and losses tests/execute/test_same_mathematics.py compares."""
    cases = [build_run(**given(case, gpus, case.grad_accum[0], "adamw")) for cases, gpus in ((TWO, 2), (FOUR, 4)) for case in cases.values()]
    held = {(strategy_name(run), run.plan.sequence_parallel, run.plan.dp_replicate > 1 and run.plan.zero == 3) for run in cases} | {("single", False, False)}
    for strategy, row in rows().items():
        if row["gloo"] != "no":
            run = example(strategy)
            assert (strategy_name(run), run.plan.sequence_parallel, strategy == "hsdp") in held, strategy


def test_nccl_is_claimed_where_a_record_of_it_is_kept() -> None:
    measured = ROOT / "benchmarks" / "measured"
    kept = [record for _, record in read_records(measured) if record.provenance == "run"] if measured.is_dir() else []
    on_gpus = {strategy_name(record.run) for record in kept if record.environment is not None and "nccl" in record.environment.versions}
    for strategy, row in rows().items():
        if row["NCCL"] == "yes":
            assert strategy_name(example(strategy)) in on_gpus, strategy
