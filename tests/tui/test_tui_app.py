"""The explorer, driven by keys and mouse."""

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from driving import drive, keys, says, screen, text
from textual.pilot import Pilot
from textual.widgets import Input
from typer.testing import CliRunner

from costmodel.cli.app import app as command_line
from costmodel.cli.options import toml_scalar
from tui.app import Explorer
from tui.dialogs import Paper, Picker
from tui.form import Form
from tui.keys import KEYS
from tui.presets import PRESETS
from tui.views.explore import gib, held

SIZES = ((80, 24), (120, 40), (200, 60))


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_the_first_screen_says_what_matters(size: tuple[int, int]) -> None:
    async def script(pilot: "Pilot[None]", app: Explorer) -> None:
        rows = screen(app)
        shown = "\n".join(rows)
        report = app.state.report
        assert report.fullest.memory
        assert f"FITS   {gib(held(report.fullest.memory))} of" in shown
        assert f"MFU {100 * report.mfu:.1f}%" in shown if report.mfu else False
        for word in ("MEMORY", "STEP", "= MFU", "BOUND BY", "llama-3-8b", "moment", "choose"):
            assert word in shown, word
        assert len(rows) == size[1]
        assert all(len(row) == size[0] for row in rows)
    drive(script, size)


def test_an_arrow_steps_the_field_and_the_figures_follow() -> None:
    async def script(pilot: "Pilot[None]", app: Explorer) -> None:
        before = text(app)
        app.query_one(Form).go_to("recipe.micro_batch")
        await keys(pilot, "right")
        assert app.state.run.recipe.micro_batch == 2
        assert text(app) != before
        await keys(pilot, "left")
        assert app.state.run.recipe.micro_batch == 1
    drive(script)


def test_arrows_move_over_all_fields_and_stop_at_the_ends() -> None:
    async def script(pilot: "Pilot[None]", app: Explorer) -> None:
        form = app.query_one(Form)
        await keys(pilot, "up")
        assert form.cursor == "model"
        await keys(pilot, "end")
        assert form.cursor == "recipe.allocator"
        assert "allocator" in text(app)
        await keys(pilot, "down", "home", "down")
        assert form.cursor == "cluster.gpu"
    drive(script, (80, 24))


def test_an_impossible_step_says_the_rule_and_s_repairs_it() -> None:
    async def script(pilot: "Pilot[None]", app: Explorer) -> None:
        app.query_one(Form).go_to("plan.pp")
        await keys(pilot, "right")
        assert "INVALID" in text(app)
        assert "accumulation = 2" in text(app)
        assert "!pp" in text(app)
        await keys(pilot, "s")
        assert app.state.run.plan.pp == 2
        assert "INVALID" not in text(app)
        await keys(pilot, "u")
        assert app.state.run.plan.pp == 1
        await keys(pilot, "u")
        await says(pilot, app, "Nothing to take back")
    drive(script)


def test_escape_drops_a_failed_change() -> None:
    async def script(pilot: "Pilot[None]", app: Explorer) -> None:
        app.query_one(Form).go_to("plan.pp")
        await keys(pilot, "right", "escape")
        assert app.state.problem is None
        assert "INVALID" not in text(app)
    drive(script)


def test_the_picker_searches_and_takes() -> None:
    async def script(pilot: "Pilot[None]", app: Explorer) -> None:
        await keys(pilot, "enter", *"qwen 7b", "enter")
        assert app.state.run.model.name == "qwen2.5-7b"
    drive(script)


def test_the_picker_takes_a_count_of_parameters_for_a_model() -> None:
    async def script(pilot: "Pilot[None]", app: Explorer) -> None:
        await keys(pilot, "slash", *"1.5B", "enter")
        assert app.state.run.model.name == "llama-style-1.5B"
    drive(script)


def test_the_picker_says_while_typing_what_a_value_would_do() -> None:
    async def script(pilot: "Pilot[None]", app: Explorer) -> None:
        app.query_one(Form).go_to("plan.tp")
        await keys(pilot, "enter", "3")
        assert isinstance(app.screen, Picker)
        assert "tp = 3: model.heads = 32 must be a multiple of tp" in text(app) or "it must divide the 8 GPUs" in text(app)
        await keys(pilot, "backspace", "4")
        assert "GiB  step" in text(app)
        await keys(pilot, "escape")
        assert app.state.run.plan.tp == 1
    drive(script)


def test_a_word_in_a_number_is_an_error_and_not_a_crash() -> None:
    async def script(pilot: "Pilot[None]", app: Explorer) -> None:
        app.query_one(Form).go_to("recipe.seq_len")
        await keys(pilot, "enter", *"zzz", "enter")
        assert "must be a whole number" in text(app)
    drive(script)


def test_presets_open() -> None:
    async def script(pilot: "Pilot[None]", app: Explorer) -> None:
        await keys(pilot, "o", *"gpt-3", "enter")
        assert app.state.run.model.name == "gpt3-175b"
        assert "pp7" in text(app)
    drive(script)


def test_a_run_file_opens_and_a_broken_one_is_a_message(tmp_path: Path) -> None:
    (tmp_path / "good.toml").write_text('params = "350M"\n[cluster]\ngpus = 2\n', encoding="utf-8")
    (tmp_path / "broken.toml").write_text("params = = 1", encoding="utf-8")

    async def script(pilot: "Pilot[None]", app: Explorer) -> None:
        await keys(pilot, "o")
        app.screen.query_one(Input).value = str(tmp_path / "good.toml")
        await keys(pilot, "enter")
        assert app.state.run.model.name == "llama-style-350M"
        for name, said in (("broken.toml", "not valid TOML"), ("none.toml", "there is no such file")):
            await keys(pilot, "o")
            app.screen.query_one(Input).value = str(tmp_path / name)
            await keys(pilot, "enter")
            await says(pilot, app, said)
        assert app.state.run.model.name == "llama-style-350M"
    drive(script)


def test_save_writes_what_predict_reads(tmp_path: Path) -> None:
    async def script(pilot: "Pilot[None]", app: Explorer) -> float:
        await keys(pilot, "w")
        app.screen.query_one(Input).value = str(tmp_path / "mine")
        await keys(pilot, "enter")
        await says(pilot, app, "Saved")
        await keys(pilot, "w")
        app.screen.query_one(Input).value = str(tmp_path / "nowhere" / "mine.toml")
        await keys(pilot, "enter")
        await says(pilot, app, "there is no directory")
        assert app.state.report.step_s
        return app.state.report.step_s
    step_s = drive(script)
    done = CliRunner().invoke(command_line, ["predict", str(tmp_path / "mine.toml"), "--json"])
    assert toml_scalar(done.stdout.partition('"step_s": ')[2].partition(",")[0]) == step_s


def test_copy_puts_the_command_on_the_clipboard() -> None:
    async def script(pilot: "Pilot[None]", app: Explorer) -> None:
        await keys(pilot, "y")
        assert app.clipboard.startswith("costmodel predict --model llama-3-8b")
        assert "costmodel predict --model" in text(app)
        await keys(pilot, "escape")
    drive(script)


def test_help_names_every_key() -> None:
    async def script(pilot: "Pilot[None]", app: Explorer) -> None:
        await keys(pilot, "question_mark")
        assert isinstance(app.screen, Paper)
        page = "\n".join(span.text for row in app.screen.page(70) for span in row)
        assert all(key.does.split()[0] in page for key in KEYS)
        await keys(pilot, "escape")
        assert not isinstance(app.screen, Paper)
    drive(script, (80, 24))


def test_notes_show_what_the_figures_rest_on() -> None:
    async def script(pilot: "Pilot[None]", app: Explorer) -> None:
        await keys(pilot, "i")
        assert "collectives: exact" in text(app)
    drive(script)


def test_keep_switches_which_batch_stays() -> None:
    async def script(pilot: "Pilot[None]", app: Explorer) -> None:
        await keys(pilot, "k")
        app.query_one(Form).go_to("cluster.gpus")
        await keys(pilot, "left")
        assert (app.state.run.cluster.gpus, app.state.run.recipe.global_batch, app.state.run.recipe.grad_accum) == (4, 8, 2)
        await keys(pilot, "k", "left")
        assert (app.state.run.cluster.gpus, app.state.run.recipe.grad_accum) == (2, 2)
    drive(script)


def test_clicks_choose_and_step_fields_and_propose() -> None:
    async def script(pilot: "Pilot[None]", app: Explorer) -> None:
        rows = screen(app)
        y = next(i for i, row in enumerate(rows) if row.startswith(" micro-batch"))
        await pilot.click("#form", offset=(3, y - 1))
        await pilot.pause()
        assert app.query_one(Form).cursor == "recipe.micro_batch"
        x = screen(app)[y].index("▸")
        await pilot.click("#form", offset=(x, y - 1))
        await pilot.pause()
        assert app.state.run.recipe.micro_batch == 2
    drive(script)


def test_the_palette_has_every_key_and_field() -> None:
    async def script(pilot: "Pilot[None]", app: Explorer) -> None:
        titles = [command.title for command in app.get_system_commands(app.screen)]
        assert {"Undo (u)", "View: Explore", "Set micro-batch"} <= set(titles)
        await keys(pilot, "ctrl+p")
        await pilot.pause(0.3)
        assert "Search" in text(app)
    drive(script)


def test_a_resize_repaints_for_the_new_size() -> None:
    async def script(pilot: "Pilot[None]", app: Explorer) -> None:
        await pilot.resize_terminal(80, 24)
        await pilot.pause()
        assert len(screen(app)) == 24
        assert "BOUND BY" in text(app)
        await pilot.resize_terminal(160, 50)
        await pilot.pause()
        assert "MODEL" in text(app)
        await pilot.resize_terminal(20, 5)
        await pilot.pause()
    drive(script)


@pytest.mark.parametrize("theme", ["textual-light", "nord", "ansi-dark"])
def test_themes_paint(theme: str) -> None:
    async def script(pilot: "Pilot[None]", app: Explorer) -> None:
        app.theme = theme
        await pilot.pause()
        assert "FITS" in text(app)
    drive(script)


def test_no_color_paints_every_view_without_a_colour() -> None:
    code = ("import asyncio\nfrom tui.app import Explorer\nfrom tui.keys import VIEWS\n"
            "async def main():\n    app = Explorer()\n    async with app.run_test(size=(120, 40)) as pilot:\n"
            "        for i in range(len(VIEWS)):\n            await pilot.press(str(i + 1))\n            await pilot.pause(0.1)\n"
            "            for strip in app.screen._compositor.render_strips():\n                for segment in strip:\n"
            "                    colour = segment.style and segment.style.color\n"
            "                    assert colour is None or colour.is_default or len(set(colour.get_truecolor())) == 1, segment\n"
            "asyncio.run(main())\nprint('painted')")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env={**os.environ, "NO_COLOR": "1"},
                          cwd=Path(__file__).parent.parent.parent)
    assert "painted" in done.stdout, done.stderr[-2000:]


def test_a_wrong_run_ends_before_the_screen_opens() -> None:
    done = CliRunner().invoke(command_line, ["tui", "--model", "llama-3-8b", "--gpus", "7", "--tp", "2"])
    assert done.exit_code == 2
    assert "it must divide the 7 GPUs" in done.stderr


def test_without_a_terminal_the_command_says_so() -> None:
    done = CliRunner().invoke(command_line, ["tui"])
    assert done.exit_code == 2
    assert "it needs a terminal" in done.stderr


def test_the_page_of_keys_names_every_key() -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "tui.md").read_text(encoding="utf-8")
    cells = " ".join(row.split("|")[1] for row in page.splitlines() if row.startswith("| "))
    assert {key.shown for key in KEYS} <= set(cells.replace(",", " ").split())


def test_without_textual_the_command_says_what_to_install() -> None:
    code = ("import sys\nsys.modules['textual'] = None\nsys.argv = ['costmodel', 'tui']\nfrom costmodel.cli import main\nmain()")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=Path(__file__).parent.parent.parent)
    assert done.returncode == 2, done.stderr
    assert "pip install -e '.[tui]'" in done.stderr


def test_quitting_stops_what_runs() -> None:
    """Threads end with the explorer: each prediction of a search asks whether to go on."""
    async def main() -> None:
        app = Explorer(PRESETS[5].given)
        async with app.run_test() as pilot:
            await pilot.press("5", "g")
            await pilot.pause(0.2)
            assert app.current(app.state)
            await pilot.press("q")
            assert not app.current(app.state)
        assert app.return_code == 0
    asyncio.run(main())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("asyncio_")]
