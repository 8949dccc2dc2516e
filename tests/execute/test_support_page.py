"""docs/support.md: an oracle that a cell names has a case of that very strategy. Its yes and no are the program's own answers."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import test_deepspeed
import test_real_runs
import test_same_mathematics
import test_solo

from benchmarks import bytes as byte_cases
from costmodel import build_run
from costmodel.catalog import STRATEGIES

ROOT = Path(__file__).resolve().parents[2]


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("support_table", ROOT / "docs" / "support_table.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["support_table"] = module
    spec.loader.exec_module(module)
    return module


page = _load()


kind = page.way


def covered() -> dict[str, set[tuple[Any, ...]]]:
    """By oracle, the kinds of plans that it has a case of."""
    real = [*test_real_runs.ALONE.values()]
    for given in test_real_runs.STRATEGIES.values():
        plan = {k: v for k, v in given.items() if k not in ("recipe", "strategy")}
        real.append(test_real_runs.cpu_run(test_real_runs.LLAMA, given["strategy"], 2, given.get("recipe"), **plan))
    same = [build_run(**test_same_mathematics.given(case, gpus, max(case.grad_accum), case.optimizers[0]))
            for cases, gpus in ((test_same_mathematics.TWO, 2), (test_same_mathematics.FOUR, 4)) for case in cases.values()]
    return {"dry run": {kind(build_run(**case.given)) for case in byte_cases.cases()}, "real ranks": {kind(run) for run in real},
            "its dry run": {kind(run) for run, _ in test_solo.RUNS.values()}, "one process": {kind(run) for run in same},
            "real job": {kind(build_run(**given)) for given in test_deepspeed.HOLD.values()}}


COVERED = covered()


@pytest.mark.parametrize("row", page.ROWS, ids=lambda row: f"{row.strategy}, {row.how}")
def test_an_oracle_has_a_case_of_what_it_checks(row: Any) -> None:
    for yes, oracles in zip(page.answers(row.run()), page.oracles_of(row), strict=True):
        for oracle in oracles if yes else ():
            assert oracle not in COVERED or kind(row.run()) in COVERED[oracle], oracle


def test_every_strategy_has_a_row() -> None:
    assert {row.strategy for row in page.ROWS} | {"zero3"} >= set(STRATEGIES)


def test_a_strategy_is_predicted_as_the_catalogue_says() -> None:
    for name, strategy in STRATEGIES.items():
        rows = [page.answers(row.run())[0] for row in page.ROWS if row.strategy == name]
        assert any(rows) is strategy.predicted, name


def test_oracles_are_where_the_page_says() -> None:
    for oracle in page.ORACLES.values():
        assert (ROOT / oracle.place).exists(), oracle.place
