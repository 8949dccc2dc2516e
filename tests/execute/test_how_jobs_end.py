"""Which of several bad ends was the cause: what the files of a job say."""

from pathlib import Path
from typing import Any

import pytest

from costmodel.records import Outcome
from costmodel.spec import PlanError
from execute import job as files
from execute.job import RankResult
from execute.launch import Ended, how_it_ended

LOST = Outcome("failed", 0, "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:1234")
OUT_OF_MEMORY = Outcome("oom", 1, "tried", tried_bytes=1 << 30)


def ended(folder: Path, results: list[RankResult], killed: dict[int, int] | None = None, error: str = "", exit_code: int = 1) -> Ended:
    """A job of two ranks: what each wrote, and the signals by which torchrun saw ranks die."""
    for result in results:
        files.write_result(folder, result)
    failures = [{"rank": rank, "exit_code": -number} for rank, number in (killed or {}).items()]
    files.write(folder, "agent.json", {"pid": 1, "failures": failures, "error": error})
    (folder / "log").write_text("one line\nlast line\n\n")
    return how_it_ended(folder, exit_code, 2)


def test_a_killed_rank_is_the_cause_and_not_the_peer_that_lost_it(tmp_path: Path) -> None:
    outcome = ended(tmp_path, [RankResult(0, 1.0, LOST)], {1: 9}).outcome
    assert (outcome.kind, outcome.rank, outcome.signal) == ("signal", 1, "SIGKILL")
    assert "killed by SIGKILL; the kernel does so when the host runs out of memory" in outcome.message


def test_an_error_is_the_cause_and_not_the_sigterm_that_torchrun_sends_the_others(tmp_path: Path) -> None:
    assert ended(tmp_path, [RankResult(1, 1.0, OUT_OF_MEMORY)], {0: 15}).outcome == OUT_OF_MEMORY


def test_a_sigterm_from_elsewhere_is_the_cause_where_the_others_only_lost_a_peer(tmp_path: Path) -> None:
    assert ended(tmp_path, [RankResult(0, 1.0, LOST)], {1: 15}).outcome.signal == "SIGTERM"


def test_of_two_errors_the_earlier_is_the_cause(tmp_path: Path) -> None:
    late, early = Outcome("failed", 0, "late"), Outcome("failed", 1, "early")
    assert ended(tmp_path, [RankResult(0, 2.0, late), RankResult(1, 1.0, early)]).outcome == early


def test_ranks_with_results_are_done_however_they_left(tmp_path: Path) -> None:
    done = [RankResult(rank, 1.0) for rank in range(2)]
    first = RankResult(0, 1.0, others=tuple(done))
    assert ended(tmp_path, [first, done[1]], {1: 6}) == Ended(Outcome(), {0: done[0], 1: done[1]})


@pytest.mark.parametrize(("error", "says"), [("DistNetworkError: port in use", "DistNetworkError: port in use"),
                                             ("", "torchrun ended with exit code 1: last line")])
def test_a_job_that_did_not_begin_says_what_torchrun_said(error: str, says: str, tmp_path: Path) -> None:
    assert ended(tmp_path, [], error=error).outcome == Outcome("failed", None, says)


def test_what_a_rank_refuses_is_raised(tmp_path: Path) -> None:
    refused: tuple[str, Any, str, str] = ("device", "cuda", "there is none.", "Use cpu.")
    with pytest.raises(PlanError) as error:
        ended(tmp_path, [RankResult(0, 1.0, Outcome("failed", 0), refused), RankResult(1, 1.0, LOST)])
    assert error.value.field == "device"
