"""axolotl's configuration (YAML) as a run: a fine-tuning of a hub model by transformers and accelerate.

Keys: axolotl/utils/schemas/config.py and its FSDP documentation; `fsdp_` before a key of fsdp_config is the older spelling, and fsdp_version may stand inside.
The model is loaded in the dtype of training (bf16: parameters, gradients and states in bf16, unless fp32 is asked for).
"""

from collections.abc import Mapping
from typing import Any

from costmodel.foreign.said import Foreign, Keys, number, whole

PROGRAM = "axolotl"
OPTIMIZERS = {"adamw_torch": "adamw:foreach", "adamw_torch_fused": "adamw", "adamw_hf": "adamw:for-loop",
              "adamw_torch_8bit": "adam8bit", "adamw_bnb_8bit": "adam8bit", "adamw_8bit": "adam8bit",
              "paged_adamw_8bit": "adam8bit", "sgd": "sgd", "muon": "muon", "adamw_apex_fused": "adamw"}
ATTENTION = (("flash_attention_3", "fa3"), ("flash-attn3", "fa3"), ("flash_attention", "fa2"), ("flash", "fa2"), ("sdpa", "sdpa"), ("eager", "eager"))


def is_config(data: Mapping[str, Any]) -> bool:
    """Whether a table is axolotl's."""
    return "base_model" in data


def read(data: Mapping[str, Any]) -> Foreign:
    """The run that a configuration describes; the number of GPUs is the launcher's."""
    k, f = Keys(data), Foreign(PROGRAM)
    f.say("model", str(k.get("base_model")), "base_model")
    _spread(k, f)
    for field, key in (("seq_len", "sequence_len"), ("micro_batch", "micro_batch_size"), ("grad_accum", "gradient_accumulation_steps")):
        if (value := whole(k.get(key))) is not None:
            f.say(f"recipe.{field}", value, key)
    low = k.get("bf16", "bfloat16")
    if str(low).lower() in ("true", "auto", "full"):
        f.say("recipe.precision", "bf16-pure", "bf16")
    elif k.on("fp16"):
        f.say("recipe.precision", "fp16-mixed", "fp16")
    else:
        f.say("recipe.precision", "tf32" if k.on("tf32") else "fp32", "bf16 (not given)")
    word = str(k.get("optimizer", default="adamw_torch_fused")).lower()
    if word in OPTIMIZERS:
        f.say("recipe.optimizer", OPTIMIZERS[word], "optimizer")
        if word == "muon":
            f.notes.append("optimizer: muon updates the layers' matrices; embedding, head and norms have AdamW")
    else:
        f.lost.append(f"optimizer: {word}")
    if k.on("gradient_checkpointing"):
        f.say("plan.checkpointing", "full", "gradient_checkpointing")
    if k.on("activation_offloading"):
        f.say("plan.activation_offload", True, "activation_offloading")
    named = k.has("attn_implementation")
    kernel = str(k.data[named] if named else "flash_attention_2" if k.on("flash_attention") else "sdpa").lower()
    f.say("recipe.attention", next((name for mark, name in ATTENTION if mark in kernel), "sdpa"), named or "flash_attention")
    if (clip := number(k.get("max_grad_norm"))) is not None and clip != 1.0:
        f.say("recipe.clip_norm", clip, "max_grad_norm")
    if "CutCrossEntropyPlugin" in str(k.get("plugins", default="")) or k.on("cut_cross_entropy"):
        f.say("recipe.loss", "fused", "plugins (cut cross-entropy: logits are never whole)")
    elif "LigerPlugin" in str(k.data.get("plugins", "")) and k.on("liger_fused_linear_cross_entropy"):
        f.say("recipe.loss", "fused", "liger_fused_linear_cross_entropy")
    if k.on("torch_compile"):
        f.say("recipe.compile", True, "torch_compile")
    if k.get("adapter") or k.on("load_in_8bit") or k.on("load_in_4bit"):
        f.lost.append("adapter, load_in_8bit, load_in_4bit: training of adapters on a frozen or quantised model")
    if k.on("sample_packing"):
        f.notes.append("sample_packing: sequences are taken as full")
    f.lacks("cluster.gpus", "the launcher decides it: --gpus 8, say")
    f.unread = k.unread()
    return f


def _spread(k: Keys, f: Foreign) -> None:
    table = k.table("fsdp_config")
    plain = Keys({str(name).removeprefix("fsdp_"): value for name, value in table.data.items()}, "fsdp_config.")
    version = whole(k.get("fsdp_version")) or whole(plain.get("version")) or (1 if "fsdp" in k else 2)
    if table.data or k.has("fsdp"):
        f.say("plan.framework", "pytorch", f"fsdp_config (FSDP{version})")
        f.say("plan.zero", 3, "fsdp_config")
        if version == 1:
            f.notes.append("FSDP1 is predicted as FSDP2, whose streams and memory are close but not the same")
        if (reshard := plain.get("reshard_after_forward")) is not None:
            f.say("plan.reshard_after_forward", str(reshard).lower() not in ("false", "shard_grad_op"), "fsdp_config.reshard_after_forward")
        if plain.on("offload_params"):
            f.say("plan.offload", "params", "fsdp_config.offload_params")
        if plain.on("activation_checkpointing"):
            f.say("plan.checkpointing", "full", "fsdp_config.activation_checkpointing")
    elif path := k.get("deepspeed"):
        f.say("plan.framework", "deepspeed", "deepspeed")
        stage = next((n for n in (3, 2, 1) if f"zero{n}" in str(path)), None)
        if stage:
            f.say("plan.zero", stage, f"deepspeed ({path}); give that file as well for the rest of it")
    for field, key in (("tp", "tensor_parallel_size"), ("cp", "context_parallel_size"), ("dp_shard", "dp_shard_size"), ("dp_replicate", "dp_replicate_size")):
        if (value := whole(k.get(key))) and value > 1:
            f.say(f"plan.{field}", value, key)
