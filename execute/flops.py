"""FLOPs that a step needs, by the closed form of PaLM: what the MFU and HFU of a measured step rest on. No prediction is asked."""

from costmodel.spec import Run
from costmodel.spec.kinds import layer_kinds
from costmodel.spec.parameters import layer_params


def model_flops(run: Run) -> float | None:
    """FLOPs of one step over all ranks: 6 for each parameter of a matrix (the head's too, tied or not; the embedding is looked up) and
    12·L·a·d·s for attention (6·L·a·(d + d_v)·s where values are narrower), the whole square, a token; of a layer with a window of w tokens
    12·a·d·w. Source: arXiv 2204.02311, appendix B.

    None for models that do not multiply each token by every matrix, or attend in another way.
    """
    m = run.model
    if m.moe is not None or m.hybrid or m.mtp_depth or m.extra_params:
        return None
    return 3.0 * run.tokens_per_step * (m.layers * _matrices(run) + sum(_attention(run)) + _head(run))


def hardware_flops(run: Run) -> float | None:
    """With what checkpointing computes again: forward of the checkpointed layers, or of their attention; and the head's where the loss is chunked.

    None where operations are picked one by one, or layers of every stage of a pipeline.
    """
    needed, c, m = model_flops(run), run.plan.checkpointing, run.model
    if needed is None or (c.mode == "selective" and c.ops != ("attention",)) or (c.every > 1 and run.plan.pp > 1):
        return None
    again = _head(run) if run.recipe.loss == "chunked" else 0.0
    if c.mode == "selective":
        again += sum(_attention(run))
    elif c.mode == "full":
        again += -(-m.layers // c.every) * _matrices(run) + sum(_attention(run)[::c.every])
    return needed + run.tokens_per_step * again


def _matrices(run: Run) -> float:
    """Forward FLOPs of a layer's matrices, a token."""
    return 2.0 * sum(p.numel for p in layer_params(run.model) if len(p.shape) == 2)


def _attention(run: Run) -> list[float]:
    """Forward FLOPs of each layer's scores and of what they weigh, a token."""
    m, s = run.model, run.recipe.seq_len
    return [2.0 * m.heads * (m.head_dim + (m.mla.v_head_dim if m.mla else m.head_dim)) * (kind.window or s) for kind in layer_kinds(m, s)]


def _head(run: Run) -> float:
    """Forward FLOPs of the output matrix, a token."""
    return 2.0 * run.model.vocab * run.model.embedding_dim
