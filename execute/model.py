# mypy: disable-error-code="no-untyped-call, no-any-return, misc"
"""One decoder-only Transformer, GPT-style or Llama-style, from a Model; idiomatic eager PyTorch.

Parameters have the names, shapes and order of costmodel.spec.parameters.
"""

from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from costmodel.spec import Checkpointing, Model, Recipe
from execute.checkpoint import Around, checkpoint, checkpoint_ops, layer_groups
from execute.dtypes import DTYPES
from execute.float8 import linear
from execute.kernels import Kernels, composed_norm
from execute.losses import head_and_loss

EPS = 1e-5
ACTIVATIONS = {"gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu,
               "relu_squared": lambda x: F.relu(x).square(), "silu": F.silu}


class Context:
    """What every module needs to know: the description, the kernels, and how a recompute is marked."""

    def __init__(self, model: Model, recipe: Recipe, checkpointing: Checkpointing, kernels: Kernels, around: Around = nullcontext) -> None:
        self.model = model
        self.recipe = recipe
        self.checkpointing = checkpointing
        self.kernels = kernels
        self.around = around
        self.compute = DTYPES[recipe.precision.compute]
        selective = checkpointing.ops if checkpointing.mode == "selective" else ()
        self.recompute_attention = "attention" in selective
        self.recompute_ops = "op" in selective

    def linear(self, width: int, out: int, *, bias: bool) -> nn.Linear:
        return linear(self.recipe, width, out, bias=bias)

    def dropout(self, x: Tensor) -> Tensor:
        return self.kernels.dropout(x, self.recipe.dropout)


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

    def __init__(self, context: Context) -> None:
        super().__init__()
        self.context = context
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

    def forward(self, x: Tensor, tables: "Tables") -> Tensor:
        m, context = self.context.model, self.context
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
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        core = self.eager if context.recipe.attention == "eager" else self.fused
        if context.recompute_attention:
            y = checkpoint(core, q, k, v, tables.mask, around=context.around, keep_rng=context.recipe.dropout > 0)
        else:
            y = core(q, k, v, tables.mask)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, -1))

    def fused(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        r = self.context.recipe
        return self.context.kernels.attention(q, k, v, r.dropout, r.causal, r.attention)

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


class FeedForward(nn.Module):
    """Two matrices around an activation, or three with a gate."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        m = context.model
        self.activation = ACTIVATIONS[m.activation]
        if m.gated:
            self.gate = context.linear(m.hidden, m.ffn, bias=m.mlp_bias)
        self.up = context.linear(m.hidden, m.ffn, bias=m.mlp_bias)
        self.down = context.linear(m.ffn, m.hidden, bias=m.mlp_bias)
        self.gated = m.gated

    def forward(self, x: Tensor) -> Tensor:
        if self.gated:
            return self.down(self.activation(self.gate(x)) * self.up(x))
        return self.down(self.activation(self.up(x)))


class Layer(nn.Module):
    """One Transformer layer: pre-norm, post-norm (OLMo 2: the norm follows the block, inside the residual), sandwich or parallel."""

    def __init__(self, context: Context, index: int, checkpointed: bool) -> None:
        super().__init__()
        m = context.model
        self.context = context
        self.checkpointed = checkpointed
        self.attention_norm = Norm(context, m.hidden)
        self.attention = Attention(context)
        if m.norms_per_layer == 4:
            self.attention_post_norm = Norm(context, m.hidden)
        if m.norms_per_layer >= 2:
            self.mlp_norm = Norm(context, m.hidden)
        self.mlp = FeedForward(context)
        if m.norms_per_layer == 4:
            self.mlp_post_norm = Norm(context, m.hidden)

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
            return x + drop(self.attention(a, tables)) + drop(self.mlp(b))
        if m.norm_placement == "post":
            x = x + self.attention_norm(drop(self.attention(x, tables)))
            return x + self.mlp_norm(drop(self.mlp(x)))
        if m.norms_per_layer == 4:
            x = x + self.attention_post_norm(drop(self.attention(self.attention_norm(x), tables)))
            return x + self.mlp_post_norm(drop(self.mlp(self.mlp_norm(x))))
        x = x + drop(self.attention(self.attention_norm(x), tables))
        return x + drop(self.mlp(self.mlp_norm(x) if m.norms_per_layer >= 2 else self.attention_norm(x)))


class Tables:
    """Constants shared by the layers: rotary cosines and sines [tokens, 1, width], and the mask of eager attention."""

    __slots__ = ("cos", "sin", "mask")

    def __init__(self, cos: Tensor | None, sin: Tensor | None, mask: Tensor | None) -> None:
        self.cos, self.sin, self.mask = cos, sin, mask


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
    """A pipeline stage's part of a model: how many layers, and whether the embedding and the head are in it."""

    layers: int
    first: bool = True
    last: bool = True


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
        self.layers = nn.ModuleList(Layer(context, i, alone[i]) for i in range(part.layers))
        if part.last:
            if m.final_norm:
                self.final_norm = Norm(context, m.hidden)
            self.head = Head(m)
        if m.positions == "rope":
            self.rotary_shape = r.seq_len, int(m.head_dim * m.rotary_fraction)
            cos, sin = rotary_tables(*self.rotary_shape, context.compute)
            self.register_buffer("cos", cos, persistent=False)
            self.register_buffer("sin", sin, persistent=False)
        if r.attention == "eager" and r.causal:
            mask = torch.ones(r.seq_len, r.seq_len, dtype=torch.bool).triu(1)
            self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        m, c = self.context.model, self.context
        if self.part.first:
            x = self.embed(x)
        tables = Tables(getattr(self, "cos", None), getattr(self, "sin", None), getattr(self, "mask", None))
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
        return self.head(x, tied=tied) if targets is None else head_and_loss(c.recipe, x, self.head, tied, targets, c.around)

    def embed(self, tokens: Tensor) -> Tensor:
        m = self.context.model
        x = self.embedding(tokens)
        if m.position_rows:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        if m.embedding_norm:
            x = self.embedding_norm(x)
        return self.context.dropout(x)

    @torch.no_grad()
    def init_constants(self) -> None:
        """Give the constant buffers their values (execute.weights draws the parameters)."""
        constants = dict(self.named_buffers(recurse=False))
        if "cos" in constants:
            cos, sin = rotary_tables(*self.rotary_shape, self.context.compute)
            constants["cos"].copy_(cos)
            constants["sin"].copy_(sin)
        if "mask" in constants:
            constants["mask"].copy_(torch.ones_like(constants["mask"]).triu(1))

    def run_layers(self, x: Tensor, indices: range, tables: Tables) -> Tensor:
        for i in indices:
            x = self.layers[i](x, tables)
        return x


def rotary_tables(tokens: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles, [tokens, 1, width] (arXiv 2104.09864; halves, as in Hugging Face's Llama)."""
    frequency = 10_000.0 ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
    angles = torch.arange(tokens, dtype=torch.float32)[:, None] * frequency
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
