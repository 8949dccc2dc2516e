"""Work of the host alone: what causes it, and what one unit of it is.

PyTorch's strategies are written in Python, and what they do beside launching kernels takes the host time: a GPU waits for it where kernels are
small, a CPU's one thread always does. A program has it where the strategy does it, as ops of kind host; the profile says what a unit takes.
"""

from costmodel.program.ir import Op
from costmodel.program.tape import Back, Tape

TENSOR = ""
"""A tensor in an optimizer's lists."""
COMPILE = "compile"
"""A call of a compiled region: its guards, or the launch of its graph."""
DTENSOR = "dtensor"
"""A module whose parameters are DTensors, or a redistribution between two placements, with all that DTensor dispatches for it."""
PLACED = "placed"
"""A DTensor among those that an update or a clipping takes: its local part is looked up, and its placement checked."""
FSDP_HOOK = "fsdp"
"""A hook of fully_shard around a group's forward or backward."""
CONTEXT = "context"
"""A tensor that context parallelism exchanges in an attention (keys, values; with Ulysses queries and outputs too), step by step in Python."""
IN_PYTHON = (DTENSOR, FSDP_HOOK, CONTEXT)
"""Causes whose units take other times in forward and in backward: the constants host.<cause>.forward_s and host.<cause>.backward_s."""


def work(name: str, cause: str, units: int = 1) -> Op:
    """The op of some units."""
    return Op(name, "host", kernels=units, axis=cause)


def record(tape: Tape, name: str, cause: str, forward: int, backward: int) -> None:
    """Units in a recorded unit's forward, and in its backward."""
    tape.record(name, "host", (), (), kernels=forward, axis=cause, backs=(Back("host", "host", kernels=backward),) if backward else ())
