"""Timing with a reference kernel beside it: what slows the machine for a while slows both, and their ratio stays."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Work = Callable[[], Any]
BURST_S = 0.004
"""Seconds that one timed burst takes at least."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Times work on one device. `finish` waits until the device has done what was issued."""

    finish: Work
    reference: Work
    repeats: int
    budget_s: float
    """Seconds that one sample may take."""

    def seconds(self, work: Work) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """(seconds of the work, seconds of the reference kernel), repeat by repeat, each the mean of a burst."""
        started = time.perf_counter()
        times = max(1, round(BURST_S / max(1e-7, self._warm(work))))
        references = self._references()
        values: list[float] = []
        beside: list[float] = []
        while len(values) < self.repeats and (len(values) < 2 or time.perf_counter() - started < self.budget_s):
            before = self._burst(self.reference, references)
            values.append(self._burst(work, times))
            beside.append((before + self._burst(self.reference, references)) / 2)
        return tuple(values), tuple(beside)

    def reference_s(self) -> float:
        """Seconds of the reference kernel, the mean of a burst."""
        return self._burst(self.reference, self._references())

    def _references(self) -> int:
        return max(1, round(BURST_S / max(1e-7, self._warm(self.reference))))

    def _warm(self, work: Work) -> float:
        """Seconds of one call once caches and kernels are loaded."""
        self._burst(work, 1)
        return statistics.median(self._burst(work, 1) for _ in range(3))

    def _burst(self, work: Work, times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            work()
        self.finish()
        return (time.perf_counter() - start) / times
