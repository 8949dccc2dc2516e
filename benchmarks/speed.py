"""How fast an answer comes: a cold call of the command, and predict() in a process that is already running.

    python benchmarks/speed.py

Cold: `python -m costmodel predict --params 1B --gpus 8 --zero 3` against `python -c "import numpy, pydantic, typer"`, each a new process
with an empty HOME and no variable of costmodel's, output to a pipe. Byte code (.pyc) of both exists: one untimed call of each comes
first. Calls alternate, medians are compared.

In process: predict() of runs that differ in shape, sequence, micro-batch, strategy or checkpointing, each predicted once, so that no
result can be remembered from an earlier one; the runs are built before the clock starts. The same runs on 100,000 GPUs are timed in
alternation with those on 8 to 64; and runs of eight pipeline stages and 64 micro-batches, in both dialects and two schedules.
"""

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
ASKED = ["-m", "costmodel", "predict", "--params", "1B", "--gpus", "8", "--zero", "3"]
IMPORTS = ["-c", "import numpy, pydantic, typer"]
COLD_LIMIT, PREDICT_LIMIT_S, SCALE_LIMIT = 2.0, 3e-3, 1.2


def seconds(arguments: list[str], home: str) -> float:
    """Seconds of one new interpreter."""
    environment = {"PATH": os.environ["PATH"], "HOME": home, "PYTHONPATH": str(ROOT)}
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], env=environment, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    return time.perf_counter() - start


def cold(repeats: int) -> tuple[list[float], list[float]]:
    """Seconds of cold calls: of the command, and of the imports it is compared with."""
    with tempfile.TemporaryDirectory() as home:
        seconds(ASKED, home), seconds(IMPORTS, home)
        pairs = [(seconds(ASKED, home), seconds(IMPORTS, home)) for _ in range(repeats)]
    return [a for a, _ in pairs], [b for _, b in pairs]


def runs(layers: int, count: int, gpus: int | None) -> list[object]:
    """Distinct runs of models of `layers` layers."""
    from costmodel import build_run
    choices = itertools.product((2048, 4096, 5120, 8192), ("fsdp", "ddp", "zero1", "zero2", "hsdp"), (2048, 4096, 8192), (1, 2), ("none", "full"),
                                (8, 16, 64))
    made = []
    for i, (hidden, strategy, seq_len, micro_batch, checkpointing, some) in enumerate(itertools.islice(choices, 0, None, 7)):
        if len(made) == count:
            break
        made.append(build_run(
            model={"layers": layers, "hidden": hidden, "heads": hidden // 128, "ffn": 3 * hidden + 128 * (i % 7), "vocab": 32000 + 64 * i},
            cluster={"gpu": "h100", "gpus": gpus or some}, plan={"strategy": strategy, "checkpointing": checkpointing},
            recipe={"seq_len": seq_len, "micro_batch": micro_batch, "grad_accum": 1 + i % 4}))
    return made


def pipelines(layers: int, count: int) -> list[object]:
    """Distinct runs of 8 stages and 64 micro-batches."""
    from costmodel import build_run
    dialects = ({"framework": "pytorch"}, {"framework": "megatron", "zero": 1, "tp": 2, "sequence_parallel": True})
    choices = itertools.product(("1f1b", "gpipe"), dialects, (2048, 4096, 6144), (2048, 4096), range(count))
    return [build_run(
        model={"layers": layers, "hidden": hidden, "heads": hidden // 128, "ffn": 3 * hidden + 128 * (i % 7), "vocab": 32000 + 64 * i},
        cluster={"gpu": "h100", "gpus": 64}, plan={"pp": 8, "schedule": schedule, **dialect},
        recipe={"seq_len": seq_len, "grad_accum": 64, "precision": "bf16-pure" if dialect["framework"] == "pytorch" else "bf16-mixed"})
        for schedule, dialect, hidden, seq_len, i in itertools.islice(choices, 0, None, 25)][:count]


def in_process(layers: int, count: int) -> tuple[list[float], list[float]]:
    """Seconds of predict() on small jobs and on 100,000 GPUs."""
    from costmodel.prediction import predict
    small, large = runs(layers, count, None), runs(layers, count, 100_000)
    warm = runs(2, 2, None)
    for run in warm:
        predict(run)  # type: ignore[arg-type]
    times: tuple[list[float], list[float]] = [], []
    for pair in zip(small, large, strict=True):
        for run, found in zip(pair, times, strict=True):
            start = time.perf_counter()
            predict(run)  # type: ignore[arg-type]
            found.append(time.perf_counter() - start)
    return times


def in_pipelines(layers: int, count: int) -> list[float]:
    """Seconds of predict() on pipelines."""
    from costmodel.prediction import predict
    found: list[float] = []
    for run in pipelines(2 * 8, 2):
        predict(run)  # type: ignore[arg-type]
    for run in pipelines(layers, count):
        start = time.perf_counter()
        predict(run)  # type: ignore[arg-type]
        found.append(time.perf_counter() - start)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="cold calls of each kind")
    parser.add_argument("--runs", type=int, default=100, help="distinct runs in process")
    parser.add_argument("--layers", type=int, default=96)
    arguments = parser.parse_args()
    ours, imports = cold(arguments.repeats)
    small, large = in_process(arguments.layers, arguments.runs)
    staged = in_pipelines(arguments.layers, arguments.runs)
    a, b, c, d = (statistics.median(x) for x in (ours, imports, small, large))
    rows = [("cold imports (numpy, pydantic, typer)", f"{1e3 * b:8.1f} ms", "", ""),
            ("cold costmodel predict", f"{1e3 * a:8.1f} ms", f"{a / b:5.2f} x the imports", f"at most {COLD_LIMIT:g} x"),
            (f"predict(), {arguments.layers} layers, 8 to 64 GPUs", f"{1e3 * c:8.2f} ms", f"slowest {1e3 * max(small):.2f} ms",
             f"at most {1e3 * PREDICT_LIMIT_S:g} ms"),
            (f"predict(), {arguments.layers} layers, 100,000 GPUs", f"{1e3 * d:8.2f} ms", f"{d / c:5.2f} x the small jobs", f"at most {SCALE_LIMIT:g} x"),
            (f"predict(), {arguments.layers} layers, 8 stages, 64 micro-batches", f"{1e3 * statistics.median(staged):8.2f} ms",
             f"slowest {1e3 * max(staged):.2f} ms", f"at most {1e3 * PREDICT_LIMIT_S:g} ms")]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    print(f"medians of {arguments.repeats} cold calls and of {arguments.runs} distinct runs; Python {sys.version.split()[0]}, {os.cpu_count()} cores")
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
