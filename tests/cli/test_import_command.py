"""`costmodel import`: a run file from other programs' files, and what is wrong with them in one message."""

import json
import tomllib
from pathlib import Path

import pytest
from calling import call, error

FILES = Path(__file__).parent.parent / "foreign" / "files"
CONFIG = {"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 8192,
          "vocab_size": 128256, "tie_word_embeddings": True}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "Llama-3.2-1B" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(CONFIG))
    return path


def test_the_run_file_is_predicted_with_what_was_missing(tmp_path: Path) -> None:
    out = tmp_path / "run.toml"
    made = call(f"import {FILES / 'neox-20b.yml'} -o {out}")
    assert made.exit_code == 0 and "missing: cluster.gpus" in made.stderr and f"wrote {out}" in made.stderr
    assert call(f"predict {out} --gpus 96 --gpu a100_40gb").exit_code == 0
    assert "# Read from neox-20b.yml (GPT-NeoX)." in out.read_text()


def test_files_together_and_a_field_by_hand(config: Path) -> None:
    done = call(f"import {config} {FILES / 'ds-zero2.json'} --set cluster.gpus=8 --set plan.offload=none")
    given = tomllib.loads(done.stdout)
    assert given["plan"] == {"framework": "deepspeed", "zero": 2, "overlap_grad_reduce": True, "offload": "none"}
    assert given["model"]["layers"] == 16 and given["cluster"] == {"gpus": 8} and "missing" not in done.stderr


def test_variables_of_a_script_come_from_outside() -> None:
    given = tomllib.loads(call(f"import {FILES / 'mixtral.sh'} --env SLURM_NNODES=4").stdout)
    assert given["cluster"]["gpus"] == 32


def test_a_flag_takes_a_config(config: Path) -> None:
    """The same answer as with the catalogue's model, whose shape it is."""
    reports = [json.loads(call(f"predict --model {model} --gpus 8 --zero 3 --json").stdout)["report"] for model in (config, "llama-3.2-1b")]
    assert reports[0] == reports[1]


def test_settings_without_a_field_are_warned_of(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text("torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --hidden-size 512 --num-attention-heads 8 --use-torch-fsdp2\n")
    done = call(f"import {script}")
    assert done.exit_code == 0 and "warning: no field of a run says --use-torch-fsdp2" in done.stderr and "# NO FIELD FOR" in done.stdout


@pytest.mark.parametrize(("name", "text", "says"), [
    ("a.json", "{", "not valid JSON"), ("a.json", "[1]", "no table of settings"), ("a.json", '{"x": 1}', "none of the programs"),
    ("a.toml", "[plan]\ntp = 2", "run file of costmodel already"), ("a.sh", "echo hello", "no command in it"), ("a.yaml", "a: [", "not valid YAML"),
    ("config.json", '{"model_type": "mamba2"}', "not known here"), ("config.json", '{"model_type": "llama", "hidden_size": 0}', "whole number above 0")])
def test_a_file_that_cannot_be_read_is_one_message(tmp_path: Path, name: str, text: str, says: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    said = error(f"import {path}")
    assert says in said and str(path) in said


@pytest.mark.parametrize(("line", "says"), [
    ("import nowhere.json", "no such file"), ("import {config} -o run.yaml", "written as TOML"), ("import {config} --set layers", "FIELD=VALUE"),
    ("import {config} --env X", "NAME=VALUE"), ("predict --model nowhere.json", "no such file"),
    ("predict --model {zero} --gpus 8", "does not say a whole model")])
def test_bad_input_is_one_message(config: Path, line: str, says: str) -> None:
    assert says in error(line.format(config=config, zero=FILES / "ds-zero2.json"))
