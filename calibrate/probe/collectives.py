# mypy: disable-error-code="no-untyped-call, no-any-return"
"""Collectives over sizes and group sizes, and a matrix multiplication beside one: every rank a process of this machine, or of torchrun."""

import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from calibrate.probe.record import Sample

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "send")
LEAST_BYTES, MOST_BYTES = 1 << 10, 1 << 28
GROWTH = 4
"""Each message over the one before."""
REFERENCE = 256
"""Side of the reference matrix multiplication."""


def sizes(most_bytes: int) -> list[int]:
    """Message sizes, 1 KiB to `most_bytes`."""
    out = [LEAST_BYTES]
    while out[-1] * GROWTH <= min(most_bytes, MOST_BYTES):
        out.append(out[-1] * GROWTH)
    return out


def group_sizes(world: int) -> list[int]:
    """2, 4, 8 … up to the world, and the world."""
    out = [n for n in (2**i for i in range(1, 20)) if n < world]
    return [*out, world] if world > 1 else []


def collective_samples(world: int, device: str, most_bytes: int, repeats: int, budget_s: float) -> list[Sample]:
    """Spawn `world` ranks on this machine, or join those that torchrun started, and time. Every rank of torchrun gets the samples."""
    if "RANK" in os.environ:
        return measure(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://", device, most_bytes, repeats, budget_s)
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        context = torch.multiprocessing.get_context("spawn")
        queue = context.SimpleQueue()
        arguments = (world, f"file://{store}", device, most_bytes, repeats, budget_s, queue)
        torch.multiprocessing.spawn(_rank, arguments, nprocs=world, join=True)  # type: ignore[attr-defined]
        return [Sample(**item) for item in queue.get()]


def _rank(rank: int, world: int, store: str, device: str, most_bytes: int, repeats: int, budget_s: float, queue: Any) -> None:
    found = measure(rank, world, store, device, most_bytes, repeats, budget_s)
    if rank == 0:
        queue.put([asdict(sample) for sample in found])


def measure(rank: int, world: int, store: str, device: str, most_bytes: int, repeats: int, budget_s: float) -> list[Sample]:
    """What one rank does; rank 0's samples are those of the slowest rank."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)  # newer names of the same collectives
    where = torch.device(device, rank % torch.cuda.device_count()) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(where)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", init_method=store, rank=rank, world_size=world)
    try:
        out = []
        for n in group_sizes(world):
            group = dist.new_group(list(range(n)))
            if rank < n:
                out += list(_over(group, n, rank, where, most_bytes, repeats, budget_s))
            dist.barrier()
        return out
    finally:
        dist.destroy_process_group()


def _over(group: Any, n: int, rank: int, where: torch.device, most_bytes: int, repeats: int, budget_s: float) -> Iterator[Sample]:
    square = torch.randn(REFERENCE, REFERENCE, device=where)
    for kind in KINDS:
        for nbytes in sizes(most_bytes):
            call = collective(kind, nbytes, group, n, rank, where)
            if call is not None:
                values, beside = _slowest(call, lambda: torch.mm(square, square), group, where, repeats, budget_s)
                yield Sample("collective", kind, values, beside, dtype="fp32", nbytes=float(nbytes), group=n)
    yield from _contention(group, n, where, repeats)


def collective(kind: str, nbytes: int, group: Any, n: int, rank: int, where: torch.device) -> Callable[[], Any] | None:
    """One call, with buffers whose size follows the convention of ir.Comm; None where the message does not divide over the ranks."""
    count = nbytes // 4
    if count % n:
        return None
    whole, part = torch.ones(count, device=where), torch.ones(count // n, device=where)
    if kind == "all-reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if kind == "all-gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=group)
    if kind == "reduce-scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole, group=group)
    if kind == "all-to-all":
        received = torch.empty_like(whole)
        return lambda: dist.all_to_all_single(received, whole, group=group)
    if kind == "broadcast":
        return lambda: dist.broadcast(whole, 0, group=group)
    if rank > 1:
        return lambda: None
    return (lambda: dist.send(whole, 1, group=group)) if rank == 0 else (lambda: dist.recv(whole, 0, group=group))


def _finish(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize()


def _slowest(call: Callable[[], Any], reference: Callable[[], Any], group: Any, where: torch.device, repeats: int,
             budget_s: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds of a call on the slowest rank, and of the reference kernel beside it, repeat by repeat; every rank does the same number."""
    def burst(work: Callable[[], Any], times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            work()
        _finish(where)
        return (time.perf_counter() - start) / times

    dist.barrier(group)
    burst(call, 1)
    once = _most(burst(call, 2), group, where)
    times = max(1, min(200, round(0.004 / max(once, 1e-7))))
    rounds = max(2, min(repeats, round(budget_s / max(once * times, 1e-6))))
    values, beside = [], []
    for _ in range(rounds):
        before = burst(reference, 3)
        dist.barrier(group)
        values.append(_most(burst(call, times), group, where))
        beside.append(_most((before + burst(reference, 3)) / 2, group, where))
    return tuple(values), tuple(beside)


def _most(seconds: float, group: Any, where: torch.device) -> float:
    shared = torch.tensor([seconds], dtype=torch.float64, device=where)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=group)
    return float(shared.item())


def _contention(group: Any, n: int, where: torch.device, repeats: int) -> Iterator[Sample]:
    """A matrix multiplication with an all-reduce beside it, and each alone: medians of interleaved rounds."""
    side = 1024 if where.type == "cpu" else 8192
    square = torch.randn(side, side, device=where)
    message = torch.ones((1 << 22) if where.type == "cpu" else (1 << 26), device=where)

    def seconds(work: Callable[[], Any]) -> float:
        dist.barrier(group)
        start = time.perf_counter()
        work()
        _finish(where)
        return time.perf_counter() - start

    def both() -> None:
        pending = dist.all_reduce(message, group=group, async_op=True)
        torch.mm(square, square)
        pending.wait()

    rounds = [(_most(seconds(lambda: torch.mm(square, square)), group, where), _most(seconds(lambda: dist.all_reduce(message, group=group)), group, where),
               _most(seconds(both), group, where)) for _ in range(max(5, repeats))]
    kernel_s, collective_s, together_s = (statistics.median(column) for column in zip(*rounds, strict=True))
    yield Sample("contention", "matmul beside all-reduce", (together_s,), group=n, alone_s=(kernel_s, collective_s))
