"""benchmarks/gpu.sh on this machine's CPU with a small list; and its own list: every line is a run that `execute solo` performs."""

import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from typer.testing import CliRunner

from benchmarks import measured
from costmodel import build_run, predict
from costmodel.records import Environment, Outcome, Record, read_records, write_record
from execute.cli import app
from execute.compare import NOT_ALONE
from execute.support import check_supported

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.sh"
LIST = """
# a run, one that is none, and one that fails
tiny     --set model.layers=1 --set model.hidden=64 --set model.heads=2 --set model.ffn=128 --set model.vocab=128 --strategy fsdp --gpus 2 --seq-len 32 \
--precision fp32 --steps 2   # on two ranks
refused  --params 100M --strategy single --precision nonsense
"""


def script(*arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    return subprocess.run(["bash", str(SCRIPT), *arguments], capture_output=True, text=True, env=environment, check=False, timeout=300)


def test_a_list_is_measured_and_its_records_kept(tmp_path: Path) -> None:
    (tmp_path / "list").write_text(LIST)
    done = script("--list", str(tmp_path / "list"), "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert "1 measured, 1 ended badly, 0 left out" in done.stdout
    assert "is not a precision word" in done.stdout
    [(path, record)] = list(read_records(tmp_path / "out"))
    assert "allocated: mean error" in done.stdout  # beside its prediction
    assert (path.name, record.outcome.kind, len(record.step_s[0])) == ("tiny.json", "ok", 2)


def test_what_the_time_does_not_allow_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "list").write_text(LIST)
    done = script("--list", str(tmp_path / "list"), "--out", str(tmp_path / "out"), "--minutes", "0")
    assert (done.returncode, "2 left out for lack of time" in done.stdout) == (1, True)


@pytest.mark.parametrize(("arguments", "says"), [(["--nonsense", "1"], "--nonsense is no option"), (["--list"], "--list needs a value"),
                                                 (["--list", "/nowhere"], "/nowhere cannot be read")])
def test_bad_arguments_exit_2(arguments: list[str], says: str) -> None:
    done = script(*arguments)
    assert (done.returncode, says in done.stderr) == (2, True)


def test_records_stand_beside_their_predictions(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A step predicted at what it took has no error; a run that ran out of memory was to fit, or not."""
    run = build_run(params="100M", cluster={"gpus": 8}, plan={"zero": 3})
    report = predict(run)
    time = report.roles[0].time
    assert time is not None
    alone = time.step_s - sum(s for name, s in time.breakdown.items() if name in NOT_ALONE or name.startswith("exposed "))
    role = replace(report.roles[0], time=replace(time, step_s=alone), collectives=None)
    environment = Environment("GPU", 1, None, "host", "Linux", 1, None, {})
    good = Record(run, "solo", replace(report, provenance="solo", roles=(role,)), Outcome(), environment, "2026-01-01T00:00:00Z")
    bad = replace(good, report=None, outcome=Outcome("oom"))
    for name, record in (("good", good), ("bad", bad)):
        write_record(record, tmp_path / f"{name}.json")
    assert measured.main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "time: mean error 0.0% over 1" in said
    assert "allocated: mean error 0.0% over 1" in said
    assert "fits or not: wrong for bad" in said
    (tmp_path / "broken.json").write_text("{")
    assert measured.main([str(tmp_path)]) == 2


LINES = [line for line in (ROOT / "benchmarks" / "gpu_runs.txt").read_text().splitlines() if line.strip() and not line.startswith("#")]


def test_names_are_unique() -> None:
    names = [line.split()[0] for line in LINES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.split()[0])
def test_every_line_is_a_run_that_solo_performs(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def checks(run: Any, *arguments: Any, **options: Any) -> None:
        check_supported(run, "solo")
        seen.append(run)
        raise RuntimeError("far enough")
    monkeypatch.setattr("execute.solo.solo", checks)
    result = CliRunner().invoke(app, ["solo", "--gpu", "h100_sxm", "--no-memory-check", *shlex.split(line)[1:]])
    assert (len(seen), "far enough" in result.output) == (1, True), result.output
