"""The lab: the parts by which a step misses the ideal sum to it; and the command, for real, on one device and one strategy."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from typer.testing import CliRunner

from costmodel.records import Environment, Outcome, read_records
from costmodel.report import TimeReport
from execute import suite
from execute.cli import app
from execute.lab import SEQUENCES, Entry, cases, entry, longer, placed, sent, why
from execute.lab_text import document, markdown
from execute.suite import Machine

CPU = Machine("cpu_epyc_2core", 4, False)
HERE = Environment("a CPU", 1, None, "host", "Linux", 2, None, {"torch": "2.13.0"})
TINY: dict[str, Any] = {**suite.SMALL, "layers": 2, "hidden": 64, "ffn": 128, "vocab": 256}


def measured_as_predicted(name: str, time: TimeReport) -> Entry:
    """An entry whose measurement is its prediction, but for the time."""
    one = entry(next(case for case in cases(CPU, 2) if case.name == name), Outcome(), None)
    roles = tuple(replace(role, time=time) for role in one.predicted.roles)
    return replace(one, measured=replace(one.predicted, provenance="run", roles=roles))


ONE = measured_as_predicted("one device", TimeReport(0.100, {}, {"matmul": 0.080, "memory-bound": 0.010, "idle": 0.010}, {}, {}))
DDP = measured_as_predicted("DDP", TimeReport(0.065, {}, {"matmul": 0.050, "exposed dp_replicate": 0.007, "idle": 0.008},
                                              {"dp_replicate": 0.014}, {"dp_replicate": 0.007}))


def test_every_way_spreads_the_same_batch() -> None:
    runs = {case.name: case.run for case in cases(CPU, 2)}
    assert list(runs) == ["one device", "DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3 (FSDP)", "FSDP, kept gathered", "TP", "PP (1F1B)"]
    assert {run.recipe.global_batch for run in runs.values()} == {SEQUENCES}
    assert {run.model.name for run in runs.values()} == {"validate-small"}
    assert {run.plan.world_size for name, run in runs.items() if name != "one device"} == {2}


def test_on_gpus_there_is_a_row_for_each_rank_count_that_fits() -> None:
    assert len(list(cases(Machine("h100_sxm", 8, True), 8))) == 8
    assert [case.name for case in cases(Machine("h100_sxm", 1, True), 1)] == ["one device"]


def test_the_parts_sum_to_what_a_step_misses() -> None:
    parts = longer(ONE, DDP)
    assert parts is not None
    assert (parts.ideal_s, parts.work_s, parts.exposed_s, parts.idle_s) == pytest.approx((0.050, 0.005, 0.007, 0.003))
    assert sum(parts) == pytest.approx(0.065)


def test_words_say_what_lies_where_and_why() -> None:
    assert placed(DDP) == ["divided (each rank works with its own part alone): batch, activations", "replicated: parameters, gradients, optimizer"]
    assert any("all-reduce over dp_replicate in backward" in line for line in sent(DDP))
    words = " ".join(why(ONE, DDP))
    assert "would be 50.0 ms; it took 65.0 ms: +5.0 ms of work, +7.0 ms waiting for communication, +3.0 ms idle" in words
    assert "every rank updates all parameters" in words
    assert "communication" in words.split("At the peak: ")[1]


def test_markdown_and_json_say_the_same() -> None:
    failed = replace(entry(next(c for c in cases(CPU, 2) if c.name == "TP"), Outcome("oom", 1, "no memory"), None))
    text, data = markdown([ONE, DDP, failed], HERE, 2), document([ONE, DDP, failed], HERE)
    assert "| DDP | 2 | 65.0 ms |" in text
    assert "1.54 x | 77%" in text
    assert "not measured: no memory" in text
    assert [case["name"] for case in data["cases"]] == ["one device", "DDP", "TP"]
    assert data["cases"][1]["measured"]["overlap"] == pytest.approx(0.5)
    assert data["cases"][2]["measured"]["step_s"] is None
    json.dumps(data, allow_nan=False)


def test_it_is_measured_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("execute.lab.SMALL", TINY)
    result = CliRunner().invoke(app, ["lab", "--only", "fsdp, kept", "--device", "cpu", "--steps", "2", "-o", str(tmp_path)])
    assert result.exit_code == 0, result.output
    data = json.loads((tmp_path / "lab.json").read_text())
    one, fsdp = data["cases"]
    assert (one["ranks"], fsdp["ranks"]) == (1, 2)
    for case in data["cases"]:
        assert case["measured"]["states_bytes"] == case["predicted"]["states_bytes"]
    assert fsdp["measured"]["exposed_s"] <= fsdp["measured"]["communication_s"] * (1 + 1e-9)
    assert sum(fsdp["longer"].values()) == pytest.approx(fsdp["measured"]["step_s"])
    assert "sharded (each rank stores a piece): parameters, gradients, optimizer" in (tmp_path / "lab.md").read_text()
    kept = [record for _, record in read_records(tmp_path / "records")]
    assert sorted(record.run.plan.world_size for record in kept) == [1, 2]


@pytest.mark.parametrize(("arguments", "says"), [(["--ranks", "3"], "--ranks 3: it must be one of 1, 2, 4"), (["--device", "tpu"], "--device tpu"),
                                                 (["--steps", "0"], "--steps 0"), (["--timeout", "-1"], "--timeout -1: must be above 0."),
                                                 (["--gpu", "nope"], "--gpu nope: is not in the catalogue."),
                                                 (["--only", "zero4"], "--only zero4: no strategy has this in its name. Use a part of DDP")])
def test_bad_arguments_exit_2(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(app, ["lab", *(["--device", "cpu"] if "--device" not in arguments else []), *arguments])
    assert result.exit_code == 2
    assert says in result.output
