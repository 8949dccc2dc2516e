"""Timeline, Compare, Explain, Solve and Measured, driven; and what each may say, without a screen."""

import asyncio
import json
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from driving import drive, keys, says, settled, text
from textual.pilot import Pilot
from textual.widgets import DataTable, Input

from costmodel.comparison import ONE_GPU
from costmodel.prediction import predict
from costmodel.records import Environment, Outcome, Record, write_record
from costmodel.timeline import COMPUTE
from tui.app import Explorer
from tui.form import Form
from tui.jobs import JOBS, command, ending, perform
from tui.lines import length, text_of
from tui.panes.compare import Compare
from tui.panes.explain import Explain
from tui.panes.measured import Measured
from tui.panes.solve import Solve
from tui.panes.timeline import Timeline, laid_out
from tui.pins import Pinned, pin_name
from tui.presets import PRESETS
from tui.state import attempt, opened
from tui.views import measured
from tui.views.compare import METRICS, compared, sweep, table
from tui.views.pipeline import Window, pipeline_map
from tui.views.solve import SEARCHES, rows
from tui.views.timeline import Lane, inspector, items, lane_line, lanes_of

SMALL = {"params": "350M", "cluster": {"gpus": 8}, "plan": {"strategy": "fsdp"}, "recipe": {"seq_len": 1024}}
PIPELINE = {"model": "llama-2-7b", "cluster": {"gpus": 8}, "plan": {"zero": 0, "pp": 4}, "recipe": {"grad_accum": 8, "precision": "bf16-pure"}}
VIEWS = {"2": "compute", "3": "COMPARE", "4": "WHAT EACH AXIS DOES", "5": "SOLVE", "6": "MEASURED"}


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)], ids=["80x24", "120x40", "200x60"])
def test_every_view_opens_and_stays_while_a_field_moves(size: tuple[int, int]) -> None:
    async def script(pilot: "Pilot[None]", app: Explorer) -> None:
        for key, word in VIEWS.items():
            await keys(pilot, key)
            await settled(pilot, lambda word=word: word in text(app))
        app.query_one(Form).go_to("recipe.micro_batch")
        await keys(pilot, "3")
        before = text(app)
        app.step("recipe.micro_batch", 1)
        await settled(pilot, lambda: text(app) != before)
        await keys(pilot, "1")
        assert "MEMORY" in text(app)
    drive(script, size, SMALL)


# -- Timeline ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [SMALL, PIPELINE], ids=["fsdp", "pipeline"])
def test_the_timeline_ends_with_the_step(given: dict[str, object]) -> None:
    """All streams are done when the step is, but for the wait for the slowest rank and the fixed cost."""
    state = opened(given)
    lanes = laid_out(state.run, state.report, None, 40)
    time = max((r.time for r in state.report.roles if r.time), key=lambda t: t.step_s)
    rest = time.phases.get("stragglers", 0.0) + time.phases.get("fixed", 0.0)
    assert max(t.busy_s for t in lanes.timelines) + rest == pytest.approx(state.report.step_s, rel=1e-6)


def test_a_lane_is_drawn_as_spans_then_layers_then_operations() -> None:
    state = opened(SMALL)
    lanes = laid_out(state.run, state.report, None, 40)
    lane = Lane(0, COMPUTE)
    whole = Window(0.0, lanes.step_s)
    assert [item.label for item in items(lanes, lane, whole, 60)][:2] == ["F0", "B0"] or len(items(lanes, lane, whole, 60)) > 2
    forward = next(s for s in lanes.timelines[0].spans if s.phase == "forward")
    layers = [i.label for i in items(lanes, lane, Window(forward.start_s, forward.end_s), 200)]
    assert "L0" in layers and "L1" in layers
    layer = next(i for i in items(lanes, lane, Window(forward.start_s, forward.end_s), 200) if i.label == "L1")
    names = [i.label for i in items(lanes, lane, Window(layer.start, layer.end), 400)]
    assert any("attention" in name for name in names)


def test_a_lanes_row_keeps_its_width_and_reads_without_colour() -> None:
    state = opened(PIPELINE)
    lanes = laid_out(state.run, state.report, None, 40)
    whole = Window(0.0, lanes.step_s)
    rows_seen = lanes_of(lanes.timelines, lanes.axes, 0, 40)
    for lane in rows_seen:
        row = lane_line(lanes, lane, whole, 100, False, None)
        assert length(row) == 119
    shown = text_of(lane_line(lanes, rows_seen[0], whole, 100, True, None))
    assert shown.startswith("▸pp0  compute")
    assert "F" in shown and "B" in shown and "·" in shown
    chart = [text_of(row) for row in pipeline_map(state.run, whole, lanes.step_s, 100, 9)]
    assert chart[0].startswith("PIPELINE 1f1b  p = 4  m = 8")
    assert len(chart) == 6
    assert "└" in chart[-1]


def test_without_room_every_role_keeps_its_compute_and_the_chosen_one_its_streams() -> None:
    state = opened(PIPELINE)
    lanes = laid_out(state.run, state.report, None, 40)
    few = lanes_of(lanes.timelines, lanes.axes, 2, 8)
    assert next(lane for lane in few if lane.at == 2) == Lane(2, COMPUTE)
    assert len([lane for lane in few if lane.at == 2]) > 1
    assert [lane for lane in few if lane.at == 0] == [Lane(0, COMPUTE)]


def test_the_inspector_says_shape_bytes_and_cost() -> None:
    state = opened(SMALL)
    lanes = laid_out(state.run, state.report, None, 40)
    forward = next(s for s in lanes.timelines[0].spans if s.phase == "forward")
    from tui.views.timeline import Item
    streams = lanes.streams(0, forward, True)
    assert streams
    matmul = next(s for s in streams[COMPUTE] if s.kind == "matmul")
    told = " ".join(text_of(row) for row in inspector(Item(matmul.start_s, matmul.end_s, "", "forward", matmul), state.run, 200))
    assert "TFLOP/s" in told and "[1024 x" in told
    sent = next(s for s in streams["dp_shard"] if s.kind == "collective")
    told = " ".join(text_of(row) for row in inspector(Item(sent.start_s, sent.end_s, "", "forward", sent), state.run, 200))
    assert "8 ranks" in told and "exposed" in told


def test_timeline_keys_zoom_pan_pick_and_find_waits() -> None:
    async def script(pilot: "Pilot[None]", app: Explorer) -> None:
        await keys(pilot, "2")
        pane = app.pane
        assert isinstance(pane, Timeline)
        await settled(pilot, lambda: pane.lanes is not None)
        assert pane.lanes
        whole = pane.window
        await keys(pilot, "right")
        assert pane.picked
        first = pane.picked
        await keys(pilot, "right", "left")
        assert pane.picked == first
        await keys(pilot, "plus", "plus")
        assert pane.window.span == pytest.approx(whole.span / 4)
        at = pane.window.start
        await keys(pilot, "shift+right")
        assert pane.window.start > at
        await keys(pilot, "minus", "0")
        assert pane.window == whole
        await keys(pilot, "down", "right", "right")
        assert pane.lane.stream == "dp_shard"
        assert "ranks" in text(app)
        await keys(pilot, "n")
        await settled(pilot, lambda: pane.picked is not None and pane.picked.label == "wait")
        await keys(pilot, "0")
        await pilot.click("#track", offset=(60, 1))
        await pilot.pause()
        assert pane.lane == Lane(0, COMPUTE)
        await keys(pilot, "up", "down", "down", "down")
        assert pane.lane.stream == "host"
        await keys(pilot, "tab")
        assert app.query_one(Form).has_focus
    drive(script, given=SMALL)


def test_what_is_not_laid_out_yet_is_drawn_as_spans_and_noted() -> None:
    state = opened({**SMALL, "recipe": {"seq_len": 1024, "grad_accum": 8}})
    lanes = laid_out(state.run, state.report, None, 40)
    lanes.eager = False
    whole = Window(0.0, lanes.step_s)
    before = [item.label for item in items(lanes, Lane(0, COMPUTE), whole, 2000)]
    assert {"F0", "B7"} <= set(before)
    assert lanes.missing
    lanes.lay_out(lanes.missing, lambda: True)
    assert "L0" in [item.label for item in items(lanes, Lane(0, COMPUTE), whole, 2000)]


def test_timeline_follows_a_change_and_shows_the_pipeline() -> None:
    async def script(pilot: "Pilot[None]", app: Explorer) -> None:
        await keys(pilot, "2")
        await settled(pilot, lambda: "PIPELINE" in text(app) and "pp3" in text(app))
        app.step("recipe.grad_accum", 1)
        await settled(pilot, lambda: "m = 16" in text(app))
    drive(script, given=PIPELINE)


# -- Compare -------------------------------------------------------------------------------------------------------------------


def test_without_pins_the_base_is_one_gpu() -> None:
    state = opened(SMALL)
    c = compared(state, [])
    assert (c.entries[0].name, c.entries[0].gpus, c.entries[1].name) == (ONE_GPU, 1, "now")


def test_differences_against_a_pin_are_those_of_the_predictions() -> None:
    base = opened(SMALL)
    now = attempt(base, {"plan.checkpointing": "full"})
    rows_shown = [text_of(row) for row in table(compared(now, [Pinned("base", base.run, base.report)]), 100, 30)]
    step = next(row for row in rows_shown if row.startswith("step ms"))
    assert base.report.step_s and now.report.step_s
    assert f"+{1e3 * (now.report.step_s - base.report.step_s):.1f}" in step or f"+{1e3 * (now.report.step_s - base.report.step_s):,.0f}" in step
    causes = rows_shown[next(i for i, row in enumerate(rows_shown) if row.startswith("MFU against A")) + 1:]
    assert any(row.startswith("recompute") and "-" in row for row in causes)


def test_a_pins_name_says_what_changed() -> None:
    base = opened(SMALL)
    assert pin_name(base.run, []) == "8x FSDP2 (ZeRO-3)"
    assert pin_name(attempt(base, {"recipe.micro_batch": 2}).run, [base.run]) == "micro-batch 2"


def test_a_curve_is_a_prediction_at_every_value_that_makes_a_run() -> None:
    state = opened(SMALL)
    points = sweep(state.run, "plan.tp", None, "micro_batch")
    m = state.run.model
    assert [point.value for point in points] == [tp for tp in (1, 2, 4, 8) if m.heads % tp == m.kv_heads % tp == m.ffn % tp == 0]
    assert points[0].report.step_s == state.report.step_s
    assert all(metric.of(points[0].report) for metric in METRICS)


def test_pins_columns_curves_and_their_keys() -> None:
    async def script(pilot: "Pilot[None]", app: Explorer) -> None:
        await keys(pilot, "p", "p")
        await says(pilot, app, "pinned already")
        app.step("recipe.micro_batch", 1)
        await keys(pilot, "p", "3")
        pane = app.pane
        assert isinstance(pane, Compare)
        await settled(pilot, lambda: len(pane.curves) == 2 and pane.plot is not None and bool(pane.plot._datasets))
        shown = text(app)
        assert "A 8x FSDP2 (ZeRO-3)" in shown and "B micro-batch 2" in shown
        assert "tokens/s per GPU over gpus" in shown
        await keys(pilot, "x")
        await says(pilot, app, "over micro-batch")
        await keys(pilot, "m")
        await says(pilot, app, "MFU % over micro-batch")
        await keys(pilot, "delete", "delete")
        assert app.pins == []
        await keys(pilot, "delete")
        await says(pilot, app, "Nothing is pinned")
        assert ONE_GPU in text(app)
    drive(script, given=SMALL)


# -- Explain -------------------------------------------------------------------------------------------------------------------


def test_explain_shows_what_is_shared_and_what_each_figure_rests_on() -> None:
    async def script(pilot: "Pilot[None]", app: Explorer) -> None:
        await keys(pilot, "4")
        pane = app.pane
        assert isinstance(pane, Explain)

        def whole() -> str:
            from tui.canvas import Canvas
            return "\n".join(text_of(row) for row in pane.query_one("#page", Canvas).lines)
        await settled(pilot, lambda: "RESTS ON" in whole())
        for words in ("WHAT A RANK HOLDS", "BYTES PER PARAMETER", "WHAT A RANK SENDS", "sharded", "all-gather"):
            assert words in whole()
        await keys(pilot, "n")
        await pilot.pause(0.1)
        assert pane.query_one("#scroll").scroll_offset.y > 0
    drive(script, given=SMALL)


# -- Solve ---------------------------------------------------------------------------------------------------------------------


def test_every_search_answers_with_rows_that_keep_their_promise() -> None:
    state = opened(SMALL)
    for search in SEARCHES:
        seen: list[int] = []
        answer = search.start(state.run, None, "micro_batch", lambda progress, seen=seen: seen.append(progress.done) is None and len(seen) < 60)
        found = rows(answer, "micro_batch")
        assert found, search.name
        after = attempt(state, found[0].changes, found[0].keep)
        assert after.problem is None
        assert after.report.verdict == "fits"


def test_solve_runs_tells_and_applies() -> None:
    async def script(pilot: "Pilot[None]", app: Explorer) -> None:
        await keys(pilot, "5", "down", "g")
        pane = app.pane
        assert isinstance(pane, Solve)
        await settled(pilot, lambda: not pane.running)
        assert "largest micro-batch: " in text(app)
        assert pane.query_one(DataTable).row_count == 1
        best = pane.found[0].changes["recipe.micro_batch"]
        await keys(pilot, "enter")
        assert app.state.run.recipe.micro_batch == best
    drive(script, given=SMALL)


def test_a_search_stops_and_survives_a_resize_and_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.02)
        return predict(*arguments, **options)
    monkeypatch.setattr("costmodel.solve.trials.predict", slow)

    async def script(pilot: "Pilot[None]", app: Explorer) -> None:
        await keys(pilot, "5", "c")
        await says(pilot, app, "No search is running")
        await keys(pilot, "g")
        pane = app.pane
        assert isinstance(pane, Solve)
        await settled(pilot, lambda: pane.now.progress is not None and pane.now.progress.done > 0)
        await pilot.resize_terminal(80, 24)
        app.step("recipe.seq_len", -1)
        await keys(pilot, "g")
        await says(pilot, app, "A search is running")
        await keys(pilot, "c")
        await settled(pilot, lambda: not pane.running)
        await says(pilot, app, "stopped before the end")
        await keys(pilot, "1")
        assert "MEMORY" in text(app)
    drive(script, given=PRESETS[5].given)


def test_proposals_come_and_s_keeps_the_promise() -> None:
    async def script(pilot: "Pilot[None]", app: Explorer) -> None:
        await settled(pilot, lambda: app.proposals is not None)
        assert app.proposals and app.proposals.found
        first = app.proposals.found[0]
        assert first.words in text(app)
        before = app.state.report.step_s
        await keys(pilot, "s")
        assert before and app.state.report.step_s and app.state.report.step_s < before
        await keys(pilot, "u")
        await settled(pilot, lambda: app.proposals is not None)
        await keys(pilot, "S")
        assert "Makes the step faster" in text(app)
        await keys(pilot, "down", "enter")
        assert app.state.report.step_s < before
    drive(script, given=SMALL)


def test_a_run_that_does_not_fit_is_made_to_fit() -> None:
    async def script(pilot: "Pilot[None]", app: Explorer) -> None:
        assert "DOES NOT FIT" in text(app)
        await settled(pilot, lambda: app.proposals is not None)
        await keys(pilot, "s")
        assert app.state.report.verdict == "fits"
    drive(script, given={"model": "llama-3-8b", "cluster": {"gpus": 8}, "plan": {"strategy": "ddp"}})


# -- Measured ------------------------------------------------------------------------------------------------------------------


def record_of(given: dict[str, object], outcome: Outcome | None = None) -> Record:
    """A record whose step took a tenth longer than predicted, and of which no reserved memory was seen."""
    run = opened(given).run
    report = predict(run, scaling=False)
    role = report.roles[0]
    assert role.time and role.memory
    seen = replace(role, time=replace(role.time, step_s=1.1 * role.time.step_s), memory=replace(role.memory, reserved_bytes=None, device_bytes=None))
    report = replace(report, provenance="solo", roles=(seen,))
    return Record(run, "solo", None if outcome else report, outcome or Outcome(), Environment("H100", 1, None, "host", "linux", 8, None, {}),
                  "2026-01-02T03:04:05Z")


def test_a_record_opens_beside_its_prediction(tmp_path: Path) -> None:
    path = write_record(record_of(SMALL), tmp_path)

    async def script(pilot: "Pilot[None]", app: Explorer) -> None:
        await keys(pilot, "r")
        app.screen.query_one(Input).value = str(tmp_path)
        await keys(pilot, "enter")
        await keys(pilot, "enter")
        pane = app.pane
        assert isinstance(pane, Measured) and pane.laid
        shown = {row.name: row for row in measured.rows(pane.laid.predicted, pane.laid.measured)}
        assert shown["step"].measured == pytest.approx(1.1 * (shown["step"].predicted or 0))
        assert shown["reserved"].measured is None
        lines = [text_of(row) for row in measured.table(pane.laid, 100)]
        assert any(row.startswith("step") and "-9.1%" in row for row in lines)
        assert any(row.startswith("reserved") and "not seen" in row for row in lines)
        assert path.name in text(app)
    drive(script)


def test_a_broken_record_and_a_failed_run_are_messages(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    (tmp_path / "other.json").write_text(json.dumps({"kind": "other"}), encoding="utf-8")
    died = write_record(record_of(SMALL, Outcome("oom", message="tried to allocate 20 GiB")), tmp_path)

    async def script(pilot: "Pilot[None]", app: Explorer) -> None:
        for name, words in (("broken.json", "not valid JSON"), ("other.json", "it is not a record"), ("none.json", "there is no such file"),
                            (died.name, "ended with oom")):
            await keys(pilot, "r")
            app.screen.query_one(Input).value = str(tmp_path / name)
            await keys(pilot, "enter")
            await says(pilot, app, words)
        await keys(pilot, "1")
        assert "MEMORY" in text(app)
    drive(script)


def test_a_jobs_progress_is_told_and_its_end_is_read() -> None:
    told: list[str] = []
    code, printed, errors = asyncio.run(perform(["sh", "-c", "echo one >&2; echo two >&2; echo out; exit 5"], told.append))
    assert (code, printed, errors, told) == (5, "out\n", "one\ntwo", ["one", "two"])
    ended = ending(JOBS[0], code, printed, errors, Path("nowhere"))
    assert (ended.ok, ended.words) == (False, "dry run: exit code 5, a rank failed. two")
    assert "signal 9" in ending(JOBS[0], -9, "", "", Path("nowhere")).words
    assert "cannot be read" in ending(JOBS[0], 0, "no json", "", Path("nowhere")).words
    report = opened(SMALL).report
    assert ending(JOBS[0], 0, json.dumps(report.to_dict()), "", Path("nowhere")).report == report


def test_cancelling_a_job_ends_its_process(tmp_path: Path) -> None:
    async def main() -> int:
        task = asyncio.create_task(perform(["sh", "-c", f"echo $$ > {tmp_path}/pid; exec sleep 60"], lambda text: None))
        for _ in range(100):
            await asyncio.sleep(0.02)
            if (tmp_path / "pid").is_file() and (tmp_path / "pid").read_text().strip():
                break
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return int((tmp_path / "pid").read_text())
    pid = asyncio.run(main())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_crashed_job_is_a_message_and_the_session_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    import tui.panes.measured as pane_module

    async def script(pilot: "Pilot[None]", app: Explorer) -> None:
        await keys(pilot, "6", "down", "up")
        pane = app.pane
        assert isinstance(pane, Measured)
        for words, said in ((["sh", "-c", "echo 'it broke' >&2; kill -9 $$"], "killed by signal 9"), (["/nowhere/python"], "cannot be started"),
                            (["sh", "-c", "echo {}"], "cannot be read")):
            monkeypatch.setattr(pane_module, "command", lambda job, run, place, words=words: words)
            await keys(pilot, "g")
            await settled(pilot, lambda: not pane.running)
            await says(pilot, app, said)
        monkeypatch.setattr(pane_module, "command", lambda job, run, place: ["sleep", "60"])
        await keys(pilot, "g", "g")
        await says(pilot, app, "A job is running")
        await keys(pilot, "c")
        await says(pilot, app, "dry run stopped")
        await keys(pilot, "c")
        await says(pilot, app, "No job is running")
    drive(script, given=SMALL)


def test_a_dry_run_is_laid_beside_the_prediction() -> None:
    pytest.importorskip("torch")

    async def script(pilot: "Pilot[None]", app: Explorer) -> None:
        await keys(pilot, "6", "g")
        pane = app.pane
        assert isinstance(pane, Measured)
        await settled(pilot, lambda: not pane.running, 2000)
        assert pane.laid, pane.words
        found = {row.name: row for row in measured.rows(pane.laid.predicted, pane.laid.measured)}
        peak = found["allocated at the peak"]
        assert peak.predicted and peak.measured
        assert peak.predicted == pytest.approx(peak.measured, rel=1e-3)
        assert found["step"].measured is None
    drive(script, given={"params": "5M", "cluster": {"gpus": 2}, "plan": {"strategy": "fsdp"}, "recipe": {"seq_len": 64}})


def test_commands_are_those_of_execute() -> None:
    words = command(JOBS[0], Path("run.toml"), Path("record.json"))
    assert words[1:] == ["-m", "execute", "dryrun", "run.toml", "--json"]
    for job in JOBS:
        done = subprocess.run([*command(job, Path("x"), Path("y"))[:4], "--help"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, job.name


def test_progress_that_counts_has_a_bar() -> None:
    assert text_of(measured.progress("validate: 7 of 14: fsdp")) == "██████░░░░░░ "
    assert measured.progress("starting …") == []


def test_what_threads_find_arrives_while_a_dialog_is_open() -> None:
    async def script(pilot: "Pilot[None]", app: Explorer) -> None:
        for view in ("2", "3", "4", "1"):
            await keys(pilot, view)
            app.step("recipe.micro_batch", 1)
            await keys(pilot, "question_mark")
            await settled(pilot, lambda: app.proposals is not None)
            await pilot.pause(0.3)
            await keys(pilot, "escape")
        await keys(pilot, "5", "g", "question_mark")
        pane = app.pane
        assert isinstance(pane, Solve)
        await settled(pilot, lambda: not pane.running)
        await keys(pilot, "escape")
        assert "plans:" in text(app)
    drive(script, given={**SMALL, "cluster": {"gpus": 2}})
