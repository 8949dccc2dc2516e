"""What commands print on: a page as wide as the screen, or JSON."""

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from costmodel.render.text import Page


def screen() -> "Page":
    """A page for standard output: its width, and colour where that is wanted."""
    from costmodel.render.text import Page, screen_width, wants_colour
    return Page(screen_width(sys.stdout), wants_colour(sys.stdout))


def json_text(data: Any) -> str:
    """Plain data as every command prints it."""
    import json
    return json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
