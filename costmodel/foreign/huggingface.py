"""A model's config.json of the Hugging Face hub as a model's shape.

What a key means, and what holds where a file leaves it out, is that of the model's class in transformers (checked against the parameters that
transformers 5.24 counts; tests/foreign). A model_type that is not known here is refused: two models with the same keys may differ in biases and norms.
"""

from collections.abc import Callable, Mapping
from typing import Any

from costmodel.foreign.said import Foreign, Keys, number, whole
from costmodel.spec.base import PlanError
from costmodel.spec.kinds import LETTERS

PROGRAM = "Hugging Face"
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
               "relu": "relu", "relu2": "relu_squared"}
LAYERNORM: dict[str, Any] = {"norm": "layernorm", "norm_bias": True}
BIASES: dict[str, Any] = {"qkv_bias": True, "attention_out_bias": True, "mlp_bias": True}
Rest = Callable[[Keys, dict[str, Any], Foreign], None]


class Family:
    """One model_type: what all its models share, whether head and embedding are one table where the file does not say, and what else its keys decide."""

    def __init__(self, tied: bool = False, rest: Rest | None = None, activation: str = "silu", **shared: Any) -> None:
        self.tied, self.rest, self.activation, self.shared = tied, rest, activation, shared


def _llama(k: Keys, m: dict[str, Any], _: Foreign) -> None:
    bias = k.on("attention_bias")
    m |= {"qkv_bias": bias, "attention_out_bias": bias, "mlp_bias": k.on("mlp_bias")}


def _olmo2(k: Keys, m: dict[str, Any], f: Foreign) -> None:
    _llama(k, m, f)
    _windows(k, m, f)


def _windows(k: Keys, m: dict[str, Any], f: Foreign) -> None:
    """Layers that see a window: all of them, or those that layer_types (or an older pattern key) names."""
    window, kinds = whole(k.get("sliding_window")), k.get("layer_types")
    every = whole(k.get("sliding_window_pattern", "_sliding_window_pattern"))
    if "use_sliding_window" in k.data and not k.on("use_sliding_window"):
        window = None
    if not window:
        return
    sliding = [kind == "sliding_attention" for kind in kinds] if isinstance(kinds, list) else None
    if sliding is None and every:
        sliding = [(i + 1) % every != 0 for i in range(m["layers"])]
    if sliding is None or all(sliding):
        m |= {"sliding_window": window, "attention_pattern": "sliding"}
    elif any(sliding):
        letters = "".join("S" if each else "L" for each in sliding)
        period = next(n for n in range(1, len(letters) + 1) if (letters[:n] * len(letters))[:len(letters)] == letters)
        m |= {"sliding_window": window, "attention_pattern": "mixed", "window_pattern": letters[:period]}
        if letters[:period] == LETTERS["alternating"]:
            m |= {"attention_pattern": "alternating", "window_pattern": ""}


def _qwen2(k: Keys, m: dict[str, Any], f: Foreign) -> None:
    m["qkv_bias"] = True
    _windows(k, m, f)


def _qwen3(k: Keys, m: dict[str, Any], f: Foreign) -> None:
    bias = k.on("attention_bias")
    m |= {"qkv_bias": bias, "attention_out_bias": bias, "qk_norm": "per_head"}
    _windows(k, m, f)


def _mixtral(k: Keys, m: dict[str, Any], f: Foreign) -> None:
    m["moe"] = {"experts": whole(k.get("num_local_experts", default=8)), "top_k": whole(k.get("num_experts_per_tok", default=2)), "expert_ffn": m["ffn"],
                "aux_loss_coefficient": number(k.get("router_aux_loss_coef")) or 0.0}
    _windows(k, m, f)


def _qwen_experts(k: Keys, m: dict[str, Any], f: Foreign) -> None:
    if whole(k.get("decoder_sparse_step", default=1)) != 1 or k.get("mlp_only_layers"):
        f.lost.append("decoder_sparse_step, mlp_only_layers: dense layers between those of the mixture")
    m["moe"] = {"experts": whole(k.get("num_experts", "num_local_experts", "n_routed_experts")), "top_k": whole(k.get("num_experts_per_tok", default=8)),
                "expert_ffn": whole(k.get("moe_intermediate_size")), "aux_loss_coefficient": number(k.get("router_aux_loss_coef")) or 0.0}


def _qwen2_moe(k: Keys, m: dict[str, Any], f: Foreign) -> None:
    _qwen2(k, m, f)
    _qwen_experts(k, m, f)
    shared = whole(k.get("shared_expert_intermediate_size", default=0))
    m["moe"] |= {"shared_experts": 1, "shared_ffn": shared}
    f.notes.append(f"the gate of the shared expert, {m['hidden']} parameters a layer, is left out")


def _qwen3_moe(k: Keys, m: dict[str, Any], f: Foreign) -> None:
    _qwen3(k, m, f)
    _qwen_experts(k, m, f)


def _deepseek(k: Keys, m: dict[str, Any], f: Foreign) -> None:
    rope, nope = whole(k.get("qk_rope_head_dim", default=64)), whole(k.get("qk_nope_head_dim", default=128))
    assert rope is not None and nope is not None
    k.has("head_dim", "qk_head_dim", "num_key_value_heads")
    m |= {"mla": {"q_lora_rank": whole(k.get("q_lora_rank")) or 0, "kv_lora_rank": whole(k.get("kv_lora_rank", default=512)), "qk_nope_head_dim": nope,
                  "qk_rope_head_dim": rope, "v_head_dim": whole(k.get("v_head_dim", default=128))}, "kv_heads": m["heads"], "head_dim": nope + rope}
    experts = whole(k.get("n_routed_experts"))
    if not experts:
        return
    shared, width = whole(k.get("n_shared_experts")) or 0, whole(k.get("moe_intermediate_size"))
    if whole(k.get("moe_layer_freq", default=1)) != 1:
        f.lost.append("moe_layer_freq: dense layers between those of the mixture")
    m["moe"] = {"experts": experts, "top_k": whole(k.get("num_experts_per_tok", default=8)), "expert_ffn": width, "shared_experts": shared,
                "shared_ffn": shared * (width or 0), "first_dense_layers": whole(k.get("first_k_dense_replace", default=0)),
                "aux_loss_coefficient": number(k.get("aux_loss_alpha")) or 0.0}
    if k.get("model_type") != "deepseek_v2":
        m["moe"] |= {"router_score": "sigmoid", "router_bias": True}
    if extra := whole(k.get("num_nextn_predict_layers")):
        f.notes.append(f"num_nextn_predict_layers = {extra}: transformers' model has no multi-token prediction, and it is left out; "
                       f"--set model.mtp_depth={extra} says that it is trained")


def _gemma(k: Keys, m: dict[str, Any], f: Foreign) -> None:
    bias = k.on("attention_bias")
    m |= {"qkv_bias": bias, "attention_out_bias": bias, "logit_softcap": number(k.get("final_logit_softcapping")) or 0.0}
    k.has("attn_logit_softcapping", "query_pre_attn_scalar")


def _gemma2(k: Keys, m: dict[str, Any], f: Foreign) -> None:
    _gemma(k, m, f)
    if "layer_types" not in k:
        k = Keys({**k.data, "sliding_window_pattern": 2})
    _windows(k, m, f)


def _gemma3(k: Keys, m: dict[str, Any], f: Foreign) -> None:
    _gemma(k, m, f)
    if "layer_types" not in k and not k.has("sliding_window_pattern", "_sliding_window_pattern"):
        k = Keys({**k.data, "sliding_window_pattern": 6})
    _windows(k, m, f)


def _gpt_oss(k: Keys, m: dict[str, Any], f: Foreign) -> None:
    m["moe"] = {"experts": whole(k.get("num_local_experts", default=32)), "top_k": whole(k.get("num_experts_per_tok", "experts_per_token", default=4)),
                "expert_ffn": m["ffn"], "router_bias": True, "expert_bias": True, "aux_loss_coefficient": number(k.get("router_aux_loss_coef")) or 0.0}
    _windows(k, m, f)


def _neox(k: Keys, m: dict[str, Any], _: Foreign) -> None:
    bias = k.get("attention_bias", default=True)
    m |= {"rotary_fraction": number(k.get("rotary_pct", "partial_rotary_factor", default=0.25)),
          "parallel_residual": k.get("use_parallel_residual", default=True),
          "qkv_bias": bias, "attention_out_bias": bias, "mlp_bias": True}


def _gpt2(k: Keys, m: dict[str, Any], _: Foreign) -> None:
    m["position_rows"] = whole(k.get("n_positions", "max_position_embeddings", default=1024))


def _bigcode(k: Keys, m: dict[str, Any], f: Foreign) -> None:
    _gpt2(k, m, f)
    m["kv_heads"] = 1 if k.get("multi_query", default=True) else m["heads"]


def _gptj(k: Keys, m: dict[str, Any], _: Foreign) -> None:
    head = m["hidden"] // m["heads"]
    m["rotary_fraction"] = (whole(k.get("rotary_dim", default=head)) or head) / head


def _phi(k: Keys, m: dict[str, Any], _: Foreign) -> None:
    m["rotary_fraction"] = number(k.get("partial_rotary_factor", default=0.5))


def _opt(k: Keys, m: dict[str, Any], f: Foreign) -> None:
    """fairseq's position table has two rows more; the 350M model norms after its blocks, and projects its 512-wide embedding."""
    m["position_rows"] = (whole(k.get("max_position_embeddings", default=2048)) or 2048) + 2
    if not k.get("enable_bias", default=True):
        m |= {"qkv_bias": False, "attention_out_bias": False, "mlp_bias": False}
    if not k.get("do_layer_norm_before", default=True):
        m |= {"norm_placement": "post", "final_norm": False}
    width = whole(k.get("word_embed_proj_dim")) or m["hidden"]
    if width != m["hidden"]:
        m |= {"embedding_dim": width, "extra_params": 2 * width * m["hidden"],
              "extra_params_note": f"projections in and out of the {width}-wide embedding (no bias)"}


def _mpt(k: Keys, m: dict[str, Any], _: Foreign) -> None:
    attention = k.table("attn_config")
    m["ffn"] = int((number(k.get("expansion_ratio", default=4)) or 4) * m["hidden"])
    if not k.get("no_bias", default=True):
        m |= {**BIASES, "norm_bias": True}
    if attention.get("alibi", default=True):
        m["positions"] = "alibi"
    else:
        m |= {"positions": "learned", "position_rows": whole(k.get("max_seq_len", default=2048))}
    m["kv_heads"] = whole(attention.get("kv_n_heads")) or (1 if attention.get("attn_type") == "multiquery_attention" else m["heads"])


def _falcon(k: Keys, m: dict[str, Any], _: Foreign) -> None:
    new = k.on("new_decoder_architecture")
    kv = whole(k.get("num_kv_heads", "n_head_kv")) if new else 1 if k.get("multi_query", default=True) else m["heads"]
    parallel = new or k.get("parallel_attn", default=True)
    bias = k.on("bias")
    m |= {"kv_heads": kv or m["heads"], "parallel_residual": parallel, "qkv_bias": bias, "attention_out_bias": bias, "mlp_bias": bias,
          "norms_per_layer": 2 if not parallel or new and k.get("num_ln_in_parallel_attn", default=2) == 2 else 1}
    m["ffn"] = whole(k.get("ffn_hidden_size")) or 4 * m["hidden"]
    if k.on("alibi"):
        m["positions"] = "alibi"


def _cohere(k: Keys, m: dict[str, Any], _: Foreign) -> None:
    bias = k.on("attention_bias")
    m |= {"qkv_bias": bias, "attention_out_bias": bias}
    if k.on("use_qk_norm"):
        m["qk_norm"] = "per_head"


def _stablelm(k: Keys, m: dict[str, Any], f: Foreign) -> None:
    m |= {"qkv_bias": k.on("use_qkv_bias"), "rotary_fraction": number(k.get("partial_rotary_factor", "rope_pct", default=0.25))}
    if k.on("use_parallel_residual"):
        m |= {"parallel_residual": True, "norms_per_layer": 1}
    if k.on("qk_layernorm"):
        f.lost.append("qk_layernorm: a norm of its own for each head")


def _starcoder2(k: Keys, m: dict[str, Any], f: Foreign) -> None:
    bias = k.get("use_bias", default=True)
    m |= {"qkv_bias": bias, "attention_out_bias": bias, "mlp_bias": bias}
    _windows(k, m, f)


FAMILIES: dict[str, Family] = {
    "llama": Family(rest=_llama), "granite": Family(rest=_llama), "smollm3": Family(True, _llama),
    "mistral": Family(rest=_windows), "mixtral": Family(rest=_mixtral), "qwen2": Family(rest=_qwen2), "qwen2_moe": Family(rest=_qwen2_moe),
    "qwen3": Family(rest=_qwen3), "qwen3_moe": Family(rest=_qwen3_moe),
    "gemma": Family(True, _gemma, "gelu_tanh"),
    "gemma2": Family(True, _gemma2, "gelu_tanh", norms_per_layer=4, norm_placement="sandwich"),
    "gemma3_text": Family(True, _gemma3, "gelu_tanh", norms_per_layer=4, norm_placement="sandwich", qk_norm="per_head"),
    "olmo2": Family(rest=_olmo2, norm_placement="post", qk_norm="full"), "olmo3": Family(rest=_olmo2, norm_placement="post", qk_norm="full"),
    "phi3": Family(rest=_windows, fused_qkv=True),
    "deepseek_v2": Family(rest=_deepseek), "deepseek_v3": Family(rest=_deepseek), "kimi_k2": Family(rest=_deepseek),
    "gpt_oss": Family(rest=_gpt_oss, qkv_bias=True, attention_out_bias=True, attention_sinks=True),
    "gpt2": Family(True, _gpt2, "gelu_tanh", gated=False, fused_qkv=True, positions="learned", **LAYERNORM, **BIASES),
    "gpt_bigcode": Family(True, _bigcode, "gelu_tanh", gated=False, fused_qkv=True, positions="learned", **LAYERNORM, **BIASES),
    "gpt_neox": Family(False, _neox, "gelu", gated=False, fused_qkv=True, **LAYERNORM),
    "gptj": Family(False, _gptj, "gelu_tanh", gated=False, parallel_residual=True, norms_per_layer=1, mlp_bias=True, head_bias=True, **LAYERNORM),
    "phi": Family(False, _phi, "gelu_tanh", gated=False, parallel_residual=True, norms_per_layer=1, head_bias=True, **LAYERNORM, **BIASES),
    "opt": Family(True, _opt, "relu", gated=False, positions="learned", **LAYERNORM, **BIASES),
    "bloom": Family(True, None, "gelu_tanh", gated=False, fused_qkv=True, positions="alibi", embedding_norm=True, **LAYERNORM, **BIASES),
    "mpt": Family(True, _mpt, "gelu", gated=False, fused_qkv=True, norm="layernorm"),
    "falcon": Family(True, _falcon, "gelu", gated=False, fused_qkv=True, **LAYERNORM),
    "cohere": Family(True, _cohere, parallel_residual=True, norms_per_layer=1, norm="layernorm"),
    "stablelm": Family(False, _stablelm, **LAYERNORM),
    "starcoder2": Family(True, _starcoder2, "gelu_tanh", gated=False, **LAYERNORM),
    "nemotron": Family(False, _llama, "relu_squared", gated=False, **LAYERNORM)}
"""By model_type."""


def is_config(data: Mapping[str, Any]) -> bool:
    """Whether a JSON table is a model's config.json."""
    return "model_type" in data or "architectures" in data


def read(data: Mapping[str, Any], kind: str | None = None) -> Foreign:
    """The shape that a config.json describes; `kind` reads it as another model_type. Raises PlanError for a type that is not known."""
    f, file = Foreign(PROGRAM), Keys(data)
    inside, word = file, str(kind or data.get("model_type") or "")
    text = data.get("text_config")
    if isinstance(text, Mapping) and not kind:
        inside, word = file.table("text_config"), str(text.get("model_type") or word)
        f.notes.append(f"text_config is read; the rest of {data.get('model_type')} (vision, audio) is left out")
    family = FAMILIES.get(word)
    if family is None:
        raise PlanError("model_type", word or None, "this type of model is not known here, and its keys do not say which biases and norms it has.",
                        f"Use --as llama where it is built like one; known are {', '.join(FAMILIES)}.")
    file.has("model_type", "architectures", "_name_or_path", "torch_dtype", "dtype", "transformers_version")
    inside.has("model_type")
    for field, value in _shape(inside, family, f).items():
        f.say(f"model.{field}", value, f"config.json ({word})")
    if name := str(data.get("_name_or_path") or "").rstrip("/").rpartition("/")[2]:
        f.say("model.name", name, "_name_or_path")
    f.unread = [*file.unread(), *(inside.unread() if inside is not file else [])]
    return f


def _needed(k: Keys, *names: str) -> int:
    name = k.has(*names)
    value = whole(k.data[name]) if name else None
    if value is None or value < 1:
        raise PlanError(f"{k.prefix}{name or names[0]}", k.data.get(name or names[0]), "a whole number above 0 is needed here.", f"Give {' or '.join(names)}.")
    return value


def _shape(k: Keys, family: Family, f: Foreign) -> dict[str, Any]:
    """The fields of a model; what is as a run's default is left out."""
    hidden, heads = _needed(k, "hidden_size", "n_embd", "n_embed", "d_model"), _needed(k, "num_attention_heads", "n_head", "n_heads")
    m: dict[str, Any] = {"layers": _needed(k, "num_hidden_layers", "n_layer", "n_layers"), "hidden": hidden, "heads": heads,
                         "kv_heads": whole(k.get("num_key_value_heads")) or heads, "ffn": whole(k.get("intermediate_size", "n_inner", "ffn_dim")) or 4 * hidden,
                         "vocab": _needed(k, "vocab_size"), "tied_embeddings": bool(k.get("tie_word_embeddings", default=family.tied)), **family.shared}
    if head := whole(k.get("head_dim")):
        m["head_dim"] = head
    if word := k.get("hidden_activation", "hidden_act", "activation_function", "activation"):
        if str(word) not in ACTIVATIONS:
            raise PlanError(f"{k.prefix}hidden_act", word, "is not an activation that is known here.", f"Known are {', '.join(ACTIVATIONS)}.")
        m["activation"] = ACTIVATIONS[str(word)]
    else:
        m["activation"] = family.activation
    if family.rest:
        family.rest(k, m, f)
    k.has("sliding_window", "max_window_layers", "use_sliding_window", "max_position_embeddings")
    return {name: value for name, value in m.items() if value is not None and DEFAULTS.get(name) != value}


DEFAULTS: dict[str, Any] = {"tied_embeddings": False, "activation": "silu", "qkv_bias": False, "attention_out_bias": False, "mlp_bias": False,
                            "parallel_residual": False, "logit_softcap": 0.0, "rotary_fraction": 1.0, "norms_per_layer": 2, "positions": "rope"}
