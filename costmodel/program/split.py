"""A stage's backward in two passes: the slots that zero-bubble schedules put in order.

PyTorch does both passes of the first stage in its second, for nobody waits for the gradient of token ids
(torch/distributed/pipelining/stage.py, backward_weight_one_chunk).
"""

from itertools import groupby

from costmodel.program.build import Builder, compress
from costmodel.program.halves import Halves, halves
from costmodel.program.ir import Block, Op, Part, Seq, Tensor, seq
from costmodel.program.parallel.base import FIRST, HEAD, LAST, LAYER, ONLY
from costmodel.program.zerobubble import ADDS, ANEW, IDLE, OPENS


def input_slot(b: Builder, micro: str) -> Seq:
    """The gradient of the stage's input, of one micro-batch."""
    if b.stage.first:
        return _EMPTY
    word = b.strategy.first_pass(micro if micro in WORDS else IDLE if micro in (ONLY, FIRST) else ADDS)
    key = ("input", word)
    if key not in b.slots:
        b.slots[key] = _input_slot(b, word)
    return b.slots[key]


def weight_slot(b: Builder, micro: str) -> Seq:
    """The gradients of its weights."""
    word = micro if micro in WORDS else OPENS if micro in (ONLY, FIRST) else ANEW
    if b.stage.first:
        return b.backward_slot(FIRST if word == OPENS else LAST)
    word = b.strategy.second_pass(word)
    key = ("weight", word)
    if key not in b.slots:
        b.slots[key] = _weight_slot(b, word)
    return b.slots[key]


WORDS = (IDLE, OPENS, ADDS, ANEW)
_EMPTY = Seq(())


def _halves(b: Builder, unit: str, *, free_entry: bool, owned: bool) -> Halves:
    key = (unit, "halves", free_entry, owned)
    if key not in b.halves:
        u = b.unit[unit]
        b.halves[key] = halves(u.tape, u.exit, u.entry, free_entry=free_entry and b.saves_entry(unit), owned=owned)
    return b.halves[key]


def _layers(b: Builder) -> list[tuple[Halves, int, int]]:
    """The layers in order, those that are treated alike together: (halves, the first of them, how many)."""
    out, index = [], 0
    for (outside, given), alike in groupby(b.borrowed):
        n = len(list(alike))
        out.append((_halves(b, LAYER, free_entry=not outside, owned=not given), index, n))
        index += n
    return out


def _head(b: Builder) -> Halves:
    return _halves(b, HEAD, free_entry=b.layers > 0 or not b.links.borrows_input, owned=True)


def _core(b: Builder, key: object, name: str, ops: list[Op]) -> Block:
    """A block that every stage shares."""
    if key not in b.cores:
        b.cores[key] = Block(name, "backward", tuple(ops))
    return b.cores[key]


def _input_slot(b: Builder, word: str) -> Seq:
    s = b.strategy
    parts: list[Part | tuple[Part, int]] = []
    ends: tuple[Tensor, ...] = ()
    if b.stage.last:
        head, loss = _head(b), b.unit[HEAD].exit.nbytes
        start = [Op("loss.grad", "memory", nbytes=8.0, allocs=(Tensor("grad:loss", "temporaries", loss),))]
        parts.append(b.wrapped(HEAD, "backward", start, _core(b, (HEAD, "inputs", id(head)), HEAD, list(head.inputs)), []))
        ends = *head.above, Tensor("loss", "activations", loss), *b.kept_output()
    else:
        parts.append(Block("stage", "backward", tuple(b.links.before_backward())))
    layers: list[tuple[Part, int]] = []
    for made, _, n in reversed(_layers(b)):
        core = _core(b, (LAYER, "inputs", id(made)), LAYER, list(made.inputs))
        layers.append((b.wrapped(LAYER, "backward", [], core, s.take_up(LAYER, word)), n))
    parts += compress(layers)
    release = [Op("graph.release", "host", kernels=0, frees=ends)] if ends else []
    parts.append(Block("stage", "backward", (*s.take_up(HEAD, word), *release, *b.links.after_inputs())))
    return seq(*parts)


def _weight_slot(b: Builder, word: str) -> Seq:
    layers: list[tuple[Part, int]] = []
    ends: list[Tensor] = list(() if b.stage.last else b.kept_output())

    def weights(unit: str, made: Halves, index: int) -> Block:
        key = (unit, "weights", id(made), b.strategy.name, word)
        return b.cores[key] if key in b.cores else _core(b, key, unit, b.with_gradients(unit, index, word, made.weights))

    for made, first, n in _layers(b):
        layers.append((weights(LAYER, made, first), n))
        ends += [t._replace(nbytes=n * t.nbytes) for t in (*made.rest, *made.above)]
    parts: list[Part | tuple[Part, int]] = [*compress(layers)]
    if b.stage.last:
        head = _head(b)
        parts.append(weights(HEAD, head, 0))
        ends += head.rest
    return seq(*parts, Block("stage", "backward", (Op("graph.release", "host", kernels=0, frees=tuple(ends)),)))
