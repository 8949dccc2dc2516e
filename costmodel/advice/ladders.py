"""The changes that are worth trying on a run: ladders of one kind each, the mildest step first."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from costmodel.program.layers import resolved_attention
from costmodel.spec import Run

DEGREES = ("tp", "cp", "pp")
"""Ladders that spread the model."""
SHORTEST_PART = 8192
"""Tokens of a sequence that a rank of a cp group has at least in what is proposed."""
MOST_SEQUENCES = 1 << 16
"""No device holds more of them in one micro-batch, so none larger is tried."""


class Change(NamedTuple):
    """A change to try. Of one ladder only the mildest that is enough is proposed."""

    ladder: str
    words: str
    changes: dict[str, Any]
    remark: str = ""


# -- a run that does not fit -------------------------------------------------------------------------------------------------------


def savings(run: Run) -> Iterator[Change]:
    """Changes that may save memory, the mildest of each ladder first."""
    for make in (_sharding, _checkpointing, _smaller_batch, _kernels, _losses, _numbers, _tensor_parallel, _shared_sequences, _pipelines):
        yield from make(run)


def _sharding(run: Run) -> Iterator[Change]:
    p = run.plan
    apart = {"plan.single_process": False} if p.single_process else {}
    if apart:
        yield Change("sharding", "DDP: a process per GPU, and no GPU fuller than another", apart)
    if p.dp * p.cp > 1:
        names = {"pytorch": {1: "ZeRO-1: optimizer state sharded", 2: "ZeRO-2: gradients sharded as well", 3: "FSDP2: parameters, gradients and state sharded"},
                 "deepspeed": {n: f"DeepSpeed ZeRO-{n}" for n in (1, 2, 3)},
                 "megatron": {1: "Megatron's distributed optimizer", 3: "Megatron-FSDP: parameters and gradients sharded as well"}}.get(p.framework, {})
        for stage, words in names.items():
            if stage > p.zero:
                yield Change("sharding", words, {"plan.zero": stage, **apart})
    if (p.zero == 3 or p.framework == "megatron" and p.zero) and p.dp_replicate > 1:
        yield Change("shards", f"shard over all {p.dp} data-parallel ranks", {"plan.dp_shard": p.dp})
    if p.zero == 3 and not p.reshard_after_forward and p.pp == 1:
        yield Change("reshard", "free gathered parameters after forward", {"plan.reshard_after_forward": True})
    if p.zero == 3 and not p.sync_each_micro_batch and run.recipe.grad_accum > 1 and p.pp == 1:
        yield Change("sync", "reduce gradients after every micro-batch", {"plan.sync_each_micro_batch": True})
    if p.zero == 0 and p.framework == "pytorch" and p.dp > 1 and not p.gradient_as_bucket_view and not p.single_process:
        yield Change("buckets", "gradients as views of DDP's buckets", {"plan.gradient_as_bucket_view": True})


def _checkpointing(run: Run) -> Iterator[Change]:
    c = run.plan.checkpointing
    if c.mode == "none":
        yield Change("checkpointing", "recompute attention (selective checkpointing)", {"plan.checkpointing": "selective"})
    if c.mode == "none" or c.mode == "selective" and "op" not in c.ops:
        yield Change("checkpointing", "keep every other matmul (selective:op checkpointing)", {"plan.checkpointing": "selective:op"})
    if c.mode != "full" or c.every > 1:
        yield Change("checkpointing", "recompute every layer (full checkpointing)", {"plan.checkpointing": "full"})


def _smaller_batch(run: Run) -> Iterator[Change]:
    r = run.recipe
    each = r.micro_batch * r.grad_accum
    for micro_batch in (n for n in range(min(r.micro_batch - 1, MOST_SEQUENCES), 0, -1) if each % n == 0):
        yield Change("micro_batch", f"micro-batch {micro_batch}, accumulated {each // micro_batch} times", {"recipe.micro_batch": micro_batch})


def _kernels(run: Run) -> Iterator[Change]:
    r, o = run.recipe, run.recipe.optimizer
    if resolved_attention(run) == "eager" and r.attention == "eager":
        yield Change("attention", "fused attention (sdpa)", {"recipe.attention": "sdpa"})
    if o.name in ("adam", "adamw") and o.implementation == "foreach":
        yield Change("optimizer kernel", f"fused {o.name}: no temporary copies", {"recipe.optimizer.implementation": "fused"})
    if r.allocator == "default":
        yield Change("allocator", "expandable segments: less fragmentation", {"recipe.allocator": "expandable"})
    if not r.compile:
        yield Change("compile", "torch.compile", {"recipe.compile": True})
    if not r.fused_norm:
        yield Change("norm", "fused norms", {"recipe.fused_norm": True})
    if r.expand_kv:
        yield Change("kv", "attention that shares keys and values", {"recipe.expand_kv": False})


def _losses(run: Run) -> Iterator[Change]:
    p = run.plan
    if run.recipe.loss in ("eager", "bf16", "inplace"):
        yield Change("loss", "head and loss by chunks", {"recipe.loss": "chunked"})
        yield Change("fused loss", "loss fused with the head", {"recipe.loss": "fused"})
    if p.tp > 1 and not p.loss_parallel and p.framework == "pytorch":
        yield Change("loss_parallel", "loss over logits split by vocabulary", {"plan.loss_parallel": True})
    if p.tp > 1 and not p.sequence_parallel:
        yield Change("sequence_parallel", "sequence parallelism", {"plan.sequence_parallel": True})


def _numbers(run: Run) -> Iterator[Change]:
    precision, o = run.recipe.precision, run.recipe.optimizer
    if precision.compute in ("fp32", "tf32") and "bf16" in run.cluster.accelerator.flops_per_s:
        yield Change("precision", "bf16-mixed", {"recipe.precision": "bf16-mixed"}, "computes in bf16")
    if o.name in ("adam", "adamw", "momentum") and precision.optimizer_state == "fp32":
        yield Change("optimizer state", "optimizer state in bf16", {"recipe.precision.optimizer_state": "bf16"}, "rounds the optimizer's moments to bf16")
    if o.name in ("adam", "adamw"):
        yield Change("optimizer state", "8-bit Adam", {"recipe.optimizer": "adam8bit"}, "quantises the optimizer's moments to 8 bits")
    if precision.name != "bf16-pure" and precision.compute == "bf16":
        yield Change("precision", "all in bf16 (bf16-pure)", {"recipe.precision": "bf16-pure"}, "keeps weights and moments in bf16 alone")


def _tensor_parallel(run: Run) -> Iterator[Change]:
    p = run.plan
    tp = 2 * p.tp
    while tp <= run.cluster.gpus_in_node:
        stage = {"plan.zero": 3} if p.framework == "pytorch" and p.zero != 3 else {}
        yield Change("tp", f"tensor and sequence parallelism over {tp}" + (" with FSDP2" if stage else ""),
                     {"plan.tp": tp, "plan.sequence_parallel": True, **stage})
        tp *= 2


def _shared_sequences(run: Run) -> Iterator[Change]:
    """Of sequences so long that a rank's part keeps its kernels busy."""
    p = run.plan
    cp = 2 * p.cp
    while cp * p.tp * p.pp <= run.cluster.gpus and run.recipe.seq_len // cp >= SHORTEST_PART:
        yield Change("cp", f"context parallelism over {cp}: the ranks share each sequence", {"plan.cp": cp})
        cp *= 2


def _pipelines(run: Run) -> Iterator[Change]:
    p = run.plan
    pp = 2 * p.pp
    while pp <= min(run.cluster.gpus, run.model.layers):
        yield Change("pp", f"a pipeline of {pp} stages", {"plan.pp": pp})
        pp *= 2
    if p.pp > 1 and p.schedule in ("gpipe", "interleaved"):
        yield Change("schedule", "the 1F1B schedule: fewer micro-batches in flight", {"plan.schedule": "1f1b"})


# -- a run that fits ---------------------------------------------------------------------------------------------------------------


def speedups(run: Run) -> Iterator[Change]:
    """Changes that may make a step faster with memory that is to spare."""
    makers: tuple[Callable[[Run], Iterator[Change]], ...] = (_less_recompute, _other_batches, _quicker_kernels, _less_sharding, _less_model_parallel)
    for make in makers:
        yield from make(run)


def _less_recompute(run: Run) -> Iterator[Change]:
    c = run.plan.checkpointing
    if c.mode != "none":
        yield Change("checkpointing", "no checkpointing: nothing is computed again", {"plan.checkpointing": "none"})
    if c.mode == "full":
        yield Change("checkpointing", "selective checkpointing in place of full", {"plan.checkpointing": "selective"})
        yield Change("checkpointing", "checkpointing that keeps every other matmul", {"plan.checkpointing": "selective:op"})
        yield Change("checkpointing", "checkpoint each second layer only", {"plan.checkpointing": "every:2"})


def _other_batches(run: Run) -> Iterator[Change]:
    r = run.recipe
    each = r.micro_batch * r.grad_accum
    for micro_batch in (n for n in range(1, min(each, MOST_SEQUENCES) + 1) if each % n == 0 and n != r.micro_batch and (n & (n - 1) == 0 or each <= 64)):
        yield Change("micro_batch", f"micro-batch {micro_batch}, accumulated {each // micro_batch} times", {"recipe.micro_batch": micro_batch})


def _quicker_kernels(run: Run) -> Iterator[Change]:
    r, o = run.recipe, run.recipe.optimizer
    if not r.compile:
        yield Change("compile", "torch.compile", {"recipe.compile": True})
    elif not r.cuda_graphs:
        yield Change("compile", "CUDA graphs", {"recipe.cuda_graphs": True})
    if r.attention == "eager":
        yield Change("attention", "fused attention (sdpa)", {"recipe.attention": "sdpa"})
    if r.attention in ("sdpa", "fa1", "fa2") and run.cluster.accelerator.architecture == "hopper":
        yield Change("attention", "FlashAttention-3", {"recipe.attention": "fa3"})
    if o.name in ("adam", "adamw") and o.implementation != "fused":
        yield Change("optimizer kernel", f"fused {o.name}", {"recipe.optimizer.implementation": "fused"})
    if r.loss in ("eager", "chunked"):
        yield Change("loss", "loss fused with the head", {"recipe.loss": "fused"})
    if not r.fused_norm:
        yield Change("norm", "fused norms", {"recipe.fused_norm": True})
    if r.precision.compute in ("fp32", "tf32") and "bf16" in run.cluster.accelerator.flops_per_s:
        yield Change("precision", "bf16-mixed", {"recipe.precision": "bf16-mixed"}, "computes in bf16")


def _less_sharding(run: Run) -> Iterator[Change]:
    p = run.plan
    if p.single_process:
        yield Change("sharding", "DDP: a process per GPU", {"plan.single_process": False})
    if p.zero == 3 and p.reshard_after_forward and p.framework != "megatron":
        yield Change("reshard", "keep gathered parameters until backward", {"plan.reshard_after_forward": False})
    node = run.cluster.gpus_in_node // p.tp
    if p.zero == 3 and p.framework in ("pytorch", "megatron") and p.dp_replicate == 1 and 1 < node < p.dp and p.dp % node == 0:
        yield Change("sharding", f"shard within a node ({node} ranks), replicate across (HSDP)", {"plan.dp_shard": node})
    for stage in range(p.zero):
        yield Change("sharding", "DDP: nothing sharded" if stage == 0 and p.framework == "pytorch" else f"ZeRO-{stage} in place of {p.zero}",
                     {"plan.zero": stage})
    if not p.overlap_grad_reduce and p.dp > 1:
        yield Change("overlap", "reduce gradients during backward", {"plan.overlap_grad_reduce": True})
    if not p.backward_prefetch and p.zero == 3:
        yield Change("prefetch", "gather the next layer during backward", {"plan.backward_prefetch": True})
    if p.zero == 3 and p.sync_each_micro_batch and run.recipe.grad_accum > 1 and p.pp == 1 and p.framework != "megatron":
        yield Change("sync", "reduce gradients once a step", {"plan.sync_each_micro_batch": False})


def _less_model_parallel(run: Run) -> Iterator[Change]:
    p = run.plan
    for tp in (n for n in range(1, p.tp) if p.tp % n == 0):
        yield Change("tp", f"tensor parallelism over {tp}" if tp > 1 else "no tensor parallelism", {"plan.tp": tp})
    if p.tp > 1 and not p.sequence_parallel:
        yield Change("sequence_parallel", "sequence parallelism", {"plan.sequence_parallel": True})
    for pp in (n for n in range(1, p.pp) if p.pp % n == 0):
        yield Change("pp", f"a pipeline of {pp} stages" if pp > 1 else "no pipeline", {"plan.pp": pp})
    if p.pp > 1 and p.schedule != "interleaved":
        yield Change("schedule", "the interleaved schedule: a smaller bubble", {"plan.schedule": "interleaved"})
    if p.pp > 1 and p.schedule == "1f1b" and p.framework == "pytorch" and p.dp == 1:
        yield Change("schedule", "a zero-bubble schedule: gradients of weights fill the bubble", {"plan.schedule": "zb-h1"})
