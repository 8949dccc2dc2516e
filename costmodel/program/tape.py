"""A tape: forward operations are recorded, and autograd's backward is derived from it.

Written as PyTorch runs: an op may save tensors for its backward; a saved tensor lives until the backward of the op that
saved it; everything else dies after its last use. In backward the engine visits ops in reverse order, hands each the
gradient of its output, frees what it saved, and adds gradients that meet at a fan-out in place.
"""

from typing import NamedTuple

from costmodel.program.ir import Comm, Op, Tensor
from costmodel.spec.parameters import Param


class Value:
    """A tensor of the forward program."""

    __slots__ = ("name", "numel", "ebytes", "dtype", "grad", "saves", "saved_first", "last_use", "made_by", "outside", "own_bytes", "grad_comm",
                 "grad_in_place", "regather", "base", "read_bytes")

    def __init__(self, name: str, numel: int, dtype: str, ebytes: int, grad: bool, outside: bool, read_bytes: int = 0) -> None:
        self.name = name
        self.numel = numel
        self.dtype = dtype
        self.ebytes = ebytes
        self.grad = grad
        """A gradient flows to it."""
        self.saves = 0
        """How many recorded ops saved it."""
        self.saved_first = -1
        """The first of them, whose backward is the last to need it."""
        self.last_use = -1
        self.made_by = -1
        self.outside = outside
        """Owned by another block: an input, or a constant."""
        self.own_bytes: int = numel * ebytes
        """What it keeps allocated: its own bytes, unless it is a view of something else."""
        self.grad_comm: Comm | None = None
        """Its gradient, once complete, is summed over a group by this collective."""
        self.grad_in_place = False
        """That collective works in place, where the gradient belongs to nobody else."""
        self.regather: Value | None = None
        """Whoever would save it saves this instead, and backward gathers it again."""
        self.base: Value | None = None
        """It is a view of this, and keeps all of it alive."""
        self.read_bytes = read_bytes
        """Compiled: the kernel that reads its gradient adds up those that meet, and reads so many bytes an element of each; 0: a kernel adds them."""

    @property
    def nbytes(self) -> int:
        return self.numel * self.ebytes


class Back(NamedTuple):
    """One kernel of an op's backward: what it computes, and which gradient it gives.

    `gives` is an index into the op's inputs, a Param, or None; `alias` passes the output's gradient on without a copy.
    """

    name: str
    kind: str
    gives: "int | Param | None" = None
    flops: float = 0.0
    nbytes: float = 0.0
    dims: tuple[int, ...] = ()
    dtype: str = "fp32"
    kernels: int = 1
    alias: bool = False
    temp_bytes: int = 0
    comm: Comm | None = None
    grad_numel: int = 0
    """Elements of the gradient it gives, where that is not the parameter's size."""
    release: bool = False
    """Only frees what the node kept for backward, which what follows re-uses in place."""
    event: str = ""
    """collective: what it signals when done, without being waited for; wait: what is waited for."""
    opens: Tensor | None = None
    """Left for a later kernel of this backward, which closes it."""
    closes: Tensor | None = None
    beside: bool = False
    """Runs beside the collective that the gradient of the node's input needs, if one does."""
    again: bool = False
    """Computes an activation a second time."""
    apart: bool = False
    """A node of its own that runs next: what this node kept is released before it."""
    joins: bool = False
    """Makes one gradient of those of several outputs, of `temp_bytes`; the kernels that follow work on it."""


class Node(NamedTuple):
    """One recorded op."""

    name: str
    kind: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    saved: tuple[Value, ...]
    extra: tuple[Tensor, ...]
    """Saved tensors that exist only for backward: masks, statistics, log-sum-exp."""
    backs: tuple[Back, ...]
    flops: float
    nbytes: float
    dims: tuple[int, ...]
    dtype: str
    kernels: int
    temp_bytes: int
    comm: Comm | None
    inner: "Inner | None" = None
    """Ops of its own that are checkpointed: they run in forward without saving, and again before their backward."""
    event: str = ""
    """collective: what it signals when done, without being waited for; wait: what is waited for."""
    axis: str = ""
    """host: what causes the work."""


class Inner(NamedTuple):
    """A checkpointed stretch within a unit: its tape, its inputs there, its output there."""

    tape: "Tape"
    entries: tuple[Value, ...]
    exit: Value


class GradReady(NamedTuple):
    """A marker in the backward program: the gradient of this parameter was just produced, in this dtype."""

    param: Param
    dtype: str
    nbytes: int
    shared: bool
    """More contributions to it follow (a weight that is used more than once)."""


class Tape:
    """Records one unit (embedding, layer, head) and reads it back as forward, recompute or backward ops."""

    def __init__(self, element_bytes: dict[str, int], compiled: bool = False) -> None:
        self.nodes: list[Node] = []
        self.element_bytes = element_bytes
        self.compiled = compiled
        self.held: list[Value] = []
        self.marked = False
        """Some of its nodes are marks, which a strategy replaces by what it does there."""

    def input(self, name: str, numel: int, dtype: str, grad: bool = True) -> Value:
        """A tensor that comes from another unit."""
        width = self.element_bytes[dtype]
        return Value(name, numel, dtype, width, grad, True, width if self.compiled else 0)

    def value(self, name: str, numel: int, dtype: str, grad: bool = True) -> Value:
        """A tensor that an op of this tape will make."""
        width = self.element_bytes[dtype]
        return Value(name, numel, dtype, width, grad, False, width if self.compiled else 0)

    def record(self, name: str, kind: str, inputs: tuple[Value, ...], outputs: tuple[Value, ...], *, saved: tuple[Value, ...] = (),
               extra: tuple[Tensor, ...] = (), backs: tuple[Back, ...] = (), flops: float = 0.0, nbytes: float = 0.0,
               dims: tuple[int, ...] = (), dtype: str = "fp32", kernels: int = 1, temp_bytes: int = 0, comm: Comm | None = None,
               event: str = "", axis: str = "") -> None:
        index = len(self.nodes)
        for v in inputs:
            v.last_use = index
            if v.base is not None:
                v.base.last_use = index
                saved = tuple([s.base or s for s in saved])
        for v in outputs:
            v.made_by = index
            v.last_use = max(v.last_use, index)
        if len(saved) > 1:
            saved = tuple(dict.fromkeys(saved))
        for v in saved:
            if not v.saves:
                v.saved_first = index
            v.saves += 1
        self.nodes.append(Node(name, kind, inputs, outputs, saved, extra, backs, flops, nbytes, dims, dtype, kernels, temp_bytes, comm, None, event, axis))

    def mark(self, name: str) -> None:
        """A place where a strategy acts, in forward and in backward."""
        self.record(name, "mark", (), ())
        self.marked = True

    def record_checkpointed(self, name: str, inputs: tuple[Value, ...], output: Value, inner: Inner) -> None:
        """A stretch that keeps only its inputs (torch.utils.checkpoint, non-reentrant)."""
        self.record(name, "memory", inputs, (output,), saved=inputs, kernels=0)
        self.nodes[-1] = self.nodes[-1]._replace(inner=inner)

    def take_back(self) -> Node:
        """Withdraw the last recorded node, for a caller that records it differently."""
        node = self.nodes.pop()
        for v in node.saved:
            v.saves -= 1
        return node

    def forward(self, keep: tuple[Value, ...], *, save: bool = True, until: int | None = None, drop: Value | None = None,
                cached: frozenset[int] = frozenset()) -> list[Op]:
        """Forward ops. With `save`, what autograd saves stays allocated; `keep` survives the unit in any case.

        `until` stops before that node: a checkpoint's recompute ends where the last saved tensor exists. `drop` is an input
        that nobody needs after this unit: it is freed with its last use. `cached` are nodes whose results a selective checkpoint
        keeps from forward (without `save`) and does not compute again (with it); of a matmul the result alone, not autocast's weight.
        """
        nodes = self.nodes if until is None else self.nodes[:until]
        dying: dict[int, list[Value]] = {}
        if drop is not None:
            dying[min(max(drop.last_use, 0), len(nodes) - 1)] = [drop]
        for node in nodes:
            for v in node.outputs:
                if v in keep or (save and v.saves) or (not save and v.made_by in cached):
                    continue
                dying.setdefault(min(v.last_use, len(nodes) - 1), []).append(v)
        ops: list[Op] = []
        for index, node in enumerate(nodes):
            frees = [self._tensor(v, keep, save, cached) for v in dying.get(index, ()) if v.own_bytes]
            matmul = node.kind == "matmul"
            if save and index in cached:
                made = node.extra if matmul else ()
                if frees or made:
                    ops.append(Op(node.name, "host", kernels=0, allocs=made, frees=tuple(frees)))
                continue
            if node.inner:
                output = self._tensor(node.outputs[0], keep, save, cached)
                ops += [_made_as(op, output) for op in node.inner.tape.forward((node.inner.exit,), save=False)]
                if frees:
                    ops[-1] = ops[-1].freeing(tuple(frees))
                continue
            allocs = [self._tensor(v, keep, save, cached) for v in node.outputs if v.own_bytes]
            if save or (index in cached and not matmul):
                allocs += node.extra
            elif node.extra:
                passing = [t._replace(category="temporaries") for t in node.extra]
                allocs += passing
                frees += passing
            if node.temp_bytes:
                temp = Tensor(f"{node.name}.temp", "temporaries", node.temp_bytes)
                allocs.append(temp)
                frees.append(temp)
            ops.append(Op(node.name, node.kind, node.flops, node.nbytes, node.dims, node.dtype, node.kernels,  # type: ignore[arg-type]
                          tuple(allocs), tuple(frees), node.comm, node.event, node.axis))
        return ops

    @staticmethod
    def _tensor(v: Value, keep: tuple[Value, ...], save: bool, cached: frozenset[int]) -> Tensor:
        """An activation where backward or another unit needs it, else a temporary of forward."""
        kept = v.outside or v in keep or (save and v.saves) or v.made_by in cached
        return Tensor(v.name, "activations" if kept else "temporaries", v.own_bytes)

    @property
    def recompute_until(self) -> int:
        """The node at which a non-reentrant checkpoint stops early: packing its saved input, the last one, ends the recompute."""
        for index in range(len(self.nodes) - 1, -1, -1):
            if self.nodes[index].extra or any(v.made_by >= index for v in self.nodes[index].saved):
                return index + 1
            if self.nodes[index].saved:
                return index
        return len(self.nodes)

    @staticmethod
    def summed(v: Value, grad: "Gradient", ops: "list[Op | GradReady]", beside: "list[Op | GradReady]") -> "Gradient":
        """The complete gradient of a value, after the collective that it needs."""
        if v.grad_comm is None:
            return grad
        made, name = Gradient(grad.name, grad.nbytes), f"{v.name}.grad.all_reduce"
        if v.grad_in_place and grad.refs == 1:
            ops.append(Op(name, "collective", dtype=v.dtype, comm=v.grad_comm))
        else:
            grad.refs -= 1
            frees = () if grad.refs else (Tensor(grad.name, "temporaries", grad.nbytes),)
            ops.append(Op(name, "collective", dtype=v.dtype, allocs=(Tensor(made.name, "temporaries", made.nbytes),), frees=frees, comm=v.grad_comm))
        if beside:
            _run_beside(ops, beside)
        return made

    def _inner_backward(self, node: Node, inner: Inner, grads: "dict[int, Gradient]", frees: tuple[Tensor, ...]) -> "list[Op | GradReady]":
        """A checkpointed stretch: forward again, saving, then its backward; the gradients of its inputs stay for the caller."""
        again = [op._replace(again=True) for op in inner.tape.forward((), until=inner.tape.recompute_until)]
        ops: list[Op | GradReady] = [*again, *inner.tape.backward(inner.exit)]
        if frees:
            _free_after(ops, 0, len(ops), frees, node.name)
        for v in node.inputs:
            made = Gradient(f"grad:{v.name}", v.nbytes)
            assert id(v) not in grads, "an input of a checkpointed stretch has one use"
            grads[id(v)] = made
        return ops

    def backward(self, output: Value, entry: Value | None = None, *, free_entry: bool = False, owned: bool = True) -> list[Op | GradReady]:
        """Backward ops, from the gradient of `output` (allocated by whoever made it, freed here if `owned`) to that of `entry`.

        The gradient of `entry` stays for the caller; `free_entry` says that the unit's input is released with its last use
        here (it was kept for this unit alone).
        """
        grads: dict[int, Gradient] = {}
        if output.grad:
            grads[id(output)] = Gradient(f"grad:{output.name}", output.nbytes)
            if not owned:
                grads[id(output)].refs += 1
        pending = param_uses(self.nodes)
        ops: list[Op | GradReady] = []
        beside: list[Op | GradReady] = []
        for index in range(len(self.nodes) - 1, -1, -1):
            node = self.nodes[index]
            if node.kind == "mark":
                ops.append(Op(node.name, "mark", kernels=0))
                continue
            if beside and not any(b.kind == "collective" and not b.event for b in node.backs) and not any(
                    v.grad_comm for v in node.outputs if id(v) in grads):
                ops += beside
                beside = []
            out_grads: list[Gradient] = []
            for v in node.outputs:
                grad = grads.pop(id(v), None)
                if grad is not None:
                    out_grads.append(grad if v.grad_comm is None else self.summed(v, grad, ops, beside))
            split = -1
            frees: list[Tensor] = []
            kept = node.extra
            for v in node.saved:
                if v.saved_first == index and (not v.outside or (free_entry and v is entry)):
                    frees.append(Tensor(v.name, "activations", v.own_bytes))
            if node.inner:
                ops += self._inner_backward(node, node.inner, grads, tuple(frees))
                continue
            start = end = len(ops)
            meetings: list[Op] = []
            for back in node.backs:
                if back.beside and split < 0:
                    split = len(ops)
                if back.release:
                    ops.append(Op(f"{node.name}.{back.name}", "host", kernels=0, frees=kept))
                    kept = ()
                    continue
                ready: GradReady | None = None
                allocs: tuple[Tensor, ...] = ()
                temp: tuple[Tensor, ...] = ()
                if back.temp_bytes:
                    allocs = temp = (Tensor(f"{node.name}.{back.name}.temp", "temporaries", back.temp_bytes),)
                if back.opens:
                    allocs += (back.opens,)
                if back.closes:
                    temp += (back.closes,)
                gives = back.gives
                if gives is None:
                    pass
                elif isinstance(gives, int):
                    target = node.inputs[gives]
                    if not target.grad:
                        continue
                    if back.alias:
                        made = out_grads[0]
                        made.refs += 1
                    else:
                        made = Gradient(f"grad:{target.name}", target.nbytes)
                        allocs += (Tensor(made.name, "temporaries", made.nbytes),)
                    old = grads.get(id(target))
                    if old is None:
                        grads[id(target)] = made
                    else:
                        meetings.append(meet(grads, target, old, made))
                else:
                    nbytes = (back.grad_numel or gives.numel) * self.element_bytes[back.dtype]
                    pending[gives.name] -= 1
                    ready = GradReady(gives, back.dtype, nbytes, pending[gives.name] > 0)
                if not back.alias:
                    ops.append(Op(f"{node.name}.{back.name}", back.kind, back.flops, back.nbytes, back.dims, back.dtype,  # type: ignore[arg-type]
                                  back.kernels, allocs, temp, back.comm, back.event, node.axis, back.again))
                    if beside and back.kind == "collective":
                        _run_beside(ops, beside)
                if ready:
                    ops.append(ready)
                if not back.apart:
                    end = len(ops)
            for source in out_grads:
                source.refs -= 1
                if source.refs == 0:
                    frees.append(Tensor(source.name, "temporaries", source.nbytes))
            frees += kept
            if frees:
                _free_after(ops, start, end, tuple(frees), node.name)
            ops += meetings
            if split >= 0:
                beside = ops[split:]
                del ops[split:]
        return ops + beside


class Gradient:
    """A gradient buffer of the engine; two tensors may share one."""

    __slots__ = ("name", "nbytes", "refs")

    def __init__(self, name: str, nbytes: int) -> None:
        self.name = name
        self.nbytes = nbytes
        self.refs = 1


def _made_as(op: Op, made: Tensor) -> Op:
    """A checkpointed stretch's output is what its caller makes of it: an activation, or a temporary where nobody saves it."""
    if made.category == "activations" or all(t.name != made.name for t in op.allocs):
        return op
    return op._replace(allocs=tuple(made if t.name == made.name else t for t in op.allocs))


def param_uses(nodes: list[Node]) -> dict[str, int]:
    uses: dict[str, int] = {}
    for node in nodes:
        for back in node.backs:
            if isinstance(back.gives, Param):
                uses[back.gives.name] = uses.get(back.gives.name, 0) + 1
    return uses


def meet(grads: dict[int, Gradient], target: Value, old: Gradient, made: Gradient) -> Op:
    """Two gradients of one tensor are added: in place where the older buffer belongs to nobody else, or by the fused kernel that reads them."""
    fused = target.read_bytes
    work, kernels = (float(target.numel * fused), 0) if fused else (3.0 * target.nbytes, 1)
    freed = [Tensor(made.name, "temporaries", made.nbytes)] if made.refs == 1 else []
    if made.refs > 1:
        made.refs -= 1
    if old.refs == 1:
        return Op(f"{target.name}.accumulate", "memory", nbytes=work, dtype=target.dtype, kernels=kernels, frees=tuple(freed))
    old.refs -= 1
    new = Gradient(f"grad:{target.name}", target.nbytes)
    grads[id(target)] = new
    return Op(f"{target.name}.accumulate", "memory", nbytes=work, dtype=target.dtype, kernels=kernels,
              allocs=(Tensor(new.name, "temporaries", new.nbytes),), frees=tuple(freed))


def _run_beside(ops: list[Op | GradReady], beside: list[Op | GradReady]) -> None:
    """The last op, a collective, runs beside these; what it frees goes when it is done."""
    sent = ops.pop()
    assert isinstance(sent, Op)
    ops += [sent._replace(event=sent.name, frees=()), *beside, Op(f"{sent.name}.wait", "wait", kernels=0, frees=sent.frees, event=sent.name)]
    beside.clear()


def _free_after(ops: list[Op | GradReady], start: int, end: int, frees: tuple[Tensor, ...], name: str) -> None:
    """Attach releases to the last op that a node's backward emitted, ops[start:end], so that they happen when all of it has run."""
    for i in range(end - 1, start - 1, -1):
        op = ops[i]
        if isinstance(op, Op):
            ops[i] = op.freeing(frees)
            return
    ops.insert(end, Op(f"{name}.release", "memory", kernels=0, frees=frees))
