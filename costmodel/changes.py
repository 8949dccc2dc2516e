"""A Run back as the input it follows from, and a Run with some fields changed.

    changed(run, {"plan.tp": 4})                                 dp follows, the GPUs stay
    changed(run, {"cluster.gpus": 64}, keep="global_batch")      dp and the accumulation follow
    changed(run, {"recipe.precision.optimizer_state": "bf16"})   a field inside a table
"""

from collections.abc import Mapping
from typing import Any, Literal

from costmodel import catalog
from costmodel.inputs import DEFAULT_LOSS_CHUNKS, checkpointing_word, fields_of, optimizer_word, resolve
from costmodel.spec import Checkpointing, Cluster, Model, OptimizerSpec, Plan, PlanError, Precision, Recipe, Run, Spec
from costmodel.spec.cluster import LINK_WORDS
from costmodel.spec.presets import precision_preset
from costmodel.spec.run import INTERLEAVED, V_SHAPED

Keep = Literal["micro_batch", "global_batch"]
BATCH = ("micro_batch", "grad_accum", "global_batch")
KEPT = ("host", "slow_rank", "link_factors")
"""Of a cluster: what stays on another GPU or node type."""


def as_input(run: Run) -> dict[str, Any]:
    """The shortest input mapping that resolves to this very run: what follows from other fields is left out, words stand for tables."""
    return {"model": _model_input(run.model), "cluster": _cluster_input(run.cluster), "plan": _plan_input(run.plan), "recipe": _recipe_input(run)}


def changed(run: Run, changes: Mapping[str, Any], keep: Keep = "micro_batch") -> Run:
    """The run with fields set by their dotted path, as in a run file; what followed from them follows again.

    The data-parallel degrees follow from the GPUs and the other degrees, the precision's dtypes from the framework. `keep` says which
    batch stays when the data-parallel degree moves: the micro-batch and its accumulation, or the global batch. Options that the changed
    run has no use for (virtual stages without a pipeline) go. Raises PlanError where there is no such run.
    """
    sections: dict[str, dict[str, Any]] = {}
    for path, value in changes.items():
        section, _, field = path.partition(".")
        sections.setdefault(section, {})[field] = value
    if unknown := sections.keys() - {"model", "params", "cluster", "plan", "recipe"}:
        raise PlanError(sorted(unknown)[0], None, "there is no such part of a run.", "Use model, params, cluster, plan or recipe.")
    given = as_input(run)
    if "params" in sections:
        del given["model"]
        given["params"] = sections["params"][""]
    model, cluster, plan, recipe = (sections.get(name, {}) for name in ("model", "cluster", "plan", "recipe"))
    if model:
        given["model"] = model[""] if "" in model else {**fields_of(run.model, model), **model}
    if cluster:
        given["cluster"] = _changed_cluster(run.cluster, given["cluster"], cluster)
    plan, recipe = (_with_tables(given[name], changes) for name, changes in (("plan", plan), ("recipe", recipe)))
    given["plan"] = _changed_plan(given["plan"], plan, {**sections, "gpus": given["cluster"].get("gpus")})
    given["recipe"] = _changed_recipe(run, given["recipe"], recipe, keep)
    try:
        return resolve(given).run
    except PlanError as error:
        if error.field != "plan.dp_shard" or "dp_shard" in plan or "dp_shard" not in given["plan"]:
            raise
        del given["plan"]["dp_shard"]
        return resolve(given).run


# -- what an input needs to say ----------------------------------------------------------------------------------------------


def _model_input(model: Model) -> Any:
    """The catalogue's name where it stands for this model."""
    try:
        return model.name if catalog.model(model.name) == model else model
    except PlanError:
        return model


def _cluster_input(cluster: Cluster) -> dict[str, Any]:
    """Names of the catalogue where they give this cluster, with what was set besides; else all of it."""
    memory = cluster.accelerator.memory_bytes
    for words in ({}, {"name": cluster.name}, {"gpus_per_node": cluster.gpus_per_node}, {"name": cluster.name, "gpus_per_node": cluster.gpus_per_node}):
        named: dict[str, Any] = {"gpu": cluster.accelerator.name, "gpus": cluster.gpus, **words}
        try:
            same = catalog.cluster(**named)
        except PlanError:
            continue
        own = {key: getattr(cluster, key) for key in KEPT if getattr(cluster, key) != getattr(same, key)}
        device = same.accelerator.model_copy(update={"memory_bytes": memory})
        if same.model_copy(update={**own, "accelerator": device}) == cluster:
            return {**named, **own, **({"memory_bytes": memory} if memory != same.accelerator.memory_bytes else {})}
    return cluster.model_dump()


def _plan_input(plan: Plan) -> dict[str, Any]:
    out = {key: value for key, value in plan if value != Plan.model_fields[key].get_default(call_default_factory=True)}
    for key in ("dp_replicate", "dp_shard"):
        out.pop(key, None)
    for key, value in Plan.of_framework(plan.framework, plan.zero, plan.pp).items():
        out.pop(key, None)
        if getattr(plan, key) != value:
            out[key] = getattr(plan, key)
    out["zero"] = plan.zero
    if plan.dp_replicate > 1 and plan.zero:
        out["dp_shard"] = plan.dp_shard
    if "checkpointing" in out:
        out["checkpointing"] = _checkpointing_input(plan.checkpointing)
    return out


def _checkpointing_input(c: Checkpointing) -> Any:
    words = (c.mode, f"full:{c.group}", f"every:{c.every}", f"selective:{next(iter(c.ops), 'attention')}")
    return next((word for word in words if checkpointing_word(word) == c), c)


def _recipe_input(run: Run) -> dict[str, Any]:
    r = run.recipe
    out = {key: value for key, value in r if value != Recipe.model_fields[key].get_default(call_default_factory=True)}
    out.pop("global_batch", None)
    out.pop("loss_chunks", None)
    out |= {"seq_len": r.seq_len, "micro_batch": r.micro_batch, "grad_accum": r.grad_accum,
            "precision": _precision_input(r.precision, run.plan), "optimizer": _optimizer_input(r.optimizer)}
    if r.loss_chunks != _default_chunks(r.micro_batch, r.seq_len):
        out["loss_chunks"] = r.loss_chunks
    return out


def _default_chunks(micro_batch: int, seq_len: int) -> int:
    return max(1, min(DEFAULT_LOSS_CHUNKS, micro_batch * seq_len))


def _precision_input(precision: Precision, plan: Plan) -> Any:
    try:
        return precision.name if precision_preset(precision.name, plan) == precision else precision
    except PlanError:
        return precision


def _optimizer_input(optimizer: OptimizerSpec) -> Any:
    for word in (optimizer.name, f"{optimizer.name}:{optimizer.implementation}"):
        if optimizer_word(word) == optimizer:
            return word
    return optimizer


# -- what follows again ------------------------------------------------------------------------------------------------------


def _changed_cluster(cluster: Cluster, named: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Another cluster: of the catalogue where this one is, else the same links with other reaches."""
    if "" in changes:
        name = changes[""]
        return {"name": name, "gpus": cluster.gpus} if isinstance(name, str) else dict(name)
    if "accelerator" not in named:
        if changes.keys() & {"gpu", "name"}:
            named = {key: value for key, value in named.items() if key in ("gpu" if "gpu" in changes else "", "gpus", *KEPT)}
        if "nodes" in changes:
            named = {key: value for key, value in named.items() if key != "gpus"}
        return {**named, **changes}
    if changes.keys() - {"gpus"} and changes.keys() & {"gpu", "name", "nodes", "gpus_per_node"}:
        return {"gpus": cluster.gpus, **changes}
    if "memory_bytes" in changes:
        named = {**named, "accelerator": {**named["accelerator"], "memory_bytes": changes["memory_bytes"]}}
        changes = {key: value for key, value in changes.items() if key != "memory_bytes"}
    gpus = changes.get("gpus", cluster.gpus)
    if not isinstance(gpus, int):
        return {**named, **changes}
    if gpus > cluster.gpus and cluster.levels and cluster.nodes == 1 and gpus > cluster.gpus_per_node:
        raise PlanError("cluster.gpus", gpus, "the cluster as given has no link between nodes.",
                        f"Stay within {cluster.gpus_per_node} GPUs, or name a cluster of the catalogue.")
    levels = [{**level.model_dump(), "domain": gpus if level.domain == cluster.gpus else min(level.domain, gpus)} for level in cluster.levels]
    kept = [level for level, inner in zip(levels, [{"domain": 1}, *levels], strict=False) if level["domain"] > inner["domain"]]
    gone = {level.name for level in cluster.levels} - {level["name"] for level in kept} - LINK_WORDS
    factors = {name: factor for name, factor in cluster.link_factors.items() if name not in gone}
    return {**named, "levels": tuple(kept), "link_factors": factors, **changes}


def _with_tables(given: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Changes in which a field inside a table ("precision.reduce") has become its whole table."""
    out: dict[str, Any] = {}
    for path, value in changes.items():
        table, _, field = path.partition(".")
        if not field:
            out[table] = value
            continue
        now = out.get(table, given.get(table, {}))
        fields = {"base": now} if isinstance(now, str) else now.model_dump() if isinstance(now, Spec) else dict(now)
        out[table] = {**fields, field: value}
    return out


def _changed_plan(plan: dict[str, Any], changes: Mapping[str, Any], sections: Mapping[str, Any]) -> dict[str, Any]:
    """The plan with its changes, less what they leave without meaning."""
    out = {**plan, **changes}
    strategy = changes.get("strategy")
    if strategy is not None:
        for key in ("zero", "dp_shard", "dp_replicate", "single_process", "framework"):
            if key not in changes:
                out.pop(key, None)
    zero, tp, pp = (out.get(key, default) for key, default in (("zero", 0), ("tp", 1), ("pp", 1)))
    gone: set[str] = set()
    if zero == 0:
        gone.add("dp_shard")
    if "dp" in changes or changes.keys() & {"dp_replicate", "dp_shard"}:
        gone |= {"dp_shard", "dp_replicate"}
    if tp == 1:
        gone |= {"sequence_parallel", "loss_parallel", "tp_overlap"}
    if pp == 1:
        gone |= {"schedule", "virtual_stages", "stage_layers"}
    if changes.keys() & {"pp", "virtual_stages"} or sections.keys() & {"model", "params"}:
        gone.add("stage_layers")
    schedule = out.get("schedule", "1f1b")
    if schedule not in INTERLEAVED:
        gone.add("virtual_stages")
    elif "schedule" in changes and schedule in V_SHAPED:
        gone.add("virtual_stages")
    elif "schedule" in changes and pp != 1:
        out.setdefault("virtual_stages", 2)
    return {key: value for key, value in out.items() if key not in gone or key in changes}


def _changed_recipe(run: Run, recipe: dict[str, Any], changes: Mapping[str, Any], keep: Keep) -> dict[str, Any]:
    """The recipe with its changes; the batch figure that was not asked for follows."""
    out = {**recipe, **changes}
    asked = [key for key in BATCH if key in changes]
    if keep == "global_batch" and len(asked) < 2 and "global_batch" not in asked:
        out["global_batch"] = run.recipe.global_batch
        out.pop("micro_batch" if asked == ["grad_accum"] else "grad_accum")
    elif "global_batch" in asked:
        for key in ("grad_accum", "micro_batch"):
            if key not in changes and (key == "grad_accum" or "grad_accum" in changes):
                out.pop(key)
    return out
