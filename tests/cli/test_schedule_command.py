"""`costmodel schedule`: pictures written out by hand, bubbles from the papers, and bad input."""

import json

import pytest
from calling import call, error

from costmodel.render.schedule import timetable

NAIVE = """\
  slot    0              5
  rank 0  F0 .  .  .  .  .  .  B0
  rank 1  .  F0 .  .  .  .  B0 .
  rank 2  .  .  F0 .  .  B0 .  .
  rank 3  .  .  .  F0 B0 .  .  .
"""
"""One micro-batch walks through four stages and back; at any time three of the four are idle."""
GPIPE = """\
  slot    0              5              10
  rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B0 B1 B2 B3
  rank 1  .  F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3 .
  rank 2  .  .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .  .
  rank 3  .  .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .  .
"""
"""arXiv 1811.06965, figure 2c; PyTorch runs the backwards in the order of the forwards."""
GPIPE_BACKWARD_TWICE = """\
  slot    0              5              10             15             20
  rank 0  F0 F1 F2 F3 .  .  .  .  .  .  .  .  .  B0--- B1--- B2--- B3---
  rank 1  .  F0 F1 F2 F3 .  .  .  .  .  .  B0--- B1--- B2--- B3--- .  .
  rank 2  .  .  F0 F1 F2 F3 .  .  .  B0--- B1--- B2--- B3--- .  .  .  .
  rank 3  .  .  .  F0 F1 F2 F3 B0--- B1--- B2--- B3--- .  .  .  .  .  .
"""
ONE_F_ONE_B = """\
  slot    0              5              10
  rank 0  F0 F1 F2 F3 .  .  .  B0 .  B1 .  B2 .  B3
  rank 1  .  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3 .
  rank 2  .  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .  .
  rank 3  .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .  .
"""
"""arXiv 2006.09503, figure 2: p - r forwards to warm up, then one backward, one forward."""
INTERLEAVED = """\
  slot    0                   5
  rank 0  F0a F1a F0b F1b .   B0b .   B1b B0a B1a
  rank 1  .   F0a F1a F0b B0b F1b B1b B0a B1a .
"""
"""arXiv 2104.04473, section 2.2, in small: 8 slots of work, 2 of bubble, (p-1)/(m v) = 1/4."""

ZB_H1 = """\
  slot    0              5              10
  rank 0  F0 F1 F2 F3 .  .  .  I0 W0 I1 W1 I2 W2 I3 W3
  rank 1  .  F0 F1 F2 .  .  I0 F3 I1 W0 I2 W1 I3 W2 W3
  rank 2  .  .  F0 F1 .  I0 F2 I1 F3 I2 W0 I3 W1 W2 W3
  rank 3  .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3
"""
"""arXiv 2401.10241, figure 2 (top), in small: 1F1B whose gradients of weights (W) wait, rank r being r of them behind, and fill its end."""


def picture(line: str, width: int = 80) -> str:
    lines = call(f"schedule {line}", COLUMNS=str(width)).stdout.splitlines(keepends=True)
    first = next(i for i, text in enumerate(lines) if text.startswith("  slot"))
    return "".join(lines[first : lines.index("\n", first)])


@pytest.mark.parametrize(("line", "text"), [
    ("--schedule naive --pp 4 --micro-batches 1 --backward 1", NAIVE),
    ("--schedule gpipe --pp 4 --micro-batches 4 --backward 1", GPIPE),
    ("--schedule gpipe --pp 4 --micro-batches 4", GPIPE_BACKWARD_TWICE),
    ("--pp 4 --micro-batches 4 --backward 1", ONE_F_ONE_B),
    ("--schedule interleaved --pp 2 --virtual-stages 2 --micro-batches 2 --backward 1", INTERLEAVED),
    ("--schedule zb-h1 --pp 4 --micro-batches 4", ZB_H1)])
def test_the_picture_is_the_one_written_by_hand(line: str, text: str) -> None:
    assert picture(line) == text


def test_naive_starts_a_micro_batch_when_the_one_before_has_come_back() -> None:
    row = picture("--schedule naive --pp 2 --micro-batches 2 --backward 1").splitlines()[1:]
    assert row == ["  rank 0  F0 .  .  B0 F1 .  .  B1", "  rank 1  .  F0 B0 .  .  F1 B1 ."]


def test_interleaved_names_the_stage_by_a_letter() -> None:
    text = call("schedule --schedule interleaved --pp 4 --virtual-stages 2 --micro-batches 4 --backward 1", COLUMNS="120").stdout
    rows = {line[2:8]: line[10:] for line in text.splitlines() if line.startswith("  rank ") and line[7:8].isdigit()}
    assert rows["rank 0"].startswith("F0a F1a F2a F3a F0b F1b F2b F3b")
    assert rows["rank 3"].startswith(".   .   .   F0a F1a F2a F3a F0b B0b")
    assert "a stage 0, b stage 4" in " ".join(text.split())


@pytest.mark.parametrize(("line", "ideal", "step"), [
    ("--pp 4 --micro-batches 32", "9.4% = (p - 1) / m", "8.6% = (p - 1) / (m + p - 1)"),
    ("--pp 4 --micro-batches 32 --schedule gpipe --backward 1", "9.4% = (p - 1) / m", "8.6% = (p - 1) / (m + p - 1)"),
    ("--pp 4 --micro-batches 4 --schedule naive", "300.0% = p - 1", "75.0% = (p - 1) / p"),
    ("--pp 4 --micro-batches 32 --schedule interleaved --virtual-stages 2", "4.7% = (p - 1) / (m v)", "4.5% = (p - 1) / (m v + p - 1)"),
    ("--pp 4 --micro-batches 32 --schedule zb-h1", "3.1% = (p - 1) F / (m (F + B))", "3.0% = (p - 1) F / (m (F + B) + (p - 1) F)"),
    ("--pp 4 --micro-batches 32 --schedule zbv", "1.6% = (p - 1) F / (m v (F + B))", "1.5% = (p - 1) F / (m v (F + B) + (p - 1) F)"),
    ("--pp 1 --micro-batches 4", "0.0%", "0.0%")])
def test_the_bubble_is_given_in_both_conventions(line: str, ideal: str, step: str) -> None:
    """Narayanan et al. 2021 (arXiv 2104.04473), section 2.2: (p-1)/m, and (p-1)/(m v) when interleaved. ZB-H1: a third of 1F1B's (arXiv 2401.10241)."""
    text = call(f"schedule {line}").stdout
    assert f"over ideal  {ideal}" in text
    assert f"over step   {step}" in text


@pytest.mark.parametrize(("schedule", "v", "held"), [("naive", 1, (1, 1, 1, 1)), ("gpipe", 1, (8, 8, 8, 8)), ("1f1b", 1, (4, 3, 2, 1)),
                                                   ("zb-h1", 1, (4, 4, 4, 4)), ("zbv", 2, (8, 8, 8, 8))])
def test_what_a_rank_holds(schedule: str, v: int, held: tuple[int, ...]) -> None:
    """Qi et al. 2024 (arXiv 2401.10241), table 1: ZB-H1 and ZB-V hold at most the p micro-batches (of 2 half-size stages: 2p) that 1F1B does."""
    assert timetable(schedule, 4, v, 8).in_flight == held


def test_interleaving_holds_more_on_the_first_rank() -> None:
    """Korthikanti et al. 2022 (arXiv 2205.05198), section 4.2.3: the layers' part of rank 0 grows by 1 + (p-1)/(p v)."""
    p, v = 4, 2
    whole = timetable("1f1b", p, 1, 8).in_flight[0]
    assert timetable("interleaved", p, v, 8).in_flight[0] / v == whole * (1 + (p - 1) / (p * v))


def test_a_wide_picture_is_cut_in_the_middle_and_says_so() -> None:
    text = call("schedule --pp 4 --micro-batches 32", COLUMNS="80").stdout
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "slots 0 to 7 and 97 to 104 of 105 are shown; --width 430 shows all" in text
    whole = call("schedule --pp 4 --micro-batches 32 --width 430", COLUMNS="80").stdout
    assert "…" not in whole
    assert "B31" in whole.splitlines()[4]


@pytest.mark.parametrize("width", [80, 120])
def test_a_run_adds_its_layers_and_its_prediction(width: int) -> None:
    result = call("schedule --params 1B --gpus 8 --pp 4 --framework megatron --micro-batches 8", COLUMNS=str(width))
    assert result.exit_code == 0
    assert max(len(line) for line in result.stdout.splitlines()) <= width
    assert "rank  stages  layers  in flight" in result.stdout
    assert "predicted, of a step of" in result.stdout


def test_a_run_that_is_not_predicted_still_has_its_schedule() -> None:
    text = " ".join(call("schedule --params 1B --gpus 8 --pp 4 --precision bf16-mixed").stdout.split())
    assert "Its time is not predicted: recipe.precision = bf16-mixed" in text


def test_the_v_shape_says_its_stages_and_letters() -> None:
    text = " ".join(call("schedule --pp 4 --micro-batches 8 --schedule zbv", COLUMNS="200").stdout.split())
    assert "0 0, 7" in text
    assert "on rank 0: a stage 0, b stage 7" in text
    data = json.loads(call("schedule --pp 2 --micro-batches 4 --schedule dualpipev --json").stdout)
    assert [rank["stages"] for rank in data["ranks"]] == [[0, 3], [1, 2]]
    assert {cell["kind"] for cell in data["ranks"][0]["cells"]} == {"F", "B", "I", "W"}


def test_json_has_stable_keys() -> None:
    data = json.loads(call("schedule --pp 4 --micro-batches 4 --schedule gpipe --json").stdout)
    assert list(data) == ["schema", "schedule", "pp", "virtual_stages", "micro_batches", "forward", "backward", "end", "bubble", "ranks"]
    assert data["bubble"] == {"over_ideal": 0.75, "over_step": pytest.approx(3 / 7)}
    assert data["ranks"][3]["cells"][0] == {"kind": "F", "stage": 3, "micro_batch": 0, "start": 3.0, "end": 4.0}
    run = json.loads(call("schedule --params 1B --gpus 8 --pp 4 --framework megatron --json").stdout)
    assert run["ranks"][0]["layers"] == [4]
    assert run["ranks"][0]["predicted"]["bubble_s"] > 0


@pytest.mark.parametrize(("line", "text"), [
    ("", "error: --pp: a schedule needs pipeline ranks. Use --pp 4 --micro-batches 8, or give a run."),
    ("--pp 0", "error: --pp 0: must be a whole number of at least 1. Use --pp 4."),
    ("--pp 4 --schedule interleaved", "error: --virtual-stages 1: an interleaved schedule has at least 2 stages a rank. "
                                      "Use --virtual-stages 2, or --schedule 1f1b."),
    ("--pp 4 --virtual-stages 2", "error: --virtual-stages 2: schedule 1f1b has one stage a rank. Use --schedule interleaved, or --virtual-stages 1."),
    ("--pp 4 --schedule interleaved --virtual-stages 2 --micro-batches 9",
     "error: --micro-batches 9: the interleaved schedule needs micro-batches in 2 equal rounds. Use --micro-batches 8."),
    ("--params 1B --pp 4 --schedule interleaved --virtual-stages 2 --micro-batches 9",
     "error: --micro-batches 9: the interleaved schedule needs micro-batches in 2 equal rounds. Use --grad-accum 8."),
    ("--pp 4 --schedule interlaved", "error: --schedule interlaved: this schedule is not known, or not predicted yet. Did you mean interleaved?"),
    ("--pp 4 --schedule chimera", "error: --schedule chimera: this schedule is not known, or not predicted yet. "
                                  "Use one of naive, gpipe, 1f1b, interleaved, zb-h1, interleaved-zb, zbv, dualpipev."),
    ("--pp 4 --schedule zbv --virtual-stages 3", "error: --virtual-stages 3: schedule zbv has two stages a rank. "
                                                 "Use --virtual-stages 2, or --schedule interleaved-zb."),
    ("--pp 4 --schedule interleaved-zb", "error: --virtual-stages 1: an interleaved schedule has at least 2 stages a rank. "
                                         "Use --virtual-stages 2, or --schedule zb-h1."),
    ("--pp 4 --schedule dualpipev --micro-batches 7", "error: --micro-batches 7: dualpipev needs at least as many micro-batches as stages, 8. "
                                                      "Use --micro-batches 8, or --schedule zbv."),
    ("--pp 4 --micro-batches 1000000", "error: --micro-batches 1000000: 8,000,000 cells are too many to show. Use at most 50000 micro-batches."),
    ("--pp 2000", "error: --pp 2000: 2000 stages are too many to show. Use at most 1024."),
    ("--pp 4 --micro-batches 4 --grad-accum 3", "error: --micro-batches 4 and --grad-accum 3: both say how many micro-batches a step has. "
                                                "Give one of the two."),
    ("--pp 4 --forward 0", "error: --forward 0: must be a number from 0.001 to 1000. Use --forward 1."),
    ("--pp 4 --backward nan", "error: --backward nan: must be a number from 0.001 to 1000. Use --backward 1."),
    ("--pp 4 --width 10", "error: --width 10: a picture needs at least 40 columns. Use --width 80."),
    ("--pp 4 --gpus 8", "error: model: a run needs a model. Use --params 1B, or --model llama-3-8b.")])
def test_bad_input_is_one_message(line: str, text: str) -> None:
    assert error(f"schedule {line}") == text
