"""Summaries of rows: errors, verdicts, direction of controlled pairs, regret of the chosen plan."""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from statistics import fmean, median
from typing import Any

from benchmarks.accuracy.score import Pair, Row
from costmodel.spec import Run

CLEAR = 1.10
"""Measured times further apart than this ratio have a direction."""


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of a set of pairs, predicted over measured less one."""

    count: int
    mean_abs: float
    median_abs: float
    p90_abs: float
    bias: float


def relative(pair: Pair) -> float:
    return pair.predicted / pair.measured - 1


def errors_of(pairs: Sequence[Pair]) -> Errors | None:
    """Mean, median and 90th percentile of the absolute error, and the mean error (bias)."""
    if not pairs:
        return None
    signed = [relative(pair) for pair in pairs]
    size = sorted(abs(e) for e in signed)
    return Errors(len(size), fmean(size), median(size), quantile(size, 0.9), fmean(signed))


def quantile(ordered: Sequence[float], share: float) -> float:
    """Linear interpolation between the nearest ranks of sorted values."""
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


# -- configurations -----------------------------------------------------------------------------------------------------------


def flat(run: Run) -> dict[str, Any]:
    """A run as flat settings. The model counts as one, its learned positions apart: they follow the sequence."""
    model = run.model.model_dump(exclude={"name", "position_rows", "shape_rule", "extra_params_note"})
    cluster = run.cluster
    out: dict[str, Any] = {"model": json.dumps(model, sort_keys=True, default=str), "position_rows": run.model.position_rows,
                           "accelerator": cluster.accelerator.name, "gpus": cluster.gpus, "gpus_per_node": cluster.gpus_per_node,
                           "levels": json.dumps([(lv.kind, lv.bytes_per_s) for lv in cluster.levels])}
    for part in (run.plan, run.recipe):
        for key, value in part.model_dump().items():
            inner = value.items() if isinstance(value, dict) else (("", value),)
            out |= {f"{key}.{name}".rstrip("."): v for name, v in inner}
    return out


def configuration(run: Run) -> str:
    """A key that two records share when they describe one run."""
    return json.dumps(flat(run), sort_keys=True, default=str)


def distinct(rows: Iterable[Row]) -> list[Row]:
    """One row a publisher and configuration: repeats as the median of what was measured, so that they do not flatter."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row.run is not None:
            groups[row.publisher, configuration(row.run)].append(row)
    return [_median_row(group) for group in groups.values()]


def _median_row(group: list[Row]) -> Row:
    first = group[0]
    if len(group) == 1:
        return first
    kinds = dict.fromkeys(pair.kind for row in group for pair in row.pairs)
    pairs = []
    for kind in kinds:
        found = [pair for row in group if (pair := row.figure(kind))]
        pairs.append(Pair(kind, found[0].predicted, median(pair.measured for pair in found)))
    per_token = [row.seconds_per_token for row in group if row.seconds_per_token]
    return Row(first.id, first.publisher, first.source, first.quality, measured=first.measured, run=first.run, pairs=pairs,
               oom_predicted=first.oom_predicted, risky=first.risky, launch_bound=first.launch_bound, suspect=first.suspect,
               breakdown=first.breakdown, memory_parts=first.memory_parts, seconds_per_token=median(per_token) if per_token else None,
               predicted_per_token=first.predicted_per_token)


# -- verdicts -----------------------------------------------------------------------------------------------------------------


def verdicts(rows: Iterable[Row]) -> dict[str, int]:
    """Out of memory or not, predicted against measured; "risky" of the runs that ran counts as neither."""
    names = {(True, True): "out of memory, foreseen", (True, False): "out of memory, missed", (False, True): "ran, called out of memory",
             (False, False): "ran, and fits"}
    counts: Counter[str] = Counter()
    for row in rows:
        oom = row.measured.get("oom")
        if row.run is None or oom is None or row.oom_predicted is None:
            continue
        if row.risky:
            counts["out of memory, called risky" if oom else "ran, called risky"] += 1
        else:
            counts[names[bool(oom), row.oom_predicted]] += 1
    return dict(counts)


# -- direction ----------------------------------------------------------------------------------------------------------------

BATCH = {"micro_batch", "grad_accum", "global_batch", "loss_chunks"}
DATA_PARALLEL = {"dp_replicate", "dp_shard"}
FRAMEWORK_S = {"sync_each_micro_batch", "bucket_bytes"}
"""What follows from framework and ZeRO stage where it is not given."""
SETTINGS: dict[str, tuple[set[str], set[str]]] = {
    "sequence": ({"seq_len"}, BATCH | {"position_rows"}),
    "gpus": ({"gpus"}, BATCH | DATA_PARALLEL | {"levels", "gpus_per_node", "reshard_after_forward"}),
    "accelerator": ({"accelerator"}, {"levels"}),
    "tensor parallel": ({"tp"}, BATCH | DATA_PARALLEL | {"sequence_parallel", "loss_parallel", "model"}),
    "pipeline": ({"pp", "schedule", "virtual_stages"}, DATA_PARALLEL | {"grad_accum", "stage_layers"}),
    "context parallel": ({"cp"}, DATA_PARALLEL | {"grad_accum", "cp_kind"}),
    "micro-batch": ({"micro_batch"}, {"grad_accum", "loss_chunks"}),
    "global batch": ({"global_batch"}, {"grad_accum"}),
    "strategy": ({"zero"}, DATA_PARALLEL | FRAMEWORK_S | {"framework", "reshard_after_forward"}),
    "checkpointing": ({"checkpointing.mode", "checkpointing.every", "checkpointing.group", "checkpointing.ops"}, set()),
    "precision": ({"precision.compute", "precision.fp8_recipe"}, {"precision.name", "precision.parameter", "precision.gradient", "precision.reduce"}),
    "optimizer": ({"optimizer.name", "optimizer.implementation"}, {"optimizer.weight_decay"}),
    "tp overlap": ({"tp_overlap"}, set()),
    "compile": ({"compile"}, set()), "loss": ({"loss"}, {"loss_chunks"}), "attention": ({"attention"}, set()),
    "dropout": ({"dropout"}, set()), "resharding": ({"reshard_after_forward"}, set())}
"""A setting: the fields that make it, at least one of which differs, and those that may follow."""


def changed_setting(a: dict[str, Any], b: dict[str, Any]) -> str | None:
    """The one setting in which two runs differ; None where there is none or more than one."""
    differ = {key for key in a if a[key] != b[key]}
    if not differ or ("model" in differ and _padding_only(a, b) is False):
        return None
    for name, (fields, follow) in SETTINGS.items():
        if differ & fields and differ <= fields | follow:
            return name
    return None


def _padding_only(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two models are one, but for a vocabulary padded for another tp."""
    one, two = json.loads(a["model"]), json.loads(b["model"])
    return {k for k in one if one[k] != two[k]} <= {"vocab"} and abs(one["vocab"] / two["vocab"] - 1) < 0.05


def direction(rows: Sequence[Row]) -> dict[str, tuple[int, int]]:
    """Setting -> (pairs whose faster run was predicted faster, pairs), by GPU-seconds a token, of distinct configurations."""
    found: dict[str, list[int]] = defaultdict(list)
    by_model: dict[tuple[str, int, int], list[tuple[Row, dict[str, Any]]]] = defaultdict(list)
    for row in distinct(rows):
        if row.run is not None and row.seconds_per_token and row.predicted_per_token:
            m = row.run.model
            by_model[row.publisher, m.layers, m.hidden].append((row, flat(row.run)))
    for group in by_model.values():
        for (a, fa), (b, fb) in combinations(group, 2):
            measured = (a.seconds_per_token or 0.0) / (b.seconds_per_token or 1.0)
            if 1 / CLEAR <= measured <= CLEAR:
                continue
            setting = changed_setting(fa, fb)
            if setting:
                predicted = (a.predicted_per_token or 0.0) / (b.predicted_per_token or 1.0)
                found[setting].append(int((predicted > 1) == (measured > 1) and predicted != 1))
    return {name: (sum(hits), len(hits)) for name, hits in sorted(found.items())}


# -- regret -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Regret:
    """Choice among plans of one model, cluster and batch: measured time of the plan predicted best, over the best measured."""

    groups: int
    plans: int
    mean: float
    worst: float
    random: float
    """The same for a plan drawn by chance."""


FREE = {"dp_replicate", "dp_shard", "tp", "pp", "cp", "ep", "zero", "framework", "schedule", "virtual_stages", "stage_layers", "sequence_parallel",
        "loss_parallel", "tp_overlap", "micro_batch", "grad_accum", "loss_chunks", "checkpointing.mode", "checkpointing.every", "checkpointing.group",
        "checkpointing.ops", "reshard_after_forward", "cp_kind", "model"} | FRAMEWORK_S
"""What a plan may choose; the model's padding follows tp."""


def regret(rows: Sequence[Row]) -> Regret | None:
    """Mean and worst ratio over groups of at least two plans."""
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in distinct(rows):
        pair = row.figure("time")
        if row.run is None or pair is None:
            continue
        m, settings = row.run.model, flat(row.run)
        shape = (m.layers, m.hidden, m.heads, m.kv_heads, m.ffn)
        key = json.dumps([row.publisher, shape, {k: v for k, v in settings.items() if k not in FREE}], sort_keys=True, default=str)
        groups[key].append((pair.predicted, pair.measured))
    chosen, drawn, plans = [], [], 0
    for group in groups.values():
        if len(group) < 2:
            continue
        best = min(measured for _, measured in group)
        chosen.append(min(group)[1] / best)
        drawn.append(fmean(measured for _, measured in group) / best)
        plans += len(group)
    return Regret(len(chosen), plans, fmean(chosen), max(chosen), fmean(drawn)) if chosen else None


# -- everything ---------------------------------------------------------------------------------------------------------------


def pairs_of(rows: Iterable[Row], kind: str, *, suspects: bool = True) -> list[Pair]:
    """Pairs of one kind, tests bound by launches kept out of time; without suspects on request."""
    topic = "time" if kind.startswith("time") else "memory"
    bound = kind == "time, launch-bound"
    name = "time" if bound else kind
    return [pair for row in rows if (pair := row.figure(name)) and (suspects or topic not in row.suspect)
            and (topic != "time" or row.launch_bound is bound)]


KINDS = ("time", "time, launch-bound", "allocated", "active", "reserved", "nvidia-smi", "after step")


def refusals(rows: Iterable[Row]) -> Counter[str]:
    return Counter(row.refused for row in rows if row.refused)


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Everything that the report says, as plain data."""
    publishers = dict.fromkeys(row.publisher for row in rows)
    return {"all": _summary_of(rows), "sources": {name: _summary_of([r for r in rows if r.publisher == name]) for name in publishers}}


def _summary_of(rows: Sequence[Row]) -> dict[str, Any]:
    single = distinct(rows)
    errors: dict[str, Any] = {}
    for kind in KINDS:
        per_row = errors_of(pairs_of(rows, kind))
        if per_row is None:
            continue
        views = {"rows": per_row, "configurations": errors_of(pairs_of(single, kind)),
                 "rows_without_suspects": errors_of(pairs_of(rows, kind, suspects=False))}
        errors[kind] = {name: asdict(found) if found else None for name, found in views.items()}
    pairs = direction(rows)
    others = [hits for name, hits in pairs.items() if name != "sequence"]
    found = regret(rows)
    return {"records": len(rows), "used": sum(row.refused is None for row in rows), "refused": dict(refusals(rows).most_common()), "errors": errors,
            "oom": verdicts(rows), "direction": pairs, "direction_without_sequence": (sum(h for h, _ in others), sum(n for _, n in others)),
            "regret": asdict(found) if found else None}
