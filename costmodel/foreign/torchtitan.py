"""torchtitan's configuration (TOML; its releases of 2024 and 2025) as a run.

Keys under old and new names and their defaults: torchtitan/config/job_config.py, torchtitan/config_manager.py. The model is named by a flavor; the shapes are
those of torchtitan/models. Tensor parallelism always splits the sequence as well; FSDP2's mixed precision has
fp32 parameters, bf16 compute and fp32 reductions.
"""

from collections.abc import Mapping
from typing import Any

from costmodel.foreign.said import Foreign, Keys, number, whole

PROGRAM = "torchtitan"
FLAVORS = {("llama3", "8b"): "llama-3.1-8b", ("llama3", "70b"): "llama-3.1-70b", ("llama3", "405b"): "llama-3.1-405b", ("llama2", "7b"): "llama-2-7b",
           ("llama2", "13b"): "llama-2-13b", ("llama2", "70b"): "llama-2-70b", ("qwen3", "0.6b"): "qwen3-0.6b", ("qwen3", "1.7b"): "qwen3-1.7b",
           ("qwen3", "4b"): "qwen3-4b", ("qwen3", "8b"): "qwen3-8b", ("qwen3", "14b"): "qwen3-14b", ("qwen3", "32b"): "qwen3-32b",
           ("qwen3", "30b-a3b"): "qwen3-30b-a3b", ("qwen3", "235b-a22b"): "qwen3-235b-a22b", ("deepseek_v3", "16b"): "deepseek-v2-lite",
           ("deepseek_v3", "671b"): "deepseek-v3", ("gpt_oss", "20b"): "gpt-oss-20b", ("gpt_oss", "120b"): "gpt-oss-120b"}
SCHEDULES = {"1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved", "interleavedzerobubble": "interleaved-zb", "zbvzerobubble": "zbv",
             "dualpipev": "dualpipev"}
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def is_config(data: Mapping[str, Any]) -> bool:
    """Whether a table is torchtitan's."""
    return isinstance(data.get("training"), Mapping) and "flavor" in (data.get("model") or {}) or "job" in data and "training" in data


def read(data: Mapping[str, Any]) -> Foreign:
    """The run that a configuration describes; with data_parallel_shard_degree = -1 the number of GPUs is the launcher's."""
    k, f = Keys(data), Foreign(PROGRAM)
    model, t, p = k.table("model"), k.table("training"), k.table("parallelism")
    old = k.table("experimental")
    name, flavor = str(model.get("name", default="llama3")), str(model.get("flavor", default="debugmodel"))
    known = FLAVORS.get((name.lower(), flavor.lower()))
    if known:
        f.say("model", known, f"model.name = {name}, model.flavor = {flavor}")
        if name == "deepseek_v3" and flavor.lower() == "16b":
            f.notes.append("flavor 16B of deepseek_v3 has DeepSeek-V2-Lite's shape")
    else:
        f.lacks("model", f"the shape of {name} {flavor} is not known here: --set model=llama-3-8b, say")
    f.say("plan.framework", "pytorch", "torchtitan")

    def degree(*names: str, default: int = 1) -> int:
        value = next((table.get(*names) for table in (p, t, old) if table.has(*names)), None)
        return whole(value) if value is not None and whole(value) is not None else default  # type: ignore[return-value]

    replicate, shard = degree("data_parallel_replicate_degree"), degree("data_parallel_shard_degree", "data_parallel_degree", default=-1)
    degrees = {"tp": degree("tensor_parallel_degree"), "pp": degree("pipeline_parallel_degree"), "cp": degree("context_parallel_degree"),
               "ep": degree("expert_parallel_degree")}
    for field, value in degrees.items():
        if value > 1:
            f.say(f"plan.{field}", value, f"parallelism.{ {'tp': 'tensor', 'pp': 'pipeline', 'cp': 'context', 'ep': 'expert'}[field]}_parallel_degree")
    f.say("plan.zero", 0 if shard == 1 and degrees["cp"] == 1 else 3, "parallelism.data_parallel_shard_degree")
    if replicate > 1:
        f.say("plan.dp_replicate", replicate, "parallelism.data_parallel_replicate_degree")
    if shard > 0:
        f.say("cluster.gpus", replicate * shard * degrees["tp"] * degrees["pp"] * degrees["cp"], "parallelism: the product of the degrees")
    else:
        f.lacks("cluster.gpus", "data_parallel_shard_degree = -1 takes the GPUs that the launcher gives: --gpus 128, say")
    if degrees["tp"] > 1:
        f.say("plan.sequence_parallel", True, "parallelism.tensor_parallel_degree (torchtitan splits the sequence with it)")
        if not (p.on("disable_loss_parallel") or t.on("disable_loss_parallel")):
            f.say("plan.loss_parallel", True, "parallelism.disable_loss_parallel (off)")
        if p.on("enable_async_tensor_parallel") or old.on("enable_async_tensor_parallel"):
            f.say("plan.tp_overlap", "async", "parallelism.enable_async_tensor_parallel")
    if degrees["pp"] > 1:
        _pipeline(p, old, f)
    if degrees["cp"] > 1:
        f.say("plan.cp_kind", "allgather" if str(p.get("context_parallel_rotate_method", default="allgather")) == "allgather" else "ring",
              "parallelism.context_parallel_rotate_method")
    reshard = str(p.get("fsdp_reshard_after_forward", default="default"))
    if reshard in ("always", "never"):
        f.say("plan.reshard_after_forward", reshard == "always", "parallelism.fsdp_reshard_after_forward")
    if t.on("enable_cpu_offload"):
        f.say("plan.offload", "params", "training.enable_cpu_offload")
    _checkpointing(k.table("activation_checkpoint"), f)
    _recipe(k, t, model, f, degrees["pp"])
    expert_tp = whole(p.get("expert_tensor_parallel_degree", default=1))
    if degrees["ep"] > 1 and degrees["tp"] > 1:
        f.notes.append(f"expert_tensor_parallel_degree = {expert_tp}")
    used = {"model", "training", "parallelism", "experimental", "activation_checkpoint", "optimizer", "compile", "float8", "quantize"}
    f.unread = [name for table in (model, t, p) for name in table.unread()] + [key for key in data if key not in used]
    return f


def _pipeline(p: Keys, old: Keys, f: Foreign) -> None:
    word = str(p.get("pipeline_parallel_schedule") or old.get("pipeline_parallel_schedule", default="1F1B"))
    schedule = SCHEDULES.get(word.lower())
    if schedule:
        f.say("plan.schedule", schedule, "parallelism.pipeline_parallel_schedule")
    else:
        f.lost.append(f"parallelism.pipeline_parallel_schedule = {word}")
    points = p.get("pipeline_parallel_split_points") or old.get("pipeline_parallel_split_points")
    if points:
        f.notes.append("pipeline_parallel_split_points: stages are taken as even; --set 'plan.stage_layers=[...]' says them")
    if schedule in ("interleaved", "interleaved-zb"):
        f.say("plan.virtual_stages", 2, "parallelism.pipeline_parallel_schedule (two stages a rank, its default)")


def _checkpointing(k: Keys, f: Foreign) -> None:
    mode, option = str(k.get("mode", default="selective")), str(k.get("selective_ac_option", default="2"))
    if mode == "none":
        return
    if mode == "full":
        f.say("plan.checkpointing", "full", "activation_checkpoint.mode")
    elif option == "op":
        f.say("plan.checkpointing", "selective:op", "activation_checkpoint.selective_ac_option")
    elif (every := whole(option)) is not None:
        f.say("plan.checkpointing", f"every:{every}", "activation_checkpoint.selective_ac_option")
    else:
        f.lost.append(f"activation_checkpoint.mode = {mode}")


def _recipe(k: Keys, t: Keys, model: Keys, f: Foreign, pp: int) -> None:
    local = whole(t.get("local_batch_size", "batch_size", default=8)) or 8
    p = k.table("parallelism")
    micro = whole(p.get("pipeline_parallel_microbatch_size", default=1)) or 1 if pp > 1 else local
    f.say("recipe.micro_batch", micro, "parallelism.pipeline_parallel_microbatch_size" if pp > 1 else
          "training.local_batch_size" if "local_batch_size" in t or "batch_size" in t else "training.local_batch_size (default)")
    total = whole(t.get("global_batch_size", default=-1)) or -1
    if total > 0:
        f.say("recipe.global_batch", total, "training.global_batch_size")
    elif pp > 1:
        f.say("recipe.grad_accum", max(1, local // micro), "training.local_batch_size over the micro-batch of the pipeline")
    f.say("recipe.seq_len", whole(t.get("seq_len", default=2048)) or 2048, "training.seq_len" if "seq_len" in t else "training.seq_len (default)")
    if (clip := number(t.get("max_norm"))) is not None and clip != 1.0:
        f.say("recipe.clip_norm", clip, "training.max_norm")
    compile_table = k.table("compile")
    parts = compile_table.get("components", default=["model", "loss"])
    whole_model = compile_table.on("enable") and "model" in parts
    if t.on("compile") or whole_model:
        f.say("recipe.compile", True, "training.compile" if t.on("compile") else "compile.enable")
    elif compile_table.on("enable"):
        f.notes.append(f"compile.components = {list(parts)}: the layers are not compiled")
    o = k.table("optimizer")
    name = str(o.get("name", default="AdamW")).lower()
    implementation = str(o.get("implementation", default="fused" if o.get("fused", default=True) else "foreach"))
    if name in ("adam", "adamw"):
        f.say("recipe.optimizer", f"{name}:{implementation}" if implementation != "fused" else name, "optimizer.name")
    else:
        f.lost.append(f"optimizer.name = {name}")
    if o.on("early_step_in_backward"):
        f.lost.append("optimizer.early_step_in_backward: the update runs inside backward")
    fields: dict[str, Any] = {}
    param = DTYPES.get(str(t.get("mixed_precision_param", default="bfloat16")), "bf16")
    converters = str(model.get("converters", default="")) + str(k.get("quantize", default=""))
    float8 = k.table("float8") if "float8" in k else k.table("quantize").table("linear").table("float8")
    if "float8" in converters or float8.on("enable_float8_linear"):
        fields["fp8_recipe"] = str(float8.get("recipe_name", default="tensorwise"))
        if float8.on("enable_fsdp_float8_all_gather"):
            fields["fp8_gather"] = True
    state = DTYPES.get(str(o.get("state_dtype", default="float32")), "fp32")
    if state != "fp32":
        fields["optimizer_state"] = state
    if DTYPES.get(str(t.get("dtype", default="float32"))) == "bf16":
        fields |= {"parameter": "bf16", "gradient": "bf16"}
    base = "fp8" if "fp8_recipe" in fields else "fp32" if param == "fp32" else "bf16-mixed"
    f.say("recipe.precision", {"base": base, **fields} if fields else base, "training.mixed_precision_param" + (", float8" if base == "fp8" else ""))
