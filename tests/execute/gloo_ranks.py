"""Start a real job of several ranks under gloo that performs many runs (gloo_worker)."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TIMEOUT_S = 400


def perform_once(cases: dict[str, tuple[str, dict[str, Any]]], world: int, factory: pytest.TempPathFactory, name: str) -> tuple[dict[str, Any], Path]:
    """What `perform` gives, and its folder; where tests run in several processes, one of them starts the ranks and the others wait for it."""
    base = factory.getbasetemp()
    where = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    where.mkdir(exist_ok=True)
    with (where / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = where / "out.json"
        return json.loads(done.read_text()) if done.exists() else perform(cases, world, where), where


def perform(cases: dict[str, tuple[str, dict[str, Any]]], world: int, where: Path) -> dict[str, dict[str, Any]]:
    """What rank 0 wrote of each case: its `result`, and the `number` of the folder in `where` that has its files."""
    root, worker = Path(__file__).resolve().parents[2], Path(__file__).with_name("gloo_worker.py")
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    (where / "store").unlink(missing_ok=True)
    logs = [where / f"rank{r}.log" for r in range(world)]
    ranks = []
    for r, log in enumerate(logs):
        with log.open("w") as file:
            ranks.append(subprocess.Popen([sys.executable, str(worker), str(where / "store"), str(r), str(world), json.dumps(cases), str(where)],
                                          env=environment, stdout=file, stderr=file))
    try:
        for rank, log in zip(ranks, logs, strict=True):
            code = rank.wait(timeout=TIMEOUT_S)
            assert code == 0, f"{log.stem} ended with {code}: {log.read_text()[-3000:]}"
    finally:
        for rank in ranks:
            rank.kill()
    return json.loads((where / "out.json").read_text())
