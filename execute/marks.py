"""Who wants to know which phase of a step runs."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol


class Marks(Protocol):
    """Told by the step, or by a pipeline's stages, what they are about to do."""

    def forward(self, phase: str = "forward") -> AbstractContextManager[Any]: ...
    def phase_of(self, name: str) -> AbstractContextManager[Any]: ...
    def backward_ended(self) -> None: ...


class NoMarks:
    """Nobody."""

    def forward(self, phase: str = "forward") -> AbstractContextManager[Any]:
        return nullcontext()

    def phase_of(self, name: str) -> AbstractContextManager[Any]:
        return nullcontext()

    def backward_ended(self) -> None:
        return None
