"""From an exception to a message on stderr and an exit code."""

import errno
import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

DONE, UNEXPECTED, BAD_INPUT, DOES_NOT_FIT = 0, 1, 2, 3
_DEBUG = "costmodel.debug"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What writing to a file that is full, or gone, says."""


class InputError(Exception):
    """What the user gave cannot be used; the message says which part, why, and what would work."""


class GuardedGroup(TyperGroup):
    """A command group whose errors end in one message: exit 2 for bad input, 1 for what nobody expected."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except InputError as error:
            raise _failed(ctx, error, f"error: {error}", BAD_INPUT) from None
        except Exception as error:
            if hasattr(error, "exit_code"):
                raise  # a usage error: typer shows it and exits 2
            if isinstance(error, OSError) and error.errno in _FULL and error.filename is None:
                raise _failed(ctx, error, f"error: standard output: it cannot be written ({error.strerror}). Send it elsewhere.", BAD_INPUT) from None
            from costmodel.spec import PlanError
            if isinstance(error, PlanError):
                raise _failed(ctx, error, f"error: {plain(error)}", BAD_INPUT) from None
            said = " ".join(str(error).split())
            hint = "" if debugging(ctx) else " Run it again with --debug for the traceback."
            raise _failed(ctx, error, f"unexpected error: {type(error).__name__}: {said}.{hint}", UNEXPECTED) from None


def plain(error: Any) -> str:
    """A PlanError as a sentence: field, value, rule, what works."""
    return f"{subject(error)}: {error.rule} {error.fix}"


def subject(error: Any) -> str:
    """The field of a PlanError and its value, as somebody would write it in a file."""
    if error.value is None:
        return str(error.field)
    if isinstance(error.value, str) and " = " in error.value:
        return f"{error.field}: {error.value}"
    return f"{error.field} = {shown(error.value)}"


def shown(value: object) -> str:
    """A value on one line and of bounded length."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    text = " ".join(text.split()) if text.strip() else repr(text)
    return text if len(text) <= 60 else f"{text[:57]}..."


def set_debug(ctx: typer.Context, on: bool) -> None:
    """Callback of --debug, on the program and on its commands."""
    if on:
        ctx.meta[_DEBUG] = True


def debugging(ctx: Any) -> bool:
    """Whether --debug or COSTMODEL_DEBUG asks for tracebacks."""
    return bool(ctx.meta.get(_DEBUG)) or os.environ.get("COSTMODEL_DEBUG", "") not in ("", "0")


def _failed(ctx: Any, error: Exception, message: str, code: int) -> typer.Exit:
    if debugging(ctx):
        import traceback
        traceback.print_exception(error)
    print(message, file=sys.stderr)
    return typer.Exit(code)
