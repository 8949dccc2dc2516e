"""One step under torch.profiler, annotated the way execute.observe.trace reads it."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from execute.observe.trace import STEP


class TraceMarks:
    """Annotates the phases of a step (execute.marks.Marks)."""

    def forward(self, phase: str = "forward") -> AbstractContextManager[Any]:
        return record_function(phase)

    def phase_of(self, name: str) -> AbstractContextManager[Any]:
        return record_function(name)

    def backward_ended(self) -> None:
        return None


def profile_step(step: Callable[[TraceMarks], Any], synchronize: Callable[[], None], path: Path) -> None:
    """Perform one step and write its Chrome trace (.json, or gzipped where the name ends in .gz), with the profiler's own names.

    The annotated step ends when the device has done all of it.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's library writes to stderr when it starts and stops
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    synchronize()
    with profile(activities=activities, record_shapes=True) as profiler, record_function(STEP):
        step(TraceMarks())
        synchronize()
    profiler.export_chrome_trace(str(path))
