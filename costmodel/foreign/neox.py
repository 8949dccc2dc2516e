"""GPT-NeoX's configuration (YAML in the guise of JSON, dashes or underscores in its keys) as a run.

Keys and defaults: megatron/neox_arguments/neox_args.py. It is Megatron's layers under DeepSpeed's engine; the vocabulary is the tokenizer's, padded to a
multiple of make_vocab_size_divisible_by x mp.
"""

from collections.abc import Mapping
from typing import Any

from costmodel.foreign.said import Foreign, Keys, full_checkpointing, number, padded, whole

PROGRAM = "GPT-NeoX"
TOKENIZERS = {"gpt2bpetokenizer": (50257, "GPT-2's tokenizer"), "hftokenizer": (50277, "GPT-NeoX-20B's tokenizer")}


def _plain(data: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key).replace("-", "_"): value for key, value in data.items()}


def is_config(data: Mapping[str, Any]) -> bool:
    """Whether a table is GPT-NeoX's."""
    keys = _plain(data)
    return "num_layers" in keys and ("pipe_parallel_size" in keys or "model_parallel_size" in keys)


def read(data: Mapping[str, Any]) -> Foreign:
    """The run that a configuration describes; the number of GPUs is the launcher's."""
    k, f = Keys(_plain(data)), Foreign(PROGRAM)
    _model(k, f)
    tp, pp = whole(k.get("model_parallel_size", default=1)) or 1, whole(k.get("pipe_parallel_size", default=0)) or 1
    zero = k.table("zero_optimization")
    stage = whole(zero.get("stage", default=0)) or 0
    spread = tp * pp > 1 or stage == 0
    f.say("plan.framework", "megatron" if spread else "deepspeed", "GPT-NeoX: Megatron's layers under DeepSpeed's engine")
    f.say("plan.zero", min(stage, 1) if spread else stage, "zero_optimization.stage")
    if spread:
        f.notes.append("Megatron's layers under DeepSpeed's engine: predicted as Megatron's own, with its distributed optimizer for ZeRO-1")
        if stage > 1:
            f.lost.append(f"zero_optimization.stage = {stage} with model parallelism")
    else:
        for field, key, scale in (("bucket_bytes", "reduce_bucket_size", 2), ("allgather_bucket_params", "allgather_bucket_size", 1)):
            if (value := whole(zero.get(key))) is not None:
                f.say(f"plan.{field}", value * scale, f"zero_optimization.{key}")
    for field, degree, key in (("tp", tp, "model_parallel_size"), ("pp", pp, "pipe_parallel_size")):
        if degree > 1:
            f.say(f"plan.{field}", degree, key)
    f.say("plan.overlap_grad_reduce", zero.on("overlap_comm") and pp == 1, "zero_optimization.overlap_comm" if pp == 1 else "pipe_parallel_size "
          "(DeepSpeed's pipeline engine reduces after the last micro-batch)")
    if k.on("sequence_parallel") and tp > 1:
        f.say("plan.sequence_parallel", True, "sequence_parallel")
    if k.on("checkpoint_activations"):
        count = whole(k.get("checkpoint_num_layers", default=1)) or 1
        f.say("plan.checkpointing", full_checkpointing(count), "checkpoint_activations")
    _recipe(k, f)
    if bucket := whole(zero.get("reduce_bucket_size")):
        f.notes.append(f"reduce_bucket_size = {bucket:,} elements: {2 * bucket / 2**30:.2f} GiB of 16-bit gradients a bucket")
    f.unread = [*zero.unread(), *k.unread()]
    return f


def _model(k: Keys, f: Foreign) -> None:
    def say(field: str, value: Any, key: str) -> None:
        f.say(f"model.{field}", value, key)

    f.needs(k, "model", (("layers", "num_layers"), ("hidden", "hidden_size"), ("heads", "num_attention_heads")))
    hidden = f.get("model.hidden", 0)
    if groups := whole(k.get("num_kv_heads")):
        say("kv_heads", groups, "num_kv_heads")
    activation = str(k.get("activation", "mlp_type", default="gelu"))
    gated = activation in ("swiglu", "geglu", "llama")
    say("ffn", whole(k.get("intermediate_size", "ffn_hidden_size")) or 4 * hidden, "intermediate_size" if "intermediate_size" in k else "hidden_size (4 times)")
    if not gated:
        say("gated", False, "activation")
        say("activation", "relu" if activation == "relu" else "gelu", "activation" if "activation" in k else "activation (default)")
    norm = str(k.get("norm", default="layernorm"))
    if norm in ("layernorm", "scalenorm"):
        say("norm", "layernorm", "norm")
        say("norm_bias", True, "norm")
    bias = k.get("use_bias_in_attn_linear", default=True)
    for field in ("qkv_bias", "attention_out_bias"):
        if bias:
            say(field, True, "use_bias_in_attn_linear (default)")
    if k.get("use_bias_in_mlp", default=not gated):
        say("mlp_bias", True, "use_bias_in_mlp (default)")
    say("fused_qkv", True, "one matrix for queries, keys and values")
    kind = str(k.get("pos_emb", default="learned"))
    if kind == "learned":
        say("positions", "learned", "pos_emb")
        say("position_rows", whole(k.get("max_position_embeddings", "seq_length", default=2048)), "max_position_embeddings")
    elif kind in ("alibi", "none"):
        say("positions", kind, "pos_emb")
    elif (share := number(k.get("rotary_pct", default=1.0))) != 1.0:
        say("rotary_fraction", share, "rotary_pct")
    if k.on("gpt_j_residual"):
        say("parallel_residual", True, "gpt_j_residual")
        if k.on("gpt_j_tied"):
            say("norms_per_layer", 1, "gpt_j_tied")
    if not k.on("no_weight_tying"):
        say("tied_embeddings", True, "no_weight_tying (not given)")
    unit = (whole(k.get("make_vocab_size_divisible_by", default=128)) or 128) * (whole(k.get("model_parallel_size", default=1)) or 1)
    size = whole(k.get("padded_vocab_size"))
    tokenizer = str(k.get("tokenizer_type", default="")).lower()
    if size:
        say("vocab", size, "padded_vocab_size")
    elif tokenizer in TOKENIZERS:
        rows, words = TOKENIZERS[tokenizer]
        say("vocab", padded(rows, unit), f"tokenizer_type ({words}: {rows}, padded to a multiple of {unit})")
        f.notes.append(f"the vocabulary is not in the file, and is taken as that of {words}; --set model.vocab=... says another")
    else:
        f.lacks("model.vocab", "the tokenizer decides it: --set model.vocab=50432, say")
    k.has("max_position_embeddings")


def _recipe(k: Keys, f: Foreign) -> None:
    def say(field: str, value: Any, key: str) -> None:
        f.say(f"recipe.{field}", value, key)

    if (length := whole(k.get("seq_length"))) is not None:
        say("seq_len", length, "seq_length")
    for field, key in (("micro_batch", "train_micro_batch_size_per_gpu"), ("grad_accum", "gradient_accumulation_steps"), ("global_batch", "train_batch_size")):
        if (value := whole(k.get(key))) is not None:
            say(field, value, key)
    fp16, bf16 = k.table("fp16"), k.table("bf16")
    word = k.get("precision")
    low = "bf16" if bf16.on("enabled") or word == "bfloat16" else "fp16" if fp16.on("enabled") or fp16.on("fp16") or word == "fp16" else ""
    say("precision", f"{low}-mixed" if low else "fp32", f"{low}.enabled" if low else "fp16.enabled (not given)")
    kind = str(k.table("optimizer").get("type", default="Adam")).lower()
    if kind in ("adam", "adamw", "cpu_adam"):
        say("optimizer", "adamw", "optimizer.type")
    elif kind == "sgd":
        say("optimizer", "momentum", "optimizer.type")
    else:
        f.lost.append(f"optimizer.type = {kind}")
    clip = number(k.get("gradient_clipping", default=1.0))
    if clip != 1.0:
        say("clip_norm", clip, "gradient_clipping")
    dropout = max(number(k.get(name, default=0.0)) or 0.0 for name in ("hidden_dropout", "attention_dropout"))
    if dropout:
        say("dropout", dropout, "hidden_dropout")
    config = k.get("attention_config")
    flash = "flash" in str(config) if config is not None else False
    say("attention", "fa2" if flash else "eager", "attention_config" if config is not None else "attention_config (not given: Megatron's own attention)")
    f.lacks("cluster.gpus", "the launcher decides it: --gpus 96, say")
