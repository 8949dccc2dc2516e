"""Bad input ends in one message that names the flag or the file, and exit code 2; the unexpected in exit code 1."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from calling import ASKED, call, error
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from costmodel.cli.app import app
from costmodel.cli.options import FLAGS


@pytest.mark.parametrize(("line", "text"), [
    ("", "error: model: a run needs a model. Use --params 1B, or --model llama-3-8b."),
    ("--params 1B --zero 4", "error: --zero 4: a ZeRO stage is 0 (DDP), 1, 2 or 3 (FSDP). Use --zero 3."),
    ("--params 1B --zero three", "error: --zero three: must be a whole number. Use --zero 3."),
    ("--params 1B --gpus 12", "error: --gpus 12: more than one node is used whole: gpus must be a multiple of gpus_per_node = 8. Use --gpus 8 or 16."),
    ("--params 1B --gpus 8 --tp 3", "error: plan: tp x pp x cp = 3: it must divide the 8 GPUs. Use --gpus 9."),
    ("--params 7B --gpus 8 --strategy zero1 --tp 2",
     "error: --tp 2: PyTorch's tensor parallelism goes with FSDP or HSDP alone. Use --strategy fsdp, or --framework megatron."),
    ("--params 7B --gpus 8 --strategy ddp --pp 8 --global-batch 4 --precision bf16-pure",
     "error: --global-batch 4: it makes grad_accum = 4, and PyTorch's 1F1B needs at least as many micro-batches as stages, 8. "
     "Use --global-batch 8, or --schedule gpipe."),
    ("--params 1B --zero 3 --strategy ddp", "error: --zero 3: strategy ddp means zero = 0. Leave zero out, or the strategy."),
    ("--params 1B --model llama-3-8b", "error: --params 1B and --model llama-3-8b: a run has one model. Give one of the two."),
    ("--params 1B --attention fa3 --gpu a100", "error: --attention fa3: FlashAttention-3 is for Hopper, and a100_sxm_80gb is ampere. "
                                               "Use --attention fa2 or cudnn."),
    ("--params 1B --gpu a100 --precision fp8", "error: --precision fp8: a100_sxm_80gb has no fp8 arithmetic (it has fp32, tf32, fp16, bf16). "
                                               "Use --precision bf16-mixed."),
    ("--params 1B --attention fa2 --gpu v100", "error: --attention fa2: this kernel needs Ampere or newer, and v100_sxm2_16gb is volta. "
                                               "Use --attention sdpa or eager."),
    ("--params 1B --attention fa1 --gpu v100", "error: --attention fa1: this kernel needs Turing or newer, and v100_sxm2_16gb is volta."),
    ("--model gpt2-large --gpus 512 --tp 16", "error: --tp 16: model.heads = 20 must be a multiple of tp. Use --tp 4."),
    ("--params 1B --strategy tp", "error: --strategy tp: has a field of its own, and goes with a strategy. Use --tp 2, say."),
    ("--params 1B --set recipe.optimizer.betas=[1,2,3]", "error: --set recipe.optimizer.betas=[1,2,3]: it takes 2 items, and 3 are given."),
    ("--params 1B --set model.layers=0", "error: --set model.layers=0: it follows from params = 1B, which is given as well. Give one of the two."),
    ("--params 1B --gpus 8 --global-batch 33", "error: --global-batch 33: it must be a multiple of micro_batch 1 x dp 8 = 8 sequences. Use 32 or 40."),
    ("--params 1B --sequence-parallel", "error: --sequence-parallel: sequence parallelism splits over the tp group, and tp = 1. "
                                        "Use tp > 1, or --no-sequence-parallel."),
    ("--params 1B --dropout 1.5", "error: --dropout 1.5: a dropout probability is below 1. Use --dropout 0.1."),
    ("--params 1B --set plan.tp", "error: --set plan.tp: it must be FIELD=VALUE. Write it like --set plan.tp=4."),
    ("--params 1B --set plan.tpp=4", "error: --set plan.tpp=4: there is no such field. Did you mean tp?"),
    ("--params 1B --set tp=4", "error: --set tp=4: there is no such field. Did you mean plan.tp?"),
    ("--params 1B --set plan.tp=3", "error: --set plan.tp=3: model.heads = 32 must be a multiple of tp. Use tp = 2 or 4."),
    ("--params 1B --set plan.zero.x=1 --zero 3", "error: --set plan.zero.x=1: plan.zero = 3 is a value, not a table of fields. "
                                                "Use --set plan.zero=VALUE."),
    ("--params 1B --profile nowhere.toml", "error: --profile nowhere.toml: there is no such file."),
    ("--params 1B -o /nowhere/x.json", "error: -o /nowhere/x.json: there is no directory /nowhere. Create it first."),
    ("nowhere.toml", "error: nowhere.toml: there is no such file. Give the path of a .toml, .yaml or .json file, or flags alone."),
    ("README.md", "error: README.md: a run file ends in .toml, .yaml or .json. Rename it to say which it is."),
    ("train.sh", "error: train.sh: a run file ends in .toml, .yaml or .json. Rename it to say which it is; `costmodel import` reads launch scripts."),
    ("--params 1B --set model.params=1B", "error: --set model.params=1B: there is no such field. params stands above the tables, not in one."),
    ("--params 1B --batch-tokens 4M --global-batch 8", "error: --batch-tokens 4M: global_batch is given as well, and with it the batch."),
])
def test_a_mistake_on_the_command_line_names_the_flag(line: str, text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert error(f"predict {line}").startswith(text)


@pytest.mark.parametrize("name", ["--gpu h1000", "--model lama-3-8b", "--optimizer adm", "--attention fa9", "--strategy fspd", "--profile h100_sxn"])
def test_a_wrong_name_gets_a_suggestion(name: str) -> None:
    model = "" if "--model" in name else "--params 1B"
    message = error(f"predict {model} {name}")
    assert message.startswith(f"error: {name}: ")
    assert "Did you mean" in message or "Use h100_sxm" in message


@pytest.mark.parametrize(("line", "message"), [
    ("--gpu tpu_v4", "--gpu tpu_v4: the kernels of this kind of device (tpu): not predicted yet. Use a GPU or a CPU."),
    ("--pp 4 --strategy zero1", "--strategy zero1: ZeRO-1 and -2 do not go with torch.distributed.pipelining. Use --strategy fsdp, or --strategy ddp."),
    ("--dp-replicate 2", "--dp-shard 4 (not given, so chosen): zero = 0 shards no state. Use --dp-replicate 8, or --zero 3 (FSDP).")])
def test_a_value_that_nobody_wrote_is_named_by_its_flag(line: str, message: str) -> None:
    assert message in error(f"predict --params 1B --gpus 8 {line}")


@pytest.mark.parametrize(("line", "message"), [
    ("--precision bf16", "--precision bf16: torch.autocast under a pipeline: not predicted yet."),
    ("--zero 3 --set plan.reshard_after_forward=true",
     "--set plan.reshard_after_forward=true: under a pipeline FSDP2 keeps parameters gathered for all micro-batches."),
    ("--set model.tied_embeddings=true",
     "--set model.tied_embeddings=true: torch.distributed.pipelining does not tie weights across stages.")])
def test_a_pipeline_refuses_what_it_would_not_have_chosen(line: str, message: str) -> None:
    assert message in error(f"predict --params 1B --gpus 8 --pp 4 {line}")


def test_a_strategy_of_megatron_is_left_for_another_of_megatron() -> None:
    message = error("predict --params 1B --gpus 8 --strategy megatron-fsdp --pp 2 --grad-accum 2")
    assert message.endswith("Use --pp 1, or --strategy megatron and --zero 1.")


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(("name", "text", "message"), [
    ("r.toml", 'params = "1B"\n[plan\nzero = 3\n',
     "not valid TOML: Expected ']' at the end of a table declaration (at line 2, column 6). That line reads: [plan"),
    ("r.json", '{"params": "1B",\n "plan": {"zero": 3,}}', "That line reads: \"plan\": {\"zero\": 3,}}"),
    ("r.yaml", "params: 1B\nplan: {zero: 3\nrecipe: [\n",
     "not valid YAML: expected ',' or '}', but got ':' (at line 3, column 7). That line reads: recipe: ["),
    ("r.json", '{"params": "1B", "params": "2B"}', "params appears twice in one table. Leave one out."),
    ("r.yaml", "params: 1B\nplan:\n  zero: 1\n  zero: 3\n", "zero appears twice in one table (again at line 4). Leave one out."),
    ("r.json", "[1, 2]", "it holds a list, and a run is a table. Write fields such as params, and the tables cluster, plan and recipe."),
    ("r.yaml", "3", "it holds one value, and a run is a table."),
    ("r.yaml", "llama-3-8b", "it holds text, and a run is a table."),
    ("r.json", "[" * 100_000, "nested too deeply"),
    ("r.toml", 'params = "1B"\n[plan]\nzero = "3"\n', "plan.zero = 3: a ZeRO stage is 0 (DDP), 1, 2 or 3 (FSDP). Use zero = 3."),
    ("r.toml", 'params = "1B"\n[plan]\ntp = 16\n', "plan.tp = 16: model.kv_heads = 8 must be a multiple of tp. Use tp = 8."),
    ("r.toml", 'params = "1B"\n[recipe]\nseq_len = 2026-01-01\n', "recipe.seq_len = 2026-01-01: a date means nothing here."),
    ("r.yaml", "params: 1B\nrecipe: {micro_batch: yes}\n", "recipe.micro_batch = true: must be a whole number of at least 1. Use micro_batch = 1."),
    ("r.yaml", "params: 1B\nplans: {zero: 3}\n", "there is no such field. Did you mean plan?"),
])
def test_a_mistake_in_a_file_names_the_file(name: str, text: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, text)
    said = error(f"predict {path}")
    assert said.startswith(f"error: {path}: ")
    assert message in said


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_an_answer_that_finds_no_room_is_one_message() -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run([sys.executable, "-m", "costmodel", "list", "precisions"], stdout=full, stderr=subprocess.PIPE, text=True, check=False,
                              cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stderr) == (2, "error: standard output: it cannot be written (No space left on device). Send it elsewhere.\n")


def test_a_missing_file_suggests_its_neighbour(tmp_path: Path) -> None:
    write(tmp_path / "run.toml", "")
    assert error(f"predict {tmp_path}/rum.toml").endswith(f"there is no such file. Did you mean {tmp_path}/run.toml?")


def test_a_file_that_is_not_text_or_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_bytes(b"\xff\xfe")
    assert error(f"predict {tmp_path}/r.toml").endswith("byte 0 is not UTF-8 text. Save it as UTF-8.")
    (tmp_path / "d.toml").mkdir()
    assert "cannot be read (Is a directory)" in error(f"predict {tmp_path}/d.toml")


@pytest.mark.parametrize("line", ["predict --no-such-option", "predict a.toml b.toml", "nonsense", "list nonsense", "predict --zero"])
def test_wrong_usage_exits_2(line: str) -> None:
    result = call(line)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def crash(*_: object, **__: object) -> Any:
    raise ZeroDivisionError("a bug")


def test_an_unexpected_error_exits_1_and_says_how_to_see_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COSTMODEL_DEBUG", raising=False)
    monkeypatch.setattr(import_module("costmodel.prediction"), "predict", crash)
    result = call(ASKED)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "unexpected error: ZeroDivisionError: a bug. Run it again with --debug for the traceback.\n"


@pytest.mark.parametrize(("line", "environment"), [(f"{ASKED} --debug", {}), (f"--debug {ASKED}", {}), (ASKED, {"COSTMODEL_DEBUG": "1"})])
def test_debug_shows_the_traceback(line: str, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("costmodel.prediction"), "predict", crash)
    result = call(line, **environment)
    assert result.exit_code == 1
    assert "Traceback" in result.stderr
    assert result.stderr.endswith("unexpected error: ZeroDivisionError: a bug.\n")


WORDS = st.one_of(
    st.integers(-5, 200).map(str), st.text(max_size=5),
    st.sampled_from(["1B", "70B", "h100", "a100", "fsdp", "hsdp", "zero1", "full:2", "fp16", "x", "", "1e9", "nan", "1f1b", "adamw:foreach", "fa2", "eager",
                     "99999999999999999999", "3.5"]))
FIELDS = st.sampled_from(["plan.tp", "plan.stage_layers", "plan.cp_kind", "plan.bucket_mb", "plan.offload", "recipe.clip_norm", "recipe.optimizer.lr",
                          "recipe.precision.reduce", "cluster.host", "cluster.gpus_per_node", "recipe.loss_chunks", "recipe.causal", "model.layers", "x",
                          "plan"])
VALUES = st.sampled_from(["1", "2", "-1", "0", "true", "[1]", "{}", '"a"', "1e400", "nan", "x", "", "fp32", "[]", "1.5"])
VALUED = [flag for flag in FLAGS if flag.kind != "switch"]
SWITCHES = ["--compile", "--no-compile", "--sequence-parallel", "--json"]


@settings(max_examples=300)
@given(flags=st.lists(st.tuples(st.sampled_from(VALUED), WORDS), max_size=5), assignments=st.lists(st.tuples(FIELDS, VALUES), max_size=2),
       switches=st.lists(st.sampled_from(SWITCHES), max_size=2))
def test_random_input_never_gives_a_traceback(flags: list[Any], assignments: list[Any], switches: list[str]) -> None:
    arguments = ["predict", "--params=1B", *(f"{flag.name}={word}" for flag, word in flags),
                 *(f"--set={field}={value}" for field, value in assignments), *switches]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code in (0, 2, 3), (arguments, result.output)
    assert "Traceback" not in result.output
    if result.exit_code == 2:
        assert result.stdout == ""
        assert result.stderr


def test_an_answer_does_not_overwrite_the_run_that_was_read(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('params = "1B"\n', encoding="utf-8")
    result = call(f"predict {path} -o {path}")
    assert (result.exit_code, path.read_text(encoding="utf-8")) == (2, 'params = "1B"\n')
    assert "would overwrite the file" in result.output


def test_a_profile_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    path.write_bytes(b"\xff\xfe\x00")
    result = call(f"predict --params 1B --profile {path}")
    assert result.exit_code == 2
    assert "not UTF-8" in result.output
