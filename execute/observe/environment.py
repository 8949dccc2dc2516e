"""The machine a step was performed on, as it names itself."""

import os
import platform
import re
from pathlib import Path

import torch

from costmodel import __version__
from costmodel.records import Environment


def environment() -> Environment:
    """This machine: the first visible GPU where there is one, else the CPU."""
    on_gpu = torch.cuda.is_available()
    properties = torch.cuda.get_device_properties(0) if on_gpu else None
    return Environment(accelerator=properties.name if properties else cpu_name(), accelerators=torch.cuda.device_count() if on_gpu else 1,
                       accelerator_bytes=properties.total_memory if properties else None, host=platform.node(),
                       machine=f"{platform.system()} {platform.release()} {platform.machine()}", cores=usable_cores(), memory_bytes=host_bytes(),
                       versions=versions(on_gpu))


def versions(on_gpu: bool) -> dict[str, str]:
    """What is installed; of CUDA's libraries those that PyTorch was built with."""
    found = {"costmodel": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    if on_gpu:
        found["cuda"] = str(torch.version.cuda or torch.version.hip)
        found["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
        if torch.distributed.is_nccl_available():
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        driver = re.search(r"Kernel Module\D*([\d.]+)", _text("/proc/driver/nvidia/version"))
        found |= {"driver": driver[1]} if driver else {}
    return found


def cpu_name() -> str:
    """The CPU's model."""
    named = re.search(r"^model name\s*:\s*(.+)$", _text("/proc/cpuinfo"), re.MULTILINE)
    return named[1].strip() if named else platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_bytes() -> int | None:
    """Memory of the host."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
