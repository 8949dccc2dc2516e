"""Run (+ Profile) -> StepReport: builds the program and puts its memory and time readings together."""

from costmodel import memory as reading
from costmodel.catalog.machines import other_devices
from costmodel.catalog.profiles import Profile, load_profile
from costmodel.cost.prices import RunPrices
from costmodel.program.build import Program, single_builder
from costmodel.program.ir import BlockCounts, Comm, block_counts
from costmodel.program.layers import resolved_attention
from costmodel.program.parallel.base import OPTIONAL, Strategy
from costmodel.report import Basis, Collective, MemoryReport, RoleReport, Scaling, StepReport, TimeReport, Verdict
from costmodel.repricing import interval, memory_intervals, program_of, time_log_sd
from costmodel.simulate import Scan, seconds, step_time
from costmodel.spec import Plan, Recipe, Run
from costmodel.spec.cluster import NETWORKS
from costmodel.spec.run import SPLIT
from costmodel.timing import pipeline_times, slow_rank_waits, step_report, waiting

MEASURED_PEERS = 7
"""Of the all-to-all whose buffers `memory.nccl_all_to_all_bytes` is (8 GPUs of a node): NCCL keeps buffers for each peer."""
RISKY_SHARE = 0.90
"""Of the capacity: above it, whether a run survives depends on fragmentation and on what else lives on the device."""


def predict(run: Run, profile: Profile | str | None = None, *, scaling: bool = True, intervals: bool = False) -> StepReport:
    """Memory and time of one step of a run, from arithmetic alone.

    `profile` is a Profile, a name or path, or None for the shipped one of the run's accelerator and framework. `scaling` also
    predicts one GPU of the same kind, for the efficiencies; `intervals` says how far the uncertainty of the constants, where they
    have any, moves the answer. Raises PlanError where something is not predicted yet.
    """
    constants = profile if isinstance(profile, Profile) else load_profile(run, profile)
    pipelined = run.plan.pp > 1
    program = program_of(run)
    prices = RunPrices(run, constants)
    scan = Scan(prices)
    seen: dict[int, BlockCounts] = {}
    steps = [rank.parts for rank in program.pipeline] if pipelined else [role.step for role in program.roles]
    counts = [block_counts(step, seen) for step in steps]
    if pipelined:
        times = pipeline_times(run, program, prices, scan, counts)
    else:
        times = [step_report(run, prices, scan, step_time(role.step, prices, scan=scan), count)
                 for role, count in zip(program.roles, counts, strict=True)]
    late: dict[int, float] = {}
    if run.cluster.slow_rank > 1:
        late = slow_rank_waits(run, constants, program, scan)
        times = [waiting(time, max(late.values())) for time in times]
    memo: dict[int, reading.Reading] = {}
    sent = {key: _collectives(count, prices, scan) for key, count in {id(count): count for count in counts}.items()}
    read = [reading.memory_of(role, memo) for role in program.roles]
    roles = [RoleReport(role.role, role.ranks, role.example_rank, _memory(run, constants, m), time, sent[id(count)])
             for role, m, time, count in zip(program.roles, read, times, counts, strict=True)]
    r, micro = run.recipe, run.micro_batches * run.plan.dp * run.plan.cp * run.plan.tp
    slowest = max(times, key=lambda t: t.step_s)
    return StepReport(
        provenance="predicted", roles=tuple(roles), world_size=run.cluster.gpus, tokens_per_step=run.tokens_per_step,
        model_flops=program.model_flops * micro, hardware_flops=program.hardware_flops * micro,
        peak_flops_per_s=run.cluster.accelerator.flops_per_s.get(r.precision.compute),
        scaling=_scaling(run, program, _alone(run, constants, scan), prices.fixed, slowest.step_s) if scaling else None,
        bound_by=_bound_by(slowest), notes=(*_notes(run, constants, program), *_uneven(run, times), *_what_if(run, program, late)),
        basis=_basis(constants, run), interval=_interval(run, constants, program, slowest, roles, read) if intervals else None)


def _interval(run: Run, constants: Profile, program: Program, slowest: TimeReport, roles: list[RoleReport],
              read: list[reading.MemoryReading]) -> dict[str, tuple[float, float]] | None:
    """10% and 90% quantiles of the step's time, and of the memory that the fullest role reserves and holds."""
    found: dict[str, tuple[float, float]] = {}
    time = interval(time_log_sd(run, program, constants, slowest), slowest.step_s)
    if time is not None:
        found["step_s"] = time
    fullest = max(range(len(roles)), key=lambda i: read[i].peak.total_bytes)
    memory = roles[fullest].memory
    if memory is not None and memory.reserved_bytes is not None:
        found |= memory_intervals(run, constants, sum(read[fullest].pool_peaks), memory.outside)
    return found or None


# -- memory ------------------------------------------------------------------------------------------------------------------


def _memory(run: Run, profile: Profile, m: reading.MemoryReading) -> MemoryReport:
    """Allocated from the program; reserved from its stream pools; device total with what lives outside the allocator."""
    acc = run.cluster.accelerator
    capacity = acc.memory_bytes
    allocated = m.peak.total_bytes
    if acc.kernel_table == "cpu":
        return MemoryReport(m.peak, m.phases, m.states, m.activations, capacity_bytes=capacity, headroom_bytes=capacity - allocated,
                            verdict=_verdict(allocated, allocated, capacity))
    mode = "memory.split_expandable" if run.recipe.allocator == "expandable" else "memory.split_default"
    workspaces = int(profile.value("memory.workspace_bytes"))
    reserved = int(sum(m.pool_peaks) * profile.value(mode)) + workspaces
    outside = {"context": int(profile.value("memory.context_bytes")), "nccl": _nccl_bytes(run, profile)}
    other = sum(outside.values())
    device = reserved + other
    return MemoryReport(m.peak, m.phases, m.states, m.activations, workspaces, reserved, device, {k: v for k, v in outside.items() if v},
                        capacity, _verdict(allocated + workspaces + other, device, capacity), capacity - device)


def _nccl_bytes(run: Run, profile: Profile) -> int:
    """Channel buffers of every communicator: the first by where it reaches, the others by the profile's next; an all-to-all's, by its peers in the node."""
    p = run.plan
    data = (p.state_shards, p.dp_replicate) if p.zero else (p.dp * p.cp,)
    sizes = [n for n in (*data, p.cp, p.tp, p.pp, p.ep, p.expert_replicas if p.ep > 1 else 1) if n > 1]
    if not sizes:
        return 0
    node, sharing = run.cluster.gpus_in_node, p.cp if p.cp_kind == "ulysses" else 1
    peers = min(p.ep, node) - 1 + min(sharing, max(1, node // p.tp)) - 1
    exchange = peers / MEASURED_PEERS * profile.get("memory.nccl_all_to_all_bytes", 0.0)
    first = "nccl_multi_node_bytes" if run.cluster.nodes > 1 else "nccl_pair_bytes" if run.cluster.gpus == 2 else "nccl_node_bytes"
    return int(profile.value(f"memory.{first}") + (len(sizes) - 1) * profile.value("memory.nccl_next_bytes") + exchange)


def _verdict(needed: int, held: int, capacity: int) -> Verdict:
    """Live tensors beyond the device cannot run; a pool near its capacity may, with retries, or may not."""
    if needed > capacity:
        return "does not fit"
    return "risky" if held > RISKY_SHARE * capacity else "fits"


# -- time --------------------------------------------------------------------------------------------------------------------


def _collectives(counts: BlockCounts, prices: RunPrices, scan: Scan) -> tuple[Collective, ...]:
    """The collectives of a step, equal ones together."""
    found: dict[tuple[str, Comm], int] = {}
    for block, times in counts:
        for comm in scan.of(block).sent:
            key = ("backward" if block.phase == "recompute" else block.phase, comm)
            found[key] = found.get(key, 0) + times
    return tuple([Collective(phase, c.axis, c.kind, c.group, count, c.in_bytes, c.out_bytes, c.nbytes, c.dtype, count * prices.collective_s(c))
                  for (phase, c), count in found.items()])


def _scaling(run: Run, program: Program, scan: Scan, fixed: float, step_s: float) -> Scaling:
    """One GPU of the same kind that spreads nothing: the same micro-batches (weak), the same batch (strong).

    `scan` has the prices of the run: a single GPU pays the same for a kernel.
    """
    dp = run.plan.dp
    if run.cluster.gpus == 1:
        return Scaling(1.0, 1.0, step_s, None)
    alone = single_gpu(run)
    builder = single_builder(alone, program)
    role = builder.strategy.roles()[0][0]
    one, whole = (seconds(builder.step(role, False, m), scan) + fixed
                  for m in (run.micro_batches, run.micro_batches * dp))
    return Scaling(one / step_s * dp / run.cluster.gpus, whole / (run.cluster.gpus * step_s), one, None)


def _alone(run: Run, constants: Profile, scan: Scan) -> Scan:
    """The scan of one GPU: the run's own, unless the run's host serves several GPUs."""
    return Scan(RunPrices(single_gpu(run), constants)) if run.plan.single_process else scan


def single_gpu(run: Run) -> Run:
    """The same run on one GPU, none slower: every degree 1, nothing sharded, the same micro-batch and accumulation."""
    cluster = run.cluster.model_copy(update={"gpus": 1, "levels": (), "slow_rank": 1.0})
    plan = run.plan.model_copy(update={"dp_replicate": 1, "dp_shard": 1, "zero": 0, "tp": 1, "sequence_parallel": False, "loss_parallel": False,
                                         "single_process": False, "pp": 1, "virtual_stages": 1, "stage_layers": (), "schedule": "1f1b", "cp": 1, "ep": 1})
    recipe = run.recipe.model_copy(update={"global_batch": run.recipe.micro_batch * run.recipe.grad_accum})
    return run.model_copy(update={"cluster": cluster, "plan": plan, "recipe": recipe})


# -- words -------------------------------------------------------------------------------------------------------------------

BOUND_WORDS = {"matmul": "matrix multiplication", "attention": "attention", "memory-bound": "memory bandwidth (elementwise operations)",
               "recompute": "activation recompute", "optimizer": "the optimizer step", "host wait": "the host, issuing work",
               "contention": "contention of communication with compute", "slow rank": "one slow rank, for which the others wait"}


def _bound_by(time: TimeReport | None) -> str:
    """The largest part of the step, in words."""
    if time is None:
        return ""
    name, seconds = max(time.breakdown.items(), key=lambda kv: kv[1])
    words = BOUND_WORDS.get(name) or (f"communication over {name.removeprefix('exposed ')}" if name.startswith("exposed ") else name)
    return f"{words} ({100 * seconds / time.step_s:.0f}% of the step)"


def _notes(run: Run, profile: Profile, program: Program) -> list[str]:
    m, r, p, c = run.model, run.recipe, run.plan, run.plan.checkpointing
    notes = program.strategy.notes()
    if profile.guess:
        notes.append(f"No matrix multiplication was measured on {run.cluster.accelerator.name}: its times are a data-sheet guess.")
    notes += [f"Profile {profile.name}: {words}." for words in other_devices(profile.machines, [run.cluster.accelerator.name])]
    if p.pp > 1 and p.schedule in SPLIT:
        notes.append("Backward is split: what a micro-batch saved is held until the gradients of its weights are made, and every gradient that was sent until "
                     "the next step.")
    if m.head_dim % 8:
        notes.append(f"Head size {m.head_dim} is not a multiple of 8: attention's matrix multiplications run several times slower.")
    if m.vocab % 64 and r.precision.compute != "fp32":
        notes.append(f"Vocabulary {m.vocab} is not a multiple of 64: the output matrix runs on slow kernels; pad it to {-(-m.vocab // 64) * 64}.")
    if p.zero in (1, 2) and p.framework == "pytorch" and p.dp == 1:
        notes.append(f"ZeRO-{p.zero} over one rank shards nothing.")
    if p.cp > 1 and r.causal and p.cp_kind != "ulysses" and not p.cp_balance:
        notes.append(f"Of the {p.cp} ranks that share a sequence the last has {(2 * p.cp - 1) / p.cp:.3g} times the mean of causal attention, and the others "
                     "wait for it: cp_balance = true gives each the same.")
    if p.zero == 3 and p.framework == "pytorch" and r.grad_accum > 1 and not p.sync_each_micro_batch:
        notes.append("Accumulating under FSDP without reducing keeps whole gradients in the reduce dtype on every rank.")
    if resolved_attention(run) == "math" and r.attention == "sdpa" and run.cluster.accelerator.kernel_table == "cuda":
        notes.append(f"scaled_dot_product_attention has no fused kernel for {r.precision.compute} with grouped queries or this head size: it takes the "
                     "composed one, which keeps the score matrix.")
    if unread := _unread(run, program.strategy):
        notes.append(f"Given, but nothing here reads it: {', '.join(unread)}.")
    if c.mode == "full" and max(c.group, c.every) > m.layers:
        word = "group" if c.group > m.layers else "every"
        notes.append(f"plan.checkpointing.{word} = {max(c.group, c.every)} is more than the {m.layers} layers: it does what {m.layers} does.")
    if m.attention_pattern != "global" and not m.sliding_window:
        notes.append("Attention is counted as global in every layer.")
    return notes


def _unread(run: Run, strategy: Strategy) -> list[str]:
    """Fields set to something else than their default that change nothing in this run."""
    m, p, r, c = run.model, run.plan, run.recipe, run.plan.checkpointing
    plain = {name: field.default for name, field in Plan.model_fields.items()}
    alone = [name for name, degree in (("schedule", p.pp), ("tp_overlap", p.tp), ("cp_kind", p.cp), ("cp_balance", p.cp), ("ep_overlap", p.ep),
                                       ("ep_dispatcher", p.ep * p.tp)) if degree == 1]
    fields = [f"plan.{name}" for name in (*alone, *OPTIONAL) if getattr(p, name) != plain[name] and name not in strategy.reads]
    chunks = min(Recipe.model_fields["loss_chunks"].default, r.micro_batch * r.seq_len)
    return fields + [field for field, unread in (
        ("plan.checkpointing.group", c.group > 1 and c.mode != "full"),
        ("plan.checkpointing.every", c.every > 1 and c.mode != "full"),
        ("plan.checkpointing.ops", c.ops and c.mode != "selective"),
        ("recipe.grad_accum_fusion", r.grad_accum_fusion and strategy.name not in ("megatron", "megatron-fsdp")),
        ("recipe.loss_chunks", r.loss_chunks != chunks and r.loss not in ("chunked", "fused")),
        ("recipe.moe_imbalance", r.moe_imbalance > 1 and (p.ep == 1 or r.moe_capacity_factor is not None)),
        ("recipe.moe_capacity_factor", r.moe_capacity_factor and not m.moe)) if unread]


def _uneven(run: Run, times: list[TimeReport]) -> list[str]:
    """A pipeline waits for its slowest rank: said where that works a tenth longer than the mean."""
    if run.plan.pp == 1:
        return []
    work = [t.step_s - (t.bubble_s or 0.0) for t in times]
    slowest, mean = max(range(len(work)), key=work.__getitem__), sum(work) / len(work)
    if work[slowest] <= 1.1 * mean:
        return []
    return [f"Pipeline rank {slowest} works {100 * (work[slowest] / mean - 1):.0f}% longer than the mean, and the others wait for it: give it fewer layers "
            "with plan.stage_layers."]


def _what_if(run: Run, program: Program, late: dict[int, float]) -> list[str]:
    """What a slow rank costs, and where it costs most and least; links that are said to be slow and are not there."""
    notes = []
    if late:
        most, least = max(late, key=late.__getitem__), min(late, key=late.__getitem__)
        cost = f"One rank that computes {run.cluster.slow_rank:g} times slower makes every step {1e3 * late[most]:.3g} ms longer"
        if late[most] > late[least] * 1.01:
            names = [program.roles[i].role for i in (most, least)]
            cost += f" where it is on {names[0]}, as is counted here; on {names[1]}, {1e3 * late[least]:.3g} ms"
        notes.append(f"{cost}.")
    here = {name for level in run.cluster.levels for name in (level.name, level.kind, "inter" if level.kind in NETWORKS else "intra")}
    notes += [f"cluster.link_factors: this run has no {name} link." for name in run.cluster.link_factors if name not in here]
    return notes


def _basis(profile: Profile, run: Run) -> dict[str, Basis]:
    checked = run.plan.framework in ("pytorch", "nanochat") and not run.plan.single_process
    time: Basis = "guess" if profile.guess else "fitted"
    return {"states": "exact" if checked else "modelled", "allocated": "modelled", "reserved": "fitted", "device": "fitted",
            "collectives": "exact" if checked else "modelled", "time": time, "model_flops": "exact"}
