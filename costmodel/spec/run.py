"""Run: Model + Cluster + Plan + Recipe, and the rules that make one possible."""

import math
from collections.abc import Callable, Iterator

from pydantic import model_validator

from costmodel.spec.base import PlanError, Spec
from costmodel.spec.cluster import Cluster
from costmodel.spec.model import Model
from costmodel.spec.parameters import embedding_params, head_params, layer_params
from costmodel.spec.plan import Plan
from costmodel.spec.recipe import Recipe
from costmodel.spec.routing import checked_imbalance

INTERLEAVED = ("interleaved", "interleaved-zb", "zbv", "dualpipev")
V_SHAPED = ("zbv", "dualpipev")
SPLIT = ("zb-h1", "interleaved-zb", *V_SHAPED)
"""Schedules whose backward is two passes: gradients of inputs, then of weights."""
"""Schedules that lay two stages a rank as a V."""
FLASH = ("fa1", "fa2", "fa3", "cudnn")
BEFORE_AMPERE = ("pascal", "volta", "turing")
TOO_OLD = {"fa1": ("pascal", "volta"), "fa2": BEFORE_AMPERE, "cudnn": BEFORE_AMPERE}
"""Architectures that a flash kernel does not run on (README of Dao-AILab/flash-attention; PyTorch's sdp_utils.cpp for cuDNN)."""


class Run(Spec):
    """One training step, wholly described. An impossible one cannot be built."""

    model: Model
    cluster: Cluster
    plan: Plan
    recipe: Recipe

    @model_validator(mode="after")
    def _possible(self) -> "Run":
        for rule in RULES:
            for error in rule(self):
                raise error
        return self

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one step (m of a pipeline schedule)."""
        return self.recipe.grad_accum

    @property
    def balances_context(self) -> bool:
        """Whether a cp rank's part of the sequence is a piece of its head and the mirror of that in its tail."""
        p = self.plan
        return p.cp > 1 and p.cp_balance and self.recipe.causal and p.cp_kind != "ulysses"

    @property
    def sequence_pieces(self) -> int:
        """Equal pieces into which context parallelism cuts a sequence."""
        return self.plan.cp * (2 if self.balances_context else 1)

    @property
    def tokens_per_step(self) -> int:
        return self.recipe.global_batch * self.recipe.seq_len


def nearest_divisors(n: int, near: int) -> str:
    """The divisors of n around `near`, as a phrase."""
    divisors = [d for d in range(1, min(n, 1 << 16) + 1) if n % d == 0]
    below = [d for d in divisors if d < near][-1:]
    above = [d for d in divisors if d > near][:1]
    return " or ".join(str(d) for d in below + above) or str(n)


def _degrees(run: Run) -> Iterator[PlanError]:
    p, gpus = run.plan, run.cluster.gpus
    if p.world_size != gpus:
        product = f"dp_replicate {p.dp_replicate} x dp_shard {p.dp_shard} x cp {p.cp} x tp {p.tp} x pp {p.pp} = {p.world_size}"
        yield PlanError("plan", product, f"the degrees must multiply to the world size, {gpus} GPUs.",
                        f"Change one degree, or use --gpus {p.world_size}.")
    if p.zero == 0 and p.dp_shard > 1:
        yield PlanError("plan.dp_shard", p.dp_shard, "zero = 0 shards no state.",
                        f"Use dp_replicate = {p.dp}, or zero = 3 (FSDP).")
    if p.zero in (1, 2) and p.dp_replicate > 1 and p.framework == "pytorch":
        yield PlanError("plan.dp_replicate", p.dp_replicate, f"PyTorch's ZeRO-{p.zero} shards over all data-parallel ranks.",
                        f"Use dp_shard = {p.dp} and dp_replicate = 1.")
    if p.framework == "megatron" and p.zero == 2:
        yield PlanError("plan.zero", 2, "Megatron's distributed optimizer is ZeRO-1, and of Megatron-FSDP only optim_grads_params (ZeRO-3) is predicted.",
                        "Use zero = 1, zero = 3, or another framework.")
    if p.framework == "deepspeed" and p.dp_replicate > 1 and p.zero > 0:
        yield PlanError("plan.dp_replicate", p.dp_replicate, "DeepSpeed's ZeRO shards over all data-parallel ranks.",
                        f"Use dp_shard = {p.dp} and dp_replicate = 1.")
    if p.single_process and (p.zero or p.dp_shard * p.tp * p.pp * p.cp > 1):
        yield PlanError("plan.single_process", True, "DataParallel only replicates.", "Use zero = 0 and no other axis, or DDP.")
    if p.single_process and p.framework != "pytorch":
        yield PlanError("plan.framework", p.framework, "DataParallel is PyTorch's.", "Use framework = pytorch, or DDP.")
    if p.single_process and run.cluster.nodes > 1:
        yield PlanError("plan.single_process", True, f"one process drives the GPUs of one machine, and these are {run.cluster.nodes}.",
                        f"Use --gpus {run.cluster.gpus_per_node}, or DDP.")


def _tensor(run: Run) -> Iterator[PlanError]:
    m, p = run.model, run.plan
    common = math.gcd(m.heads, m.kv_heads, m.ffn, p.tp * p.dp if p.dp > 1 else 0)
    for field, n in (("heads", m.heads), ("kv_heads", m.kv_heads), ("ffn", m.ffn)):
        if n % p.tp:
            yield PlanError("plan.tp", p.tp, f"model.{field} = {n} must be a multiple of tp.", f"Use tp = {nearest_divisors(common, p.tp)}.")
    if p.sequence_parallel and p.tp == 1:
        yield PlanError("plan.sequence_parallel", True, "sequence parallelism splits over the tp group, and tp = 1.",
                        "Use tp > 1, or sequence_parallel = false.")
    if p.sequence_parallel and run.recipe.seq_len % (p.tp * p.cp):
        yield PlanError("recipe.seq_len", run.recipe.seq_len, f"sequence parallelism needs a multiple of tp x cp = {p.tp * p.cp}.",
                        f"Use seq_len = {_multiple(run.recipe.seq_len, p.tp * p.cp)}.")
    if p.loss_parallel and p.tp == 1:
        yield PlanError("plan.loss_parallel", True, "a vocabulary-parallel loss needs tp > 1.", "Use tp > 1, or loss_parallel = false.")


def _pipeline(run: Run) -> Iterator[PlanError]:
    m, p = run.model, run.plan
    stages = p.pp * p.virtual_stages
    if m.layers < stages:
        yield PlanError("plan.pp", p.pp, f"{stages} stages need at least {stages} layers, and the model has {m.layers}.",
                        f"Use pp x virtual_stages <= {m.layers}.")
    if p.virtual_stages > 1 and p.schedule not in INTERLEAVED:
        yield PlanError("plan.virtual_stages", p.virtual_stages, f"schedule {p.schedule} has one stage a rank.",
                        "Use schedule = interleaved, or virtual_stages = 1.")
    if p.pp > 1 and p.schedule in V_SHAPED and p.virtual_stages != 2:
        yield PlanError("plan.virtual_stages", p.virtual_stages, f"schedule {p.schedule} has two stages a rank.",
                        "Use virtual_stages = 2, or schedule = interleaved-zb.")
    elif p.pp > 1 and p.schedule in INTERLEAVED and p.virtual_stages == 1:
        yield PlanError("plan.virtual_stages", 1, "an interleaved schedule has at least 2 stages a rank.",
                        f"Use virtual_stages = 2, or schedule = {'1f1b' if p.schedule == 'interleaved' else 'zb-h1'}.")
    rounds = max(1, run.recipe.grad_accum // p.pp) if p.framework == "pytorch" else 0
    in_rounds = ("interleaved", "interleaved-zb", "zb-h1") if rounds else ("interleaved",)
    if p.pp > 1 and p.schedule in in_rounds and run.recipe.grad_accum % (rounds or p.pp):
        rule = f"in {rounds} equal rounds" if rounds else f"in multiples of pp = {p.pp}"
        yield PlanError("recipe.grad_accum", run.recipe.grad_accum, f"the {p.schedule} schedule needs micro-batches {rule}.",
                        f"Use grad_accum = {_multiple(run.recipe.grad_accum, p.pp)}.")
    if p.pp > 1 and p.schedule == "dualpipev" and run.recipe.grad_accum < 2 * p.pp:
        yield PlanError("recipe.grad_accum", run.recipe.grad_accum, f"dualpipev needs at least as many micro-batches as stages, {2 * p.pp}.",
                        f"Use grad_accum = {2 * p.pp}, or schedule = zbv.")
    if p.stage_layers and (len(p.stage_layers) != stages or sum(p.stage_layers) != m.layers or min(p.stage_layers) < 0):
        yield PlanError("plan.stage_layers", list(p.stage_layers), f"it must list {stages} stages that sum to {m.layers} layers.",
                        "Leave it empty to divide evenly.")


def _context(run: Run) -> Iterator[PlanError]:
    m, p, s = run.model, run.plan, run.recipe.seq_len
    pieces = run.sequence_pieces
    if s % pieces:
        yield PlanError("recipe.seq_len", s, f"cp = {p.cp} cuts the sequence into {pieces} equal pieces.", f"Use seq_len = {_multiple(s, pieces)}.")
    if p.cp > 1 and p.cp_kind == "ulysses" and (m.heads % (p.tp * p.cp) or m.kv_heads % (p.tp * p.cp)):
        yield PlanError("plan.cp", p.cp, f"Ulysses splits heads = {m.heads} and kv_heads = {m.kv_heads} over tp x cp = {p.tp * p.cp}.",
                        f"Use tp x cp = {nearest_divisors(m.kv_heads, p.tp * p.cp)}, or cp_kind = ring.")
    if m.positions == "learned" and s > m.position_rows:
        yield PlanError("recipe.seq_len", s, f"the model has {m.position_rows} learned positions.", f"Use seq_len <= {m.position_rows}.")


def _expert(run: Run) -> Iterator[PlanError]:
    m, p = run.model, run.plan
    if p.ep == 1:
        return
    if m.moe is None:
        yield PlanError("plan.ep", p.ep, f"{m.name} has no experts.", "Use ep = 1.")
        return
    if p.expert_ranks % p.ep:
        yield PlanError("plan.ep", p.ep, f"ep must divide {'dp' if p.expert_ranks > p.state_shards else 'dp_shard'} x cp = {p.expert_ranks}.",
                        f"Use ep = {nearest_divisors(p.expert_ranks, p.ep)}.")
    if m.moe.experts % p.ep:
        yield PlanError("plan.ep", p.ep, f"experts = {m.moe.experts} must be a multiple of ep.", f"Use ep = {nearest_divisors(m.moe.experts, p.ep)}.")
    if error := checked_imbalance(run.recipe.moe_imbalance, p.ep):
        yield error


def _batch(run: Run) -> Iterator[PlanError]:
    r, dp = run.recipe, run.plan.dp
    if r.micro_batch * r.grad_accum * dp != r.global_batch:
        unit = r.micro_batch * dp
        yield PlanError("recipe.global_batch", r.global_batch,
                        f"it must be micro_batch {r.micro_batch} x grad_accum {r.grad_accum} x dp {dp} = {unit * r.grad_accum} sequences.",
                        f"Use a multiple of {unit}, for example {_multiple(r.global_batch, unit)}, and leave grad_accum out.")


def _numbers(run: Run) -> Iterator[PlanError]:
    r, acc = run.recipe, run.cluster.accelerator
    compute = r.precision.compute
    if compute not in acc.flops_per_s:
        known = ", ".join(acc.flops_per_s) or "none known"
        yield PlanError("recipe.precision", r.precision.name, f"{acc.name} has no {compute} arithmetic (it has {known}).",
                        f"Use --precision {next((f'{low}-mixed' for low in ('bf16', 'fp16') if low in acc.flops_per_s), 'fp32')}.")
    if r.dropout >= 1:
        yield PlanError("recipe.dropout", r.dropout, "a dropout probability is below 1.", "Use dropout = 0.1.")
    if r.attention in FLASH:
        if acc.kernel_table == "cpu":
            yield PlanError("recipe.attention", r.attention, "this kernel runs on GPUs only.", "Use attention = sdpa or eager.")
        elif compute not in ("bf16", "fp16", "fp8"):
            yield PlanError("recipe.attention", r.attention, f"flash kernels take 16-bit inputs, and compute is {compute}.",
                            "Use attention = sdpa or eager, or a bf16 precision.")
        elif r.attention == "fa3" and acc.architecture not in ("hopper",):
            yield PlanError("recipe.attention", "fa3", f"FlashAttention-3 is for Hopper, and {acc.name} is {acc.architecture}.",
                            f"Use attention = {'sdpa or eager' if acc.architecture in BEFORE_AMPERE else 'fa2 or cudnn'}.")
        elif acc.architecture in TOO_OLD.get(r.attention, ()):
            first = "Turing" if r.attention == "fa1" else "Ampere"
            yield PlanError("recipe.attention", r.attention, f"this kernel needs {first} or newer, and {acc.name} is {acc.architecture}.",
                            "Use attention = sdpa or eager.")
        elif run.model.head_dim > 256:
            yield PlanError("recipe.attention", r.attention, f"flash kernels take head_dim <= 256, and it is {run.model.head_dim}.",
                            "Use attention = eager.")
    if r.loss in ("chunked", "fused") and r.loss_chunks > r.micro_batch * r.seq_len:
        yield PlanError("recipe.loss_chunks", r.loss_chunks, "there are more chunks than tokens.", "Use loss_chunks = 8.")


def _multiple(n: int, of: int) -> int:
    """The nearest positive multiple."""
    return max(of, round(n / of) * of)


SMALL_NUMEL = 1024
"""nanochat all-reduces the gradients of tensors below this many elements, and shards the others by rows (nanochat/optim.py)."""


def _nanochat(run: Run) -> Iterator[PlanError]:
    """nanochat's optimizer is data parallelism and nothing else."""
    m, p, r = run.model, run.plan, run.recipe
    if p.framework != "nanochat":
        return
    if m.moe is not None:
        yield PlanError("model", m.name, "nanochat's layers are dense.", "Use framework = pytorch or megatron.")
    for field in ("tp", "pp", "cp", "ep"):
        if getattr(p, field) > 1:
            yield PlanError(f"plan.{field}", getattr(p, field), "nanochat spreads data alone.", f"Use {field} = 1, or framework = pytorch.")
    if p.zero > 1 or p.zero == 0 and p.dp > 1:
        yield PlanError("plan.zero", p.zero, "nanochat's optimizer shards its state, and neither gradients nor parameters.", "Use zero = 1.")
    if p.dp_replicate > 1:
        yield PlanError("plan.dp_replicate", p.dp_replicate, "nanochat's optimizer shards over all data-parallel ranks.",
                        f"Use dp_shard = {p.dp} and dp_replicate = 1.")
    if r.optimizer.name not in ("muon", "adamw"):
        yield PlanError("recipe.optimizer", r.optimizer.name, "nanochat has Muon with AdamW, or AdamW alone.", "Use muon or adamw.")
    if not r.zero_set_to_none:
        yield PlanError("recipe.zero_set_to_none", False, "nanochat frees AdamW's gradients, and zeroes Muon's in place.", "Use zero_set_to_none = true.")
    muon = r.optimizer.name == "muon"
    rows = [q for q in (*embedding_params(m), *head_params(m), *layer_params(m)) if q.numel >= SMALL_NUMEL]
    for q in rows:
        stacked = muon and len(q.shape) == 2 and q.name.startswith(("attention.", "mlp."))
        if q.shape[0] % p.dp and not stacked and q.name != "extra":
            yield PlanError("plan.dp_shard", p.dp_shard, f"nanochat cuts {q.name} by rows, and {q.shape[0]:,} rows do not divide by {p.dp} ranks.",
                            f"Use {nearest_divisors(q.shape[0], p.dp)} ranks, or a padded vocabulary.")


RULES: tuple[Callable[[Run], Iterator[PlanError]], ...] = (_degrees, _tensor, _pipeline, _context, _expert, _batch, _numbers, _nanochat)
