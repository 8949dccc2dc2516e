"""`costmodel tui`: the what-if explorer, where it is installed."""

import sys
from importlib import import_module

from costmodel.cli.guard import InputError
from costmodel.cli.options import Given, takes_run


@takes_run
def tui(given: Given) -> None:
    """Explore a run: change a field and watch memory, time and what bounds them. Needs Textual.

    Without a run it begins with Llama 3 8B on 8 GPUs.
    """
    try:
        explorer = import_module("tui.app").Explorer  # by name: costmodel knows no package that stands on it
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("tui", "textual", "rich"):
            raise
        raise InputError(f"costmodel tui: {error.name} is not installed. From the checkout, run: pip install -e '.[tui]'") from None
    with given.naming():
        app = explorer(given.mapping or None, given.profile)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise InputError("costmodel tui: it needs a terminal. For text in a pipe or a file use costmodel predict.")
    app.run()
