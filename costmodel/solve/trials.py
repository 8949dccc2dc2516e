"""Predictions that a search tries: each once, watched from outside, stopped on request."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from costmodel.catalog.profiles import Profile, load_profile
from costmodel.changes import Keep, changed
from costmodel.prediction import predict
from costmodel.report import MemoryReport, RoleReport, StepReport
from costmodel.spec import PlanError, Run


class Progress(NamedTuple):
    """Where a search is: candidates done, how many there are (None: not known yet), and what it looks at."""

    done: int
    of: int | None
    words: str


Watch = Callable[[Progress], bool]
"""Called before each prediction of a search; False stops it."""


class Stopped(Exception):
    """The watcher of a search asked it to stop."""


class Trial(NamedTuple):
    """A run that was tried: its prediction, or the rule that refuses it."""

    run: Run | None
    report: StepReport | None
    refusal: PlanError | None


class Trials:
    """Changed runs of one run and their predictions; with `remember`, the same changes are predicted once."""

    def __init__(self, run: Run, profile: Profile | str | None = None, *, keep: Keep = "micro_batch", watch: Watch | None = None,
                 remember: bool = False) -> None:
        self.run = run
        self.profile = profile
        self.keep: Keep = keep
        self.watch = watch
        self.done = 0
        """Predictions made."""
        self._known: dict[str, Trial] | None = {} if remember else None

    def attempt(self, changes: Mapping[str, Any], words: str = "", *, keep: Keep | None = None, done: int | None = None, of: int | None = None) -> Trial:
        """The run with some fields changed, predicted. Raises Stopped. done, of: what the watcher is told; the predictions so far without it."""
        key = repr((sorted(changes.items(), key=lambda item: item[0]), keep or self.keep))
        if self._known is not None and key in self._known:
            return self._known[key]
        if self.watch is not None and not self.watch(Progress(self.done if done is None else done, of, words)):
            raise Stopped
        self.done += 1
        trial = self._predicted(changes, keep or self.keep)
        if self._known is not None:
            self._known[key] = trial
        return trial

    def _predicted(self, changes: Mapping[str, Any], keep: Keep) -> Trial:
        run: Run | None = None
        try:
            run = changed(self.run, changes, keep)
            return Trial(run, predict(run, self.constants(run), scaling=False, intervals=False), None)
        except PlanError as error:
            return Trial(run, None, error)

    def constants(self, run: Run) -> Profile:
        """The profile of a changed run; a Profile that was handed in is completed for links that its own run did not have."""
        if not isinstance(self.profile, Profile):
            return load_profile(run, self.profile)
        own = self.profile
        if all(f"link.{level.kind}.share" in own.constants for level in run.cluster.levels):
            return own
        return Profile(own.name, own.guess, {**load_profile(run).constants, **own.constants})


def fits(report: StepReport | None, risky: bool = False) -> bool:
    """Whether a prediction fits in memory; with `risky`, also where the last tenth of the device is used."""
    return report is not None and (report.verdict == "fits" or risky and report.verdict == "risky")


def held_bytes(memory: MemoryReport) -> int:
    """What a rank needs of its device, by the widest figure known."""
    return memory.device_bytes or memory.reserved_bytes or memory.allocated.total_bytes


def worst(report: StepReport) -> RoleReport:
    """The role with the least room."""
    return max((r for r in report.roles if r.memory), key=lambda r: held_bytes(r.memory) if r.memory else -1)
