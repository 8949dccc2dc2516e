"""The command line. `main` is its entry; the pieces are imported when a command needs them.

`options`, `files` and `guard` serve every command that takes a run, those of `execute` too; they stand on `inputs` and know no
prediction. `app` holds the commands of `costmodel`.
"""


def main() -> None:
    """Entry of the `costmodel` script."""
    from costmodel.cli.app import app
    app()
