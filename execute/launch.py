"""Start a job under torchrun, watch it, and say how it ended. No process of it outlives this one's call. Loads no PyTorch itself.

The processes: this one; torchrun (execute.agent), in a session of its own; the ranks (execute.rank), each in one of its own, as torchrun
starts them. They speak through files (execute.job).
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from costmodel.records import Outcome
from costmodel.spec import PlanError
from execute import job as files
from execute.job import Job, RankResult

POLL_S, GRACE_S = 0.1, 10.0
LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited", "NCCL communicator was aborted",
             "connectFullMesh", "Socket Timeout", "recvValue failed")
"""What a rank says whose peer is gone: not the cause."""


class Nodes(NamedTuple):
    """Where this node stands among those of a job."""

    number: int = 1
    rank: int = 0
    address: str = "127.0.0.1"
    """Of node 0."""
    port: int = 29500


class Ended(NamedTuple):
    """How a job ended, and what its ranks saw where all came through (on node 0)."""

    outcome: Outcome
    ranks: dict[int, RankResult]


class Stopped(BaseException):
    """Somebody wants the job to end."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)


def launch(job: Job, nproc: int, nodes: Nodes, progress: Callable[[str], None]) -> Ended:
    """Perform a job with `nproc` ranks on this node. Raises PlanError where a rank found that its machine cannot perform it."""
    with tempfile.TemporaryDirectory(prefix="execute-") as name:
        folder = Path(name)
        files.write(folder, "job.json", job.to_dict())
        with (folder / "log").open("wb") as log, stoppable():
            agent = subprocess.Popen([sys.executable, "-m", "execute.agent", name, *torchrun_arguments(nproc, nodes)], stdin=subprocess.DEVNULL,
                                     stdout=log, stderr=log, start_new_session=True, env=_environment())
            try:
                late = _watch(agent, folder, job.timeout_s, progress)
            except Stopped as stopped:
                return Ended(Outcome("interrupted", None, f"stopped by {stopped.signal.name}", stopped.signal.name), {})
            finally:
                end_all(agent, folder)
        if late:
            return Ended(Outcome("timeout", None, f"no end within {job.timeout_s:g} s; {_whereabouts(folder)}"), {})
        return how_it_ended(folder, agent.returncode, nproc)


def torchrun_arguments(nproc: int, nodes: Nodes) -> list[str]:
    """One node finds a port of its own; several meet at node 0."""
    each = ["--nproc-per-node", str(nproc), "--max-restarts", "0"]
    if nodes.number == 1:
        return ["--standalone", "--local-addr", "127.0.0.1", *each]
    return ["--nnodes", str(nodes.number), "--node-rank", str(nodes.rank), "--master-addr", nodes.address, "--master-port", str(nodes.port), *each]


def _environment() -> dict[str, str]:
    """This process's, with this package where the ranks find it."""
    root = str(Path(__file__).resolve().parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


@contextmanager
def stoppable() -> Iterator[None]:
    """Ctrl-C and SIGTERM raise Stopped, once; later ones do not disturb the cleaning up."""
    def stop(number: int, frame: Any) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(agent: "subprocess.Popen[bytes]", folder: Path, timeout_s: float, progress: Callable[[str], None]) -> bool:
    """Tell what the first rank of this node does, until torchrun ends (False) or the time is over (True)."""
    end, said = time.monotonic() + timeout_s, None
    while agent.poll() is None:
        doing = next((state["doing"] for state in _states(folder)), None)
        if doing != said:
            said = doing
            progress(doing or "starting")
        if time.monotonic() > end:
            return True
        time.sleep(POLL_S)
    return False


def _states(folder: Path) -> list[dict[str, Any]]:
    """What the ranks of this node last said, in their order."""
    states = [files.read(folder, path.name) for path in folder.glob("rank*.state.json")]
    return sorted((state for state in states if state), key=lambda state: state["rank"])


def _whereabouts(folder: Path) -> str:
    return "; ".join(f"rank {state['rank']} was in: {state['doing']}" for state in _states(folder)) or "no rank had begun"


def end_all(agent: "subprocess.Popen[bytes]", folder: Path) -> None:
    """Kill every rank of this node, then torchrun, which would wait for a rank that does not answer."""
    for state in _states(folder):
        if _is_rank(state["pid"], folder):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(state["pid"], signal.SIGKILL)
    for number in (signal.SIGTERM, signal.SIGKILL):
        if agent.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(agent.pid, number)
            with suppress(subprocess.TimeoutExpired):
                agent.wait(GRACE_S)


def _is_rank(pid: int, folder: Path) -> bool:
    """Whether a process number still is a rank of this job, where the system tells; it may have been given to another since."""
    command = Path(f"/proc/{pid}/cmdline")
    try:
        return str(folder).encode() in command.read_bytes()
    except OSError:
        return not Path("/proc/self").exists()


def how_it_ended(folder: Path, exit_code: int, nproc: int) -> Ended:
    """What the files say of a job that has ended by itself. Ranks that all have their results are done, however they left the process group."""
    results = files.read_results(folder)
    for result in results.values():
        if result.refused is not None:
            raise PlanError(*result.refused)
    told = files.read(folder, "agent.json") or {}
    if len(results) == nproc and all(result.outcome.kind == "ok" for result in results.values()):
        gathered = results[0].others if 0 in results else tuple(results.values())
        return Ended(Outcome(), {result.rank: result for result in gathered})
    causes = [(_weight(outcome), ended_s, outcome) for outcome, ended_s in _bad_ends(told, results)]
    if causes:
        return Ended(min(causes, key=lambda cause: cause[:2])[2], {})
    said = told.get("error") or f"torchrun ended with exit code {exit_code}: {_last_line(folder / 'log')}"
    return Ended(Outcome("failed", None, said), {})


def _bad_ends(told: dict[str, Any], results: dict[int, RankResult]) -> Iterator[tuple[Outcome, float]]:
    """How ranks ended that did not come through: by a signal, as torchrun saw it, or with an error that they wrote down; and when."""
    for failure in told.get("failures", ()):
        if failure["exit_code"] < 0 and failure["rank"] not in results:
            yield _killed(failure["rank"], -failure["exit_code"]), 0.0
    for result in results.values():
        if result.outcome.kind != "ok":
            yield result.outcome, result.ended_s


def _weight(outcome: Outcome) -> int:
    """The likeliest cause first. Where one rank fails torchrun sends the others SIGTERM, or they lose a peer before."""
    if outcome.kind == "signal":
        return 2 if outcome.signal == signal.SIGTERM.name else 0
    if outcome.kind == "failed" and any(words in outcome.message for words in LOST_PEER):
        return 3
    return 1


def _killed(rank: int, number: int) -> Outcome:
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    hint = "; the kernel does so when the host runs out of memory" if number == signal.SIGKILL else ""
    return Outcome("signal", rank, f"rank {rank} was killed by {name}{hint}", name)


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
