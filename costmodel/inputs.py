"""From what a user wrote (names, words, a sufficient set of batch figures) to a Run, and what was assumed on the way.

The input is a nested mapping, the form of a run file:

    {"params": "1B" | "model": name or shape,
     "cluster": {"gpu": "h100", "gpus": 8, "nodes": 1} or a whole Cluster,
     "plan": {"strategy": "fsdp", "zero": 3, "tp": 2, "checkpointing": "full", …},
     "recipe": {"seq_len": 4096, "micro_batch": 1, "global_batch": 512, "precision": "bf16-mixed", "optimizer": "adamw", …}}
"""

import difflib
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from costmodel import catalog
from costmodel.spec import Checkpointing, Cluster, Model, OptimizerSpec, Plan, PlanError, Precision, Recipe, Run
from costmodel.spec.presets import precision_preset
from costmodel.spec.sizing import model_from_params

DEFAULT_GPU = "h100_sxm"
DEFAULT_SEQ_LEN = 4096
STRATEGIES = ("single", "dataparallel", "ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp", "megatron")
OPTIMIZER_WORDS = ("sgd", "momentum", "adam", "adamw", "adam8bit", "muon")
INPUT_KEYS = ("model", "params", "cluster", "plan", "recipe", "profile")


class Resolved(NamedTuple):
    """A Run, and the reason of every figure that the user did not give."""

    run: Run
    assumed: dict[str, str]


def resolve(given: Mapping[str, Any]) -> Resolved:
    """Build the Run of an input mapping. Raises PlanError with field, value, rule and a value that works."""
    assumed: dict[str, str] = {}
    unknown_keys("", given, INPUT_KEYS)
    plan_in, recipe_in, cluster_in = (_section(given, key) for key in ("plan", "recipe", "cluster"))
    try:
        model = _model(given, assumed)
        cluster = _cluster(cluster_in, plan_in, assumed)
        plan = _plan(plan_in, cluster, assumed)
        recipe = _recipe(recipe_in, model, cluster, plan, assumed)
        return Resolved(Run(model=model, cluster=cluster, plan=plan, recipe=recipe), assumed)
    except ValidationError as error:
        raise first_error(error) from None


def build_run(**given: Any) -> Run:
    """The Run of an input mapping given as keywords: `build_run(params="1B", cluster={"gpus": 8}, plan={"zero": 3})`."""
    return resolve(given).run


def first_error(error: ValidationError, prefix: str = "") -> PlanError:
    """The first problem of a pydantic error as a PlanError; ours pass through whole."""
    detail = error.errors()[0]
    inner = detail.get("ctx", {}).get("error")
    if isinstance(inner, PlanError):
        return inner
    path = ".".join([*([prefix] if prefix else [_owner(error)]), *(str(p) for p in detail["loc"])]).strip(".")
    if detail["type"] == "extra_forbidden":
        return PlanError(path, detail["input"], "there is no such field.", "Remove it, or see docs/run.md for the fields.")
    return PlanError(path, detail["input"], f"{detail['msg'][0].lower()}{detail['msg'][1:]}.", "See docs/run.md for what the field takes.")


def _owner(error: ValidationError) -> str:
    return {"Model": "model", "Cluster": "cluster", "Plan": "plan", "Recipe": "recipe", "Precision": "recipe.precision",
            "OptimizerSpec": "recipe.optimizer", "Checkpointing": "plan.checkpointing"}.get(error.title, "")


def _section(given: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = given.get(key)
    if value is None:
        return {}
    if isinstance(value, str) and key == "cluster":
        return {"name": value}
    if not isinstance(value, Mapping):
        raise PlanError(key, value, "must be a table of fields.", f"Write [{key}] with its fields below it.")
    return dict(value)


def unknown_keys(section: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Refuse a key that the section does not have, with the nearest one it has."""
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, 1)
            hint = f"Did you mean {close[0]}?" if close else f"It takes {', '.join(known)}."
            raise PlanError(f"{section}.{key}".strip("."), given[key], "there is no such field.", hint)


def _model(given: Mapping[str, Any], assumed: dict[str, str]) -> Model:
    model, params = given.get("model"), given.get("params")
    if model is not None and params is not None:
        raise PlanError("params", params, "both a model and a parameter count are given.", "Give one of the two.")
    if params is not None:
        shape = model_from_params(params)
        assumed["model"] = shape.shape_rule
        return shape
    if model is None:
        raise PlanError("model", None, "a run needs a model.", "Use --params 1B, or --model llama-3-8b.")
    if isinstance(model, Model):
        return model
    if isinstance(model, str):
        return catalog.model(model)
    if not isinstance(model, Mapping):
        raise PlanError("model", model, "must be a name or a table of fields.", "Use --model llama-3-8b.")
    fields = dict(model)
    if "base" in fields:
        fields = {**catalog.model(str(fields.pop("base"))).model_dump(), "name": "custom", **fields}
    unknown_keys("model", fields, tuple(Model.model_fields))
    return Model.model_validate(fields)


def _cluster(given: dict[str, Any], plan: Mapping[str, Any], assumed: dict[str, str]) -> Cluster:
    if "accelerator" in given and isinstance(given["accelerator"], Mapping):
        unknown_keys("cluster", given, tuple(Cluster.model_fields))
        return Cluster.model_validate(given)
    known = ("name", "gpu", "accelerator", "gpus", "nodes", "gpus_per_node", "host")
    unknown_keys("cluster", given, known)
    given.setdefault("gpu", given.pop("accelerator", None))
    gpu, name = given.get("gpu"), given.get("name")
    for key in ("gpus", "nodes", "gpus_per_node"):
        if given.get(key) is not None and (isinstance(given[key], bool) or not isinstance(given[key], int) or given[key] < 1):
            raise PlanError(f"cluster.{key}", given[key], "must be a whole number of at least 1.", f"Use {key} = 8.")
    if not gpu and not name:
        gpu = DEFAULT_GPU
        assumed["cluster.gpu"] = f"{DEFAULT_GPU} (default)"
    gpus, nodes = given.get("gpus"), given.get("nodes")
    if gpus is None and nodes is None:
        degrees = 1
        for key in ("dp_replicate", "dp_shard", "tp", "pp", "cp"):
            value = plan.get(key)
            degrees *= value if isinstance(value, int) and value > 0 else 1
        gpus = degrees
        assumed["cluster.gpus"] = f"{gpus} (product of the degrees given)"
    return catalog.cluster(gpus=gpus, gpu=gpu, name=name, gpus_per_node=given.get("gpus_per_node"), nodes=nodes)


def _plan(given: dict[str, Any], cluster: Cluster, assumed: dict[str, str]) -> Plan:
    unknown_keys("plan", given, (*Plan.model_fields, "strategy", "dp", "bucket_mb"))
    strategy = given.pop("strategy", None)
    gpus = cluster.gpus
    for key in ("tp", "pp", "cp", "ep", "dp", "dp_replicate", "dp_shard"):
        if given.get(key) is None:
            given.pop(key, None)
        elif isinstance(given[key], bool) or not isinstance(given[key], int) or given[key] < 1:
            raise PlanError(f"plan.{key}", given[key], "a degree is a whole number of at least 1.", f"Use {key} = 1.")
    if isinstance(given.get("checkpointing"), str):
        given["checkpointing"] = checkpointing_word(given["checkpointing"])
    if "bucket_mb" in given:
        given["bucket_bytes"] = int(float(given.pop("bucket_mb")) * (1 << 20))
    if strategy is not None:
        _apply_strategy(str(strategy), given)
    other = given.get("tp", 1) * given.get("pp", 1) * given.get("cp", 1)
    if gpus % other:
        raise PlanError("plan", f"tp x pp x cp = {other}", f"it must divide the {gpus} GPUs.", f"Use --gpus {other * max(1, round(gpus / other))}.")
    dp, asked = gpus // other, given.pop("dp", None)
    if asked is not None and asked != dp:
        raise PlanError("plan.dp", asked, f"{gpus} GPUs / (tp x pp x cp = {other}) leave dp = {dp}.", f"Use dp = {dp}, or --gpus {asked * other}.")
    if strategy == "single" and gpus > 1:
        raise PlanError("plan.strategy", "single", f"a single process uses one GPU, and the run has {gpus}.", "Use --gpus 1, or --strategy ddp.")
    shards = given.get("zero", 0) in (1, 2, 3)
    replicate, shard = given.get("dp_replicate"), given.get("dp_shard")
    if replicate is None and shard is None:
        if strategy == "hsdp":
            shard = min(dp, max(1, cluster.gpus_in_node // max(1, given.get("tp", 1))))
            assumed["plan.dp_shard"] = f"{shard} (HSDP shards within a node)"
        else:
            shard = dp if shards else 1
    for known, unknown in ((replicate, "dp_shard"), (shard, "dp_replicate")):
        if known is not None and dp % known:
            name = "dp_replicate" if unknown == "dp_shard" else "dp_shard"
            raise PlanError(f"plan.{name}", known, f"it must divide dp = {dp}.", f"Use {name} = 1 or {dp}.")
    if replicate is None:
        replicate = dp // (shard or 1)
    if shard is None:
        shard = dp // replicate
    given["dp_replicate"], given["dp_shard"] = replicate, shard
    if strategy is None and "zero" not in given and gpus > 1 and replicate == dp > 1 and not given.get("single_process"):
        assumed["plan.strategy"] = "ddp (default)"
    return Plan.model_validate(given)


def _apply_strategy(word: str, given: dict[str, Any]) -> None:
    """Resolve an input word into fields; a contradiction with a field given beside it is an error."""
    word = word.lower().replace("-", "").replace("_", "").replace("2", "2")
    fields: dict[str, dict[str, Any]] = {
        "single": {"zero": 0}, "ddp": {"zero": 0}, "dataparallel": {"zero": 0, "single_process": True},
        "zero1": {"zero": 1}, "zero2": {"zero": 2}, "zero3": {"zero": 3}, "fsdp": {"zero": 3}, "fsdp2": {"zero": 3},
        "hsdp": {"zero": 3}, "megatron": {"framework": "megatron"}}
    if word not in fields:
        close = difflib.get_close_matches(word, STRATEGIES, 1)
        raise PlanError("plan.strategy", word, "is not a strategy.",
                        f"Did you mean {close[0]}?" if close else f"Use one of {', '.join(STRATEGIES)}.")
    for key, value in fields[word].items():
        if given.get(key) is None:
            given[key] = value
        elif given[key] != value:
            raise PlanError(f"plan.{key}", given[key], f"strategy {word} means {key} = {value}.", f"Leave {key} out, or the strategy.")


def checkpointing_word(word: str) -> Checkpointing:
    """"none", "full", "full:4" (groups of 4), "every:2" (each second layer), "selective", "selective:op"."""
    kind, _, detail = word.lower().partition(":")
    try:
        if kind == "none" and not detail:
            return Checkpointing()
        if kind == "full":
            return Checkpointing(mode="full", group=int(detail or 1))
        if kind == "every" and detail:
            return Checkpointing(mode="full", every=int(detail))
        if kind == "selective":
            return Checkpointing(mode="selective", ops=(detail or "attention",))
    except (ValueError, ValidationError):
        pass
    raise PlanError("plan.checkpointing", word, "is not a checkpointing word.",
                    "Use none, full, full:4 (groups of 4 layers), every:2 (each second layer) or selective.")


def _recipe(given: dict[str, Any], model: Model, cluster: Cluster, plan: Plan, assumed: dict[str, str]) -> Recipe:
    unknown_keys("recipe", given, tuple(Recipe.model_fields))
    given = {k: v for k, v in given.items() if v is not None}
    if "seq_len" not in given:
        given["seq_len"] = min(DEFAULT_SEQ_LEN, model.position_rows or DEFAULT_SEQ_LEN)
        assumed["recipe.seq_len"] = f"{given['seq_len']} tokens (default)"
    precision = given.get("precision")
    if precision is None:
        flops = cluster.accelerator.flops_per_s
        cpu = cluster.accelerator.kernel_table == "cpu"
        precision = "fp32" if cpu or not ({"bf16", "fp16"} & set(flops)) else "bf16-mixed" if "bf16" in flops else "fp16-mixed"
        assumed["recipe.precision"] = f"{precision} (default)"
    if isinstance(precision, str):
        given["precision"] = precision_preset(precision, plan)
    elif isinstance(precision, Mapping) and "base" in precision:
        fields = dict(precision)
        base = precision_preset(str(fields.pop("base")), plan)
        unknown_keys("recipe.precision", fields, tuple(Precision.model_fields))
        given["precision"] = Precision.model_validate({**base.model_dump(), **fields})
    optimizer = given.get("optimizer")
    if optimizer is None:
        assumed["recipe.optimizer"] = "adamw, fused kernel (default)"
    elif isinstance(optimizer, str):
        given["optimizer"] = optimizer_word(optimizer)
    for key, value in (("attention", "sdpa"), ("loss", "eager"), ("compile", False), ("cuda_graphs", False), ("allocator", "default"),
                       ("dropout", 0.0), ("clip_norm", 1.0)):
        if key not in given:
            assumed[f"recipe.{key}"] = f"{value} (default)"
    given.update(_batch(given, plan, assumed))
    return Recipe.model_validate(given)


def optimizer_word(word: str) -> OptimizerSpec:
    """"adamw", or "adamw:foreach"; the implementation is `fused` unless named."""
    name, _, implementation = word.lower().partition(":")
    name = {"adamw8bit": "adam8bit", "sgd-momentum": "momentum", "8bit-adam": "adam8bit", "adam-8bit": "adam8bit"}.get(name, name)
    if name not in OPTIMIZER_WORDS:
        close = difflib.get_close_matches(name, OPTIMIZER_WORDS, 1)
        raise PlanError("recipe.optimizer", word, "is not an optimizer of the catalogue.",
                        f"Did you mean {close[0]}?" if close else f"Use one of {', '.join(OPTIMIZER_WORDS)}.")
    try:
        return OptimizerSpec.model_validate({"name": name, "implementation": implementation or "fused"})
    except ValidationError:
        raise PlanError("recipe.optimizer", word, "names no implementation.", "Use adamw:fused, adamw:foreach or adamw:for-loop.") from None


def _batch(given: Mapping[str, Any], plan: Plan, assumed: dict[str, str]) -> dict[str, int]:
    """Complete micro-batch, accumulation and global batch from any sufficient set of them."""
    sizes: dict[str, int] = {}
    for key in ("micro_batch", "grad_accum", "global_batch"):
        value = given.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise PlanError(f"recipe.{key}", value, "must be a whole number of at least 1.", f"Use {key} = 1.")
        sizes[key] = value
    dp, total = plan.dp, sizes.get("global_batch")
    if total is None:
        for key, default in (("micro_batch", 1), ("grad_accum", plan.pp if plan.pp > 1 else 1)):
            if key not in sizes:
                sizes[key] = default
                assumed[f"recipe.{key}"] = f"{default} (default)"
        sizes["global_batch"] = sizes["micro_batch"] * sizes["grad_accum"] * dp
        return sizes
    given_micro, given_accum = sizes.get("micro_batch"), sizes.get("grad_accum")
    if given_micro is None and given_accum is None:
        sizes["micro_batch"] = 1
        assumed["recipe.micro_batch"] = "1 (default)"
    known = "micro_batch" if given_accum is None else "grad_accum"
    if given_micro is not None and given_accum is not None:
        return sizes
    unit = sizes[known] * dp
    if total % unit:
        low, high = total // unit * unit, (total // unit + 1) * unit
        raise PlanError("recipe.global_batch", total, f"it must be a multiple of {known} {sizes[known]} x dp {dp} = {unit} sequences.",
                        f"Use {f'{low} or ' if low else ''}{high}.")
    derived = "grad_accum" if known == "micro_batch" else "micro_batch"
    sizes[derived] = total // unit
    assumed[f"recipe.{derived}"] = f"{total // unit} (from the global batch of {total} sequences)"
    return sizes
