"""`execute run` as a user starts it, in a process of its own."""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 300
FOREVER = ("--steps", "100000000")
RUN = """
[model]
layers = 1
hidden = 32
heads = 2
ffn = 64
vocab = {vocab}
[cluster]
gpu = "cpu_epyc_2core"
gpus = {gpus}
[plan]
strategy = "{strategy}"
[recipe]
seq_len = 16
"""


class Running:
    """`execute run` of a small model, as a user starts it; everything it writes lies in one folder."""

    def __init__(self, folder: Path, *arguments: str, gpus: int = 2, strategy: str = "ddp", vocab: int = 64, limit: int | None = None,
                 extra_path: Path | None = None, program: tuple[str, ...] = ("-m", "execute", "run")) -> None:
        self.folder = folder
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        (folder / "run.toml").write_text(RUN.format(gpus=gpus, strategy=strategy, vocab=vocab))
        path = os.pathsep.join(str(p) for p in (extra_path, ROOT) if p is not None)
        environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}

        def limited() -> None:
            if limit is not None:
                resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

        self.process = subprocess.Popen([sys.executable, *program, str(folder / "run.toml"), *arguments], env=environment, text=True,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=limited, cwd=folder)

    def pid_of(self, rank: int, doing: str) -> int:
        """The process of a rank, once it does this."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            for path in self.temporary.glob(f"execute-*/rank{rank}.state.json"):
                state = json.loads(path.read_text())
                if doing in state["doing"]:
                    return int(state["pid"])
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.05)
        raise AssertionError(f"rank {rank} never came to: {doing}")

    def ended(self) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        out, errors = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, out, errors

    def left(self) -> list[str]:
        """Commands of processes that still run and name this job's folder."""
        found = []
        for command in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                text = command.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(self.temporary) in text:
                found.append(text)
        return found
