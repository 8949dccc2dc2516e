"""The parameters of a run, unit by unit, with what strategies ask of them."""

from typing import NamedTuple

from costmodel.spec import DTYPE_BYTES, Run
from costmodel.spec.parameters import Param, embedding_params, head_params, layer_params


class UnitParams(NamedTuple):
    """The parameters of one unit (embedding, layer or head)."""

    params: tuple[Param, ...]
    numel: int

    def sharded_numel(self, n: int) -> int:
        """Elements on the fullest rank when dim 0 of each parameter is split over n ranks (FSDP2: rank 0, padded)."""
        if n == 1:
            return self.numel
        return sum(-(-p.shape[0] // n) * (p.numel // p.shape[0]) for p in self.params)


def _unit(params: list[Param]) -> UnitParams:
    return UnitParams(tuple(params), sum(p.numel for p in params))


class Inventory(NamedTuple):
    """All parameters of a rank's model."""

    embedding: UnitParams
    layer: UnitParams
    head: UnitParams
    layers: int

    @property
    def numel(self) -> int:
        return self.embedding.numel + self.layers * self.layer.numel + self.head.numel

    @property
    def tensors(self) -> int:
        return len(self.embedding.params) + self.layers * len(self.layer.params) + len(self.head.params)

    @property
    def largest(self) -> int:
        return max(p.numel for unit in (self.embedding, self.layer, self.head) for p in unit.params)


def inventory_of(run: Run) -> Inventory:
    m = run.model
    return Inventory(_unit(embedding_params(m)), _unit(layer_params(m)), _unit(head_params(m)), m.layers)


def nbytes(numel: int, dtype: str) -> int:
    return numel * DTYPE_BYTES[dtype]
