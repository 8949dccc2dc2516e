# mypy: disable-error-code="no-untyped-call"
"""The measurements of the study: a probe, and every run in interleaved repeats, all runs of a world size under one torchrun.

    python -m benchmarks.cpu_study.measure FOLDER GPU REPEAT     as torchrun starts each rank

A repeat performs every run once: warm-up steps, timed steps, and before and after them a reference kernel on rank 0, on an idle machine.
"""

import gc
import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cpu_study.plan import Case, cases
from costmodel.atomic import write_atomically

REPEATS, WARMUP, STEPS = 5, 2, 3
LEAST_S = 0.3
"""Timed steps of a run go on at least this long."""
SIDE = 512
"""Of the reference matrix multiplication."""
WORLDS = (1, 2)


def measure(folder: Path, gpu: str) -> None:
    """Write probe.json and one file per repeat and world size; what is there already is kept."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "probe.json").exists():
        subprocess.run([sys.executable, "-m", "calibrate", "probe", "-o", str(folder / "probe.json")], check=True)
    for repeat in range(REPEATS):
        for world in WORLDS:
            if (folder / file_of(repeat, world)).exists():
                continue
            start = time.monotonic()
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", "-m", "benchmarks.cpu_study.measure"]
            subprocess.run([*command, str(folder), gpu, str(repeat)], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
            print(f"repeat {repeat + 1} of {REPEATS}, ranks: {world}: {time.monotonic() - start:.0f} s", file=sys.stderr)


def file_of(repeat: int, world: int) -> str:
    return f"repeat{repeat}-ranks{world}.json"


def rank_main(folder: Path, gpu: str, repeat: int) -> None:
    """One rank's part of a repeat; rank 0 writes what all saw."""
    import torch
    import torch.distributed as dist
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    found = []
    for case in cases(gpu):
        if case.run.plan.world_size == world:
            found.append(_timed(case, rank))
            gc.collect()
    if rank == 0:
        write_atomically(folder / file_of(repeat, world), json.dumps({"repeat": repeat, "ranks": world, "runs": found}))
    dist.barrier()
    dist.destroy_process_group()


def _timed(case: Case, rank: int) -> dict[str, Any]:
    """Seconds of each timed step on each rank, and of the reference kernel before and after them."""
    import torch.distributed as dist

    from execute.assemble import assemble
    from execute.clock import Clock
    from execute.data import source_of
    from execute.device import Cpu
    from execute.train import Training, make_ready
    device, run = Cpu(), case.run
    with device.settings(run):
        training = Training(run, assemble(run, device.name), source_of(run, None, 0), rank, device.name, 1000)
        for step in range(WARMUP):
            make_ready(training, step)()
        references = [_reference_s(rank)]
        clock = Clock(device)
        enough = False
        while not enough:
            for _ in range(STEPS):
                clock.time(make_ready(training, WARMUP + len(clock.steps)))
            told = [sum(clock.seconds()) >= LEAST_S]
            dist.broadcast_object_list(told, 0)
            enough = told[0]
        references.append(_reference_s(rank))
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, [round(s, 7) for s in clock.seconds()])
    return {"name": case.name, "reference_s": references, "step_s": everybody}


def _reference_s(rank: int) -> float:
    """Seconds of a matrix multiplication on one thread, the median of nine, while the other ranks wait."""
    import torch
    import torch.distributed as dist
    dist.barrier()
    times = []
    if rank == 0:
        a = torch.randn(SIDE, SIDE)
        for _ in range(9):
            start = time.perf_counter()
            torch.mm(a, a)
            times.append(time.perf_counter() - start)
    dist.barrier()
    return round(median(times), 7) if times else 0.0


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
