"""Published tables of kernels and collectives (published/kernels.toml) as evidence for `calibrate.fit`."""

import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from calibrate.evidence import CollectiveEvidence, Evidence, KernelEvidence, Point
from calibrate.probe.record import probe_run
from costmodel import catalog
from costmodel.catalog.profiles import Profile, load_profile
from costmodel.cost.compute import compute_costs
from costmodel.cost.network import Group, group_of
from costmodel.program.ir import Op
from costmodel.spec import Cluster

TABLES = Path(__file__).parent / "published" / "kernels.toml"
LARGE = 4096
"""Side of a square that fills the device."""
NOISE = {"matmul": 0.1, "attention": 0.1, "collective": 0.1}


def kernel_evidence(base: str | None = None) -> Iterator[Evidence]:
    """Every table, on the shipped constants or on those of a file."""
    tables = tomllib.loads(TABLES.read_text(encoding="utf-8"))
    for table in tables["matmul"]:
        yield _matmul(table, base)
    for table in tables["attention"]:
        yield _attention(table, base)
    grouped: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for table in tables["collective"]:
        grouped[table["accelerator"]].append(table)
    for accelerator, rows in grouped.items():
        yield _collectives(accelerator, rows, base)


@cache
def _machine(accelerator: str, gpus: int, base: str | None) -> tuple[Cluster, Profile]:
    cluster = catalog.cluster(gpus=gpus, gpu=accelerator)
    return cluster, load_profile(probe_run(cluster), base)


def _point(kind: str, name: str, seconds: float, accelerator: str) -> Point:
    return Point(f"{accelerator} {name}", f"{kind} tables, {accelerator}", "time", seconds, NOISE[kind], kind, accelerator, f"{accelerator} {name}")


def _matmul(table: dict[str, Any], base: str | None) -> KernelEvidence:
    """Square matrices: what their size costs. A GPU that runs one kernel for a moment draws less power and is faster than in a training
    step, so times are taken relative to those of the table's own large squares."""
    accelerator, dtype = table["accelerator"], table["dtype"]
    cluster, profile = _machine(accelerator, 1, base)
    recipe = probe_run(cluster).recipe
    costs = compute_costs(cluster.accelerator, profile, recipe)
    ops = tuple(Op("square", "matmul", 2.0 * n**3, 6.0 * n * n, (1, n, n, n), dtype) for n in table["sides"])
    seconds = [op.flops / (tflops * 1e12) for op, tflops in zip(ops, table["tflops"], strict=True)]
    large = [costs.op_s(op) / s for op, s in zip(ops, seconds, strict=True) if op.dims[1] >= LARGE]
    points = tuple(_point("matmul", f"square {op.dims[1]}", s * median(large), accelerator) for op, s in zip(ops, seconds, strict=True))
    return KernelEvidence(cluster.accelerator, recipe, profile, points, ops)


def _attention(table: dict[str, Any], base: str | None) -> KernelEvidence:
    """One kernel over sequence lengths."""
    accelerator = table["accelerator"]
    cluster, profile = _machine(accelerator, 1, base)
    heads, kv_heads, d, causal = table["heads"], table["kv_heads"], table["head_dim"], table["causal"]
    backward = table["pass"] == "backward"
    name = f"attention:{table['generation']}" + (".grad" if backward else "")
    ops, points = [], []
    for s, batch, tflops in zip(table["sequences"], table["batches"], table["tflops"], strict=True):
        flops = 4.0 * batch * heads * s * s * d * (0.5 if causal else 1.0) * (2.5 if backward else 1.0)
        nbytes = 2.0 * batch * s * d * (2 * heads + 2 * kv_heads) * (2 if backward else 1)
        ops.append(Op(name, "attention", flops, nbytes, (batch, heads, kv_heads, s, s, d, int(causal), int(backward)), "bf16"))
        shape = f"{table['generation']} {table['pass']} {heads}/{kv_heads} heads of {d}{' causal' if causal else ''} {batch}x{s}, {table['source']}"
        points.append(_point("attention", shape, flops / (tflops * 1e12), accelerator))
    return KernelEvidence(cluster.accelerator, probe_run(cluster).recipe, profile, tuple(points), tuple(ops))


def _collectives(accelerator: str, rows: list[dict[str, Any]], base: str | None) -> CollectiveEvidence:
    """All collectives of one kind of machine; messages in the convention of ir.Comm, which is the tables'."""
    cluster, profile = _machine(accelerator, max(row["gpus"] for row in rows), base)
    calls: list[tuple[str, int, Group]] = []
    points = []
    for row in rows:
        group = group_of(cluster, row["gpus"])
        for nbytes, micros in zip(row["bytes"], row["time_us"], strict=True):
            calls.append((row["kind"], nbytes, group))
            points.append(_point("collective", f"{row['kind']} of {nbytes} B over {row['gpus']}", micros * 1e-6, accelerator))
    return CollectiveEvidence(cluster, profile, tuple(points), tuple(calls))
