"""The views as widgets, by name."""

from tui.panes.base import Pane
from tui.panes.compare import Compare
from tui.panes.explain import Explain
from tui.panes.explore import Explore
from tui.panes.measured import Measured
from tui.panes.solve import Solve
from tui.panes.timeline import Timeline

PANES: dict[str, type[Pane]] = {"explore": Explore, "timeline": Timeline, "compare": Compare, "explain": Explain, "solve": Solve, "measured": Measured}
