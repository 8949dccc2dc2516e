"""Tables of docs/accuracy.md, filled between its markers: `<!-- errors -->` up to `<!-- /errors -->`."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.accuracy.assumptions import PUBLISHED
from benchmarks.accuracy.statistics import KINDS
from benchmarks.accuracy.text import percent


def fill(path: Path, summary: dict[str, Any]) -> None:
    """Rewrite every marked block of a page."""
    text = path.read_text(encoding="utf-8")
    for name, lines in BLOCKS.items():
        before, start, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- /{name} -->")
        if end:
            text = "\n".join((before + start.rstrip(), *lines(summary), end + after))
    path.write_text(text, encoding="utf-8")


def _table(header: Sequence[str], body: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield "|" + "---|" * len(header)
    for row in body:
        yield f"| {' | '.join(row)} |"


def errors(summary: dict[str, Any]) -> Iterator[str]:
    """Errors in percent by source and figure."""
    body = []
    for name, part in (*summary["sources"].items(), ("**all**", summary["all"])):
        for kind in KINDS:
            views = part["errors"].get(kind)
            if views:
                rows, single, clean = (views[key] for key in ("rows", "configurations", "rows_without_suspects"))
                body.append((name, kind, str(rows["count"]), *(percent(rows[key]) for key in ("mean_abs", "median_abs", "p90_abs")),
                             percent(rows["bias"], sign=True), f"{single['count']}: {percent(single['mean_abs'])}",
                             f"{clean['count']}: {percent(clean['mean_abs'])}" if clean else "-"))
    yield from _table(("source", "figure", "rows", "mean", "median", "P90", "bias", "distinct: mean", "without doubtful: mean"), body)


def choice(summary: dict[str, Any]) -> Iterator[str]:
    """Direction of controlled pairs and regret of the plan chosen, by source."""
    body = []
    for name, part in (*summary["sources"].items(), ("**all**", summary["all"])):
        hits, pairs = part["direction_without_sequence"]
        seq, r = part["direction"].get("sequence", (0, 0)), part["regret"]
        if pairs or seq[1] or r:
            body.append((name, f"{hits} of {pairs}" if pairs else "-", f"{seq[0]} of {seq[1]}" if seq[1] else "-",
                         *((f"{r['groups']}", f"{r['mean']:.3f}", f"{r['worst']:.3f}", f"{r['random']:.3f}") if r else ("-",) * 4)))
    yield from _table(("source", "direction", "sequence pairs", "groups of plans", "regret, mean", "worst", "a plan by chance"), body)
    yield ""
    yield "By setting: " + ", ".join(f"{name} {hits} of {n}" for name, (hits, n) in summary["all"]["direction"].items()) + "."


def oom(summary: dict[str, Any]) -> Iterator[str]:
    yield from _table(("verdict", "rows"), [(name, str(n)) for name, n in summary["all"]["oom"].items()])


def refused(summary: dict[str, Any]) -> Iterator[str]:
    yield from _table(("rows", "refused because"), [(str(n), reason) for reason, n in summary["all"]["refused"].items()])


def rows(summary: dict[str, Any]) -> Iterator[str]:
    whole = summary["all"]
    yield f"{whole['records']} records: {whole['used']} predicted, {whole['records'] - whole['used']} refused."


def fitted(_: dict[str, Any]) -> Iterator[str]:
    """Cross-validated errors of the shipped profiles' fit, from published/fitted.json."""
    found = json.loads((PUBLISHED / "fitted.json").read_text(encoding="utf-8"))
    body = []
    for source, one in found["runs"]["model"].items():
        other = found["runs"]["source"][source]
        body.append((source, str(one["figures"]), *(percent(v) for v in (one["before"], one["after"], other["after"], one["covered"], one["half_width"]))))
    body += [(source, str(one["figures"]), percent(one["before"]), percent(one["after"]), "-", percent(one["covered"]), percent(one["half_width"]))
             for source, one in found["tables"]["twin"].items()]
    yield from _table(("source", "figures", "before", "after, left out", "after, source left out", "in the interval", "its half-width"), body)


BLOCKS: dict[str, Callable[[dict[str, Any]], Iterator[str]]] = {"rows": rows, "errors": errors, "choice": choice, "oom": oom, "refused": refused,
                                                                "fitted": fitted}
