"""From what a user wrote (names, words, a sufficient set of batch figures) to a Run, and what was assumed on the way.

The input is a nested mapping, the form of a run file:

    {"params": "1B" | "model": name or shape,
     "cluster": {"gpu": "h100", "gpus": 8, "nodes": 1} or a whole Cluster,
     "plan": {"strategy": "fsdp", "zero": 3, "tp": 2, "checkpointing": "full", …},
     "recipe": {"seq_len": 4096, "micro_batch": 1, "global_batch": 512, "precision": "bf16-mixed", "optimizer": "adamw", …}}
"""

import difflib
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from costmodel import catalog
from costmodel.spec import Checkpointing, Cluster, Model, OptimizerSpec, Plan, PlanError, Precision, Recipe, Run, Spec
from costmodel.spec.presets import precision_preset
from costmodel.spec.run import BEFORE_AMPERE, V_SHAPED
from costmodel.spec.sizing import model_from_params, parse_count

DEFAULT_GPU = "h100_sxm"
DEFAULT_SEQ_LEN = 4096
DEFAULT_LOSS_CHUNKS = 8
STRATEGIES = ("single", "dataparallel", "ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp", "megatron", "megatron-fsdp", "muon-distributed")
OPTIMIZER_WORDS = ("sgd", "momentum", "adam", "adamw", "adam8bit", "muon")
STRATEGY_FIELDS: dict[str, dict[str, Any]] = {
    "single": {"zero": 0}, "ddp": {"zero": 0}, "dataparallel": {"zero": 0, "single_process": True}, "zero1": {"zero": 1},
    "zero2": {"zero": 2}, "zero3": {"zero": 3}, "fsdp": {"zero": 3}, "fsdp2": {"zero": 3}, "hsdp": {"zero": 3},
    "megatron": {"framework": "megatron"}, "megatronfsdp": {"framework": "megatron", "zero": 3}, "muondistributed": {"framework": "nanochat", "zero": 1}}
"""What each strategy word means; "hsdp" also shards within a node only."""
OTHER_FIELDS = {
    "tp": "tp = 2, say", "pp": "pp = 2, say", "cp": "cp = 2, say", "ep": "ep = 2, say", "sequenceparallel": "sequence_parallel = true beside tp",
    "megatrondistributedoptimizer": "the strategy megatron with ZeRO stage 1"}
"""Ways to spread a step, by their names in `costmodel list strategies`, that are not a strategy word but a field."""
INPUT_KEYS = ("model", "params", "cluster", "plan", "recipe", "profile")
LARGEST_NUMBER = 10**15


class Resolved(NamedTuple):
    """A Run, and the reason of every figure that the user did not give."""

    run: Run
    assumed: dict[str, str]


CLUSTER_WORDS = ("name", "gpu", "accelerator", "gpus", "nodes", "gpus_per_node", "host", "levels", "host_memory_bytes", "memory_bytes", "slow_rank",
                 "link_factors")
PLAN_WORDS = ("strategy", "dp", "bucket_mb")
RECIPE_WORDS = ("batch_tokens",)
S = TypeVar("S", bound=Spec)


def resolve(given: Mapping[str, Any]) -> Resolved:
    """Build the Run of an input mapping. Raises PlanError with field, value, rule and a value that works."""
    assumed: dict[str, str] = {}
    unknown_keys("", given, INPUT_KEYS)
    given = {key: _plain(key, value) for key, value in given.items()}
    plan_in, recipe_in, cluster_in = (_section(given, key) for key in ("plan", "recipe", "cluster"))
    try:
        model = _model(given, assumed, plan_in)
        cluster = _cluster(cluster_in, plan_in, recipe_in, assumed)
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
    value, ctx, last = detail["input"], detail.get("ctx", {}), path.rpartition(".")[2]
    kind = detail["type"]
    if kind == "extra_forbidden":
        return PlanError(path, value, "there is no such field.", "Remove it, or see docs/run.md for the fields.")
    if kind == "missing" and last.isdigit():
        needed = 1 + max(int(e["loc"][-1]) for e in error.errors() if e["loc"][:-1] == detail["loc"][:-1])
        return PlanError(path.rpartition(".")[0], None, f"it takes {needed} items, and {last} {'is' if last == '1' else 'are'} given.",
                         "docs/run.md says what it takes.")
    if kind == "too_long":
        return PlanError(path, None, f"it takes {ctx['max_length']} items, and {ctx['actual_length']} are given.", "docs/run.md says what it takes.")
    if kind == "missing":
        return PlanError(path, None, "it is needed and not given.", f"Give {last}; docs/run.md says what it takes.")
    if kind == "literal_error":
        words = re.findall(r"'([^']*)'", str(ctx.get("expected", "")))
        close = difflib.get_close_matches(str(value).lower(), words, 1)
        meant = f"Did you mean {close[0]}? " if close else ""
        return PlanError(path, value, "is not one of the choices.", f"{meant}Use one of {', '.join(words)}.")
    if kind in _BOUNDS:
        bound, relation, nudge = _BOUNDS[kind]
        return PlanError(path, value, f"must be {relation} {ctx[bound]:g}.", f"Use {last} = {ctx[bound] + nudge:g}.")
    for start, rule, advice in _WRONG_TYPE:
        if kind.startswith(start):
            if start == "int" and isinstance(value, float) and abs(value) >= 1:
                advice = f"Use {{}} = {round(value)}."
            return PlanError(path, value, rule, advice.format(last))
    return PlanError(path, value, f"{detail['msg'][0].lower()}{detail['msg'][1:]}.", "See docs/run.md for what the field takes.")


_BOUNDS = {"greater_than": ("gt", "above", 1), "greater_than_equal": ("ge", "at least", 0), "less_than_equal": ("le", "at most", 0),
           "less_than": ("lt", "below", -1)}
_WRONG_TYPE = (("int", "must be a whole number.", "Use {} = 8, say."), ("float", "must be a number.", "Use {} = 0.1, say."),
               ("finite", "must be a finite number.", "Use {} = 0.1, say."), ("bool", "must be true or false.", "Use {} = true."),
               ("string", "must be a word.", "Write {} in quotes."), ("tuple", "must be a list.", "Write {} = [1, 2], say."),
               ("model", "must be a table of fields.", "docs/run.md lists the fields of {}."),
               ("dict", "must be a table of fields.", "docs/run.md lists the fields of {}."))


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
            close = [k for k in known if len(str(key)) > 2 and k.startswith(str(key))] or difflib.get_close_matches(str(key), known, 1)
            hint = f"Did you mean {close[0]}?" if close else f"It takes {', '.join(known)}."
            if section == "model" and key in INPUT_KEYS:
                hint = f"{key} stands above the tables, not in one."
            if not section and (homes := [f"{home}.{key}" for home, fields in _SECTIONS.items() if key in fields]):
                hint = f"Did you mean {' or '.join(homes)}?"
            raise PlanError(f"{section}.{key}".strip("."), given[key], "there is no such field.", hint)


_SECTIONS: dict[str, tuple[str, ...]] = {
    "plan": (*Plan.model_fields, *PLAN_WORDS), "recipe": (*Recipe.model_fields, *RECIPE_WORDS), "cluster": CLUSTER_WORDS,
    "model": tuple(Model.model_fields)}


def _plain(field: str, value: Any) -> Any:
    """A value as TOML knows them: finite, of bounded size, lists as tuples. Spec objects pass."""
    if isinstance(value, Spec):
        return value
    if isinstance(value, Mapping):
        return {key: _plain(f"{field}.{key}", inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_plain(f"{field}.{i}", inner) for i, inner in enumerate(value))
    if isinstance(value, float) and not math.isfinite(value):
        raise PlanError(field, value, "is not a finite number.", "Use one such as 0.1.")
    if isinstance(value, int) and abs(value) > LARGEST_NUMBER:
        raise PlanError(field, f"{str(value)[:12]}...", "is too large for anything here.", f"Stay below {LARGEST_NUMBER:,}.")
    if value is not None and not isinstance(value, bool | str | int | float):
        raise PlanError(field, value, f"a {type(value).__name__} means nothing here.", "Write a number, a word, true or false, a list or a table.")
    return value


def _build(kind: type[S], fields: Mapping[str, Any]) -> S:
    """A Spec of exactly these fields: text is not read as a number, nor true as 1."""
    return kind.model_validate(fields, strict=True)


def _pipelined_torch(plan: Mapping[str, Any]) -> bool:
    """Whether the plan as written is a pipeline in PyTorch's dialect."""
    fields = STRATEGY_FIELDS.get(strategy_key(plan.get("strategy")), {})
    framework, pp = plan.get("framework") or fields.get("framework") or "pytorch", plan.get("pp")
    return framework == "pytorch" and isinstance(pp, int) and pp > 1


def _model(given: Mapping[str, Any], assumed: dict[str, str], plan: Mapping[str, Any]) -> Model:
    model, params = given.get("model"), given.get("params")
    if model is not None and params is not None:
        if not isinstance(model, Mapping) or "base" in model:
            raise PlanError("params", params, "both a model and a parameter count are given.", "Give one of the two.")
        if sizes := [key for key in model if key in SIZES]:
            raise PlanError(f"model.{sizes[0]}", model[sizes[0]], f"it follows from params = {params}, which is given as well.", "Give one of the two.")
    if params is not None:
        if not isinstance(params, str | int | float) or isinstance(params, bool):
            raise PlanError("params", params, "is not a number of parameters.", "Write it as 350M, 1B or 70e9.")
        try:
            shape = model_from_params(str(params), untied=_pipelined_torch(plan) and not (isinstance(model, Mapping) and "tied_embeddings" in model))
        except OverflowError:
            raise PlanError("params", params, "is not a finite number of parameters.", "Write it as 350M, 1B or 70e9.") from None
        assumed["model"] = shape.shape_rule
        if not isinstance(model, Mapping):
            return shape
        unknown_keys("model", model, tuple(Model.model_fields))
        assumed["model"] += f"; then {', '.join(model)} as given"
        return _build(Model, {**fields_of(shape, model), **model})
    if model is None:
        raise PlanError("model", None, "a run needs a model.", "Use --params 1B, or --model llama-3-8b.")
    if isinstance(model, Model):
        return model
    if isinstance(model, str):
        return catalog.model(model)
    if not isinstance(model, Mapping):
        raise PlanError("model", model, "must be a name or a table of fields.", "Use --model llama-3-8b.")
    fields = dict(model)
    base = fields.pop("base", None)
    unknown_keys("model", fields, tuple(Model.model_fields))
    return _build(Model, fields if base is None else {**fields_of(catalog.model(str(base)), fields), **fields})


SIZES = frozenset({"layers", "hidden", "heads", "ffn"})
"""Fields of a model that a parameter count decides."""


def fields_of(base: Model, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a model that a changed copy keeps; what followed from a changed field follows again."""
    fields = {**base.model_dump(), "name": f"{base.name}, changed", "shape_rule": ""}
    if "hidden" in changes and base.embedding_dim == base.hidden:
        del fields["embedding_dim"]
    if "heads" in changes and base.kv_heads == base.heads:
        del fields["kv_heads"]
    if changes.keys() & {"hidden", "heads"} and base.head_dim * base.heads == base.hidden:
        del fields["head_dim"]
    return fields


def _cluster(given: dict[str, Any], plan: Mapping[str, Any], recipe: Mapping[str, Any], assumed: dict[str, str]) -> Cluster:
    if "accelerator" in given and isinstance(given["accelerator"], Mapping):
        unknown_keys("cluster", given, tuple(Cluster.model_fields))
        return _build(Cluster, given)
    unknown_keys("cluster", given, CLUSTER_WORDS)
    given = {key: value for key, value in given.items() if value is not None}
    if "accelerator" in given:
        given.setdefault("gpu", given.pop("accelerator"))
    for key in ("gpus", "nodes", "gpus_per_node"):
        if key in given and (isinstance(given[key], bool) or not isinstance(given[key], int) or given[key] < 1):
            raise PlanError(f"cluster.{key}", given[key], "must be a whole number of at least 1.", f"Use {key} = 8.")
    for key in ("gpu", "name"):
        if key in given and not isinstance(given[key], str):
            raise PlanError(f"cluster.{key}", given[key], "must be a name of the catalogue.", "Use gpu = \"h100\", say.")
    gpu, name = given.get("gpu"), given.get("name")
    if not gpu and not name:
        gpu = DEFAULT_GPU
        assumed["cluster.gpu"] = f"{DEFAULT_GPU} (default)"
    gpus, nodes = given.get("gpus"), given.get("nodes")
    if gpus is None and nodes is None:
        gpus, why = _gpus_of_degrees(plan, recipe)
        assumed["cluster.gpus"] = f"{gpus} ({why})"
    cluster = catalog.cluster(gpus=gpus, gpu=gpu, name=name, gpus_per_node=given.get("gpus_per_node"), nodes=nodes)
    return _adjusted(cluster, given)


ADJUSTED = ("host", "levels", "host_memory_bytes", "slow_rank", "link_factors")


def _adjusted(cluster: Cluster, given: Mapping[str, Any]) -> Cluster:
    """A cluster of the catalogue with what was given of it besides."""
    changes: dict[str, Any] = {key: given[key] for key in ADJUSTED if key in given}
    if "memory_bytes" in given:
        changes["accelerator"] = {**cluster.accelerator.model_dump(), "memory_bytes": given["memory_bytes"]}
    return _build(Cluster, {**cluster.model_dump(), **changes}) if changes else cluster


def _gpus_of_degrees(plan: Mapping[str, Any], recipe: Mapping[str, Any]) -> tuple[int, str]:
    """The world size where none is given: the product of the degrees, dp from the batch figures if they say it."""
    def size(table: Mapping[str, Any], key: str) -> int:
        value = table.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0

    other = 1
    for key in ("tp", "pp", "cp"):
        other *= size(plan, key) or 1
    dp = size(plan, "dp") or (size(plan, "dp_replicate") or 1) * (size(plan, "dp_shard") or 1)
    unit, total = size(recipe, "micro_batch") * size(recipe, "grad_accum"), size(recipe, "global_batch")
    if dp == 1 and unit and total > unit and total % unit == 0 and not any(plan.get(k) for k in ("dp", "dp_replicate", "dp_shard")):
        return total // unit * other, f"the batch figures give dp = {total // unit}"
    return dp * other, "product of the degrees given"


def _plan(given: dict[str, Any], cluster: Cluster, assumed: dict[str, str]) -> Plan:
    unknown_keys("plan", given, (*Plan.model_fields, *PLAN_WORDS))
    given = {key: value for key, value in given.items() if value is not None}
    strategy = given.pop("strategy", None)
    gpus = cluster.gpus
    for key in ("tp", "pp", "cp", "ep", "dp", "dp_replicate", "dp_shard"):
        if key in given and (isinstance(given[key], bool) or not isinstance(given[key], int) or given[key] < 1):
            raise PlanError(f"plan.{key}", given[key], "a degree is a whole number of at least 1.", f"Use {key} = 1.")
    if "checkpointing" in given:
        given["checkpointing"] = _from_word("plan.checkpointing", given["checkpointing"], Checkpointing, checkpointing_word)
    else:
        assumed["plan.checkpointing"] = "none (default)"
    if "zero" in given and (isinstance(given["zero"], bool) or given["zero"] not in (0, 1, 2, 3)):
        raise PlanError("plan.zero", given["zero"], "a ZeRO stage is 0 (DDP), 1, 2 or 3 (FSDP).", "Use zero = 3.")
    if "bucket_mb" in given:
        size = given.pop("bucket_mb")
        if isinstance(size, bool) or not isinstance(size, int | float) or size <= 0:
            raise PlanError("plan.bucket_mb", size, "must be a number of MiB above 0.", "Use bucket_mb = 25.")
        given["bucket_bytes"] = max(1, int(size * (1 << 20)))
    if strategy is not None:
        _apply_strategy(str(strategy), given)
    default_dialect = "framework" not in given
    if given.get("framework") == "nanochat":
        given.setdefault("zero", 1)
    other = given.get("tp", 1) * given.get("pp", 1) * given.get("cp", 1)
    if gpus % other:
        raise PlanError("plan", f"tp x pp x cp = {other}", f"it must divide the {gpus} GPUs.", f"Use --gpus {other * max(1, round(gpus / other))}.")
    dp, asked = gpus // other, given.pop("dp", None)
    if asked is not None and asked != dp:
        raise PlanError("plan.dp", asked, f"{gpus} GPUs / (tp x pp x cp = {other}) leave dp = {dp}.", f"Use dp = {dp}, or --gpus {asked * other}.")
    if strategy is not None and strategy_key(strategy) == "single" and gpus > 1:
        raise PlanError("plan.strategy", "single", f"a single process uses one GPU, and the run has {gpus}.", "Use --gpus 1, or --strategy ddp.")
    shards = given.get("zero", 0) in (1, 2, 3)
    replicate, shard = given.get("dp_replicate"), given.get("dp_shard")
    if replicate is None and shard is None:
        if strategy is not None and strategy_key(strategy) == "hsdp":
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
    if given.get("schedule") in V_SHAPED and given.get("pp", 1) > 1 and "virtual_stages" not in given:
        given["virtual_stages"] = 2
        assumed["plan.virtual_stages"] = f"2 (what schedule {given['schedule']} has)"
    for key, value in Plan.of_framework(str(given.get("framework", "pytorch")), given.get("zero", 0), given.get("pp", 1)).items():
        if key in _OF_FRAMEWORK and key not in given:
            assumed[f"plan.{key}"] = _OF_FRAMEWORK[key]
        given.setdefault(key, value)
    if strategy is None and "zero" not in given and gpus > 1 and replicate == dp > 1 and not given.get("single_process"):
        assumed["plan.strategy"] = "ddp (default)"
    if default_dialect and gpus > 1:
        assumed["plan.framework"] = "pytorch (default)"
    return _build(Plan, given)


_OF_FRAMEWORK = {"bucket_bytes": "5e8 elements of 2 bytes (DeepSpeed's reduce_bucket_size)",
                 "reshard_after_forward": "false (under a pipeline FSDP2 keeps its parameters gathered)"}
"""What of the plan a framework sets otherwise than the default, in words."""


def _apply_strategy(word: str, given: dict[str, Any]) -> None:
    """Resolve an input word into fields; a contradiction with a field given beside it is an error."""
    fields = STRATEGY_FIELDS.get(strategy_key(word))
    if strategy_key(word) in OTHER_FIELDS:
        raise PlanError("plan.strategy", word, "has a field of its own, and goes with a strategy.", f"Use {OTHER_FIELDS[strategy_key(word)]}.")
    if fields is None:
        close = difflib.get_close_matches(strategy_key(word), STRATEGIES, 1)
        raise PlanError("plan.strategy", word, "is not a strategy.",
                        f"Did you mean {close[0]}?" if close else f"Use one of {', '.join(STRATEGIES)}.")
    for key, value in fields.items():
        if given.get(key) is None:
            given[key] = value
        elif given[key] != value:
            raise PlanError(f"plan.{key}", given[key], f"strategy {word} means {key} = {value}.", f"Leave {key} out, or the strategy.")


def strategy_key(word: object) -> str:
    """A strategy word without case and separators: "ZeRO-3" is zero3."""
    return str(word).lower().replace("-", "").replace("_", "").replace(" ", "")


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
                    "Use none, full, full:4 (groups of 4 layers), every:2 (each second layer), selective or selective:op.")


def _recipe(given: dict[str, Any], model: Model, cluster: Cluster, plan: Plan, assumed: dict[str, str]) -> Recipe:
    unknown_keys("recipe", given, (*Recipe.model_fields, *RECIPE_WORDS))
    given = {k: v for k, v in given.items() if v is not None}
    if "seq_len" not in given:
        given["seq_len"] = min(DEFAULT_SEQ_LEN, model.position_rows or DEFAULT_SEQ_LEN)
        assumed["recipe.seq_len"] = f"{given['seq_len']} tokens (default)"
    default, why = _default_precision(cluster, plan)
    if "precision" not in given:
        assumed["recipe.precision"] = f"{default} ({why})"
    elif isinstance(given["precision"], Mapping) and not {"base", "parameter", "compute", "gradient", "reduce"} <= {"base", *given["precision"]}:
        given["precision"] = {"base": default, **given["precision"]}
        if given["precision"]["base"] == default:
            assumed["recipe.precision.base"] = f"{default} ({why}), with the fields given"
    given["precision"] = _from_word("recipe.precision", given.get("precision", default), Precision, lambda word: precision_preset(word, plan))
    if "optimizer" in given:
        given["optimizer"] = _from_word("recipe.optimizer", given["optimizer"], OptimizerSpec, optimizer_word)
    elif plan.framework == "nanochat":
        given["optimizer"] = optimizer_word("muon")
        assumed["recipe.optimizer"] = "muon (nanochat's; AdamW for tables, head and vectors)"
    else:
        assumed["recipe.optimizer"] = "adamw (default; fused kernel)"
    if "attention" not in given and model.sliding_window and (word := _windowed_attention(model, cluster, given)):
        given["attention"] = word
        assumed["recipe.attention"] = f"{given['attention']} (scaled_dot_product_attention knows no window)"
    for key, words in _KERNEL_DEFAULTS.items():
        if key not in given:
            assumed[f"recipe.{key}"] = words
    if "train_tokens" in given:
        given["train_tokens"] = _tokens("recipe.train_tokens", given["train_tokens"])
    if "batch_tokens" in given:
        given["global_batch"] = _sequences(_tokens("recipe.batch_tokens", given.pop("batch_tokens")), given, plan, assumed)
    given.update(_batch(given, plan, assumed))
    if "loss_chunks" not in given and isinstance(given["seq_len"], int):
        given["loss_chunks"] = max(1, min(DEFAULT_LOSS_CHUNKS, given["micro_batch"] * given["seq_len"]))
    return _build(Recipe, given)


def _windowed_attention(model: Model, cluster: Cluster, given: Mapping[str, Any]) -> str:
    """The kernel that a model with windows is given: FlashAttention-2, which skips what lies outside, where it runs; else eager, if the sequence is
    longer than the window."""
    accelerator = cluster.accelerator
    flash = accelerator.kernel_table != "cpu" and accelerator.architecture not in BEFORE_AMPERE and model.head_dim <= 256
    if flash and given["precision"].compute in ("bf16", "fp16", "fp8"):
        return "fa2"
    return "eager" if isinstance(given["seq_len"], int) and given["seq_len"] > model.sliding_window else ""


def _default_precision(cluster: Cluster, plan: Plan) -> tuple[str, str]:
    """bf16-mixed where the device has bf16, else fp16-mixed, else (and on CPUs) fp32; under a pipeline or tensor parallelism in PyTorch without
    FSDP, where mixed would be torch.autocast, bf16-pure or fp32. And why."""
    accelerator = cluster.accelerator
    if accelerator.kernel_table == "cpu":
        return "fp32", "default"
    if plan.framework == "pytorch" and plan.pp * plan.tp > 1 and plan.zero != 3:
        where = "a pipeline" if plan.pp > 1 else "tensor parallelism"
        return ("bf16-pure" if "bf16" in accelerator.flops_per_s else "fp32"), f"default under {where}, where torch.autocast is not predicted"
    return next((f"{dtype}-mixed" for dtype in ("bf16", "fp16") if dtype in accelerator.flops_per_s), "fp32"), "default"


_KERNEL_DEFAULTS = {
    "attention": "sdpa (default; PyTorch picks the fused kernel)", "loss": "eager (default; keeps an fp32 copy of the logits)",
    "compile": "off (default; eager kernels)", "cuda_graphs": "off (default)",
    "allocator": "default (PyTorch's, segments not expandable)", "grad_accum_fusion": "off (default)", "dropout": "0 (default)",
    "clip_norm": "1.0 (default; gradients are clipped)"}
"""What of the recipe decides figures and is easily left out, with its default in words."""


def _from_word(field: str, value: Any, kind: type[S], word: Callable[[str], S]) -> S:
    """A table that may be written as one word, or as a word (`base`) with some fields changed."""
    if isinstance(value, str):
        return word(value)
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise PlanError(field, value, "must be a word or a table of fields.", "docs/run.md lists both.")
    fields = dict(value)
    base = fields.pop("base", None)
    unknown_keys(field, fields, tuple(kind.model_fields))
    changed = {} if base is None else word(str(base)).model_dump()
    if base is not None and "name" in changed and kind is Precision:
        changed["name"] = f"{changed['name']}, changed"
    return _build(kind, {**changed, **fields})


def optimizer_word(word: str) -> OptimizerSpec:
    """"adamw", or "adamw:foreach"; the implementation is `fused` unless named."""
    name, _, implementation = word.lower().partition(":")
    name = {"adamw8bit": "adam8bit", "sgd-momentum": "momentum", "8bit-adam": "adam8bit", "adam-8bit": "adam8bit"}.get(name, name)
    if name not in OPTIMIZER_WORDS:
        close = difflib.get_close_matches(name, OPTIMIZER_WORDS, 1)
        raise PlanError("recipe.optimizer", word, "is not an optimizer of the catalogue.",
                        f"Did you mean {close[0]}?" if close else f"Use one of {', '.join(OPTIMIZER_WORDS)}.")
    try:
        return OptimizerSpec.model_validate({"name": name, "implementation": implementation or ("foreach" if name in ("sgd", "momentum") else "fused")})
    except ValidationError:
        raise PlanError("recipe.optimizer", word, "names no implementation.", "Use adamw:fused, adamw:foreach or adamw:for-loop.") from None


def _tokens(field: str, value: Any) -> int:
    """A count of tokens, which may be written 4M or 300B; K, M, B and T are thousands."""
    words, example = "is not a number of tokens.", f"Write it as {'300B' if field.endswith('train_tokens') else '4M'} or a whole number."
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise PlanError(field, value, words, example)
    try:
        tokens = parse_count(value)
    except (PlanError, OverflowError):
        raise PlanError(field, value, words, example) from None
    if not 1 <= tokens <= LARGEST_NUMBER:
        raise PlanError(field, value, f"tokens are 1 to {LARGEST_NUMBER:,}.", example)
    return tokens


def _sequences(tokens: int, given: Mapping[str, Any], plan: Plan, assumed: dict[str, str]) -> int:
    """The global batch nearest to a number of tokens that the data-parallel ranks share evenly."""
    beside = "global_batch" if "global_batch" in given else "grad_accum" if "micro_batch" in given and "grad_accum" in given else ""
    if beside:
        raise PlanError("recipe.batch_tokens", tokens, f"{beside} is given as well, and with it the batch.", f"Leave {beside} out, or batch_tokens.")
    each, seq_len = given.get("micro_batch", given.get("grad_accum", 1)), given["seq_len"]
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in (each, seq_len)):
        return 1  # refused where these are read
    unit = int(each) * plan.dp
    batch: int = max(1, math.floor(tokens / (unit * seq_len) + 0.5)) * unit
    near = "" if batch * seq_len == tokens else f", the nearest to {tokens:,} that dp {plan.dp} shares evenly"
    assumed["recipe.global_batch"] = f"{batch} sequences = {batch * seq_len:,} tokens{near}"
    return batch


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
        for key, default in (("micro_batch", 1), ("grad_accum", plan.pp)):
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
