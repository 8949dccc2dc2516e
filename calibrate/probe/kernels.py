# mypy: disable-error-code="no-untyped-call, no-any-return"
"""Kernels, launches and the optimizer's cost per tensor, on one device with one thread a core."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from calibrate.probe.clock import Clock
from calibrate.probe.record import Sample

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SQUARES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
SHAPES = ((512, 2048, 512), (512, 512, 2048), (256, 4096, 1024), (2048, 256, 256), (4096, 64, 256), (128, 8192, 256))
"""(m, n, k) of layers: wide, deep, thin."""
ATTENTION = ((1, 4, 128, 64), (2, 4, 256, 64), (1, 8, 512, 64), (1, 8, 1024, 64), (1, 16, 4096, 128))
"""(batch, heads, sequence, head size)."""
ELEMENTS = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
TINY = 64
"""Elements of a kernel that takes no time but its launch."""
CHAIN = 200
"""Launches of one timed chain."""
TENSORS = 100


def kernel_samples(device: str, clock: Clock, dtypes: tuple[str, ...], most_flops: float, most_bytes: float) -> Iterator[Sample]:
    """Matrix multiplications, attention, memory-bound work and copies, up to a size."""
    for dtype in dtypes:
        yield from _matmuls(device, clock, dtype, most_flops)
        yield from _attention(device, clock, dtype, most_flops)
    for n in ELEMENTS:
        if 12 * n <= most_bytes:
            a, b = torch.randn(n, device=device), torch.randn(n, device=device)
            out = torch.empty_like(a)
            yield Sample("memory", "add", *clock.seconds(partial(torch.add, a, b, out=out)), nbytes=12.0 * n)
            yield Sample("memory", "gelu", *clock.seconds(partial(torch.nn.functional.gelu, a)), nbytes=8.0 * n)
            if n >= 1 << 14:
                yield _host_copy(a, clock)


def _host_copy(a: Tensor, clock: Clock) -> Sample:
    """To host memory; on a CPU, from one place of it to another."""
    target = torch.empty(a.shape, pin_memory=a.is_cuda)
    return Sample("copy", "to host", *clock.seconds(partial(target.copy_, a, non_blocking=True)), nbytes=float((1 if a.is_cuda else 2) * 4 * a.numel()))


def _matmuls(device: str, clock: Clock, dtype: str, most_flops: float) -> Iterator[Sample]:
    kind = DTYPES[dtype]
    for m, n, k in (*((s, s, s) for s in SQUARES), *SHAPES):
        flops = 2.0 * m * n * k
        if flops <= most_flops:
            a, b = torch.randn(m, k, device=device).to(kind), torch.randn(n, k, device=device).to(kind)
            yield Sample("matmul", "linear", *clock.seconds(partial(torch.nn.functional.linear, a, b)), dims=(1, m, n, k), dtype=dtype, flops=flops,
                         nbytes=float((m * k + n * k + m * n) * kind.itemsize))


def _attention(device: str, clock: Clock, dtype: str, most_flops: float) -> Iterator[Sample]:
    kind = DTYPES[dtype]
    for batch, heads, s, d in ATTENTION:
        flops = 2.0 * batch * heads * s * s * d  # two multiplications, half of the scores
        if flops > most_flops:
            continue
        q, k, v = (torch.randn(batch, heads, s, d, device=device, dtype=kind, requires_grad=True) for _ in range(3))
        call = partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, is_causal=True)
        nbytes = 4.0 * batch * heads * s * d * kind.itemsize
        with torch.no_grad():
            yield Sample("attention", "attention:sdpa", *clock.seconds(call), dims=(batch, heads, heads, s, s, d, 1, 0), dtype=dtype, flops=flops,
                         nbytes=nbytes)
        out, grad = call(), torch.randn_like(q)
        back = partial(torch.autograd.grad, out, (q, k, v), grad, retain_graph=True)
        yield Sample("attention", "attention:sdpa.grad", *clock.seconds(back), dims=(batch, heads, heads, s, s, d, 1, 1), dtype=dtype, flops=2.5 * flops,
                     nbytes=2 * nbytes)


def launch_samples(device: str, clock: Clock) -> Iterator[Sample]:
    """Host seconds of one eager kernel with autograd, forward and backward, and of a fused optimizer step per tensor."""
    start = torch.zeros(TINY, device=device, requires_grad=True)
    one = torch.ones(TINY, device=device)

    def forward() -> Any:
        x = start
        for _ in range(CHAIN):
            x = x * one
        return x

    out = forward()
    ahead, beside = clock.seconds(forward)
    yield Sample("launch", "forward", tuple(s / CHAIN for s in ahead), beside)
    back, beside = clock.seconds(partial(torch.autograd.grad, out, start, torch.ones_like(out), retain_graph=True))
    yield Sample("launch", "backward", tuple(s / CHAIN for s in back), beside)
    weights = [torch.nn.Parameter(torch.zeros(TINY, device=device)) for _ in range(TENSORS)]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    step, beside = clock.seconds(torch.optim.AdamW(weights, fused=True).step)
    yield Sample("tensor", "adamw fused", tuple(s / TENSORS for s in step), beside)


def context_samples(device: str) -> Iterator[Sample]:
    """Device memory in use that the allocator does not hold: the context, and what the libraries took. A CPU has none."""
    if device.startswith("cuda"):
        free, total = torch.cuda.mem_get_info(device)
        outside = total - free - torch.cuda.memory_reserved(device)
        yield Sample("context", "context and libraries", (float(outside),))
