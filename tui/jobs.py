"""What is performed outside the explorer: commands of `execute` as subprocesses, their progress line by line, and what they leave."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from costmodel.records import RecordError, read_record
from costmodel.report import StepReport, report_from_dict


class Job(NamedTuple):
    """A command of `execute`, and how its answer is read."""

    name: str
    does: str
    arguments: Callable[[Path, Path], Sequence[str]]
    """Of the run file, and of the place for a record."""
    answers: str
    """json: a report on stdout; record: a record at the place given; text: for reading."""


JOBS: tuple[Job, ...] = (
    Job("dry run", "this run on fake tensors, at any world size: bytes and collectives, no times", lambda run, place: ("dryrun", str(run), "--json"), "json"),
    Job("solo", "one rank of it on this machine's device: memory, and the time of its computation",
        lambda run, place: ("solo", str(run), "--record", str(place)), "record"),
    Job("run", "the whole job on this machine, where it has the devices: memory and time",
        lambda run, place: ("run", str(run), "--record", str(place)), "record"),
    Job("validate", "every strategy, in sizes for this machine, against its prediction", lambda run, place: ("validate",), "text"),
    Job("lab", "one small Transformer, spread in every way on this machine, and why each differs", lambda run, place: ("lab",), "text"))
PATIENCE_S = 3.0
"""Seconds that a process has to end by itself."""
EXIT_WORDS = {1: "an unexpected error", 2: "it cannot be done so", 3: "out of memory", 4: "outside the tolerance", 5: "a rank failed", 6: "out of time"}


@dataclass(frozen=True, slots=True)
class Ended:
    """How a job ended: its report where it has one, else what to say."""

    report: StepReport | None
    words: str
    ok: bool


def command(job: Job, run_file: Path, place: Path) -> list[str]:
    """The program and its arguments; the interpreter is this one."""
    return [sys.executable, "-m", "execute", *job.arguments(run_file, place)]


async def perform(words: Sequence[str], tell: Callable[[str], None]) -> tuple[int, str, str]:
    """Run a command; `tell` gets each line of its progress (stderr). Its exit code, what it printed, and its last lines of stderr.

    Cancelling ends the process.
    """
    process = await asyncio.create_subprocess_exec(*words, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
                                                   stderr=asyncio.subprocess.PIPE, limit=1 << 24, start_new_session=True)
    assert process.stdout
    assert process.stderr
    last: list[str] = []

    async def follow(stream: asyncio.StreamReader) -> None:
        async for raw in stream:
            text = raw.decode("utf-8", "replace").rstrip()
            if text:
                last.append(text)
                del last[:-12]
                tell(text)

    try:
        printed, _ = await asyncio.gather(process.stdout.read(), follow(process.stderr))
        code = await process.wait()
    except asyncio.CancelledError:
        await end(process)
        raise
    return code, printed.decode("utf-8", "replace"), "\n".join(last)


async def end(process: asyncio.subprocess.Process) -> None:
    """End a process and those it started: asked first, made to after a while."""
    for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if process.returncode is not None:
            return
        try:
            os.killpg(process.pid, sign)
            await asyncio.wait_for(process.wait(), PATIENCE_S)
        except (TimeoutError, ProcessLookupError):
            continue


def ending(job: Job, code: int, printed: str, errors: str, place: Path) -> Ended:
    """What a job left, as a report or as words; a crash is words too."""
    if code not in (0, 4) and not (job.answers == "record" and place.is_file()):
        why = EXIT_WORDS.get(code, f"killed by signal {-code}" if code < 0 else "an error")
        return Ended(None, f"{job.name}: exit code {code}, {why}. {errors.splitlines()[-1] if errors else ''}".strip(), False)
    try:
        if job.answers == "json":
            return Ended(report_from_dict(json.loads(printed)), f"{job.name} done", True)
        if job.answers == "record":
            record = read_record(place)
            return Ended(record.report, f"{job.name}: {record.outcome.kind} {record.outcome.message}".strip(), record.report is not None)
    except (ValueError, RecordError) as error:
        return Ended(None, f"{job.name}: its answer cannot be read: {' '.join(str(error).split())[:200]}", False)
    return Ended(None, f"{job.name} done" + (": something is outside the tolerance" if code == 4 else ""), code == 0)
