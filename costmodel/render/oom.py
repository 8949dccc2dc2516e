"""An out-of-memory message explained: the tensor, the moment, whether the figures agree, the cause, and what to change."""

from costmodel.oom import LARGE_BLOCK, Diagnosis, Match, Message
from costmodel.render.advice import Flags, fit_section
from costmodel.render.text import Page
from costmodel.render.units import size
from costmodel.render.words import moment, operation

LISTS = {"parameters": "the parameter", "parameters (shard)": "the shard of the parameter", "exp_avg": "its first moment", "exp_avg_sq": "its second moment",
         "momentum": "its momentum", "optimizer.sqrt": "the foreach update's copy of its second moment", "gradients (shard)": "the shard of its gradient"}
"""What a tensor is that exists for each parameter."""
LAYER = "a layer, "
SHOWN = 4


def render_oom(title: str, d: Diagnosis, flags: Flags, page: Page) -> str:
    """The whole answer of `costmodel oom`."""
    page.line(title, "bold")
    page.heading("MESSAGE")
    page.pairs(_message(d.message))
    page.heading("TENSOR")
    _tensor(d, page)
    page.heading("CAUSE")
    page.line(_cause(d), "red" if d.cause == "need" else "yellow", "  ")
    page.pairs(_budget(d))
    if d.advice is not None:
        fit_section(d.advice, flags, page)
    elif d.cause in ("fragmentation", "other process", "not described", "unclear"):
        page.heading("FIX")
        page.line(_fix(d), indent="  ")
    return str(page)


def _message(m: Message) -> list[tuple[str, str]]:
    rows = [("asked for", size(m.tried.nbytes) if m.tried else "not said")]
    rows += [(name, size(figure.nbytes)) for name, figure in (("allocated", m.allocated), ("reserved", m.reserved), ("free", m.free), ("capacity", m.capacity))
             if figure is not None]
    if m.unallocated is not None:
        rows.insert(3, ("of it unused", size(m.unallocated)))
    return rows


def _tensor(d: Diagnosis, page: Page) -> None:
    assert d.message.tried is not None
    asked = d.message.tried.nbytes
    if d.names_no_tensor:
        what = "1 to 10 MiB" if asked == LARGE_BLOCK else "up to 1 MiB"
        page.line(f"{size(asked)} is the block from which PyTorch serves tensors of {what}: the size names none. The device was full already.", indent="  ")
        return
    if not d.matches:
        page.line("No tensor of this run has that size: the run that failed differs from this one (batch, sequence, dtype, sharding, model). "
                  "The nearest that are asked for:", indent="  ")
        page.table(["asked for", "tensor", "moment"], [[size(m.nbytes), _name([m]), _when(m)] for m in d.closest], "><<")
        return
    first, *others = _grouped(d)
    best = first[0]
    page.pairs([("tensor", f"{_name(first)}: {size(best.nbytes)}" + (f", asked for as {size(asked)}" if size(best.nbytes) != size(asked) else "")),
                ("moment", _when(best)), ("rank", best.role), ("allocated", _agreement(d, best))])
    if others:
        page.line()
        page.line("Of the same size:", indent="  ")
        page.table(["predicted allocated", "tensor", "moment"], [[_live(g[0]), _name(g), _when(g[0])] for g in others[:SHOWN]], "><<")


def _grouped(d: Diagnosis) -> list[list[Match]]:
    """Matches of one moment and size together, in order."""
    groups: dict[tuple[str, str, str, int], list[Match]] = {}
    for m in d.matches:
        groups.setdefault((m.role, m.step, m.moment, m.nbytes), []).append(m)
    return list(groups.values())


def _name(group: list[Match]) -> str:
    """The tensors of a group in words: of which parameters, and what of them."""
    parts = list(dict.fromkeys(LISTS.get(m.part_of, m.part_of) for m in group if m.part_of))
    names = list(dict.fromkeys(_one(m.tensor) for m in group))
    if len(names) > 1 and all(name.startswith(LAYER) for name in names):
        names = ["a layer's " + _either([name.removeprefix(LAYER) for name in names])]
    return _either(names) + (f" ({_either(parts)})" if parts else "")


def _either(words: list[str]) -> str:
    """a, b or c."""
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _one(name: str) -> str:
    if name.endswith(" (flat)"):
        unit = name.removesuffix(" (flat)")
        return f"all parameters of {'a layer' if unit == 'layer' else f'the {unit}'} in one flat shard (FSDP1, DeepSpeed)"
    gradient = name.startswith("grad:")
    words = operation(name.removeprefix("grad:")) or name.removeprefix("grad:")
    return f"gradient of {words}" if gradient else words


def _when(m: Match) -> str:
    return f"{m.step}: {moment(m.moment)}" if m.step != "init" else "when the model is made"


def _live(m: Match) -> str:
    return size(m.live_low) if m.live_low == m.live_high else f"{size(m.live_low)} to {size(m.live_high)}"


def _agreement(d: Diagnosis, m: Match) -> str:
    if d.message.allocated is None:
        return f"predicted {_live(m)} at that moment; the message does not say"
    if m.off_bytes == 0:
        return f"agrees: predicted {_live(m)} at that moment"
    more = f"{size(abs(m.off_bytes))} {'more' if m.off_bytes > 0 else 'less'} than the predicted {_live(m)} at that moment"
    return f"agrees: {more}" if d.agrees else f"differs: {more}"


def _cause(d: Diagnosis) -> str:
    asked = d.message.tried.nbytes if d.message.tried else 0
    unused = d.message.unallocated or 0
    return {
        "need": "True need: the run needs more than the device has, however the allocator places it.",
        "fragmentation": f"Fragmentation: the allocator holds {size(unused)} that no tensor uses, {unused / max(1, asked):.1f} times the request, but in "
                         "pieces. What the run needs is predicted to fit.",
        "other process": f"Another process: {size(d.others_bytes)} of the device are not of this one. What the run needs is predicted to fit.",
        "not described": f"More is allocated than this run explains: {size(d.message.allocated.nbytes if d.message.allocated else None)}, where it peaks at "
                         f"{size(d.peak_bytes)}. Something else lives on the device: another model, a cache, outputs that are kept, other settings.",
        "unclear": _fits(d) + " Neither fragmentation nor another process shows in the message."}[d.cause]


def _fits(d: Diagnosis) -> str:
    """What is predicted of a run whose message shows no cause."""
    if d.report.verdict != "risky" or d.reserved_bytes is None:
        return "The run is predicted to fit."
    return ("The run is predicted to be risky: its live tensors fit, and with what the allocator may hold besides they need "
            f"{size(d.reserved_bytes + d.outside_bytes)} of {size(d.capacity_bytes)}.")


def _budget(d: Diagnosis) -> list[tuple[str, str]]:
    total = d.peak_bytes + d.outside_bytes
    rows = [("needed", f"{size(d.peak_bytes)} allocated at the predicted peak + {size(d.outside_bytes)} of context and NCCL = {size(total)}, of "
             f"{size(d.capacity_bytes)}")]
    if d.reserved_bytes is not None and d.message.reserved is not None:
        rows.append(("reserved", f"predicted {size(d.reserved_bytes)} at most, in the message {size(d.message.reserved.nbytes)}"))
    if d.others_bytes:
        rows.append(("elsewhere", f"{size(d.others_bytes)} of the device are neither free nor of this process" +
                     ("" if d.message.process or d.message.others else " and its predicted context")))
    return rows


def _fix(d: Diagnosis) -> str:
    return {"fragmentation": "Use expandable segments (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; --set recipe.allocator=expandable predicts it), "
                             "or avoid sizes that change from step to step.",
            "other process": "Free the device (nvidia-smi lists who holds it), or give each process its own.",
            "not described": "Describe what else the job keeps, or look for references that keep tensors alive from one step to the next.",
            "unclear": "Compare the run with the job: batch, sequence, precision, sharding, checkpointing, loss."}.get(d.cause, "")

