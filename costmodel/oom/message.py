"""PyTorch's out-of-memory message, in all its wordings, and the blocks of its allocator.

PyTorch prints what it asked the device for, not what the program asked for: a request is rounded to 512 bytes, then served from a block of
2 MiB (up to 1 MiB), of 20 MiB (below 10 MiB), or of its size rounded up to 2 MiB; that block is what "Tried to allocate" shows, with two
decimals (c10/cuda/CUDACachingAllocator.cpp).
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

from costmodel.spec import PlanError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
UNITS = {"": 1, "B": 1, "BYTES": 1, "KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": 1 << 40, "KB": KIB, "MB": MIB, "GB": GIB, "TB": 1 << 40}
"""PyTorch's units are binary, whatever they are called."""
SMALL_REQUEST, SMALL_BLOCK, LARGE_REQUEST, LARGE_BLOCK, ROUNDED_TO = MIB, 2 * MIB, 10 * MIB, 20 * MIB, 2 * MIB


class Figure(NamedTuple):
    """Bytes as a message prints them, and by how much the print may be off."""

    nbytes: int
    half_width: float = 0.0

    def holds(self, nbytes: float) -> bool:
        """Whether a number of bytes prints as this figure."""
        return abs(nbytes - self.nbytes) <= self.half_width + 1.0


@dataclass(frozen=True, slots=True)
class Message:
    """What an out-of-memory message says; None where it does not."""

    tried: Figure | None = None
    capacity: Figure | None = None
    free: Figure | None = None
    allocated: Figure | None = None
    """Live tensors, by PyTorch."""
    reserved: Figure | None = None
    """Held by the caching allocator, allocated included."""
    process: Figure | None = None
    """In use by this process, the context included."""
    others: Figure | None = None
    """In use by other processes, where the message lists them."""

    @property
    def unallocated(self) -> int | None:
        """Reserved and not allocated: what fragmentation, or another stream's pool, keeps."""
        return None if self.reserved is None or self.allocated is None else max(0, self.reserved.nbytes - self.allocated.nbytes)


_SIZE = r"([0-9][0-9,]*(?:\.[0-9]+)?)\s*([KMGT]i?B|bytes|B)\b"
_FORMS = {
    "tried": (rf"ried to allocate {_SIZE}",),
    "capacity": (rf"total capac(?:i)?ty of {_SIZE}", rf"{_SIZE} total capacity"),
    "free": (rf"of which {_SIZE} is free", rf"{_SIZE} free[;,)]"),
    "allocated": (rf"{_SIZE} is allocated by PyTorch", rf"{_SIZE} already allocated"),
    "reserved": (rf"{_SIZE} reserved in total by PyTorch", rf"{_SIZE} cached\)"),
    "unallocated": (rf"{_SIZE} is reserved by PyTorch but unallocated",),
    "process": (rf"this process has {_SIZE} memory in use",)}
"""PyTorch's wording, newest first (2.1 on; 1.4 to 2.0; "cached" before 1.4)."""


def read_size(text: str, field: str = "size") -> Figure:
    """"112.00 MiB", "1.5GiB" or "117440512" as bytes; what is not written is taken as rounded."""
    found = re.fullmatch(r"\s*([0-9][0-9,]*(?:\.([0-9]+))?)\s*([A-Za-z]*)\s*", text)
    if not found or found[3].upper() not in UNITS:
        raise PlanError(field, text, "is not a number of bytes.", "Write it as the message does: 112.00 MiB, 45.56 GiB.")
    return _figure(found[1], found[3])


def _figure(number: str, unit: str) -> Figure:
    scale = UNITS[unit.upper()]
    decimals = len(number.partition(".")[2])
    return Figure(round(float(number.replace(",", "")) * scale), 0.5 * 10.0 ** -decimals * scale if scale > 1 else 0.0)


def read_message(text: str) -> Message:
    """The figures of PyTorch's message, anywhere in a text; of several messages the first. Raises PlanError where there is none."""
    text = " ".join(text.split())
    start = text.find("ried to allocate")
    if start < 0:
        raise PlanError("message", text[:60], "it holds no out-of-memory message of PyTorch.",
                        'Give the line with "Tried to allocate", or its figures as --tried, --allocated, --reserved and --capacity.')
    following = text.find("ried to allocate", start + 1)
    text = text[start:following if following > 0 else len(text)]
    found: dict[str, Figure] = {}
    for key, forms in _FORMS.items():
        for form in forms:
            match = re.search(form, text)
            if match:
                found[key] = _figure(match[1], match[2])
                break
    spare = found.pop("unallocated", None)
    if spare is not None and "allocated" in found:
        a = found["allocated"]
        found["reserved"] = Figure(a.nbytes + spare.nbytes, a.half_width + spare.half_width)
    if "process" in found and found["process"].nbytes == 0:  # containers hide it
        del found["process"]
    listed = [_figure(*m.groups()) for m in re.finditer(rf"Process \d+ has {_SIZE} memory in use", text)]
    return Message(**found, others=Figure(sum(f.nbytes for f in listed)) if listed else None)


def block_bytes(request: int) -> int:
    """What PyTorch's caching allocator asks the device for, to serve a request."""
    size = -(-request // 512) * 512
    if size <= SMALL_REQUEST:
        return SMALL_BLOCK
    return LARGE_BLOCK if size < LARGE_REQUEST else -(-size // ROUNDED_TO) * ROUNDED_TO
