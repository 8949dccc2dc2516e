"""The recorded session of a two-core CPU: a profile fitted to its probe and to half of its runs against the measured times of the other half."""

import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("scipy")

from benchmarks.cpu_study.score import score

RECORDED = Path(__file__).parents[2] / "benchmarks" / "cpu_study" / "2026-11-30"


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("study") / "session"
    shutil.copytree(RECORDED, folder)
    return score(folder, "cpu_epyc_2core")


def test_runs_of_many_sizes_and_strategies_are_held_out(scored: dict[str, Any]) -> None:
    assert scored["held_out"] >= 40
    assert len(scored["by_strategy"]) >= 5
    assert scored["time_spread"] >= 30


def test_the_fitted_profile_predicts_them(scored: dict[str, Any]) -> None:
    """Within a quarter, and twice as well as one throughput for all."""
    assert scored["mean_abs_error"] <= 0.25
    assert scored["mean_abs_error"] <= scored["constant_throughput_error"] / 2
    assert scored["mean_abs_error"] < scored["mean_abs_error_before"]


def test_the_interval_is_honest_and_narrow(scored: dict[str, Any]) -> None:
    assert 0.70 <= scored["covered"] <= 0.95
    assert scored["median_half_width"] <= 0.30
