"""Explain as a widget."""

from tui.panes.base import Pane


class Explain(Pane):
    """To come."""
