"""Small JSON files of a model's shape under names of their own: SimuMax's models, DeepSeek's inference configurations."""

from collections.abc import Mapping
from typing import Any

from costmodel.foreign.said import Foreign, Keys, whole

SIMUMAX, DEEPSEEK = "SimuMax", "DeepSeek"


def is_simumax(data: Mapping[str, Any]) -> bool:
    """Whether a table is a model of SimuMax (configs/models)."""
    return "layer_num" in data and "head_num" in data


def is_deepseek(data: Mapping[str, Any]) -> bool:
    """Whether a table is DeepSeek's own (DeepSeek-V3, inference/configs)."""
    return "inter_dim" in data and "n_layers" in data


def read_simumax(data: Mapping[str, Any]) -> Foreign:
    """The shape of a SimuMax model; whether it ties its embeddings it does not say, and it is not."""
    k, f = Keys(data), Foreign(SIMUMAX)
    for field, key in (("layers", "layer_num"), ("hidden", "hidden_size"), ("heads", "head_num"), ("kv_heads", "kv_head_num"), ("head_dim", "head_size"),
                       ("ffn", "intermediate_size"), ("vocab", "vocab_size")):
        if (value := whole(k.get(key))) is not None:
            f.say(f"model.{field}", value, key)
    if not k.get("use_swiglu", default=True):
        f.say("model.gated", False, "use_swiglu")
    experts = whole(k.get("expert_num")) or 1
    if experts > 1:
        width = whole(k.get("moe_ffn_hidden_size")) or f.get("model.ffn")
        moe: dict[str, Any] = {"experts": experts, "top_k": whole(k.get("topk", default=1)), "expert_ffn": width}
        if shared := whole(k.get("moe_shared_expert_intermediate_size")):
            moe |= {"shared_experts": 1, "shared_ffn": shared}
        if dense := whole(k.get("dense_layers")):
            moe["first_dense_layers"] = dense
        f.say("model.moe", moe, "expert_num")
    if rank := whole(k.get("kv_lora_rank")):
        nope, rope = whole(k.get("qk_head_dim")) or 128, whole(k.get("qk_pos_emb_head_dim")) or 64
        f.say("model.mla", {"q_lora_rank": whole(k.get("q_lora_rank")) or 0, "kv_lora_rank": rank, "qk_nope_head_dim": nope, "qk_rope_head_dim": rope,
                            "v_head_dim": whole(k.get("v_head_dim")) or 128}, "kv_lora_rank")
        f.say("model.head_dim", nope + rope, "qk_head_dim")
    f.unread = k.unread()
    return f


def read_deepseek(data: Mapping[str, Any]) -> Foreign:
    """The shape of a DeepSeek model: latent attention, dense layers first, then routed and shared experts."""
    k, f = Keys(data), Foreign(DEEPSEEK)
    for field, key in (("layers", "n_layers"), ("hidden", "dim"), ("heads", "n_heads"), ("ffn", "inter_dim"), ("vocab", "vocab_size")):
        if (value := whole(k.get(key))) is not None:
            f.say(f"model.{field}", value, key)
    nope, rope = whole(k.get("qk_nope_head_dim")) or 128, whole(k.get("qk_rope_head_dim")) or 64
    f.say("model.mla", {"q_lora_rank": whole(k.get("q_lora_rank")) or 0, "kv_lora_rank": whole(k.get("kv_lora_rank")) or 512, "qk_nope_head_dim": nope,
                        "qk_rope_head_dim": rope, "v_head_dim": whole(k.get("v_head_dim")) or 128}, "kv_lora_rank")
    f.say("model.head_dim", nope + rope, "qk_nope_head_dim + qk_rope_head_dim")
    if experts := whole(k.get("n_routed_experts")):
        width, shared = whole(k.get("moe_inter_dim")) or 1408, whole(k.get("n_shared_experts")) or 0
        moe: dict[str, Any] = {"experts": experts, "top_k": whole(k.get("n_activated_experts")) or 6, "expert_ffn": width, "shared_experts": shared,
                               "shared_ffn": shared * width, "first_dense_layers": whole(k.get("n_dense_layers")) or 0}
        if k.get("score_func") == "sigmoid":
            moe["router_score"] = "sigmoid"
        f.say("model.moe", moe, "n_routed_experts")
    f.notes.append("multi-token prediction is not in this file, and is left out")
    if k.get("dtype") == "fp8":
        f.notes.append("dtype = fp8 is that of the weights at inference; how it was trained stands elsewhere")
    f.unread = k.unread()
    return f
