"""`costmodel solve`: what it says, its JSON, its exit codes, and bad input."""

import json
import re

import pytest
from calling import call, error

ONE_B = "solve --params 1B --gpus 8 --zero 3"


def test_the_answer_its_neighbour_and_what_binds() -> None:
    result = call(f"{ONE_B} --max micro_batch", COLUMNS="80")
    assert result.exit_code == 0, result.output
    assert "LARGEST MICRO-BATCH that fits" in result.stdout
    lines = result.stdout.splitlines()
    answer, beyond = (next(line.split() for line in lines if words in line) for words in ("the answer", "the next"))
    assert int(beyond[0]) == int(answer[0]) + 1
    assert answer[-1] == "fits"
    assert "activations" in result.stdout
    assert f"--micro-batch {answer[0]}" in result.stdout
    assert max(len(line) for line in lines) <= 80


def test_what_it_says_to_use_gives_the_promised_figure() -> None:
    found = json.loads(call(f"{ONE_B} --max seq_len --json").stdout)["solution"]
    asked = json.loads(call(f"predict --params 1B --gpus 8 --zero 3 --seq-len {found['value']} --json").stdout)["report"]
    for report in (found["report"], asked):
        for key in ("scaling", "interval"):  # the search leaves them out
            report.pop(key)
    assert found["report"] == asked
    assert found["bound"]["kind"] == "memory"


def test_nothing_fits_is_exit_3_and_says_why() -> None:
    """torchtitan issue 620: no batch and no checkpointing helps where the model state alone is larger than the device."""
    result = call("solve --model llama-3-8b --gpu rtx_a6000 --gpus 2 --strategy fsdp --checkpointing full --max micro_batch")
    assert result.exit_code == 3
    assert "the model state alone (59.83 GiB" in result.stdout


@pytest.mark.parametrize("line", [
    "--params 1B --gpus 8 --zero 3 --global-batch 32",
    "--model llama-2-7b --gpus 8 --strategy ddp --framework megatron --tp 2 --sequence-parallel --grad-accum 4",
    "--params 1B --gpus 4 --strategy megatron-fsdp --seq-len 1024 --global-batch 8"])
def test_plans_are_counted_and_the_first_is_written_as_flags(line: str) -> None:
    found = json.loads(call(f"solve {line} --plans --top 3 --json").stdout)["plans"]
    assert len(found["best"]) == 3
    assert found["candidates"] == found["fit"] + found["too_large"] + found["refused"] + found["pruned"]
    text = call(f"solve {line} --plans --top 3").stdout
    flags = " ".join(text.partition("\n  use")[2].partition("\n  counted")[0].split())
    derived = json.loads(call(f"predict {line} {flags} --json").stdout)["report"]["derived"]
    assert derived["tokens_per_s"] == found["best"][0]["tokens_per_s"]


@pytest.mark.parametrize("line", [
    "--model llama-3-8b --gpu rtx_a6000 --gpus 2 --strategy fsdp --global-batch 2",
    "--model llama-3-8b --gpus 8 --strategy ddp --seq-len 8192 --dp 8",
    "--model llama-3-8b --gpus 8 --strategy fsdp --micro-batch 4 --seq-len 8192",
    "--model llama-3-8b --gpus 8 --strategy fsdp --micro-batch 4 --seq-len 8192 --global-batch 64",
    "--model llama-3-8b --gpu l40s --nodes 1 --strategy zero1 --seq-len 4096",
    "--model llama-3-70b --gpus 8 --zero 3",
    "--model llama-2-7b --gpus 16 --strategy ddp --framework megatron --tp 2 --sequence-parallel --grad-accum 8 --micro-batch 8",
    "--model llama-3-70b --gpus 64 --framework megatron --zero 1 --tp 8 --pp 2 --seq-len 8192 --global-batch 64",
])
def test_the_flags_of_each_change_give_what_it_promises(line: str) -> None:
    """Appended to the command line that was given."""
    advice = json.loads(call(f"predict {line} --json").stdout)["advice"]
    text = call(f"predict {line}", COLUMNS="140").stdout
    section = text[text.index("FIT"):text.index("MEMORY  of")]
    flags = [row.split("  ", 2)[-1].strip() for row in section.splitlines() if re.match(r"  \d+  --", row)]
    first = (advice["fit"] or advice["together"])[:3]
    assert first
    for changes, promised in zip(flags, first, strict=False):
        report = json.loads(call(f"predict {line} {changes} --json").stdout)["report"]
        assert report["derived"]["step_s"] == promised["step_s"], changes
        assert max(r["memory"]["device_bytes"] for r in report["roles"]) == promised["needs_bytes"], changes


def test_solve_without_a_question_says_what_predict_says() -> None:
    line = "--model llama-3-8b --gpus 8 --strategy ddp --seq-len 8192"
    text = call(f"predict {line}").stdout
    assert text[text.index("FIT"):text.index("MEMORY  of")].strip() in call(f"solve {line}").stdout


def test_a_run_that_fits_is_told_what_would_be_faster() -> None:
    result = call("solve --params 1B --gpus 8 --zero 3 --checkpointing full")
    assert result.exit_code == 0
    assert "It fits" in result.stdout
    assert "--checkpointing none" in result.stdout
    assert json.loads(call("predict --params 1B --gpus 8 --zero 3 --json").stdout)["advice"] is None


@pytest.mark.parametrize(("line", "message"), [
    ("solve --params 1B --max micro_batch --min gpus", "--max and --min: one question at a time"),
    ("solve --params 1B --max heads", "--max heads: is not sought. Use --max micro_batch"),
    ("solve --params 1B --min nodes", "--min nodes: is not sought. Use --min gpus."),
    ("solve --params 1B --max layers --top 3", "goes with --plans"),
    ("solve --params 1B --plans --top 0", "must be at least 1"),
    ("solve --params 1B --plans --top many", "must be a whole number"),
    ("solve --max micro_batch", "a run needs a model"),
    ("solve --model gpt-oss-20b --gpus 8 --max micro_batch", "attention sinks"),
])
def test_bad_input_is_one_message(line: str, message: str) -> None:
    assert message in error(line)


def test_a_dear_single_change_points_at_the_plans() -> None:
    """Llama-3-70B on 64 H100: tensor parallelism alone fits, FSDP with checkpointing is faster; a cheap change needs no such hint."""
    hint = "`costmodel solve --plans` predicts every plan"
    assert hint in " ".join(call("solve --model llama-3-70b --gpus 64").stdout.split())
    assert hint not in " ".join(call("solve --params 1B --gpus 8 --zero 3 --micro-batch 16").stdout.split())
