"""The views as widgets, by name; each is imported at its first visit."""

from importlib import import_module

from tui.panes.base import Pane


def pane_class(name: str) -> type[Pane]:
    """The widget of a view: `explore` is Explore of tui.panes.explore."""
    found: type[Pane] = getattr(import_module(f"tui.panes.{name}"), name.capitalize())
    return found
