"""A test marked `oracle` that is skipped says so in its reason, which CI refuses."""

from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("costmodel", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("costmodel")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and item.get_closest_marker("oracle"):
        path, line, reason = report.longrepr
        report.longrepr = (path, line, f"{reason} (an oracle)")
    return report
