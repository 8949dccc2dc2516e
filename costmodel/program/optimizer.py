"""The optimizer on one rank: the state it keeps and the kernels of its update."""

from typing import NamedTuple

from costmodel.program.host import DTENSOR, PLACED, work
from costmodel.program.ir import Op, Tensor
from costmodel.spec import DTYPE_BYTES, OptimizerSpec

STATES = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2, "adam8bit": 2}
BLOCK = 256
"""adam8bit: elements that share one fp32 scale (bitsandbytes' blockwise quantisation; torchao's default for 8-bit Adam)."""


class Update(NamedTuple):
    """What one rank updates."""

    numel: int
    """Elements whose state this rank keeps."""
    tensors: int
    largest: int
    """Elements of the largest tensor among them."""
    param: str
    """dtype of what is updated: the master copy where there is one."""
    grad: str
    state: str
    low: str | None = None
    """dtype of a low-precision copy that the update also writes."""
    steps_on_device: bool = True
    """Step counters live on the device (fused kernels; CPU runs); foreach and for-loop keep them on the host."""
    matrices: int = 0
    """Muon: elements among them that it updates; AdamW has the rest."""
    matrix_tensors: int = 0
    placed: bool = False
    """They are DTensors."""


def state_tensors(spec: OptimizerSpec, u: Update) -> list[Tensor]:
    """Optimizer state of a rank, without master weights.

    SGD none, momentum one buffer, Adam and AdamW two moments and a 4-byte step per tensor, 8-bit Adam two int8 moments with
    one fp32 scale per block; Muon one buffer for its matrices, and AdamW's for the rest.
    """
    e = DTYPE_BYTES[u.state]
    if spec.name == "sgd" or u.numel == 0:
        return []
    if spec.name == "muon":
        rest = u._replace(numel=u.numel - u.matrices, tensors=u.tensors - u.matrix_tensors)
        return [Tensor("momentum", "optimizer", u.matrices * e), *_adam_state(rest, e)]
    if spec.name == "momentum":
        return [Tensor("momentum", "optimizer", u.numel * e)]
    if spec.name == "adam8bit":
        scales = -(-u.numel // BLOCK) * 4
        return [Tensor("exp_avg", "optimizer", u.numel + scales), Tensor("exp_avg_sq", "optimizer", u.numel + scales)]
    return _adam_state(u, e)


def _adam_state(u: Update, e: int) -> list[Tensor]:
    moments = [Tensor("exp_avg", "optimizer", u.numel * e), Tensor("exp_avg_sq", "optimizer", u.numel * e)]
    return [*moments, Tensor("step", "optimizer", 4 * u.tensors)] if u.steps_on_device else moments


def update_ops(spec: OptimizerSpec, u: Update, *, first: bool) -> list[Op]:
    """The kernels of one update.

    fused: one pass that reads parameter, gradient and states and writes parameter and states. foreach: a pass for each
    elementary operation, and for Adam a temporary of one whole state (the square root of the second moment). for-loop: the
    same per tensor, two temporaries of the largest tensor. The state appears in the first step.
    """
    if u.numel == 0:
        return []
    p, g, s = (u.numel * DTYPE_BYTES[d] for d in (u.param, u.grad, u.state))
    states = STATES[spec.name]
    created = tuple(state_tensors(spec, u)) if first else ()
    low = float(u.numel * DTYPE_BYTES[u.low]) if u.low else 0.0
    ops = [Op("optimizer.host", "host", kernels=u.tensors, allocs=created)]
    if u.placed:
        ops.append(work("optimizer.placed", PLACED, u.tensors))
    if spec.name == "adam8bit":
        moved = float(2 * p + g + 4 * u.numel) + low
        return [*ops, Op("optimizer.update", "memory", 12.0 * u.numel, moved, dtype=u.param, kernels=max(1, u.tensors))]
    if spec.implementation == "fused":
        chunks = max(1, -(-u.tensors // 30))
        return [*ops, Op("optimizer.update", "memory", 12.0 * u.numel, float(2 * p + g + 2 * states * s) + low, dtype=u.param, kernels=chunks)]
    decay = 2.0 * p if spec.weight_decay and spec.name == "adamw" else 0.0
    if states == 2:
        passes = 3.0 * s + g + 2.0 * s + 2.0 * s + g + 6.0 * s + (2.0 * p + 2.0 * s) + decay + low
        kernels_each = 7
    elif states == 1:
        passes, kernels_each = 2.0 * s + 2.0 * s + g + 2.0 * p + s + low, 3
    else:
        passes, kernels_each = 2.0 * p + g + low, 1
    if spec.implementation == "foreach":
        temp = (Tensor("optimizer.sqrt", "temporaries", s),) if states == 2 else ()
        kernels = kernels_each * max(1, -(-u.tensors // 30))
    else:
        temp = (Tensor("optimizer.sqrt", "temporaries", 2 * u.largest * DTYPE_BYTES[u.state]),) if states == 2 else ()
        kernels = kernels_each * u.tensors
    return [*ops, Op("optimizer.update", "memory", 12.0 * u.numel, passes, dtype=u.param, kernels=kernels, allocs=temp, frees=temp)]


def clip_ops(numel: int, tensors: int, grad: str, *, placed: bool = False) -> list[Op]:
    """clip_grad_norm_: a norm of every gradient, the total, and a scaling of all of them; no temporaries of their size. Of DTensors (`placed`) the
    total is one too, stacked and made whole."""
    g = float(numel * DTYPE_BYTES[grad])
    chunks = max(1, -(-tensors // 30))
    host = [work("clip.placed", PLACED, tensors), work("clip.dtensor", DTENSOR, 2)] if placed else []
    return [Op("clip.norm", "memory", 2.0 * numel, g, dtype=grad, kernels=chunks + 3),
            Op("clip.scale", "memory", 1.0 * numel, 2.0 * g, dtype=grad, kernels=chunks), *host]
