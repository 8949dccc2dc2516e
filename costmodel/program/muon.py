"""Muon on one rank: what it keeps, the kernels of its update, and the memory they take.

Muon updates the matrices of the layers: momentum (one state), then five Newton-Schulz iterations in bf16 that orthogonalise it, each of them three
matrix multiplications, 4·m²·n + 2·m³ FLOPs for an m x n matrix with m <= n. Embeddings, head, norms and biases are AdamW's.
Sources: torch/optim/_muon.py; Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/ (the iteration, and its FLOPs).
"""

from costmodel.program.inventory import Inventory, nbytes
from costmodel.program.ir import Op, Tensor
from costmodel.program.optimizer import Update, state_tensors, update_ops
from costmodel.spec import DTYPE_BYTES, OptimizerSpec
from costmodel.spec.parameters import Param

ITERATIONS = 5
LOW = "bf16"
"""dtype of the iteration, whatever the gradient's."""


def orthogonalise(batch: int, rows: int, cols: int, gradient: str, held: tuple[Tensor, ...] = ()) -> list[Op]:
    """The iterations over `batch` matrices of one shape; their result "muon.matrix" stays for the caller.

    Each iteration makes its Gram matrix, the polynomial of it and the next matrix while the ones before are still there. A gradient in bf16
    is not copied first. `held` goes when the iterations are done.
    """
    m, n = sorted((rows, cols))
    wide, square = batch * m * n, batch * m * m
    e = DTYPE_BYTES[LOW]
    x, gram, polynomial = (Tensor(f"muon.{name}", "temporaries", e * numel) for name, numel in (("matrix", wide), ("gram", square), ("polynomial", square)))
    copied = gradient != LOW
    ops: list[Op] = []
    if copied:
        ops.append(Op("muon.to_bf16", "memory", nbytes=float(wide * DTYPE_BYTES[gradient] + x.nbytes), dtype=LOW, allocs=(x,)))
    ops.append(Op("muon.normalise", "memory", nbytes=3.0 * x.nbytes, dtype=LOW, kernels=3))
    product, cube = 2.0 * wide * m, 2.0 * square * m
    for i in range(ITERATIONS):
        again = i > 0
        ops += [Op("muon.gram", "matmul", product, float(e * (2 * wide + square)), (batch, m, m, n), LOW, allocs=(gram,), frees=(gram,) if again else ()),
                Op("muon.polynomial", "matmul", cube, float(e * 3 * square), (batch, m, m, m), LOW, allocs=(polynomial,),
                   frees=(polynomial,) if again else ()),
                Op("muon.matrix", "matmul", product, float(e * (square + 2 * wide)), (batch, m, n, m), LOW, allocs=(x,),
                   frees=(x,) if again or copied else ())]
    ops[-1] = ops[-1].freeing((gram, polynomial, *held))
    return ops


def apply(batch: int, rows: int, cols: int, parameter: str) -> list[Op]:
    """Decay and the addition of the orthogonalised update."""
    numel = batch * rows * cols
    p, x = nbytes(numel, parameter), Tensor("muon.matrix", "temporaries", nbytes(numel, LOW))
    return [Op("muon.decay", "memory", nbytes=2.0 * p, dtype=parameter), Op("muon.add", "memory", nbytes=float(2 * p + x.nbytes), dtype=parameter, frees=(x,))]


def one_matrix(param: Param, u: Update) -> list[Op]:
    """torch.optim.Muon on one matrix; its Nesterov update, a copy in the gradient's dtype, lives until the iterations are done."""
    rows, cols = param.shape
    g, s = nbytes(param.numel, u.grad), nbytes(param.numel, u.state)
    update = Tensor("muon.update", "temporaries", g)
    return [Op("muon.momentum", "memory", nbytes=float(2 * s + g), dtype=u.state),
            Op("muon.nesterov", "memory", nbytes=float(2 * g + s), dtype=u.grad, allocs=(update,)),
            *orthogonalise(1, rows, cols, u.grad, (update,)), *apply(1, rows, cols, u.param)]


def is_matrix(param: Param) -> bool:
    """Of a layer's parameters, those that Muon updates."""
    return len(param.shape) == 2


def rest_of(spec: OptimizerSpec, u: Update) -> tuple[OptimizerSpec, Update]:
    """The AdamW that updates what Muon does not, and what that is."""
    return spec.model_copy(update={"name": "adamw"}), u._replace(numel=u.numel - u.matrices, tensors=u.tensors - u.matrix_tensors, matrices=0, matrix_tensors=0)


def updates(spec: OptimizerSpec, u: Update, inventory: Inventory, *, first: bool) -> list[tuple[list[Op], int]]:
    """torch.optim.Muon over the matrices, one after the other, then AdamW over the rest: ops, and how often they repeat."""
    momentum = tuple(t for t in state_tensors(spec, u) if t.name == "momentum") if first else ()
    begin = [Op("optimizer.host", "host", kernels=u.matrix_tensors, allocs=momentum)]
    layer = [op for p in inventory.layer.params if is_matrix(p) for op in one_matrix(p, u)]
    adamw, rest = rest_of(spec, u)
    return [(begin, 1), (layer, inventory.layers), (update_ops(adamw, rest, first=first), 1)]
