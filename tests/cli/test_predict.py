"""`costmodel predict`: the text, the JSON, files and exit codes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from calling import ASKED, call
from cli_sample import GIB, memory, report

from costmodel import build_run
from costmodel.render.prediction import render
from costmodel.render.text import Page, uncoloured
from costmodel.report import RoleReport, StepReport, TimeReport, report_from_dict
from costmodel.spec import Run

RUN = build_run(params="1B", cluster={"gpus": 8}, plan={"zero": 3})


def text_of(step: StepReport, run: Run = RUN, width: int = 80, colour: bool = False) -> str:
    return render(run, [("--seq-len", "4096 tokens (default)")], step, "h100_sxm", Page(width, colour))


# --- the text

@pytest.mark.parametrize("width", [80, 120])
def test_the_text_fits_its_width(width: int) -> None:
    result = call(ASKED, COLUMNS=str(width))
    assert result.exit_code == 0
    assert max(len(line) for line in result.stdout.splitlines()) <= width


def test_the_assumptions_come_first_and_every_section_follows() -> None:
    text = call(ASKED).stdout
    places = [text.index(f"\n{heading}") for heading in ("ASSUMED", "RUN", "VERDICT", "MEMORY", "TIME", "COMMUNICATION", "SCALING", "BOUND BY", "IN SHORT")]
    assert places == sorted(places)
    assert "micro-batch 1 x accumulation 1 x dp 8 = 8 sequences x 4,096 tokens = 32,768" in " ".join(text.split())


def test_a_figure_has_its_unit_and_none_is_never_zero() -> None:
    text = text_of(report())
    assert "allocated        12.00 GiB  100.0%" in text
    assert "step      100.0 ms (80% interval 80.00 ms to 130.0 ms)" in text
    assert "fits: needs 16.00 GiB of 80.00 GiB, 64.00 GiB to spare" in text
    unknown = text_of(report(peak_flops_per_s=None, scaling=None, interval=None))
    assert "MFU" not in unknown
    assert "SCALING" not in unknown


def test_a_verdict_says_by_how_much() -> None:
    tight = memory(verdict="does not fit", headroom_bytes=-3 * GIB, device_bytes=83 * GIB)
    step = report(roles=(RoleReport("every rank", 8, 0, tight, None, None),))
    assert "does not fit: needs 83.00 GiB of 80.00 GiB, 3.00 GiB too much" in text_of(step)


def test_a_risky_run_that_needs_more_than_there_is_says_what_fits() -> None:
    """The allocator gives cached blocks back before it fails, so that what must fit is the live tensors."""
    tight = memory(verdict="risky", headroom_bytes=-3 * GIB, device_bytes=83 * GIB)
    text = " ".join(text_of(report(roles=(RoleReport("every rank", 8, 0, tight, None, None),))).split())
    assert "risky: live tensors fit, but with the allocator's slack it needs 83.00 GiB of 80.00 GiB, 3.00 GiB too much" in text


def test_several_roles_are_compared() -> None:
    roles = tuple(RoleReport(name, 4, i, memory(), None, None) for i, name in enumerate(("first stage", "last stage")))
    text = text_of(report(roles=roles))
    assert "RANK ROLES" in text
    assert "first stage (4 ranks, such as rank 0)" in text


def test_gpu_hours_of_a_training_are_those_of_a_published_one() -> None:
    """Llama 2 (arXiv 2307.09288, table 2 and section 2.2): 7B on 2.0T tokens, 4M a step, took 184,320 hours of A100; that is 3,014 tokens/s each."""
    rate, tokens, ranks = 2.0e12 / (184_320 * 3600), 2_000_000_000_000, 8
    training = report(tokens_per_step=4_194_304, world_size=ranks, interval=None,
                      roles=(RoleReport("every rank", ranks, 0, None, TimeReport(4_194_304 / rate / ranks, {}, {}, {}, {}), None),)).training(tokens)
    assert training is not None
    assert (training.steps, training.interval_days) == (476_838, None)
    assert training.gpu_hours == pytest.approx(184_320, rel=1e-5)
    assert training.days == pytest.approx(184_320 / 24 / ranks, rel=1e-5)


def test_a_training_is_told_where_its_tokens_are() -> None:
    asked = f"{ASKED} --train-tokens 20B --batch-tokens 1M"
    text = call(asked).stdout
    assert "TRAINING  on 20B tokens" in text
    assert "GPU-hours" in text
    training = json.loads(call(f"{asked} --json").stdout)["training"]
    assert training["gpu_hours"] == pytest.approx(training["seconds"] * 8 / 3600)
    assert "TRAINING" not in call(ASKED).stdout


def test_a_cpu_is_not_called_a_gpu() -> None:
    text = call("predict --model gpt2 --gpu cpu --gpus 2 --strategy ddp --seq-len 256").stdout
    assert "GPU" not in text
    assert "per CPU" in text


def test_colour_only_where_asked() -> None:
    coloured = text_of(report(), colour=True)
    assert "\x1b[" in coloured
    assert uncoloured(coloured) == text_of(report())


def test_no_colour_when_piped() -> None:
    assert "\x1b" not in call(ASKED).stdout


def test_a_terminal_gets_colour_unless_no_color_is_set() -> None:
    """A pseudo-terminal stands in for the screen."""
    pty = pytest.importorskip("pty")
    for extra, expected in (({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)):
        ours, theirs = pty.openpty()
        environment = {"PATH": os.environ["PATH"], "TERM": "xterm", "COLUMNS": "100", **extra}
        done = subprocess.Popen([sys.executable, "-m", "costmodel", "list", "precisions"], stdout=theirs, stdin=subprocess.DEVNULL, env=environment,
                                cwd=Path(__file__).parents[2])
        os.close(theirs)
        said = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:
                break
            if not part:
                break
            said += part
        os.close(ours)
        assert done.wait() == 0
        assert (b"\x1b[" in said) == expected


# --- JSON and files

def test_json_has_the_documented_keys() -> None:
    data = json.loads(call(f"{ASKED} --json").stdout)
    assert list(data) == ["schema", "run", "assumed", "profile", "report", "training", "advice"]
    assert data["schema"] == 1
    assert set(data["run"]) == {"model", "cluster", "plan", "recipe"}
    assert set(data["profile"]) == {"name", "guess"}
    page = (Path(__file__).parents[2] / "docs" / "report.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    role = data["report"]["roles"][0]
    for part in (data, data["report"], role, role["memory"], role["time"], role["memory"]["allocated"], *role["collectives"], data["report"]["scaling"]):
        assert set(part) - {"derived"} <= documented
    assert set(data["report"]["derived"]) == {"step_s", "tokens_per_s", "tokens_per_s_per_gpu", "mfu", "hfu", "verdict"}


def test_json_reads_back_as_the_report() -> None:
    data = json.loads(call(f"{ASKED} --json").stdout)
    step = report_from_dict(data["report"])
    assert json.loads(json.dumps(step.to_dict())) == data["report"]


def test_output_to_a_file(tmp_path: Path) -> None:
    result = call(f"{ASKED} -o {tmp_path}/a.json")
    assert (result.exit_code, result.stdout) == (0, "")
    assert json.loads((tmp_path / "a.json").read_text())["schema"] == 1
    assert call(f"{ASKED} -o {tmp_path}/a.txt").exit_code == 0
    assert "ASSUMED" in (tmp_path / "a.txt").read_text()
    assert call(f"{ASKED} --json --output {tmp_path}/b.txt").exit_code == 0
    assert json.loads((tmp_path / "b.txt").read_text())["schema"] == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "a.txt", "b.txt"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "a.json"
    target.write_text("old")

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("costmodel.atomic.os.replace", refuse)
    result = call(f"{ASKED} -o {target}")
    assert result.exit_code == 2
    assert result.stderr == f"error: -o {target}: it cannot be written (No space left on device). Choose another place.\n"
    assert [p.read_text() for p in tmp_path.iterdir()] == ["old"]


# --- exit codes

def test_a_run_that_does_not_fit_still_answers_and_exits_3() -> None:
    result = call("predict --params 70B --gpus 1 --gpu a100")
    assert result.exit_code == 3
    assert "does not fit: needs" in result.stdout


def test_version() -> None:
    from costmodel import __version__
    assert call("--version").stdout == f"costmodel {__version__}\n"


def test_it_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "costmodel", *ASKED.split()], capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
