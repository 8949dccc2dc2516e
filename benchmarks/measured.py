"""Records of performed steps beside their predictions: time, allocated and reserved memory, and what did not fit.

    python benchmarks/measured.py [FOLDER or FILE ...] [--json]     default: benchmarks/measured

Time of a rank that was alone is compared with the predicted step less what only company costs.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from costmodel import predict
from costmodel.records import Record, RecordError, read_record, read_records
from costmodel.spec import PlanError
from execute.compare import compare

MEASURED = Path(__file__).resolve().parent / "measured"
FIGURES = ("time", "allocated", "reserved")


def row_of(name: str, record: Record) -> dict[str, Any]:
    """One record: how it ended, and for each figure that both have (measured, predicted)."""
    row: dict[str, Any] = {"name": name, "outcome": record.outcome.kind, "predicted": "", **dict.fromkeys(FIGURES)}
    try:
        report = predict(record.run)
    except PlanError as error:
        return {**row, "predicted": f"refused: {error.field}"}
    row["predicted"] = report.verdict
    if record.report is not None:
        comparison = compare(report, record.report)
        row["time"] = next(((s.observed, s.predicted) for s in comparison.seconds), None)
        for figure, title in (("allocated", "peak"), ("reserved", "reserved")):
            found = next((r for r in comparison.rows if r.name == title), None)
            row[figure] = None if found is None or not found.observed else (found.observed, found.predicted)
    return row


def lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A table for people, with the mean absolute error of each figure below it."""
    yield (f"{'record':<44} {'ended':<11} {'prediction':<13} {'step ms':>9} {'pred.':>9} {'':>7} {'alloc GiB':>9} {'pred.':>9} {'':>7} "
           f"{'res. GiB':>9} {'':>7}").rstrip()
    for row in rows:
        cells = [f"{row['name']:<44} {row['outcome']:<11} {row['predicted']:<13}"]
        cells.append(_pair(row["time"], 1e3, 9, 2))
        cells.append(_pair(row["allocated"], 1 / (1 << 30), 9, 3))
        cells.append(_pair(row["reserved"], 1 / (1 << 30), 9, 3, predicted=False))
        yield " ".join(cells).rstrip()
    for figure in FIGURES:
        errors = [abs(predicted / measured - 1) for measured, predicted in (row[figure] for row in rows if row[figure])]
        if errors:
            yield f"{figure}: mean error {fmean(errors):.1%} over {len(errors)}"
    verdicts = [row for row in rows if row["predicted"] in ("fits", "does not fit") and row["outcome"] in ("ok", "oom")]
    wrong = [row["name"] for row in verdicts if (row["outcome"] == "oom") != (row["predicted"] == "does not fit")]
    if verdicts:
        yield f"fits or not: {'wrong for ' + ', '.join(wrong) if wrong else 'right for all'}"


def _pair(pair: tuple[float, float] | None, scale: float, width: int, digits: int, predicted: bool = True) -> str:
    if pair is None:
        return f"{'-':>{width}} " + (f"{'-':>{width}} " if predicted else "") + f"{'':>7}"
    measured, other = pair
    middle = f"{other * scale:>{width}.{digits}f} " if predicted else ""
    return f"{measured * scale:>{width}.{digits}f} {middle}{other / measured - 1:>+7.1%}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Records beside their predictions.")
    parser.add_argument("places", type=Path, nargs="*", default=[MEASURED])
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    try:
        records = [found for place in args.places for found in (read_records(place) if place.is_dir() else [(place, read_record(place))])]
    except RecordError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows = [row_of(path.stem, record) for path, record in records]
    print(json.dumps(rows, indent=1) if args.json else "\n".join(lines(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
