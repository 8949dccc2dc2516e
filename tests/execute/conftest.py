"""One torch thread: the machine's cores are shared."""

import pytest


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
