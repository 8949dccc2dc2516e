"""Backward of a unit in two passes, as PyTorch's zero-bubble schedules run it: gradients of inputs, then those of weights.

The first pass is torch.autograd.grad of the stage's input with retain_graph=True: it frees nothing that was saved, and keeps the gradient of
every output from which a weight's gradient will be made; gradients that meet a kept one are added out of place. The second starts from those,
weight by weight in the order of the model, forward: each op frees what it saved and the gradient it was given. All else that was saved goes
when the graph does, at the end of the stage's second pass; what lies above the last weight (the loss) goes with the first.
Source: torch/distributed/pipelining/_backward.py, stage_backward_input and stage_backward_weight (2.13).
"""

from typing import NamedTuple

from costmodel.program.ir import Op, Tensor
from costmodel.program.tape import Back, Gradient, GradReady, Node, Tape, Value, meet, param_uses


class Halves(NamedTuple):
    """The two passes of a unit's backward."""

    inputs: tuple[Op, ...]
    above: tuple[Tensor, ...]
    """Saved above the unit's last weight: freed with the first pass where the unit ends the stage, else with the second."""
    weights: tuple[Op | GradReady, ...]
    rest: tuple[Tensor, ...]
    """Saved, and freed when the stage's second pass is done."""


def halves(tape: Tape, output: Value, entry: Value | None, *, free_entry: bool, owned: bool) -> Halves:
    """From the gradient of `output` (freed by the passes if `owned`) to that of `entry`, which stays for the caller."""
    kept: dict[int, list[Gradient]] = {}
    inputs = _inputs(tape, output, owned, kept)
    last = max((i for i, node in enumerate(tape.nodes) if _weights(node)), default=-1)
    weights, left = _gradients_of_weights(tape, kept, {v for node in tape.nodes for v in node.saved if not v.outside or (free_entry and v is entry)})
    above: list[Tensor] = []
    rest: list[Tensor] = []
    for value, index in left.items():
        (above if index > last else rest).append(Tensor(value.name, "activations", value.own_bytes))
    for index, node in enumerate(tape.nodes):
        if not _weights(node):
            (above if index > last else rest).extend(node.extra)
    return Halves(tuple(inputs), tuple(above), tuple(weights), tuple(rest))


def _weights(node: Node) -> list[Back]:
    """What of a node's backward makes gradients of weights."""
    made = [back for back in node.backs if not isinstance(back.gives, int) and not back.joins and not back.release]
    return made if any(back.gives is not None for back in made) else []


def _inputs(tape: Tape, output: Value, owned: bool, kept: dict[int, list[Gradient]]) -> list[Op]:
    """The first pass; `kept` gets, for each node with weights, the gradients of its outputs."""
    grads: dict[int, Gradient] = {id(output): Gradient(f"grad:{output.name}", output.nbytes)} if output.grad else {}
    if not owned:
        for grad in grads.values():
            grad.refs += 1
    ops: list[Op] = []
    for index in range(len(tape.nodes) - 1, -1, -1):
        node = tape.nodes[index]
        sums: list[Op | GradReady] = []
        given = [tape.summed(v, grads.pop(id(v)), sums, []) for v in node.outputs if id(v) in grads]
        ops += [op for op in sums if isinstance(op, Op)]
        meetings: list[Op] = []
        frees: list[Tensor] = []
        start = len(ops)
        joined: list[Gradient] = []
        for back in node.backs:
            if back.joins:
                whole = Gradient(f"grad:{node.name}", back.temp_bytes)
                joined.append(whole)
                ops.append(_op(node, back, (Tensor(whole.name, "temporaries", whole.nbytes),), ()))
            if node.axis:
                ops.append(_op(node, back, (), ()))
            if not isinstance(back.gives, int) or not node.inputs[back.gives].grad:
                continue
            target = node.inputs[back.gives]
            made = given[0] if back.alias else Gradient(f"grad:{target.name}", target.nbytes)
            made.refs += back.alias
            temp = back.temp_bytes - sum(g.nbytes for g in joined)
            passing = (Tensor(f"{node.name}.{back.name}.temp", "temporaries", temp),) if temp > 0 else ()
            if not back.alias:
                ops.append(_op(node, back, (*passing, Tensor(made.name, "temporaries", made.nbytes)), passing))
            old = grads.get(id(target))
            if old is None:
                grads[id(target)] = made
            else:
                meetings.append(meet(grads, target, old, made))
        if _weights(node):
            kept[index] = joined or given
            for grad in kept[index]:
                grad.refs += not joined
        for grad in given:
            grad.refs -= 1
            if not grad.refs:
                frees.append(Tensor(grad.name, "temporaries", grad.nbytes))
        if frees and len(ops) > start:
            ops[-1] = ops[-1].freeing(tuple(frees))
        elif frees:
            ops.append(Op(f"{node.name}.release", "host", kernels=0, frees=tuple(frees)))
        ops += meetings
    return ops


def _gradients_of_weights(tape: Tape, kept: dict[int, list[Gradient]], mine: set[Value]) -> tuple[list[Op | GradReady], dict[Value, int]]:
    """The second pass, and which of the saved values to free (`mine`) it leaves, each with the last node that saved it."""
    remaining: dict[Value, int] = {}
    saver: dict[Value, int] = {}
    for index, node in enumerate(tape.nodes):
        for v in node.saved:
            if v in mine:
                remaining[v] = remaining.get(v, 0) + 1
                saver[v] = index
    pending = param_uses(tape.nodes)
    ops: list[Op | GradReady] = []
    for index, node in enumerate(tape.nodes):
        made = _weights(node)
        if not made or index not in kept:
            continue
        frees = list(node.extra)
        for v in node.saved:
            if v in mine:
                remaining[v] -= 1
                if not remaining[v]:
                    frees.append(Tensor(v.name, "activations", v.own_bytes))
                    del saver[v]
        for grad in kept[index]:
            grad.refs -= 1
            if not grad.refs:
                frees.append(Tensor(grad.name, "temporaries", grad.nbytes))
        joined = sum(back.temp_bytes for back in node.backs if back.joins)
        for back in made:
            temp = back.temp_bytes - joined
            passing = (Tensor(f"{node.name}.{back.name}.temp", "temporaries", temp),) if temp > 0 else ()
            ops.append(_op(node, back, passing, passing))
            if back.gives is not None:
                assert not isinstance(back.gives, int)
                pending[back.gives.name] -= 1
                nbytes = (back.grad_numel or back.gives.numel) * tape.element_bytes[back.dtype]
                ops.append(GradReady(back.gives, back.dtype, nbytes, pending[back.gives.name] > 0))
        ops.append(Op(f"{node.name}.release", "host", kernels=0, frees=tuple(frees)))
    return ops, saver


def _op(node: Node, back: Back, allocs: tuple[Tensor, ...], frees: tuple[Tensor, ...]) -> Op:
    return Op(f"{node.name}.{back.name}", back.kind, back.flops, back.nbytes, back.dims, back.dtype, back.kernels, allocs, frees,  # type: ignore[arg-type]
              back.comm, axis=node.axis)
