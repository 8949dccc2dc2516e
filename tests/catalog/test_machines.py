"""The machines that a profile was fitted on: what a file may say, and what is unlike this one."""

from pathlib import Path

import pytest

from costmodel import build_run, predict
from costmodel.catalog.machines import Machine, differences, distinct
from costmodel.catalog.profiles import file_constants, load_profile
from costmodel.spec import PlanError

HERE = Machine("lab1", "AMD EPYC", torch="2.13.0")
FITTED = HERE._replace(accelerator="cpu_epyc_2core", date="2026-11-30")
FILE = """
[[machine]]
host = "lab1"
device = "AMD EPYC"
accelerator = "cpu_epyc_2core"
torch = "2.13.0"
date = "2026-11-30"
[hardware.cpu.bandwidth]
share = 0.5
"""
RUN = build_run(model={"layers": 1, "hidden": 64, "heads": 2, "ffn": 128, "vocab": 128}, cluster={"gpu": "cpu_epyc_2core"}, recipe={"seq_len": 32})
ON_H100 = build_run(model="gpt2", cluster={"gpu": "h100"}, recipe={"seq_len": 1024})


def written(folder: Path, text: str) -> str:
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_machine_is_no_constant_and_stays_with_the_profile(tmp_path: Path) -> None:
    path = written(tmp_path, FILE)
    profile = load_profile(RUN, path)
    assert profile.machines == profile.replace({"bandwidth.share": 0.4}).machines == (FITTED,)
    assert profile.value("bandwidth.share") == 0.5
    assert list(file_constants(Path(path))) == [("hardware.cpu", "bandwidth.share")]
    assert load_profile(RUN, written(tmp_path, FILE.replace("[[machine]]", "[machine]"))).machines == (FITTED,)
    assert load_profile(RUN).machines == ()


@pytest.mark.parametrize(("text", "message"), [
    ('machine = "lab1"', "profile = machine = 'lab1': mine.toml names a machine by a table of host, device, accelerator, torch and date. "
                         'Write [machine] and under it host = "…".'),
    ('[machine]\nhosts = "lab1"', "profile = machine.hosts: a machine has host, device, accelerator, torch and date. Remove it."),
    ('[machine]\nhost = "lab1"\ntorch = 2.13', "profile = machine.torch = 2.13: it must be text. Put it in quotes."),
    ('[[machine]]\ndevice = "a CPU"', 'profile = machine: mine.toml names a machine without its host. Give host = "…", or remove the table.')])
def test_a_mistake_in_a_machine_is_one_message(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError) as error:
        load_profile(RUN, written(tmp_path, text))
    assert str(error.value) == message


def test_a_machine_that_was_measured_twice_is_named_once_as_it_was_last() -> None:
    later = FITTED._replace(torch="2.14.0", date="2027-01-02")
    other = FITTED._replace(host="lab2")
    assert distinct([later, other, FITTED]) == (later, other)


@pytest.mark.parametrize(("fitted", "accelerator", "words"), [
    ((FITTED,), "cpu_epyc_2core", []),
    ((), "cpu_epyc_2core", ["it does not say which machine it was fitted on"]),
    ((FITTED._replace(host="lab2"),), "cpu_epyc_2core",
     ["it was fitted on lab2 (AMD EPYC, torch 2.13.0, 2026-11-30), and this is lab1 (AMD EPYC, torch 2.13.0)"]),
    ((FITTED._replace(device="Intel Xeon"), FITTED._replace(host="lab2")), "cpu_epyc_2core",
     ["it was fitted on lab1 (Intel Xeon, torch 2.13.0, 2026-11-30) and lab2 (AMD EPYC, torch 2.13.0, 2026-11-30), and this is lab1 (AMD EPYC, torch 2.13.0)"]),
    ((FITTED, FITTED._replace(host="lab2")), "cpu_epyc_2core", []),
    ((FITTED,), "h100_sxm", ["it was fitted for cpu_epyc_2core, and prices h100_sxm here"]),
    ((FITTED._replace(torch="2.7.0"),), "cpu_epyc_2core", ["it was fitted with torch 2.7.0, and this is torch 2.13.0"])])
def test_what_is_unlike_this_machine_is_said(fitted: tuple[Machine, ...], accelerator: str, words: list[str]) -> None:
    assert differences(fitted, HERE, [accelerator, accelerator]) == words


def test_a_prediction_for_another_device_than_the_profile_was_fitted_for_says_so(tmp_path: Path) -> None:
    path = written(tmp_path, FILE)
    (note,) = [n for n in predict(ON_H100, path, scaling=False).notes if "fitted" in n]
    assert note.startswith("Profile mine over ") and note.endswith("it was fitted for cpu_epyc_2core, and prices h100_sxm here.")
    assert not [n for n in predict(RUN, path, scaling=False).notes if "fitted" in n]
