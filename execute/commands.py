"""What the commands that perform a step have in common: an option's check, words on the way, a job under torchrun."""

import sys
from typing import TYPE_CHECKING, Any

from costmodel.cli.guard import InputError

if TYPE_CHECKING:
    from costmodel.report import StepReport
    from costmodel.spec import Run
    from execute.launch import Ended


def check_device(device: str) -> None:
    """Refuse a --device that there is not; "" is the GPU where there is one."""
    if device not in ("", "cpu", "cuda"):
        raise InputError(f"--device {device}: it is cpu or cuda. Leave it out for the GPU where there is one.")


def say(words: Any) -> None:
    """Progress, on stderr."""
    print(words, file=sys.stderr, flush=True)


def perform_job(run: "Run", device: str, steps: int, timeout_s: float) -> "tuple[Ended, StepReport | None]":
    """A run under torchrun on this machine: how it ended, and its report where it ended well."""
    from execute.job import Job
    from execute.launch import Nodes, launch
    from execute.roles import report_of
    ended = launch(Job(run, steps=steps, device=device, timeout_s=timeout_s), run.plan.world_size, Nodes(), lambda doing: None)
    return ended, report_of(run, ended.ranks) if ended.outcome.kind == "ok" else None
