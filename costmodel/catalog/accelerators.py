"""Accelerators of the catalogue, as their data sheets state them."""

from dataclasses import dataclass
from functools import cache
from typing import Any

from costmodel.catalog.files import entry_names, read_entry
from costmodel.catalog.names import resolve
from costmodel.spec.cluster import Accelerator


@dataclass(frozen=True, slots=True)
class AcceleratorEntry:
    """A device of the list, and what the catalogue knows of it besides its rates."""

    name: str
    family: str
    """Architecture."""
    vendor: str
    memory_bytes: int
    memory_bytes_per_s: float
    bf16_flops_per_s: float
    """Dense peak; 0 where the device has no bf16."""
    form_factor: str
    node: str
    """Default node shape."""
    source: str
    confidence: str
    """read, partly_read, recalled, inferred, or measured (CPUs)."""
    note: str
    predictable: bool
    why_not: str


def accelerator(name: str) -> Accelerator:
    """A device by its name, an alias, or the name its driver reports ("h100", "A100-80G", "NVIDIA A100-SXM4-80GB")."""
    return _accelerator(resolve("accelerators", name))


@cache
def _accelerator(name: str) -> Accelerator:
    return Accelerator.model_validate({key: value for key, value in _data(name).items() if key in Accelerator.model_fields})


def accelerator_entry(name: str) -> AcceleratorEntry:
    """Sources, form factor and default node shape of a device."""
    return _entry(resolve("accelerators", name))


@cache
def _data(name: str) -> dict[str, Any]:
    return read_entry("accelerators", name)


@cache
def _entry(name: str) -> AcceleratorEntry:
    data = _data(name)
    runtime = {"hpu": "Gaudi's", "tpu": "the TPU's"}.get(data["kind"])
    why_not = f"{runtime} runtime, its allocator and collectives, is not described yet" if runtime else ""
    return AcceleratorEntry(name=name, family=data["architecture"], vendor=data["vendor"], memory_bytes=data["memory_bytes"],
                            memory_bytes_per_s=data["memory_bytes_per_s"], bf16_flops_per_s=data["flops_per_s"].get("bf16", 0.0),
                            form_factor=data["form_factor"], node=data["node"], source=data["source"],
                            confidence=data["confidence"], note=data["note"], predictable=not why_not, why_not=why_not)


def list_accelerators() -> tuple[AcceleratorEntry, ...]:
    """Every accelerator, by vendor, architecture and name. Reads every file."""
    return tuple(sorted((_entry(name) for name in entry_names("accelerators")), key=lambda e: (e.vendor, e.family, e.name)))
