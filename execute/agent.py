"""torchrun, in a process of its own: starts this node's ranks, and writes down which of them ended badly, and how.

    python -m execute.agent FOLDER [torchrun's arguments]
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from execute import job as files


def main() -> int:
    folder, arguments = Path(sys.argv[1]), sys.argv[2:]
    end_with_parent(os.getppid(), lambda: os.kill(os.getpid(), signal.SIGTERM))  # torchrun ends its ranks at a SIGTERM
    told: dict[str, Any] = {"pid": os.getpid(), "failures": [], "error": ""}
    files.write(folder, "agent.json", told)
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run
    try:
        run(parse_args([*arguments, "-m", "execute.rank", str(folder)]))  # type: ignore[no-untyped-call]
        return 0
    except ChildFailedError as error:
        told["failures"] = [{"rank": rank, "exit_code": failure.exitcode} for rank, failure in error.failures.items()]
    except Exception as error:
        told["error"] = f"{type(error).__name__}: {' '.join(str(error).split())}"
    files.write(folder, "agent.json", told)
    return 1


def end_with_parent(parent: int, end: Any) -> None:
    """Call `end` soon after the parent process is gone: nobody would read what this one finds out."""
    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        end()

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
