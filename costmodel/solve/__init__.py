"""Searches over runs: the largest or smallest value that still fits, and every plan of a job's GPUs."""

from costmodel.solve.limits import Bound, Quantity, Solution, fewest_gpus, largest
from costmodel.solve.plans import Choice, Plans, plans
from costmodel.solve.trials import Progress, Watch, fits

__all__ = ["Bound", "Choice", "Plans", "Progress", "Quantity", "Solution", "Watch", "fewest_gpus", "fits", "largest", "plans"]
