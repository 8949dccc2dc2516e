"""Files, flags and --set: which wins, and what they mean."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from calling import call

from costmodel.cli.options import FLAGS, as_flags, collect, flag_of, toml_scalar

TOML = 'params = "1B"\n[cluster]\ngpus = 8\n[plan]\nzero = 1\n[recipe]\nmicro_batch = 2\nseq_len = 2048\n'


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(TOML, encoding="utf-8")
    return path


def collected(run_file: Path | None = None, settings: tuple[str, ...] = (), **flags: Any) -> Any:
    return collect(run_file, {name.replace("__", "."): value for name, value in flags.items()}, list(settings))


def test_flags_override_the_file_and_set_overrides_both(run_file: Path) -> None:
    given = collected(run_file, ("recipe.micro_batch=8", "plan.tp=2"), recipe__micro_batch="4", plan__zero="3")
    assert given.mapping == {"params": "1B", "cluster": {"gpus": 8}, "plan": {"zero": 3, "tp": 2}, "recipe": {"micro_batch": 8, "seq_len": 2048}}


@pytest.mark.parametrize("suffix", ["toml", "yaml", "json"])
def test_the_three_formats_say_the_same(suffix: str, tmp_path: Path) -> None:
    texts = {"toml": TOML + 'optimizer = {name = "adamw", lr = 3e-4}\n',
             "yaml": "params: 1B\ncluster: {gpus: 8}\nplan: {zero: 1}\nrecipe:\n  micro_batch: 2\n  seq_len: 2048\n  optimizer: {name: adamw, lr: 3e-4}\n",
             "json": '{"params": "1B", "cluster": {"gpus": 8}, "plan": {"zero": 1}, "recipe": {"micro_batch": 2, "seq_len": 2048, '
                     '"optimizer": {"name": "adamw", "lr": 3e-4}}}'}
    path = tmp_path / f"run.{suffix}"
    path.write_text(texts[suffix], encoding="utf-8")
    run = collected(path).resolve().run
    assert (run.plan.zero, run.recipe.micro_batch, run.recipe.seq_len, run.recipe.optimizer.lr) == (1, 2, 2048, 3e-4)


def test_a_model_flag_replaces_the_files_params(run_file: Path) -> None:
    assert collected(run_file, model="llama-3-8b").resolve().run.model.name == "llama-3-8b"


def test_a_strategy_and_a_stage_replace_one_another_across_file_and_flags(run_file: Path, tmp_path: Path) -> None:
    assert collected(run_file, plan__strategy="fsdp").resolve().run.plan.zero == 3
    other = tmp_path / "other.toml"
    other.write_text('params = "1B"\n[cluster]\ngpus = 8\n[plan]\nstrategy = "ddp"\n', encoding="utf-8")
    assert collected(other, plan__zero="3").resolve().run.plan.zero == 3
    assert collected(other, ("plan.zero=2",)).resolve().run.plan.zero == 2


def test_set_changes_one_field_of_a_word(run_file: Path) -> None:
    run = collected(run_file, ("model.layers=4", "recipe.precision.reduce=bf16", "plan.checkpointing.every=2"), model="llama-3-8b",
                    recipe__precision="bf16-mixed", plan__checkpointing="full").resolve().run
    assert (run.model.layers, run.model.hidden) == (4, 4096)
    assert (run.recipe.precision.parameter, run.recipe.precision.reduce) == ("fp32", "bf16")
    assert (run.plan.checkpointing.mode, run.plan.checkpointing.every) == ("full", 2)


@pytest.mark.parametrize(("text", "value"), [("4", 4), ("0.5", 0.5), ("true", True), ('"4"', "4"), ("[1, 2]", [1, 2]), ("fsdp", "fsdp"), ("1B", "1B"),
                                             ("", ""), ("1\nx = 2", "1\nx = 2"), ("2026-01-01", "2026-01-01")])
def test_a_set_value_is_toml_where_it_can_be_and_else_text(text: str, value: object) -> None:
    assert toml_scalar(text) == value


def test_every_flag_of_a_run_is_offered() -> None:
    shown = call("predict --help").stdout
    for flag in FLAGS:
        assert flag.name in shown
    assert "--set FIELD=VALUE" in shown


def test_every_flag_sets_a_field_that_exists() -> None:
    values = {"params": "1B", "model": "llama-3-8b", "cluster.gpu": "h100", "cluster.name": "dgx_h100", "plan.strategy": "fsdp", "plan.zero": "3",
              "plan.framework": "pytorch", "plan.schedule": "1f1b", "plan.checkpointing": "full", "recipe.precision": "bf16", "recipe.optimizer": "adamw",
              "recipe.attention": "sdpa", "plan.cp_kind": "ring", "recipe.loss": "eager", "profile": "h100_sxm", "recipe.dropout": "0.1",
              "cluster.link_factors": "inter=0.5", "plan.sequence_parallel": False, "recipe.compile": True}
    for flag in FLAGS:
        flags = {flag.field: values.get(flag.field, "1")}
        given = collect(None, {"params": "1B", **flags} if flag.field != "model" else flags, [])
        given.resolve()


def test_an_option_name_for_every_assumed_field() -> None:
    assert flag_of("recipe.seq_len") == "--seq-len"
    assert flag_of("recipe.cuda_graphs") == "--set recipe.cuda_graphs"


def test_advice_is_given_in_flags_where_there_are_some() -> None:
    assert as_flags('Use zero = 3, or name = "dgx_h100".') == "Use --zero 3, or --cluster dgx_h100."
    assert as_flags("Use sequence_parallel = false.") == "Use --no-sequence-parallel."
    assert as_flags("Use pp x virtual_stages <= 4, or loss_chunks = 8.") == "Use pp x virtual_stages <= 4, or loss_chunks = 8."


def test_a_prediction_can_be_given_back_as_a_run(tmp_path: Path) -> None:
    first = tmp_path / "first.json"
    assert call(f"predict --params 1B --gpus 8 --strategy hsdp --micro-batch 2 -o {first}").exit_code == 0
    again = call(f"predict {first} --json")
    assert again.exit_code == 0
    assert json.loads(again.stdout)["run"] == json.loads(first.read_text())["run"]


@pytest.mark.parametrize(("flags", "expected"), [
    ("", (16, "h100_sxm", 3, 16, 1, 4, 64)), ("--gpu a100", (16, "a100_sxm_80gb", 3, 16, 1, 4, 64)), ("--gpus 32", (32, "h100_sxm", 3, 32, 1, 4, 128)),
    ("--nodes 4", (32, "h100_sxm", 3, 32, 1, 4, 128)), ("--tp 2", (16, "h100_sxm", 3, 8, 1, 4, 32)), ("--strategy ddp", (16, "h100_sxm", 0, 1, 1, 4, 64)),
    ("--zero 1", (16, "h100_sxm", 1, 16, 1, 4, 64)), ("--micro-batch 2", (16, "h100_sxm", 3, 16, 2, 4, 128)),
    ("--global-batch 128", (16, "h100_sxm", 3, 16, 1, 8, 128)), ("--gpus 32 --global-batch 256", (32, "h100_sxm", 3, 32, 1, 8, 256))])
def test_flags_change_an_answer_that_is_given_back_as_a_run(tmp_path: Path, flags: str, expected: tuple[Any, ...]) -> None:
    """GPUs, device, ZeRO stage, dp_shard, micro-batch, accumulation, global batch."""
    path = tmp_path / "answer.json"
    assert call(f"predict --model llama-3-8b --gpus 16 --strategy fsdp --global-batch 64 -o {path}").exit_code == 0
    run = json.loads(call(f"predict {path} {flags} --json").stdout)["run"]
    cluster, plan, recipe = run["cluster"], run["plan"], run["recipe"]
    assert (cluster["gpus"], cluster["accelerator"]["name"], plan["zero"], plan["dp_shard"], recipe["micro_batch"], recipe["grad_accum"],
            recipe["global_batch"]) == expected


@pytest.mark.parametrize(("words", "code", "said"), [
    ("predict --params 1B", 0, "IN SHORT"), ("list optimizers", 0, "adamw"), ("--help", 0, "waterfall"), ("pedict", 2, "Did you mean 'predict'?"),
    ("--version", 0, "costmodel")])
def test_the_script_answers_with_one_command_or_all(words: str, code: int, said: str) -> None:
    done = subprocess.run([sys.executable, "-m", "costmodel", *words.split()], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr
