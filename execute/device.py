# mypy: disable-error-code="no-untyped-call, no-any-return"
"""The device a step runs on: everything in which a CPU and a GPU differ for whoever measures it."""

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from costmodel.catalog import accelerator
from costmodel.records import Outcome
from costmodel.spec import PlanError, Recipe, Run
from execute import compat
from execute.observe.environment import cpu_name

KERNELS = {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
"""What scaled_dot_product_attention is held to for an attention word; for sdpa it picks by itself."""
CPUS = {"EPYC": "cpu_epyc_2core", "Xeon": "cpu_xeon_2core"}
"""Accelerators of the catalogue that are CPUs, by a word of the model's name."""
UNITS = {"bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


class Peaks(NamedTuple):
    """The highest figures of the caching allocator since they were last reset, in bytes."""

    allocated: int
    reserved: int


class Device(Protocol):
    """What a measurement asks of a device."""

    name: str
    """As PyTorch writes it: cpu, cuda:0."""

    def settings(self, run: Run) -> Any:
        """The context in which a run's steps are performed: what its recipe asks of PyTorch's global switches."""

    def synchronize(self) -> None:
        """Wait until everything asked for is done."""

    def now(self) -> Any:
        """A point in time of the device's own work."""

    def seconds(self, start: Any, end: Any) -> float:
        """Between two such points, once the device has passed both."""

    def reset_peaks(self) -> None: ...

    def peaks(self) -> Peaks | None:
        """None where no allocator counts."""

    def workspace_bytes(self) -> int | None:
        """What libraries keep for themselves in the allocator."""

    def used_bytes(self) -> int | None:
        """Of the whole device, by everybody."""

    def capacity_bytes(self) -> int | None: ...


def this_device(kind: str = "", index: int = 0) -> "Device":
    """A GPU where there is one, else the CPU; or the kind asked for."""
    if kind == "cuda" and not torch.cuda.is_available():
        raise PlanError("device", "cuda", "PyTorch sees no GPU on this machine.", "Use --device cpu, or leave it out.")
    return Gpu(index) if kind != "cpu" and torch.cuda.is_available() else Cpu()


class Cpu:
    """Real tensors in host memory. No allocator counts: execute.observe.storage does."""

    name = "cpu"

    @contextmanager
    def settings(self, run: Run) -> Iterator[None]:
        r = run.recipe
        if r.attention not in ("eager", "sdpa"):
            raise PlanError("recipe.attention", r.attention, "this kernel runs on GPUs only, and PyTorch sees none.", "Use attention = sdpa or eager.")
        with _matmul_precision(r):
            yield

    def synchronize(self) -> None:
        return None

    def now(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def reset_peaks(self) -> None:
        return None

    def peaks(self) -> Peaks | None:
        return None

    def workspace_bytes(self) -> int | None:
        return None

    def used_bytes(self) -> int | None:
        return None

    def capacity_bytes(self) -> int | None:
        return None


class Gpu:
    """A GPU of CUDA or ROCm. Times are those of events on its current stream, which every other stream of a step joins at its end."""

    def __init__(self, index: int = 0) -> None:
        self.index, self.name = index, f"cuda:{index}"

    @contextmanager
    def settings(self, run: Run) -> Iterator[None]:
        r = run.recipe
        compat.allocator_settings(f"expandable_segments:{r.allocator == 'expandable'}")
        torch.cuda.set_device(self.index)
        torch.cuda.init()
        torch.cuda.empty_cache()
        with ExitStack() as stack:
            stack.enter_context(_matmul_precision(r))
            if r.attention in KERNELS:
                stack.enter_context(sdpa_kernel(KERNELS[r.attention]))
            yield

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.index)

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) * 1e-3

    def reset_peaks(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.index)

    def peaks(self) -> Peaks | None:
        return Peaks(torch.cuda.max_memory_allocated(self.index), torch.cuda.max_memory_reserved(self.index))

    def workspace_bytes(self) -> int | None:
        """cuBLAS's workspaces: what is no longer allocated when they are given back. They are made again when they are next needed."""
        self.synchronize()
        before = torch.cuda.memory_allocated(self.index)
        compat.clear_cublas_workspaces()
        return before - torch.cuda.memory_allocated(self.index)

    def used_bytes(self) -> int | None:
        free, total = torch.cuda.mem_get_info(self.index)
        return total - free

    def capacity_bytes(self) -> int | None:
        return torch.cuda.get_device_properties(self.index).total_memory


@contextmanager
def _matmul_precision(recipe: Recipe) -> Iterator[None]:
    """TF32 for float32 products where the recipe says tf32, and only there."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if recipe.precision.compute == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def performed_elsewhere(run: Run, device: Device) -> tuple[str, ...]:
    """A note, where a run that describes a GPU was performed on a CPU, or the other way round, or on another model."""
    described, here = run.cluster.accelerator.kernel_table, "cpu" if device.name == "cpu" else "cuda"
    if described == here:
        other = f"The run describes {run.cluster.accelerator.name}, and was performed on {_own_name(device)}, whose peak is another: there is no MFU."
        return () if is_described(run, device) else (other,)
    return (f"The run describes {run.cluster.accelerator.name}, and was performed on a {'CPU' if here == 'cpu' else 'GPU'}: "
            "kernels, and what they keep for backward, are those of the device it was performed on.",)


def catalogue_name(device: Device) -> str | None:
    """This device's name in the catalogue, where it is there; of CPUs there are two kinds."""
    if device.name == "cpu":
        return next((name for brand, name in CPUS.items() if brand in cpu_name()), None)
    try:
        return accelerator(torch.cuda.get_device_name(torch.device(device.name))).name
    except PlanError:
        return None


def _own_name(device: Device) -> str:
    """As the device calls itself."""
    return cpu_name() if device.name == "cpu" else str(torch.cuda.get_device_name(torch.device(device.name)))


def is_described(run: Run, device: Device) -> bool:
    """Whether a device is the one that a run describes."""
    return catalogue_name(device) == run.cluster.accelerator.name


def out_of_memory(error: BaseException, rank: int | None = None) -> Outcome | None:
    """The outcome that an error is, where it is a failed allocation of a GPU or of the host; else None."""
    text = " ".join(str(error).split())
    if isinstance(error, torch.OutOfMemoryError):
        stats = torch.cuda.memory_stats() if torch.cuda.is_available() else {}
        found = re.search(r"[Tt]ried to allocate ([\d.]+) (\w+)", text)
        return Outcome("oom", rank, text, tried_bytes=int(float(found[1]) * UNITS[found[2].lower()]) if found else None,
                       allocated_bytes=stats.get("allocated_bytes.all.current"), reserved_bytes=stats.get("reserved_bytes.all.current"))
    if isinstance(error, MemoryError) or isinstance(error, RuntimeError) and "DefaultCPUAllocator" in text:
        found = re.search(r"tried to allocate (\d+) bytes", text)
        return Outcome("oom", rank, text or "the host has no memory left", tried_bytes=int(found[1]) if found else None)
    return None
