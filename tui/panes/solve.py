"""Solve as a widget."""

from tui.panes.base import Pane


class Solve(Pane):
    """To come."""
