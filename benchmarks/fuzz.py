"""Predicted bytes and collectives against the dry run, over random small runs: models, plans and recipes drawn without regard to what people use.

    python benchmarks/fuzz.py [--seconds 600] [--seed 1] [--output misses.jsonl]

The bounds are those of benchmarks/bytes.py: parameters, gradients and optimizer state to the byte, the same collectives, activations alone and peak within 5%.
A run outside is printed with the fields that make it; refused ones are drawn again. Exit 4 where there is one. What is found and mended joins bytes.py.
"""

import argparse
import json
import logging
import random
import sys
import time
import warnings
from pathlib import Path
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def drawn_model(rng: random.Random) -> dict[str, Any]:
    """A small Transformer: Llama-like, GPT-like, and everything between."""
    c = rng.choice
    heads, head_dim = c([4, 8]), c([16, 32, 64, 64])
    hidden = c([heads * head_dim, heads * head_dim, 256])
    model: dict[str, Any] = {
        "layers": c([2, 3, 4, 5, 8]), "hidden": hidden, "heads": heads, "head_dim": head_dim, "kv_heads": c([heads, heads // 2, heads // 4]),
        "ffn": c([4 * hidden, 704, 1000, 256]), "vocab": c([256, 1000, 4096, 3001]), "gated": c([True, False]),
        "activation": c(["silu", "gelu", "gelu_tanh", "relu", "relu_squared"]), "tied_embeddings": c([True, False, False]),
        "norm": c(["rmsnorm", "rmsnorm", "layernorm", "rmsnorm_no_weight"]), "positions": c(["rope", "rope", "learned", "none"]),
        "qkv_bias": c([True, False]), "attention_out_bias": c([True, False, False]), "mlp_bias": c([True, False, False]), "head_bias": rng.random() < 0.1,
        "fused_qkv": rng.random() < 0.3, "qk_norm": c(["none", "none", "none", "per_head", "full"]), "parallel_residual": rng.random() < 0.15,
        "embedding_norm": rng.random() < 0.1, "final_norm": rng.random() < 0.95}
    if model["positions"] == "learned":
        model["position_rows"] = 2048
    if model["norm"] == "layernorm":
        model["norm_bias"] = c([True, False])
    if not model["parallel_residual"] and rng.random() < 0.15:
        model |= c([{"norm_placement": "post"}, {"norms_per_layer": 4, "norm_placement": "sandwich"}])
    if rng.random() < 0.2:
        model["moe"] = {"experts": c([4, 8]), "top_k": c([1, 2]), "expert_ffn": c([128, 704]), "router_bias": c([True, False]),
                        **c([{}, {"shared_experts": 1, "shared_ffn": 256}]), **c([{}, {}, {"first_dense_layers": 1}])}
    if rng.random() < 0.1:
        model |= {"sliding_window": c([64, 128]), "attention_pattern": c(["sliding", "alternating"])}
    return model


def drawn_plan(rng: random.Random, model: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """A plan in PyTorch's or nanochat's dialect, and its GPUs."""
    c = rng.choice
    strategy = c(["single", "ddp", "zero1", "zero2", "fsdp", "fsdp", "hsdp", "muon-distributed"])
    tp, pp, cp, dp = c([1, 1, 1, 2, 4]), c([1, 1, 1, 2, 4]), c([1, 1, 1, 1, 2, 4]), c([1, 2, 4, 8])
    plan: dict[str, Any] = {"strategy": strategy, "checkpointing": c(["none", "none", "full", "full:2", "every:2", "selective", "selective:op"])}
    if strategy in ("single", "zero1", "zero2", "muon-distributed"):
        tp = pp = cp = 1
    if strategy == "single":
        dp = 1
    if strategy == "hsdp":
        dp = max(4, dp)
        plan["dp_shard"] = 2
    plan |= {axis: degree for axis, degree in (("tp", tp), ("pp", pp), ("cp", cp)) if degree > 1}
    if tp > 1:
        plan |= {"sequence_parallel": c([True, False]), "loss_parallel": c([True, False])}
    if cp > 1:
        plan |= {"cp_kind": c(["ring", "allgather", "ulysses"]), "cp_balance": c([True, True, False])}
    if pp > 1:
        plan["schedule"] = c(["1f1b", "gpipe", "naive", "interleaved", "zb-h1", "interleaved-zb", "zbv", "dualpipev"])
        if plan["schedule"].startswith("interleaved"):
            plan["virtual_stages"] = 2
    if "moe" in model and strategy in ("fsdp", "hsdp") and rng.random() < 0.7:
        plan["ep"] = c([2, 4])
    for flag in ("gradient_as_bucket_view", "sync_each_micro_batch", "reshard_after_forward"):
        if rng.random() < 0.25:
            plan[flag] = c([True, False])
    if rng.random() < 0.2:
        plan["bucket_mb"] = c([1, 2, 8])
    return plan, dp * tp * pp * cp


def drawn(rng: random.Random) -> dict[str, Any]:
    """The input of a run; many are refused."""
    c, model = rng.choice, drawn_model(rng)
    plan, gpus = drawn_plan(rng, model)
    pp = plan.get("pp", 1)
    recipe = {"seq_len": c([64, 256, 512, 512, 1024]), "micro_batch": c([1, 2, 3]), "grad_accum": c([1, 1, 2, 3, 4]) if pp == 1 else c([pp, 2 * pp, 3 * pp, 8]),
              "precision": c(["fp32", "bf16-mixed", "bf16-mixed", "bf16-pure", "fp16-mixed", "fp8"]),
              "optimizer": c(["adamw", "adamw:foreach", "adamw:for-loop", "sgd", "momentum", "adam", "muon"]), "attention": c(["sdpa", "sdpa", "eager", "fa2"]),
              "loss": c(["eager", "eager", "bf16", "chunked", "fused"]), "dropout": c([0.0, 0.0, 0.1]), "clip_norm": c([1.0, 1.0, 0.0])}
    return {"model": model, "cluster": {"gpu": c(["h100", "h100", "h100", "cpu_epyc_2core"]), "gpus": gpus}, "plan": plan, "recipe": recipe}


def one(rng: random.Random) -> dict[str, Any] | None:
    """Draw a run and hold it against its dry run: its misses, an empty table where there are none, None where it is refused."""
    from benchmarks.bytes import WORST, Case, judge
    from costmodel import PlanError, build_run
    given = drawn(rng)
    try:
        run = build_run(**given)
        stage = rng.randrange(run.plan.pp) if run.plan.pp > 1 else None
        found, _ = judge(Case("drawn", given, stage))
    except PlanError:
        return None
    except Exception as error:
        return {"given": given, "error": f"{type(error).__name__}: {error}"}
    misses = {r.name: [r.predicted, r.observed] for r in found.rows if r.tolerance == 0.0 and r.difference}
    misses |= {name: [found.row(name).predicted, found.row(name).observed] for name in ("activations alone", "peak") if abs(found.row(name).difference) > WORST}
    sides = (("not predicted", found.missing), ("not sent", found.surplus))
    misses |= {title: [[*map(str, key), n] for key, n in side.items()] for title, side in sides if side}
    return {"given": given, "stage": stage, **misses} if misses else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, help="misses, one JSON object a line")
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    rng, until, performed, missed = random.Random(asked.seed), time.monotonic() + asked.seconds, 0, 0
    out: TextIO | None = asked.output.open("w", encoding="utf-8") if asked.output else None
    while time.monotonic() < until:
        found = one(rng)
        performed += found is not None
        if found:
            missed += 1
            text = json.dumps(found)
            print(text if out is None else text[:300], flush=True)
            if out is not None:
                out.write(f"{text}\n")
                out.flush()
    print(f"{performed} runs, {missed} outside")
    return 4 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
