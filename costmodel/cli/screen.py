"""What commands print on: a page as wide as the screen, or JSON."""

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from costmodel.render.text import Page
    from costmodel.spec import Run


def screen(run: "Run | None" = None) -> "Page":
    """A page for standard output: its width, and colour where that is wanted. On the devices of `run`, a CPU is called one."""
    from costmodel.render.text import Page, screen_width, wants_colour
    return Page(screen_width(sys.stdout), wants_colour(sys.stdout), device_of(run))


def device_of(run: "Run | None") -> str:
    """What a page calls the devices of a run."""
    return "CPU" if run is not None and run.cluster.accelerator.kind == "cpu" else "GPU"


def json_text(data: Any) -> str:
    """Plain data as every command prints it."""
    import json
    return json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
