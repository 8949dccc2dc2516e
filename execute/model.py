# mypy: disable-error-code="no-untyped-call, no-any-return, misc"
"""One decoder-only Transformer, GPT-style or Llama-style, from a Model; idiomatic eager PyTorch.

Parameters have the names, shapes and order of costmodel.spec.parameters.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from costmodel.spec import Checkpointing, Model, Recipe
from costmodel.spec.kinds import LayerKind, layer_kinds
from execute.checkpoint import Around, checkpoint, checkpoint_ops, layer_groups
from execute.dtypes import DTYPES
from execute.experts import Experts, mixture
from execute.float8 import linear
from execute.kernels import Kernels, composed_norm
from execute.losses import head_and_loss

EPS = 1e-5
ACTIVATIONS = {"gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu,
               "relu_squared": lambda x: F.relu(x).square(), "silu": F.silu}


class Sequence(Protocol):
    """A sequence that several ranks share (execute.strategies.context)."""

    c: int
    places: Callable[[], Tensor]
    group: Any

    def enter(self, x: Tensor) -> Tensor: ...
    def attention(self, core: Any) -> Any: ...
    def leave(self, y: Tensor) -> Tensor: ...


class Context:
    """What every module needs to know: the description, the kernels, how a recompute is marked, and who else has parts of a sequence."""

    def __init__(self, model: Model, recipe: Recipe, checkpointing: Checkpointing, kernels: Kernels, around: Around = nullcontext,
                 sequence: Sequence | None = None, expert_ranks: int = 1) -> None:
        self.model = model
        self.expert_ranks = expert_ranks
        """Ranks over which the experts of a layer are spread."""
        self.recipe = recipe
        self.checkpointing = checkpointing
        self.kernels = kernels
        self.around = around
        self.sequence = sequence
        self.tokens = recipe.seq_len // (sequence.c if sequence else 1)
        """Of each sequence, on this rank."""
        self.compute = DTYPES[recipe.precision.compute]
        selective = checkpointing.ops if checkpointing.mode == "selective" else ()
        self.recompute_attention = "attention" in selective
        self.recompute_ops = "op" in selective

    def linear(self, width: int, out: int, *, bias: bool) -> nn.Linear:
        return linear(self.recipe, width, out, bias=bias)

    def dropout(self, x: Tensor) -> Tensor:
        return self.kernels.dropout(x, self.recipe.dropout)

    def places(self) -> Tensor:
        """Where in a sequence this rank's tokens stand."""
        return self.sequence.places() if self.sequence else torch.arange(self.tokens)


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last dim, with or without weight and bias."""

    def __init__(self, context: Context, width: int, *, weight: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.context = context
        m = context.model
        self.kind = "layernorm" if m.norm == "layernorm" else "rmsnorm"
        has_weight = weight and m.norm != "rmsnorm_no_weight"
        self.weight = nn.Parameter(torch.ones(width)) if has_weight else None
        self.bias = nn.Parameter(torch.zeros(width)) if has_weight and bias and m.norm_bias else None

    def forward(self, x: Tensor) -> Tensor:
        norm = self.context.kernels.norm if self.context.recipe.fused_norm else composed_norm
        return norm(x, self.weight, self.bias, self.kind, EPS)


class Attention(nn.Module):
    """Projections, rotary positions, the attention core, the output projection."""

    def __init__(self, context: Context, kind: LayerKind) -> None:
        super().__init__()
        self.context = context
        self.window = kind.window
        m = context.model
        self.q_width, self.kv_width = m.heads * m.head_dim, m.kv_heads * m.head_dim
        if m.fused_qkv:
            self.qkv = context.linear(m.hidden, self.q_width + 2 * self.kv_width, bias=m.qkv_bias)
        else:
            self.q = context.linear(m.hidden, self.q_width, bias=m.qkv_bias)
            self.k = context.linear(m.hidden, self.kv_width, bias=m.qkv_bias)
            self.v = context.linear(m.hidden, self.kv_width, bias=m.qkv_bias)
        if m.qk_norm != "none":
            full, weight = m.qk_norm == "full", m.qk_norm != "no_weight"
            self.q_norm = Norm(context, self.q_width if full else m.head_dim, weight=weight, bias=False)
            self.k_norm = Norm(context, self.kv_width if full else m.head_dim, weight=weight, bias=False)
        self.out = context.linear(self.q_width, m.hidden, bias=m.attention_out_bias)

    def queries_keys_values(self, x: Tensor, tables: "Tables") -> tuple[Tensor, Tensor, Tensor]:
        """Of every token and head, [batch, tokens, heads, head_dim]."""
        m = self.context.model
        batch, tokens, _ = x.shape
        if m.fused_qkv:
            q, k, v = self.qkv(x).split((self.q_width, self.kv_width, self.kv_width), -1)
        else:
            q, k, v = self.q(x), self.k(x), self.v(x)
        if m.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.view(batch, tokens, -1, m.head_dim) for t in (q, k, v))
        if m.qk_norm in ("per_head", "no_weight"):
            q, k = self.q_norm(q), self.k_norm(k)
        if m.positions == "rope":
            q, k = rotate(q, tables), rotate(k, tables)
        return q, k, v

    def forward(self, x: Tensor, tables: "Tables") -> Tensor:
        context = self.context
        batch, tokens, _ = x.shape
        q, k, v = self.queries_keys_values(x, tables)
        core = self.eager if context.recipe.attention == "eager" else self.fused
        if context.sequence:
            q = context.sequence.enter(q)
            k = context.sequence.enter(k)
            v = context.sequence.enter(v)
            core = context.sequence.attention(core)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        mask = tables.masks.get(self.window)
        if context.recompute_attention:
            y = checkpoint(core, q, k, v, mask, around=context.around, keep_rng=context.recipe.dropout > 0)
        else:
            y = core(q, k, v, mask)
        y = y.transpose(1, 2)
        if context.sequence:
            y = context.sequence.leave(y)
        return self.out(y.reshape(batch, tokens, -1))

    def fused(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        r = self.context.recipe
        return self.context.kernels.attention(q, k, v, r.dropout, r.causal, r.attention, self.window)

    def eager(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Scores, scale, mask, softmax, dropout, values, as nanoGPT writes it; k and v repeated for grouped queries."""
        groups = q.shape[1] // k.shape[1]
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = (q @ k.transpose(-2, -1)) * self.context.model.head_dim ** -0.5
        if mask is not None:
            scores = scores.masked_fill(mask, float("-inf"))
        weights = self.context.dropout(self.context.kernels.softmax(scores))
        return weights @ v


class LatentAttention(Attention):
    """Attention whose queries, and keys with values, come of narrow latents (DeepSeek-V2), as torchtitan's deepseek_v3 has it."""

    def __init__(self, context: Context, kind: LayerKind) -> None:
        nn.Module.__init__(self)
        m = context.model
        assert m.mla is not None
        self.context, self.window, self.mla = context, kind.window, m.mla
        if m.mla.q_lora_rank:
            self.q_a = context.linear(m.hidden, m.mla.q_lora_rank, bias=False)
            self.q_a_norm = Norm(context, m.mla.q_lora_rank, bias=False)
            self.q_b = context.linear(m.mla.q_lora_rank, m.heads * m.head_dim, bias=False)
        else:
            self.q = context.linear(m.hidden, m.heads * m.head_dim, bias=False)
        self.kv_a = context.linear(m.hidden, m.mla.kv_lora_rank + m.mla.qk_rope_head_dim, bias=False)
        self.kv_a_norm = Norm(context, m.mla.kv_lora_rank, bias=False)
        self.kv_b = context.linear(m.mla.kv_lora_rank, m.heads * (m.mla.qk_nope_head_dim + m.mla.v_head_dim), bias=False)
        self.out = context.linear(m.heads * m.mla.v_head_dim, m.hidden, bias=m.attention_out_bias)

    def queries_keys_values(self, x: Tensor, tables: "Tables") -> tuple[Tensor, Tensor, Tensor]:
        mla, heads = self.mla, self.context.model.heads
        batch, tokens, _ = x.shape
        q = self.q_b(self.q_a_norm(self.q_a(x))) if mla.q_lora_rank else self.q(x)
        q_nope, q_rope = q.view(batch, tokens, heads, -1).split((mla.qk_nope_head_dim, mla.qk_rope_head_dim), -1)
        q = torch.cat((q_nope, rotate(q_rope, tables)), -1)
        del q_nope, q_rope
        latent, k_rope = self.kv_a(x).split((mla.kv_lora_rank, mla.qk_rope_head_dim), -1)
        k_rope = rotate(k_rope.unsqueeze(2), tables)
        kv = self.kv_b(self.kv_a_norm(latent)).view(batch, tokens, heads, -1)
        k_nope, v = kv.split((mla.qk_nope_head_dim, mla.v_head_dim), -1)
        return q, torch.cat((k_nope, k_rope.expand(-1, -1, heads, -1)), -1), v


class FeedForward(nn.Module):
    """Two matrices around an activation, or three with a gate."""

    def __init__(self, context: Context, ffn: int, bias: bool) -> None:
        super().__init__()
        m = context.model
        self.activation = ACTIVATIONS[m.activation]
        if m.gated:
            self.gate = context.linear(m.hidden, ffn, bias=bias)
        self.up = context.linear(m.hidden, ffn, bias=bias)
        self.down = context.linear(ffn, m.hidden, bias=bias)
        self.gated = m.gated

    def forward(self, x: Tensor) -> Tensor:
        if self.gated:
            return self.down(self.activation(self.gate(x)) * self.up(x))
        return self.down(self.activation(self.up(x)))


class Layer(nn.Module):
    """One Transformer layer: pre-norm, post-norm (OLMo 2: the norm follows the block, inside the residual), sandwich or parallel."""

    def __init__(self, context: Context, kind: LayerKind, checkpointed: bool) -> None:
        super().__init__()
        m = context.model
        self.context = context
        self.moe = kind.moe
        self.checkpointed = checkpointed
        self.attention_norm = Norm(context, m.hidden)
        self.attention = (LatentAttention if m.mla else Attention)(context, kind)
        if m.norms_per_layer == 4:
            self.attention_post_norm = Norm(context, m.hidden)
        if m.norms_per_layer >= 2:
            self.mlp_norm = Norm(context, m.hidden)
        if m.moe is None or not kind.moe:
            self.mlp = FeedForward(context, m.ffn, m.mlp_bias)
        else:
            self.router = nn.Linear(m.hidden, m.moe.experts, bias=m.moe.router_bias)
            self.experts = Experts(m, context.recipe, context.expert_ranks, context.compute, context.kernels, ACTIVATIONS[m.activation])
            if m.moe.shared_ffn:
                self.shared = FeedForward(context, m.moe.shared_ffn, False)
        if m.norms_per_layer == 4:
            self.mlp_post_norm = Norm(context, m.hidden)

    def feed_forward(self, x: Tensor) -> Tensor:
        """The feed-forward block: dense, or a mixture of experts with those that every token uses beside it."""
        m, r = self.context.model, self.context.recipe
        if m.moe is None or not self.moe:
            return self.mlp(x)
        y = mixture(x, self.router, self.experts, m.moe.top_k, m.moe.router_score, m.moe.aux_loss_coefficient / r.grad_accum)
        return y + self.shared(x) if m.moe.shared_ffn else y

    def forward(self, x: Tensor, tables: "Tables") -> Tensor:
        c = self.context
        if self.checkpointed:
            run = checkpoint_ops if c.recompute_ops else checkpoint
            return run(self.block, x, tables, around=c.around, keep_rng=c.recipe.dropout > 0)
        return self.block(x, tables)

    def block(self, x: Tensor, tables: "Tables") -> Tensor:
        m, drop = self.context.model, self.context.dropout
        if m.parallel_residual:
            a = self.attention_norm(x)
            b = self.mlp_norm(x) if m.norms_per_layer >= 2 else a
            return x + drop(self.attention(a, tables)) + drop(self.feed_forward(b))
        if m.norm_placement == "post":
            x = x + self.attention_norm(drop(self.attention(x, tables)))
            return x + self.mlp_norm(drop(self.feed_forward(x)))
        if m.norms_per_layer == 4:
            x = x + self.attention_post_norm(drop(self.attention(self.attention_norm(x), tables)))
            return x + self.mlp_post_norm(drop(self.feed_forward(self.mlp_norm(x))))
        x = x + drop(self.attention(self.attention_norm(x), tables))
        return x + drop(self.feed_forward(self.mlp_norm(x) if m.norms_per_layer >= 2 else self.attention_norm(x)))


class Tables:
    """Constants shared by the layers: rotary cosines and sines [tokens, 1, width], and the masks of eager attention by window."""

    __slots__ = ("cos", "sin", "masks")

    def __init__(self, cos: Tensor | None, sin: Tensor | None, masks: dict[int, Tensor]) -> None:
        self.cos, self.sin, self.masks = cos, sin, masks


class Head(nn.Linear):
    """The output matrix and its bias; a tied head has no matrix of its own and is told the embedding's."""

    def __init__(self, m: Model) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = m.hidden, m.vocab
        self.register_parameter("weight", None if m.tied_embeddings else nn.Parameter(torch.empty(m.vocab, m.hidden)))
        self.register_parameter("bias", nn.Parameter(torch.zeros(m.vocab)) if m.head_bias else None)

    def forward(self, x: Tensor, *, tied: Tensor | None = None) -> Tensor:
        return F.linear(x, self.weight if tied is None else tied, self.bias)


class Part(NamedTuple):
    """A pipeline stage's part of a model: how many layers, and whether the embedding and the head are in it; the first of them."""

    layers: int
    first: bool = True
    last: bool = True
    begins: int = 0


class Transformer(nn.Module):
    """Tokens and targets in, mean loss out. A part of one takes and returns hidden states instead; the last part, without targets, logits."""

    def __init__(self, context: Context, part: Part | None = None) -> None:
        super().__init__()
        m, r = context.model, context.recipe
        self.context = context
        self.part = part = part or Part(m.layers)
        if part.first:
            self.embedding = nn.Embedding(m.vocab, m.hidden)
            if m.position_rows:
                self.positions = nn.Embedding(m.position_rows, m.hidden)
            if m.embedding_norm:
                self.embedding_norm = Norm(context, m.hidden)
        self.groups = layer_groups(context.checkpointing, part.layers)
        alone = [len(indices) == 1 and on for indices, on in self.groups for _ in indices]
        if context.recompute_ops:
            alone = [True] * part.layers
        kinds = layer_kinds(m, r.seq_len)[part.begins:part.begins + part.layers]
        self.layers = nn.ModuleList(Layer(context, kind, alone[i]) for i, kind in enumerate(kinds))
        if part.last:
            if m.final_norm:
                self.final_norm = Norm(context, m.hidden)
            self.head = Head(m)
        if m.positions == "rope":
            self.rotary_width = m.mla.qk_rope_head_dim if m.mla else int(m.head_dim * m.rotary_fraction)
            cos, sin = rotary_tables(torch.arange(context.tokens), self.rotary_width, context.compute)
            self.register_buffer("cos", cos, persistent=False)
            self.register_buffer("sin", sin, persistent=False)
        if part.first and m.position_rows and context.sequence:
            self.register_buffer("places", torch.empty(context.tokens, dtype=torch.int64), persistent=False)
        if r.attention == "eager" and r.causal:
            for window in sorted({kind.window for kind in layer_kinds(m, r.seq_len)}):
                self.register_buffer(f"mask{window}", causal_mask(r.seq_len, window), persistent=False)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        m, c = self.context.model, self.context
        if self.part.first:
            x = self.embed(x)
        tables = self.tables()
        for indices, on in self.groups:
            if on and len(indices) > 1:
                x = checkpoint(self.run_layers, x, indices, tables, around=c.around, keep_rng=c.recipe.dropout > 0)
            else:
                x = self.run_layers(x, indices, tables)
        if not self.part.last:
            return x
        if m.final_norm:
            x = self.final_norm(x)
        tied = self.embedding.weight if m.tied_embeddings else None
        if targets is None:
            return self.head(x, tied=tied)
        return head_and_loss(c.recipe, x, self.head, tied, targets, c.around, m.logit_softcap)

    def tables(self) -> Tables:
        """The constants that its layers share."""
        masks = {int(name.removeprefix("mask")): mask for name, mask in self.named_buffers(recurse=False) if name.startswith("mask")}
        return Tables(getattr(self, "cos", None), getattr(self, "sin", None), masks)

    def embed(self, tokens: Tensor) -> Tensor:
        m = self.context.model
        x = self.embedding(tokens)
        if m.position_rows:
            x = x + self.positions(self.places if self.context.sequence else torch.arange(tokens.shape[1], device=tokens.device))
        if m.embedding_norm:
            x = self.embedding_norm(x)
        return self.context.dropout(x)

    @torch.no_grad()
    def init_constants(self) -> None:
        """Give the constant buffers their values (execute.weights draws the parameters)."""
        constants = dict(self.named_buffers(recurse=False))
        if "cos" in constants:
            cos, sin = rotary_tables(self.context.places(), self.rotary_width, self.context.compute)
            constants["cos"].copy_(cos)
            constants["sin"].copy_(sin)
        if "places" in constants:
            constants["places"].copy_(self.context.places())
        for name, mask in constants.items():
            if name.startswith("mask"):
                mask.copy_(causal_mask(mask.shape[0], int(name.removeprefix("mask"))))

    def run_layers(self, x: Tensor, indices: range, tables: Tables) -> Tensor:
        for i in indices:
            x = self.layers[i](x, tables)
        return x


def causal_mask(tokens: int, window: int) -> Tensor:
    """What a token does not see [tokens, tokens]: what comes after it, and with a window all but the last `window` tokens, itself among those."""
    ones = torch.ones(tokens, tokens, dtype=torch.bool)
    return ones.triu(1) | ones.tril(-window) if window else ones.triu(1)


def rotary_tables(places: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles at these places, [tokens, 1, width] (arXiv 2104.09864; halves, as in Hugging Face's Llama)."""
    frequency = 10_000.0 ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
    angles = places.float()[:, None] * frequency
    angles = torch.cat((angles, angles), -1)[:, None, :]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, tables: Tables) -> Tensor:
    """q·cos + rotate_half(q)·sin on the leading dims of each head that rotate, [batch, tokens, heads, head_dim]."""
    assert tables.cos is not None and tables.sin is not None
    width = tables.cos.shape[-1]
    part = x if width == x.shape[-1] else x[..., :width]
    a, b = part.chunk(2, -1)
    y = part * tables.cos + torch.cat((-b, a), -1) * tables.sin
    return y if width == x.shape[-1] else torch.cat((y, x[..., width:]), -1)
