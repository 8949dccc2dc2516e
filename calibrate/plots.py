"""Plots of characters: measured against predicted, and how residuals are spread."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

MARKS = ".:*#"
"""One point, a few, more, many in one cell."""


def scatter(pairs: Sequence[tuple[float, float]], width: int = 64, height: int = 20, unit: str = "s") -> Iterator[str]:
    """Predicted over measured, both logarithmic; the diagonal is where they agree."""
    values = [v for pair in pairs for v in pair if v > 0]
    if not values:
        return
    low, high = math.log(min(values)), math.log(max(values))
    span = (high - low) or 1.0
    cells: dict[tuple[int, int], int] = {}
    for measured, predicted in pairs:
        column, row = (round((math.log(v) - low) / span * (size - 1)) for v, size in ((measured, width), (predicted, height)))
        cells[column, row] = cells.get((column, row), 0) + 1
    for row in reversed(range(height)):
        line = []
        for column in range(width):
            count = cells.get((column, row), 0)
            on_diagonal = round(column / (width - 1) * (height - 1)) == row
            line.append(MARKS[min(len(MARKS) - 1, count.bit_length() - 1)] if count else "/" if on_diagonal else " ")
        label = f"{math.exp(low + span * row / (height - 1)):9.3g}" if row in (0, height - 1) or row == height // 2 else " " * 9
        yield f"{label} |{''.join(line)}".rstrip()
    yield f"{'':9} +{'-' * width}"
    yield f"{'':9}  {math.exp(low):<9.3g}{f'measured, {unit} (predicted upwards)':^{width - 18}}{math.exp(high):>9.3g}"


def histogram(residuals: Sequence[float], width: int = 50) -> Iterator[str]:
    """How many relative errors, predicted / measured - 1, lie in each band."""
    edges = (-math.inf, -0.5, -0.25, -0.1, -0.05, 0.0, 0.05, 0.1, 0.25, 0.5, 1.0, math.inf)
    errors = [math.expm1(r) for r in residuals if math.isfinite(r)]
    counts = [sum(low <= e < high for e in errors) for low, high in pairwise(edges)]
    most = max(counts, default=0) or 1
    for (low, high), count in zip(pairwise(edges), counts, strict=True):
        left, right = (f"{100 * edge:+.0f}%" if math.isfinite(edge) else "" for edge in (low, high))
        yield f"  {left:>6} to {right:<6} {count:5}  {'#' * round(width * count / most)}".rstrip()
