"""DDP: every rank holds all state; gradients are all-reduced in buckets while backward runs.

Sends 2Ψ elements per step (an all-reduce of every gradient), once per step with no_sync. Source of the bucket rule:
torch/csrc/distributed/c10d/reducer.cpp, compute_bucket_assignment_by_size: parameters in order of arrival; a bucket closes when
its size reaches its cap (the first one's is 1 MiB).
"""

from typing import NamedTuple

from costmodel.program.inventory import Inventory, nbytes
from costmodel.program.ir import Op, Tensor
from costmodel.program.layers import Numbers
from costmodel.program.parallel.base import EMBEDDING, FIRST, HEAD, LAST, LAYER, MIDDLE, ONLY, Strategy, collective, element_bytes
from costmodel.program.tape import GradReady
from costmodel.spec import Model, Run
from costmodel.spec.parameters import Param


class Flush(NamedTuple):
    """A bucket that is complete when this parameter's gradient has arrived."""

    nbytes: int
    previous: int
    """Bytes of the bucket before it; 0 for the first."""


def arrival_order(params: tuple[Param, ...], model: Model, *, weight_first: bool = False) -> list[Param]:
    """Parameters of a unit in the order in which backward finishes their gradients.

    Modules in reverse order of use: a post-norm before its block, the norms of a parallel residual last. Of a linear layer the bias
    before the weight, whose gradient passes through a transpose, or with `weight_first` the weight (autocast, where both pass
    through a cast, but for fp8 layers, which add their bias; losses that take the head in); of a norm the weight first.
    """
    groups: dict[str, list[Param]] = {}
    for p in params:
        groups.setdefault(p.name.rsplit(".", 1)[0], []).append(p)
    modules = list(reversed(list(groups)))
    if model.parallel_residual:
        modules.sort(key=lambda name: name in ("attention_norm", "mlp_norm", "final_norm"))
    elif model.norm_placement == "post":
        modules.sort(key=lambda name: (not name.startswith("mlp"), "." in name))
    return [p for name in modules for p in (reversed(groups[name]) if len(groups[name][0].shape) > 1 and not weight_first else groups[name])]


class Buckets:
    """Which gradients share a bucket, found by walking the parameters of the model backwards; layers repeat as soon as the
    state of the bucket being filled does.

    A bucket closes when its size reaches its cap; it is complete when the last of its gradients has arrived. `by_arrival` walks
    in the order of arrival (DDP's rebuilt buckets), else in the reverse order of registration.
    """

    def __init__(self, inventory: Inventory, element: int, first_cap: int, cap: int, run: Run, *, by_arrival: bool = True,
                 autocast: bool = False) -> None:
        def walk(params: tuple[Param, ...], weight_first: bool = autocast) -> list[tuple[str, int, int]]:
            """(name, bytes, place in the order of arrival) in the order in which buckets are filled."""
            arrival = arrival_order(params, run.model, weight_first=weight_first)
            place = {p.name: i for i, p in enumerate(arrival)}
            return [(p.name, p.numel * element, place[p.name]) for p in (arrival if by_arrival else reversed(params))]

        takes_head = run.recipe.loss in ("chunked", "fused")
        self._fill = _Fill(first_cap, cap)
        self.flush: dict[tuple[str, int], dict[str, Flush]] = {(HEAD, 0): self._fill.unit(walk(inventory.head.params, takes_head or autocast))}
        fp8 = run.recipe.precision.compute == "fp8"
        filled: list[dict[str, Flush]] = []
        layer: list[tuple[str, int, int]] = []
        for unit, count in reversed(inventory.stretches):
            layer = walk(unit.params, autocast and not fp8)
            filled += self._repeat(layer, count)
        filled.reverse()
        self.flush |= {(LAYER, i): flushes for i, flushes in enumerate(filled)}
        embedding = walk(inventory.embedding.params)
        self.flush[EMBEDDING, 0] = self._fill.unit(embedding)
        rest = self._fill.rest()
        if rest and embedding:
            self.flush[EMBEDDING, 0][max(embedding, key=lambda p: p[2])[0]] = rest
        elif rest and layer and filled:
            filled[0] = self.flush[LAYER, 0] = {**filled[0], max(layer, key=lambda p: p[2])[0]: rest}
        self.sizes = self._fill.sizes
        keys = {i: tuple(flushes.items()) for i, flushes in dict(zip(map(id, filled), filled, strict=True)).items()}
        self.layers = [keys[i] for i in map(id, filled)]
        """What completes in each layer: a key that is equal for layers that send alike."""


    def _repeat(self, layer: list[tuple[str, int, int]], count: int) -> list[dict[str, Flush]]:
        """What completes in each of `count` equal layers, the last one first."""
        seen: dict[tuple[int, int, int], int] | None = {}
        filled: list[dict[str, Flush]] = []
        while len(filled) < count:
            if seen is not None and self._fill.state in seen:
                period = filled[seen[self._fill.state]:]
                more = (count - len(filled)) // len(period)
                filled += period * more
                self._fill.sizes += [f.nbytes for flushes in period for f in flushes.values()] * more
                seen = None
                continue
            if seen is not None:
                seen[self._fill.state] = len(filled)
            filled.append(self._fill.unit(layer))
        return filled


class _Fill:
    """Fills buckets unit by unit; what it does next depends on its `state` alone."""

    def __init__(self, first_cap: int, cap: int) -> None:
        self.size, self.limit, self.cap = 0, first_cap, cap
        self.sizes: list[int] = []

    @property
    def state(self) -> tuple[int, int, int]:
        return self.size, self.limit, self.sizes[-1] if self.sizes else 0

    def unit(self, params: list[tuple[str, int, int]]) -> dict[str, Flush]:
        """The buckets that complete within a unit, in that order, by the parameter whose gradient is the last to arrive."""
        closed: list[tuple[int, str, int]] = []
        last, rank = "", -1
        for name, nbytes_, place in params:
            self.size += nbytes_
            if place > rank:
                last, rank = name, place
            if self.size >= self.limit:
                closed.append((rank, last, self.size))
                self.size, self.limit = 0, self.cap
                last, rank = "", -1
        flushes: dict[str, Flush] = {}
        for _, name, size in sorted(closed):
            flushes[name] = self._flush(size)
        return flushes

    def _flush(self, size: int) -> Flush:
        flush = Flush(size, self.sizes[-1] if self.sizes else 0)
        self.sizes.append(size)
        return flush

    def rest(self) -> Flush | None:
        """Close the bucket being filled, if anything is in it."""
        if not self.size:
            return None
        size, self.size, self.limit = self.size, 0, self.cap
        return self._flush(size)


class Bucketed(Strategy):
    """A strategy that reduces gradients in buckets while backward runs, in the micro-batches that `syncs`."""

    buckets: Buckets

    def syncs(self, micro: str) -> bool:
        """Whether this micro-batch's gradients are sent."""
        return micro in (ONLY, LAST) or self.plan.sync_each_micro_batch

    def like(self, micro: str) -> str:
        return LAST if micro == MIDDLE and self.syncs(micro) else micro

    def gradient_key(self, micro: str, variant: object) -> object:
        return (self.name, micro, variant) if self.syncs(micro) else super().gradient_key(micro, variant)

    def layer_variants(self, phase: str, micro: str) -> list[object]:
        if phase != "backward" or not self.syncs(micro):
            return super().layer_variants(phase, micro)
        return list(self.buckets.layers)

    def unit_variant(self, unit: str, micro: str) -> object:
        return tuple(self.buckets.flush.get((unit, 0), {}).items()) if self.syncs(micro) else None

    def completes(self, unit: str, index: int, ready: GradReady) -> Flush | None:
        """The bucket that is complete with this gradient."""
        return self.buckets.flush.get((unit, index), {}).get(ready.param.name)


class DDP(Bucketed):
    """Distributed data parallel, PyTorch's reducer."""

    name = "ddp"
    reads = ("bucket_bytes", "first_bucket_bytes", "gradient_as_bucket_view")
    axis = "dp_replicate"

    def __init__(self, run: Run, numbers: Numbers, inventory: Inventory) -> None:
        super().__init__(run, numbers, inventory)
        self.dtype = self.precision.parameter
        self.buckets = Buckets(inventory, element_bytes(self.dtype), run.plan.first_bucket_bytes, run.plan.bucket_bytes, run,
                               autocast=numbers.autocast)
        self.group = run.plan.dp * run.plan.cp
        self.view = run.plan.gradient_as_bucket_view

    def persistent(self, role: str) -> list[Tensor]:
        total = nbytes(self.inventory.numel, self.dtype)
        category = "gradients" if self.view else "communication"
        return [*super().persistent(role), Tensor("DDP buckets", category, total)]

    def kept_gradients(self) -> list[Tensor]:
        return [] if self.view else super().kept_gradients()

    def on_grad(self, unit: str, index: int, ready: GradReady, micro: str) -> tuple[tuple[Tensor, ...], list[Op]]:
        """A gradient that will be sent is copied into its bucket; as a view of the bucket it has no memory of its own afterwards."""
        allocs, ops = super().on_grad(unit, index, ready, micro)
        if not self.syncs(micro):
            return allocs, ops
        own = Tensor(f"{ready.param.name}.grad", "gradients", ready.nbytes)
        already = not self.recipe.zero_set_to_none or self.plan.sync_each_micro_batch and micro not in (ONLY, FIRST)
        if not (self.view and already):
            ops = [*ops, Op(f"{ready.param.name}.to_bucket", "memory", nbytes=2.0 * ready.nbytes, dtype=ready.dtype, frees=(own,) if self.view else ())]
        flush = self.completes(unit, index, ready)
        if flush:
            ops = [*ops, collective(self.axis, "all-reduce", self.group, flush.nbytes, self.dtype, event="ddp", name="bucket.all_reduce")]
        return allocs, ops

    def backward_end(self, micro: str) -> list[Op]:
        if not self.syncs(micro):
            return []
        total = float(nbytes(self.inventory.numel, self.dtype))
        ops = [Op("ddp.wait", "wait", event="ddp", kernels=0)]
        if not self.view:
            ops.append(Op("ddp.copy_back", "memory", nbytes=2.0 * total, dtype=self.dtype, kernels=self.inventory.tensors))
        return ops
