"""Context parallelism: the ranks of a cp group share each sequence, and attention brings its parts together.

Divides tokens: a rank runs every layer on 1/c of each sequence, so activations are 1/c; state lies as with data parallelism (sharded over
dp_shard x cp, gradients averaged over dp x cp). Sends, per layer and micro-batch, over the cp group:

- ring: keys and values pass from rank to rank, c-1 times in forward and again in backward, each pass beside the attention of the part
  that is there; the gradients of keys and values travel with them in the dtype they are summed in, c times (arXiv 2310.01889);
- allgather: keys and values are gathered, beside the attention of the rank's own part, and again in backward; the summed gradients are
  reduce-scattered (arXiv 2407.21783, section 3.3.2);
- ulysses: all-to-alls give each rank 1/c of the heads of the whole sequence, and give back: 4 in forward, 4 in backward (arXiv 2309.14509).

Causal ring and all-gather attention is balanced: of 2c pieces a rank has number r and number 2c-1-r, and after its own causal square it
sees in each step half a square (zhuzilin/ring-flash-attention, zigzag; NVIDIA/TransformerEngine; torch's _HeadTailLoadBalancer). Without
balance, the last rank sees whole squares. The program here is that of the last rank of a group, which has most to do (unbalanced) or to
hold (balanced: it attends with all its queries). Partial outputs are merged in fp32 by their log-sum-exps; what is saved is what attention saves, of
1/c of the tokens. Gradients are summed in fp32, in Megatron's dialect in the dtype of the activations. Performed by
execute/strategies/context.py. The program grows with c, and with nothing else.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from costmodel.program.host import CONTEXT, record
from costmodel.program.ir import Comm, Tensor
from costmodel.program.tape import Back, Tape, Value
from costmodel.spec import DTYPE_BYTES, PlanError, Run

if TYPE_CHECKING:
    from costmodel.program.layers import Walk

AXIS = "cp"
WITH_LSE = ("cpu", "fa1", "fa2", "fa3", "cudnn")
"""Kernels that hand out the log-sum-exps by which partial outputs are merged."""


class Meeting(NamedTuple):
    """Which of a rank's queries see which keys of another's part: tokens of both, and whether causally."""

    queries: int
    keys: int
    causal: bool


class ContextParallel:
    """What one rank of a cp group computes and sends in attention; with cp = 1 it does nothing."""

    __slots__ = ("c", "kind", "balanced", "causal", "megatron")

    def __init__(self, run: Run) -> None:
        p = run.plan
        self.c = p.cp
        self.kind = p.cp_kind
        self.balanced = run.balances_context
        self.causal = run.recipe.causal
        self.megatron = p.framework == "megatron"

    @staticmethod
    def refusals(run: Run, attention: str) -> Iterator[PlanError]:
        """What context parallelism cannot do, or not yet; `attention` is the kernel that runs."""
        p, r, c = run.plan, run.recipe, run.plan.checkpointing
        if p.cp == 1:
            return
        if c.mode == "selective" and c.ops == ("op",):
            yield PlanError("plan.checkpointing", "selective:op", "this checkpointing under context parallelism: not predicted yet.",
                            "Use full, selective or none.")
        if p.cp_kind == "ulysses":
            return
        if p.framework == "deepspeed":
            yield PlanError("plan.cp_kind", p.cp_kind, "DeepSpeed's sequence parallelism is Ulysses.", "Use cp_kind = ulysses, or another framework.")
        if attention not in WITH_LSE:
            yield PlanError("recipe.attention", r.attention, f"{p.cp_kind} attention merges partial outputs by log-sum-exps, and this kernel "
                            f"({attention}) gives none.", "Use a bf16 or fp16 precision with attention = sdpa, or cp_kind = ulysses.")
        if r.dropout and p.framework == "pytorch":  # Transformer Engine's steps draw theirs inside the kernels
            yield PlanError("recipe.dropout", r.dropout, f"dropout in {p.cp_kind} attention: not predicted yet.", "Use dropout = 0, or cp_kind = ulysses.")
        if c.mode == "selective" and r.precision.compute in ("fp32", "tf32"):
            yield PlanError("plan.checkpointing", "selective", f"attention alone recomputed, in fp32 under {p.cp_kind} attention: not predicted yet.",
                            "Use full or none.")

    def enter(self, w: "Walk", parts: tuple[Value, ...], *, fused: bool) -> tuple[Value, ...]:
        """Queries, keys and values as attention takes them; `fused`: they are views of one matmul's output."""
        if self.c == 1:
            return parts
        if self.kind == "ulysses":
            return tuple(self._swap(w, t, f"{t.name}.heads", before=True, after=w.batch > 1) for t in parts)
        return self._contiguous(w, parts) if fused else parts

    def leave(self, w: "Walk", y: Value) -> Value:
        """Attention's output, of this rank's tokens and all heads."""
        if self.c == 1 or self.kind != "ulysses":
            return y
        return self._swap(w, y, f"{y.name}.tokens", before=w.batch > 1 and w.n.attention not in ("eager", "math"), after=True)

    def attention(self, w: "Walk", q: Value, k: Value, v: Value, core: Callable[[Value, Value, Value], Value]) -> Value:
        """Attention to the whole sequence; `core` is attention over what is here."""
        if self.c == 1:
            return core(q, k, v)
        if self.kind != "ulysses":
            return Steps(self, w, q, k, v).record()
        local = w.heads, w.kv_heads, w.seq
        w.heads, w.kv_heads, w.seq = w.heads // self.c, w.kv_heads // self.c, w.seq * self.c
        out = core(q, k, v)
        w.heads, w.kv_heads, w.seq = local
        return out

    def _contiguous(self, w: "Walk", parts: tuple[Value, ...]) -> tuple[Value, ...]:
        """Ring and all-gather attention send whole tensors: views of a fused matmul's output are copied first."""
        rotated = w.run.model.positions == "rope" and w.run.model.rotary_fraction > 0 or w.run.model.qk_norm != "none"
        return tuple(t if rotated and at < 2 else self._copied(w, t) for at, t in enumerate(parts))

    @staticmethod
    def _copied(w: "Walk", x: Value) -> Value:
        y = w.tape.value(f"{x.name}.copied", x.numel, x.dtype)
        w.tape.record(y.name, "memory", (x,), (y,), nbytes=2.0 * x.nbytes, dtype=x.dtype, backs=(Back("grad", "memory", 0, alias=True),))
        return y

    def meeting(self, tokens: int, step: int) -> Meeting:
        """What the last rank of a group computes in a step: with its own part first, then with the rank's before it, and so on."""
        if step == 0:
            return Meeting(tokens, tokens, self.causal)
        return Meeting(tokens, tokens // 2 if self.balanced else tokens, False)

    def _swap(self, w: "Walk", x: Value, name: str, *, before: bool, after: bool) -> Value:
        """Heads against tokens: a copy in the order of the ranks (not where it lies so), the all-to-all, a copy back into one sequence (with one
        sequence, heads need none). Backward is the way back; the gradient that enters it lives until it is done."""
        tape, each, comm = w.tape, 2.0 * x.nbytes, self.comm("all-to-all", x.nbytes, x.dtype)
        y = tape.value(name, x.numel, x.dtype)
        self.exchange(tape, name, 1)
        sent, got = (tape.value(f"{name}.{what}", x.numel, x.dtype, False) for what in ("sent", "got"))
        if before:
            tape.record(f"{name}.pack", "memory", (x,), (sent,), nbytes=each, dtype=x.dtype)
        packed, swapped = (Tensor(f"{name}.{what}.gradient", "temporaries", x.nbytes) for what in ("got", "sent"))
        backs = [Back("all_to_all_gradient", "collective", None if before else 0, comm=comm, dtype=x.dtype, opens=swapped if before else None,
                      closes=packed if after else None)]
        if after:
            backs.insert(0, Back("pack", "memory", nbytes=each, dtype=x.dtype, opens=packed))
        if before:
            backs.append(Back("unpack", "memory", 0, nbytes=each, dtype=x.dtype, closes=swapped))
        source = (sent, x) if before else (x,)
        if after:
            tape.record(f"{name}.all_to_all", "collective", source, (got,), comm=comm, dtype=x.dtype)
            tape.record(f"{name}.unpack", "memory", (x, got), (y,), nbytes=each, dtype=x.dtype, backs=tuple(backs))
        else:
            tape.record(f"{name}.all_to_all", "collective", (x, *source), (y,), comm=comm, dtype=x.dtype, backs=tuple(backs))
        return y

    def exchange(self, tape: Tape, name: str, tensors: int) -> None:
        """The host's work for tensors that are exchanged in Python, and their gradients; Megatron's exchange is its own kernels' affair."""
        if not self.megatron:
            record(tape, f"{name}.exchange", CONTEXT, tensors, tensors)

    def comm(self, kind: str, nbytes: int, dtype: str) -> Comm:
        """A collective of the cp group: `nbytes` is the whole tensor of a gather or scatter, else one rank's buffer."""
        part = nbytes // self.c
        inside, outside = {"all-gather": (part, nbytes), "reduce-scatter": (nbytes, part), "send": (nbytes, 0), "recv": (0, nbytes)}.get(kind, (nbytes, nbytes))
        return Comm(AXIS, kind, nbytes, inside, outside, dtype, self.c)


class Steps:
    """Ring and all-gather attention: a step for each rank's part of the keys, its outcome merged into what there is.

    One node of the tape has the whole backward; the nodes before it are forward's steps alone.
    """

    __slots__ = ("cp", "w", "q", "k", "v", "low", "wide", "ring", "name", "meetings", "fused", "backs")

    def __init__(self, cp: ContextParallel, w: "Walk", q: Value, k: Value, v: Value) -> None:
        self.cp, self.w = cp, w
        self.q, self.k, self.v = q, k, v
        self.low = w.n.act
        self.wide = self.low if cp.megatron else "fp32"
        """dtype in which the gradients of keys and values are summed and sent."""
        self.ring = cp.kind == "ring"
        self.name = f"attention:{w.n.attention}"
        self.meetings = [cp.meeting(w.seq, step) for step in range(cp.c)]
        self.fused = w.n.compiled or cp.megatron
        """Partial outputs are merged by one kernel."""
        self.backs: list[Back] = []

    def record(self) -> Value:
        """Forward's steps, and the node that ends them."""
        tape, q = self.w.tape, self.q
        total = tape.value("attention.sum", q.numel, "fp32", False)
        lse = tape.value("attention.lse", self.w.batch * self.w.heads * self.w.seq, "fp32", False)
        coming: Value | None = None
        self.cp.exchange(tape, "attention", 2)
        for step, meeting in enumerate(self.meetings):
            last = step == len(self.meetings) - 1
            here, coming = coming, self._bring(coming, step, last)
            keys = (self.k, self.v) if step == 0 else (here,) if here else ()
            if step == 0:
                self._first(meeting, total, lse)
            else:
                self._merge(meeting, keys, step, total, lse)
            if coming is not None and (self.ring or step == 0) and not last:
                tape.record("context.wait", "wait", (*keys, coming), (), kernels=0, event="context")
        out = tape.value("attention.core", q.numel, self.low)
        same = self.low == "fp32"
        if same:
            out.own_bytes = 0
        self._backward()
        tape.record(self.name, "memory", (q, self.k, self.v, total), (out,), saved=(q, self.k, self.v, total if same else out, lse),
                    backs=tuple(self.backs), nbytes=0.0 if same else float(total.nbytes + out.nbytes), dtype=self.low, kernels=0 if same else 1)
        return out

    # -- forward -----------------------------------------------------------------------------------------------------------

    def _bring(self, here: Value | None, step: int, last: bool) -> Value | None:
        """Ask for the keys and values of the next step: those of one rank, or at once those of all."""
        tape, each = self.w.tape, self.k.nbytes
        if not self.ring:
            if here is not None:
                return here
            full = tape.value("context.gathered", 2 * self.k.numel * self.cp.c, self.low, False)
            gather = self.cp.comm("all-gather", each * self.cp.c, self.low)
            tape.record("context.gather_keys", "collective", (self.k,), (full,), comm=gather, dtype=self.low, event="context")
            tape.record("context.gather_values", "collective", (self.v,), (), comm=gather, dtype=self.low, event="context")
            return full
        if last:
            return None
        coming = tape.value(f"context.part{step + 1}", 2 * self.k.numel, self.low, False)
        mine = (self.k, self.v) if here is None else (here,)
        for what, made in (("keys", (coming,)), ("values", ())):
            tape.record(f"context.send_{what}", "collective", mine, (), comm=self.cp.comm("send", each, self.low), dtype=self.low, event="context")
            tape.record(f"context.receive_{what}", "collective", (), made, comm=self.cp.comm("recv", each, self.low), dtype=self.low, event="context")
        return coming

    def _first(self, m: Meeting, total: Value, lse: Value) -> None:
        """The rank's own part begins the sum."""
        tape = self.w.tape
        if self.low == "fp32":
            self._kernel(m, (self.q, self.k, self.v), total, lse)
            return
        block = tape.value("attention.block", self.q.numel, self.low, False)
        self._kernel(m, (self.q, self.k, self.v), block, lse)
        tape.record("attention.widen", "memory", (block,), (total,), nbytes=float(block.nbytes + total.nbytes), dtype="fp32")

    def _kernel(self, m: Meeting, inputs: tuple[Value, ...], out: Value, lse: Value) -> None:
        flops, nbytes, dims = self._work(m)
        self.w.tape.record(self.name, "attention", inputs, (out, lse), flops=flops, nbytes=nbytes, dims=(*dims, 0), dtype=self.low)

    def _work(self, m: Meeting) -> tuple[float, float, tuple[int, ...]]:
        """FLOPs, bytes and dims of one forward kernel."""
        w, d = self.w, self.w.run.model.head_dim
        flops = 4.0 * w.batch * w.heads * float(m.queries) * m.keys * d * (0.5 if m.causal else 1.0)
        moved = float(2 * self._rows(m) + 2 * self._columns(m))
        return flops, moved, (w.batch, w.heads, w.kv_heads, m.queries, m.keys, d, int(m.causal))

    def _rows(self, m: Meeting) -> int:
        """Bytes of a meeting's queries."""
        return self.q.nbytes // self.w.seq * m.queries

    def _columns(self, m: Meeting) -> int:
        """Bytes of its keys."""
        return self.k.nbytes // self.w.seq * m.keys

    def _merge(self, m: Meeting, keys: tuple[Value, ...], step: int, total: Value, lse: Value) -> None:
        """total += sigmoid(lse_step - lse) (out_step - total), in place and in fp32; lse becomes the logarithm of the sum of both."""
        tape, rows = self.w.tape, lse.nbytes
        block = tape.value(f"attention.block{step}", self._rows(m) // DTYPE_BYTES[self.low], self.low, False)
        its = tape.value(f"attention.lse{step}", lse.numel, "fp32", False)
        self._kernel(m, (self.q, *keys), block, its)
        widened = 0 if self.low == "fp32" or self.fused else block.numel * 4
        moved = float(block.nbytes + 2 * widened + 2 * total.nbytes)
        tape.record("attention.merge", "memory", (block, its, total, lse, *keys), (), nbytes=moved, dtype="fp32", kernels=1 if self.fused else 6,
                    temp_bytes=0 if self.fused else rows + widened)

    # -- backward ----------------------------------------------------------------------------------------------------------

    def _backward(self) -> None:
        """Step by step again: each gives gradients of the queries, summed here, and of the keys and values it saw, which travel on."""
        last = len(self.meetings) - 1
        if not self.ring:
            self._gather_again()
        for step, m in enumerate(self.meetings):
            if self.ring and step < last:
                self._pass_on("part", step, 2 * self.k.nbytes, self.low, "keys")
            self._step(step, m)
            here = self._travelling("part", step, 2 * self.k.nbytes) if step else None
            if self.ring and step < last:
                self._wait("keys", here)
            elif self.ring:
                self.backs.append(Back("release", "memory", kernels=0, closes=here))
            if not self.ring and step == 0:
                self._wait("keys", None)
            if self.ring:
                self._pass_on("sums", step, self._sums_bytes, self.wide, "sums")
        self._end()

    @property
    def _sums_bytes(self) -> int:
        """Of the summed gradients of one part of the keys and values."""
        return 2 * self.k.numel * DTYPE_BYTES[self.wide]

    @property
    def _held_sums(self) -> Tensor:
        """All-gather: the sums of the whole sequence."""
        return Tensor("context.sums", "temporaries", self._sums_bytes * self.cp.c)

    @property
    def _query_sum(self) -> Tensor:
        return Tensor("attention.query_sum", "temporaries", self.q.numel * 4)

    @staticmethod
    def _travelling(what: str, step: int, nbytes: int) -> Tensor:
        """What is there in a step."""
        return Tensor(f"context.{what}{step}", "temporaries", nbytes)

    def _gather_again(self) -> None:
        gather = self.cp.comm("all-gather", self.k.nbytes * self.cp.c, self.low)
        full = Tensor("context.gathered_again", "temporaries", 2 * self.k.nbytes * self.cp.c)
        self.backs += [Back("gather_keys", "collective", comm=gather, dtype=self.low, event="context.keys", opens=full),
                       Back("gather_values", "collective", comm=gather, dtype=self.low, event="context.keys")]

    def _pass_on(self, what: str, step: int, nbytes: int, dtype: str, event: str) -> None:
        """Send what is here to the next rank, and receive that of the one before."""
        for first in (True, False):
            coming = self._travelling(what, step + 1, nbytes) if first else None
            each = f"{'keys' if first else 'values'}_gradient" if what == "sums" else "keys" if first else "values"
            self.backs += [Back(f"send_{each}", "collective", comm=self.cp.comm("send", nbytes // 2, dtype), dtype=dtype, event=f"context.{event}"),
                           Back(f"receive_{each}", "collective", comm=self.cp.comm("recv", nbytes // 2, dtype), dtype=dtype, event=f"context.{event}",
                                opens=coming)]

    def _wait(self, event: str, gone: Tensor | None) -> None:
        """Wait for what was asked for; what was sent meanwhile goes."""
        self.backs.append(Back(f"wait_{event}", "wait", kernels=0, event=f"context.{event}", closes=gone))

    def _step(self, step: int, m: Meeting) -> None:
        """The kernel, and its gradients added to the sums."""
        flops, nbytes, dims = self._work(m)
        rows, columns = self._rows(m), self._columns(m)
        made = Tensor(f"attention.block{step}.gradients", "temporaries", rows + 2 * columns)
        kernel = Back(f"step{step}", "attention", None, 2.5 * flops, 2.0 * nbytes + rows, (*dims, 1), self.low, kernels=3)
        low, wide = DTYPE_BYTES[self.low], DTYPE_BYTES[self.wide]
        queries, keys = rows // low, 2 * columns // low
        add_queries, add_keys = float(rows + 8 * queries), float(2 * columns + 2 * wide * keys)
        if step:
            self.backs += [kernel._replace(opens=made), Back("add_queries", "memory", nbytes=add_queries, dtype="fp32")]
            if self.ring:
                self._wait("sums", self._travelling("sums", step - 1, self._sums_bytes))
            self.backs.append(Back("add_keys", "memory", nbytes=add_keys, dtype=self.wide, kernels=2, closes=made))
            return
        first = self._travelling("sums", 0, self._sums_bytes) if self.ring else self._held_sums
        fill = 0.0 if self.ring else float(first.nbytes)
        if self.low == "fp32":  # the kernel's gradients are the sums
            made = made._replace(nbytes=2 * columns)
            self.backs.append(kernel._replace(opens=self._query_sum))
            if self.ring:
                self.backs.append(Back("begin_keys", "memory", kernels=0, opens=first))
                return
            self.backs.append(Back("keys", "memory", kernels=0, opens=made))
        else:
            self.backs += [kernel._replace(opens=made),
                           Back("begin_queries", "memory", nbytes=float(rows + 4 * queries), dtype="fp32", opens=self._query_sum)]
        self.backs.append(Back("begin_keys", "memory", nbytes=float(2 * columns + wide * keys) + fill, dtype=self.wide, kernels=2, opens=first,
                               closes=made))

    def _end(self) -> None:
        """The sums of this rank's own keys and values have come home, and are cast."""
        last = len(self.meetings) - 1
        if self.ring:
            self._wait("sums", self._travelling("sums", last, self._sums_bytes))
            home = self._travelling("sums", last + 1, self._sums_bytes)
        else:
            home = Tensor("context.own_sums", "temporaries", self._sums_bytes)
            scatter = self.cp.comm("reduce-scatter", self._sums_bytes // 2 * self.cp.c, self.wide)
            gathered = Tensor("context.gathered_again", "temporaries", 2 * self.k.nbytes * self.cp.c)
            self.backs += [Back("release", "memory", kernels=0, closes=gathered),
                           Back("scatter_keys_gradient", "collective", comm=scatter, dtype=self.wide, opens=home),
                           Back("scatter_values_gradient", "collective", comm=scatter, dtype=self.wide, closes=self._held_sums)]
        q, k = self.q, self.k
        casts, adds = self.low != "fp32", self.low != self.wide
        query = Back("grad_q", "memory", 0, nbytes=6.0 * q.numel if casts else 0.0, dtype=self.low, kernels=int(casts))
        cast = float(k.nbytes + self._sums_bytes // 2) if adds else 0.0
        keys = [Back(name, "memory", at, nbytes=cast, dtype=self.low, kernels=int(adds)) for name, at in (("grad_k", 1), ("grad_v", 2))]
        free_query, free_keys = (Back("release", "memory", kernels=0, closes=t) for t in (self._query_sum, home))
        self.backs += [*([free_query, query] if not casts else [query]), *([free_keys, *keys] if not adds else keys)]
        self.backs += [*([free_query] if casts else []), *([free_keys] if adds else [])]
