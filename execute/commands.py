"""What the commands that perform a step have in common: the check of options, words on the way, a job under torchrun."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from costmodel.cli.guard import InputError

if TYPE_CHECKING:
    from costmodel.report import StepReport
    from costmodel.spec import Run
    from execute.launch import Ended


NoMemoryCheck = Annotated[bool, typer.Option("--no-memory-check", show_default=False,
                                             help="On a CPU: perform also what this host's memory seems too small for.")]


@contextmanager
def naming(options: Mapping[str, str]) -> Iterator[None]:
    """A PlanError about a field that an option of the command gives becomes an InputError that names the option."""
    from costmodel.spec import PlanError
    try:
        yield
    except PlanError as error:
        if error.field not in options:
            raise
        raise InputError(f"{options[error.field]} {error.value}: {error.rule} {error.fix}") from None


def check_least(value: float, option: str, least: float, use: float) -> None:
    """Refuse a number below what an option needs."""
    if value < least:
        raise InputError(f"{option} {value:g}: must be at least {least:g}. Use {option} {use:g}.")


def check_rank(rank: int, world: int) -> None:
    """Refuse a rank that the run does not have."""
    if not 0 <= rank < world:
        has, use = ("one rank", "0") if world == 1 else (f"{world} ranks", f"0 to {world - 1}")
        raise InputError(f"--rank {rank}: the run has {has}. Use --rank {use}.")


def check_timeout(seconds: float, use: float) -> None:
    """Refuse a time in which nothing can be done."""
    if seconds <= 0:
        raise InputError(f"--timeout {seconds:g}: must be above 0. Use --timeout {use:g}.")


def check_device(device: str) -> None:
    """Refuse a --device that there is not; "" is the GPU where there is one."""
    if device not in ("", "cpu", "cuda"):
        raise InputError(f"--device {device}: it is cpu or cuda. Leave it out for the GPU where there is one.")


def say(words: Any) -> None:
    """Progress, on stderr."""
    print(words, file=sys.stderr, flush=True)


def perform_job(run: "Run", device: str, steps: int, timeout_s: float, check_memory: bool = True) -> "tuple[Ended, StepReport | None]":
    """A run under torchrun on this machine: how it ended, and its report where it ended well."""
    from execute.job import Job
    from execute.launch import Nodes, launch
    from execute.roles import report_of
    ended = launch(Job(run, steps=steps, device=device, timeout_s=timeout_s, check_memory=check_memory), run.plan.world_size, Nodes(), lambda doing: None)
    return ended, report_of(run, ended.ranks) if ended.outcome.kind == "ok" else None
