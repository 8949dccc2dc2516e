"""What one leaves with gives the same run and the same figures back, through the command line."""

import json
import shlex
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from costmodel import build_run, predict
from costmodel.changes import changed
from costmodel.cli.app import app
from costmodel.inputs import resolve
from costmodel.spec import Run
from tui.leave import as_toml, command_line, toml
from tui.presets import PRESETS

RUNS: dict[str, Run] = {
    **{preset.name: build_run(**preset.given) for preset in PRESETS},
    "odd": build_run(model="llama-3-8b", cluster={"gpus": 16}, plan={"strategy": "hsdp", "tp": 2, "bucket_mb": 12, "sync_each_micro_batch": False},
                     recipe={"optimizer": "adamw:foreach", "precision": {"base": "bf16-mixed", "reduce": "bf16"}, "dropout": 0.1, "grad_accum": 3}),
    "own model": build_run(model={"base": "llama-3-8b", "layers": 6, "name": 'my "own"'}, cluster={"gpus": 4, "gpu": "a100"}),
    "own cluster": changed(build_run(params="1B", cluster=build_run(params="1B", cluster={"gpus": 32}).cluster.model_dump() | {"name": "ours"}),
                           {"recipe.seq_len": 2048})}


def run_of(arguments: list[str]) -> Run:
    done = CliRunner().invoke(app, ["predict", *arguments, "--json"])
    assert done.exit_code in (0, 3), done.output
    return Run.model_validate(json.loads(done.stdout)["run"])


@pytest.mark.parametrize("name", RUNS)
def test_the_saved_file_is_the_run(name: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(as_toml(RUNS[name]), encoding="utf-8")
    assert run_of([str(path)]) == RUNS[name]


@pytest.mark.parametrize("name", RUNS)
def test_the_copied_command_is_the_run(name: str) -> None:
    command = shlex.split(command_line(RUNS[name]))
    assert command[:2] == ["costmodel", "predict"]
    assert run_of(command[2:]) == RUNS[name]


def test_a_saved_run_has_the_same_figures() -> None:
    run = RUNS["odd"]
    again = resolve(tomllib.loads(as_toml(run))).run
    assert predict(again).to_dict() == predict(run).to_dict()


def test_a_count_of_parameters_stays_a_count() -> None:
    assert "params = \"1B\"" in as_toml(RUNS["1B on 8 H100, DDP"])


def test_the_profile_goes_along() -> None:
    assert tomllib.loads(as_toml(RUNS["odd"], "a100_sxm_80gb"))["profile"] == "a100_sxm_80gb"
    assert "--profile a100_sxm_80gb" in command_line(RUNS["odd"], "a100_sxm_80gb")


@pytest.mark.parametrize("value", ["plain", 'quo"te', "back\\slash", "line\nbreak", "\x7f", 1, 1.5, 3e-05, True, [1, 2], {"a": [{"b": 1}]}])
def test_toml_reads_back(value: object) -> None:
    assert tomllib.loads(f"value = {toml(value)}")["value"] == value
