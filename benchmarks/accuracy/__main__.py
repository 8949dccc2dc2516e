"""python -m benchmarks.accuracy [--records FILE.jsonl] [--rows OUT.jsonl] [--json] [--plot DIR] [--worst 20] [--docs PAGE]

Predicts every published record and reports how far off it is. Exit 1 where a prediction failed with an error of its own.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.accuracy.assumptions import PUBLISHED, RULES_FILE, load_rules
from benchmarks.accuracy.markdown import fill
from benchmarks.accuracy.score import line, load_records, score_all
from benchmarks.accuracy.statistics import summary
from benchmarks.accuracy.text import report


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description="Predictions against published measurements.")
    parser.add_argument("--records", type=Path, default=PUBLISHED / "runs.jsonl", help="records to predict (.jsonl or .jsonl.gz)")
    parser.add_argument("--assumptions", type=Path, default=RULES_FILE, help="rules for what the records leave unsaid (.toml)")
    parser.add_argument("--rows", type=Path, help="write one line of JSON per record to this file")
    parser.add_argument("--as-records", type=Path, metavar="OUT.jsonl", help="write the step times as records that `calibrate fit` reads, and nothing else")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.add_argument("--plot", type=Path, help="write plots of predicted against measured (.svg) into this folder")
    parser.add_argument("--docs", type=Path, help="fill the tables of this page (docs/accuracy.md)")
    parser.add_argument("--worst", type=int, default=20, help="how many of the rows furthest off to show")
    args = parser.parse_args(argv)
    if args.as_records:
        from benchmarks.accuracy.evidence import published_records
        found_records = published_records(load_records(args.records), load_rules(args.assumptions))
        args.as_records.write_text("".join(json.dumps(record.to_dict()) + "\n" for record in found_records), encoding="utf-8")
        return 0
    rows = score_all(load_records(args.records), load_rules(args.assumptions))
    if args.rows:
        args.rows.write_text("".join(json.dumps(line(row)) + "\n" for row in rows), encoding="utf-8")
    if args.plot:
        from benchmarks.accuracy.plot import plot_all
        print(f"{len(plot_all(rows, args.plot))} plots in {args.plot}", file=sys.stderr)
    found = summary(rows)
    if args.docs:
        fill(args.docs, found)
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        print("\n".join(report(rows, found, args.worst)))
    return 1 if any((row.refused or "").startswith("failed") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
