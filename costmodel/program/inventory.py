"""The parameters of a run, unit by unit, with what strategies ask of them."""

from typing import NamedTuple

from costmodel.program.parallel.expert import is_expert, local_expert
from costmodel.program.parallel.tensor import local_param
from costmodel.spec import DTYPE_BYTES, Run
from costmodel.spec.parameters import Param, dense_layers, embedding_params, head_params, layer_params


class UnitParams(NamedTuple):
    """The parameters of one unit (embedding, layer or head)."""

    params: tuple[Param, ...]
    numel: int
    largest: int = 0
    """Elements of its largest parameter."""

    def sharded_numel(self, n: int) -> int:
        """Elements on the fullest rank when dim 0 of each parameter is split over n ranks (FSDP2: rank 0, padded)."""
        if n == 1:
            return self.numel
        return sum(-(-p.shape[0] // n) * (p.numel // p.shape[0]) for p in self.params)


def without_experts(unit: UnitParams) -> tuple[UnitParams, UnitParams]:
    """A layer's parameters without its routed experts, and those of the experts."""
    return _unit([p for p in unit.params if not is_expert(p)]), _unit([p for p in unit.params if is_expert(p)])


def _unit(params: list[Param]) -> UnitParams:
    numels = [p.numel for p in params]
    return UnitParams(tuple(params), sum(numels), max(numels, default=0))


class Inventory(NamedTuple):
    """All parameters of a rank's model."""

    embedding: UnitParams
    layer: UnitParams
    head: UnitParams
    layers: int
    whole_lookups: int = 0
    """Elements by which the gradients of looked-up tables exceed the tables on this rank."""
    several: tuple[tuple[UnitParams, int], ...] = ()
    """Where layers hold different parameters, in order: those of one layer, and how many follow one another that hold the same; `layer` is the last."""

    @property
    def stretches(self) -> tuple[tuple[UnitParams, int], ...]:
        """Layers that hold the same parameters, in order: those of one, and how many."""
        return self.several or ((self.layer, self.layers),)

    @property
    def lookups(self) -> int:
        """Elements of the looked-up tables on this rank."""
        return sum(p.numel for p in self.embedding.params if p.name.startswith(("embedding.", "positions.")))

    @property
    def norms(self) -> list[tuple[Param, int]]:
        """Norm weights and biases, and how often each occurs."""
        units = ((self.embedding, 1), *self.stretches, (self.head, 1))
        return [(p, count) for unit, count in units for p in unit.params if "norm" in p.name]

    @property
    def numel(self) -> int:
        return self.embedding.numel + sum(n * layer.numel for layer, n in self.stretches) + self.head.numel

    def tied_numel(self, run: Run) -> int:
        """Elements of a tied embedding's matrix on one rank."""
        return -(-run.model.vocab // run.plan.tp) * run.model.embedding_dim

    @property
    def tensors(self) -> int:
        return len(self.embedding.params) + sum(n * len(layer.params) for layer, n in self.stretches) + len(self.head.params)

    @property
    def matrices(self) -> tuple[int, int]:
        """Elements of the layers' matrices, and how many matrices they are."""
        sizes = [p.numel for p in self.layer.params if len(p.shape) == 2]
        return self.layers * sum(sizes), self.layers * len(sizes)

    @property
    def cast_weights(self) -> tuple[int, int]:
        """Elements of the layers' matrices that fp8 casts, the router's left out, and how many matrices they are, each expert's counted."""
        found = [(n * p.numel, n * p.shape[0] if len(p.shape) == 3 else n) for layer, n in self.stretches for p in layer.params
                 if len(p.shape) > 1 and not p.name.startswith("router")]
        return sum(numel for numel, _ in found), sum(matrices for _, matrices in found)

    @property
    def largest(self) -> int:
        return max(self.embedding.largest, self.head.largest, *(layer.largest for layer, _ in self.stretches))


def inventory_of(run: Run, layers: int | None = None, *, begins: int = 0, embedding: bool = True, head: bool = True,
                 like: Inventory | None = None) -> Inventory:
    """The parameters that a rank's tp share of a stage holds: `layers` of them (all) from the one numbered `begins`, with or without embedding and
    head; `like` is that of another stage.

    A stage with the head of a tied model, but without its embedding, holds a copy of the embedding's matrix.
    """
    m, t = run.model, run.plan.tp
    top = head_params(m) if head else []
    if head and m.tied_embeddings and not embedding:
        top.insert(len(top) - m.head_bias, embedding_params(m)[0])
    first, last = (_unit([local_param(p, t, run.plan.framework) for p in params]) for params in (embedding_params(m) if embedding else [], top))
    count, lookups = m.layers if layers is None else layers, _whole_lookups(run) if embedding else 0
    dense = dense_layers(m) if m.moe else 0
    if not dense:
        return Inventory(first, like.layer if like else _layer(run), last, count, lookups)
    before = max(0, min(dense - begins, count))
    parts = tuple((_layer(run, moe=moe), n) for moe, n in ((False, before), (True, count - before)) if n)
    return Inventory(first, parts[-1][0] if parts else _layer(run), last, count, lookups, parts if len(parts) > 1 else ())


def _layer(run: Run, *, moe: bool | None = None) -> UnitParams:
    m, p = run.model, run.plan
    fused = m.model_copy(update={"fused_qkv": True}) if p.framework == "megatron" else m
    params = [local_expert(q, p.ep, p.tp) for q in layer_params(fused, moe=m.moe is not None if moe is None else moe)]
    if p.framework == "megatron" and m.gated:
        params = _fused_gate(params)
    return _unit([local_param(q, p.tp, p.framework) for q in params])


def _whole_lookups(run: Run) -> int:
    """Elements by which the gradients of DTensor's looked-up tables exceed their local parts; a tied embedding's is cut."""
    m, t = run.model, run.plan.tp
    if t == 1 or run.plan.framework == "megatron":
        return 0
    tables = [p for p in embedding_params(m) if p.name.startswith(("embedding.", "positions.")) and not (m.tied_embeddings and p.name == "embedding.weight")]
    return sum(p.numel - local_param(p, t, "pytorch").numel for p in tables)


def _fused_gate(params: list[Param]) -> list[Param]:
    """Megatron's first feed-forward matrix holds the gate's rows and up's."""
    out: list[Param] = []
    for p in params:
        block, _, rest = p.name.partition(".")
        if block in ("mlp", "shared", "experts") and rest.startswith("gate."):
            continue
        double = block in ("mlp", "shared", "experts") and rest.startswith("up.")
        rows = 1 if block == "experts" else 0
        out.append(Param(p.name, (*p.shape[:rows], 2 * p.shape[rows], *p.shape[rows + 1:])) if double else p)
    return out


def nbytes(numel: int, dtype: str) -> int:
    return numel * DTYPE_BYTES[dtype]
