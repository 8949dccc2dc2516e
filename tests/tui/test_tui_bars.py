"""Bars: as long as their sum says, every part in sight, readable without colour."""

from hypothesis import given
from hypothesis import strategies as st

from tui.bars import CAPACITY_AT, against, cells, stacked
from tui.lines import Span, fitted, flowed, length, text_of, wrapped

parts = st.lists(st.floats(0, 100), min_size=1, max_size=10).map(lambda values: [(chr(65 + i), v) for i, v in enumerate(values)])


@given(parts, st.integers(1, 200))
def test_a_whole_bar_fills_its_width(values: list[tuple[str, float]], width: int) -> None:
    whole = sum(v for _, v in values)
    if whole > 1e-6:
        assert sum(n for _, n in cells(values, width, whole)) == width


@given(parts, st.integers(40, 200), st.floats(1, 300))
def test_a_bar_against_a_capacity_keeps_its_width_and_the_capacity_its_place(values: list[tuple[str, float]], width: int, capacity: float) -> None:
    bar = against(values, width, capacity, "m-")
    assert length(bar) == width
    assert text_of(bar)[int(width * CAPACITY_AT)] == "│"


def test_a_part_begins_with_its_letter() -> None:
    assert text_of(stacked([("P", 3), ("G", 2)], 10, 5, "m-")) == "P·····G···"


def test_what_does_not_fit_goes_past_the_capacity_and_is_cut_with_a_sign() -> None:
    assert text_of(against([("P", 11)], 100, 10, "m-")).rstrip().endswith("·")
    assert text_of(against([("P", 100)], 100, 10, "m-")).endswith("»")
    assert text_of(against([("P", 5)], 100, 10, "m-")).count("░") == 36


def test_a_small_part_keeps_a_cell() -> None:
    assert dict(cells([("P", 96), ("G", 4)], 10, 100))["G"] == 1


def test_lines_never_pass_their_width() -> None:
    assert text_of(fitted([Span("abcdef")], 4)) == "abc…"
    rows = flowed([[Span("aaaa")], [Span("bbbb")], [Span("cccc")]], 9, 2)
    assert [text_of(row) for row in rows] == ["aaaa bbbb", "cccc"]
    assert [text_of(row) for row in wrapped("one two three four", 8, 1)] == ["one two…"]
