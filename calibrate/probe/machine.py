"""The machine as a Cluster: its device in the catalogue, its links, and what was found of them."""

import platform
import re
import subprocess
from pathlib import Path

from costmodel.catalog import cluster as catalogued
from costmodel.catalog import list_accelerators
from costmodel.spec import PlanError
from costmodel.spec.cluster import Cluster


class UnknownDevice(ValueError):
    """A device that the catalogue lacks."""


def detect(device: str, ranks: int, gpu: str | None = None) -> tuple[Cluster, tuple[str, ...]]:
    """(cluster of `ranks` ranks on this machine, what was found of its links). `gpu` names the accelerator where it is not recognised."""
    name = gpu or (_cpu() if device == "cpu" else _gpu())
    try:
        found = catalogued(gpus=ranks, gpu=name)
    except PlanError as error:
        raise UnknownDevice(f"{error.field} = {error.value}: {error.rule} {error.fix}") from None
    links = tuple(_numa()) if device == "cpu" else (*_topology(), *_numa())
    if device == "cuda" and ranks > 1 and any(re.search(r"\bNV\d+\b", line) for line in links) != (found.levels[0].kind == "nvlink"):
        links = (*links, f"the catalogue has {found.levels[0].kind} between these GPUs and nvidia-smi shows otherwise: edit the cluster")
    return found, links


def _cpu() -> str:
    """The catalogue's CPU host of this vendor: its rates are where the fit begins."""
    text = _read("/proc/cpuinfo") + platform.processor()
    return "cpu_epyc_2core" if "AMD" in text else "cpu_xeon_2core"


def _gpu() -> str:
    """The catalogue's name of the first GPU, by its name and its memory."""
    import torch
    seen = torch.cuda.get_device_properties(0)
    words = set(re.findall(r"[a-z0-9]+", seen.name.lower()))
    near = [(len(words & set(re.findall(r"[a-z0-9]+", entry.name.lower()))), -abs(entry.memory_bytes - seen.total_memory), entry.name)
            for entry in list_accelerators() if entry.vendor in ("nvidia", "amd")]
    score, _, name = max(near)
    if not score:
        raise UnknownDevice(f"the catalogue has no accelerator like {seen.name}. Name the nearest one with --gpu; `costmodel list gpus` shows them.")
    return name


def _topology() -> list[str]:
    """The GPU lines of `nvidia-smi topo -m`; none where it is not there."""
    try:
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [" ".join(line.split()) for line in done.stdout.splitlines() if line.strip().startswith("GPU")]


def _numa() -> list[str]:
    """Memory nodes of the host, with their cores and distances."""
    out = []
    for node in sorted(Path("/sys/devices/system/node").glob("node[0-9]*")):
        out.append(f"NUMA {node.name}: cores {_read(node / 'cpulist').strip()}, distances {_read(node / 'distance').strip()}")
    return out


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
