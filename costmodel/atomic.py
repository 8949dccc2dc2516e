"""Files that appear whole: a reader sees the old content or the new one, never a part."""

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Write text as UTF-8 to a temporary file in the same directory, make it durable, and rename it onto `path`. Raises OSError.

    A device or a pipe cannot be replaced, so it is written directly.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    target = path.resolve()
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
