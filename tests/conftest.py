"""A test marked `oracle` that is skipped says so in its reason, which CI refuses. Laws draw the same examples every time;
`COSTMODEL_LAW_EXAMPLES=20 pytest tests/laws --hypothesis-profile=search` draws new ones, twenty times as many."""

from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("costmodel", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True, derandomize=True)
settings.register_profile("search", settings.get_profile("costmodel"), derandomize=False)
settings.load_profile("costmodel")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and item.get_closest_marker("oracle"):
        path, line, reason = report.longrepr
        report.longrepr = (path, line, f"{reason} (an oracle)")
    return report
