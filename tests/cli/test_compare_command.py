"""`costmodel compare`: files, flags and variations; the text and the JSON."""

import json
import re
from pathlib import Path

import pytest
from calling import call, error

SEVEN = "compare --params 7B --gpus 8 --zero 3"


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("line", [
    SEVEN, f"{SEVEN} --with '--gpus 16'",
    f"{SEVEN} --one-gpu --with '--gpus 16' --with '--gpus 1024 --tp 8' --with '--zero 1' "
    "--with '--model gpt2 --seq-len 1024' --with '--micro-batch 4' --with '--checkpointing full' --with '--gpu a100'",
    "compare --params 70B --gpus 512 --framework megatron --tp 8 --pp 8 --grad-accum 32"])
def test_the_text_fits_its_width(line: str, width: int) -> None:
    result = call(line, COLUMNS=str(width))
    assert result.exit_code == 0, result.output
    assert max(len(text) for text in result.stdout.splitlines()) <= width
    assert "\x1b" not in result.stdout


def test_a_single_run_is_compared_with_one_gpu() -> None:
    text = call(SEVEN).stdout
    assert "  A  one GPU: llama-style-7B on 1 x h100_sxm: single GPU" in text
    assert "B AGAINST A" in text


def test_the_text_says_why_a_second_node_is_slower() -> None:
    text = call("compare --params 1B --gpus 8 --strategy ddp --with '--gpus 16'", COLUMNS="120").stdout
    assert re.search(r"cluster.gpus +8  16\n", text)
    assert re.search(r"B spends [0-9.]+% more GPU time on a token than A: contention \+[0-9.]+ ms, exposed\s+dp_replicate \+", text)


def test_files_are_compared_and_flags_apply_to_all(tmp_path: Path) -> None:
    for name, zero in (("a", 1), ("b", 3)):
        (tmp_path / f"{name}.toml").write_text(f'params = "1B"\n[cluster]\ngpus = 8\n[plan]\nzero = {zero}\n', encoding="utf-8")
    data = json.loads(call(f"compare {tmp_path}/a.toml {tmp_path}/b.toml --seq-len 2048 --with '--zero 2' --json").stdout)
    assert [e["name"] for e in data["comparison"]["entries"]] == ["a", "b", "--zero 2"]
    assert [run["plan"]["zero"] for run in data["runs"]] == [1, 3, 2]
    assert {run["recipe"]["seq_len"] for run in data["runs"]} == {2048}


def test_json_has_stable_keys() -> None:
    data = json.loads(call(f"{SEVEN} --json").stdout)
    assert list(data) == ["schema", "runs", "comparison"]
    assert list(data["comparison"]) == ["entries", "differences", "fields", "notes"]
    bar = data["comparison"]["differences"][0]["bars"][0]
    assert list(bar) == ["name", "meaning", "before_s", "after_s", "points", "difference_s"]


def test_a_variation_overrides_the_flags_and_leaves_the_rest(tmp_path: Path) -> None:
    line = f"{SEVEN} --micro-batch 2 --sequence-parallel --tp 2 --with '--strategy ddp --no-sequence-parallel --set plan.bucket_bytes=1000000 --tp=1' --json"
    first, second = json.loads(call(line).stdout)["runs"]
    assert (first["plan"]["zero"], second["plan"]["zero"]) == (3, 0)
    assert (first["plan"]["tp"], second["plan"]["tp"], second["plan"]["bucket_bytes"]) == (2, 1, 1_000_000)
    assert second["recipe"]["micro_batch"] == 2


@pytest.mark.parametrize(("line", "text"), [
    ("--with '--gpus'", "error: --gpus: --gpus needs a value."),
    ("--with 'gpus 16'", "error: gpus 16: gpus is not an option of a run. Write it like --gpus 16, or --set plan.tp=4."),
    ("--with '--zero 7'", "error: --zero 7: a ZeRO stage is 0 (DDP), 1, 2 or 3 (FSDP). Use --zero 3."),
    ("--with \"--set 'a\"", "error: --set 'a: No closing quotation."),
    ("no-such-file.toml", "error: no-such-file.toml: there is no such file. Give the path of a .toml, .yaml or .json file, or flags alone.")])
def test_bad_input_is_one_message(line: str, text: str) -> None:
    assert error(f"{SEVEN} {line}") == text


def test_one_gpu_alone_has_nothing_to_be_compared_with() -> None:
    assert error("compare --params 1B --gpus 1").startswith("error: a single run of one GPU has nothing to be compared with.")
