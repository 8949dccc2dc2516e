"""An explanation as text: what each axis does, what a rank holds and sends, a layer under tensor parallelism, stages, how sure."""

from collections.abc import Sequence

from costmodel.explain import Axis, Explanation, LayerSplit, Movement, Pipeline, Weight
from costmodel.render.prediction import BASIS_WORDS, notes
from costmodel.render.text import Page
from costmodel.render.units import count, duration, plural, share, size
from costmodel.render.words import operation
from costmodel.report import StepReport

MOST_RANKS, MOST_CONSTANTS = 16, 8
WIDE = 110
"""Columns from which a constant and its source share a row."""
SMALLEST = 5e-3
"""Percent a figure moves for one percent of a constant, below which the text leaves it out."""
FIGURES = {"step_s": "the step", "device_bytes": "the device total"}
PHASES = {"optimizer": "the optimizer step"}


def render_explanation(title: str, e: Explanation, weights: Sequence[Weight], report: StepReport, page: Page) -> str:
    """The whole answer; `report` is the prediction that is explained."""
    page.line(title, "bold")
    _axes(e, page)
    _holdings(e, page)
    _terms(e, page)
    _movements(e.movements, page)
    if e.layer:
        _layer(e.layer, page)
    if e.pipeline:
        _pipeline(e.pipeline, page)
    _sure(e, weights, page)
    notes(report, page)
    return str(page)


def _axes(e: Explanation, page: Page) -> None:
    page.heading("WHAT EACH AXIS DOES", "parallelism divides work, sharding only stores in pieces")
    if not e.axes:
        page.line("One rank: nothing is divided, sharded, copied or sent.", indent="  ")
    for axis in e.axes:
        sent = sum(m.sent_bytes for m in e.movements if m.axis == axis.name)
        page.line(f"{axis.name} {axis.degree}: {plural(axis.degree, 'rank')} that {axis.serves}", "bold", "  ")
        page.pairs([(f"  {label}", text) for label, text in _axis_rows(axis, sent)])


def _axis_rows(axis: Axis, sent: int) -> list[tuple[str, str]]:
    rows = [("placed", f"ranks {axis.stride:,} apart" + (f", over {axis.link}" if axis.link else "")), ("divides", _list(axis.divides))]
    rows += [("shards", f"{_list(axis.shards)}: each rank stores a piece")] if axis.shards else []
    rows += [("owns", f"{_list(axis.owns)}: its own part is all a rank needs")] if axis.owns else []
    rows += [("copies", f"{_list(axis.copies)}: whole on each rank")] if axis.copies else []
    exposed = f", of which compute waits for {duration(axis.exposed_s)} ({share(axis.exposed_s, axis.communication_s)})" if axis.communication_s else ""
    return [*rows, ("sends", f"{size(sent)} a step from each rank; {duration(axis.communication_s)}{exposed}" if sent else "nothing")]


def _list(names: Sequence[str]) -> str:
    return ", ".join(name.replace("_", " ") for name in names) or "nothing"


def _who(e: Explanation) -> str:
    return f"each of the {e.ranks:,} ranks" if e.role == "every rank" and e.ranks > 1 else "the one rank" if e.ranks == 1 and e.role == "every rank" else (
        f"{e.role}, such as rank {e.example_rank}")


def _holdings(e: Explanation, page: Page) -> None:
    page.heading("WHAT A RANK HOLDS", f"{_who(e)}; state between two steps, the most activations saved at once")
    names = [f"{a.name} {a.degree}" for a in e.axes]
    rows = [[h.name.replace("_", " "), size(h.here_bytes), "-" if h.whole_bytes is None else size(h.whole_bytes),
             *(h.placements[a.name] for a in e.axes)] for h in e.holdings]
    page.table(["tensor", "this rank", "not spread", *names], rows, "<>>" + "<" * len(names))
    if e.on_host:
        page.line(f"in host memory: {_list(e.on_host)}", indent="  ")


def _terms(e: Explanation, page: Page) -> None:
    fewer = f"; it works with {count(e.params)} of {count(e.model_params)}" if e.params < e.model_params else ""
    page.heading("BYTES PER PARAMETER", f"not spread, and for each parameter of this rank{fewer}")
    rows = [[t.name + ("" if t.between_steps else " *"), t.dtype, _bytes(t.whole), _bytes(t.here)] for t in e.terms if max(t.whole, t.here) > 5e-3]
    kept = [t for t in e.terms if t.between_steps]
    whole, here = sum(t.whole for t in kept), sum(t.here for t in kept)
    page.table(["term", "dtype", "not spread", "this rank"], [*rows, ["between steps", "", _bytes(whole), _bytes(here)]], "<<>>", bold_last=True)
    if any(not t.between_steps for t in e.terms):
        page.line("* during forward and backward alone, at most", "dim", "  ")


def _bytes(value: float) -> str:
    return f"{value:.4g}" if value else "-"


def _movements(movements: Sequence[Movement], page: Page) -> None:
    """Those of one tensor, collective, axis and phase together."""
    if not movements:
        return
    page.heading("WHAT A RANK SENDS", "in a step, and what hides it")
    alike: dict[tuple[str, str, str, str, str], list[Movement]] = {}
    for m in movements:
        alike.setdefault((m.tensor, f"{m.collective} {m.dtype}", f"{m.axis} {m.group}", m.phase, m.beside), []).append(m)
    for (tensor, collective, axis, phase, beside), same in alike.items():
        if same[0].collective == "recv":  # counted where it is sent
            continue
        times, sent, seconds, exposed = (sum(values) for values in zip(*((m.count, m.sent_bytes, m.seconds, m.exposed_s) for m in same), strict=True))
        page.line(f"{tensor}: {count(times)} x {collective} over {axis} in {PHASES.get(phase, phase)}", indent="  ")
        page.line(f"{size(sent)} sent, {duration(seconds)}; {_hides(beside, seconds, exposed)}", "dim", "      ")


def _hides(beside: str, seconds: float, exposed: float) -> str:
    if not beside:
        return "nothing hides it"
    if exposed <= 5e-4 * seconds:
        return f"hidden behind {beside}"
    return f"beside {beside}, {share(min(1.0, exposed / seconds))} exposed"


def _layer(split: LayerSplit, page: Page) -> None:
    kind = "tensor and sequence parallelism" if split.sequence_parallel else "tensor parallelism"
    page.heading(f"ONE LAYER OVER {split.tp} RANKS", kind)
    rows = [[w.name, _shape(w.shape), _shape(w.local), _CUTS[w.cut]] for w in split.weights]
    page.table(["weight (out x in)", "whole", "this rank", "cut"], rows, "<>><")
    page.line()
    page.pairs([("heads", f"{split.heads} of {split.heads * split.tp} on each rank, with {split.kv_heads} of {split.kv_heads * split.tp} key and value heads"),
                ("saved", f"{size(split.saved_bytes)} of activations a layer and micro-batch on each rank, {size(split.saved_whole_bytes)} without "
                          f"({share(split.saved_bytes, split.saved_whole_bytes)}; even would be {share(1, split.tp)})")])
    page.line()
    page.table(["phase", "collective", "each", "where"],
               [[f.phase, f.collective, size(f.message_bytes), _where(f.after, f.waits)] for f in split.falls], "<<><")


_CUTS = {"column": "by column: its outputs", "row": "by row: its inputs", "vocabulary": "by vocabulary", "whole": "whole on each rank"}


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(f"{n:,}" for n in shape)


def _where(after: str, waits: bool) -> str:
    at = f"after {_said(after)}" if after else "first, before its matmuls"
    return at + ("" if waits else "; the next matmul runs beside it")


def _said(name: str) -> str:
    return (operation(name) or name).removeprefix("a layer, ")


def _pipeline(p: Pipeline, page: Page) -> None:
    page.heading("STAGES", f"{p.schedule}, {plural(p.micro_batches, 'micro-batch', 'micro-batches')}")
    ranks = range(len(p.in_flight))
    rows = []
    for rank in ranks:
        mine = [s for s in p.stages if s.rank == rank]
        held = [*(["embedding"] if any(s.embedding for s in mine) else []),
                *(f"layers {s.first_layer} to {s.first_layer + s.layers - 1}" if s.layers > 1 else f"layer {s.first_layer}" for s in mine if s.layers),
                *(["norm, head and loss"] if any(s.head for s in mine) else [])]
        rows.append([str(rank), str(p.in_flight[rank]), ", ".join(held)])
    shown = rows if len(rows) <= MOST_RANKS else [*rows[:MOST_RANKS // 2], ["…", "…", "…"], *rows[-MOST_RANKS // 2:]]
    page.table(["rank", "in flight", "holds"], shown, ">><")


def _sure(e: Explanation, weights: Sequence[Weight], page: Page) -> None:
    page.heading("HOW SURE")
    page.pairs([(basis, ", ".join(name.replace("_", " ") for name, of in e.basis.items() if of == basis) + f" ({meaning})")
                for basis, meaning in BASIS_WORDS.items() if basis in e.basis.values()])
    for figure, words in FIGURES.items():
        of = [w for w in weights if w.figure == figure and abs(w.elasticity) >= SMALLEST]
        if of:
            page.heading(f"WHAT {words.upper()} RESTS ON", "constants of the profile; in percent, what 1% more of each does to it")
            _constants(of, page)


def _constants(weights: Sequence[Weight], page: Page) -> None:
    shown = weights[:MOST_CONSTANTS]
    rows = [[w.key, _value(w), f"±{100 * w.log_sd:.0f}%" if w.log_sd else "-", f"{w.elasticity:+.2f}", f"{w.basis}: {w.source}"] for w in shown]
    header = ["constant", "value", "known to", "%", "how it was found"]
    if page.width >= WIDE:
        page.table(header, rows, "<>>><")
    else:
        page.table(header[:-1], [row[:-1] for row in rows], "<>>>")
        page.line()
        page.pairs([(w.key, f"{w.basis}: {w.source}") for w in shown])
    if len(weights) > len(shown):
        page.line(f"and {plural(len(weights) - len(shown), 'constant')} more (--json lists all)", "dim", "  ")


def _value(w: Weight) -> str:
    if w.unit == "bytes":
        return size(w.value)
    return duration(w.value) if w.unit == "s" and w.value >= 1e-4 else f"{1e6 * w.value:.3g} us" if w.unit == "s" else f"{w.value:.4g} {w.unit}"
