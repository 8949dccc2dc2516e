"""`execute dryrun` from the command line."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from typer.testing import CliRunner

import execute
from costmodel.report import report_from_dict
from execute.cli import app, read_run

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
    run = read_run(run_file, ["cluster.gpus=4", "recipe.precision=fp32"])
    assert (run.cluster.gpus, run.recipe.precision.name) == (4, "fp32")


def test_a_bad_plan_exits_2(run_file: str) -> None:
    result = CliRunner().invoke(app, ["dryrun", run_file, "--set", "plan.tp=3"])
    assert result.exit_code == 2


def test_without_torch_it_exits_2_and_says_what_to_install(run_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise execute.TorchMissing("Install it with: pip install torch")
    monkeypatch.setattr("execute.cli.require_torch", missing)
    result = CliRunner().invoke(app, ["dryrun", run_file])
    assert result.exit_code == 2
    assert "pip install torch" in result.output
