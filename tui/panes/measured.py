"""Measured as a widget: jobs in subprocesses, records from files, figures side by side. Whatever fails there is a message here."""

import tempfile
from pathlib import Path
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widget import Widget
from textual.worker import Worker

from costmodel.prediction import predict
from costmodel.records import RecordError, read_record
from costmodel.spec import PlanError, Run
from tui.canvas import Canvas
from tui.jobs import JOBS, command, ending, perform
from tui.leave import as_toml
from tui.panes.base import Pane
from tui.state import State
from tui.views.measured import Laid, empty, head, log, table


class JobList(Canvas, can_focus=True):
    """The jobs; arrows choose, enter performs."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "choose(-1)", "job above", show=False), Binding("down", "choose(1)", "job below", show=False),
        Binding("enter", "app.search", "perform", show=False), Binding("pagedown", "page(1)", "page down", show=False),
        Binding("pageup", "page(-1)", "page up", show=False)]

    @property
    def pane(self) -> "Measured":
        pane = self.parent
        assert isinstance(pane, Measured)
        return pane

    def action_choose(self, by: int) -> None:
        self.pane.choose(by)

    def action_page(self, by: int) -> None:
        self.pane.query_one(VerticalScroll).scroll_relative(y=10 * by, animate=False)

    def on_click(self, event: events.Click) -> None:
        self.focus()

    def on_resize(self) -> None:
        self.pane.say()


class Measured(Pane):
    """Prediction and measurement side by side."""

    keys = (("g", "perform", "search"), ("r", "record", "record"), ("c", "stop", "cancel"))

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.choice = 0
        self.laid: Laid | None = None
        self.printed: list[str] = []
        self.words, self.ok = "", True
        self.job: Worker[None] | None = None

    def compose(self) -> ComposeResult:
        yield JobList(id="jobs")
        with VerticalScroll(id="figures"):
            yield Canvas(id="figure-lines", auto=True)

    def first_focus(self) -> Widget:
        return self.query_one(JobList)

    @property
    def running(self) -> bool:
        return self.job is not None and self.job.is_running

    def paint(self, state: State) -> None:
        self.say()
        canvas = self.query_one("#figure-lines", Canvas)
        width = self.query_one("#figures").size.width - 1
        if width < 30:
            return
        canvas.show(table(self.laid, width) if self.laid else log(self.printed, width) if self.printed else empty(width))

    def say(self, words: str | None = None, ok: bool = True) -> None:
        """One or two rows below the jobs."""
        if words is not None:
            self.words, self.ok = words, ok
        canvas = self.query_one(JobList)
        if canvas.size.width:
            canvas.show(head(self.choice, JOBS[self.choice].name if self.running else "", self.words, self.ok, canvas.size.width))

    def choose(self, by: int) -> None:
        if not self.running:
            self.choice = max(0, min(len(JOBS) - 1, self.choice + by))
            self.say()

    # -- records -----------------------------------------------------------------------------------------------------------------

    def open(self, path: Path) -> None:
        """Lay a record beside the prediction of its run."""
        try:
            record = read_record(path)
        except RecordError as error:
            self.say(str(error), False)
            return
        if record.report is None:
            self.say(f"{path.name}: the run ended with {record.outcome.kind}, nothing was measured. {record.outcome.message}", False)
            return
        self.lay(record.run, record.report, f"{record.provenance}, {record.date[:10]}, {path.name}")
        on = record.environment.accelerator if record.environment else "a machine that is not named"
        self.say(f"{path.name}: {record.provenance} on {on}; predicted for {record.run.cluster.accelerator.name}")

    def lay(self, run: Run, measured: object, source: str) -> None:
        from costmodel.report import StepReport
        assert isinstance(measured, StepReport)
        try:
            self.laid = Laid(run, predict(run, self.explorer.state.profile, scaling=False), measured, source)
        except PlanError as error:
            self.say(f"The run of this measurement is not predicted: {error.rule} {error.fix}", False)
            return
        self.paint(self.explorer.state)

    # -- jobs --------------------------------------------------------------------------------------------------------------------

    def go(self) -> None:
        """Perform the chosen job on the run in the form."""
        if self.running:
            self.app.notify("A job is running: c stops it.")
            return
        self.laid, self.printed = None, []
        self.job = self.run_worker(self._perform(self.explorer.state), group="job", exit_on_error=False)
        self.say("starting …")
        self.paint(self.explorer.state)

    async def _perform(self, state: State) -> None:
        job = JOBS[self.choice]
        with tempfile.TemporaryDirectory(prefix="costmodel-") as folder:
            run_file, place = Path(folder) / "run.toml", Path(folder) / "record.json"
            try:
                run_file.write_text(as_toml(state.run), encoding="utf-8")
                code, printed, errors = await perform(command(job, run_file, place), self.say)
            except OSError as error:
                self.finish(f"{job.name} cannot be started: {error.strerror or error}", False)
                return
            ended = ending(job, code, printed, errors, place)
        if ended.report is not None:
            self.lay(state.run, ended.report, job.name)
            self.finish(ended.words, ended.ok)
        else:
            self.printed = (printed if job.answers == "text" and printed.strip() else errors).splitlines()
            self.finish(ended.words, ended.ok)

    def finish(self, words: str, ok: bool) -> None:
        self.job = None
        self.say(words, ok)
        self.paint(self.explorer.state)

    def cancel(self) -> None:
        """End the job's process."""
        if self.job is not None and self.running:
            self.job.cancel()
            self.finish(f"{JOBS[self.choice].name} stopped", True)
        else:
            self.app.notify("No job is running: g starts one.")
