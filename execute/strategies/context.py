# mypy: disable-error-code="no-untyped-call, no-any-return, misc"
"""Context parallelism: the ranks of a cp group share each sequence; attention brings its parts together.

Divides tokens: a rank has 1/c of each sequence, and with it of the activations; state lies as the plan's other axes say, over cp too. Sends
in each attention: `ring`, keys and values to the next rank and in backward their gradients with them; `allgather`, keys and values to all, their
gradients reduce-scattered; `ulysses`, an all-to-all of heads against tokens before and after an attention over the whole sequence. Causal ring
and all-gather attention is balanced unless the plan says otherwise: a rank has a piece of the head of the sequence and its mirror of the tail.
Partial outputs are merged in fp32 by their log-sum-exps. Written in plain PyTorch, for torch.distributed.tensor.experimental.context_parallel knows
no CPU kernel (2.13). After zhuzilin/ring-flash-attention, zigzag_ring_flash_attn.py (arXiv 2310.01889), and deepspeed/sequence/layer.py (arXiv 2309.14509).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from costmodel.spec import Run
from execute import compat
from execute.kernels import Kernels

Core = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
WHOLE = slice(None)


def cp_rank(run: Run, rank: int) -> int:
    """A rank's place in its cp group: tp is inside."""
    return rank // run.plan.tp % run.plan.cp


def places(run: Run, rank: int) -> Tensor:
    """Which tokens of a sequence a rank has, in its order: [seq_len / cp] int64."""
    pieces, own = run.sequence_pieces, cp_rank(run, rank)
    each = run.recipe.seq_len // pieces
    mine = (own, pieces - 1 - own) if run.balances_context else (own,)
    return torch.cat([torch.arange(p * each, (p + 1) * each, device="cpu") for p in mine])


def shared_sequence(run: Run, kernels: Kernels) -> "SharedSequence | None":
    """This rank's part in its cp group; None where cp = 1."""
    p = run.plan
    if p.cp == 1:
        return None
    first = [base + inside for base in range(0, p.world_size, p.cp * p.tp) for inside in range(p.tp)]
    group, _ = dist.new_subgroups_by_enumeration([[f + i * p.tp for i in range(p.cp)] for f in first])
    return SharedSequence(run, kernels, group, dist.get_rank())


class Meeting(NamedTuple):
    """Which of this rank's queries see which of the keys that are there."""

    queries: slice
    keys: slice
    causal: bool


class SharedSequence:
    """Attention of this rank's tokens to the whole sequence. Tensors [batch, tokens, heads, head_dim] lie as they are sent; kernels see them as
    [batch, heads, tokens, head_dim]."""

    def __init__(self, run: Run, kernels: Kernels, group: Any, rank: int) -> None:
        self.kernels, self.group = kernels, group
        self.c, self.kind, self.rank = run.plan.cp, run.plan.cp_kind, cp_rank(run, rank)
        self.causal, self.balanced = run.recipe.causal, run.balances_context
        self.next, self.before = (dist.get_global_rank(group, (self.rank + step) % self.c) for step in (1, -1))
        self.places = lambda: places(run, rank)

    def enter(self, x: Tensor) -> Tensor:
        """Queries, keys or values as attention takes them: of the whole sequence and 1/c of the heads (Ulysses), or as they can be sent."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return Swap.apply(x, self, True) if self.kind == "ulysses" else x.contiguous()

    def attention(self, core: Core) -> Core:
        """The attention that takes the place of `core`, which sees what is here."""
        return core if self.kind == "ulysses" else lambda q, k, v, mask: Steps.apply(q, k, v, self)

    def leave(self, y: Tensor) -> Tensor:
        """Attention's output, of this rank's tokens and all heads."""
        return Swap.apply(y, self, False) if self.kind == "ulysses" else y

    # -- Ulysses -----------------------------------------------------------------------------------------------------------

    def to_heads(self, x: Tensor) -> Tensor:
        """[batch, tokens / c, heads, d] -> [batch, tokens, heads / c, d]."""
        b, n, h, d = x.shape
        return self._exchange(x.reshape(b, n, self.c, h // self.c, d).permute(2, 0, 1, 3, 4).contiguous()).transpose(0, 1).reshape(b, -1, h // self.c, d)

    def to_tokens(self, x: Tensor) -> Tensor:
        """The way back."""
        b, n, h, d = x.shape
        parts = self._exchange(x.reshape(b, self.c, n // self.c, h, d).transpose(0, 1).contiguous())
        return parts.permute(1, 2, 0, 3, 4).reshape(b, n // self.c, -1, d)

    def _exchange(self, parts: Tensor) -> Tensor:
        """Part i of the first dim to rank i."""
        out = torch.empty_like(parts)
        dist.all_to_all_single(out, parts, group=self.group)
        return out

    # -- ring and all-gather -----------------------------------------------------------------------------------------------

    @property
    def own(self) -> Meeting:
        """This rank's queries and its own keys."""
        return Meeting(WHOLE, WHOLE, self.causal)

    def meeting(self, step: int, tokens: int) -> Meeting | None:
        """What is computed in a later step, with the keys of the rank `step` before this one; None where they are all in the future."""
        if not self.causal:
            return Meeting(WHOLE, WHOLE, False)
        if self.balanced:
            return Meeting(WHOLE, slice(tokens // 2), False) if step <= self.rank else Meeting(slice(tokens // 2, None), WHOLE, False)
        return Meeting(WHOLE, WHOLE, False) if step <= self.rank else None

    def pass_on(self, tensors: tuple[Tensor, ...]) -> "Coming":
        """Send tensors to the next rank of the ring, and ask for those of the one before."""
        theirs = tuple(torch.empty_like(t) for t in tensors)
        operations = []
        for mine, coming in zip(tensors, theirs, strict=True):
            operations += [dist.P2POp(dist.isend, mine, self.next, self.group), dist.P2POp(dist.irecv, coming, self.before, self.group)]
        return Coming(theirs, dist.batch_isend_irecv(operations))

    def keys(self, k: Tensor, v: Tensor) -> "RingKeys | GatheredKeys":
        """The keys and values of every rank, one after the other."""
        mine = k.transpose(1, 2), v.transpose(1, 2)
        return RingKeys(self, mine) if self.kind == "ring" else GatheredKeys(self, mine)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The output in the dtype of q, and the log-sum-exps of all scores."""
        keys, tokens = self.keys(k, v), q.shape[2]
        keys.ask()
        out, lse = self._attend(q, keys, self.own)
        out = out.float()
        keys.advance()
        for step in range(1, self.c):
            keys.ask()
            meeting = self.meeting(step, tokens)
            if meeting is not None:
                merge(out[:, :, meeting.queries], lse[:, :, meeting.queries], *self._attend(q, keys, meeting))
            keys.advance()
        return out.to(q.dtype), lse

    def _attend(self, q: Tensor, keys: Any, m: Meeting) -> tuple[Tensor, Tensor]:
        k, v = keys.seen(m.keys)
        return self.kernels.flash(q[:, :, m.queries], k, v, m.causal)

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v; those of the keys and values that a step saw go to the rank that they came from."""
        keys, tokens = self.keys(k, v), q.shape[2]
        keys.ask()
        made = self._differentiate(grad, q, keys, out, lse, self.own)
        queries, sums = made[0].float(), (RingSums if self.kind == "ring" else GatheredSums)(self, made[1], made[2])
        del made
        keys.advance()
        sums.ask()
        for step in range(1, self.c):
            keys.ask()
            meeting = self.meeting(step, tokens)
            if meeting is None:
                sums.advance()
            else:
                made = self._differentiate(grad, q, keys, out, lse, meeting)
                queries[:, :, meeting.queries] += made[0]
                sums.advance()
                sums.add(meeting.keys, made[1], made[2])
                del made
            keys.advance()
            sums.ask()
        dk, dv = sums.home()
        return queries.to(q.dtype), dk.transpose(1, 2).to(k.dtype), dv.transpose(1, 2).to(v.dtype)

    def _differentiate(self, grad: Tensor, q: Tensor, keys: Any, out: Tensor, lse: Tensor, m: Meeting) -> tuple[Tensor, Tensor, Tensor]:
        k, v = keys.seen(m.keys)
        rows = m.queries
        return self.kernels.flash_backward(grad[:, :, rows], q[:, :, rows], k, v, out[:, :, rows], lse[:, :, rows], m.causal)


class Coming(NamedTuple):
    """Tensors under way, and what to wait for."""

    tensors: tuple[Tensor, ...]
    works: list[Any]

    def arrived(self) -> tuple[Tensor, ...]:
        for work in self.works:
            work.wait()
        return self.tensors


class RingKeys:
    """Keys and values of one rank after the other: those of the next step are asked for while those of this one are used."""

    def __init__(self, shared: SharedSequence, mine: tuple[Tensor, ...]) -> None:
        self.shared, self.here, self.left = shared, mine, shared.c - 1
        self.coming: Coming | None = None

    def ask(self) -> None:
        if self.left:
            self.coming = self.shared.pass_on(self.here)

    def advance(self) -> None:
        self.here = self.coming.arrived() if self.coming else ()
        self.coming, self.left = None, self.left - 1

    def seen(self, rows: slice) -> tuple[Tensor, ...]:
        """This step's, as kernels see them."""
        return tuple(t[:, rows].transpose(1, 2) for t in self.here)


class GatheredKeys:
    """All keys and values at once, gathered while this rank's own are used; taken in the order of the ring."""

    def __init__(self, shared: SharedSequence, mine: tuple[Tensor, ...]) -> None:
        self.shared, self.mine, self.step = shared, mine, 0
        self.full: tuple[Tensor, ...] = ()
        self.works: list[Any] = []

    def ask(self) -> None:
        if self.step == 0:
            self.full = tuple(t.new_empty((self.shared.c, *t.shape)) for t in self.mine)
            group = self.shared.group
            self.works = [compat.all_gather(full.flatten(0, 1), t, group=group, async_op=True) for full, t in zip(self.full, self.mine, strict=True)]

    def advance(self) -> None:
        for work in self.works:
            work.wait()
        self.works, self.step = [], self.step + 1
        if self.step == self.shared.c:
            self.full = ()

    def seen(self, rows: slice) -> tuple[Tensor, ...]:
        """This step's, as kernels see them."""
        whose = (self.shared.rank - self.step) % self.shared.c
        return tuple(t[:, rows].transpose(1, 2) for t in (self.mine if self.step == 0 else (f[whose] for f in self.full)))


class RingSums:
    """Gradients of keys and values, summed in fp32 as they follow these around the ring."""

    def __init__(self, shared: SharedSequence, dk: Tensor, dv: Tensor) -> None:
        self.shared = shared
        self.here: tuple[Tensor, ...] = tuple(t.transpose(1, 2).float().contiguous() for t in (dk, dv))
        self.coming: Coming | None = None

    def ask(self) -> None:
        self.coming = self.shared.pass_on(self.here)

    def advance(self) -> None:
        assert self.coming is not None
        self.here = self.coming.arrived()
        self.coming = None

    def add(self, rows: slice, *gradients: Tensor) -> None:
        for total, gradient in zip(self.here, gradients, strict=True):
            total[:, rows] += gradient.transpose(1, 2)

    def home(self) -> tuple[Tensor, ...]:
        """This rank's own."""
        self.advance()
        return self.here


class GatheredSums:
    """Gradients of the keys and values of the whole sequence, summed in fp32 and reduce-scattered at the end."""

    def __init__(self, shared: SharedSequence, dk: Tensor, dv: Tensor) -> None:
        self.shared, self.step = shared, 0
        self.full: tuple[Tensor, ...] = tuple(t.new_zeros((shared.c, *t.transpose(1, 2).shape), dtype=torch.float32) for t in (dk, dv))
        self.add(WHOLE, dk, dv)

    def ask(self) -> None:
        """Nothing yet."""

    def advance(self) -> None:
        self.step += 1

    def add(self, rows: slice, *gradients: Tensor) -> None:
        whose = (self.shared.rank - self.step) % self.shared.c
        for full, gradient in zip(self.full, gradients, strict=True):
            full[whose][:, rows] += gradient.transpose(1, 2)

    def home(self) -> tuple[Tensor, ...]:
        """This rank's own, of all ranks."""
        own = []
        for full in self.full:
            own.append(torch.empty_like(full[0]))
            compat.reduce_scatter(own[-1], full.flatten(0, 1), group=self.shared.group)
        self.full = ()
        return tuple(own)


def merge(out: Tensor, lse: Tensor, block: Tensor, its: Tensor) -> None:
    """out += sigmoid(its - lse) (block - out), in place; lse becomes log(exp(lse) + exp(its))."""
    out.lerp_(block.to(out.dtype), (its - lse).sigmoid_().unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, its))


class Steps(torch.autograd.Function):
    """Attention whose keys and values come from all ranks, step by step; saves what attention saves, of this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, shared: SharedSequence) -> Tensor:
        out, lse = shared.forward(q, k, v)
        ctx.shared = shared
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (*ctx.shared.backward(grads[0], *ctx.saved_tensors), None)


class Swap(torch.autograd.Function):
    """Heads against tokens, over the group; backward is the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shared: SharedSequence, to_heads: bool) -> Tensor:
        ctx.shared, ctx.to_heads = shared, to_heads
        return shared.to_heads(x) if to_heads else shared.to_tokens(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (ctx.shared.to_tokens if ctx.to_heads else ctx.shared.to_heads)(grads[0]), None, None
