"""nanochat's data parallelism: no wrapper around the model, everything in the optimizer, which is Muon and AdamW.

The layers' matrices of one shape live in one stack, padded with zero matrices to a multiple of the ranks, and so do their gradients, into which
backward adds. Nothing is sent in backward. At the step every gradient is averaged in place: each rank receives whole matrices of the stacks, which
Muon updates at once, and rows of every other tensor, which AdamW updates; tensors below 1,024 elements are all-reduced and updated everywhere. The
updated parts are all-gathered in place. Sends 2Ψ; optimizer state is 1/n, gradients stay whole until the step. All reductions are issued first and
each gather as soon as its part is updated, so they overlap with the updates. Source: karpathy/nanochat nanochat/optim.py (2026-08); the row scaling,
the variance reduction and the cautious decay that it adds to Muon (elementwise, one number a row) are left out.
"""

from costmodel.program.inventory import Inventory, nbytes
from costmodel.program.ir import Op, Tensor
from costmodel.program.layers import Numbers
from costmodel.program.muon import apply, is_matrix, orthogonalise
from costmodel.program.optimizer import Update, clip_ops, update_ops
from costmodel.program.parallel.base import FIRST, ONLY, Strategy, collective
from costmodel.program.tape import GradReady
from costmodel.spec import Run
from costmodel.spec.run import SMALL_NUMEL


class Stack:
    """All matrices of one shape."""

    __slots__ = ("rows", "cols", "count", "owned", "numel", "event")

    def __init__(self, shape: tuple[int, int], count: int, ranks: int) -> None:
        self.rows, self.cols = shape
        self.count = count
        self.owned = -(-count // ranks)
        """Matrices that each rank updates; the last ranks' may be padding."""
        self.numel = self.owned * ranks * self.rows * self.cols
        self.event = f"stack {self.rows} x {self.cols}"

    @property
    def owned_numel(self) -> int:
        return self.owned * self.rows * self.cols


class Nanochat(Strategy):
    """nanochat's MuonAdamW; with AdamW alone there are no stacks."""

    name = "nanochat"
    sharded = ("optimizer",)
    axis = "dp_shard"

    def __init__(self, run: Run, numbers: Numbers, inventory: Inventory) -> None:
        super().__init__(run, numbers, inventory)
        self.n = run.plan.dp
        self.muon = run.recipe.optimizer.name == "muon"
        counts: dict[tuple[int, ...], int] = {}
        for p in inventory.layer.params if self.muon else ():
            if is_matrix(p):
                counts[p.shape] = counts.get(p.shape, 0) + inventory.layers
        self.stacks = [Stack((shape[0], shape[1]), count, self.n) for shape, count in sorted(counts.items()) if count]
        self.stacked = sum(s.numel for s in self.stacks)
        inner = [p.numel for p in inventory.layer.params if not self._is_stacked(p.shape)]
        self.rest = [*(p.numel for p in inventory.embedding.params), *inner * inventory.layers, *(p.numel for p in inventory.head.params)]
        """Elements of each tensor that AdamW updates, in order of registration."""
        self.slices = [self._slice(numel) for numel in self.rest]

    def _is_stacked(self, shape: tuple[int, ...]) -> bool:
        return self.muon and len(shape) == 2

    def _slice(self, numel: int) -> int:
        """Elements of it that one rank updates."""
        return numel if numel < SMALL_NUMEL else numel // self.n

    # -- state -----------------------------------------------------------------------------------------------------------

    def persistent(self, role: str) -> list[Tensor]:
        p, whole = self.precision, self.stacked + sum(self.rest)
        state = [Tensor("parameters", "parameters", nbytes(whole, p.parameter))]
        if self.stacks:
            state += [Tensor("gradient stacks", "gradients", nbytes(self.stacked, p.gradient)),
                      Tensor("momentum", "optimizer", nbytes(sum(s.owned_numel for s in self.stacks), p.optimizer_state))]
        return state

    def kept_gradients(self) -> list[Tensor]:
        """Those of AdamW; a stack is zeroed in place."""
        return [Tensor("gradients", "gradients", nbytes(sum(self.rest), self.gradient_dtype))]

    def update(self, role: str) -> Update:
        u, owned = super().update(role), sum(s.owned_numel for s in self.stacks)
        return u._replace(numel=owned + sum(self.slices), tensors=len(self.stacks) + len(self.slices), matrices=owned, matrix_tensors=len(self.stacks),
                          largest=max(self.slices, default=0))

    # -- step ------------------------------------------------------------------------------------------------------------

    def gradient_key(self, micro: str, variant: object) -> object:
        return self.name, self.muon, micro in (ONLY, FIRST)

    def begin_step(self, first: bool) -> list[Op]:
        ops = super().begin_step(first)
        if self.stacks:
            ops.append(Op("zero_grad", "memory", nbytes=float(nbytes(self.stacked, self.gradient_dtype)), dtype=self.gradient_dtype, kernels=len(self.stacks)))
        return ops

    def on_grad(self, unit: str, index: int, ready: GradReady, micro: str) -> tuple[tuple[Tensor, ...], list[Op]]:
        """A stack's gradients are there from the start: every micro-batch adds into them."""
        if unit != "layer" or not self._is_stacked(ready.param.shape):
            return super().on_grad(unit, index, ready, micro)
        made = Tensor(f"{ready.param.name}.new_grad", "temporaries", ready.nbytes)
        return (made,), [Op(f"{ready.param.name}.accumulate_grad", "memory", nbytes=3.0 * ready.nbytes, dtype=ready.dtype, frees=(made,))]

    def clip(self, u: Update) -> list[Op]:
        """Each rank clips its own gradients, before they are averaged."""
        inv = self.inventory
        return clip_ops(inv.numel, inv.tensors, self.gradient_dtype)

    def updates(self, role: str, first: bool) -> list[tuple[list[Op], int]]:
        """Reductions of everything; then, part by part: wait, update, gather; at last wait for the gathers."""
        p = self.precision
        ops: list[Op] = []
        if self.n > 1:
            ops += [self._reduce(numel) for numel in self.rest]
            ops += [self._send("reduce-scatter", s.numel, p.gradient, s.event) for s in self.stacks]
            ops.append(Op("nanochat.wait", "wait", kernels=0, event="rest"))
        u = self.update(role)
        adamw = self.recipe.optimizer.model_copy(update={"name": "adamw"})
        rest = u._replace(numel=u.numel - u.matrices, tensors=len(self.slices), matrices=0, matrix_tensors=0)
        ops += update_ops(adamw, rest, first=first)
        ops += [self._gather(numel) for numel in self.rest if self.n > 1 and numel >= SMALL_NUMEL]
        for s in self.stacks:
            ops += self._muon(s)
        if self.n > 1:
            ops.append(Op("nanochat.wait", "wait", kernels=0, event="gathers"))
        return [(ops, 1)]

    def _send(self, kind: str, numel: int, dtype: str, event: str) -> Op:
        return collective(self.axis, kind, self.n, nbytes(numel, dtype), dtype, event=event, name=f"nanochat.{kind.replace('-', '_')}")

    def _reduce(self, numel: int) -> Op:
        return self._send("all-reduce" if numel < SMALL_NUMEL else "reduce-scatter", numel, self.precision.gradient, "rest")

    def _gather(self, numel: int) -> Op:
        return self._send("all-gather", numel, self.precision.parameter, "gathers")

    def _muon(self, s: Stack) -> list[Op]:
        """This rank's matrices of a stack, padding included, in one batch; the Nesterov update replaces the gradient."""
        p = self.precision
        g, m = nbytes(s.owned_numel, p.gradient), nbytes(s.owned_numel, p.optimizer_state)
        ops = [Op("nanochat.wait", "wait", kernels=0, event=s.event)] if self.n > 1 else []
        ops += [Op("muon.momentum", "memory", nbytes=float(2 * m + g), dtype=p.optimizer_state),
                Op("muon.nesterov", "memory", nbytes=float(2 * g + m), dtype=p.gradient),
                *orthogonalise(s.owned, s.rows, s.cols, p.gradient), *apply(s.owned, s.rows, s.cols, p.parameter)]
        return [*ops, self._gather(s.numel)] if self.n > 1 else ops

    # -- for reports -----------------------------------------------------------------------------------------------------

    def notes(self) -> list[str]:
        notes = []
        if self.recipe.clip_norm and self.n > 1:
            notes.append("nanochat's ranks clip their own gradients before they are averaged, which is not clipping by the norm of the average; "
                         "recipe.clip_norm = 0 is what it does since 2026.")
        padding = sum((s.owned * self.n - s.count) * s.rows * s.cols for s in self.stacks)
        if padding > 0.1 * self.stacked:
            notes.append(f"{padding / self.stacked:.0%} of the stacks are zero matrices: the layers' matrices of a shape do not divide by {self.n} ranks.")
        return notes
