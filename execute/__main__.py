"""`python -m execute`."""

from execute.cli import app

app(prog_name="execute")
