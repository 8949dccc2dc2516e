"""DeepSpeed's configuration (JSON) as the part of a run that it decides: plan, batch, dtypes, optimizer. The model stands elsewhere.

Keys and defaults: deepspeed/runtime/zero/config.py, deepspeed/runtime/config.py (0.17). "auto" is filled in by the trainer (transformers, accelerate) from its
own arguments: such a key counts as not given.
"""

from collections.abc import Mapping
from typing import Any

from costmodel.foreign.said import Foreign, Keys, number, whole

PROGRAM = "DeepSpeed"
MARKS = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "zero_allow_untested_optimizer")
OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "fusedadam": "adamw", "deepspeedcpuadam": "adamw", "sgd": "sgd", "muon": "muon"}
OTHER_NAMES = {"max_live_parameters": "stage3_max_live_parameters", "max_reuse_distance": "stage3_max_reuse_distance",
       "prefetch_bucket_size": "stage3_prefetch_bucket_size", "param_persistence_threshold": "stage3_param_persistence_threshold"}


def is_config(data: Mapping[str, Any]) -> bool:
    """Whether a table is DeepSpeed's configuration."""
    return any(mark in data for mark in MARKS)


def json_of(text: str) -> dict[str, Any] | None:
    """A configuration in a here-document; None where it is none."""
    import json
    try:
        data = json.loads(text)
    except ValueError:
        return None
    return data if isinstance(data, dict) and is_config(data) else None


def read(data: Mapping[str, Any]) -> Foreign:
    """The run's fields that the configuration decides."""
    k, f = Keys(data), Foreign(PROGRAM)
    waiting: list[str] = []

    def stated(keys: Keys, *names: str) -> Any:
        """A value, unless it is "auto"."""
        value = keys.get(*names)
        if value == "auto":
            waiting.append(f"{keys.prefix}{names[0]}")
            return None
        return value

    f.say("plan.framework", "deepspeed", "DeepSpeed's configuration")
    zero = k.table("zero_optimization")
    stage = whole(stated(zero, "stage")) or 0
    f.say("plan.zero", stage, "zero_optimization.stage")
    for field, key, scale in (("bucket_bytes", "reduce_bucket_size", 2), ("prefetch_bucket_params", "stage3_prefetch_bucket_size", 1),
                              ("max_live_params", "stage3_max_live_parameters", 1), ("allgather_bucket_params", "allgather_bucket_size", 1)):
        old = next((name for name, new in OTHER_NAMES.items() if new == key and name in zero), None)
        value = whole(stated(zero, key, *([old] if old else [])))
        if value is not None and (key.startswith("stage3") <= (stage == 3)) and stage:
            f.say(f"plan.{field}", value * scale, f"zero_optimization.{old or key}" + (" (2 bytes an element)" if scale > 1 else ""))
        if old:
            f.notes.append(f"zero_optimization.{old} is {key} under another name, which DeepSpeed takes as well")
    overlap = stated(zero, "overlap_comm")
    if overlap is not None and stage:
        f.say("plan.overlap_grad_reduce", bool(overlap), "zero_optimization.overlap_comm")
    for key, word in (("offload_optimizer", "optimizer"), ("offload_param", "params")):
        device = str(zero.table(key).get("device", default="none"))
        if device == "cpu":
            f.say("plan.offload", word, f"zero_optimization.{key}.device")
        elif device != "none":
            f.lost.append(f"zero_optimization.{key}.device = {device}")
    if zero.on("cpu_offload"):
        f.say("plan.offload", "optimizer", "zero_optimization.cpu_offload (old name of offload_optimizer)")
    _numbers(k, f, stated)
    for field, key in (("micro_batch", "train_micro_batch_size_per_gpu"), ("grad_accum", "gradient_accumulation_steps"), ("global_batch", "train_batch_size")):
        if (value := whole(stated(k, key))) is not None:
            f.say(f"recipe.{field}", value, key)
    clip = number(stated(k, "gradient_clipping"))
    if clip is not None or "gradient_clipping" not in k:
        f.say("recipe.clip_norm", clip or 0.0, "gradient_clipping" if clip is not None else "gradient_clipping (not given: off)")
    checkpointing = k.table("activation_checkpointing")
    if checkpointing.on("cpu_checkpointing") or checkpointing.on("partition_activations"):
        f.lost.append("activation_checkpointing.partition_activations or cpu_checkpointing: checkpoints split over ranks or in host memory")
    f.lacks("model", "DeepSpeed's file has no model: give a config.json as well, or --set model=llama-3-8b")
    f.lacks("cluster.gpus", "the launcher decides it: --gpus 8, say")
    if waiting:
        f.notes.append(f'"auto" is filled in by the trainer, and counts as not given: {", ".join(waiting)}')
    inside = [*zero.unread(), *(f"activation_checkpointing.{name}" for name in checkpointing.data if name not in checkpointing.seen)]
    f.unread = [*inside, *k.unread()]
    return f


def _numbers(k: Keys, f: Foreign, stated: Any) -> None:
    """Dtypes and optimizer."""
    bf16, fp16 = k.table("bf16") if "bf16" in k else k.table("bfloat16"), k.table("fp16")
    on = {name: bool(stated(table, "enabled")) for name, table in (("bf16", bf16), ("fp16", fp16))}
    automatic = any(table.data.get("enabled") == "auto" for table in (bf16, fp16))
    if on["bf16"] or on["fp16"]:
        f.say("recipe.precision", "bf16-mixed" if on["bf16"] else "fp16-mixed", "bf16.enabled" if on["bf16"] else "fp16.enabled")
    elif not automatic:
        f.say("recipe.precision", "fp32", "bf16.enabled (neither bf16 nor fp16 is on)")
    word = str(stated(k.table("optimizer"), "type") or "")
    if word:
        name = OPTIMIZERS.get(word.lower())
        if name:
            f.say("recipe.optimizer", name, "optimizer.type")
        else:
            f.lost.append(f"optimizer.type = {word}")
    k.table("data_types").get("grad_accum_dtype")
