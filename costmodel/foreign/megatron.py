"""Megatron-LM's command line as a run; also that of Megatron-DeepSpeed.

What an option means, and what holds where it is left out, is in megatron/training/arguments.py and megatron/core/transformer/transformer_config.py (core 0.12
to 0.16); Megatron-DeepSpeed's own options in its megatron/arguments.py. The vocabulary is padded to a multiple of make-vocab-size-divisible-by x tp.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from costmodel.foreign import deepspeed
from costmodel.foreign.said import Foreign, Keys, full_checkpointing, number, padded, whole

PROGRAM = "Megatron-LM"
VOCABULARIES = {"gpt2bpetokenizer": (50257, "GPT-2's tokenizer"), "llama2tokenizer": (32000, "Llama 2's tokenizer"),
                "bertwordpiecelowercase": (30522, "BERT's tokenizer")}
MARKS = ("num-layers", "tensor-model-parallel-size", "num-attention-heads", "hidden-size")


def options(words: Iterable[str]) -> dict[str, list[str]]:
    """Options (without dashes, with - for _) and what stands behind each; of one that is given twice, the last."""
    import shlex
    flat: list[str] = []
    for word in words:
        inside = word.strip()
        flat += shlex.split(inside) if re.search(r"\s--?\w", f" {inside}") and " " in inside else [word]
    out: dict[str, list[str]] = {}
    current: list[str] | None = None
    for word in flat:
        if word in ("|", "2>&1", "&", ">", "&&"):
            break
        found = re.match(r"--?([A-Za-z][\w.-]*)(?:=(.*))?$", word)
        if found:
            current = out[found[1].replace("_", "-")] = [found[2]] if found[2] is not None else []
        elif current is not None:
            current.append(word)
    return out


def is_command(words: Iterable[str]) -> bool:
    """Whether a command's words are Megatron's."""
    found = options(words)
    return sum(mark in found for mark in MARKS) >= 2


class _Options(Keys):
    """Options as keys: one value bare, none as true."""

    def __init__(self, given: Mapping[str, list[str]]) -> None:
        super().__init__({name: (values[0] if len(values) == 1 else values) if values else True for name, values in given.items()}, "--")


def read(words: Iterable[str], variables: Mapping[str, Any] | None = None, documents: Mapping[str, str] | None = None) -> Foreign:
    """The run of a launch command; `variables` and here-documents of its script say the world size and DeepSpeed's JSON."""
    k, f = _Options(options(words)), Foreign(PROGRAM)
    _spread(k, f)
    _model(k, f)
    _recipe(k, f)
    _world(k, f, variables or {})
    if k.on("deepspeed"):
        _deepspeed(k, f, documents or {})
    f.unread = [f"--{name}" for name in k.data if name not in k.seen and name not in LAUNCHER]
    return f


LAUNCHER = frozenset({"node-rank", "master-addr", "master-port", "rdzv-endpoint", "rdzv-backend", "rdzv-id", "max-restarts", "tee", "jobid", "wait",
                      "kill-on-bad-exit", "m", "u", "c"})


def _model(k: _Options, f: Foreign) -> None:
    def say(field: str, value: Any, option: str) -> None:
        f.say(f"model.{field}", value, f"--{option}")

    f.needs(k, "model", (("layers", "num-layers"), ("hidden", "hidden-size"), ("heads", "num-attention-heads")))
    hidden, layers = f.get("model.hidden", 0), f.get("model.layers", 0)
    if k.on("group-query-attention") and (groups := k.count("num-query-groups")):
        say("kv_heads", groups, "num-query-groups")
    if head := k.count("kv-channels"):
        say("head_dim", head, "kv-channels")
    gated = k.on("swiglu")
    default = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
    ffn = k.count("ffn-hidden-size", default=default)
    say("ffn", ffn, "ffn-hidden-size" if "ffn-hidden-size" in k else "hidden-size (8/3 of it, in 64s)" if gated else "hidden-size (4 times)")
    if not gated:
        say("gated", False, "swiglu (not given)")
        say("activation", "relu_squared" if k.on("squared-relu") else "gelu", "squared-relu" if k.on("squared-relu") else "swiglu (not given)")
    norm = str(k.get("normalization", default="LayerNorm")).lower()
    if norm == "layernorm":
        say("norm", "layernorm", "normalization")
        say("norm_bias", True, "normalization")
    bias, latent = not k.on("disable-bias-linear"), k.on("multi-latent-attention")
    if not latent and (bias or k.on("add-qkv-bias")):
        say("qkv_bias", True, "add-qkv-bias" if not bias else "disable-bias-linear (not given)")
    if bias:
        say("attention_out_bias", True, "disable-bias-linear (not given)")
        say("mlp_bias", True, "disable-bias-linear (not given)")
    if not latent:
        say("fused_qkv", True, "num-attention-heads (Megatron has one matrix for queries, keys and values)")
    if not k.on("untie-embeddings-and-output-weights"):
        say("tied_embeddings", True, "untie-embeddings-and-output-weights (not given)")
    _positions(k, say)
    if k.on("embed-layernorm"):
        say("embedding_norm", True, "embed-layernorm")
    if k.on("qk-layernorm") and not latent:  # of latents it says that they have norms
        say("qk_norm", "per_head", "qk-layernorm")
    _vocabulary(k, f)
    _latent(k, f, say)
    _experts(k, f, say, ffn or 0, layers)
    if depth := k.count("mtp-num-layers"):
        say("mtp_depth", depth, "mtp-num-layers")
    if (window := k.get("window-size")) is not None:
        sizes = [whole(part) for part in str(window if isinstance(window, str) else ",".join(window)).strip("()").split(",")]
        if sizes and sizes[0] and sizes[0] > 0:
            say("sliding_window", sizes[0] + 1, "window-size")
            say("attention_pattern", "sliding", "window-size")
    if k.has("hybrid-override-pattern", "hybrid-attention-ratio"):
        say("hybrid", "mamba", "hybrid-override-pattern")


def _positions(k: _Options, say: Any) -> None:
    kind = str(k.get("position-embedding-type", default="rope" if k.on("use-rotary-position-embeddings") else "learned_absolute"))
    k.has("use-rotary-position-embeddings", "rotary-base", "no-position-embedding")
    if kind == "learned_absolute":
        say("positions", "learned", "position-embedding-type")
        say("position_rows", k.count("max-position-embeddings", "seq-length", default=1024), "max-position-embeddings")
    elif kind in ("alibi", "none"):
        say("positions", kind, "position-embedding-type")
    elif (share := number(k.get("rotary-percent"))) not in (None, 1.0):
        say("rotary_fraction", share, "rotary-percent")
    k.has("max-position-embeddings")


def _vocabulary(k: _Options, f: Foreign) -> None:
    """Rows of the embedding: the tokenizer's, padded."""
    tp, given = f.get("plan.tp", 1), k.count("pad-vocab-size-to")
    if given:
        f.say("model.vocab", given, "--pad-vocab-size-to")
        return
    unit = (k.count("make-vocab-size-divisible-by", default=128) or 128) * tp
    size, tokenizer = k.count("vocab-size"), str(k.get("tokenizer-type", default="")).lower()
    k.has("tokenizer-model", "tokenizer-name-or-path", "vocab-file", "merge-file")
    source = "--vocab-size"
    if not size and tokenizer in VOCABULARIES:
        size, words = VOCABULARIES[tokenizer]
        source = f"--tokenizer-type ({words})"
    if not size:
        f.lacks("model.vocab", "the tokenizer decides it: --set model.vocab=50304, say")
        return
    rows = padded(size, unit)
    f.say("model.vocab", rows, source if rows == size else f"{source} {size}, padded to a multiple of {unit}")


def _latent(k: _Options, f: Foreign, say: Any) -> None:
    if not k.on("multi-latent-attention"):
        return
    nope, rope = k.count("qk-head-dim", default=128) or 128, k.count("qk-pos-emb-head-dim", default=64) or 64
    say("mla", {"q_lora_rank": k.count("q-lora-rank") or 0, "kv_lora_rank": k.count("kv-lora-rank", default=32), "qk_nope_head_dim": nope,
                "qk_rope_head_dim": rope, "v_head_dim": k.count("v-head-dim", default=128)}, "multi-latent-attention")
    say("head_dim", nope + rope, "qk-head-dim")
    k.has("kv-channels")


def _experts(k: _Options, f: Foreign, say: Any, ffn: int, layers: int) -> None:
    experts = k.count("num-experts")
    if not experts:
        return
    shared = k.count("moe-shared-expert-intermediate-size") or 0
    moe: dict[str, Any] = {"experts": experts, "top_k": k.count("moe-router-topk", default=2), "expert_ffn": k.count("moe-ffn-hidden-size", default=ffn),
                           "aux_loss_coefficient": number(k.get("moe-aux-loss-coeff")) or 0.0}
    if shared:
        moe |= {"shared_experts": 1, "shared_ffn": shared}
    if k.get("moe-router-score-function") == "sigmoid":
        moe["router_score"] = "sigmoid"
    if k.on("moe-router-enable-expert-bias"):
        moe["router_bias"] = True
    pattern = _layer_pattern(str(k.get("moe-layer-freq", default="1")), layers)
    dense = next((i for i, sparse in enumerate(pattern) if sparse), len(pattern))
    if not all(pattern[dense:]):
        f.lost.append("--moe-layer-freq: dense layers between those of the mixture")
    elif dense:
        moe["first_dense_layers"] = dense
    say("moe", moe, "num-experts")
    if (factor := number(k.get("moe-expert-capacity-factor"))) is not None:
        f.say("recipe.moe_capacity_factor", factor, "--moe-expert-capacity-factor")
    k.has("moe-grouped-gemm", "moe-router-load-balancing-type", "moe-permute-fusion", "moe-router-dtype")


def _layer_pattern(text: str, layers: int) -> list[int]:
    """Megatron's moe-layer-freq: a number (each such layer), or an expression of lists such as ([0]*3+[1]*58)."""
    if (every := whole(text)) is not None:
        return [int(i % max(1, every) == 0) for i in range(layers)]
    out: list[int] = []
    for inside, times in re.findall(r"\[([\d,\s]*)\](?:\s*\*\s*(\d+))?", text):
        out += [int(x) for x in inside.replace(",", " ").split()] * int(times or 1)
    return out


def _spread(k: _Options, f: Foreign) -> None:
    def say(field: str, value: Any, option: str) -> None:
        f.say(f"plan.{field}", value, f"--{option}")

    f.say("plan.framework", "megatron", "Megatron's command line")
    for field, names in (("tp", ("tensor-model-parallel-size", "model-parallel-size")), ("pp", ("pipeline-model-parallel-size", "pipe-parallel-size")),
                         ("cp", ("context-parallel-size",)), ("ep", ("expert-model-parallel-size",))):
        if (value := k.count(*names)) is not None and value > 1:
            say(field, value, names[0])
    tp, pp = f.get("plan.tp", 1), f.get("plan.pp", 1)
    if k.on("sequence-parallel"):
        if tp > 1:
            say("sequence_parallel", True, "sequence-parallel")
        else:
            f.notes.append("--sequence-parallel does nothing with one tensor-parallel rank")
    if k.on("tp-comm-overlap") and tp > 1:
        say("tp_overlap", "userbuffers", "tp-comm-overlap")
    layers = k.count("num-layers") or 0
    chunk, chunks = k.count("num-layers-per-virtual-pipeline-stage"), k.count("num-virtual-stages-per-pipeline-rank")
    if pp > 1 and chunk and layers:
        chunks = layers // pp // chunk
    if pp > 1 and chunks and chunks > 1:
        say("schedule", "interleaved", "num-layers-per-virtual-pipeline-stage" if chunk else "num-virtual-stages-per-pipeline-rank")
        say("virtual_stages", chunks, "num-layers-per-virtual-pipeline-stage" if chunk else "num-virtual-stages-per-pipeline-rank")
    _stages(k, f, layers, pp)
    if f.get("plan.cp", 1) > 1:
        kind = str(k.get("cp-comm-type", default="p2p"))
        word = {"p2p": "ring", "a2a": "ulysses", "all_gather": "allgather", "allgather": "allgather"}.get(kind)
        if word:
            say("cp_kind", word, "cp-comm-type")
        else:
            f.lost.append(f"--cp-comm-type {kind}: hierarchical context parallelism")
    if (width := k.count("expert-tensor-parallel-size")) is not None and width != tp and k.count("num-experts"):
        say("etp", width, "expert-tensor-parallel-size")
    if f.get("plan.ep", 1) > 1 or k.count("num-experts"):
        kind = str(k.get("moe-token-dispatcher-type", default="allgather"))
        say("ep_dispatcher", kind if kind in ("alltoall", "allgather", "flex") else "alltoall", "moe-token-dispatcher-type")
        if k.on("overlap-moe-expert-parallel-comm"):
            say("ep_overlap", True, "overlap-moe-expert-parallel-comm")
    fsdp = k.has("use-megatron-fsdp", "use-custom-fsdp")
    if k.on("use-distributed-optimizer") or fsdp:
        say("zero", 1, "use-distributed-optimizer")
    if not (fsdp and _fsdp(k, f, fsdp)):
        say("overlap_grad_reduce", k.on("overlap-grad-reduce"), "overlap-grad-reduce")
        if k.on("overlap-param-gather"):
            say("overlap_param_gather", True, "overlap-param-gather")
    instances = k.count("num-distributed-optimizer-instances", default=1) or 1
    if instances > 1:
        say("dp_replicate", instances, "num-distributed-optimizer-instances")
    if k.on("use-torch-fsdp2"):
        f.lost.append("--use-torch-fsdp2: PyTorch's FSDP2 around Megatron's layers")
    if k.on("optimizer-cpu-offload"):
        say("offload", "optimizer", "optimizer-cpu-offload")
    _checkpointing(k, f)


FSDP_STAGES = {"no_shard": "replicates all state", "optim": "shards optimizer states alone", "optim_grads": "shards gradients and optimizer states alone"}


def _fsdp(k: _Options, f: Foreign, option: str) -> bool:
    """Megatron-FSDP, which overlaps whatever the options say; whether it is one that a run can have."""
    strategy = str(k.get("data-parallel-sharding-strategy", default="no_shard"))
    unit, buffers = k.count("suggested-communication-unit-size"), k.has("fsdp-double-buffer", "use-nccl-ub", "nccl-ub")
    if k.get("outer-dp-sharding-strategy", default="no_shard") != "no_shard":
        f.lost.append("--outer-dp-sharding-strategy: optimizer states sharded over the instances as well")
    if strategy != "optim_grads_params":
        f.lost.append(f"--data-parallel-sharding-strategy {strategy}: Megatron-FSDP {FSDP_STAGES.get(strategy, 'shards in another way')}")
        return False
    f.say("plan.zero", 3, f"--{option} with --data-parallel-sharding-strategy")
    k.has("overlap-grad-reduce", "overlap-param-gather", "fsdp-manual-registration", "init-model-with-meta-device", "use-sharp")
    if buffers:
        f.say("plan.double_buffer", True, f"--{buffers}")
    if buffers and buffers.endswith("nccl-ub"):
        f.notes.append("--use-nccl-ub: predicted as double buffers; what registered buffers do to the time of a collective is not")
    if unit:
        f.say("plan.communication_unit_params", unit, "--suggested-communication-unit-size")
    return True


def _stages(k: _Options, f: Foreign, layers: int, pp: int) -> None:
    """Uneven stages: given for the first and the last, or Megatron-DeepSpeed's partition that counts embedding and head as layers."""
    first, last = k.count("decoder-first-pipeline-num-layers"), k.count("decoder-last-pipeline-num-layers")
    ends = [name for name in ("account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split") if k.on(name)]
    parts, source = pp * f.get("plan.virtual_stages", 1), ""
    stages: list[int] = []
    if pp > 1 and layers and (first or last) and parts == pp:
        between = pp - bool(first) - bool(last)
        rest = layers - (first or 0) - (last or 0)
        if between and rest % between == 0:
            stages = [*([first] if first else []), *[rest // between] * between, *([last] if last else [])]
            source = "--decoder-first-pipeline-num-layers"
    elif pp > 1 and layers and ends and (layers + len(ends)) % parts == 0:
        stages = [(layers + len(ends)) // parts] * parts
        stages[0] -= ends[0].startswith("account-for-embedding")
        stages[-1] -= ends[-1].startswith("account-for-loss")
        source = f"--{ends[0]}"
    elif pp > 1 and layers and "embedding" in str(k.get("pp-partition-method", default="")) and (layers + 2) % pp == 0:
        stages = [(layers + 2) // pp] * pp
        stages[0] -= 1
        stages[-1] -= 1
        source = "--pp-partition-method (embedding and head count as layers)"
    if stages and len(set(stages)) > 1:
        f.say("plan.stage_layers", stages, source)


def _checkpointing(k: _Options, f: Foreign) -> None:
    grain, method = k.get("recompute-granularity"), str(k.get("recompute-method", default="uniform"))
    count = k.count("recompute-num-layers", "checkpoint-num-layers", default=1) or 1
    if k.on("checkpoint-activations") or k.on("deepspeed-activation-checkpointing"):
        f.say("plan.checkpointing", full_checkpointing(count), "--checkpoint-activations")
    elif k.on("recompute-activations") or grain == "selective":
        modules = k.get("recompute-modules", default="core_attn")
        chosen = modules if isinstance(modules, list) else str(modules).split()
        if chosen == ["core_attn"]:
            f.say("plan.checkpointing", "selective", "--recompute-granularity")
        else:
            f.lost.append(f"--recompute-modules {' '.join(chosen)}: recompute of other modules than core_attn")
    elif grain == "full" and method == "uniform":
        f.say("plan.checkpointing", full_checkpointing(count), "--recompute-num-layers" if count > 1 else "--recompute-granularity")
    elif grain == "full":
        f.lost.append(f"--recompute-method {method}: the first {count} layers of a stage alone are recomputed")


def _recipe(k: _Options, f: Foreign) -> None:
    def say(field: str, value: Any, option: str) -> None:
        f.say(f"recipe.{field}", value, f"--{option}")

    f.needs(k, "recipe", (("seq_len", "seq-length"), ("micro_batch", "micro-batch-size"), ("global_batch", "global-batch-size")))
    if k.has("rampup-batch-size"):
        f.notes.append("--rampup-batch-size: the run is a step at the full batch")
    _precision(k, f)
    optimizer = str(k.get("optimizer", default="adam")).lower()
    if optimizer in ("adam", "sgd"):
        f.say("recipe.optimizer", "adamw" if optimizer == "adam" else "momentum", "--optimizer (Apex's fused Adam decouples the decay)"
              if optimizer == "adam" else "--optimizer (with --sgd-momentum)")
    else:
        f.lost.append(f"--optimizer {optimizer}")
    clip = number(k.get("clip-grad", default=1.0))
    if clip != 1.0:
        say("clip_norm", clip, "clip-grad")
    hidden, attention = (number(k.get(f"{where}-dropout", default=0.1)) or 0.0 for where in ("hidden", "attention"))
    if hidden != attention:
        f.notes.append(f"--hidden-dropout {hidden:g} and --attention-dropout {attention:g}: a run has one dropout, and the larger is taken")
    if max(hidden, attention):
        say("dropout", max(hidden, attention), "hidden-dropout" if "hidden-dropout" in k else "hidden-dropout (Megatron's default)")
    f.say("recipe.attention", *_attention(k))
    if not k.on("no-gradient-accumulation-fusion"):
        say("grad_accum_fusion", True, "no-gradient-accumulation-fusion (not given)")
    if k.on("cuda-graph-impl", "enable-cuda-graph", "external-cuda-graph") and k.get("cuda-graph-impl") != "none":
        say("cuda_graphs", True, "cuda-graph-impl" if "cuda-graph-impl" in k else "enable-cuda-graph")
    if k.on("cross-entropy-loss-fusion"):
        f.notes.append("--cross-entropy-loss-fusion: the loss is predicted as Megatron's own, on fp32 logits")


def _attention(k: _Options) -> tuple[str, str]:
    backend = str(k.get("attention-backend", default="")).rpartition(".")[2]
    if k.on("use-flash-attn") or backend == "flash":
        return "fa2", "--use-flash-attn" if k.on("use-flash-attn") else "--attention-backend"
    if backend in ("unfused", "local"):
        return "eager", "--attention-backend"
    if backend == "fused":
        return "cudnn", "--attention-backend"
    if k.on("deepspeed") or k.get("transformer-impl") == "local" or k.on("use-legacy-models"):
        return "eager", "--use-flash-attn (not given: Megatron's own attention)"
    return "cudnn", "--attention-backend (not given: Transformer Engine's fused attention)"


def _precision(k: _Options, f: Foreign) -> None:
    low = "bf16" if k.on("bf16") else "fp16" if k.on("fp16") else ""
    fp8 = k.get("fp8-format", "fp8")
    if not low:
        f.say("recipe.precision", "fp32", "--bf16 (not given)")
        return
    fields: dict[str, Any] = {"base": "fp8" if fp8 else f"{low}-mixed"}
    source = "--fp8-format" if fp8 else f"--{low}"
    if fp8:
        fields["fp8_recipe"] = str(k.get("fp8-recipe", default="delayed"))
        if k.on("fp8-param-gather", "fp8-param"):
            fields["fp8_parameters"] = True
    if k.on("grad-reduce-in-bf16") or k.on("accumulate-allreduce-grads-in-bf16"):
        fields |= {"gradient": "bf16", "reduce": "bf16"}
        source += ", --grad-reduce-in-bf16"
    if f.get("plan.zero") == 3 and "gradient" not in fields:
        main = str(k.get("megatron-fsdp-main-grads-dtype", default="fp32"))
        comm = str(k.get("megatron-fsdp-grad-comm-dtype", default=main))
        for field, word in (("gradient", main), ("reduce", comm)):
            if word in (low, "auto"):
                fields[field] = low
    for field, option in (("optimizer_state", "exp-avg-dtype"), ("master", "main-params-dtype")):
        if (word := k.get(option)) in ("bf16", "fp16"):
            fields[field] = word
    k.has("accumulate-allreduce-grads-in-fp32", "exp-avg-sq-dtype", "main-grads-dtype", "fp8-amax-history-len", "fp8-amax-compute-algo", "fp8-margin",
          "megatron-fsdp-main-params-dtype", "megatron-fsdp-main-grads-dtype", "megatron-fsdp-grad-comm-dtype")
    f.say("recipe.precision", fields if len(fields) > 1 else fields["base"], source)


def _world(k: _Options, f: Foreign, variables: Mapping[str, Any]) -> None:
    """Ranks of the job: processes of a node times nodes, or the script's WORLD_SIZE."""
    def of(*names: str) -> int | None:
        return next((found for name in names if (found := whole(variables.get(name))) is not None), None)

    each = k.count("nproc-per-node", "ntasks-per-node") or of("GPUS_PER_NODE", "NPROC_PER_NODE", "NUM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE")
    nodes = k.count("nnodes", "nodes", "N") or of("NNODES", "NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    if each and nodes:
        f.say("cluster.gpus", each * nodes, f"{each} processes on each of {nodes} nodes")
    elif each and of("WORLD_SIZE") is None:
        f.say("cluster.gpus", each, "--nproc-per-node (one node)")
    elif world := of("WORLD_SIZE", "NUM_GPUS"):
        f.say("cluster.gpus", world, "WORLD_SIZE")
    else:
        f.lacks("cluster.gpus", "the launcher decides it: --gpus 64, say")


def _deepspeed(k: _Options, f: Foreign, documents: Mapping[str, str]) -> None:
    """Megatron-DeepSpeed: DeepSpeed's engine around Megatron's layers. In bf16 its stage 0 shards optimizer states as well."""
    f.program = "Megatron-DeepSpeed"
    stage = k.count("zero-stage", default=0) or 0
    k.has("deepspeed-config", "deepspeed-activation-checkpointing")
    for text in documents.values():
        inside = deepspeed.json_of(text)
        if inside is not None:
            stage = whole((inside.get("zero_optimization") or {}).get("stage")) or stage
    if f.get("plan.tp", 1) * f.get("plan.pp", 1) > 1 or stage == 0:
        bf16 = k.on("bf16")
        if stage <= 1:
            shards = stage == 1 or bf16
            f.say("plan.zero", int(shards), "--zero-stage" if stage else "--bf16 (DeepSpeed's stage 0 shards optimizer states in bf16)")
            f.notes.append("Megatron's layers under DeepSpeed's engine: predicted as Megatron's distributed optimizer, which is nearest" if shards else
                           "Megatron's layers under DeepSpeed's engine: predicted as Megatron's")
        else:
            f.lost.append(f"--zero-stage {stage} with tensor or pipeline parallelism")
        f.say("plan.overlap_grad_reduce", False, "--deepspeed (its pipeline engine reduces after the last micro-batch)")
    else:
        f.say("plan.framework", "deepspeed", "--deepspeed")
        f.say("plan.zero", stage, "--zero-stage")
        del f.fields["plan.overlap_grad_reduce"]
