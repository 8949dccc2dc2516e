"""`costmodel trace`: a file that a trace viewer opens, with the report's collectives in it."""

import json
from pathlib import Path

from typer.testing import CliRunner

from costmodel import build_run, predict
from costmodel.cli.app import app

ASKED = ["trace", "--params", "1B", "--gpus", "8", "--zero", "3"]


def written(tmp_path: Path, *more: str) -> list[dict]:  # type: ignore[type-arg]
    path = tmp_path / "trace.json"
    result = CliRunner().invoke(app, [*ASKED, "-o", str(path), *more])
    assert result.exit_code == 0, result.output
    return json.loads(path.read_text())["traceEvents"]


def test_the_trace_holds_every_collective_of_the_report(tmp_path: Path) -> None:
    events = written(tmp_path)
    sent = [e for e in events if "collective" in e.get("args", {})]
    role = predict(build_run(params="1B", cluster={"gpus": 8}, plan={"zero": 3})).roles[0]
    assert role.collectives and role.time
    assert len(sent) == sum(c.count for c in role.collectives)
    assert sum(e["args"]["message_bytes"] for e in sent) == sum(c.count * c.message_bytes for c in role.collectives)
    assert abs(sum(e["dur"] for e in sent) - 1e6 * sum(role.time.communication_s.values())) < 1.0
    assert abs(sum(e["args"]["exposed_us"] for e in sent) - 1e6 * role.time.exposed_s["dp_shard"]) < 1e6 * 0.05 * role.time.exposed_s["dp_shard"]


def test_events_have_the_fields_of_the_trace_event_format(tmp_path: Path) -> None:
    events = written(tmp_path)
    assert {e["ph"] for e in events} == {"X", "M"}
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in events if e["ph"] == "X")
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(names.values()) >= {"compute", "host", "dp_shard", "step"}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"} <= names.keys()


def test_units_are_fewer_and_end_when_the_ops_do(tmp_path: Path) -> None:
    ops, units = written(tmp_path), written(tmp_path, "--detail", "units")
    assert len(units) < len(ops) / 3
    assert abs(max(e["ts"] + e["dur"] for e in units if e["ph"] == "X") - max(e["ts"] + e["dur"] for e in ops if e["ph"] == "X")) < 1e-3


def test_every_pipeline_rank_is_a_process(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    asked = ["trace", "--model", "llama-3-8b", "--gpus", "4", "--pp", "4", "--precision", "bf16-pure", "-o", str(path)]
    assert CliRunner().invoke(app, asked).exit_code == 0
    events = json.loads(path.read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {f"pipeline rank {i}" for i in range(4)}
    assert CliRunner().invoke(app, [*asked, "--role", "2"]).exit_code == 0
    assert len({e["pid"] for e in json.loads(path.read_text())["traceEvents"]}) == 1


def test_a_trace_that_no_viewer_opens_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*ASKED, "-o", str(tmp_path / "t.json"), "--grad-accum", "1000000"])
    assert result.exit_code == 2
    assert "--grad-accum 1000000: a trace of so many micro-batches is too long for a viewer. Use --grad-accum 14285 or less" in result.output
    assert not (tmp_path / "t.json").exists()


def test_a_role_that_is_none_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*ASKED, "-o", str(tmp_path / "t.json"), "--role", "3"])
    assert result.exit_code == 2 and "the run has one rank role. Use 0." in result.output
    assert CliRunner().invoke(app, [*ASKED, "-o", str(tmp_path / "t.json"), "--detail", "all"]).exit_code == 2
