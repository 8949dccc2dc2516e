"""Writes the pictures of docs/tui.md: the explorer, driven by keys, as SVG.

    python docs/screens.py
"""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

from tui.app import Explorer
from tui.panes.compare import Compare
from tui.panes.timeline import Timeline
from tui.presets import PRESETS

PLACE = Path(__file__).parent / "tui"
Ready = Callable[[Explorer], bool]


def advised(app: Explorer) -> bool:
    return app.proposals is not None


def laid_out(app: Explorer) -> bool:
    return isinstance(app.pane, Timeline) and app.pane.lanes is not None


def drawn(app: Explorer) -> bool:
    return isinstance(app.pane, Compare) and bool(app.pane.curves)


SCREENS: tuple[tuple[str, tuple[int, int], int, tuple[str, ...], Ready, tuple[str, ...]], ...] = (
    ("explore", (120, 40), 5, (), advised, ()),
    ("narrow", (80, 24), 2, ("down",) * 9 + ("right",), lambda app: True, ()),
    ("tour", (100, 40), 2, ("t", *["right_square_bracket"] * 10), advised, ()),
    ("timeline", (120, 34), 5, ("2",), laid_out, ("right", "right", "plus", "plus", "plus", "plus")),
    ("compare", (120, 40), 2, ("p", "down", "down", "right", "p", "right", "3"), drawn, ()))
"""Name, size, preset, keys, what to wait for, keys after that."""


async def picture(name: str, size: tuple[int, int], preset: int, before: tuple[str, ...], ready: Ready, after: tuple[str, ...]) -> None:
    app = Explorer(PRESETS[preset].given)
    async with app.run_test(size=size) as pilot:
        await pilot.press(*before)
        for _ in range(400):
            await pilot.pause(0.05)
            if ready(app):
                break
        await pilot.press(*after)
        await pilot.pause(0.5)
        drawn_text = re.sub(r"@font-face \{.*?\}\s*", "", app.export_screenshot(title="costmodel tui"), flags=re.DOTALL)
        (PLACE / f"{name}.svg").write_text(drawn_text, encoding="utf-8")  # the viewer's own monospace: no font from the network


def main() -> None:
    PLACE.mkdir(exist_ok=True)
    for screen in SCREENS:
        asyncio.run(picture(*screen))


if __name__ == "__main__":
    main()
