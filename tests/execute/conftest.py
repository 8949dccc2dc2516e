"""One torch thread: the machine's cores are shared."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from running_jobs import Running


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    """PyTorch's own ZeroRedundancyOptimizer still uses torch.jit."""
    config.addinivalue_line("filterwarnings", "ignore:`torch.jit:DeprecationWarning")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def begin(*arguments: str, **how: Any) -> Running:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        started.append(Running(folder, *arguments, **how))
        return started[-1]

    yield begin
    for running in started:
        running.process.kill()
        running.process.communicate()
