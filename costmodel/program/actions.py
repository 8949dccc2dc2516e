"""What a pipeline rank does: forward of a micro-batch on a stage, its backward whole, or that in two passes."""

from typing import NamedTuple

FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"
"""BACKWARD gives the gradients of input and weights at once; INPUT that of the input, which the stage before waits for; WEIGHT those of the
weights, for which nobody waits. The letters are torch.distributed.pipelining's."""


class Action(NamedTuple):
    """One pass of one micro-batch through one stage."""

    kind: str
    stage: int
    micro: int
