"""`costmodel oom`: a message as an argument, an option, a file or standard input; its text, its JSON, and bad input."""

import json
import re
from pathlib import Path

import pytest
from calling import call, error
from typer.testing import CliRunner

from costmodel.cli.app import app

RUN = "--model llama-3-8b --gpus 2 --gpu rtx_a6000 --strategy fsdp --checkpointing full --seq-len 8192"
MESSAGE = ("CUDA out of memory. Tried to allocate 112.00 MiB. GPU 0 has a total capacity of 47.48 GiB of which 92.81 MiB is free. Including non-PyTorch "
           "memory, this process has 47.38 GiB memory in use. Of the allocated memory 45.56 GiB is allocated by PyTorch, and 448.00 MiB is reserved by "
           "PyTorch but unallocated.")
"""pytorch/torchtitan issue 620."""


def test_the_message_is_an_argument_an_option_a_file_or_standard_input(tmp_path: Path) -> None:
    log, run = tmp_path / "job.log", tmp_path / "run.toml"
    log.write_text(f"step 1\n[rank0]: {MESSAGE}\nstack", encoding="utf-8")
    run.write_text('model = "llama-3-8b"\ncluster = {gpu = "rtx_a6000", gpus = 2}\nplan = {strategy = "fsdp", checkpointing = "full"}\n'
                   "recipe = {seq_len = 8192}\n", encoding="utf-8")
    said = call(f'oom {RUN} "{MESSAGE}"').stdout
    assert said == call(f'oom {run} "{MESSAGE}"').stdout
    assert said == call(f'oom {RUN} --message "{MESSAGE}"').stdout
    assert said == call(f"oom {RUN} --log {log}").stdout
    assert said == CliRunner().invoke(app, ["oom", *RUN.split()], input=MESSAGE).stdout
    assert "feed-forward gate, feed-forward up or feed-forward down" in said
    assert "optimizer state created" in said
    assert "True need" in said
    assert max(len(line) for line in said.splitlines()) <= 80


def test_figures_alone_and_beside_a_message() -> None:
    figures = "--tried 112.00MiB --allocated 45.56GiB --capacity 47.48GiB"
    found = json.loads(call(f"oom {RUN} {figures} --json").stdout)["diagnosis"]
    assert found["cause"] == "need"
    assert found["matches"][0]["moment"] == "optimizer of update: optimizer.host"
    assert found["message"]["reserved_bytes"] is None
    assert found["advice"]["fit"]
    other = json.loads(call(f'oom {RUN} "{MESSAGE}" --allocated 20GiB --json').stdout)["diagnosis"]
    assert other["message"]["allocated_bytes"] == 20 << 30


def test_a_risky_run_is_not_said_to_fit() -> None:
    """The words are those of `predict`, and so is the need."""
    run = "--params 13B --gpus 64 --seq-len 8192 --zero 3"
    said = " ".join(call(f"oom {run} --tried 3.91GiB").stdout.split())
    need = re.search(r"risky: .* it needs ([\d.]+ GiB)", " ".join(call(f"predict {run}").stdout.split()))
    assert need is not None
    assert f"predicted to be risky: its live tensors fit, and with what the allocator may hold besides they need {need[1]} of 79.65 GiB." in said
    assert "predicted to fit" not in said


def test_json_has_the_documented_keys() -> None:
    data = json.loads(call(f'oom {RUN} "{MESSAGE}" --json').stdout)
    page = (Path(__file__).parents[2] / "docs" / "report.md").read_text(encoding="utf-8")
    section = page[page.index("## `costmodel oom --json`"):]
    for part in (data, data["diagnosis"], data["diagnosis"]["message"], data["diagnosis"]["matches"][0]):
        assert all(f"`{key}`" in section or f"`{key}[]`" in section for key in part), set(part)


@pytest.mark.parametrize(("line", "message"), [
    (f"oom {RUN} --tried many", "--tried many: is not a number of bytes. Write it as the message does"),
    (f"oom {RUN} --allocated 3GiB", "the size that was asked for is needed"),
    (f"oom {RUN} --tried 0", "the size that was asked for is needed"),
    (f"oom {RUN} --tried 112MiB --allocated 300GiB", "300.00 GiB: rtx_a6000 has 48.00 GiB in all. Give the GPU of the job with --gpu"),
    (f"oom {RUN} --log /nowhere/job.log", "cannot be read"),
    (f'oom {RUN} --message "all is well"', "the message: it holds no out-of-memory message of PyTorch"),
    (f"oom {RUN}", 'no message was given. Give the line with "Tried to allocate"'),
    (f'oom {RUN} --log x "{MESSAGE}"', "give one of the two"),
    ('oom "Tried to allocate 2.00 MiB"', "a run needs a model"),
])
def test_bad_input_is_one_message(line: str, message: str) -> None:
    assert message in error(line)
