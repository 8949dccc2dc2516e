"""Which tokens go to which expert rank, as far as bytes and time need it: how many rows each rank of an expert-parallel group gets."""

import math

from costmodel.spec.base import PlanError


def busiest_rows(rows: int, ranks: int, imbalance: float) -> int:
    """Of `rows` routed rows of one rank, those that go to the busiest rank of its expert-parallel group: `imbalance` times the even share."""
    return min(rows, -(-rows // ranks) if imbalance == 1.0 else round(imbalance * rows / ranks))


def slots(rows: int, experts: int, factor: float) -> int:
    """Rows that each expert takes from one rank that routes `rows` of them: the even share times the capacity factor; what is over is dropped, what is
    missing padded (arXiv 2006.16668, section 3.2)."""
    return math.ceil(factor * rows / experts)


def rows_by_rank(rows: int, ranks: int, imbalance: float) -> list[int]:
    """How many of one rank's `rows` routed rows go to each rank of its expert-parallel group: the first is the busiest, the others share the rest."""
    if ranks == 1:
        return [rows]
    first = busiest_rows(rows, ranks, imbalance)
    each, more = divmod(rows - first, ranks - 1)
    return [first, *(each + (i < more) for i in range(ranks - 1))]


def checked_imbalance(imbalance: float, ranks: int) -> PlanError | None:
    """The busiest of n ranks cannot have more than n even shares."""
    if ranks == 1 or imbalance <= ranks:
        return None
    return PlanError("recipe.moe_imbalance", imbalance, f"the busiest of ep = {ranks} ranks has at most {ranks} times the even share.",
                     f"Use moe_imbalance <= {ranks}.")
