"""Drive the explorer as a person would, and read its screen as text."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from textual.pilot import Pilot

from tui.app import Explorer

Script = Callable[["Pilot[None]", Explorer], Awaitable[Any]]


def drive(script: Script, size: tuple[int, int] = (120, 40), given: Mapping[str, Any] | None = None) -> Any:
    """Run a script against a started explorer; what it returns is returned."""
    async def main() -> Any:
        app = Explorer(given)
        async with app.run_test(size=size, notifications=True) as pilot:
            await pilot.pause()
            return await script(pilot, app)
    return asyncio.run(main())


async def keys(pilot: "Pilot[None]", *names: str) -> None:
    """Press keys, one after the other, and let the screen settle."""
    for name in names:
        await pilot.press(name)
    await pilot.pause()


async def settled(pilot: "Pilot[None]", ready: Callable[[], bool], tries: int = 200) -> None:
    """Wait for a worker's result; a test that waits too long says so."""
    for _ in range(tries):
        await pilot.pause(0.05)
        if ready():
            await pilot.pause()
            return
    raise AssertionError("the explorer did not get there")


def screen(app: Explorer) -> list[str]:
    """The rows of the screen without colour."""
    return [strip.text for strip in app.screen._compositor.render_strips()]


def text(app: Explorer) -> str:
    return "\n".join(screen(app))


async def says(pilot: "Pilot[None]", app: Explorer, words: str) -> None:
    """Wait until the screen says something (a toast comes a moment later), however its lines are broken."""
    def there() -> bool:
        rows = screen(app)
        parts = rows, *([row.rpartition(edge)[2] for row in rows] for edge in "▕▌")
        return any("".join(words.split()) in "".join("".join(part).split()) for part in parts)
    for _ in range(60):
        if there():
            return
        await pilot.pause(0.05)
    raise AssertionError(f"the screen does not say: {words}\n{text(app)}")
