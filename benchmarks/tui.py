"""How quickly the explorer answers a key, as its user sees it: from the key written to a pseudo-terminal to the last byte of what it paints.

    python benchmarks/tui.py                 # every case; milliseconds, median and 95%
    python benchmarks/tui.py --steps 20

The run is GPT-3 175B (96 layers) on a pipeline of 8. Start-up counts from the start of the process to the first figures. Other work on
the machine makes all of it late: the processor time that a key takes is told beside it. Linux only.
"""

import argparse
import fcntl
import os
import pty
import select
import signal
import statistics
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent
RUN = """model = "gpt3-175b"
[cluster]
gpu = "a100_sxm_80gb"
gpus = 512
[plan]
framework = "megatron"
zero = 1
tp = 8
pp = 8
sequence_parallel = true
checkpointing = "selective"
[recipe]
seq_len = 2048
grad_accum = 32
"""
SIZES = ((80, 24), (120, 40), (200, 60))
QUIET_S = 0.09
"""A burst of output has ended when nothing more came for so long; a frame takes a sixtieth of a second."""
LEFT, RIGHT, UP, DOWN = "\x1b[D", "\x1b[C", "\x1b[A", "\x1b[B"


class Terminal:
    """The explorer on a pseudo-terminal of a size."""

    def __init__(self, columns: int, rows: int) -> None:
        self.started = time.perf_counter()
        with tempfile.NamedTemporaryFile("w", suffix=".toml", delete=False) as file:
            file.write(RUN)
        self.run_file = Path(file.name)
        self.pid, self.file = pty.fork()
        if not self.pid:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
            os.chdir(ROOT)
            os.environ |= {"TERM": "xterm-256color", "COLORTERM": "truecolor", "PYTHONPATH": str(ROOT)}
            os.execv(sys.executable, [sys.executable, "-m", "costmodel", "tui", file.name])

    def until_quiet(self, quiet_s: float = QUIET_S, most_s: float = 20.0) -> tuple[float, bytes]:
        """When the last byte came, and all of them."""
        seen, last, begin = b"", time.perf_counter(), time.perf_counter()
        while time.perf_counter() - begin < most_s:
            ready, _, _ = select.select([self.file], [], [], quiet_s if seen else 1.0)
            if not ready:
                if seen or time.perf_counter() - begin > 1.0:
                    break
                continue
            seen += os.read(self.file, 1 << 16)
            last = time.perf_counter()
        return last, seen

    def until(self, words: bytes, most_s: float = 20.0) -> float:
        """When some words were on the screen."""
        seen = b""
        while words not in seen and time.perf_counter() - self.started < most_s:
            ready, _, _ = select.select([self.file], [], [], 0.5)
            if ready:
                seen += os.read(self.file, 1 << 16)
        return time.perf_counter()

    def cpu_s(self) -> float:
        """Seconds of the processor that the explorer has used; a busy machine makes the clock late, but not this."""
        fields = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def key(self, text: str) -> float:
        """Milliseconds from a key to the last byte that it caused."""
        while select.select([self.file], [], [], 0.0)[0]:  # what came meanwhile is not this key's
            os.read(self.file, 1 << 16)
        pressed = time.perf_counter()
        os.write(self.file, text.encode())
        last, _ = self.until_quiet()
        return 1e3 * (last - pressed)

    def close(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.file)
        self.run_file.unlink()


@contextmanager
def explorer(columns: int, rows: int) -> Iterator[tuple[Terminal, float]]:
    """A started explorer, and the milliseconds to its first figures."""
    terminal = Terminal(columns, rows)
    try:
        first = 1e3 * (terminal.until(b"BOUND BY") - terminal.started)
        terminal.until_quiet(1.5)
        yield terminal, first
    finally:
        terminal.close()


def told(name: str, samples: list[float], cpu_s: float | None = None) -> None:
    ranked = sorted(samples)
    worked = "" if cpu_s is None else f"   processor {1e3 * cpu_s / len(samples):4.0f} ms a key"
    late = ranked[int(0.95 * (len(ranked) - 1))]
    print(f"{name:<52} {statistics.median(ranked):6.0f} ms   95%: {late:5.0f} ms   n = {len(ranked)}{worked}", flush=True)


def walk(terminal: Terminal, steps: int, rest_s: float) -> list[float]:
    """Step a field to and fro."""
    out = []
    for i in range(steps):
        out.append(terminal.key(RIGHT if i % 2 == 0 else LEFT))
        time.sleep(rest_s)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="samples of each case")
    parser.add_argument("--size", action="append", choices=[f"{c}x{r}" for c, r in SIZES], help="only this size; repeatable")
    asked = parser.parse_args()
    steps = asked.steps
    for columns, rows in SIZES:
        size = f"{columns}x{rows}"
        if asked.size and size not in asked.size:
            continue
        with explorer(columns, rows) as (terminal, first):
            told(f"{size}: start to first figures, then advice", [first], terminal.cpu_s())
            for _ in range(14):  # to the sequence length
                terminal.key(DOWN)
            told(f"{size}: next field", [terminal.key(DOWN if i % 2 == 0 else UP) for i in range(steps)])
            used = terminal.cpu_s()
            told(f"{size}: step a field, one after the other", walk(terminal, steps, 0.0), terminal.cpu_s() - used)
            told(f"{size}: step a field, advice being sought", walk(terminal, steps, 0.5))
            if (columns, rows) == (120, 40):
                os.write(terminal.file, b"5g")
                terminal.until_quiet(0.05, 1.0)
                os.write(terminal.file, b"1")
                terminal.until_quiet(0.3, 2.0)
                told(f"{size}: step a field while a search runs", walk(terminal, steps, 0.05))
                os.write(terminal.file, b"5c1")
                terminal.until_quiet(1.0)
            told(f"{size}: Explore to Solve and back", [terminal.key("5" if i % 2 == 0 else "1") for i in range(2, 2 + steps)])
            os.write(terminal.file, b"2")
            terminal.until_quiet(2.0)
            told(f"{size}: Timeline, zoom", [terminal.key("+" if i % 6 < 3 else "-") for i in range(steps)])
            told(f"{size}: Timeline, next slice", [terminal.key(RIGHT) for _ in range(steps)])


if __name__ == "__main__":
    main()
