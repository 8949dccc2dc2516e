"""Plots of predicted against measured as plain SVG, both axes logarithmic."""

import math
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from benchmarks.accuracy.score import Row
from benchmarks.accuracy.statistics import KINDS, errors_of, pairs_of

SIZE, LEFT, TOP, RIGHT, BOTTOM = 420, 62, 34, 14, 48
BAND = 0.10


def plot_all(rows: Sequence[Row], folder: Path) -> list[Path]:
    """One file per source and kind of figure with at least two rows."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for publisher in dict.fromkeys(row.publisher for row in rows):
        own = [row for row in rows if row.publisher == publisher]
        for kind in KINDS:
            if len(pairs_of(own, kind)) > 1:
                name = re.sub(r"[^a-z0-9]+", "-", f"{publisher} {kind}".lower()).strip("-")
                path = folder / f"{name}.svg"
                path.write_text(scatter(own, publisher, kind), encoding="utf-8")
                written.append(path)
    return written


def scatter(rows: Sequence[Row], title: str, kind: str) -> str:
    """Predicted over measured: the diagonal, a band of 10%, a dot a row; doubtful rows are hollow."""
    name, topic = ("time" if kind.startswith("time") else kind), "time" if kind.startswith("time") else "memory"
    chosen = set(map(id, pairs_of(rows, kind)))
    points = [(pair.measured, pair.predicted, topic in row.suspect, row.id) for row in rows if (pair := row.figure(name)) and id(pair) in chosen]
    values = [v for x, y, *_ in points for v in (x, y)]
    low, high = min(values) / 1.15, max(values) * 1.15
    unit = "step time, s" if topic == "time" else f"{kind} memory, GiB"
    inner = SIZE - LEFT - RIGHT
    height = TOP + inner + BOTTOM

    def x_of(value: float) -> float:
        return LEFT + inner * math.log(value / low) / math.log(high / low)

    def y_of(value: float) -> float:
        return TOP + inner * (1 - math.log(value / low) / math.log(high / low))

    found = errors_of(pairs_of(rows, kind))
    assert found
    band = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in ((low, low), (low, low * (1 + BAND)), (high / (1 + BAND), high), (high, high),
                                                                (high, high * (1 - BAND)), (low / (1 - BAND), low)))
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIZE} {height}" width="{SIZE}" height="{height}" font-family="sans-serif">',
           f'<rect width="{SIZE}" height="{height}" fill="#ffffff"/>',
           f'<text x="{LEFT}" y="20" font-size="13" fill="#1f2328">{escape(title)}: {escape(unit)}, {found.count} rows, '
           f'mean error {100 * found.mean_abs:.1f}%</text>',
           f'<polygon points="{band}" fill="#eaeef2"/>',
           f'<line x1="{x_of(low):.1f}" y1="{y_of(low):.1f}" x2="{x_of(high):.1f}" y2="{y_of(high):.1f}" stroke="#8c959f"/>',
           f'<rect x="{LEFT}" y="{TOP}" width="{inner}" height="{inner}" fill="none" stroke="#8c959f"/>']
    for tick in ticks(low, high):
        label = f"{tick:g}"
        out.append(f'<text x="{x_of(tick):.1f}" y="{TOP + inner + 16}" font-size="11" text-anchor="middle" fill="#57606a">{label}</text>')
        out.append(f'<text x="{LEFT - 6}" y="{y_of(tick) + 4:.1f}" font-size="11" text-anchor="end" fill="#57606a">{label}</text>')
    for x, y, doubtful, label in points:
        fill = "none" if doubtful else "#0969da"
        out.append(f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="3" fill="{fill}" fill-opacity="0.6" stroke="#0969da" stroke-width="0.8">'
                   f'<title>{escape(label)}: {y:.4g} for {x:.4g}</title></circle>')
    out.append(f'<text x="{LEFT + inner / 2}" y="{height - 12}" font-size="12" text-anchor="middle" fill="#1f2328">measured (band: 10%)</text>')
    out.append(f'<text x="16" y="{TOP + inner / 2}" font-size="12" text-anchor="middle" fill="#1f2328" '
               f'transform="rotate(-90 16 {TOP + inner / 2})">predicted</text></svg>')
    return "\n".join(out) + "\n"


def ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 of each decade inside the range, or finer where it is narrow."""
    for steps in ((1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8), tuple(i / 10 for i in range(10, 100, 2)), tuple(i / 20 for i in range(20, 200))):
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        found = [step * 10.0**d for d in decades for step in steps if low <= step * 10.0**d <= high]
        if len(found) >= 3:
            return found
    return found
