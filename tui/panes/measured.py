"""Measured as a widget."""

from tui.panes.base import Pane


class Measured(Pane):
    """To come."""
