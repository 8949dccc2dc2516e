"""The lists of the catalogue: which columns a person sees of each kind of entry."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from costmodel.render.text import Page
from costmodel.render.units import size


class Column(NamedTuple):
    """A column's header, the text of an entry in it, and which way it is aligned."""

    header: str
    text: Callable[[Any], str]
    align: str = "<"


def billions(n: float) -> str:
    """A parameter count as people write it: 8.03B, 350M."""
    if not n:
        return "-"
    scale, unit = next((s, u) for s, u in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1.0, "")) if n >= 0.9995 * s)
    return f"{n / scale:.3g}{unit}"


def _tera(flops_per_s: float) -> str:
    return f"{flops_per_s / 1e12:.0f}" if flops_per_s >= 1e13 else f"{flops_per_s / 1e12:.2g}" if flops_per_s else "-"


def _predicted(entry: Any) -> str:
    return "yes" if entry.predictable else "not yet"


COLUMNS: dict[str, tuple[Column, ...]] = {
    "models": (
        Column("name", lambda e: e.name), Column("family", lambda e: e.family), Column("parameters", lambda e: billions(e.params), ">"),
        Column("longest", lambda e: f"{e.max_positions:,}" if e.max_positions else "-", ">"), Column("predicted", _predicted)),
    "gpus": (
        Column("name", lambda e: e.name), Column("architecture", lambda e: e.family.partition("_avx")[0]),
        Column("memory", lambda e: size(e.memory_bytes), ">"), Column("at GB/s", lambda e: f"{e.memory_bytes_per_s / 1e9:,.4g}", ">"),
        Column("bf16 TFLOP/s", lambda e: _tera(e.bf16_flops_per_s), ">"), Column("predicted", _predicted)),
    "clusters": (
        Column("name", lambda e: e.name), Column("GPUs", lambda e: f"{e.gpus_per_node} x {e.accelerator or 'any PCIe card'}"),
        Column("inside", lambda e: f"{e.scale_up}{' switch' if e.scale_up_switched else ''}"),
        Column("between, GB/s", lambda e: f"{e.network} {e.nics} x {e.nic_bytes_per_s / 1e9:,.4g}" if e.nics else e.network)),
    "profiles": (Column("name", lambda e: e["name"]), Column("constants", lambda e: e["kind"])),
    "strategies": (
        Column("name", lambda e: e.name), Column("predicted", lambda e: "yes" if e.predicted else "not yet"),
        Column("divides, shards, sends, forbids", lambda e: f"divides {e.divides}. Shards {e.shards}. Sends {e.sends}. Not for {e.forbids}.")),
    "precisions": (
        Column("name", lambda e: e.name), Column("bits", lambda e: str(e.bits), ">"), Column("exponent", lambda e: str(e.exponent_bits), ">"),
        Column("mantissa", lambda e: str(e.mantissa_bits), ">"), Column("range", lambda e: f"{e.smallest_normal:.3g} to {e.largest:.4g}"),
        Column("loss scaling", lambda e: "needed" if e.loss_scaling else "no"), Column("note", lambda e: e.note)),
    "optimizers": (
        Column("name", lambda e: e.name), Column("states", lambda e: str(len(e.states)), ">"),
        Column("bytes/param", lambda e: f"{e.state_bytes_per_param:g}", ">"), Column("weight decay", lambda e: e.weight_decay),
        Column("update", lambda e: f"{e.update}. {e.note}".strip())),
}


def words_of(kind: str, entry: Any) -> str:
    """What a search looks at: the columns of words, not those of figures."""
    return " ".join([*(c.text(entry) for c in COLUMNS[kind] if c.align == "<"),
                     *(getattr(entry, name, "") for name in ("vendor", "why_not"))])


def render_list(kind: str, entries: Sequence[Any], page: Page) -> str:
    """Entries of one kind as a table; below it, why some are not predicted."""
    columns = COLUMNS[kind]
    page.table([c.header for c in columns], [[c.text(e) for c in columns] for e in entries], "".join(c.align for c in columns))
    missing: dict[str, list[str]] = {}
    for entry in entries:
        if not getattr(entry, "predictable", True):
            missing.setdefault(entry.why_not.removeprefix("not predicted yet: "), []).append(entry.name)
    if missing:
        page.heading("NOT PREDICTED YET")
        page.bullets([f"{', '.join(names)}: {why}" for why, names in missing.items()])
    return str(page)
