"""What every key does: one table for the bindings, the key line, the help and the palette."""

from typing import NamedTuple


class Key(NamedTuple):
    """A binding of the application."""

    keys: str
    shown: str
    action: str
    says: str
    does: str
    """A sentence for the help."""


VIEWS: tuple[tuple[str, str], ...] = (
    ("explore", "Explore"), ("timeline", "Timeline"), ("compare", "Compare"), ("explain", "Explain"), ("solve", "Solve"), ("measured", "Measured"))
KEYS: tuple[Key, ...] = (
    Key("s", "s", "propose", "apply", "Do what the screen proposes: repair the run, make it fit, or make it faster"),
    Key("S", "S", "proposals", "all proposals", "Choose among all changes that would help"),
    Key("u", "u", "undo", "undo", "Take the last change back"),
    Key("p", "p", "pin", "pin", "Pin this run to compare with (delete unpins)"),
    Key("t", "t", "tour", "tour", "The guided tour; [ and ] move, a answers"),
    Key("o", "o", "open", "open", "Open a preset or a run file"),
    Key("y", "y", "copy", "copy", "Copy the command line that predicts this run"),
    Key("w", "w", "save", "save", "Save the run as TOML"),
    Key("k", "k", "keep", "keep batch", "Which batch stays when dp moves: the micro-batch, or the global batch"),
    Key("i", "i", "inform", "all notes", "What the figures rest on: notes, basis, the whole text of an error"),
    Key("f", "f", "form", "form", "Show or hide the form"),
    Key("question_mark", "?", "help", "help", "This page"),
    Key("q", "q", "quit", "quit", "Leave"),
)
LINE = ("propose", "undo", "pin", "tour", "help", "open", "copy", "save", "quit")
"""Actions on the key line, the most telling first: a narrow screen drops the last ones."""
FORM_KEYS: tuple[tuple[str, str], ...] = (
    ("↑ ↓", "choose a field"), ("← →", "the next value that there is a run for"), ("enter, /", "type a value or search the list"),
    ("home end", "first and last field"), ("1 … 6", "views"), ("tab", "between form and view"), ("esc", "drop a failed change, close the tour"),
    ("ctrl+p", "command palette: every action and field by name, themes"))
VIEW_KEYS: tuple[tuple[str, str], ...] = (
    ("+ - 0", "Timeline: zoom in, out, the whole step"), ("← → ↑ ↓", "Timeline: pick a slice, another stream"),
    ("shift+← →", "Timeline: pan"), ("n", "Timeline: the next time that compute waits; Explain: the next section"),
    ("x m", "Compare: the field of the curve, its figure"), ("g c", "Solve, Measured: start, stop"), ("r", "Open a record and lay it beside its prediction"))
