"""The tour: what its answers claim is what the prediction says, and every stop fits its panel."""

import pytest
from driving import drive, keys, text
from textual.pilot import Pilot

from costmodel.changes import changed
from costmodel.inputs import resolve
from costmodel.prediction import predict
from tui.app import Explorer
from tui.lines import length, text_of
from tui.tour import STOPS, Figures, Stop
from tui.views.guide import HEIGHT, panel


def figures(stop: Stop) -> tuple[Figures, Figures]:
    run = resolve(stop.given).run
    after = changed(run, stop.then)
    return Figures(run, predict(run)), Figures(after, predict(after))


@pytest.mark.parametrize("stop", STOPS, ids=[stop.title for stop in STOPS])
def test_what_an_answer_claims_is_what_is_predicted(stop: Stop) -> None:
    before, after = figures(stop)
    assert stop.claim(before, after)
    assert before.report.verdict == "fits"


@pytest.mark.parametrize("stop", STOPS, ids=[stop.title for stop in STOPS])
def test_a_claim_does_not_hold_without_the_change(stop: Stop) -> None:
    before, _ = figures(stop)
    assert not stop.claim(before, before)


@pytest.mark.parametrize("at", range(len(STOPS)), ids=[stop.title for stop in STOPS])
def test_a_stop_fits_its_panel_at_80_columns(at: int) -> None:
    before, after = figures(STOPS[at])
    for answer in (None, STOPS[at].answer(before, after)):
        rows = panel(at, answer, 78)
        assert len(rows) <= HEIGHT - 1
        assert all(length(row) <= 78 for row in rows)
        assert not [text_of(row) for row in rows if "…" in text_of(row)]


def test_the_tour_sets_runs_answers_and_ends() -> None:
    async def script(pilot: "Pilot[None]", app: Explorer) -> None:
        mine = app.state.run
        await keys(pilot, "t")
        assert "TOUR 1/" in text(app)
        assert app.state.run.cluster.gpus == 1
        await keys(pilot, "right_square_bracket", "right_square_bracket")
        assert STOPS[2].title in text(app)
        assert app.state.run.cluster.gpus == 8
        await keys(pilot, "a")
        assert app.state.run.cluster.gpus == 16
        assert "No: O is" in text(app)
        await keys(pilot, "left_square_bracket")
        assert STOPS[1].title in text(app)
        await keys(pilot, "escape")
        assert "TOUR" not in text(app)
        assert app.state.run == mine
    drive(script)


@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=["80x24", "120x40"])
def test_verdict_memory_step_and_bound_stay_in_sight_during_the_tour(size: tuple[int, int]) -> None:
    async def script(pilot: "Pilot[None]", app: Explorer) -> None:
        await keys(pilot, "t")
        for _ in STOPS:
            shown = text(app)
            for word in ("FITS", "MEMORY", "STEP", "BOUND BY", "LOOK"):
                assert word in shown, word
            await keys(pilot, "right_square_bracket")
    drive(script, size)
