"""The lab's result as Markdown, and as plain data."""

from collections.abc import Sequence
from typing import Any

from costmodel.records import Environment
from execute.lab import Entry, Figures, figures, longer, placed, sent, why

SCHEMA = 1
MIB = 1 << 20


def markdown(entries: Sequence[Entry], environment: Environment, threads: int | None) -> str:
    """Tables of what was measured and predicted, then each way to spread the step in words."""
    run = entries[0].run
    m, r = run.model, run.recipe
    each = f", one thread a rank ({threads} cores)" if threads is not None else ""
    lines = ["# One Transformer, spread in every way", "",
             f"{m.name}: {m.layers} layers of width {m.hidden}, {r.global_batch} sequences of {r.seq_len} tokens a step in all, {r.precision.name}. "
             f"Measured on {environment.accelerator}{each}, torch {environment.versions['torch']}.",
             "", "Time is shown, not judged: the prediction's constants were not fitted on this machine. Bytes are exact.", "",
             *_throughput(entries), "", *_memory(entries), "", *_communication(entries)]
    for entry in entries[1:]:
        lines += ["", f"## {entry.name}, {entry.ranks} ranks", "", *(f"- {line}" for line in _words(entries[0], entry))]
    return "\n".join(lines) + "\n"


def _words(one: Entry, entry: Entry) -> list[str]:
    return [*placed(entry), *(f"communicates {line}" for line in sent(entry)), *(why(one, entry) or [f"not measured: {entry.outcome.message}"])]


def _throughput(entries: Sequence[Entry]) -> list[str]:
    lines = ["| | ranks | step, measured | tokens/s | of one device | per rank | step, predicted | of one device, predicted |",
             "|---|---|---|---|---|---|---|---|"]
    one, one_predicted = figures(entries[0].measured), figures(entries[0].predicted)
    for e in entries:
        m, p = figures(e.measured), figures(e.predicted)
        times, predicted_times = _ratio(m.tokens_per_s, one.tokens_per_s), _ratio(p.tokens_per_s, one_predicted.tokens_per_s)
        lines.append(_row(e.name, e.ranks, _ms(m.step_s), _number(m.tokens_per_s), _times(times), _share(None if times is None else times / e.ranks),
                          _ms(p.step_s), _times(predicted_times)))
    return lines


def _memory(entries: Sequence[Entry]) -> list[str]:
    lines = ["| | state of a rank, measured | predicted | peak of a rank, measured | of one device | predicted |", "|---|---|---|---|---|---|"]
    one = figures(entries[0].measured)
    for e in entries:
        m, p = figures(e.measured), figures(e.predicted)
        share = _share(_ratio(m.peak_bytes, one.peak_bytes))
        lines.append(_row(e.name, _mib(m.states_bytes), _mib(p.states_bytes), _mib(m.peak_bytes), share, _mib(p.peak_bytes)))
    return lines


def _communication(entries: Sequence[Entry]) -> list[str]:
    lines = ["| | communication, measured | waited for | hidden | communication, predicted | waited for, predicted |", "|---|---|---|---|---|---|"]
    for e in entries:
        m, p = figures(e.measured), figures(e.predicted)
        lines.append(_row(e.name, _ms(m.communication_s), _ms(m.exposed_s), _share(m.overlap), _ms(p.communication_s), _ms(p.exposed_s)))
    return lines


def _row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.1f} ms"


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / MIB:,.2f} MiB"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} x"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def document(entries: Sequence[Entry], environment: Environment) -> dict[str, Any]:
    """Plain data with stable keys (docs/report.md)."""
    from dataclasses import asdict
    one = entries[0]
    return {"schema": SCHEMA, "kind": "lab", "environment": asdict(environment), "cases": [_case(one, e) for e in entries]}


def _case(one: Entry, e: Entry) -> dict[str, Any]:
    parts = longer(one, e)
    return {"name": e.name, "ranks": e.ranks, "run": e.run.model_dump(mode="json"), "outcome": e.outcome.kind, "message": e.outcome.message,
            "measured": _figures(figures(e.measured)), "predicted": _figures(figures(e.predicted)),
            "longer": None if parts is None else parts._asdict(), "placed": placed(e), "sent": sent(e), "why": why(one, e) if e is not one else []}


def _figures(f: Figures) -> dict[str, Any]:
    return {**f._asdict(), "overlap": f.overlap}
