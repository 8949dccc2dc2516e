"""Call the command line in this process, as a shell would split the line."""

import shlex
from typing import Any

from typer.testing import CliRunner

from costmodel.cli.app import app

ASKED = "predict --params 1B --gpus 8 --zero 3"


def call(line: str, **environment: str) -> Any:
    """The result of `costmodel LINE`: exit_code, stdout, stderr."""
    return CliRunner().invoke(app, shlex.split(line), env=environment or None)


def error(line: str) -> str:
    """The one message of a call with bad input."""
    result = call(line)
    assert result.exit_code == 2, (result.exit_code, result.output)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) == 1
    return result.stderr.strip()
