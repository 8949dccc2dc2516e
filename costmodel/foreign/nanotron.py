"""nanotron's configuration (YAML) as a run.

Keys: src/nanotron/config/config.py. Its layers are Megatron's in tensor parallelism and sequence parallelism, with an fp32 copy of 16-bit gradients and of the
parameters (2 + 2 + 4 + 4 + 8 bytes a parameter with Adam), sharded over the data-parallel ranks with
zero_stage 1: the nearest dialect here is Megatron's (2 + 4 + 4 + 8).
"""

from collections.abc import Mapping
from typing import Any

from costmodel.foreign.huggingface import ACTIVATIONS
from costmodel.foreign.said import Foreign, Keys, number, padded, whole

PROGRAM = "nanotron"


def is_config(data: Mapping[str, Any]) -> bool:
    """Whether a table is nanotron's."""
    return "parallelism" in data and "tokens" in data and "model" in data


def read(data: Mapping[str, Any]) -> Foreign:
    """The run that a configuration describes."""
    k, f = Keys(data), Foreign(PROGRAM)
    model = k.table("model")
    shape = model.table("model_config")
    _model(shape, f, whole(model.get("make_vocab_size_divisible_by", default=1)) or 1)
    p = k.table("parallelism")
    f.say("plan.framework", "megatron", "nanotron's layers are Megatron's")
    degrees = {field: whole(p.get(*names, default=1)) or 1 for field, names in (
        ("dp", ("dp",)), ("tp", ("tp",)), ("pp", ("pp",)), ("cp", ("context_parallel_size",)), ("ep", ("expert_parallel_size",)))}
    for field in ("tp", "pp", "cp", "ep"):
        if degrees[field] > 1:
            f.say(f"plan.{field}", degrees[field], f"parallelism.{field}")
    f.say("cluster.gpus", degrees["dp"] * degrees["tp"] * degrees["pp"] * degrees["cp"], "parallelism: dp x tp x pp x cp")
    if degrees["tp"] > 1 and str(p.get("tp_mode", default="ALL_REDUCE")).upper() == "REDUCE_SCATTER":
        f.say("plan.sequence_parallel", True, "parallelism.tp_mode")
    engine = str(p.get("pp_engine", default="1f1b")).lower()
    if degrees["pp"] > 1:
        f.say("plan.schedule", "gpipe" if engine == "afab" else "1f1b", "parallelism.pp_engine")
    if p.on("recompute_layer"):
        f.say("plan.checkpointing", "full", "parallelism.recompute_layer")
    if p.on("tp_linear_async_communication") and degrees["tp"] > 1:
        f.say("plan.tp_overlap", "async", "parallelism.tp_linear_async_communication")
    p.has("tp_recompute_allgather")
    o, t = k.table("optimizer"), k.table("tokens")
    f.say("plan.zero", whole(o.get("zero_stage", default=0)) or 0, "optimizer.zero_stage")
    for field, key in (("seq_len", "sequence_length"), ("micro_batch", "micro_batch_size"), ("grad_accum", "batch_accumulation_per_replica")):
        if (value := whole(t.get(key))) is not None:
            f.say(f"recipe.{field}", value, f"tokens.{key}")
    word = {"bfloat16": "bf16-mixed", "float16": "fp16-mixed", "float32": "fp32"}.get(str(model.get("dtype", default="float32")))
    if word:
        f.say("recipe.precision", word, "model.dtype")
    if word == "bf16-mixed" and o.on("accumulate_grad_in_fp32"):
        f.notes.append("accumulate_grad_in_fp32: nanotron holds 16-bit gradients beside their fp32 sums, 2 + 2 + 4 + 4 + 8 = 20 bytes a parameter with "
                       "Adam; Megatron's dialect, which is predicted, has one fp32 buffer, 18")
    elif word == "bf16-mixed":
        f.say("recipe.precision", {"base": "bf16-mixed", "gradient": "bf16", "reduce": "bf16"}, "optimizer.accumulate_grad_in_fp32 (off)")
    factory = o.table("optimizer_factory")
    name = str(factory.get("name", default="adamW")).lower()
    if name in ("adamw", "sgd"):
        f.say("recipe.optimizer", name if factory.get("torch_adam_is_fused", default=True) else f"{name}:foreach", "optimizer.optimizer_factory")
    else:
        f.lost.append(f"optimizer.optimizer_factory.name = {name}")
    clip = number(o.get("clip_grad"))
    f.say("recipe.clip_norm", clip or 0.0, "optimizer.clip_grad")
    f.say("recipe.attention", "fa2", "nanotron's layers call FlashAttention-2")
    f.unread = [name for keys in (shape, p, o, factory, t, model, k) for name in keys.unread()]
    return f


def _model(k: Keys, f: Foreign, unit: int) -> None:
    def say(field: str, value: Any, key: str) -> None:
        f.say(f"model.{field}", value, f"model_config.{key}")

    for field, key in (("layers", "num_hidden_layers"), ("hidden", "hidden_size"), ("heads", "num_attention_heads"), ("kv_heads", "num_key_value_heads"),
                       ("ffn", "intermediate_size"), ("vocab", "vocab_size")):
        if (value := whole(k.get(key))) is not None:
            say(field, padded(value, unit) if field == "vocab" else value, key)
        elif field != "kv_heads":
            f.lacks(f"model.{field}", key)
    longest = whole(k.get("max_position_embeddings"))
    if longest and longest == f.get("model.vocab"):
        f.notes.append(f"max_position_embeddings equals vocab_size ({longest}): probably a slip; nothing here depends on it")
    word = str(k.get("hidden_act", default="silu"))
    if ACTIVATIONS.get(word, "silu") != "silu":
        say("activation", ACTIVATIONS[word], "hidden_act")
    if k.on("tie_word_embeddings"):
        say("tied_embeddings", True, "tie_word_embeddings")
    if k.on("is_qwen2_config") or k.on("attention_bias"):
        if k.get("attention_bias", default=True):
            say("qkv_bias", True, "attention_bias")
    say("fused_qkv", True, "num_attention_heads (one matrix for queries, keys and values)")
    window = whole(k.get("sliding_window_size"))
    if window:
        say("sliding_window", window, "sliding_window_size")
        say("attention_pattern", "sliding", "sliding_window_size")
    moe = k.table("moe_config")
    if experts := whole(moe.get("num_experts")):
        width = whole(moe.get("moe_intermediate_size")) or f.get("model.ffn")
        table: dict[str, Any] = {"experts": experts, "top_k": whole(moe.get("top_k", "num_experts_per_token", default=1)), "expert_ffn": width}
        if moe.on("enable_shared_expert"):
            table |= {"shared_experts": 1, "shared_ffn": whole(moe.get("shared_expert_intermediate_size")) or width}
        say("moe", table, "moe_config")
        kind = str(moe.get("token_dispatcher_type", default="alltoall"))
        if kind in ("alltoall", "allgather"):
            f.say("plan.ep_dispatcher", kind, "moe_config.token_dispatcher_type")
