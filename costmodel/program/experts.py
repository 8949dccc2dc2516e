"""The operations of a mixture of experts: router, permutation, grouped matrix products, and the way back.

Written as execute/experts.py runs it (PyTorch), and as Megatron's token dispatcher and grouped MLP do. n tokens, k experts a token, E experts:

    router     logits [n, E] = x W^T; softmax or sigmoid in fp32, kept; the k largest, their sum made 1 (of k = 1 the score)
    dispatch   rows [n k, h]: every token once for each of its experts, sorted by expert; with ep an all-to-all, and sorted again
    experts    act(rows W_gate) * (rows W_up), then W_down: one grouped product per matrix over the experts of this rank
    combine    with ep the way back; times the router's weights, summed over the k rows of a token

Kept for backward: the scores, the k weights and three int64 indices a routed row; the rows; gate, its activation, up and their product; the results,
which the gradient of the router's weights needs (Megatron multiplies inside the activation instead and does not keep them).
"""

from typing import TYPE_CHECKING

from costmodel.program import float8
from costmodel.program.ir import Tensor
from costmodel.program.parallel.expert import ExpertParallel
from costmodel.program.tape import Back, Value
from costmodel.spec.parameters import Param

if TYPE_CHECKING:
    from costmodel.program.layers import Walk

INDEX = 8
"""Bytes of an int64 index."""
ENTER, LEAVE = "experts.enter", "experts.leave"
"""Where the experts' own weights begin and end to be needed."""


def mixture(w: "Walk", x: Value) -> Value:
    """The feed-forward block of one layer: x [n, h] -> [n, h]."""
    moe, ep = w.run.model.moe, w.ep
    assert moe is not None and ep is not None
    n = x.numel // w.run.model.hidden
    share = _route(w, x, n, moe.experts, moe.top_k)
    if w.tp.megatron:
        y = _MEGATRON[ep.dispatcher if ep.n * ep.cut.t > 1 else "alltoall"](w, ep, x, n * moe.top_k)
    else:
        weights = _sorted_share(w, ep, share)
        y = _summed(w, _weighted_rows(w, ep, x, weights, n * moe.top_k), n)
    if moe.shared_ffn:
        y = w.add(y, w.feed_forward(x, "shared", moe.shared_ffn // w.tp.t, False), "shared.sum")
    return y


def _route(w: "Walk", x: Value, n: int, experts: int, k: int) -> Value:
    """The share [n k] that each chosen expert has in the result of its token."""
    moe, tape = w.run.model.moe, w.tape
    assert moe is not None
    logits = w.cast(w.linear(x, "router", experts, w.run.model.hidden, moe.router_bias), "fp32")
    scores = tape.value("router.scores", n * experts, "fp32")
    tape.record("router.scores", "memory", (logits,), (scores,), saved=(scores,), nbytes=2.0 * scores.nbytes,
                backs=(Back("grad", "memory", 0, nbytes=3.0 * scores.nbytes),))
    top = tape.value("router.top", n * k, "fp32")
    chosen = Tensor("router.chosen", "activations", n * k * INDEX)
    tape.record("router.top_k", "memory", (scores,), (top,), extra=(chosen,), nbytes=float(scores.nbytes + top.nbytes + chosen.nbytes),
                backs=(Back("grad", "memory", 0, nbytes=float(scores.nbytes + 3 * top.nbytes), kernels=2),))
    share = top
    if k > 1:
        share = tape.value("router.share", n * k, "fp32")
        tape.record("router.normalise", "memory", (top,), (share,), saved=(top,), extra=(Tensor("router.sum", "activations", n * 4),),
                    nbytes=5.0 * top.nbytes, kernels=2, backs=(Back("grad", "memory", 0, nbytes=8.0 * top.nbytes, kernels=6),))
    assert w.ep is not None
    order = [Tensor(name, "activations", n * k * INDEX) for name in ("router.order", "router.token")]
    if w.ep.capacity is not None:  # the rows' slots, of which one more takes what is dropped, beside the tokens of the slots
        order = [order[0], Tensor("router.slot", "activations", n * k * INDEX), Tensor("router.token", "activations", (w.ep.sent(n * k) + 1) * INDEX)]
    tape.record("router.sort", "memory", (), (), extra=tuple(order), nbytes=8.0 * chosen.nbytes, kernels=7 if w.ep.capacity is None else 14,
                temp_bytes=n * k * INDEX)
    return share


def _sorted_share(w: "Walk", ep: ExpertParallel, share: Value) -> Value:
    """The shares in the order of the sorted rows, or of the slots, as the results are multiplied by them."""
    y = w.tape.value("router.sorted", share.numel if ep.capacity is None else ep.sent(share.numel) + 1, "fp32")
    moved = float(2 * share.nbytes + share.numel * INDEX)
    w.tape.record("router.sorted", "memory", (share,), (y,), nbytes=moved, backs=(Back("grad", "memory", 0, nbytes=moved + share.nbytes, kernels=2),))
    return w.cast(y, w.n.act)


def _weighted_rows(w: "Walk", ep: ExpertParallel, x: Value, weights: Value, routed: int) -> Value:
    """From tokens to the results of their experts times the router's weights, [n k, h], sorted by expert."""
    h, tape = w.run.model.hidden, w.tape
    received, routed = ep.received(routed), ep.sent(routed)
    if ep.hooks:
        tape.mark(ENTER)
    rows = _gathered(w, w.cast(x, w.n.act), "experts.rows", routed)
    if ep.n > 1:
        if ep.capacity is None:
            tape.record("experts.counts", "collective", (), (), comm=ep.counts(), dtype="fp32")
            tape.record("experts.splits", "sync", (), ())
        rows = _exchanged(w, ep, rows, "experts.dispatched", routed * h, received * h)
        if ep.experts > 1:
            _index(w, received)
            rows = _gathered(w, rows, "experts.sorted", received)
    out = _grouped_block(w, ep, rows, received)
    if ep.n > 1:
        if ep.experts > 1:
            out = _scattered(w, out, "experts.unsorted", received)
        out = _exchanged(w, ep, out, "experts.combined", received * h, routed * h)
    out = _weighted(w, out, weights)
    if ep.hooks:
        tape.mark(LEAVE)
    return out


def _index(w: "Walk", received: int) -> None:
    """The order in which the rows of several senders are sorted by expert."""
    nbytes = received * INDEX
    w.tape.record("experts.sort", "memory", (), (), extra=(Tensor("experts.order", "activations", nbytes),), nbytes=8.0 * nbytes, kernels=7,
                  temp_bytes=2 * nbytes)


def _gathered(w: "Walk", x: Value, name: str, rows: int) -> Value:
    """Rows copied out of x by index; the gradient is added back row by row into zeros."""
    y = w.tape.value(name, rows * w.run.model.hidden, x.dtype)
    w.tape.record(name, "memory", (x,), (y,), nbytes=2.0 * y.nbytes, dtype=x.dtype,
                  backs=(Back("grad", "memory", 0, nbytes=float(x.nbytes + 3 * y.nbytes), dtype=x.dtype, kernels=2),))
    return y


def _scattered(w: "Walk", x: Value, name: str, rows: int) -> Value:
    """Rows put back where they came from; the gradient is gathered."""
    y = w.tape.value(name, rows * w.run.model.hidden, x.dtype)
    w.tape.record(name, "memory", (x,), (y,), nbytes=2.0 * y.nbytes, dtype=x.dtype,
                  backs=(Back("grad", "memory", 0, nbytes=2.0 * y.nbytes, dtype=x.dtype),))
    return y


def _exchanged(w: "Walk", ep: ExpertParallel, x: Value, name: str, sent: int, received: int) -> Value:
    """An all-to-all; backward is the one back."""
    y = w.tape.value(name, received, x.dtype)
    w.tape.record(f"{name}.all_to_all", "collective", (x,), (y,), comm=ep.exchange(sent, received, x.dtype), dtype=x.dtype, event=ep.event,
                  backs=(Back("all_to_all", "collective", 0, comm=ep.exchange(received, sent, x.dtype), dtype=x.dtype, event=ep.event),))
    return y


def _grouped_block(w: "Walk", ep: ExpertParallel, rows: Value, n: int) -> Value:
    """The experts' matrices around their activation."""
    m = w.run.model
    assert m.moe is not None
    h, f = m.hidden, m.moe.expert_ffn
    if m.gated:
        gate = _grouped(w, ep, rows, "experts.gate", n, f, h)
        inner = w.gate(gate, _grouped(w, ep, rows, "experts.up", n, f, h), "experts")
    else:
        inner = w.activation(_grouped(w, ep, rows, "experts.up", n, f, h), "experts")
    return _grouped(w, ep, inner, "experts.down", n, h, f)


def _grouped(w: "Walk", ep: ExpertParallel, x: Value, name: str, rows: int, out: int, width: int) -> Value:
    """y = x W_e^T for the rows of each expert e, one kernel: priced as a batch of products of mean size. FLOPs count an even share."""
    n, tape, count = w.n, w.tape, ep.experts
    flops, each = 2.0 * rows * width * out, -(-rows // count)
    w.matmul_flops += 2.0 * w.rows * ep.cut.t * ep.top_k * width * out
    if n.fp8:
        return float8.grouped(w, x, name, count, each, out, width)
    weight = Param(f"{name}.weight", (count, out, width))
    moved = float(w.e * (rows * (width + out) + weight.numel))
    y = tape.value(f"{name}.out", rows * out, n.act)
    dgrad = Back("dgrad", "matmul", 0, flops, moved, (count, each, width, out), n.act)
    wgrad = Back("wgrad", "matmul", weight, flops, moved, (count, out, width, each), n.param)
    extra: tuple[Tensor, ...] = ()
    backs: tuple[Back, ...] = (dgrad, wgrad)
    if n.autocast:
        low = Tensor(f"{weight.name}.grad.{n.act}", "temporaries", weight.numel * w.e)
        extra = (Tensor(f"{weight.name}.{n.act}", "activations", low.nbytes),)
        tape.record(f"{name}.cast", "memory", (), (), nbytes=float(low.nbytes + 4 * weight.numel), dtype=n.act)
        backs = (dgrad, wgrad._replace(gives=None, dtype=n.act, opens=low),
                 Back("wgrad.cast", "memory", weight, nbytes=float(low.nbytes + 4 * weight.numel), dtype="fp32", closes=low, apart=True))
    tape.record(name, "matmul", (x,), (y,), saved=(x,), extra=extra, flops=flops, nbytes=moved, dims=(count, each, out, width), dtype=n.act, backs=backs)
    return y


def _weighted(w: "Walk", out: Value, weights: Value) -> Value:
    """Every row times its weight."""
    tape, b = w.tape, out.nbytes
    weighted = tape.value("experts.weighted", out.numel, out.dtype)
    tape.record("experts.weighted", "memory", (out, weights), (weighted,), saved=(out, weights), nbytes=2.0 * b, dtype=out.dtype,
                backs=(Back("grad", "memory", 0, nbytes=2.0 * b, dtype=out.dtype),
                       Back("grad_weights", "memory", 1, nbytes=4.0 * b, dtype=out.dtype, kernels=2, temp_bytes=b)))
    return weighted


def _summed(w: "Walk", rows: Value, n: int, name: str = "experts.sum") -> Value:
    """The rows of each token, added up. It keeps the tokens' index, which is there already: a recompute goes on until here."""
    y, b = w.tape.value(name, n * w.run.model.hidden, rows.dtype), rows.nbytes
    index = (Tensor(f"{name}.index", "activations", 0),)
    w.tape.record(name, "memory", (rows,), (y,), extra=index, nbytes=float(y.nbytes + 3 * b), dtype=rows.dtype, kernels=2,
                  backs=(Back("grad", "memory", 0, nbytes=2.0 * b, dtype=rows.dtype),))
    return y


# -- Megatron ----------------------------------------------------------------------------------------------------------------


def _megatron_rows(w: "Walk", ep: ExpertParallel, x: Value, routed: int) -> Value:
    """Megatron's all-to-all dispatcher and grouped MLP, whose experts are cut by tp as well (or by etp): each of these ranks works on the rows of all.

    The host waits in both passes (ir.Op, route). `ep_overlap` lets compute go on beside the all-to-alls, of which those of a layer are waited for when
    the next layer gets there: what running the micro-batches against each other (overlap_moe_expert_parallel_comm) hides at best.
    """
    h, tape, t = w.run.model.hidden, w.tape, ep.cut.t
    received, routed = ep.received(routed), ep.sent(routed)
    if ep.capacity is None:
        tape.record("experts.host", "route", (), (), kernels=ep.experts, backs=(Back("host", "route", kernels=ep.experts),))
    rows = _gathered(w, x, "experts.rows", routed)
    if ep.n > 1:
        if ep.event:
            tape.record("experts.earlier", "wait", (), (), kernels=0, event=ep.event)
        if ep.capacity is None:
            tape.record("experts.counts", "collective", (), (), comm=ep.counts(), dtype="fp32")
        rows = _exchanged(w, ep, rows, "experts.dispatched", routed * h, received * h)
    rows = ep.cut.enter(w, rows, "experts")
    sorts = ep.n * t > 1 and ep.experts > 1
    if sorts:
        _index(w, received * t)
        rows = _gathered(w, rows, "experts.sorted", received * t)
    out = _megatron_block(w, ep, rows, received * t)
    if sorts:
        out = _scattered(w, out, "experts.unsorted", received * t)
    out = ep.cut.leave(w, out, "experts")
    if ep.n > 1:
        out = _exchanged(w, ep, out, "experts.combined", received * h, routed * h)
        if ep.event:
            tape.record("experts.later", "host", (), (), kernels=0, backs=(Back("wait", "wait", kernels=0, event=ep.event),))
    return _summed(w, out, x.numel // h)


def _flex_rows(w: "Walk", ep: ExpertParallel, x: Value, routed: int) -> Value:
    """Megatron's flex dispatcher (DeepEP, HybridEP): one kernel sends a token once to each rank that has some of its experts, where the copies for each
    are made; on the way back they are summed before they travel (core/transformer/moe/token_dispatcher.py, MoEFlexTokenDispatcher)."""
    h, tape, t = w.run.model.hidden, w.tape, ep.cut.t
    received, sent = ep.received(routed), ep.copies(x.numel // h)
    arrived = round(sent * received / routed)
    tape.record("experts.host", "route", (), (), kernels=ep.experts, backs=(Back("host", "route", kernels=ep.experts),))
    if ep.event:
        tape.record("experts.earlier", "wait", (), (), kernels=0, event=ep.event)
    tokens = _exchanged(w, ep, x, "experts.dispatched", sent * h, arrived * h) if ep.n > 1 else x
    _index(w, received * t)
    rows = _gathered(w, ep.cut.enter(w, tokens, "experts"), "experts.rows", received * t)
    y = _summed(w, _megatron_block(w, ep, rows, received * t), tokens.numel * t // h, "experts.sum_here")
    y = ep.cut.leave(w, y, "experts")
    if ep.n == 1:
        return y
    y = _exchanged(w, ep, y, "experts.combined", arrived * h, sent * h)
    if ep.event:
        tape.record("experts.later", "host", (), (), kernels=0, backs=(Back("wait", "wait", kernels=0, event=ep.event),))
    return _summed(w, y, x.numel // h)


def _among_all(w: "Walk", ep: ExpertParallel, x: Value, routed: int) -> Value:
    """Megatron's all-gather dispatcher: the tokens of all ranks of the group, of which each takes the rows for its experts; results are summed where
    their tokens came from by a reduce-scatter (core/transformer/moe/token_dispatcher.py, MoEAllGatherTokenDispatcher)."""
    h, tape, t = w.run.model.hidden, w.tape, ep.cut.t
    tape.record("experts.host", "route", (), (), kernels=ep.experts, backs=(Back("host", "route", kernels=ep.experts),))
    tokens = ep.cut.enter(w, x, "experts")
    gather, scatter = ep.exchange_all(tokens.numel * ep.n, x.dtype)
    if ep.n > 1:
        everyone = tape.value("experts.everyone", tokens.numel * ep.n, x.dtype)
        tape.record("experts.all_gather", "collective", (tokens,), (everyone,), comm=gather, dtype=x.dtype,
                    backs=(Back("reduce_scatter", "collective", 0, comm=scatter, dtype=x.dtype),))
        tokens = everyone
    received = ep.received(routed) * t
    _index(w, received)
    y = _summed(w, _megatron_block(w, ep, _gathered(w, tokens, "experts.rows", received), received), tokens.numel // h)
    if ep.n > 1:
        mine = tape.value("experts.mine", y.numel // ep.n, y.dtype)
        tape.record("experts.reduce_scatter", "collective", (y,), (mine,), comm=scatter, dtype=y.dtype,
                    backs=(Back("all_gather", "collective", 0, comm=gather, dtype=y.dtype),))
        y = mine
    return ep.cut.leave(w, y, "experts")


def _megatron_block(w: "Walk", ep: ExpertParallel, rows: Value, n: int) -> Value:
    """Two grouped products around one kernel that gates and multiplies by the router's weights; it keeps the first one's output and the weights."""
    m = w.run.model
    assert m.moe is not None
    h, f, wide = m.hidden, m.moe.expert_ffn // ep.cut.t, 2 if m.gated else 1
    y = _grouped(w, ep, rows, "experts.up", n, wide * f, h)
    inner = w.tape.value("experts.act", n * f, y.dtype)
    kept = (Tensor("experts.shares", "activations", 4 * n),)
    w.tape.record("experts.act", "memory", (y,), (inner,), saved=(y,), extra=kept, nbytes=float(y.nbytes + inner.nbytes), dtype=y.dtype,
                  backs=(Back("grad", "memory", 0, nbytes=float(2 * y.nbytes + inner.nbytes), dtype=y.dtype),))
    return _grouped(w, ep, inner, "experts.down", n, h, f)


_MEGATRON = {"alltoall": _megatron_rows, "allgather": _among_all, "flex": _flex_rows}
"""By plan.ep_dispatcher: from tokens [n, h] to the sum of their experts' results."""
