"""The command line. `main` is its entry; the pieces are imported when a command needs them.

`options`, `files` and `guard` serve every command that takes a run, those of `execute` too; they stand on `inputs` and know no
prediction. `app` holds the commands of `costmodel`.
"""


def main() -> None:
    """Entry of the `costmodel` script. Of the commands only the one that is asked for is built: the options of all take longer than a prediction."""
    import sys

    from costmodel.cli.app import app
    asked = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
    commands = [c for c in app.registered_commands if c.callback is not None and (c.name or c.callback.__name__) == asked]
    if commands:
        app.registered_commands, app.registered_groups = commands, []
    app()
