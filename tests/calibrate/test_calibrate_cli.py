"""`calibrate fit`, `show` and `diff`: files in, a profile that costmodel reads out, and one message for what cannot be used."""

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from calibrate.cli import app
from calibrate.probe.record import Probe, Sample, probe_run
from costmodel import catalog
from costmodel.catalog.machines import Machine
from costmodel.catalog.profiles import load_profile
from costmodel.records import Environment, Outcome, Record, write_record
from costmodel.report import MemoryReport, Peak, RoleReport, StepReport, TimeReport

HERE = Environment("a CPU", 1, None, "here", "Linux", 2, 1 << 34, {"torch": "2.13.0"})
CLUSTER = catalog.cluster(gpus=2, gpu="cpu_epyc_2core")


def call(*arguments: str | Path) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture
def probed(tmp_path: Path) -> Path:
    """Matrix multiplications at exactly 40 GFLOP/s and additions at 9 GB/s."""
    samples = [Sample("matmul", "linear", (2.0 * n**3 / 40e9,), (), (1, n, n, n), "fp32", 2.0 * n**3, 12.0 * n * n) for n in (512, 768, 1024, 1536, 2048)]
    samples += [Sample("memory", "add", (n / 9e9,), nbytes=float(n)) for n in (10**7, 2 * 10**7, 4 * 10**7, 8 * 10**7)]
    path = tmp_path / "probe.json"
    path.write_text(json.dumps(Probe(CLUSTER, HERE, "2026-01-01T00:00:00+00:00", tuple(samples)).to_dict()))
    return path


def test_a_fitted_profile_predicts_what_was_measured(probed: Path, tmp_path: Path) -> None:
    profile = tmp_path / "here.toml"
    code, out, err = call("fit", probed, "-o", profile)
    assert code == 0, err
    assert "DETERMINED" in out and "hardware.cpu" in out and "HELD OUT" in out
    run = probe_run(CLUSTER)
    fitted = load_profile(run, str(profile))
    bandwidth = CLUSTER.accelerator.memory_bytes_per_s * fitted.value("bandwidth.share")
    assert bandwidth == pytest.approx(9e9, rel=0.05)
    constant = fitted.constant("bandwidth.share")
    assert constant.basis == "fitted" and constant.date == "2026-01-01" and constant.versions == "torch 2.13.0"
    assert constant.source == "probe of here, memory"
    assert constant.log_sd < load_profile(run).constant("bandwidth.share").log_sd
    assert fitted.machines == (Machine("here", "a CPU", "cpu_epyc_2core", "2.13.0", "2026-01-01"),)
    assert "fitted on here (a CPU, torch 2.13.0, 2026-01-01), as cpu_epyc_2core\n" in call("show", profile)[1]


def test_the_json_of_a_fit_names_every_candidate(probed: Path, tmp_path: Path) -> None:
    code, out, _ = call("fit", probed, "-o", tmp_path / "here.toml", "--json")
    assert code == 0
    found = json.loads(out)
    states = {(c["place"], c["key"]): c["state"] for c in found["constants"]}
    assert states["hardware.cpu", "bandwidth.share"] == "determined"
    assert states["hardware.cpu", "attention.sdpa.share"] == "prior"
    assert found["held_out"]["twin"]["groups"] == 9


def test_records_of_steps_are_fitted(tmp_path: Path) -> None:
    """Steps measured 1.3 times as slow as predicted: the profile makes up for it."""
    from costmodel import build_run, predict
    folder = tmp_path / "records"
    folder.mkdir()
    for hidden in (128, 256, 512, 1024):
        run = build_run(model={"layers": 2, "hidden": hidden, "heads": hidden // 64, "ffn": 4 * hidden, "vocab": 2048},
                        cluster={"gpu": "cpu_epyc_2core", "gpus": 1}, recipe={"seq_len": 256, "precision": "fp32"})
        expected = predict(run, scaling=False).step_s
        assert expected is not None
        steps = tuple(1.3 * expected * f for f in (0.99, 1.0, 1.01))
        time = TimeReport(steps[1], {}, {}, {}, {})
        report = StepReport("run", (RoleReport("every rank", 1, 0, None, time, None),), 1, run.tokens_per_step)
        write_record(Record(run, "run", report, Outcome(), HERE, "2026-01-01T00:00:00+00:00", step_s={0: steps}), folder)
    profile = tmp_path / "here.toml"
    code, _, err = call("fit", folder, "-o", profile)
    assert code == 0, err
    run = build_run(model={"layers": 2, "hidden": 512, "heads": 8, "ffn": 2048, "vocab": 2048}, cluster={"gpu": "cpu_epyc_2core", "gpus": 1},
                    recipe={"seq_len": 256, "precision": "fp32"})
    before, after = predict(run, scaling=False).step_s, predict(run, str(profile), scaling=False).step_s
    assert before and after
    assert math.log(after / before / 1.3) == pytest.approx(0.0, abs=0.1)


def test_the_time_of_a_rank_alone_is_not_taken_for_the_step_of_its_job() -> None:
    from calibrate.reading import record_points
    from costmodel import build_run
    time, memory = TimeReport(1.0, {}, {}, {}, {}), MemoryReport(Peak(2, "", {}), {}, {}, None, reserved_bytes=3)
    for gpus, figures in ((1, ["time", "reserved"]), (8, ["reserved"])):
        run = build_run(params="1B", cluster={"gpus": gpus})
        report = StepReport("solo", (RoleReport("every rank", gpus, 0, memory, time, None),), gpus, run.tokens_per_step)
        record = Record(run, "solo", report, Outcome(), HERE, "2026-01-01T00:00:00+00:00", step_s={0: (1.0, 1.1)})
        assert [point.figure for point in record_points("a", record)] == figures


def test_show_and_diff_print_tables_and_plots(probed: Path, tmp_path: Path) -> None:
    profile = tmp_path / "here.toml"
    call("fit", probed, "-o", profile)
    code, out, _ = call("show", profile, "--records", probed)
    assert code == 0
    assert "bandwidth.share" in out and "measured, s (predicted upwards)" in out and "PREDICTED" in out
    code, out, _ = call("diff", profile, "cpu")
    assert code == 0
    line = next(row for row in out.splitlines() if "bandwidth.share" in row)
    assert "0.7" in line.split()
    code, out, _ = call("diff", profile, profile)
    assert "0 of" in out and "none" in out


@pytest.mark.parametrize(("arguments", "message"), [
    (("fit", "nowhere.json", "-o", "x.toml"), "nowhere.json: there is no such file."),
    (("fit", "PROBE", "-o", "x.json"), "a profile is a .toml file"),
    (("fit", "PROBE", "-o", "x.toml", "--constants", "attention.sdpa.share"), "do not determine hardware.cpu: attention.sdpa.share"),
    (("fit", "PROBE", "-o", "x.toml", "--constants", "no.such"), "none of the constants asked for matters to these records"),
    (("show", "nowhere"), "no profile of that name has constants of its own"),
    (("show", "nowhere.toml"), "there is no such file")])
def test_what_cannot_be_used_is_one_message(arguments: tuple[str, ...], message: str, probed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = call(*(str(probed) if a == "PROBE" else a for a in arguments))
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert not (tmp_path / "x.toml").exists()
