"""`execute dryrun` from the command line."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from typer.testing import CliRunner

import execute
from costmodel.report import report_from_dict
from execute.cli import app

FILE = """
[model]
layers = 1
hidden = 64
heads = 2
ffn = 128
vocab = 128
[cluster]
gpu = "h100_sxm"
gpus = 2
[plan]
strategy = "fsdp"
[recipe]
seq_len = 32
"""


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    path = tmp_path / "run.toml"
    path.write_text(FILE)
    return str(path)


def test_json_is_the_report(run_file: str) -> None:
    result = CliRunner().invoke(app, ["dryrun", run_file, "--json"])
    assert result.exit_code == 0
    report = report_from_dict(json.loads(result.stdout))
    assert (report.provenance, report.world_size) == ("dryrun", 2)


def test_text_names_the_peak_and_the_collectives(run_file: str) -> None:
    result = CliRunner().invoke(app, ["dryrun", run_file, "--set", "plan.strategy=ddp"])
    assert result.exit_code == 0
    assert "peak" in result.stdout and "all-reduce" in result.stdout


def test_values_are_laid_over_the_file(run_file: str) -> None:
    result = CliRunner().invoke(app, ["dryrun", run_file, "--gpus", "4", "--set", "recipe.precision=fp32", "--json"])
    report = report_from_dict(json.loads(result.stdout))
    assert report.world_size == 4
    assert {c.dtype for c in report.roles[0].collectives or ()} == {"fp32"}


def test_a_rank_outside_the_world_exits_2(run_file: str) -> None:
    result = CliRunner().invoke(app, ["dryrun", run_file, "--rank", "2"])
    assert result.exit_code == 2


def test_against_the_prediction_it_lays_both_side_by_side(run_file: str) -> None:
    pytest.importorskip("costmodel.prediction")
    result = CliRunner().invoke(app, ["dryrun", run_file, "--against", "predict", "--json"])
    compared = json.loads(result.stdout)
    assert result.exit_code == (0 if compared["within_tolerance"] else 4)
    assert {"between steps: parameters", "activations alone", "peak"} <= {row["name"] for row in compared["bytes"]}


def test_a_bad_plan_exits_2(run_file: str) -> None:
    result = CliRunner().invoke(app, ["dryrun", run_file, "--set", "plan.tp=3"])
    assert result.exit_code == 2


def test_without_torch_it_exits_2_and_says_what_to_install(run_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise execute.TorchMissing("Install it with: pip install torch")
    monkeypatch.setattr("execute.require_torch", missing)
    result = CliRunner().invoke(app, ["dryrun", run_file])
    assert result.exit_code == 2
    assert "pip install torch" in result.output
