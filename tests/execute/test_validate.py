"""`execute validate`: the standard suite, what is judged, and how what is outside is named."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from small_runs import LLAMA, cpu_run
from typer.testing import CliRunner

import execute.validate
from costmodel.prediction import predict
from costmodel.records import Outcome, read_record
from costmodel.report import RoleReport, StepReport
from costmodel.spec import Run
from execute.cli import app
from execute.dryrun import dry_run
from execute.observe.environment import environment
from execute.strategies import strategy_name
from execute.suite import Case, Machine, standard
from execute.validate import Checked, check, unlike

FILE = """
[model]
layers = 1
hidden = 64
heads = 2
ffn = 128
vocab = 128
[cluster]
gpu = "cpu_epyc_2core"
gpus = 2
[plan]
strategy = "zero1"
[recipe]
seq_len = 32
precision = "fp32"
"""


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(FILE)
    return str(path)


def validated(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["validate", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_the_suite_of_a_cpu_has_every_strategy() -> None:
    cases = standard(Machine("cpu_epyc_2core", 4, False), lambda run: True)
    assert {strategy_name(case.run) for case in cases} == {"single", "ddp", "zero1", "zero2", "fsdp", "tensor", "pipeline"}
    assert any(case.run.plan.dp_replicate > 1 and case.run.plan.zero == 3 for case in cases)
    assert {case.run.plan.schedule for case in cases if case.run.plan.pp > 1} == {"gpipe", "1f1b", "interleaved"}


def test_one_gpu_performs_what_one_gpu_can() -> None:
    assert {case.run.plan.world_size for case in standard(Machine("l4", 1, True), lambda run: True)} == {1}


def test_the_model_is_the_largest_of_which_every_case_fits() -> None:
    def small(run: Run) -> bool:
        return run.model.hidden <= 1024
    assert {case.run.model.hidden for case in standard(Machine("h100_sxm", 8, True), small)} == {1024}
    assert {case.run.model.hidden for case in standard(Machine("l4", 8, True), lambda run: False)} == {512}


def test_a_dry_run_against_the_prediction_of_every_role(run_file: str) -> None:
    code, out, errors = validated(run_file, "--mode", "dryrun", "--json")
    answer = json.loads(out)
    assert (code, answer["within_tolerance"]) == (0, True)
    case, = answer["cases"]
    assert [(role["role"], role["against"]) for role in case["roles"]] == [("fullest shard", "dryrun"), ("emptiest shard", "dryrun")]
    assert errors == "validate: 1 of 1: mine\n"


def ways(out: str) -> list[str]:
    """In what each row of the table was seen."""
    return [word for line in out.splitlines() for word in line.split() if line.startswith("  ") and word in ("dryrun", "solo", "run")]


def test_the_job_is_measured_beside_the_dry_run_and_recorded(run_file: str, tmp_path: Path) -> None:
    """Real ranks; the states must be equal and collectives too. Time is shown."""
    code, out, errors = validated(run_file, "--steps", "2", "--record", str(tmp_path / "records"))
    assert code == 0, out + errors
    assert ways(out) == ["dryrun", "run", "dryrun", "run"]
    assert "time is shown, not judged" in out
    kept, = (tmp_path / "records").iterdir()
    assert read_record(kept).outcome.kind == "ok"


def test_constants_of_another_machine_judge_with_a_warning(run_file: str, tmp_path: Path) -> None:
    """Not a refusal: the same rows are judged, and text and JSON say whose constants they are judged by."""
    ours, theirs, nobodys = (tmp_path / f"{name}.toml" for name in ("ours", "theirs", "nobodys"))
    here = environment()
    ours.write_text(f"[machine]\nhost = {json.dumps(here.host)}\n")
    theirs.write_text('[machine]\nhost = "lab2"\naccelerator = "h100_sxm"\n')
    nobodys.write_text("")
    cases = [Case("one", cpu_run()), Case("two", cpu_run(LLAMA, "ddp", 2))]
    assert unlike(cases, None) == unlike(cases, str(ours)) == []
    assert unlike(cases, str(nobodys)) == [f"{nobodys}: it does not say which machine it was fitted on"]
    where, what = unlike(cases, str(theirs))
    assert where.startswith(f"{theirs}: it was fitted on lab2, and this is {here.host} (")
    assert what == f"{theirs}: it was fitted for h100_sxm, and prices cpu_epyc_2core here"
    code, out, errors = validated(run_file, "--mode", "solo", "--steps", "2", "--profile", str(theirs), "--json")
    assert code in (0, 4), errors
    answer = json.loads(out)
    assert answer["warnings"] == [where, what]
    assert answer["cases"][0]["time_judged"]
    code, out, _ = validated(run_file, "--mode", "solo", "--steps", "2", "--profile", str(theirs))
    assert f"warning: {where}; its times are judged all the same\n" in out


def test_one_rank_alone(run_file: str) -> None:
    code, out, errors = validated(run_file, "--mode", "solo", "--steps", "2")
    assert code == 0, out + errors
    assert ways(out) == ["dryrun", "solo", "dryrun"]
    assert all(len(line) <= 80 for line in out.splitlines() if not line.startswith("time is shown"))


def test_a_wrong_prediction_is_named_and_exits_4(run_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_byte_more(run: Run, profile: Any = None, **more: Any) -> StepReport:
        report = predict(run)
        first, *rest = report.roles
        assert first.memory is not None
        memory = replace(first.memory, states={**first.memory.states, "optimizer": first.memory.states["optimizer"] + 1})
        return replace(report, roles=(replace(first, memory=memory), *rest))

    monkeypatch.setattr(execute.validate, "predict", one_byte_more)
    code, out, _ = validated(run_file, "--mode", "dryrun")
    outside = [line for line in out.splitlines() if line.startswith("outside: ")]
    assert code == 4
    assert len(outside) == 1
    assert outside[0].startswith("outside: mine: fullest shard, dryrun: between steps: optimizer: predicted ")


def twice_as_slow(run: Run) -> tuple[Outcome, dict[int, RoleReport]]:
    role = predict(run).roles[0]
    assert role.time is not None
    return Outcome(), {0: replace(dry_run(run).roles[0], time=replace(role.time, step_s=2 * role.time.step_s))}


def test_time_is_judged_with_constants_fitted_here_only(tmp_path: Path) -> None:
    profile = tmp_path / "mine.toml"
    profile.write_text("")
    case = Case("slow", cpu_run(LLAMA))

    def rows(profile: str | None) -> list[str]:
        return list(check(case, "run", profile, twice_as_slow).outside())

    assert rows(None) == []
    late, = rows(str(profile))
    assert late.startswith("slow: every rank, run: step: predicted ")
    assert late.endswith("(-50.0%)")


def test_a_run_that_ends_badly_is_told_and_keeps_its_exit_code(run_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*arguments: Any) -> Checked:
        return Checked("mine", cpu_run(LLAMA), Outcome("oom", 1, "no memory left"), (), False)
    monkeypatch.setattr(execute.validate, "check", out_of_memory)
    code, out, _ = validated(run_file)
    assert code == 3
    assert "ended badly: mine: no memory left" in out


@pytest.mark.parametrize(("arguments", "says"), [
    (("--profile", "nope.toml"), "--profile nope.toml: there is no such file."), (("--steps", "0"), "--steps 0: must be at least 1. Use --steps 10."),
    (("--timeout", "0"), "--timeout 0: must be above 0. Use --timeout 600."), (("--gpu", "nope"), "--gpu nope: is not in the catalogue."),
    (("--profile", "broken.toml"), "--profile broken.toml: the file is not valid TOML")])
def test_what_is_wrong_is_refused_before_the_first_case(arguments: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.toml").write_text("[software\n")
    code, out, errors = validated(*arguments, "--device", "cpu")
    assert (code, out) == (2, "")
    assert errors.startswith(f"error: {says}")
    assert "validate: 1 of" not in errors


def test_a_device_that_is_not_here_is_refused_before_the_first_case(run_file: str) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    code, _, errors = validated(run_file, "--device", "cuda")
    assert (code, errors) == (2, "error: --device cuda: PyTorch sees no GPU on this machine. Use --device cpu, or leave it out.\n")


@pytest.mark.parametrize("arguments", [("--mode", "wet"), ("--only", "nothing like it", "--mode", "dryrun"), ("--device", "tpu")])
def test_what_it_does_not_know_exits_2(arguments: tuple[str, ...]) -> None:
    assert validated(*arguments)[0] == 2
