"""`costmodel waterfall`: the text, the JSON, and a measured step in all the ways it is written."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from calling import call, error

from costmodel import build_run, predict
from costmodel.cli.waterfall import measured_step
from costmodel.records import Outcome, Record, write_record

ONE = "waterfall --params 1B --gpus 8 --zero 3"


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("line", [ONE, f"{ONE} --measured 120ms", f"{ONE} --measured 40ms", "waterfall --params 50M --gpus 1 --seq-len 128 --precision fp32",
                                  "waterfall --params 70B --gpus 512 --framework megatron --tp 8 --pp 8 --grad-accum 32 --sequence-parallel"])
def test_the_text_fits_its_width(line: str, width: int) -> None:
    result = call(line, COLUMNS=str(width))
    assert result.exit_code == 0, result.output
    assert max(len(text) for text in result.stdout.splitlines()) <= width
    assert "\x1b" not in result.stdout


def test_the_chart_steps_down_from_the_peak_to_the_mfu() -> None:
    """Each bar begins where the one above it ends, but for rounding to a column."""
    lines = [line for line in call(ONE, COLUMNS="120").stdout.splitlines() if "#" in line]
    first, *middle, last = [(m.start(), m.end()) for m in (re.search("#+", line) for line in lines) if m]
    end = first[1]
    for (start, stop), line in zip(middle, lines[1:-1], strict=True):
        if not re.search(r" -\d", line):
            assert abs(stop - end) <= 1, line
            end = start
        else:
            end = stop
    assert last[0] == first[0] and abs(last[1] - end) <= 1


def test_what_is_measured_beyond_the_prediction_is_a_bar() -> None:
    bars = json.loads(call(f"{ONE} --measured 120ms --json").stdout)["waterfall"]
    assert (bars["step_s"], bars["measured_s"]) == (0.12, 0.12)
    assert bars["bars"][-1]["name"] == "unexplained"
    assert bars["bars"][-1]["seconds"] == pytest.approx(0.12 - bars["predicted_s"])
    assert json.loads(call(f"{ONE} --measured 40ms --json").stdout)["waterfall"]["bars"][-1]["seconds"] < 0


def test_a_large_rest_comes_with_what_it_may_be() -> None:
    """From a tenth of the step on: a smaller one is the error of a prediction."""
    predicted = json.loads(call(f"{ONE} --json").stdout)["waterfall"]["step_s"]
    assert "--slow-rank 1.5" in call(f"{ONE} --measured {1.3 * predicted}s").stdout
    assert "\nUNEXPLAINED" not in call(f"{ONE} --measured {1.05 * predicted}s").stdout
    assert "\nUNEXPLAINED" not in call(ONE).stdout


def test_json_has_stable_keys() -> None:
    data = json.loads(call(f"{ONE} --json").stdout)
    assert list(data) == ["schema", "run", "profile", "waterfall"]
    assert list(data["waterfall"]) == ["step_s", "predicted_s", "measured_s", "peak_flops_per_s", "bars", "ideal_s", "mfu"]
    assert list(data["waterfall"]["bars"][0]) == ["name", "meaning", "seconds", "share", "left", "without"]


@pytest.mark.parametrize(("text", "seconds"), [
    ("2.84s", 2.84), ("910 ms", 0.91), ("1,200 ms", 1.2), (".5 sec", 0.5), ("16000 tok/s", 2.0), ("16k tokens/s", 2.0), ("0.016M tok/s", 2.0),
    ("4000 tok/s/gpu", 2.0), ("4k tok/s / GPU", 2.0), ("25%", 2.0), ("25.0 % MFU", 2.0)])
def test_a_measured_step_is_a_time_a_rate_or_an_mfu(text: str, seconds: float) -> None:
    assert measured_step(text, tokens_per_step=32_000, gpus=4, ideal_s=0.5) == pytest.approx(seconds)


def test_a_measured_mfu_is_the_mfu_of_the_answer() -> None:
    bars = json.loads(call(f"{ONE} --measured 31%  --json").stdout)["waterfall"]
    assert bars["mfu"] == pytest.approx(0.31)
    assert "that is 104% of the peak of h100_sxm" in error(f"{ONE} --measured 104%")


def a_record(folder: Path, gpus: int, provenance: Any = "run") -> Path:
    """What `execute run` keeps of a step of 250 ms."""
    run = build_run(params="1B", cluster={"gpus": gpus}, plan={"zero": 3}, recipe={})
    predicted = predict(run, scaling=False)
    roles = tuple(replace(role, time=replace(role.time, step_s=0.25)) for role in predicted.roles if role.time)
    record = Record(run, provenance, replace(predicted, roles=roles, provenance=provenance), Outcome(), None, "2026-01-01T00:00:00Z")
    return write_record(record, folder / f"{provenance}{gpus}.json")


def test_a_record_of_execute_run_gives_its_step(tmp_path: Path) -> None:
    path = a_record(tmp_path, 8)
    for run in (ONE, f"waterfall {path}"):
        assert json.loads(call(f"{run} --measured {path} --json").stdout)["waterfall"]["measured_s"] == 0.25


def test_a_record_of_something_else_is_refused(tmp_path: Path) -> None:
    other, alone = a_record(tmp_path, 16), a_record(tmp_path, 8, "solo")
    assert error(f"{ONE} --measured {other}") == (f"error: --measured {other}: its step has 65,536 tokens on 16 GPUs, and the run 32,768 on 8. "
                                                  f"Predict that very job: costmodel waterfall {other} --measured {other}.")
    assert "it holds no step of a whole job" in error(f"{ONE} --measured {alone}")
    assert error(f"{ONE} --measured none.json") == "error: --measured none.json: there is no such file."


@pytest.mark.parametrize("text", ["2.84", "0s", "fast", "-1s", "1e3 s", "0%", "31 %/gpu", "1 h"])
def test_anything_else_is_one_message(text: str) -> None:
    assert error(f"{ONE} --measured '{text}'") == (f'error: --measured {text}: it must be a time, a rate or an MFU. Write 2.84s, 910ms, '
                                                   '"12000 tok/s" (of the job), "1500 tok/s/gpu" or 31%.')
