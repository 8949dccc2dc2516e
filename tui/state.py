"""What is being explored: a run with its answer, what went wrong with the last change, and the way back.

Values in, values out: every change gives a new state; the application only holds the present one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from costmodel.catalog.profiles import load_profile
from costmodel.changes import Keep, changed
from costmodel.inputs import resolve
from costmodel.prediction import predict
from costmodel.report import StepReport
from costmodel.spec import PlanError, Run
from tui.fields import BY_PATH, neighbours, reading
from tui.repair import repaired

Changes = Mapping[str, Any]
REMEMBERED = 200
"""Runs that undo reaches back."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A run and what is predicted for it."""

    run: Run
    report: StepReport


@dataclass(frozen=True, slots=True)
class Problem:
    """A change that gives no run: what was asked, what is wrong with it, and more changes that make it whole (None: none found)."""

    changes: Changes
    error: PlanError
    repair: Changes | None


@dataclass(frozen=True, slots=True)
class State:
    """The last run that was whole, its answer, and the change that would have left it."""

    now: Answer
    values: dict[str, Any]
    """Of every field of the form, by path; of a failed change, what it asked for."""
    profile: str | None = None
    problem: Problem | None = None
    past: tuple[Answer, ...] = ()

    @property
    def run(self) -> Run:
        return self.now.run

    @property
    def report(self) -> StepReport:
        return self.now.report


def answer(run: Run, profile: str | None) -> Answer:
    """The prediction of a run. Raises PlanError for what is not predicted."""
    return Answer(run, predict(run, load_profile(run, profile), scaling=False))


def opened(given: Mapping[str, Any], profile: str | None = None) -> State:
    """The state of a run as somebody wrote it."""
    run = resolve(given).run
    return State(answer(run, profile), reading(run), profile)


def moved(state: State, new: Answer) -> State:
    """The state after a change that went well."""
    return State(new, reading(new.run), state.profile, None, (*state.past, state.now)[-REMEMBERED:])


def attempt(state: State, changes: Changes, keep: Keep = "micro_batch") -> State:
    """The state after a change; one that gives no run becomes a problem, and the last whole run stays."""
    try:
        return moved(state, answer(changed(state.run, changes, keep), state.profile))
    except PlanError as error:
        return _failed(state, changes, error)


def _failed(state: State, changes: Changes, error: PlanError) -> State:
    repair = repaired(state.run, changes, error, lambda run: answer(run, state.profile))
    return replace(state, problem=Problem(changes, error, repair), values={**reading(state.run), **changes})


def stepped(state: State, path: str, by: int, keep: Keep = "micro_batch") -> State:
    """The next value of a field that there is a run for. Where no run has any of them, the first one's problem is shown."""
    first: tuple[Changes, PlanError] | None = None
    for value in neighbours(BY_PATH[path], state.run, state.values[path], by):
        changes = {path: value}
        try:
            run = changed(state.run, changes, keep)
        except PlanError as error:
            first = first or (changes, error)
            continue
        try:
            return moved(state, answer(run, state.profile))
        except PlanError as error:
            return _failed(state, changes, error)
    return _failed(state, *first) if first else dismissed(state)


def dismissed(state: State) -> State:
    """Without the failed change."""
    return replace(state, problem=None, values=reading(state.run)) if state.problem else state


def undone(state: State) -> State:
    """The state before the last change."""
    if state.problem:
        return dismissed(state)
    if not state.past:
        return state
    before = state.past[-1]
    return State(before, reading(before.run), state.profile, None, state.past[:-1])
