"""Predicted bytes and collectives against the dry run, over runs that vary one thing at a time.

    python benchmarks/bytes.py [--only TEXT] [--verbose] [--json]

Goal: parameters, gradients and optimizer state to the byte; activations alone and peak within 2% on the mean and 5% at worst; the same
collectives in kind, count, bytes and group. Exit 4 where a run misses it.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

LLAMA = {"layers": 4, "hidden": 512, "heads": 8, "kv_heads": 2, "ffn": 1408, "vocab": 4096}
GPT = {"layers": 4, "hidden": 512, "heads": 8, "ffn": 2048, "vocab": 4096, "gated": False, "activation": "gelu", "norm": "layernorm",
       "norm_bias": True, "positions": "learned", "position_rows": 1024, "qkv_bias": True, "attention_out_bias": True, "mlp_bias": True,
       "fused_qkv": True, "tied_embeddings": True}
DEEP = {**LLAMA, "vocab": 256}
"""A small head: the peak lies in a layer."""
DEEP_GPT = {**GPT, "vocab": 256}
SPLIT_GPT = {**GPT, "fused_qkv": False}
"""DTensor cannot cut a fused query, key and value matrix by columns."""
HEADS = {"layers": 2, "hidden": 64, "heads": 16, "kv_heads": 4, "head_dim": 128, "ffn": 64, "vocab": 64}
"""Attention much wider than the rest: the peak lies in it."""
EIGHT = {**LLAMA, "layers": 8}
LATENT = {"layers": 4, "hidden": 512, "heads": 8, "ffn": 1408, "vocab": 256,
          "mla": {"q_lora_rank": 192, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}}
"""DeepSeek-V3's proportions."""
WHOLE_QUERIES = {**LATENT, "mla": {**LATENT["mla"], "q_lora_rank": 0}}
"""DeepSeek-V2-Lite's way."""
LATENT_HEADS = {**LATENT, "layers": 2, "hidden": 64, "heads": 16, "ffn": 64, "vocab": 64}
"""The peak lies in attention."""
WINDOW = {**DEEP, "sliding_window": 128}
"""Mistral's way: every layer sees the last tokens alone."""
MIXTURE = {**LLAMA, "moe": {"experts": 8, "top_k": 2, "expert_ffn": 704}}
WIDE = {"layers": 4, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256}
"""Llama 3 8B's layer."""
SHORT = {"seq_len": 512, "micro_batch": 2}
MEAN, WORST = 0.02, 0.05


class Case(NamedTuple):
    """A run to predict and to perform."""

    name: str
    given: dict[str, Any]
    stage: int | None = None
    """Which pipeline rank performs; None: the fullest rank."""


def case(name: str, model: Any, gpus: int, strategy: str, recipe: dict[str, Any] | None = None, gpu: str = "h100_sxm",
         stage: int | None = None, **plan: Any) -> Case:
    base = SHORT if isinstance(model, dict) else {"seq_len": 2048}
    return Case(name, {"model": model, "cluster": {"gpu": gpu, "gpus": gpus}, "plan": {"strategy": strategy, **plan},
                       "recipe": {**base, **(recipe or {})}}, stage)


def cases() -> list[Case]:
    """At least seventy runs, a few of them large; a name says what differs from its neighbours."""
    cpu = "cpu_epyc_2core"
    found = [
        # one process
        case("single llama fp32", LLAMA, 1, "single", {"precision": "fp32"}),
        case("single llama autocast", LLAMA, 1, "single", {"precision": "bf16-mixed"}),
        case("single llama bf16-pure", LLAMA, 1, "single", {"precision": "bf16-pure"}),
        case("single llama fp16 scaled", LLAMA, 1, "single", {"precision": "fp16-mixed"}),
        case("single gpt eager dropout", GPT, 1, "single", {"precision": "bf16-pure", "attention": "eager", "dropout": 0.1}),
        case("single gpt sdpa dropout", GPT, 1, "single", {"precision": "bf16-mixed", "dropout": 0.1}),
        case("single gpt full ckpt", GPT, 1, "single", {"precision": "bf16-mixed"}, checkpointing="full"),
        case("single llama foreach", LLAMA, 1, "single", {"optimizer": "adamw:foreach", "micro_batch": 1, "seq_len": 64}),
        case("single llama for-loop", LLAMA, 1, "single", {"optimizer": "adamw:for-loop", "micro_batch": 1, "seq_len": 64}),
        case("single llama momentum", LLAMA, 1, "single", {"optimizer": "momentum:foreach"}),
        case("single llama accumulate 4", LLAMA, 1, "single", {"grad_accum": 4}),
        # one process, CPU kernels
        case("single llama cpu fp32", LLAMA, 1, "single", {"precision": "fp32"}, gpu=cpu),
        case("single gpt cpu fp32", GPT, 1, "single", {"precision": "fp32"}, gpu=cpu),
        case("single llama cpu bf16", LLAMA, 1, "single", {"precision": "bf16-pure"}, gpu=cpu),
        # losses
        case("single llama loss bf16", LLAMA, 1, "single", {"precision": "bf16-pure", "loss": "bf16"}),
        case("single llama loss chunked", LLAMA, 1, "single", {"precision": "bf16-pure", "loss": "chunked"}),
        case("single llama loss fused", LLAMA, 1, "single", {"precision": "bf16-pure", "loss": "fused"}),
        # DDP
        case("ddp llama fp32 8", LLAMA, 8, "ddp", {"precision": "fp32"}),
        case("ddp llama autocast 8", LLAMA, 8, "ddp"),
        case("ddp gpt autocast 8 views", GPT, 8, "ddp", gradient_as_bucket_view=True),
        case("ddp gpt small buckets 64", GPT, 64, "ddp", {"precision": "bf16-pure"}, bucket_mb=2),
        case("ddp llama accumulate", LLAMA, 8, "ddp", {"grad_accum": 4}),
        case("ddp llama accumulate, sync each", LLAMA, 8, "ddp", {"grad_accum": 4}, sync_each_micro_batch=True),
        case("ddp llama full ckpt", LLAMA, 8, "ddp", {"micro_batch": 8}, checkpointing="full"),
        case("ddp llama foreach sgd", LLAMA, 8, "ddp", {"optimizer": "sgd:foreach"}),
        case("ddp cpu 2", LLAMA, 2, "ddp", {"precision": "fp32"}, gpu=cpu),
        # ZeRO-1 and ZeRO-2
        case("zero1 llama 4", LLAMA, 4, "zero1"),
        case("zero1 gpt 8 bf16-pure", GPT, 8, "zero1", {"precision": "bf16-pure"}),
        case("zero2 llama 4", LLAMA, 4, "zero2"),
        case("zero2 gpt 8, 2 MB buckets", GPT, 8, "zero2", {"precision": "bf16-pure"}, bucket_mb=2),
        case("zero2 llama accumulate", LLAMA, 8, "zero2", {"grad_accum": 2}),
        case("zero2 llama foreach 16", LLAMA, 16, "zero2", {"optimizer": "adamw:foreach"}, bucket_mb=4),
        # FSDP2
        case("fsdp llama 8", LLAMA, 8, "fsdp"),
        case("fsdp llama 8 fp32", LLAMA, 8, "fsdp", {"precision": "fp32"}),
        case("fsdp gpt 8", GPT, 8, "fsdp"),
        case("fsdp gpt 7, uneven shards", GPT, 7, "fsdp"),
        case("fsdp llama 8 kept unsharded", LLAMA, 8, "fsdp", reshard_after_forward=False),
        case("fsdp llama 8 full ckpt", LLAMA, 8, "fsdp", {"micro_batch": 8}, checkpointing="full"),
        case("fsdp llama 8 groups of 2", LLAMA, 8, "fsdp", {"micro_batch": 8}, checkpointing="full:2"),
        case("fsdp llama 8 every 2nd", LLAMA, 8, "fsdp", {"micro_batch": 8}, checkpointing="every:2"),
        case("fsdp llama 8 accumulate", LLAMA, 8, "fsdp", {"grad_accum": 2}),
        case("fsdp llama 8 accumulate, no sync", LLAMA, 8, "fsdp", {"grad_accum": 2}, sync_each_micro_batch=False),
        case("fsdp llama 1024 chunked", LLAMA, 1024, "fsdp", {"loss": "chunked"}),
        case("fsdp gpt 8 eager dropout", GPT, 8, "fsdp", {"attention": "eager", "dropout": 0.1}),
        case("fsdp llama 8 bf16-pure foreach", LLAMA, 8, "fsdp", {"precision": "bf16-pure", "optimizer": "adamw:foreach", "micro_batch": 1}),
        case("hsdp llama 16", LLAMA, 16, "hsdp"),
        case("hsdp gpt 32 x 8 foreach", GPT, 256, "hsdp", {"optimizer": "adamw:foreach"}),
        # a peak inside a layer, at the end of backward, or in the update
        case("single deep fp32", DEEP, 1, "single", {"precision": "fp32"}),
        case("single deep autocast", DEEP, 1, "single"),
        case("single deep full ckpt", DEEP, 1, "single", {"precision": "bf16-pure"}, checkpointing="full"),
        case("single deep gpt dropout", DEEP_GPT, 1, "single", {"precision": "bf16-pure", "dropout": 0.1}),
        case("single deep gpt eager", DEEP_GPT, 1, "single", {"precision": "bf16-mixed", "attention": "eager", "dropout": 0.1}),
        case("single deep cpu autocast", DEEP, 1, "single", {"precision": "bf16-mixed"}, gpu=cpu),
        case("ddp deep views ckpt", DEEP_GPT, 8, "ddp", gradient_as_bucket_view=True, checkpointing="full"),
        case("zero1 deep tiny batch", DEEP, 8, "zero1", {"seq_len": 64, "micro_batch": 1, "optimizer": "adamw:foreach"}),
        case("zero2 deep 2 MB buckets", DEEP_GPT, 8, "zero2", {"seq_len": 64, "micro_batch": 1}, bucket_mb=2),
        case("fsdp deep 8", DEEP, 8, "fsdp"),
        case("fsdp deep gpt 8 ckpt tiny batch", DEEP_GPT, 8, "fsdp", {"seq_len": 64, "micro_batch": 1}, checkpointing="full"),
        case("fsdp deep 2 foreach tiny batch", DEEP, 2, "fsdp", {"seq_len": 64, "micro_batch": 1, "optimizer": "adamw:foreach"}),
        case("hsdp deep 16 ckpt", DEEP, 16, "hsdp", {"grad_accum": 2}, checkpointing="full"),
        # named models
        case("gpt2-small ddp 8", "gpt2-small", 8, "ddp", {"seq_len": 1024, "micro_batch": 4, "dropout": 0.1}),
        case("gpt2-xl fsdp 8", "gpt2-xl", 8, "fsdp", {"seq_len": 1024}, checkpointing="full"),
        case("llama-3-8b fsdp 8", "llama-3-8b", 8, "fsdp", {"seq_len": 8192}),
        case("llama-3-8b fsdp 64 full ckpt", "llama-3-8b", 64, "fsdp", {"seq_len": 8192}, checkpointing="full"),
        case("llama-3-8b fsdp 1024", "llama-3-8b", 1024, "fsdp", {"seq_len": 8192}),
        case("llama-3-8b hsdp 256", "llama-3-8b", 256, "hsdp", {"seq_len": 4096, "loss": "chunked"}, checkpointing="full"),
        case("llama-3-8b fsdp 16 foreach", "llama-3-8b", 16, "fsdp", {"seq_len": 2048, "optimizer": "adamw:foreach"}, checkpointing="full"),
        case("llama-2-7b fsdp 8 bf16-pure", "llama-2-7b", 8, "fsdp", {"seq_len": 4096, "precision": "bf16-pure"}, checkpointing="every:2"),
        # selective checkpointing
        case("single deep attention ckpt", DEEP, 1, "single", {"precision": "bf16-pure"}, checkpointing="selective"),
        case("single deep gpt eager attention ckpt", DEEP_GPT, 1, "single", {"precision": "bf16-pure", "attention": "eager", "dropout": 0.1},
             checkpointing="selective"),
        case("single deep op ckpt", DEEP, 1, "single", {"precision": "bf16-pure"}, checkpointing="selective:op"),
        case("fsdp deep op ckpt", DEEP, 8, "fsdp", checkpointing="selective:op"),
    ]
    return found + optimizer_cases() + float8_cases() + tensor_cases() + context_cases() + pipeline_cases() + expert_cases() + attention_cases()


def optimizer_cases() -> list[Case]:
    """Muon, torch's and nanochat's."""
    muon, tiny = {"optimizer": "muon"}, {"seq_len": 64, "micro_batch": 1}
    return [
        case("single llama muon", LLAMA, 1, "single", muon),
        case("single gpt muon tiny batch", DEEP_GPT, 1, "single", {**muon, **tiny, "precision": "fp32"}),
        case("single llama muon bf16-pure tiny batch", DEEP, 1, "single", {**muon, **tiny, "precision": "bf16-pure"}),
        case("ddp gpt muon 8", GPT, 8, "ddp", muon),
        case("nanochat llama 8", LLAMA, 8, "muon-distributed", {"grad_accum": 2}),
        case("nanochat deep 8 tiny batch", DEEP, 8, "muon-distributed", tiny),
        case("nanochat gpt 64, padded stacks", DEEP_GPT, 64, "muon-distributed", {**tiny, "precision": "bf16-pure"}),
        case("nanochat deep 4 adamw", DEEP, 4, "muon-distributed", {**tiny, "optimizer": "adamw"}),
        case("single llama bounded logits", {**LLAMA, "logit_softcap": 15.0}, 1, "single", {"precision": "bf16-pure"}),
        case("nanochat-d20-oct2025 8", "nanochat-d20-oct2025", 8, "muon-distributed", {"micro_batch": 4}),
    ]


def float8_cases() -> list[Case]:
    """fp8 linear layers in eager code, as torchao has them."""
    fp8 = {"precision": "fp8"}
    rowwise = {"precision": {"base": "fp8", "fp8_recipe": "rowwise"}}
    return [
        case("single llama fp8", DEEP, 1, "single", fp8),
        case("single gpt fp8 rowwise", DEEP_GPT, 1, "single", rowwise),
        case("ddp gpt fp8 8", GPT, 8, "ddp", fp8),
        case("fsdp llama fp8 8", DEEP, 8, "fsdp", fp8),
        case("fsdp llama fp8 8 rowwise full ckpt", DEEP, 8, "fsdp", rowwise, checkpointing="full"),
        case("fsdp gpt fp8 8 tiny batch", DEEP_GPT, 8, "fsdp", {**fp8, "seq_len": 64, "micro_batch": 1}),
    ]


def tensor_cases() -> list[Case]:
    """Tensor parallelism in DTensor's dialect."""
    pure, fp32, sp = {"precision": "bf16-pure"}, {"precision": "fp32"}, {"sequence_parallel": True}
    both = {**sp, "loss_parallel": True}
    tiny = {"seq_len": 64, "micro_batch": 1}
    return [
        case("tp 2 llama fp32", LLAMA, 2, "ddp", fp32, tp=2),
        case("tp 2 llama bf16-pure", LLAMA, 2, "ddp", pure, tp=2),
        case("tp 2 sp llama", LLAMA, 2, "ddp", pure, tp=2, **sp),
        case("tp 2 sp loss llama", LLAMA, 2, "ddp", pure, tp=2, **both),
        case("tp 2 loss llama loss bf16", LLAMA, 2, "ddp", {**pure, "loss": "bf16"}, tp=2, loss_parallel=True),
        case("tp 4 sp gpt dropout eager", SPLIT_GPT, 4, "ddp", {**fp32, "dropout": 0.1, "attention": "eager"}, tp=4, **sp),
        case("tp 4 gpt", SPLIT_GPT, 4, "ddp", pure, tp=4),
        case("tp 2 sp gpt untied foreach tiny", {**SPLIT_GPT, "tied_embeddings": False}, 2, "ddp", {**pure, **tiny, "optimizer": "adamw:foreach"}, tp=2, **sp),
        case("tp 2 sp loss llama accumulate", LLAMA, 2, "ddp", {**pure, "grad_accum": 3}, tp=2, **both),
        case("tp 2 sp llama full ckpt, no clip", DEEP, 2, "ddp", {**pure, "clip_norm": 0.0}, tp=2, checkpointing="full", **sp),
        case("fsdp 4 x tp 2 llama", LLAMA, 8, "fsdp", tp=2),
        case("fsdp 4 x tp 2 sp loss llama", LLAMA, 8, "fsdp", tp=2, **both),
        case("fsdp 16 x tp 2 sp qk-norm", {**LLAMA, "qk_norm": "per_head"}, 32, "fsdp", tp=2, **sp),
        case("fsdp 4 x tp 2 sp loss full ckpt", LLAMA, 8, "fsdp", {"micro_batch": 8}, tp=2, checkpointing="full", **both),
        case("fsdp 4 x tp 2 sp loss deep tiny", DEEP, 8, "fsdp", tiny, tp=2, **both),
        case("fsdp 4 x tp 2 sp op ckpt", DEEP, 8, "fsdp", tp=2, checkpointing="selective:op", **sp),
        case("fsdp 4 x tp 2 sp accumulate, no sync", LLAMA, 8, "fsdp", {"grad_accum": 2}, tp=2, sync_each_micro_batch=False, **sp),
        case("fsdp 6 x tp 4 sp gpt uneven", SPLIT_GPT, 24, "fsdp", tp=4, **both),
        case("hsdp 2 x 4 x tp 2 sp loss", LLAMA, 16, "hsdp", tp=2, dp_shard=4, **both),
        case("llama-3-8b fsdp 8 x tp 8 sp loss", "llama-3-8b", 64, "fsdp", {"seq_len": 8192}, tp=8, checkpointing="full", **both),
    ]


def context_cases() -> list[Case]:
    """Shared sequences: ring, all-gather and Ulysses, with DDP, FSDP and HSDP; the peak at the head, and (DEEP) in attention."""
    pure, fp32, cpu = {"precision": "bf16-pure"}, {"precision": "fp32"}, "cpu_epyc_2core"
    deep, many = {**DEEP, "ffn": 512}, {**DEEP, "kv_heads": 8}
    kinds = ("ring", "allgather", "ulysses")
    found = [case(f"ddp 2 x cp 2 {kind}", LLAMA, 4, "ddp", pure, cp=2, cp_kind=kind) for kind in kinds]
    found += [case(f"fsdp 2 x cp 4 {kind} deep", deep if kind != "ulysses" else {**many, "ffn": 512}, 8, "fsdp", cp=4, cp_kind=kind) for kind in kinds]
    found += [case(f"ddp 2 x cp 4 {kind} heads", HEADS, 8, "ddp", pure, cp=4, cp_kind=kind) for kind in kinds]
    found += [case(f"cp 2 {kind} heads cpu", HEADS, 2, "fsdp", {"precision": "fp32" if kind != "ring" else "bf16-mixed"}, cp=2, cp_kind=kind, gpu=cpu)
              for kind in kinds]
    found += [case(f"cp 2 {kind} deep cpu fp32", deep, 2, "ddp", fp32, cp=2, cp_kind=kind, gpu=cpu) for kind in kinds]
    return found + [
        case("cp 8 ring deep full ckpt", {**deep, "kv_heads": 8}, 8, "fsdp", {"seq_len": 2048}, cp=8, checkpointing="full"),
        case("cp 2 allgather llama", LLAMA, 2, "fsdp", cp=2, cp_kind="allgather"),
        case("ddp 2 x cp 2 ring autocast", deep, 4, "ddp", cp=2),
        case("ddp 2 x cp 2 ring gpt views", DEEP_GPT, 4, "ddp", {**pure, "grad_accum": 2}, cp=2, gradient_as_bucket_view=True),
        case("zero1 x cp 2 ulysses gpt dropout", DEEP_GPT, 4, "zero1", {**pure, "dropout": 0.1}, cp=2, cp_kind="ulysses"),
        case("zero2 x cp 2 ring", deep, 4, "zero2", cp=2),
        case("fsdp 2 x cp 2 ring unbalanced", deep, 4, "fsdp", cp=2, cp_balance=False),
        case("fsdp 2 x cp 2 ring not causal", deep, 4, "fsdp", {"causal": False}, cp=2),
        case("fsdp 2 x cp 2 allgather attention ckpt", deep, 4, "fsdp", cp=2, cp_kind="allgather", checkpointing="selective"),
        case("cp 2 ulysses attention ckpt", HEADS, 2, "fsdp", cp=2, cp_kind="ulysses", checkpointing="selective"),
        case("fsdp 2 x cp 2 ulysses eager", DEEP_GPT, 4, "fsdp", {"attention": "eager", "dropout": 0.1}, cp=2, cp_kind="ulysses"),
        case("fsdp 2 x cp 2 x tp 2 sp ring", deep, 8, "fsdp", cp=2, tp=2, sequence_parallel=True),
        case("hsdp 2 x 2 x cp 2 ring accumulate", LLAMA, 8, "hsdp", {"grad_accum": 2}, cp=2, dp_shard=2),
        case("pp 2 x ddp 2 x cp 2 ring last", EIGHT, 8, "ddp", {**pure, "grad_accum": 4}, stage=1, pp=2, cp=2),
        case("pp 2 x fsdp 2 x cp 2 ulysses first", EIGHT, 8, "fsdp", {"grad_accum": 4}, stage=0, pp=2, cp=2, cp_kind="ulysses", reshard_after_forward=False),
        case("wide fsdp 2 x cp 8 ring 128k", WIDE, 16, "fsdp", {"seq_len": 131072, "micro_batch": 1, "loss": "chunked"}, cp=8, checkpointing="full"),
        case("wide cp 8 ulysses 256k", WIDE, 8, "fsdp", {"seq_len": 262144, "micro_batch": 1, "loss": "fused"}, cp=8, cp_kind="ulysses", checkpointing="full"),
    ]


def pipeline_cases() -> list[Case]:
    """Every schedule, on first, middle and last ranks; alone and with each other axis."""
    pure, kept = {"precision": "bf16-pure", "grad_accum": 8}, {"reshard_after_forward": False}
    mixed, tiny = {"grad_accum": 4}, {"seq_len": 64, "micro_batch": 1}
    small = {**EIGHT, "vocab": 256}
    found = [case(f"pp 4 {schedule} rank {r}", EIGHT, 4, "ddp", pure, stage=r, pp=4, schedule=schedule)
             for schedule in ("1f1b", "gpipe") for r in (0, 1, 3)]
    return found + [
        case("pp 4 naive rank 1", EIGHT, 4, "ddp", pure, stage=1, pp=4, schedule="naive"),
        case("pp 4 1f1b small head last", small, 4, "ddp", {**pure, "precision": "fp32"}, stage=3, pp=4),
        case("pp 2 uneven full ckpt first", EIGHT, 2, "ddp", pure, stage=0, pp=2, stage_layers=(5, 3), checkpointing="full"),
        case("pp 2 uneven full ckpt last", EIGHT, 2, "ddp", pure, stage=1, pp=2, stage_layers=(5, 3), checkpointing="full"),
        case("pp 2 x 2 interleaved first", EIGHT, 2, "ddp", pure, stage=0, pp=2, schedule="interleaved", virtual_stages=2),
        case("pp 2 x 2 interleaved last", EIGHT, 2, "ddp", pure, stage=1, pp=2, schedule="interleaved", virtual_stages=2),
        case("pp 4 x 2 interleaved middle", EIGHT, 4, "ddp", pure, stage=2, pp=4, schedule="interleaved", virtual_stages=2),
        *(case(f"pp 4 zb-h1 rank {r}", EIGHT, 4, "ddp", pure, stage=r, pp=4, schedule="zb-h1") for r in (0, 2, 3)),
        case("pp 4 zb-h1 small head last", small, 4, "ddp", {**pure, "precision": "fp32"}, stage=3, pp=4, schedule="zb-h1"),
        case("pp 4 zb-h1 gpt middle", {**GPT, "layers": 8, "tied_embeddings": False}, 4, "ddp", {**pure, "dropout": 0.1}, stage=1, pp=4, schedule="zb-h1"),
        *(case(f"pp 2 x 2 interleaved-zb rank {r}", EIGHT, 2, "ddp", pure, stage=r, pp=2, schedule="interleaved-zb", virtual_stages=2) for r in (0, 1)),
        *(case(f"pp 4 zbv rank {r}", EIGHT, 4, "ddp", pure, stage=r, pp=4, schedule="zbv") for r in (0, 1, 3)),
        *(case(f"pp 4 dualpipev rank {r}", EIGHT, 4, "ddp", pure, stage=r, pp=4, schedule="dualpipev") for r in (0, 1, 3)),
        *(case(f"pp 4 x fsdp 4 zb-h1 rank {r}", EIGHT, 16, "fsdp", {"grad_accum": 8}, stage=r, pp=4, schedule="zb-h1") for r in (0, 1, 3)),
        case("pp 4 x fsdp 2 zb-h1 few, first order", EIGHT, 8, "fsdp", {"grad_accum": 3}, stage=3, pp=4, schedule="zb-h1"),
        case("pp 2 x fsdp 2 interleaved-zb bf16-pure", EIGHT, 4, "fsdp", pure, stage=1, pp=2, schedule="interleaved-zb", virtual_stages=2),
        case("pp 2 x fsdp 4 zbv tiny first", small, 8, "fsdp", {**mixed, **tiny}, stage=0, pp=2, schedule="zbv"),
        case("pp 2 x tp 2 zb-h1", EIGHT, 4, "ddp", pure, stage=1, pp=2, tp=2, schedule="zb-h1"),
        case("pp 4 x tp 2 sp loss zb-h1", EIGHT, 8, "ddp", pure, stage=2, pp=4, tp=2, schedule="zb-h1", sequence_parallel=True, loss_parallel=True),
        case("pp 2 x fsdp 2 x tp 2 sp zbv", EIGHT, 8, "fsdp", mixed, stage=1, pp=2, tp=2, schedule="zbv", sequence_parallel=True),
        case("pp 4 x ddp 4 middle", EIGHT, 16, "ddp", pure, stage=2, pp=4),
        case("pp 2 x ddp 2 gpipe last tiny foreach", small, 4, "ddp", {**pure, **tiny, "optimizer": "adamw:foreach"}, stage=1, pp=2, schedule="gpipe"),
        case("pp 4 x fsdp 4 first", EIGHT, 16, "fsdp", {"grad_accum": 8}, stage=0, pp=4, **kept),
        case("pp 4 x fsdp 4 last", EIGHT, 16, "fsdp", {"grad_accum": 8}, stage=3, pp=4, **kept),
        case("pp 2 x 2 interleaved x fsdp 4", EIGHT, 8, "fsdp", mixed, stage=1, pp=2, schedule="interleaved", virtual_stages=2, **kept),
        case("pp 2 x hsdp 2 x 4 gpipe", EIGHT, 16, "hsdp", mixed, stage=0, pp=2, schedule="gpipe", dp_shard=4, **kept),
        case("pp 4 x tp 2 sp loss middle", EIGHT, 8, "ddp", pure, stage=1, pp=4, tp=2, sequence_parallel=True, loss_parallel=True),
        case("pp 4 x tp 2 sp loss last", EIGHT, 8, "ddp", pure, stage=3, pp=4, tp=2, sequence_parallel=True, loss_parallel=True),
        case("pp 2 x fsdp 4 x tp 2 sp first", EIGHT, 16, "fsdp", mixed, stage=0, pp=2, tp=2, sequence_parallel=True, checkpointing="full", **kept),
        case("llama-2-7b pp 4 x fsdp 2 last", "llama-2-7b", 8, "fsdp", {"seq_len": 4096, "grad_accum": 8}, stage=3, pp=4, checkpointing="full", **kept),
    ]


def expert_cases() -> list[Case]:
    """Mixtures of experts: whole on every rank, and spread over ep."""
    pure, tiny = {"precision": "bf16-pure"}, {"seq_len": 64, "micro_batch": 1}
    deep = {**MIXTURE, "vocab": 256}
    wide = {**deep, "moe": {"experts": 16, "top_k": 4, "expert_ffn": 256, "shared_experts": 1, "shared_ffn": 512, "router_bias": True}}
    return [
        case("moe single bf16-pure", MIXTURE, 1, "single", pure),
        case("moe single deep fp32", deep, 1, "single", {"precision": "fp32"}),
        case("moe single deep autocast", deep, 1, "single"),
        case("moe single deep cpu fp32", wide, 1, "single", {"precision": "fp32"}, gpu="cpu_epyc_2core"),
        case("moe single shared deep full ckpt", wide, 1, "single", pure, checkpointing="full"),
        case("moe single deep op ckpt", deep, 1, "single", pure, checkpointing="selective:op"),
        case("moe single gelu, no gate", {**deep, "gated": False, "activation": "gelu"}, 1, "single", {**pure, "grad_accum": 2}),
        case("moe ddp 8 shared", wide, 8, "ddp", pure),
        case("moe zero1 4", deep, 4, "zero1", pure),
        case("moe pp 4 x ddp 2 middle", {**MIXTURE, "layers": 8}, 8, "ddp", {**pure, "grad_accum": 8}, stage=1, pp=4),
        case("moe fsdp 8", MIXTURE, 8, "fsdp"),
        case("moe fsdp 8 x ep 4", MIXTURE, 8, "fsdp", ep=4),
        case("moe fsdp 8 x ep 4 deep", deep, 8, "fsdp", ep=4),
        case("moe fsdp 8 x ep 8 shared", wide, 8, "fsdp", ep=8),
        case("moe fsdp 8 x ep 2 tiny", wide, 8, "fsdp", tiny, ep=2),
        case("moe fsdp 64 x ep 4, cut by rows", wide, 64, "fsdp", ep=4),
        case("moe fsdp 8 x ep 4 full ckpt", wide, 8, "fsdp", {"micro_batch": 4}, ep=4, checkpointing="full"),
        case("moe fsdp 8 x ep 4 every 2nd tiny", deep, 8, "fsdp", tiny, ep=4, checkpointing="every:2"),
        case("moe fsdp 8 x ep 4 kept unsharded", deep, 8, "fsdp", ep=4, reshard_after_forward=False),
        case("moe fsdp 8 x ep 4 accumulate foreach", deep, 8, "fsdp", {"grad_accum": 2, "optimizer": "adamw:foreach"}, ep=4),
        case("moe fsdp 8 x ep 4 accumulate, no sync", deep, 8, "fsdp", {"grad_accum": 2}, ep=4, sync_each_micro_batch=False),
        case("moe fsdp 8 x ep 4, twice the even share", deep, 8, "fsdp", {"moe_imbalance": 2.0}, ep=4),
        case("moe single capacity 1.25", deep, 1, "single", {**pure, "moe_capacity_factor": 1.25}),
        case("moe fsdp 8 x ep 4 capacity 1.25", deep, 8, "fsdp", {"moe_capacity_factor": 1.25}, ep=4),
        case("moe hsdp 2 x 4 x ep 2", deep, 8, "hsdp", dp_shard=4, ep=2),
        case("qwen3-30b-a3b fsdp 64 x ep 8 full ckpt", "qwen3-30b-a3b", 64, "fsdp", {"seq_len": 4096}, ep=8, checkpointing="full"),
    ]


def attention_cases() -> list[Case]:
    return window_cases() + latent_cases() + kind_cases()


def window_cases() -> list[Case]:
    """Sliding windows: flash kernels that skip, and masks."""
    pure = {"precision": "bf16-pure"}
    return [
        case("window single flash", WINDOW, 1, "single", pure),
        case("window single flash autocast dropout", WINDOW, 1, "single", {"dropout": 0.1}),
        case("window single eager cpu fp32", WINDOW, 1, "single", {"precision": "fp32"}, gpu="cpu_epyc_2core"),
        case("window fsdp 8 full ckpt", WINDOW, 8, "fsdp", checkpointing="full"),
        case("window fsdp 8 attention ckpt", WINDOW, 8, "fsdp", checkpointing="selective"),
        case("window fsdp 4 x tp 2 sp", WINDOW, 8, "fsdp", tp=2, sequence_parallel=True),
        case("window fsdp 2 x cp 2 ulysses", WINDOW, 4, "fsdp", cp=2, cp_kind="ulysses"),
        case("mistral-7b-v0.1 fsdp 16 full ckpt", "mistral-7b-v0.1", 16, "fsdp", {"seq_len": 8192}, checkpointing="full"),
    ]


def latent_cases() -> list[Case]:
    """Latent attention, with and without a latent for queries."""
    pure, cpu = {"precision": "bf16-pure"}, "cpu_epyc_2core"
    tiny = {"seq_len": 64, "micro_batch": 1}
    return [
        case("latent single bf16-pure", LATENT, 1, "single", pure),
        case("latent single autocast", LATENT, 1, "single"),
        case("latent single fp32", LATENT, 1, "single", {"precision": "fp32"}),
        case("latent single queries whole", WHOLE_QUERIES, 1, "single", pure),
        case("latent single wide heads", LATENT_HEADS, 1, "single", pure),
        case("latent single wide heads autocast", LATENT_HEADS, 1, "single"),
        case("latent single eager dropout", LATENT, 1, "single", {**pure, "attention": "eager", "dropout": 0.1}),
        case("latent single eager one sequence", LATENT_HEADS, 1, "single", {**pure, "attention": "eager", "micro_batch": 1}),
        case("latent single cpu eager fp32", LATENT, 1, "single", {"precision": "fp32", "attention": "eager"}, gpu=cpu),
        case("latent single cpu sdpa fp32", LATENT, 1, "single", {"precision": "fp32"}, gpu=cpu),
        case("latent ddp 8", LATENT, 8, "ddp"),
        case("latent zero1 4", WHOLE_QUERIES, 4, "zero1", pure),
        case("latent fsdp 8", LATENT, 8, "fsdp"),
        case("latent fsdp 8 tiny", LATENT, 8, "fsdp", tiny),
        case("latent fsdp 8 full ckpt", LATENT, 8, "fsdp", {"micro_batch": 8}, checkpointing="full"),
        case("latent fsdp 8 attention ckpt", LATENT, 8, "fsdp", checkpointing="selective"),
        case("latent fsdp 8 op ckpt", LATENT, 8, "fsdp", checkpointing="selective:op"),
        case("latent pp 4 x fsdp 2 middle", {**LATENT, "layers": 8}, 8, "fsdp", {"grad_accum": 4}, stage=1, pp=4, reshard_after_forward=False),
        case("latent pp 4 zb-h1 middle", {**LATENT, "layers": 8}, 4, "ddp", {**pure, "grad_accum": 8}, stage=1, pp=4, schedule="zb-h1"),
        case("latent moe fsdp 8 x ep 4", {**LATENT, "moe": MIXTURE["moe"]}, 8, "fsdp", ep=4),
    ]


def kind_cases() -> list[Case]:
    """Layers of several kinds: windows in some, dense layers before a mixture."""
    pure, cpu = {"precision": "bf16-pure"}, "cpu_epyc_2core"
    some = {**EIGHT, "vocab": 256, "sliding_window": 128, "window_pattern": "SSL"}
    first = {**MIXTURE, "layers": 6, "vocab": 256, "moe": {**MIXTURE["moe"], "first_dense_layers": 2}}
    tiny = {"seq_len": 64, "micro_batch": 1}
    kept = {"reshard_after_forward": False}
    eight = {**first, "layers": 8, "vocab": 4096, "moe": {**first["moe"], "first_dense_layers": 3}}
    return [
        case("kinds windows single", some, 1, "single", pure),
        case("kinds windows single autocast ckpt", some, 1, "single", checkpointing="full"),
        case("kinds windows cpu eager fp32", some, 1, "single", {"precision": "fp32"}, gpu=cpu),
        case("kinds windows fsdp 8 every 2nd", some, 8, "fsdp", checkpointing="every:2"),
        case("kinds windows fsdp 8 groups of 2", some, 8, "fsdp", {"micro_batch": 8}, checkpointing="full:2"),
        case("kinds windows ddp 8 small buckets", some, 8, "ddp", bucket_mb=2),
        case("kinds windows pp 4 x fsdp 2 middle", some, 8, "fsdp", {"grad_accum": 4}, stage=2, pp=4, **kept),
        case("kinds dense first single", first, 1, "single", pure),
        case("kinds dense first single cpu fp32", first, 1, "single", {"precision": "fp32"}, gpu=cpu),
        case("kinds dense first autocast ckpt", first, 1, "single", {"micro_batch": 4}, checkpointing="full"),
        case("kinds dense first op ckpt", first, 1, "single", pure, checkpointing="selective:op"),
        case("kinds dense first ddp 8", first, 8, "ddp", bucket_mb=2),
        case("kinds dense first zero1 4", first, 4, "zero1", pure),
        case("kinds dense first zero2 4", first, 4, "zero2", pure),
        case("kinds dense first fsdp 8", first, 8, "fsdp"),
        case("kinds dense first fsdp 8 tiny foreach", first, 8, "fsdp", {**tiny, "optimizer": "adamw:foreach"}),
        case("kinds dense first fsdp 8 full ckpt", first, 8, "fsdp", {"micro_batch": 4}, checkpointing="full"),
        case("kinds dense first fsdp 8 kept accumulate", first, 8, "fsdp", {"grad_accum": 2}, **kept),
        case("kinds dense first hsdp 2 x 4", first, 8, "hsdp", {**tiny, "grad_accum": 2}, dp_shard=4),
        case("kinds dense first fsdp 8 x ep 4", first, 8, "fsdp", ep=4),
        case("kinds dense first fsdp 8 x ep 8 tiny", first, 8, "fsdp", tiny, ep=8),
        case("kinds dense first fsdp 8 x ep 4 full ckpt", first, 8, "fsdp", {"micro_batch": 4}, ep=4, checkpointing="full"),
        case("kinds dense first fsdp 8 x ep 4 every 2nd", first, 8, "fsdp", tiny, ep=4, checkpointing="every:2"),
        case("kinds dense first fsdp 8 x ep 4 accumulate, no sync", first, 8, "fsdp", {"grad_accum": 2}, ep=4, sync_each_micro_batch=False),
        *(case(f"kinds dense first pp 4 x fsdp 2 rank {r}", eight, 8, "fsdp", {"grad_accum": 4}, stage=r, pp=4, **kept) for r in (0, 1, 3)),
        case("kinds dense first pp 4 x ddp 2 rank 1", eight, 8, "ddp", {**pure, "grad_accum": 4}, stage=1, pp=4),
        case("deepseek-v2-lite fsdp 64 x ep 8 full ckpt", "deepseek-v2-lite", 64, "fsdp", {"seq_len": 4096}, ep=8, checkpointing="full"),
    ]


def judge(one: Case) -> tuple[Any, float]:
    """The comparison of one run on one rank, and the seconds its dry run took."""
    from costmodel.inputs import build_run
    from costmodel.prediction import predict
    from execute.compare import compare
    from execute.dryrun import dry_run
    run = build_run(**one.given)
    predicted = predict(run)
    start = time.perf_counter()
    rank = (predicted.fullest if one.stage is None else predicted.roles[one.stage]).example_rank
    observed = dry_run(run, rank)
    return compare(predicted, observed), time.perf_counter() - start


def line(name: str, c: Any) -> str:
    """One run of the table: each state, activations, the peak and its split, the collectives."""
    exact = " ".join("=" if c_row.difference == 0 else f"{c_row.predicted - c_row.observed:+d}" for c_row in c.rows if c_row.tolerance == 0.0)
    split = " ".join(f"{r.name.removeprefix('at the peak: ')[:5]} {r.predicted - r.observed:+,}" for r in c.rows
                     if r.name.startswith("at the peak") and r.predicted != r.observed)
    sent = "=" if not c.missing and not c.surplus else f"-{sum(c.missing.values())}+{sum(c.surplus.values())}"
    return (f"{name:<38} {exact:<12} {c.row('activations alone').difference:>+8.2%} {c.row('peak').difference:>+8.2%}  {sent:<8} {split}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="runs whose name contains this")
    parser.add_argument("--verbose", action="store_true", help="the whole comparison of each run")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    asked = parser.parse_args()
    results: dict[str, Any] = {}
    errors: dict[str, str] = {}
    if not asked.json:
        print(f"{'run':<38} {'states':<12} {'activ.':>8} {'peak':>8}  {'sent':<8} difference at the peak by category, bytes")
    for one in cases():
        if asked.only not in one.name:
            continue
        try:
            results[one.name], seconds = judge(one)
        except Exception as error:
            errors[one.name] = f"{type(error).__name__}: {error}"
            print(f"{one.name:<38} {errors[one.name][:200]}", file=sys.stderr)
            continue
        if not asked.json:
            print(line(one.name, results[one.name]), f" {seconds:.1f}s" if seconds > 5 else "", flush=True)
            if asked.verbose:
                print(results[one.name].text())
    figures = {name: [abs(c.row(name).difference) for c in results.values()] for name in ("activations alone", "peak")}
    means = {name: sum(v) / len(v) if v else 0.0 for name, v in figures.items()}
    worst = {name: max(v, default=0.0) for name, v in figures.items()}
    exact = sum(all(r.within for r in c.rows if r.tolerance == 0.0) for c in results.values())
    sent = sum(not c.missing and not c.surplus for c in results.values())
    met = (not errors and exact == sent == len(results) and all(m <= MEAN for m in means.values()) and all(w <= WORST for w in worst.values()))
    if asked.json:
        print(json.dumps({"runs": {n: c.to_dict() for n, c in results.items()}, "errors": errors, "mean": means, "worst": worst, "met": met}))
    else:
        print(f"{len(results)} runs, {len(errors)} errors; states equal in {exact}, collectives equal in {sent}")
        for name in figures:
            print(f"{name}: mean {means[name]:.2%}, worst {worst[name]:.2%} (goal {MEAN:.0%} and {WORST:.0%})")
    return 0 if met else 4


if __name__ == "__main__":
    sys.exit(main())
