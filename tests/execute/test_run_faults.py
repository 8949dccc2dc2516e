"""Real jobs that end badly: each leaves a record, exits with its code, and leaves no process behind."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

from running_jobs import FOREVER, PATIENCE_S, Running

from costmodel.records import Record, read_record

RAISE_ON_RANK_1 = """
import os
if os.environ.get("RANK") == "1":
    from execute import data
    def fail(self, index, length):
        raise ValueError("no such sample")
    data.Synthetic.__call__ = fail
"""
pytestmark = pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks for processes in /proc")


def record(running: Running, name: str = "record.json") -> Record:
    return read_record(running.folder / name)


def test_a_rank_killed_in_a_step_is_named_with_its_signal(start: Callable[..., Running]) -> None:
    running = start(*FOREVER, "-o", "record.json")
    os.kill(running.pid_of(1, "timed steps"), signal.SIGKILL)
    code, _, errors = running.ended()
    outcome = record(running).outcome
    assert (code, outcome.kind, outcome.rank, outcome.signal) == (5, "signal", 1, "SIGKILL"), errors
    assert running.left() == []


def test_a_rank_that_raises_is_named_with_what_it_said(start: Callable[..., Running], tmp_path: Path) -> None:
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(RAISE_ON_RANK_1)
    running = start(*FOREVER, "--record", "records", extra_path=hooks)
    code, _, errors = running.ended()
    kept, = (running.folder / "records").iterdir()
    outcome = read_record(kept).outcome
    assert (code, outcome.kind, outcome.rank, outcome.message) == (5, "failed", 1, "ValueError: no such sample"), errors
    assert running.left() == []


def in_timed_steps(start: Callable[..., Running], timeout_s: str) -> Running | None:
    """A job that has come to its timed steps; None where this machine was too busy for it to come so far in the time."""
    running = start(*FOREVER, "--timeout", timeout_s, "-o", "record.json")
    try:
        running.pid_of(1, "timed steps")
    except AssertionError:
        return None
    return running


def test_a_hang_ends_with_the_time_and_says_where_each_rank_was(start: Callable[..., Running]) -> None:
    running = in_timed_steps(start, "30") or in_timed_steps(start, "200")
    assert running is not None
    os.kill(running.pid_of(1, "timed steps"), signal.SIGSTOP)
    code, _, errors = running.ended()
    outcome = record(running).outcome
    assert (code, outcome.kind) == (6, "timeout"), errors
    assert "rank 1 was in: 100000000 timed steps" in outcome.message
    assert running.left() == []


def test_out_of_memory_says_what_was_tried(start: Callable[..., Running]) -> None:
    """Of the process alone: RLIMIT_DATA of 3 GiB, and an embedding of 4 GiB."""
    running = start("-o", "record.json", "--no-memory-check", gpus=1, strategy="single", vocab=1 << 25, limit=3 << 30)
    code, _, errors = running.ended()
    outcome = record(running).outcome
    assert (code, outcome.kind, outcome.rank, outcome.tried_bytes) == (3, "oom", 0, (1 << 25) * 32 * 4), errors
    assert running.left() == []


def test_what_the_host_cannot_hold_is_refused_with_the_figure(start: Callable[..., Running]) -> None:
    """A vocabulary of 2^33 and a width of 32: 2 x 2^33 x 32 x 16 bytes of states are 8 TiB, and 16 logits of fp32 a rank 512 GiB."""
    code, out, errors = start("-o", "record.json", vocab=1 << 33).ended()
    assert (code, out) == (2, "")
    said = errors.splitlines()[-1]
    assert said.startswith("error: host memory = 17.00 TiB: 2 ranks of this run need that much at least (8.50 TiB each: 8.00 TiB of states, 512.")
    assert said.endswith("or --no-memory-check.")


def test_ctrl_c_leaves_a_record_and_nothing_else(start: Callable[..., Running]) -> None:
    running = start(*FOREVER, "-o", "record.json")
    running.pid_of(0, "timed steps")
    running.process.send_signal(signal.SIGINT)
    code, _, errors = running.ended()
    outcome = record(running).outcome
    assert (code, outcome.kind, outcome.signal) == (130, "interrupted", "SIGINT"), errors
    assert running.left() == []


def test_ranks_end_with_a_launcher_that_was_killed(start: Callable[..., Running]) -> None:
    running = start(*FOREVER)
    running.pid_of(1, "timed steps")
    running.process.kill()
    end = time.monotonic() + PATIENCE_S
    while running.left() and time.monotonic() < end:
        time.sleep(0.2)
    assert running.left() == []


def test_a_full_disk_loses_the_record_and_not_the_answer(start: Callable[..., Running], tmp_path: Path) -> None:
    (tmp_path / "full.json").symlink_to("/dev/full")
    running = start("--steps", "1", "--warmup", "1", "-o", str(tmp_path / "full.json"), gpus=1, strategy="single")
    code, out, errors = running.ended()
    assert (code, "every rank of 1: a real job" in out) == (1, True), errors
    assert "No space left on device" in errors


def test_a_read_only_place_is_refused_before_anything_runs(start: Callable[..., Running]) -> None:
    code, out, errors = start("--record", "/proc/records").ended()
    assert (code, out) == (2, "")
    assert errors.startswith("error: --record /proc/records: nothing can be written there (")


@pytest.mark.parametrize(("arguments", "says"), [
    (("--nproc", "4"), "--nproc 4: it starts 4 ranks, and the run has 2 (--gpus). Leave it out, or use --gpus 4."),
    (("--nnodes", "3"), "--nnodes 3: the run has 2 ranks, which 3 nodes cannot share evenly. Use a divisor of 2."),
    (("--nnodes", "2", "--node-rank", "2"), "--node-rank 2: nodes of --nnodes 2 are numbered from 0. Use --node-rank 0 to 1."),
    (("--data", "nofile.txt"), "--data nofile.txt: there is no such file. Give a text file, or leave it out for random tokens."),
    (("--steps", "0"), "--steps 0: must be at least 1. Use --steps 1."), (("--timeout", "0"), "--timeout 0: must be above 0. Use --timeout 1800."),
    (("--device", "tpu"), "--device tpu: it is cpu or cuda. Leave it out for the GPU where there is one."),
    (("--trace", "t.txt"), "--trace t.txt: a Chrome trace ends in .json or .json.gz. Use --trace t.txt.json."),
])
def test_what_cannot_be_is_refused(arguments: tuple[str, ...], says: str, start: Callable[..., Running]) -> None:
    code, out, errors = start(*arguments).ended()
    assert (code, out, errors.strip()) == (2, "", f"error: {says}")


def test_a_torchrun_of_another_size_is_refused(start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    code, out, errors = start().ended()
    assert (code, out, errors) == (2, "", "error: torchrun started 3 ranks, and the run has 2 (--gpus). Use --gpus 3.\n")


def test_what_a_rank_s_machine_cannot_do_is_refused_by_its_option(start: Callable[..., Running]) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    code, _, errors = start("--device", "cuda", gpus=1, strategy="single").ended()
    assert code == 2
    assert errors.splitlines()[-1] == "error: --device cuda: PyTorch sees no GPU on this machine. Use --device cpu, or leave it out."
