"""Timeline as a widget."""

from tui.panes.base import Pane


class Timeline(Pane):
    """To come."""
