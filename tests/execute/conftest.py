"""One torch thread: the machine's cores are shared."""

import pytest


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    """PyTorch's own ZeroRedundancyOptimizer still uses torch.jit."""
    config.addinivalue_line("filterwarnings", "ignore:`torch.jit:DeprecationWarning")
