"""Records: what is written is what is read, whole or not at all; a broken file is refused in one line."""

import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from costmodel import build_run, predict
from costmodel.atomic import write_atomically
from costmodel.cli.files import read_run_file
from costmodel.records import (
    EXIT_CODES,
    Environment,
    Outcome,
    Record,
    RecordError,
    read_record,
    read_records,
    record_from_dict,
    unique_name,
    write_record,
)


def sample(**changes: Any) -> Record:
    from dataclasses import replace
    run = build_run(params="100M", cluster={"gpus": 2}, plan={"zero": 3}, recipe={"seq_len": 256})
    report = replace(predict(run), provenance="run")
    there = Environment("H100 ü", 8, 80 << 30, "node1", "Linux x86_64", 96, 1 << 40, {"torch": "2.13.0"})
    record = Record(run, "run", report, Outcome(), there, "2026-01-02T03:04:05Z", "execute run", {0: (0.25, 0.125), 1: (0.5,)}, {"recipe.seq_len": "given"})
    return replace(record, **changes)


OOM = Outcome("oom", rank=1, message="CUDA out of memory", tried_bytes=7, allocated_bytes=5, reserved_bytes=6)


@pytest.mark.parametrize("record", [sample(), sample(report=None, outcome=OOM), sample(environment=None)], ids=["ok", "oom", "no environment"])
def test_a_record_comes_back_as_it_was(record: Record, tmp_path: Path) -> None:
    path = write_record(record, tmp_path)
    assert read_record(path) == record
    assert list(read_records(tmp_path)) == [(path, record)]


def test_exit_codes_are_those_of_the_command_line() -> None:
    assert EXIT_CODES == {"ok": 0, "oom": 3, "failed": 5, "signal": 5, "timeout": 6, "interrupted": 130}
    assert sample(outcome=OOM, report=None).to_dict()["outcome"]["exit_code"] == 3


def test_a_record_is_a_run_file(tmp_path: Path) -> None:
    record = sample()
    from costmodel import resolve
    assert resolve(read_run_file(write_record(record, tmp_path / "a.json"))).run == record.run


def test_a_report_of_another_kind_is_refused() -> None:
    with pytest.raises(RecordError, match="the record says solo and its report says run"):
        sample(provenance="solo")


def test_names_are_unique_and_sort_by_date() -> None:
    record = sample()
    names = {unique_name(record) for _ in range(50)}
    assert len(names) == 50
    assert all(name.startswith("20260102T030405-run-llama-style-100m-2x-ok-") for name in names)


BROKEN = {
    "cut": (lambda text: text[:200], r"not valid JSON: .* \(line \d+, column \d+\)"),
    "a list": (lambda text: "[]", "it is not a record"),
    "a prediction": (lambda text: text.replace('"kind": "record"', '"kind": "else"'), "it is not a record"),
    "schema": (lambda text: text.replace('"schema": 1', '"schema": 2'), "its schema is 2, and this version reads 1"),
    "no outcome": (lambda text: text.replace('"outcome"', '"out"'), "it has no outcome"),
    "ending": (lambda text: text.replace('"kind": "ok"', '"kind": "fine"'), r"outcome\.kind: Input should be 'ok', "),
    "run": (lambda text: text.replace('"layers": ', '"layers": -'), r"run\.model\.layers: Input should be greater than 0"),
    "impossible run": (lambda text: text.replace('"dp_shard": 2', '"dp_shard": 3'), r"run: .*the degrees must multiply to the world size"),
    "report": (lambda text: text.replace('"world_size": 2', '"world_size": "two"'), r"report\.world_size: Input should be a valid integer"),
    "report is a number": (lambda text: json.dumps({**json.loads(text), "report": 3}), "report: "),
    "samples": (lambda text: text.replace("0.25", '"fast"'), r"step_s\.0\.0: Input should be a valid number"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    breaks, says = BROKEN[name]
    path = write_record(sample(), tmp_path)
    broken = breaks(path.read_text(encoding="utf-8"))
    assert broken != path.read_text(encoding="utf-8")
    path.write_text(broken, encoding="utf-8")
    with pytest.raises(RecordError, match=says) as error:
        read_record(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


def test_no_file_and_no_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="there is no such file"):
        read_record(tmp_path / "none.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(RecordError, match="byte 0 is not UTF-8 text"):
        read_record(tmp_path / "bytes.json")


@pytest.mark.parametrize("data", [None, 3, {}, {"kind": "record"}, {"kind": "record", "schema": 1}])
def test_anything_else_is_no_record(data: Any) -> None:
    with pytest.raises(RecordError):
        record_from_dict(data)


# -- atomically --------------------------------------------------------------------------------------------------------------


def test_a_reader_never_sees_a_part(tmp_path: Path) -> None:
    path, sizes, done = tmp_path / "file", (1_000_000, 2_000_000), threading.Event()
    write_atomically(path, "a" * sizes[0])

    def write() -> None:
        for i in range(30):
            write_atomically(path, "ab"[i % 2] * sizes[i % 2])
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while not done.is_set():
        seen.add(len(path.read_text()))
    writer.join()
    assert seen <= set(sizes)
    assert os.listdir(tmp_path) == ["file"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    write_atomically(tmp_path / "ours", "")
    (tmp_path / "any").touch()
    assert stat.S_IMODE((tmp_path / "ours").stat().st_mode) == stat.S_IMODE((tmp_path / "any").stat().st_mode)


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    write_atomically(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there").read_text() == "new"
