"""What a Run may ask of `execute` today; everything else is refused by name, never ignored."""

from collections.abc import Iterator

from costmodel.spec import PlanError, Run


def check_supported(run: Run) -> None:
    """Raise PlanError for the first feature of the run that `execute` does not perform."""
    for error in _refusals(run):
        raise error


def _refusals(run: Run) -> Iterator[PlanError]:
    m, p, r = run.model, run.plan, run.recipe
    if p.framework != "pytorch":
        yield PlanError("plan.framework", p.framework, "execute performs the PyTorch dialect only.", "Use framework = pytorch.")
    for field in ("tp", "pp", "cp", "ep"):
        if getattr(p, field) > 1:
            yield PlanError(f"plan.{field}", getattr(p, field), "execute does not perform this axis yet.", f"Use {field} = 1.")
    if p.single_process:
        yield PlanError("plan.single_process", True, "execute does not perform DataParallel.", "Use ddp.")
    if p.offload != "none" or p.activation_offload:
        yield PlanError("plan.offload", p.offload, "execute does not offload yet.", "Use offload = none and activation_offload = false.")
    if p.checkpointing.mode == "selective" and p.checkpointing.ops not in (("attention",), ("op",)):
        yield PlanError("plan.checkpointing", p.checkpointing.ops, "selective checkpointing knows attention and op.", "Use selective.")
    for field, value, off in (("moe", m.moe is not None, False), ("mla", m.mla is not None, False), ("mtp_depth", m.mtp_depth, 0),
                              ("hybrid", m.hybrid, ""), ("attention_sinks", m.attention_sinks, False), ("extra_params", m.extra_params, 0),
                              ("embedding_dim", m.embedding_dim, m.hidden)):
        if value != off:
            yield PlanError(f"model.{field}", value, "execute does not build this part yet.", "Use a dense GPT-style or Llama-style model.")
    if m.positions == "alibi":
        yield PlanError("model.positions", "alibi", "execute does not build this part yet.", "Use rope or learned.")
    if m.norms_per_layer == 3:
        yield PlanError("model.norms_per_layer", 3, "execute does not know where a third norm sits.", "Use 1, 2 or 4.")
    if m.attention_pattern != "global" and run.cluster.accelerator.kernel_table == "cpu":
        yield PlanError("model.attention_pattern", m.attention_pattern, "execute has no sliding window on a CPU.", "Use global.")
    if "fp8" in (r.precision.parameter, r.precision.compute) or r.precision.fp8_recipe != "none":
        yield PlanError("recipe.precision", r.precision.name, "execute does not perform fp8 yet.", "Use bf16-mixed.")
    if r.precision.master is not None:
        yield PlanError("recipe.precision.master", r.precision.master, "PyTorch's optimizers keep no master copy.", "Use bf16-mixed.")
    if r.optimizer.name == "adam8bit":
        yield PlanError("recipe.optimizer", r.optimizer.name, "PyTorch has no such optimizer.", "Use adamw.")
    if r.optimizer.name == "muon" and p.zero > 0:
        yield PlanError("recipe.optimizer", "muon", "torch.optim.Muon needs whole matrices, and ZeRO shards them.", "Use ddp, or adamw.")
    if r.optimizer.name in ("sgd", "momentum") and r.optimizer.implementation == "fused" and p.zero == 3:
        yield PlanError("recipe.optimizer", f"{r.optimizer.name}, fused", "PyTorch's fused SGD takes no sharded (DTensor) parameters.",
                        f"Use {r.optimizer.name}:foreach.")
    if r.compile or r.cuda_graphs:
        yield PlanError("recipe.compile", r.compile, "a dry run executes eagerly.", "Use compile = false and cuda_graphs = false.")
    if p.zero != 3 and r.precision.compute in ("bf16", "fp16") and not r.precision.autocast and r.precision.parameter != r.precision.compute:
        yield PlanError("recipe.precision.autocast", False, "outside FSDP, parameters of another dtype than compute need autocast.",
                        "Use bf16-mixed or bf16-pure.")
    if p.zero != 3 and r.precision.reduce != r.precision.parameter.replace("tf32", "fp32"):
        yield PlanError("recipe.precision.reduce", r.precision.reduce, "DDP and ZeRO reduce in the dtype of the parameters.",
                        f"Use reduce = {r.precision.parameter}.")
