"""Model: the architecture of a Transformer, as its shape decides memory and time."""

from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from costmodel.spec.base import PlanError, Spec

Norm = Literal["layernorm", "rmsnorm", "rmsnorm_no_weight"]
Activation = Literal["gelu", "gelu_tanh", "relu", "relu_squared", "silu"]
Positions = Literal["learned", "rope", "alibi", "none"]
QkNorm = Literal["none", "per_head", "full", "no_weight"]
AttentionPattern = Literal["global", "sliding", "alternating", "mixed"]
MOST_LAYERS = 100_000


class MoE(Spec):
    """Mixture of experts: the routed feed-forward blocks of a model."""

    experts: PositiveInt
    """Routed experts per MoE layer."""
    top_k: PositiveInt
    """Experts that one token uses."""
    expert_ffn: PositiveInt
    """Inner width of one expert."""
    shared_experts: int = Field(0, ge=0)
    shared_ffn: int = Field(0, ge=0)
    """Total inner width of the shared experts."""
    first_dense_layers: int = Field(0, ge=0)
    """Leading layers whose feed-forward block is dense."""
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    """What makes scores of the router's logits."""
    router_bias: bool = False
    expert_bias: bool = False
    aux_loss_coefficient: float = Field(0.0, ge=0)
    """The α of α·E·Σ fᵢPᵢ; 0 balances without an auxiliary loss."""

    @model_validator(mode="after")
    def _top_k_fits(self) -> "MoE":
        if self.top_k > self.experts:
            raise PlanError("model.moe.top_k", self.top_k, f"a token cannot use more than the {self.experts} experts.",
                            f"Use top_k <= {self.experts}.")
        return self


class MLA(Spec):
    """Multi-head latent attention: low-rank projections of queries, keys and values."""

    q_lora_rank: int = Field(0, ge=0)
    """0 means that queries are projected directly."""
    kv_lora_rank: PositiveInt
    qk_nope_head_dim: PositiveInt
    qk_rope_head_dim: PositiveInt
    v_head_dim: PositiveInt


QK_DIMS = ("qk_nope_head_dim", "qk_rope_head_dim")


class Model(Spec):
    """Architecture of a decoder-only Transformer language model."""

    name: str = "custom"
    layers: PositiveInt
    hidden: PositiveInt
    heads: PositiveInt
    kv_heads: int = Field(0, ge=0)
    """0 is read as `heads` (multi-head attention)."""
    head_dim: int = Field(0, ge=0)
    """0 is read as hidden / heads; of latent attention it is qk_nope_head_dim + qk_rope_head_dim."""
    ffn: PositiveInt
    """Inner width of the dense feed-forward block."""
    vocab: PositiveInt
    """Rows of the embedding, padding included."""
    gated: bool = True
    """Three feed-forward matrices (gate, up, down) instead of two."""
    activation: Activation = "silu"
    tied_embeddings: bool = False
    norm: Norm = "rmsnorm"
    norm_bias: bool = False
    norms_per_layer: int = Field(2, ge=1, le=4)
    """Width-`hidden` norms of one layer: 2 before each block, 4 also after it, 1 shared by both."""
    norm_placement: Literal["pre", "post", "sandwich"] = "pre"
    final_norm: bool = True
    embedding_norm: bool = False
    positions: Positions = "rope"
    position_rows: int = Field(0, ge=0)
    """Rows of the learned position table; 0 where positions are not learned."""
    rotary_fraction: float = Field(1.0, ge=0, le=1)
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    fused_qkv: bool = False
    """One matrix projects queries, keys and values (GPT-2, Megatron) instead of three."""
    qk_norm: QkNorm = "none"
    attention_sinks: bool = False
    parallel_residual: bool = False
    sliding_window: int = Field(0, ge=0)
    """Tokens a sliding layer sees, the token itself the last of them; 0 where every layer sees all."""
    attention_pattern: AttentionPattern = "global"
    """Which layers slide: none, all, every second from the first on, or as `window_pattern` says. "sliding" where a window alone is given."""
    window_pattern: str = ""
    """Of a mixed pattern: S for a layer with the window, L for one that sees all, repeated over the layers ("SSSL")."""
    embedding_dim: int = Field(0, ge=0)
    """Width of the embedding table; 0 is read as `hidden`."""
    logit_softcap: float = Field(0.0, ge=0)
    """c of logits bounded as c·tanh(logits/c); 0: not bounded."""
    moe: MoE | None = None
    mla: MLA | None = None
    mtp_depth: int = Field(0, ge=0)
    """Multi-token-prediction modules."""
    hybrid: str = ""
    """Layers of another kind ("mamba"); empty for a pure Transformer."""
    extra_params: int = Field(0, ge=0)
    """Parameters outside this scheme."""
    extra_params_note: str = ""
    shape_rule: str = ""
    """How the shape was chosen, where a parameter count was asked for."""

    @model_validator(mode="before")
    @classmethod
    def _fill_derived(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        data = dict(data)
        heads, hidden = data.get("heads"), data.get("hidden")
        if isinstance(heads, int) and heads > 0:
            if not data.get("kv_heads"):
                data["kv_heads"] = heads
            mla = data.get("mla")
            if mla and not data.get("head_dim"):
                data["head_dim"] = sum(getattr(mla, key, 0) or (mla.get(key, 0) if isinstance(mla, dict) else 0) for key in QK_DIMS)
            if not data.get("head_dim") and isinstance(hidden, int):
                if hidden % heads:
                    raise PlanError("model.heads", heads, f"hidden = {hidden} is not a multiple of heads, and head_dim is not given.",
                                    f"Use heads = {_near_divisor(hidden, heads)}, or give head_dim.")
                data["head_dim"] = hidden // heads
        if not data.get("embedding_dim") and isinstance(hidden, int):
            data["embedding_dim"] = hidden
        if data.get("window_pattern"):
            data.setdefault("attention_pattern", "mixed")
        if data.get("sliding_window"):
            data.setdefault("attention_pattern", "sliding")
        return data

    @model_validator(mode="after")
    def _heads_share_kv(self) -> "Model":
        if self.heads % self.kv_heads:
            raise PlanError("model.kv_heads", self.kv_heads, f"heads = {self.heads} must be a multiple of kv_heads.",
                            f"Use kv_heads = {_near_divisor(self.heads, self.kv_heads)}.")
        if self.layers > MOST_LAYERS:
            raise PlanError("model.layers", self.layers, f"a model has at most {MOST_LAYERS:,} layers here.", "Use layers = 100, say.")
        if self.positions == "learned" and not self.position_rows:
            raise PlanError("model.position_rows", 0, "learned positions need the number of rows of their table.",
                            "Use position_rows = the longest sequence, for example 1024.")
        return self

    @model_validator(mode="after")
    def _latents_have_their_own_heads(self) -> "Model":
        if self.mla is None:
            return self
        both = self.mla.qk_nope_head_dim + self.mla.qk_rope_head_dim
        for field, value, plain in (("head_dim", self.head_dim, both), ("kv_heads", self.kv_heads, self.heads), ("qk_norm", self.qk_norm, "none"),
                                    ("qkv_bias", self.qkv_bias, False), ("fused_qkv", self.fused_qkv, False)):
            if value != plain:
                raise PlanError(f"model.{field}", value, "latent attention has its own projections: heads of qk_nope_head_dim + qk_rope_head_dim, each with "
                                "its keys.", f"Leave {field} out, or use {field} = {str(plain).lower()}.")
        return self

    @model_validator(mode="after")
    def _pattern_of_windows(self) -> "Model":
        if set(self.window_pattern) - {"S", "L"}:
            raise PlanError("model.window_pattern", self.window_pattern, "it has letters beside S (window) and L (all).", "Use SSSL, say.")
        if self.window_pattern and self.attention_pattern != "mixed":
            raise PlanError("model.window_pattern", self.window_pattern, f"it says which layers of a mixed pattern slide, and this one is "
                            f"{self.attention_pattern}.", "Use attention_pattern = mixed, or no window_pattern.")
        if self.sliding_window and self.attention_pattern == "global":
            raise PlanError("model.sliding_window", self.sliding_window, "with attention_pattern = global every layer sees all.",
                            "Use attention_pattern = sliding, or sliding_window = 0.")
        return self

    @property
    def params(self) -> int:
        """Parameters of the model, tied embeddings counted once."""
        from costmodel.spec.parameters import parameter_count
        return parameter_count(self)


def _near_divisor(n: int, near: int) -> int:
    """The divisor of n nearest to `near`."""
    divisors = [d for d in range(1, min(n, 4096) + 1) if n % d == 0]
    return min(divisors, key=lambda d: (abs(d - near), d))
