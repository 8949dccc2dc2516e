"""What a Run may ask of `execute` today; everything else is refused by name, never ignored."""

from collections.abc import Iterator
from importlib.util import find_spec
from itertools import chain
from typing import Literal

from costmodel.spec import PlanError, Run
from costmodel.spec.kinds import layer_kinds
from costmodel.spec.pipelining import torch_pipeline_refusals
from costmodel.spec.run import BEFORE_AMPERE, SPLIT

Mode = Literal["dryrun", "solo", "run"]
"""On fake tensors; one rank on a real device; the real job under torchrun."""


def check_supported(run: Run, mode: Mode = "dryrun") -> None:
    """Raise PlanError for the first feature of the run that `execute` does not perform in a mode."""
    of_mode = {"dryrun": (_fake,), "solo": (_real, _alone), "run": (_real, _watched)}[mode]
    for error in chain(_refusals(run), *(rule(run) for rule in of_mode)):
        raise error


def _fake(run: Run) -> Iterator[PlanError]:
    """What fake tensors cannot do."""
    if not dry_runs(run):
        yield PlanError("plan.framework", run.plan.framework, "DeepSpeed computes with values, and fake tensors have none: it has no dry run.",
                        "Use execute run, or framework = pytorch.")
    if run.recipe.compile:
        yield PlanError("recipe.compile", True, "a dry run executes eagerly.", "Use compile = false, or execute solo on a GPU.")


def _real(run: Run) -> Iterator[PlanError]:
    """What real tensors would compute otherwise than the run says."""
    p, r = run.plan, run.recipe
    if p.offload != "none":
        yield PlanError("plan.offload", p.offload, "execute performs offload on fake tensors alone.", "Use execute dryrun, or offload = none.")
    if r.precision.compute == "fp8":
        yield PlanError("recipe.precision", r.precision.name, "execute performs fp8 on fake tensors alone.", "Use bf16-mixed.")
    if r.attention in ("fa1", "fa3"):
        yield PlanError("recipe.attention", r.attention, "scaled_dot_product_attention has FlashAttention-2 and cuDNN's kernel.",
                        "Use attention = fa2, cudnn or sdpa.")
    if r.compile and (p.checkpointing.mode == "selective" or p.checkpointing.group > 1):
        yield PlanError("recipe.compile", True, "execute compiles whole layers: none of them, or all that a layer does, is recomputed.",
                        "Use checkpointing = none or full, or compile = false.")
    if r.compile and (p.tp > 1 or p.pp > 1):
        yield PlanError("recipe.compile", True, "execute does not compile under tensor or pipeline parallelism.", "Use compile = false.")


def _refusals(run: Run) -> Iterator[PlanError]:
    m, p, r = run.model, run.plan, run.recipe
    if p.framework not in ("pytorch", "nanochat", "deepspeed"):
        yield PlanError("plan.framework", p.framework, "execute performs the dialects of PyTorch and nanochat, and DeepSpeed's ZeRO.",
                        "Use framework = pytorch.")
    if p.framework == "nanochat" and r.precision.loss_scaling:
        yield PlanError("recipe.precision", r.precision.name, "execute does not scale the loss of nanochat's dialect.", "Use a bf16 precision.")
    yield from _tensor(run)
    yield from _pipeline(run)
    yield from _context(run)
    yield from _experts(run)
    if p.single_process:
        yield PlanError("plan.single_process", True, "DataParallel runs on GPUs of one process alone, and execute has a process per device.", "Use ddp.")
    yield from _offload(run)
    if p.checkpointing.mode == "selective" and p.checkpointing.ops not in (("attention",), ("op",)):
        yield PlanError("plan.checkpointing", p.checkpointing.ops, "selective checkpointing knows attention and op.", "Use selective.")
    if m.mla is not None:
        yield from _latent(run)
    for field, value, off in (("mtp_depth", m.mtp_depth, 0),
                              ("hybrid", m.hybrid, ""), ("attention_sinks", m.attention_sinks, False), ("extra_params", m.extra_params, 0),
                              ("embedding_dim", m.embedding_dim, m.hidden)):
        if value != off:
            yield PlanError(f"model.{field}", value, "execute does not build this part yet.", "Use a dense GPT-style or Llama-style model.")
    if m.logit_softcap and r.loss in ("chunked", "fused"):
        yield PlanError("recipe.loss", r.loss, "execute bounds logits that exist as a whole.", "Use loss = eager or bf16, or model.logit_softcap = 0.")
    if m.positions == "alibi":
        yield PlanError("model.positions", "alibi", "execute does not build this part yet.", "Use rope or learned.")
    if m.norms_per_layer == 3:
        yield PlanError("model.norms_per_layer", 3, "execute does not know where a third norm sits.", "Use 1, 2 or 4.")
    yield from _windowed(run)
    yield from _fp8(run)
    if p.framework == "deepspeed":
        yield from _deepspeed(run)
        return
    if r.precision.master is not None:
        yield PlanError("recipe.precision.master", r.precision.master, "PyTorch's optimizers keep no master copy.", "Use bf16-mixed.")
    if r.optimizer.name == "adam8bit":
        yield PlanError("recipe.optimizer", r.optimizer.name, "PyTorch has no such optimizer.", "Use adamw.")
    if r.optimizer.name == "muon" and p.zero > 0 and p.framework == "pytorch":
        yield PlanError("recipe.optimizer", "muon", "torch.optim.Muon needs whole matrices, and ZeRO shards them.",
                        "Use ddp, the strategy muon-distributed, or adamw.")
    if r.optimizer.name in ("sgd", "momentum") and r.optimizer.implementation == "fused" and p.zero == 3:
        yield PlanError("recipe.optimizer", f"{r.optimizer.name}, fused", "PyTorch's fused SGD takes no sharded (DTensor) parameters.",
                        f"Use {r.optimizer.name}:foreach.")
    for field, asked, fix in (("cuda_graphs", r.cuda_graphs, "cuda_graphs = false"), ("expand_kv", r.expand_kv, "expand_kv = false"),
                              ("grad_accum_fusion", r.grad_accum_fusion, "grad_accum_fusion = false")):
        if asked:
            yield PlanError(f"recipe.{field}", True, "execute does not do this.", f"Use {fix}.")
    if r.loss == "inplace":
        yield PlanError("recipe.loss", r.loss, "PyTorch has no such loss.", "Use loss = eager, bf16, chunked or fused.")
    if p.zero != 3 and r.precision.compute in ("bf16", "fp16") and not r.precision.autocast and r.precision.parameter != r.precision.compute:
        yield PlanError("recipe.precision.autocast", False, "outside FSDP, parameters of another dtype than compute need autocast.",
                        "Use bf16-mixed or bf16-pure.")
    if p.zero != 3 and r.precision.reduce != r.precision.parameter.replace("tf32", "fp32"):
        yield PlanError("recipe.precision.reduce", r.precision.reduce, "DDP and ZeRO reduce in the dtype of the parameters.",
                        f"Use reduce = {r.precision.parameter}.")


def _offload(run: Run) -> Iterator[PlanError]:
    """State in host memory: FSDP2's CPUOffloadPolicy, all of it together."""
    p = run.plan
    if p.activation_offload:
        yield PlanError("plan.activation_offload", True, "execute does not offload activations.", "Use activation_offload = false.")
    if p.offload != "none" and ((p.framework, p.zero, p.offload) != ("pytorch", 3, "params") or p.ep * p.pp > 1):
        yield PlanError("plan.offload", p.offload, "execute offloads under FSDP2 alone (CPUOffloadPolicy: parameters, gradients and optimizer states), "
                        "without ep and pp.", "Use offload = none, or the strategy fsdp with offload = params.")
    if p.offload != "none" and run.cluster.accelerator.kernel_table == "cpu":
        yield PlanError("plan.offload", p.offload, "on a CPU device and host share one memory: there is nowhere to offload to.", "Use offload = none.")


def _latent(run: Run) -> Iterator[PlanError]:
    """What latent attention is not performed with."""
    m, p, r = run.model, run.plan, run.recipe
    for on, field, value, fix in (
            (r.attention not in ("sdpa", "eager", "cudnn"), "recipe.attention", r.attention, "attention = sdpa or eager"),
            (m.norm != "rmsnorm", "model.norm", m.norm, "norm = rmsnorm"), (m.positions != "rope", "model.positions", m.positions, "positions = rope"),
            (p.framework != "pytorch", "plan.framework", p.framework, "framework = pytorch"), (p.tp > 1, "plan.tp", p.tp, "tp = 1"),
            (p.cp > 1, "plan.cp", p.cp, "cp = 1")):
        if on:
            yield PlanError(field, value, "execute does not perform this with latent attention.", f"Use {fix}.")


def _windows(run: Run) -> set[int]:
    return {kind.window for kind in layer_kinds(run.model, run.recipe.seq_len)}


def _windowed(run: Run) -> Iterator[PlanError]:
    """Attention to the last tokens alone: FlashAttention-2's operator takes a window, eager attention masks."""
    r = run.recipe
    if _windows(run) == {0}:
        return
    if r.attention not in ("eager", "fa2"):
        yield PlanError("recipe.attention", r.attention, "execute performs sliding windows in FlashAttention-2's operator, or in eager attention.",
                        "Use attention = fa2 or eager.")
    if not r.causal:
        yield PlanError("recipe.causal", False, "execute has no windows that look ahead.", "Use causal = true.")


def _deepspeed(run: Run) -> Iterator[PlanError]:
    """What DeepSpeed's engine is not given here."""
    p, r, precision = run.plan, run.recipe, run.recipe.precision
    if p.zero == 0:
        yield PlanError("plan.zero", 0, "of DeepSpeed execute performs ZeRO-1, -2 and -3.", "Use zero = 1, or framework = pytorch.")
    if precision.loss_scaling or precision.autocast or precision.parameter != precision.compute or (precision.parameter, precision.master) not in (
            ("fp32", None), ("bf16", "fp32")):
        yield PlanError("recipe.precision", precision.name, "DeepSpeed is performed with fp32 parameters, or bf16 ones and an fp32 master copy.",
                        "Use bf16-mixed or fp32.")
    if p.zero == 1 and precision.gradient != precision.parameter:
        yield PlanError("recipe.precision.gradient", precision.gradient, "with wider gradients DeepSpeed's stage 1 is another optimizer (BF16_Optimizer).",
                        f"Use gradient = {precision.parameter}, or zero = 2.")
    if precision.reduce != precision.parameter:
        yield PlanError("recipe.precision.reduce", precision.reduce, "execute leaves DeepSpeed's communication_data_type at that of the parameters.",
                        f"Use reduce = {precision.parameter}.")
    if r.optimizer.name not in ("sgd", "momentum", "adam", "adamw"):
        yield PlanError("recipe.optimizer", r.optimizer.name, "execute gives DeepSpeed PyTorch's optimizers.", "Use adamw.")
    if not p.overlap_grad_reduce and p.zero == 3:
        yield PlanError("plan.overlap_grad_reduce", False, "execute performs DeepSpeed's stage 3 as shipped.", "Use overlap_grad_reduce = true.")
    for field, value, plain in (("recipe.compile", r.compile, False), ("recipe.cuda_graphs", r.cuda_graphs, False), ("recipe.expand_kv", r.expand_kv, False),
                                ("recipe.grad_accum_fusion", r.grad_accum_fusion, False), ("recipe.zero_set_to_none", r.zero_set_to_none, True),
                                ("plan.sync_each_micro_batch", p.sync_each_micro_batch and p.zero == 1, False),
                                *((f"plan.{axis}", getattr(p, axis), 1) for axis in ("tp", "pp", "cp", "ep"))):
        if value != plain:
            yield PlanError(field, value, "execute does not do this with DeepSpeed.", f"Use {field.rpartition('.')[2]} = {str(plain).lower()}.")
    if run.model.moe is not None:
        yield PlanError("model.moe", True, "execute does not give DeepSpeed mixtures of experts.", "Use a dense model, or framework = pytorch.")
    if p.zero >= 2 and not p.sync_each_micro_batch:
        yield PlanError("plan.sync_each_micro_batch", False, f"DeepSpeed's stage {p.zero} reduces gradients of every micro-batch.",
                        "Use sync_each_micro_batch = true.")
    if r.loss == "inplace":
        yield PlanError("recipe.loss", r.loss, "PyTorch has no such loss.", "Use loss = eager, bf16, chunked or fused.")


def has_deepspeed() -> bool:
    """Whether the extra `deepspeed` is installed."""
    return find_spec("deepspeed") is not None


def check_installed(run: Run) -> None:
    """Raise PlanError where a run needs a library that is not here."""
    if run.plan.framework == "deepspeed" and not has_deepspeed():
        raise PlanError("plan.framework", "deepspeed", "DeepSpeed is not installed.",
                        "Install it with: pip install -c constraints.txt -e '.[deepspeed]', or use framework = pytorch.")


def dry_runs(run: Run) -> bool:
    """Whether there is a dry run of a run's framework."""
    return run.plan.framework in ("pytorch", "nanochat")
def _fp8(run: Run) -> Iterator[PlanError]:
    """What execute.float8 does not do."""
    p, r = run.plan, run.recipe.precision
    if "fp8" not in (r.parameter, r.compute, r.gradient, r.reduce, r.optimizer_state) and r.fp8_recipe == "none":
        return
    if r.compute != "fp8" or "fp8" in (r.parameter, r.gradient, r.reduce, r.optimizer_state):
        yield PlanError("recipe.precision", r.name, "execute performs fp8 for the compute of linear layers alone.", "Use precision = fp8.")
    if r.fp8_recipe not in ("tensorwise", "rowwise"):
        yield PlanError("recipe.precision.fp8_recipe", r.fp8_recipe, "execute scales by tensors, or by rows.", "Use tensorwise or rowwise.")
    if r.fp8_parameters:
        yield PlanError("recipe.precision.fp8_parameters", True, "PyTorch's parameters are in 16 bits or more.", "Use fp8_parameters = false.")
    if r.fp8_gather:
        yield PlanError("recipe.precision.fp8_gather", True, "execute gathers in 16 bits.", "Use fp8_gather = false.")
    if p.framework != "pytorch" or p.tp * p.pp * p.cp > 1 or run.model.moe is not None:
        yield PlanError("recipe.precision", r.name, "execute performs fp8 in the PyTorch dialect, in dense models over data parallelism.", "Use bf16-mixed.")


def _watched(run: Run) -> Iterator[PlanError]:
    """What cannot be watched operation by operation."""
    if run.recipe.compile:
        yield PlanError("recipe.compile", True, "execute run watches what a step does, and sees nothing inside compiled layers.",
                        "Use compile = false, or execute solo on a GPU.")


def _alone(run: Run) -> Iterator[PlanError]:
    """What needs the other ranks' values."""
    if run.plan.framework == "deepspeed":
        yield PlanError("plan.framework", "deepspeed", "DeepSpeed's ranks check one another: it is not performed alone.",
                        "Use execute run, or framework = pytorch.")
    if run.plan.ep > 1 and run.recipe.moe_imbalance > 1:
        yield PlanError("recipe.moe_imbalance", run.recipe.moe_imbalance, "one rank alone gets as many rows for its experts as it sends.",
                        "Use moe_imbalance = 1, or execute run.")


def _tensor(run: Run) -> Iterator[PlanError]:
    """What DTensor's tensor parallelism cannot do, or is not combined with here."""
    m, p, r = run.model, run.plan, run.recipe
    if p.tp == 1:
        return
    if m.fused_qkv:
        yield PlanError("model.fused_qkv", True, "DTensor cuts a fused matrix by rows as it stands: the first rank would hold queries, the last values.",
                        "Use fused_qkv = false, or tp = 1.")
    if m.qk_norm == "full":
        yield PlanError("model.qk_norm", "full", "a norm over all heads would span the tp ranks.", "Use tp = 1, or qk_norm = per_head.")
    if m.norm_placement == "post":
        yield PlanError("plan.tp", p.tp, "execute does not parallelise post-norm layers yet.", "Use tp = 1.")
    if p.zero in (1, 2) or p.zero == 0 and p.dp * p.cp > 1:
        yield PlanError("plan.tp", p.tp, "PyTorch's DDP and ZeRO do not know DTensors: tensor parallelism goes with FSDP or HSDP.", "Use zero = 3.")
    if r.precision.autocast:
        yield PlanError("recipe.precision", r.precision.name, "execute does not run torch.autocast under DTensor.",
                        "Use bf16-pure, fp32, or zero = 3 (whose mixed precision is per module).")
    if r.loss in ("chunked", "fused"):
        yield PlanError("recipe.loss", r.loss, "this loss is not written for split logits.", "Use loss = eager or bf16.")
    if r.optimizer.name == "muon":
        yield PlanError("recipe.optimizer", "muon", "torch.optim.Muon needs whole matrices, and tensor parallelism splits them.", "Use adamw.")


def _context(run: Run) -> Iterator[PlanError]:
    """What a shared sequence cannot do, or is not combined with here."""
    p, r = run.plan, run.recipe
    if p.cp == 1:
        return
    if p.framework == "deepspeed":
        yield PlanError("plan.cp", p.cp, "execute does not share sequences under DeepSpeed.", "Use cp = 1, or framework = pytorch.")
    if r.compile:
        yield PlanError("recipe.compile", True, "execute does not compile under context parallelism.", "Use compile = false.")
    if p.checkpointing.mode == "selective" and p.checkpointing.ops == ("op",):
        yield PlanError("plan.checkpointing", "selective:op", "execute does not keep single operations of a shared sequence's attention.",
                        "Use full, selective or none.")
    if p.cp_kind == "ulysses":
        return
    if _windows(run) != {0}:
        yield PlanError("plan.cp_kind", p.cp_kind, "execute shares sequences of layers with a window as Ulysses alone.", "Use cp_kind = ulysses.")
    if r.dropout:
        yield PlanError("recipe.dropout", r.dropout, f"execute has no dropout in {p.cp_kind} attention.", "Use dropout = 0, or cp_kind = ulysses.")
    acc, head_dim = run.cluster.accelerator, run.model.head_dim
    on_gpu = acc.kernel_table == "cuda"
    if on_gpu and (acc.architecture in BEFORE_AMPERE or head_dim % 8 or head_dim > 256):
        yield PlanError("plan.cp_kind", p.cp_kind, "its flash kernel takes heads of a multiple of 8 up to 256, on Ampere or newer: not those of "
                        f"{head_dim} on {acc.name}.", "Use cp_kind = ulysses.")
    if r.attention not in ("sdpa", "fa2") or on_gpu and r.precision.compute not in ("bf16", "fp16"):
        yield PlanError("recipe.attention", r.attention, f"{p.cp_kind} attention is performed with flash kernels, of 16-bit tensors on GPUs.",
                        "Use attention = sdpa and a bf16 precision, or cp_kind = ulysses.")


def _experts(run: Run) -> Iterator[PlanError]:
    """What a mixture of experts is not performed with."""
    m, p, r = run.model, run.plan, run.recipe
    if m.moe is None:
        return
    if m.moe.first_dense_layers >= m.layers:
        yield PlanError("model.moe.first_dense_layers", m.moe.first_dense_layers, "no layer is left for the mixture of experts.",
                        f"Use first_dense_layers < {m.layers}.")
    if m.moe.expert_bias:
        yield PlanError("model.moe.expert_bias", True, "a grouped matrix product has no bias.", "Use expert_bias = false.")
    if m.moe.shared_experts and not m.moe.shared_ffn:
        yield PlanError("model.moe.shared_ffn", 0, "shared experts have a width.", "Use shared_ffn = shared_experts x the width of one.")
    if r.optimizer.name == "muon":
        yield PlanError("recipe.optimizer", "muon", "torch.optim.Muon takes matrices, and experts are stacks of them.", "Use adamw.")
    if m.moe.aux_loss_coefficient and r.precision.loss_scaling:
        yield PlanError("model.moe.aux_loss_coefficient", m.moe.aux_loss_coefficient, "the auxiliary loss is not scaled with the loss.",
                        "Use a bf16 precision, or aux_loss_coefficient = 0.")
    if p.tp > 1:
        yield PlanError("plan.tp", p.tp, "execute does not spread a mixture of experts by tensor parallelism.", "Use tp = 1.")
    if p.ep == 1:
        return
    if p.zero != 3:
        yield PlanError("plan.ep", p.ep, "execute spreads experts under FSDP or HSDP only.", "Use zero = 3, or ep = 1.")
    if p.pp > 1 and m.moe.first_dense_layers:
        yield PlanError("plan.ep", p.ep, "execute does not spread experts in a pipeline of which some layers are dense.", "Use pp = 1, or ep = 1.")
    if p.checkpointing.mode == "selective" and "op" in p.checkpointing.ops:
        yield PlanError("plan.checkpointing.ops", list(p.checkpointing.ops),
                        "FSDP2's hooks of the experts run inside the layer, where torch counts operations.", "Use full checkpointing, or ep = 1.")
    if p.ep_dispatcher != "alltoall":
        yield PlanError("plan.ep_dispatcher", p.ep_dispatcher, "execute exchanges rows, not tokens.", "Use ep_dispatcher = alltoall.")
    if p.ep_overlap:
        yield PlanError("plan.ep_overlap", True, "execute waits for its all-to-alls.", "Use ep_overlap = false.")


def _pipeline(run: Run) -> Iterator[PlanError]:
    """What torch.distributed.pipelining cannot do, or is not combined with here."""
    p, r = run.plan, run.recipe
    if p.pp == 1:
        return
    yield from torch_pipeline_refusals(run)
    if p.schedule in SPLIT:
        yield from _split(run)
    if r.precision.autocast:
        yield PlanError("recipe.precision", r.precision.name, "execute does not run torch.autocast under a pipeline.",
                        "Use bf16-pure, fp32, or zero = 3 (whose mixed precision is per module).")
    if r.precision.loss_scaling:
        yield PlanError("recipe.precision", r.precision.name, "execute does not scale the loss of a pipeline.", "Use a bf16 precision.")
    if r.loss in ("chunked", "fused"):
        yield PlanError("recipe.loss", r.loss, "the last stage of a pipeline gives logits.", "Use loss = eager or bf16.")
    if r.optimizer.name == "muon":
        yield PlanError("recipe.optimizer", "muon", "execute does not split Muon over stages.", "Use adamw.")


def _split(run: Run) -> Iterator[PlanError]:
    """What a backward in two passes is not combined with here."""
    p = run.plan
    for on, field, value in (
            (p.zero == 3 and p.schedule == "dualpipev", "plan.zero", p.zero), (p.cp > 1, "plan.cp", p.cp),
            (run.recipe.precision.compute == "fp8", "recipe.precision", run.recipe.precision.name), (run.model.moe is not None, "model", run.model.name)):
        if on:
            yield PlanError(field, value, "execute does not combine this with a backward in two passes yet.", "Use schedule = 1f1b or interleaved.")
