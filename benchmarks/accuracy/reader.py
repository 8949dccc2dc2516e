"""From a published record to a Run: its stated shape, cluster, plan and recipe, and the assumptions for the rest.

The reader never sees `measured`. A record that cannot be read is refused with a reason, in words that can be counted.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.accuracy.assumptions import Rules, Source, applies, look_up
from costmodel import catalog
from costmodel.inputs import resolve
from costmodel.spec import Cluster, PlanError, Run

ACTIVATIONS = {"gelu": (False, "gelu_tanh"), "swiglu": (True, "silu"), "relu2": (False, "relu_squared"), "squared_relu": (False, "relu_squared")}
NORMS = {"layernorm": "layernorm", "rmsnorm": "rmsnorm", "rmsnorm (no weights)": "rmsnorm_no_weight"}
MOE_FIELDS = {"experts": "experts", "top_k": "top_k", "ffn": "expert_ffn", "shared_experts": "shared_experts", "shared_ffn": "shared_ffn",
              "dense_layers": "first_dense_layers"}
MLA_FIELDS = {"q_lora_rank": "q_lora_rank", "kv_lora_rank": "kv_lora_rank", "qk_nope_head_dim": "qk_nope_head_dim", "qk_head_dim": "qk_nope_head_dim",
              "qk_rope_head_dim": "qk_rope_head_dim", "qk_pos_emb_head_dim": "qk_rope_head_dim", "v_head_dim": "v_head_dim"}
GIGABIT = 1e9 / 8


class Refused(Exception):
    """A record that cannot be read or predicted, and why."""


@dataclass(slots=True)
class Reading:
    """The Run of a record, and the assumptions that made it: (field, value, reason)."""

    source: Source
    run: Run
    assumed: list[tuple[str, Any, str]] = field(default_factory=list)


def read(record: Mapping[str, Any], rules: Rules) -> Reading:
    """The Run that a record describes. Raises Refused."""
    stated = {key: value for key, value in record.items() if key != "measured"}
    source = rules.source_of(stated)
    for reason, when in (*rules.general.refuse, *source.refuse):
        if applies(when, stated):
            raise Refused(reason)
    assumed = _assumptions(stated, rules, source)
    fields = _stated_fields(stated, rules)
    used: list[tuple[str, Any, str]] = []
    for name, (value, reason, overrides) in assumed.items():
        if overrides or fields.get(name) is None:
            fields[name] = value
            used.append((name, value, reason))
    if look_up(stated, "model.attention") == "mla" and not fields.get("model.mla"):
        raise Refused("latent attention without its dimensions")
    try:
        run = resolve(_nested(_finished(fields, stated))).run
    except PlanError as error:
        raise Refused(plan_reason(error)) from None
    return Reading(source, run, used)


def plan_reason(error: PlanError) -> str:
    """A PlanError as a reason to count: field and rule, with the numbers of this one record left out."""
    return f"{error.field}: {re.sub(r'[0-9][0-9,.]*', '…', error.rule.rstrip('.'))}"


def _assumptions(stated: Mapping[str, Any], rules: Rules, source: Source) -> dict[str, tuple[Any, str, bool]]:
    """Field -> (value, reason, overrides) of every rule that applies; the last one wins."""
    found: dict[str, tuple[Any, str, bool]] = {}
    for rule in (*rules.general.assume, *source.assume):
        if rule.applies(stated) and (value := rule.found(stated)) is not None:
            found[rule.field] = value, rule.reason, rule.overrides
    return found


def _word(rules: Rules, table: str, word: Any) -> Any:
    """The project's word for a publisher's; None for none."""
    if word is None:
        return None
    known = rules.words[table]
    if word not in known:
        raise Refused(f"{table} \"{word}\" is not described")
    return known[word]


def _stated_fields(record: Mapping[str, Any], rules: Rules) -> dict[str, Any]:
    """What the record says, as dotted fields of the run's input; None where it says nothing."""
    model, cluster, plan, recipe = (record.get(key) or {} for key in ("model", "cluster", "plan", "recipe"))
    fields = _model_fields(model)
    fields |= {"cluster.gpu": cluster.get("accelerator"), "cluster.gpus": cluster.get("gpus"),
               "cluster.gpus_per_node": cluster.get("gpus_per_node"), "reader.network": cluster.get("inter_node"),
               "reader.link": cluster.get("intra_node")}
    strategy = plan.get("strategy")
    sharded = plan.get("distributed_optimizer")
    fields["plan.zero"] = (None if sharded is None else int(sharded)) if strategy == "megatron" else _word(rules, "zero", strategy)
    fields |= {f"plan.{key}": plan.get(key) for key in ("tp", "pp", "cp", "ep", "reshard_after_forward")}
    fields["plan.sequence_parallel"] = plan.get("sequence_parallel") if (plan.get("tp") or 1) > 1 else False
    fields["reader.dp"], fields["plan.dp_replicate"] = plan.get("dp"), plan.get("dp_replicate") if fields["plan.zero"] else None
    if (plan.get("dp_replicate") or 1) == 1:
        fields["plan.dp_replicate"] = None
    if (plan.get("pp") or 1) > 1:
        fields |= {"plan.schedule": _word(rules, "schedule", plan.get("pp_schedule")), "plan.virtual_stages": plan.get("vpp")}
    kind = str(plan.get("cp_kind") or "")
    fields["plan.cp_kind"] = None if not kind or (plan.get("cp") or 1) == 1 else "ulysses" if "ulysses" in kind else "ring"
    fields["plan.checkpointing"] = _checkpointing(rules, recipe.get("checkpointing"))
    fields |= _offload(rules, recipe.get("offload"))
    fields |= {f"recipe.{key}": recipe.get(key) for key in ("seq_len", "micro_batch", "grad_accum", "global_batch", "compile")}
    fields["recipe.precision"] = _precision(rules, recipe)
    fields["recipe.optimizer"] = {"base": _word(rules, "optimizer", recipe.get("optimizer"))}
    return fields


def _model_fields(model: Mapping[str, Any]) -> dict[str, Any]:
    mlp, norm, attention = model.get("mlp"), model.get("norm"), str(model.get("attention") or "")
    if mlp not in ACTIVATIONS:
        raise Refused(f"feed-forward block \"{mlp}\" is not described")
    if norm not in NORMS:
        raise Refused(f"norm \"{norm}\" is not described")
    fields: dict[str, Any] = {f"model.{key}": model.get(key) for key in ("name", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab",
                                                                        "tied_embeddings", "positions")}
    biases = bool(model.get("biases"))
    fields["model.gated"], fields["model.activation"] = ACTIVATIONS[mlp]
    fields |= {"model.norm": NORMS[norm], "model.norm_bias": norm == "layernorm"}
    fields |= dict.fromkeys(("model.qkv_bias", "model.attention_out_bias", "model.mlp_bias"), biases)
    if "sliding window" in attention:
        fields |= {"model.sliding_window": 128, "model.attention_pattern": "alternating"}
    moe = model.get("moe") or {}
    if moe:
        fields["model.moe"] = {ours: moe[theirs] for theirs, ours in MOE_FIELDS.items() if theirs in moe}
        fields["model.mtp_depth"] = moe.get("mtp_layers")
        fields["model.moe"] |= _dense_first(str(moe.get("layer_freq") or ""))
    if attention == "mla":
        mla = {ours: moe[theirs] for theirs, ours in MLA_FIELDS.items() if moe.get(theirs)}
        fields["model.mla"] = mla if len(mla.keys() - {"q_lora_rank"}) == 4 else None
        fields |= {"model.fused_qkv": False, "model.qk_norm": "none", "model.head_dim": None}
    return fields


def _dense_first(frequency: str) -> dict[str, int]:
    """Megatron's `--moe-layer-freq`: which layers have a mixture, as a Python list; here where those without come first."""
    if "[0]" not in frequency:
        return {}
    first = re.fullmatch(r"\(\[0\]\*(\d+)\+\[1\]\*\d+\)", frequency)
    if not first:
        raise Refused("dense layers between those of a mixture of experts")
    return {"first_dense_layers": int(first[1])}


def _checkpointing(rules: Rules, word: Any) -> Any:
    if isinstance(word, str) and word.startswith("selective ("):
        raise Refused("checkpointing of named modules is not described")
    return _word(rules, "checkpointing", word)


def _offload(rules: Rules, words: Any) -> dict[str, Any]:
    """"optimizer states on CPU; params on CPU; checkpointed activations on CPU": parameters imply optimizer states."""
    if not words:
        return {}
    parts = [part.strip() for part in str(words).split(";")]
    kinds = [rules.words["offload"][part] for part in parts if part in rules.words["offload"]]
    return {"plan.offload": "params" if "params" in kinds else kinds[0] if kinds else None,
            "plan.activation_offload": any("activation" in part for part in parts)}


def _precision(rules: Rules, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The publisher's word as the framework's preset, with the dtypes that the record states."""
    fields = {"base": _word(rules, "precision", recipe.get("precision"))}
    fields |= {ours: recipe.get(theirs) for ours, theirs in (("parameter", "param_dtype"), ("gradient", "grad_dtype"), ("reduce", "reduce_dtype"))}
    return {key: value for key, value in fields.items() if value is not None}


# -- what follows from several fields ---------------------------------------------------------------------------------------


def _finished(fields: dict[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """Resolve the reader's own fields: data-parallel degrees, padded vocabulary, stages, learned positions, links."""
    tp, pp = fields.get("plan.tp") or 1, fields.get("plan.pp") or 1
    dp, zero, replicate = fields.pop("reader.dp", None), fields.get("plan.zero"), fields.pop("plan.dp_replicate", None)
    if dp:
        replicate = (replicate or 1) if zero else dp
        fields["plan.dp_replicate"], fields["plan.dp_shard"] = replicate, max(1, dp // replicate)
    multiple = (fields.pop("reader.vocab_multiple", None) or 1) * tp
    if multiple > tp:
        fields["model.vocab"] = -(-fields["model.vocab"] // multiple) * multiple
    if fields["model.positions"] == "learned":
        fields["model.position_rows"] = max(fields.get("model.position_rows") or 0, fields["recipe.seq_len"])
    stages = _stage_layers(fields, pp, fields.get("plan.virtual_stages") or 1)
    if stages:
        fields["plan.stage_layers"] = stages
    cluster = _cluster(fields, fields.pop("reader.network", None), fields.pop("reader.link", None), fields.pop("reader.node", None))
    kept = {key: value for key, value in fields.items() if value is not None and not key.startswith(("reader.", "cluster."))}
    return {"cluster": cluster.model_dump(), **kept}


def _stage_layers(fields: dict[str, Any], pp: int, virtual: int) -> list[int]:
    """Layers of each stage where the record says more than an even division; the division itself is the plan's."""
    layers, first, last = fields["model.layers"], fields.pop("reader.first_stage_layers", None), fields.pop("reader.last_stage_layers", None)
    ends = fields.pop("reader.ends_one_less", None)
    if pp == 1 or virtual > 1:
        return []
    if first and last and pp > 2 and (layers - first - last) % (pp - 2) == 0:
        return [first, *[(layers - first - last) // (pp - 2)] * (pp - 2), last]
    if ends and (layers + 2) % pp == 0:
        whole = (layers + 2) // pp
        return [whole - 1, *[whole] * (pp - 2), whole - 1]
    return []


def _cluster(fields: Mapping[str, Any], network: Any, link: Any, node: Any) -> Cluster:
    """The catalogue's cluster, of nodes of a named shape where a rule has one, with the links at the rates that the record states. NVLink in words
    counts both ways."""
    gpu, gpus, per_node = fields.get("cluster.gpu"), fields["cluster.gpus"], fields.get("cluster.gpus_per_node")
    cluster = catalog.cluster(gpus=gpus, gpu=gpu, name=node, gpus_per_node=per_node)
    levels = list(cluster.levels)
    if match := re.search(r"NVLink\d? (\d+) ?GB/s", str(link or "")):
        rate = float(match[1]) / 2 * 1e9
        levels = [lv.model_copy(update={"bytes_per_s": min(lv.bytes_per_s, rate)}) if lv.kind == "nvlink" else lv for lv in levels]
    if network and levels and levels[-1].name == "network" and (found := network_rate(str(network), cluster.gpus_in_node)):
        kind, rate = found
        levels[-1] = levels[-1].model_copy(update={"bytes_per_s": rate, "kind": kind or levels[-1].kind})
    return cluster.model_copy(update={"levels": tuple(levels)})


def network_rate(words: str, ranks_in_node: int) -> tuple[str, float] | None:
    """(kind of link, one-way bytes/s of one GPU) of words such as "1600Gb/s RoCE per node"; None where they state no rate."""
    text = words.lower()
    kind = "roce" if "roce" in text or "rdma" in text else "infiniband" if "infiniband" in text or "omni-path" in text else ""
    if match := re.search(r"(\d+) ?gb/s.* per gpu", text):
        return kind, float(match[1]) * GIGABIT
    if match := re.search(r"(\d+)x ?(?:omni-path )?(\d+) ?gb/s", text):
        return kind, int(match[1]) * float(match[2]) * GIGABIT / ranks_in_node
    if match := re.search(r"(\d+) ?gb/s.* per node", text):
        return kind, float(match[1]) * GIGABIT / ranks_in_node
    return None


def _nested(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted fields as nested tables."""
    out: dict[str, Any] = {}
    for name, value in fields.items():
        *path, last = name.split(".")
        table = out
        for key in path:
            table = table.setdefault(key, {})
        if isinstance(value, Mapping) and isinstance(table.get(last), dict):
            table[last] = {**value, **table[last]}
        else:
            table[last] = dict(value) if isinstance(value, Mapping) else value
    return out

