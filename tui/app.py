"""The application: one screen with the form, the views and the key line. It holds the state and hands it to whoever paints.

A key changes the state and paints at once: nothing on that path posts a message or changes a layout, each of which waits for a frame.
"""

import gc
import sys
import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from textual import events
from textual.app import App, ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.screen import Screen
from textual.timer import Timer
from textual.widgets import ContentSwitcher

from costmodel.changes import Keep
from costmodel.cli.files import read_run_file, write_whole
from costmodel.cli.guard import InputError, plain
from costmodel.prediction import predict
from costmodel.render.prediction import title
from costmodel.render.units import duration, share
from costmodel.render.words import moment
from costmodel.spec import PlanError
from tui.canvas import Canvas
from tui.choices import choices, field_change, read_value
from tui.dialogs import Ask, Check, Choice, Paper, Picker
from tui.fields import BY_PATH, FIELDS, Field
from tui.form import Form
from tui.keys import KEYS, LINE, VIEWS
from tui.leave import as_toml, command_line
from tui.lines import Line, Span, bold, dim, length, line, wrapped
from tui.panes import pane_class
from tui.panes.base import Pane
from tui.pins import MOST_PINS, Pinned, pin_name
from tui.presets import PRESETS, START
from tui.propose import Proposals, Rested, proposals
from tui.state import State, attempt, dismissed, opened, stepped, undone
from tui.tour import STOPS, Figures
from tui.views.explore import gib, held, said
from tui.views.guide import panel
from tui.views.help import help_page

REST_S, YIELD_S = 0.25, 0.0005
"""Seconds for which a state rests before advice is sought; and for which the search pauses before each prediction, so that keys get through."""
SWITCH_S = 0.001
"""How soon a thread that searches hands over to one that paints."""
NARROW = 100
"""Columns below which the form is narrow, and hidden in the views that need the width."""


class Explorer(App[None]):
    """The what-if explorer."""

    CSS_PATH = "app.tcss"
    TITLE = "costmodel"
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(key.keys, key.action, key.says, id=key.action) for key in KEYS),
        *(Binding(str(i), f"view('{name}')", label, id=f"view.{name}") for i, (name, label) in enumerate(VIEWS, 1)),
        Binding("tab,shift+tab", "other_pane", "form or view", id="other_pane", priority=False),
        Binding("escape", "back", "back", id="back"),
        Binding("delete", "unpin", "unpin", id="unpin"),
        Binding("left_square_bracket", "tour_move(-1)", "stop before", id="tour.back"),
        Binding("right_square_bracket", "tour_move(1)", "next stop", id="tour.next"),
        Binding("a", "answer", "answer", id="tour.answer"),
        Binding("g", "search", "start the search", id="search"),
        Binding("r", "record", "open a record", id="record"),
        Binding("c", "cancel", "stop what runs", id="cancel"),
        Binding("x", "turn('field', 1)", "field of the curve", id="curve.field"),
        Binding("m", "turn('figure', 1)", "figure of the curve", id="curve.figure"),
    ]

    def __init__(self, given: Mapping[str, Any] | None = None, profile: str | None = None) -> None:
        super().__init__()
        self.state: State = opened(given if given is not None else START, profile)
        self.keep: Keep = "micro_batch"
        self.rested: Rested | None = None
        self.pins: list[Pinned] = []
        self._advice: Timer | None = None
        self.leaving = False
        self.own: State | None = None
        """One's own state while the tour is open."""
        self.stop = 0
        self.said: str | None = None
        """The answer to the question of the stop."""

    # -- what is on the screen -------------------------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        yield Canvas(id="tabs")
        with Horizontal(id="body"):
            yield Form(id="form")
            with ContentSwitcher(initial="explore", id="views"):
                yield pane_class("explore")(id="explore")
        yield Canvas(id="tour")
        yield Canvas(id="keys")

    def on_mount(self) -> None:
        self.form.focus()
        self.consider()
        sys.setswitchinterval(SWITCH_S)
        gc.freeze()  # what has been imported stays: no key should wait for a collector that looks at it

    def on_resize(self, event: events.Resize) -> None:
        self.set_class(event.size.width < NARROW, "narrow")
        self.call_after_refresh(self.paint)

    @property
    def root(self) -> Screen[Any]:
        """The screen of the explorer, also while a dialog is on top of it."""
        return self.screen_stack[0]

    @property
    def switcher(self) -> ContentSwitcher:
        return self.root.query_one("#views", ContentSwitcher)

    @property
    def view(self) -> str:
        return self.switcher.current or "explore"

    @property
    def pane(self) -> Pane:
        return self.root.query_one(f"#{self.view}", Pane)

    @property
    def form(self) -> Form:
        return self.root.query_one(Form)

    def paint(self) -> None:
        """Hand the state to everything in sight."""
        self.set_class(self.state.run.plan.pp > 1, "pipelined")
        self.form.paint(self.state)
        self.pane.paint(self.state)
        self.root.query_one("#tabs", Canvas).show([self.tab_line()])
        self.root.query_one("#keys", Canvas).show([self.key_line()])
        if self.own is not None:
            self.root.query_one("#tour", Canvas).show(panel(self.stop, self.said, self.size.width - 2))

    def tab_line(self) -> Line:
        width = self.size.width
        spans: Line = [bold(" costmodel  " if width >= NARROW else " ")]
        for i, (name, label) in enumerate(VIEWS, 1):
            spans.append(Span(f" {i} {label} ", "tab-on" if name == self.view else "tab", f"app.view('{name}')"))
        told = title(self.state.run)
        room = width - length(spans) - 2
        if room >= 20:
            told = told if len(told) <= room else told[:room - 1] + "…"
            spans += [Span(" " * (room - len(told) + 1)), dim(told)]
        return spans

    def key_line(self) -> Line:
        says = {key.action: key for key in KEYS}
        spans: Line = []
        for shown_key, text, action in [*self.pane.keys, *((says[name].shown, says[name].says, name) for name in LINE)]:
            item = [Span(f" {shown_key}", "accent bold", f"app.{action}"), Span(f" {text} ", "", f"app.{action}")]
            if length(spans) + length(item) > self.size.width:
                break
            spans += item
        return spans

    # -- changes ---------------------------------------------------------------------------------------------------------------

    def become(self, state: State) -> None:
        """Take a new state and paint it."""
        if state is not self.state:
            self.state = state
            self.rested = None
            self.paint()
            self.consider()

    def current(self, state: State) -> bool:
        """Whether threads should go on with a state: it is the present one, and nobody leaves."""
        return self.state is state and not self.leaving

    async def action_quit(self) -> None:
        """Leave; threads that search are told to stop, so that nobody waits for them."""
        self.leaving = True
        self.exit()

    def consider(self) -> None:
        """Look for what would help, once the state has rested for a moment."""
        if self._advice is not None:
            self._advice.stop()
        self._advice = self.set_timer(REST_S, partial(self.advise, self.state))

    def advise(self, state: State) -> None:
        """In a thread, which gives up as soon as the state is another."""
        if state.problem or state is not self.state:
            return

        def watch(progress: object) -> bool:
            time.sleep(YIELD_S)
            return self.current(state)

        def work() -> None:
            from costmodel.advice import advise
            report = predict(state.run, state.profile, intervals=True)
            if watch(None):
                self.call_from_thread(self.rest, state, Rested(report))
            try:
                found = proposals(advise(state.run, state.profile, watch=watch))
            except PlanError:
                found = Proposals((), "")
            if watch(None):
                self.call_from_thread(self.rest, state, Rested(report, found))

        self.run_worker(work, thread=True, group="advice", exclusive=True, exit_on_error=False)

    @property
    def proposals(self) -> Proposals | None:
        """What `s` offers; None while it is looked for."""
        return self.rested.proposals if self.rested else None

    def rest(self, state: State, found: Rested) -> None:
        """Show what was worked out meanwhile, unless the state is another by now."""
        if self.state is state:
            self.rested = found
            self.pane.paint(state)

    def change(self, changes: Mapping[str, Any]) -> None:
        self.become(attempt(self.state, changes, self.keep))

    def change_keeping(self, changes: Mapping[str, Any], keep: Keep) -> None:
        """A change that says itself which batch stays."""
        self.become(attempt(self.state, changes, keep))

    def step(self, path: str, by: int) -> None:
        self.become(stepped(self.state, path, by, self.keep))

    def action_step_field(self, path: str, by: int) -> None:
        self.action_go_to(path)
        self.step(path, by)

    def action_go_to(self, path: str) -> None:
        """Put the cursor of the form on a field."""
        form = self.form
        if form.cursor == path and not isinstance(self.screen, Picker) and form.has_focus:
            self.action_choose(path)
        form.go_to(path)
        form.focus()

    def action_propose(self) -> None:
        """Repair, make fit, or speed up: what the screen offers."""
        if self.state.problem:
            if self.state.problem.repair is None:
                self.notify("No repair is known: u goes back to the last valid run.", severity="warning")
            else:
                self.change({**self.state.problem.changes, **self.state.problem.repair})
        elif self.proposals and self.proposals.found:
            first = self.proposals.found[0]
            self.change_keeping(first.changes, first.keep)
        else:
            self.notify("Nothing is proposed for this run." if self.proposals else "Still looking for what would help.")

    def action_proposals(self) -> None:
        """Choose among all changes that would help."""
        if self.state.problem or not self.proposals or not self.proposals.found:
            self.action_propose()
            return

        def take(proposal: Any) -> None:
            if proposal is not None:
                self.change_keeping(proposal.changes, proposal.keep)

        heads = {"faster": "Makes the step faster", "fits": "Makes the run fit", "helps": "Saves memory, not enough alone"}
        self.push_screen(Picker(heads[self.proposals.title], "Each is predicted: applied, it gives what it promises.",
                                [Choice(p.words, p.promise, p) for p in self.proposals.found], lambda value: [], str), take)

    def action_undo(self) -> None:
        if not self.state.problem and not self.state.past:
            self.notify("Nothing to take back.")
        self.become(undone(self.state))

    def action_keep(self) -> None:
        """Switch which batch stays when the data-parallel degree moves."""
        self.keep = "global_batch" if self.keep == "micro_batch" else "micro_batch"
        kept = "the global batch stays, accumulation follows" if self.keep == "global_batch" else "micro-batch and accumulation stay, the global batch follows"
        self.notify(f"When dp moves: {kept}.")

    async def action_back(self) -> None:
        """Drop a failed change; else leave the tour."""
        if self.state.problem:
            self.become(dismissed(self.state))
        elif self.own is not None:
            await self.action_tour()

    # -- views -----------------------------------------------------------------------------------------------------------------

    async def action_view(self, name: str) -> None:
        """Show a view; it is built at the first visit."""
        switcher = self.switcher
        if not switcher.query(f"#{name}"):
            await switcher.mount(pane_class(name)(id=name))
        switcher.current = name
        pane = self.pane
        self.set_class(self.has_class("narrow") and not pane.with_form, "formless")
        (pane.first_focus() or self.form).focus()
        self.call_after_refresh(self.paint)

    def action_form(self) -> None:
        self.toggle_class("formless")
        self.call_after_refresh(self.paint)

    def action_other_pane(self) -> None:
        """From the form to the view and back."""
        form, inner = self.form, self.pane.first_focus()
        (form if inner is None or not form.has_focus else inner).focus()
        self.paint()

    # -- fields ----------------------------------------------------------------------------------------------------------------

    def action_choose(self, path: str | None = None) -> None:
        """Type a value of a field, or search its list."""
        field = BY_PATH[path or self.form.cursor]

        def take(value: Any) -> None:
            if value is not None:
                self.change(field_change(field, value))

        self.push_screen(Picker(f"{field.label}   {field.path}", field.help, choices(field, self.state), self.promise(field), read_value,
                                self.state.values[field.path]), take)

    def promise(self, field: Field) -> Check:
        """What a value would do, for the picker."""
        def check(value: Any) -> list[Line]:
            would = attempt(self.state, field_change(field, value), self.keep)
            if would.problem:
                error = would.problem.error
                mended = would.problem.repair
                with_it = f"s then: {', '.join(said(path, v) for path, v in mended.items())}" if mended else error.fix
                return [[Span(f"{said(error.field, error.value)}: {error.rule}", "bad")], [dim(with_it)]]
            memory = would.report.fullest.memory
            assert memory is not None
            return [line(bold(would.report.verdict), f"  {gib(held(memory))} GiB  step {duration(would.report.step_s)}  MFU {share(would.report.mfu)}")]
        return check

    # -- open, copy, save, read --------------------------------------------------------------------------------------------------

    def action_open(self) -> None:
        """A preset, or the path of a run file."""
        def take(value: Any) -> None:
            if value is None:
                return
            try:
                given = read_run_file(Path(value).expanduser()) if isinstance(value, str) else dict(value)
                profile = given.get("profile")
                self.become(opened(given, profile if isinstance(profile, str) else self.state.profile))
            except InputError as error:
                self.notify(str(error), severity="error", timeout=10)
            except PlanError as error:
                self.notify(plain(error), severity="error", timeout=10)

        self.push_screen(Picker("Open", "A preset, or type the path of a run file (.toml, .yaml, .json)",
                                [Choice(preset.name, preset.why, preset.given) for preset in PRESETS], lambda value: [], str), take)

    def action_copy(self) -> None:
        """Copy the command line."""
        command = command_line(self.state.run, self.state.profile)
        self.copy_to_clipboard(command)
        self.push_screen(Paper("Copied: the command that predicts this run", lambda width: wrapped(command, width, 40)))

    def action_save(self) -> None:
        """Save the run as TOML."""
        def take(name: str | None) -> None:
            if name is None:
                return
            path = Path(name).expanduser()
            try:
                write_whole(path if path.suffix else path.with_suffix(".toml"), as_toml(self.state.run, self.state.profile))
                self.notify(f"Saved {path}: costmodel predict {path} gives these figures.")
            except InputError as error:
                self.notify(str(error).removeprefix("-o "), severity="error", timeout=10)

        self.push_screen(Ask("Save the run as", "A .toml file that costmodel predict reads.", "run.toml"), take)

    def action_inform(self) -> None:
        """What the figures rest on, and the whole text of an error."""
        self.push_screen(Paper("What the figures rest on", self.notes))

    def notes(self, width: int) -> list[Line]:
        state = self.state
        out: list[Line] = []
        if state.problem:
            out += [*wrapped(plain(state.problem.error), width, 8, "bad"), []]
        memory = state.report.fullest.memory
        if memory is not None:
            out += wrapped(f"Memory peaks on {state.report.fullest.role} in {moment(memory.allocated.moment)}.", width, 3)
        out += wrapped(f"Profile: {state.profile or 'the shipped constants of this accelerator and framework'}.", width, 3)
        out += [row for name, basis in state.report.basis.items() for row in wrapped(f"{name.replace('_', ' ')}: {basis}", width, 2)]
        for note in state.report.notes:
            out += [[], *wrapped(note, width, 8)]
        return out

    def action_help(self) -> None:
        self.push_screen(Paper("Keys", help_page))

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """The palette: every key, every view, every field."""
        yield from super().get_system_commands(screen)
        for key in KEYS:
            yield SystemCommand(f"{key.says.capitalize()} ({key.shown})", key.does, partial(self.run_action, key.action))
        for name, label in VIEWS:
            yield SystemCommand(f"View: {label}", f"Show {label}", partial(self.run_action, f"view('{name}')"))
        for field in FIELDS:
            yield SystemCommand(f"Set {field.label}", field.help, partial(self.action_choose, field.path))

    def action_search(self) -> None:
        """Start the chosen search of Solve, or the job of Measured."""
        self.pane.go()

    def action_cancel(self) -> None:
        """Stop what runs in the view."""
        self.pane.cancel()

    def action_pick_choice(self, at: int) -> None:
        self.pane.pick_choice(at)

    def action_turn(self, what: str, by: int) -> None:
        """Another field or figure of Compare's curve, the next section of Explain, a zoom of Timeline."""
        self.pane.turn(what, by)

    async def action_record(self) -> None:
        """Open a record, or choose one of a folder, and lay it beside its prediction."""
        await self.action_view("measured")
        pane = self.pane

        def take(value: Any) -> None:
            path = Path(value).expanduser() if value else None
            if path is None:
                return
            if path.is_dir():
                found = sorted(path.rglob("*.json"))
                self.push_screen(Picker(f"Records in {path}", f"{len(found)} files", [Choice(str(p.relative_to(path)), "", str(p)) for p in found],
                                        lambda value: [], str), take)
            else:
                pane.open(path)

        self.push_screen(Ask("Open a record", "A record that execute wrote (.json), or a folder of them.", "records"), take)

    # -- pins ------------------------------------------------------------------------------------------------------------------

    def action_pin(self) -> None:
        """Keep this run to compare with; the first pin is what the others are compared with."""
        if len(self.pins) == MOST_PINS:
            self.notify(f"{MOST_PINS} runs are pinned: delete takes the last one away.", severity="warning")
        elif any(pin.run == self.state.run for pin in self.pins):
            self.notify("This run is pinned already.")
        else:
            self.pins.append(Pinned(pin_name(self.state.run, [pin.run for pin in self.pins]), self.state.run, self.state.report))
            self.notify(f"Pinned as {chr(65 + len(self.pins))}: {self.pins[-1].name}. 3 compares.")
            self.paint()

    def action_unpin(self) -> None:
        """Take the last pin away."""
        if self.pins:
            self.notify(f"Unpinned {self.pins.pop().name}.")
            self.paint()
        else:
            self.notify("Nothing is pinned: p pins this run.")

    # -- the tour --------------------------------------------------------------------------------------------------------------

    async def action_tour(self) -> None:
        """Open the tour where it was left, or close it; closing brings one's own run back."""
        if self.own is not None:
            own, self.own = self.own, None
            self.remove_class("touring")
            self.become(own)
        else:
            await self.action_view("explore")
            self.own = dismissed(self.state)
            self.add_class("touring")
            self.stop_at(self.stop)
        self.call_after_refresh(self.paint)

    def stop_at(self, stop: int) -> None:
        """Set the run of a stop."""
        self.stop, self.said = stop, None
        self.become(opened(STOPS[stop].given))

    def action_tour_move(self, by: int) -> None:
        if self.own is not None and 0 <= self.stop + by < len(STOPS):
            self.stop_at(self.stop + by)

    def action_answer(self) -> None:
        """Make the change that the question asks about, and say what the figures show."""
        if self.own is None:
            return
        stop = STOPS[self.stop]
        before = opened(stop.given)
        after = attempt(before, stop.then)
        self.said = stop.answer(Figures(before.run, before.report), Figures(after.run, after.report))
        self.become(after)
