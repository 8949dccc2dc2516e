"""The report as text."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from benchmarks.accuracy.score import Row
from benchmarks.accuracy.statistics import KINDS, relative

UNITS = {"time": "s"}


def table(header: Sequence[str], body: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows in columns: the first two to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in (header, *body)) for i in range(len(header))]
    for row in (header, *body):
        yield "  ".join(cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))).rstrip()


def percent(value: float | None, *, sign: bool = False) -> str:
    return "-" if value is None else f"{100 * value:{'+' if sign else ''}.1f}"


def error_lines(summary: dict[str, Any]) -> Iterator[str]:
    """Errors in percent, per source and kind: per row, per distinct configuration, and without the doubtful rows."""
    header = ("source", "figure", "rows", "mean", "median", "P90", "bias", "configs", "mean", "bias", "not doubtful", "mean", "bias")
    body = []
    for name, part in (*summary["sources"].items(), ("all", summary["all"])):
        for kind in KINDS:
            views = part["errors"].get(kind)
            if views:
                rows, single, clean = (views[key] for key in ("rows", "configurations", "rows_without_suspects"))
                body.append((name, kind, str(rows["count"]), *(percent(rows[k]) for k in ("mean_abs", "median_abs", "p90_abs")),
                             percent(rows["bias"], sign=True), str(single["count"]), percent(single["mean_abs"]), percent(single["bias"], sign=True),
                             *((str(clean["count"]), percent(clean["mean_abs"]), percent(clean["bias"], sign=True)) if clean else ("0", "-", "-"))))
    yield from table(header, body)


def count_lines(summary: dict[str, Any]) -> Iterator[str]:
    """Rows used and refused, verdicts, direction and regret, per source."""
    header = ("source", "", "records", "used", "direction", "sequence", "regret mean", "worst", "by chance", "groups")
    body = []
    for name, part in (*summary["sources"].items(), ("all", summary["all"])):
        hits, pairs = part["direction_without_sequence"]
        seq = part["direction"].get("sequence", (0, 0))
        r = part["regret"]
        body.append((name, "", str(part["records"]), str(part["used"]), f"{hits}/{pairs}" if pairs else "-", f"{seq[0]}/{seq[1]}" if seq[1] else "-",
                     *((f"{r['mean']:.3f}", f"{r['worst']:.3f}", f"{r['random']:.3f}", str(r["groups"])) if r else ("-",) * 4)))
    yield from table(header, body)


def assumption_lines(rows: Iterable[Row]) -> Iterator[str]:
    """Every assumption in use: source, field = value, how many rows, why."""
    counts: dict[tuple[str, str, str, str], int] = {}
    for row in rows:
        for name, value, reason in row.assumed:
            key = (row.publisher, name, str(value), reason)
            counts[key] = counts.get(key, 0) + 1
    publisher = None
    for (source, name, value, reason), n in sorted(counts.items()):
        if source != publisher:
            publisher = source
            yield f"{source}"
        yield f"  {name} = {value}  ({n} rows): {reason}"


def worst_lines(rows: Sequence[Row], count: int) -> Iterator[str]:
    """The rows furthest off, with the parts of the prediction."""
    found = sorted(((abs(relative(pair)), row, pair) for row in rows for pair in row.pairs if not (pair.kind == "time" and row.launch_bound)),
                   key=lambda item: -item[0])
    for _, row, pair in found[:count]:
        unit = UNITS.get(pair.kind, "GiB")
        yield f"{row.id}: {pair.kind} {pair.predicted:.4g} {unit} for {pair.measured:.4g} ({percent(relative(pair), sign=True)}%)"
        parts = row.breakdown if pair.kind == "time" else row.memory_parts
        total = sum(parts.values()) or 1.0
        yield "    " + ", ".join(f"{name} {100 * value / total:.0f}%" for name, value in sorted(parts.items(), key=lambda kv: -kv[1])[:7])
        doubt = row.suspect.get("time" if pair.kind == "time" else "memory")
        if doubt:
            yield f"    doubtful record: {doubt}"


def report(rows: Sequence[Row], summary: dict[str, Any], worst: int) -> Iterator[str]:
    whole = summary["all"]
    yield f"{whole['records']} records, {whole['used']} predicted, {whole['records'] - whole['used']} refused"
    yield ""
    yield "ERROR, %  (predicted / measured - 1; bias: its mean; launch-bound: tests whose publisher calls them so)"
    yield from error_lines(summary)
    yield ""
    yield "DIRECTION AND CHOICE  (pairs of distinct runs, one setting apart, over 10% apart as measured; sequence pairs apart)"
    yield from count_lines(summary)
    yield "  by setting: " + ", ".join(f"{name} {hits}/{n}" for name, (hits, n) in whole["direction"].items())
    yield ""
    yield "OUT OF MEMORY"
    yield from (f"  {name}: {n}" for name, n in whole["oom"].items())
    yield ""
    yield "REFUSED"
    yield from (f"  {n:4}  {reason}" for reason, n in whole["refused"].items())
    yield ""
    if worst:
        yield f"WORST {worst}"
        yield from worst_lines(rows, worst)
        yield ""
    yield "ASSUMED  where a record does not say (benchmarks/published/assumptions.toml)"
    yield from assumption_lines(rows)
