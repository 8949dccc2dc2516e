"""What to change so that a run fits, or is faster, with the price of each change."""

from costmodel.advice.ladders import Change, savings, speedups
from costmodel.advice.search import Advice, Suggestion, advise

__all__ = ["Advice", "Change", "Suggestion", "advise", "savings", "speedups"]
