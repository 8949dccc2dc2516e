"""Every field case is a test, or docs/accuracy.md says why it is not."""

import re
import tomllib
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
CASES = tomllib.loads((HERE / "cases.toml").read_text(encoding="utf-8"))
ID = re.compile(r"\b[CF]\d\d\b")
REASONS = ("needs", "not known")


def named_by_tests() -> set[str]:
    """Ids in the docstrings of test functions."""
    found: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        for docstring in re.findall(r'^def test_.*?:\n    """(.*?)"""', path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
            found |= set(ID.findall(docstring))
    return found & CASES.keys()


def listed() -> dict[str, str]:
    """Id and reason of each row of the page's table of field cases."""
    section = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8").partition("\n## Field cases\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([CF]\d\d(?:, [CF]\d\d)*) \|.*\| ([^|]+) \|$", section, re.MULTILINE)
    return {case: reason for cases, reason in rows for case in cases.split(", ")}


@pytest.mark.parametrize("case", CASES)
def test_a_case_is_tested_or_listed(case: str) -> None:
    assert case in named_by_tests() or case in listed()


@pytest.mark.parametrize("case", sorted(set(CASES) - named_by_tests()))
def test_an_untested_case_has_one_of_two_reasons(case: str) -> None:
    assert any(reason in listed()[case] for reason in REASONS)


def test_the_page_lists_no_other_case() -> None:
    assert listed().keys() <= CASES.keys()


def test_there_are_67_cases_each_with_a_kind_and_a_source() -> None:
    assert len(CASES) == 67
    for case in CASES.values():
        assert case["kind"] in ("exact", "band", "order", "reject", "file")
        assert "/" in case["source"]
