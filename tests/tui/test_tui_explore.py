"""Explore as lines: at every size what matters is there, nothing is wider than the pane, no label is cut."""

import pytest

from costmodel.advice import advise
from costmodel.prediction import predict
from costmodel.waterfall import waterfall
from tui.lines import length, text_of
from tui.presets import PRESETS, START
from tui.propose import Rested, proposals
from tui.state import State, attempt, opened, stepped
from tui.tour import STOPS
from tui.views.explore import Size, explore, gib, held
from tui.views.form import form

RUNS = {**{preset.name: preset.given for preset in PRESETS}, **{stop.title: stop.given for stop in STOPS},
        "does not fit": {"model": "llama-3-8b", "cluster": {"gpus": 8}, "plan": {"strategy": "ddp"}}}
SIZES = {"80x24": Size(50, 22), "80x24, tour": Size(50, 14), "120x40": Size(77, 38), "120x40, tour": Size(77, 30), "200x60": Size(157, 58)}


@pytest.mark.parametrize("name", RUNS)
def test_nothing_is_cut_or_missing_at_any_size(name: str) -> None:
    state = opened(RUNS[name])
    rested = Rested(predict(state.run, intervals=True))
    for size in SIZES.values():
        for late in (None, rested):
            rows = explore(state, late, size)
            assert len(rows) <= size.height
            assert all(length(row) <= size.width for row in rows)
            shown = [text_of(row) for row in rows]
            for word in ("MEMORY", "STEP", "BOUND BY", "moment"):
                assert any(row.startswith(word) for row in shown), (word, size)
            cut = [row for row in shown if "…" in row and not row.startswith(("moment", "looking", " …", "note"))]
            assert cut == []


@pytest.mark.parametrize("name", ["Llama 3 8B on 8 H100, FSDP", "does not fit"])
def test_the_proposal_and_its_promise_are_whole_at_80_columns(name: str) -> None:
    state = opened(RUNS[name])
    found = proposals(advise(state.run))
    rows = [text_of(row) for row in explore(state, Rested(state.report, found), SIZES["80x24"])]
    assert f" s  {found.found[0].words}" in rows
    assert any(row.startswith(f"    {found.found[0].promise}") for row in rows)


def test_bars_and_figures_are_those_of_the_report() -> None:
    state = opened(START)
    rows = [text_of(row) for row in explore(state, None, SIZES["120x40"])]
    memory = state.report.fullest.memory
    assert memory and memory.capacity_bytes and state.report.mfu
    bar = next(row for row in rows if row.startswith(" all x8"))
    assert bar.split()[-2:] == [gib(held(memory)), f"{(memory.capacity_bytes - held(memory)) / 2**30:+,.1f}"]
    fall = waterfall(state.run, state.report)
    assert next(row for row in rows if row.startswith("= MFU")).split()[-1] == f"{100 * fall.mfu:.1f}"
    losses = [float(row.split()[-1]) for row in rows[next(i for i, r in enumerate(rows) if r.startswith("MFU")) + 1:
                                                      next(i for i, r in enumerate(rows) if r.startswith("= MFU"))]]
    assert 100 + sum(losses) == pytest.approx(100 * fall.mfu, abs=0.6)


def test_what_is_offloaded_is_said_beside_the_device_and_decides_where_it_is_too_much() -> None:
    plan = {"strategy": "fsdp", "offload": "params", "checkpointing": "full"}
    fine, over = ([text_of(row) for row in explore(opened({"model": model, "cluster": {"gpus": 8, "gpu": gpu}, "plan": plan}), None, SIZES["80x24"])]
                  for model, gpu in (("llama-3-8b", "h100"), ("llama-3-70b", "l40s")))
    assert any(row.startswith("moment host 125.8 of 2,048.0 GiB a node") for row in fine)
    assert over[0].startswith(" DOES NOT FIT ") and over[0].endswith("GiB of a host")


def test_used_cells_are_the_share_of_the_capacity() -> None:
    state = opened(START)
    memory = state.report.fullest.memory
    assert memory and memory.capacity_bytes
    bar = next(text_of(row) for row in explore(state, None, SIZES["200x60"]) if text_of(row).startswith(" all x8"))
    inside = bar[11:].partition("│")[0]
    assert (len(inside) - inside.count("░")) / len(inside) == pytest.approx(held(memory) / memory.capacity_bytes, abs=0.01)


def test_an_invalid_change_takes_the_verdicts_rows_and_moves_nothing() -> None:
    state = opened(START)
    failed = stepped(state, "plan.pp", 1)
    for size in SIZES.values():
        before, after = ([text_of(row) for row in explore(s, None, size)] for s in (state, failed))
        assert after[0].startswith(" INVALID ")
        assert before[3:-3][:6] == after[3:-3][:6]
        assert len(before) == len(after)


def test_a_step_of_the_pipeline_moves_no_row_below_the_bars() -> None:
    """Rows of the roles are reserved: MFU and BOUND BY stay where they are."""
    def places(state: State) -> list[int]:
        rows = [text_of(row) for row in explore(state, None, SIZES["120x40"])]
        return [next(i for i, row in enumerate(rows) if row.startswith(word)) for word in ("STEP", "moment")]
    one = opened({"model": "llama-2-7b", "cluster": {"gpus": 8}, "plan": {"zero": 0, "pp": 2}, "recipe": {"grad_accum": 8, "precision": "bf16-pure"}})
    assert places(one) == places(attempt(one, {"plan.pp": 4})) == places(attempt(one, {"plan.pp": 8}))


@pytest.mark.parametrize(("width", "height"), [(27, 22), (39, 38), (39, 58)])
def test_the_form_shows_every_value_whole(width: int, height: int) -> None:
    for given in RUNS.values():
        state = opened(given)
        rows = form(state, "plan.zero", True, width, height, 0)
        assert all(length(row) == width for row in rows if len(row) > 3)
        shown = "\n".join(text_of(row) for row in rows)
        assert state.run.model.name in shown
        assert state.run.cluster.accelerator.name in shown
