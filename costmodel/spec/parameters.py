"""The parameter tensors of a model: names, shapes, and which unit of the network holds them."""

from math import prod
from typing import NamedTuple

from costmodel.spec.model import Model


class Param(NamedTuple):
    """One weight tensor: its name within its unit and its shape."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)


def _norm(model: Model, name: str, width: int) -> list[Param]:
    if model.norm == "rmsnorm_no_weight":
        return []
    params = [Param(f"{name}.weight", (width,))]
    if model.norm_bias:
        params.append(Param(f"{name}.bias", (width,)))
    return params


def _linear(name: str, rows: int, cols: int, bias: bool) -> list[Param]:
    params = [Param(f"{name}.weight", (rows, cols))]
    if bias:
        params.append(Param(f"{name}.bias", (rows,)))
    return params


def attention_params(model: Model) -> list[Param]:
    """Weights of one attention block, in order of registration; shapes are (out, in)."""
    h, q_width = model.hidden, model.heads * model.head_dim
    if model.mla:
        m = model.mla
        qk = m.qk_nope_head_dim + m.qk_rope_head_dim
        if m.q_lora_rank:
            params = [Param("attention.q_a.weight", (m.q_lora_rank, h)), Param("attention.q_a_norm.weight", (m.q_lora_rank,)),
                      Param("attention.q_b.weight", (model.heads * qk, m.q_lora_rank))]
        else:
            params = [Param("attention.q.weight", (model.heads * qk, h))]
        params += [Param("attention.kv_a.weight", (m.kv_lora_rank + m.qk_rope_head_dim, h)),
                   Param("attention.kv_a_norm.weight", (m.kv_lora_rank,)),
                   Param("attention.kv_b.weight", (model.heads * (m.qk_nope_head_dim + m.v_head_dim), m.kv_lora_rank))]
        return params + _linear("attention.out", h, model.heads * m.v_head_dim, model.attention_out_bias)
    kv_width = model.kv_heads * model.head_dim
    if model.fused_qkv:
        params = _linear("attention.qkv", q_width + 2 * kv_width, h, model.qkv_bias)
    else:
        params = (_linear("attention.q", q_width, h, model.qkv_bias) + _linear("attention.k", kv_width, h, model.qkv_bias)
                  + _linear("attention.v", kv_width, h, model.qkv_bias))
    if model.qk_norm in ("per_head", "full") and model.norm != "rmsnorm_no_weight":
        full = model.qk_norm == "full"
        params += [Param("attention.q_norm.weight", (q_width if full else model.head_dim,)),
                   Param("attention.k_norm.weight", (kv_width if full else model.head_dim,))]
    if model.attention_sinks:
        params.append(Param("attention.sinks", (model.heads,)))
    return params + _linear("attention.out", h, q_width, model.attention_out_bias)


def mlp_params(model: Model) -> list[Param]:
    """Weights of one dense feed-forward block; shapes are (out, in)."""
    h, f = model.hidden, model.ffn
    params: list[Param] = []
    if model.gated:
        params += _linear("mlp.gate", f, h, model.mlp_bias)
    return params + _linear("mlp.up", f, h, model.mlp_bias) + _linear("mlp.down", h, f, model.mlp_bias)


def moe_params(model: Model) -> list[Param]:
    """Weights of one mixture-of-experts block, all experts."""
    assert model.moe is not None
    moe, h = model.moe, model.hidden
    params = _linear("router", moe.experts, h, moe.router_bias)
    matrices = [("gate", moe.expert_ffn, h), ("up", moe.expert_ffn, h), ("down", h, moe.expert_ffn)]
    for name, rows, cols in matrices if model.gated else matrices[1:]:
        params.append(Param(f"experts.{name}.weight", (moe.experts, rows, cols)))
        if moe.expert_bias:
            params.append(Param(f"experts.{name}.bias", (moe.experts, rows)))
    if moe.shared_ffn:
        shared = [("gate", moe.shared_ffn, h), ("up", moe.shared_ffn, h), ("down", h, moe.shared_ffn)]
        params += [Param(f"shared.{name}.weight", (rows, cols)) for name, rows, cols in (shared if model.gated else shared[1:])]
    return params


def layer_params(model: Model, *, moe: bool = False) -> list[Param]:
    """Weights of one layer, in order of registration (the order in which DDP fills its buckets, reversed)."""
    n, h = model.norms_per_layer, model.hidden
    params = _norm(model, "attention_norm", h) + attention_params(model)
    if n == 4:
        params += _norm(model, "attention_post_norm", h)
    if n == 3:
        params += _norm(model, "extra_norm", h)
    if n >= 2:
        params += _norm(model, "mlp_norm", h)
    params += moe_params(model) if moe else mlp_params(model)
    if n == 4:
        params += _norm(model, "mlp_post_norm", h)
    return params


def embedding_params(model: Model) -> list[Param]:
    params = [Param("embedding.weight", (model.vocab, model.embedding_dim))]
    if model.position_rows:
        params.append(Param("positions.weight", (model.position_rows, model.hidden)))
    if model.embedding_norm:
        params += _norm(model, "embedding_norm", model.hidden)
    if model.extra_params:
        params.append(Param("extra", (model.extra_params,)))
    return params


def head_params(model: Model) -> list[Param]:
    """Final norm and output head; a tied head has no matrix of its own."""
    params = _norm(model, "final_norm", model.hidden) if model.final_norm else []
    if not model.tied_embeddings:
        params.append(Param("head.weight", (model.vocab, model.embedding_dim)))
    if model.head_bias:
        params.append(Param("head.bias", (model.vocab,)))
    return params


def dense_layers(model: Model) -> int:
    """Layers whose feed-forward block is dense."""
    return model.layers if model.moe is None else min(model.moe.first_dense_layers, model.layers)


def parameter_count(model: Model) -> int:
    """Parameters of the whole model; tied embeddings counted once.

    Multi-token-prediction modules and hybrid layers are outside: their models are refused by name elsewhere.
    """
    dense = dense_layers(model)
    total = sum(p.numel for p in embedding_params(model) + head_params(model))
    if dense:
        total += dense * sum(p.numel for p in layer_params(model))
    if model.layers > dense:
        total += (model.layers - dense) * sum(p.numel for p in layer_params(model, moe=True))
    return total


def active_parameter_count(model: Model) -> int:
    """Parameters one token uses: top_k of the routed experts, everything else."""
    if model.moe is None:
        return parameter_count(model)
    idle = (model.moe.experts - model.moe.top_k) / model.moe.experts
    routed = sum(p.numel for p in moe_params(model) if p.name.startswith("experts."))
    return parameter_count(model) - round((model.layers - dense_layers(model)) * routed * idle)
