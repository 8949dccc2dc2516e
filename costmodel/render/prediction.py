"""A prediction as a text: what was assumed, the batch, whether it fits, memory, time, communication, what bounds the step."""

from collections.abc import Callable, Sequence

from costmodel.render.listing import billions
from costmodel.render.text import Page, Style
from costmodel.render.units import count, duration, long_time, plural, rate, share, size
from costmodel.render.words import moment
from costmodel.report import CATEGORIES, Collective, MemoryReport, RoleReport, StepReport, TimeReport
from costmodel.spec import Cluster, Plan, Recipe, Run
from costmodel.spec.parameters import active_parameter_count

PHASES = ("forward", "backward", "recompute", "reduce", "optimizer", "gather")
"""The order in which phases are shown; others follow."""
BASIS_WORDS = {"exact": "counted", "modelled": "walked through the program", "fitted": "calibrated on measurements", "guess": "data sheets only"}
FRAMEWORKS = {"pytorch": "PyTorch", "deepspeed": "DeepSpeed", "megatron": "Megatron", "nanochat": "nanochat"}

_STYLE: dict[str, Style] = {"fits": "green", "risky": "yellow", "does not fit": "red", "unknown": ""}


def render(run: Run, assumed: Sequence[tuple[str, str]], report: StepReport, profile: str, page: Page,
           fit: Callable[[Page], None] | None = None) -> str:
    """The whole text of one prediction. assumed: for each figure not given, how to give it, and what was taken and why; fit: writes the
    section on what would make it fit."""
    page.line(title(run), "bold")
    _assumed(assumed, page)
    _run(run, profile, page)
    fullest = report.fullest
    if fullest.memory:
        _verdict(report, fullest, page)
        if fit is not None:
            fit(page)
        _memory(report, fullest, fullest.memory, page)
    if len(report.roles) > 1:
        _roles(report, page)
    slowest = max((r for r in report.roles if r.time), key=lambda r: r.time.step_s if r.time else 0.0, default=None)
    if slowest and slowest.time:
        _time(report, slowest, slowest.time, page)
    _training(run, report, page)
    talker = slowest or fullest
    if talker.collectives is not None:
        _communication(report, talker, talker.collectives, page)
    _scaling(report, page)
    if report.bound_by:
        page.heading("BOUND BY")
        page.line(report.bound_by, indent="  ")
    if report.notes:
        page.heading("NOTES")
        page.bullets(report.notes)
    _basis(report, page)
    page.heading("IN SHORT")
    page.line(in_short(report), _STYLE[report.verdict], "  ")
    return str(page)


def in_short(report: StepReport) -> str:
    """The answer on a line or two."""
    memory = report.fullest.memory
    parts = [verdict_sentence(report.verdict, memory)] if memory else []
    if report.step_s is not None:
        parts.append(f"{duration(report.step_s)} a step")
    if report.tokens_per_s_per_gpu is not None:
        parts.append(f"{count(report.tokens_per_s)} tokens/s ({count(report.tokens_per_s_per_gpu)} per GPU)")
    if report.mfu is not None:
        parts.append(f"MFU {share(report.mfu)}")
    return "; ".join(parts) + "."


def title(run: Run) -> str:
    c = run.cluster
    return f"{run.model.name} on {c.gpus:,} x {c.accelerator.name}: {strategy_name(run.plan)}, {run.recipe.precision.name}"


def strategy_name(plan: Plan) -> str:
    """The plan's way of spreading work, in the field's words."""
    if plan.single_process:
        parts = ["DataParallel (one process)"]
    elif plan.dp_shard * plan.cp > 1 and plan.zero == 3 and plan.framework == "pytorch":
        parts = ["HSDP (FSDP2 within, replicas across)" if plan.dp_replicate > 1 else "FSDP2 (ZeRO-3)"]
    elif plan.framework == "nanochat":
        parts = ["nanochat's sharded Muon and AdamW" if plan.dp > 1 else "nanochat on a single GPU"]
    elif plan.framework == "megatron" and plan.zero == 3:
        parts = [f"Megatron-FSDP{', replicas across' if plan.dp_replicate > 1 else ''}"]
    elif plan.zero:
        parts = [f"{FRAMEWORKS[plan.framework]} ZeRO-{plan.zero}" if plan.framework != "megatron" else
                 f"Megatron distributed optimizer{f' in {plan.dp_replicate} instances' if plan.dp_replicate > 1 else ''}"]
    else:
        parts = ["DDP" if plan.dp > 1 else "no data parallelism" if plan.world_size > 1 else "single GPU"]
        if plan.framework != "pytorch":
            parts[0] = f"{FRAMEWORKS[plan.framework]} {parts[0]}"
    parts += [f"{name} {degree}" for name, degree in (("tp", plan.tp), ("pp", plan.pp), ("cp", plan.cp), ("ep", plan.ep)) if degree > 1]
    return " + ".join(parts)


def _assumed(assumed: Sequence[tuple[str, str]], page: Page) -> None:
    if assumed:
        page.heading("ASSUMED", "not given, so chosen; the option beside each one changes it")
        page.pairs(assumed)


def _run(run: Run, profile: str, page: Page) -> None:
    page.heading("RUN")
    page.pairs([
        ("model", _model(run)),
        ("machines", _machines(run.cluster)),
        *([("what if", what_if(run.cluster))] if what_if(run.cluster) else []),
        ("ranks", _ranks(run.plan)),
        ("batch", _batch(run)),
        ("numbers", _numbers(run.recipe)),
        ("optimizer", _optimizer(run.recipe)),
        ("kernels", _kernels(run)),
        ("checkpointing", checkpointing(run.plan)),
        *([("profile", profile)] if profile else []),
    ])


def _model(run: Run) -> str:
    m = run.model
    heads = f"{m.heads} heads" + (f" ({m.kv_heads} KV)" if m.kv_heads != m.heads else "")
    if m.shape_rule:
        return f"{m.name}, the shape above, {m.norm}, {m.positions}{', gated' if m.gated else ''} = {m.params:,} parameters"
    width, used = f"ffn {m.ffn}", ""
    if m.moe is not None:
        width = f"{m.moe.top_k} of {m.moe.experts} experts of {m.moe.expert_ffn}" + (f" and a shared {m.moe.shared_ffn}" if m.moe.shared_ffn else "")
        used = f", of which a token uses {active_parameter_count(m):,}"
    return (f"{m.name}: {m.layers} layers, hidden {m.hidden}, {width}{' gated' if m.gated else ''}, {heads} of {m.head_dim}, "
            f"vocabulary {m.vocab} {'tied' if m.tied_embeddings else 'untied'}, {m.norm}, {m.positions} = {m.params:,} parameters{used}")


def _machines(c: Cluster) -> str:
    links = "; ".join(f"{level.kind} {rate(level.bytes_per_s)} one way per GPU among {level.domain}" for level in c.levels)
    return (f"{c.gpus:,} x {c.accelerator.name} of {size(c.accelerator.memory_bytes)} in {plural(c.nodes, 'node')} of {c.gpus_in_node} ({c.name})"
            + (f"; {links}" if links else ""))


def what_if(c: Cluster) -> str:
    """A slow rank and slow links, in words; empty where there are none."""
    parts = [f"one rank computes {c.slow_rank:g} times slower"] if c.slow_rank > 1 else []
    parts += [f"{name} links at {factor:g} of their rate" for name, factor in c.link_factors.items()]
    return ", ".join(parts)


def _ranks(p: Plan) -> str:
    degrees = f"dp {p.dp} (replicate {p.dp_replicate} x shard {p.dp_shard}) x cp {p.cp} x tp {p.tp} x pp {p.pp} = {p.world_size}"
    extra = [word for word, on in (("sequence parallel", p.sequence_parallel), (f"{p.cp_kind} attention", p.cp > 1),
                                   (f"{p.schedule}, {plural(p.virtual_stages, 'stage')} a rank", p.pp > 1), (f"ep {p.ep}", p.ep > 1),
                                   (f"{p.offload} offloaded", p.offload != "none"), ("activations offloaded", p.activation_offload)) if on]
    return "; ".join([degrees, *extra])


def _batch(run: Run) -> str:
    r, dp = run.recipe, run.plan.dp
    return (f"micro-batch {r.micro_batch} x accumulation {r.grad_accum} x dp {dp} = {plural(r.global_batch, 'sequence')} "
            f"x {r.seq_len:,} tokens = {run.tokens_per_step:,} tokens a step")


def _numbers(r: Recipe) -> str:
    p = r.precision
    parts = [f"parameters {p.parameter}", f"compute {p.compute}", f"gradients {p.gradient}", f"reduced in {p.reduce}",
             f"master copy {p.master}" if p.master else "no master copy", f"optimizer state {p.optimizer_state}"]
    parts += [word for word, on in (("autocast", p.autocast), ("loss scaling", p.loss_scaling), (f"fp8 {p.fp8_recipe}", p.fp8_recipe != "none")) if on]
    return f"{p.name}: " + ", ".join(parts)


def _optimizer(r: Recipe) -> str:
    return f"{r.optimizer.name}, {r.optimizer.implementation}; gradient clipping {r.clip_norm or 'off'}"


def _kernels(run: Run) -> str:
    r, p = run.recipe, run.plan
    loss = f"{r.loss} in {plural(r.loss_chunks, 'chunk')}" if r.loss == "chunked" else r.loss
    parts = [f"attention {r.attention}{' causal' if r.causal else ''}", f"loss {loss}", f"compile {_on(r.compile)}",
             f"CUDA graphs {_on(r.cuda_graphs)}", f"allocator {r.allocator}", f"gradient-accumulation fusion {_on(r.grad_accum_fusion)}",
             f"dropout {r.dropout:g}"]
    return ", ".join(parts + ([f"tp overlap {p.tp_overlap}"] if p.tp > 1 else []))


def _on(flag: bool) -> str:
    return "on" if flag else "off"


def checkpointing(p: Plan) -> str:
    c = p.checkpointing
    if c.mode == "full":
        return "full" + (f", groups of {c.group} layers" if c.group > 1 else "") + (f", each {c.every}. layer" if c.every > 1 else "")
    return f"selective ({', '.join(c.ops) or 'attention'})" if c.mode == "selective" else "none"


def _verdict(report: StepReport, role: RoleReport, page: Page) -> None:
    worst = max((r for r in report.roles if r.memory), key=lambda r: (r.memory.verdict == report.verdict, _used(r.memory)) if r.memory else (False, 0))
    memory = worst.memory
    assert memory is not None
    page.heading("VERDICT")
    page.line(verdict_sentence(report.verdict, memory), _STYLE[report.verdict], "  ")
    page.line(f"highest on {_who(worst, report)}, at the moment of: {moment(memory.allocated.moment)}", indent="  ")


def _used(memory: MemoryReport | None) -> int:
    return 0 if memory is None else memory.device_bytes or memory.reserved_bytes or memory.allocated.total_bytes


def verdict_sentence(verdict: str, memory: MemoryReport) -> str:
    """fits / risky / does not fit, and by how much."""
    capacity, room = memory.capacity_bytes, memory.headroom_bytes
    needs = f"{size(_used(memory))} of {size(capacity)}" if capacity else f"{size(_used(memory))}; the device's capacity is not known"
    if room is None and capacity:
        room = capacity - _used(memory)
    if room is None:
        return f"{verdict}: needs {needs}"
    if verdict == "risky" and room < 0:
        return f"risky: live tensors fit, but with the allocator's slack it needs {needs}, {size(-room)} too much"
    return f"{verdict}: needs {needs}, " + (f"{size(room)} to spare" if room >= 0 else f"{size(-room)} too much")


def _who(role: RoleReport, report: StepReport) -> str:
    if role.ranks == report.world_size:
        return f"each of the {role.ranks:,} ranks" if role.ranks > 1 else "the one rank"
    return f"{role.role} ({plural(role.ranks, 'rank')}, such as rank {role.example_rank})"


def _memory(report: StepReport, role: RoleReport, memory: MemoryReport, page: Page) -> None:
    peak = memory.allocated
    page.heading("MEMORY", f"of {_who(role, report)}")
    rows = []
    for name in [*CATEGORIES, *(k for k in peak.by_category if k not in CATEGORIES)]:
        at_peak, kept = peak.by_category.get(name, 0), memory.states.get(name, 0)
        if at_peak or kept:
            rows.append([name.replace("_", " "), size(at_peak), share(at_peak, peak.total_bytes), size(kept) if kept else "-"])
    rows.append(["allocated", size(peak.total_bytes), share(1.0), size(sum(memory.states.values()))])
    page.table(["category", "at the peak", "share", "model state"], rows, "<>>>", bold_last=True)
    page.line()
    page.table(["phase", "peak", "at the moment of"], [[name, size(p.total_bytes), moment(p.moment)] for name, p in memory.phases.items()], "<><")
    page.line()
    outside = ", ".join(f"{name} {size(n)}" for name, n in memory.outside.items() if n)
    figures = [["allocated", size(peak.total_bytes), "live tensors (max_memory_allocated)"]]
    if memory.reserved_bytes is not None:
        inside = f"; with {size(memory.workspace_bytes)} of workspaces" if memory.workspace_bytes else ""
        figures.append(["reserved", size(memory.reserved_bytes), "held by the caching allocator (max_memory_reserved)" + inside])
    if memory.device_bytes is not None:
        figures.append(["device total", size(memory.device_bytes), "what nvidia-smi shows" + (f"; also {outside}" if outside else "")])
    if memory.capacity_bytes is not None:
        figures.append(["capacity", size(memory.capacity_bytes), f"{share(_used(memory), memory.capacity_bytes)} used"])
    page.table(["figure", "bytes", "what it counts"], figures, "<><")


def _roles(report: StepReport, page: Page) -> None:
    page.heading("RANK ROLES", "ranks that run the same program")
    rows = [[r.role, count(r.ranks), size(r.memory.allocated.total_bytes) if r.memory else "-", duration(r.time.step_s) if r.time else "-",
             r.memory.verdict if r.memory else "-"] for r in report.roles]
    page.table(["role", "ranks", "allocated", "step", "verdict"], rows, "<>>><")


def _time(report: StepReport, role: RoleReport, time: TimeReport, page: Page) -> None:
    page.heading("TIME", f"of one step on {_who(role, report)}")
    step = duration(time.step_s)
    if report.interval and "step_s" in report.interval:
        low, high = report.interval["step_s"]
        step += f" (80% interval {duration(low)} to {duration(high)})"
    rows = [("step", step)]
    if report.tokens_per_s and report.tokens_per_s_per_gpu:
        rows.append(("tokens/s", f"{count(report.tokens_per_s)} ({count(report.tokens_per_s_per_gpu)} per GPU)"))
    if report.mfu is not None and report.peak_flops_per_s:
        hfu = f", HFU {share(report.hfu)} (with recompute)" if report.hfu is not None else ""
        rows.append(("MFU", f"{share(report.mfu)}{hfu} of the {report.peak_flops_per_s / 1e12:,.4g} TFLOP/s peak"))
    if time.host_s is not None:
        rows.append(("host", f"{duration(time.host_s)} to issue the work"))
    page.pairs(rows)
    page.line()
    order = {name: i for i, name in enumerate(PHASES)}
    phases = sorted(time.phases.items(), key=lambda kv: order.get(kv[0], len(order)))
    page.table(["phase", "time", "share"], [[k, duration(v), share(v, time.step_s)] for k, v in phases if v], "<>>")
    page.line()
    parts = sorted(((k, v) for k, v in time.breakdown.items() if v > 0), key=lambda kv: -kv[1])
    bar = max(0, min(40, page.width - 50))
    page.table(["what the GPU did", "time", "share", ""], [[k.replace("_", " "), duration(v), share(v, time.step_s),
                                                           "#" * round(bar * v / time.step_s)] for k, v in parts], "<>><")


def _training(run: Run, report: StepReport, page: Page) -> None:
    t = report.training(run.recipe.train_tokens) if run.recipe.train_tokens else None
    if t is None:
        return
    page.heading("TRAINING", f"on {billions(t.tokens)} tokens; steps alone, without restarts, evaluation, saving")
    low_high = f" (80% interval {' to '.join(long_time(days * 86400) for days in t.interval_days)})" if t.interval_days else ""
    page.pairs([("steps", f"{count(t.steps)} of {count(report.tokens_per_step)} tokens"), ("time", long_time(t.seconds) + low_high),
                ("GPU-hours", count(t.gpu_hours))])


def _communication(report: StepReport, role: RoleReport, collectives: tuple[Collective, ...], page: Page) -> None:
    time = role.time
    total, exposed = (sum(time.communication_s.values()), sum(time.exposed_s.values())) if time else (None, None)
    page.heading("COMMUNICATION", f"of one step on {_who(role, report)}")
    if not collectives:
        page.line("none: nothing is exchanged between ranks", indent="  ")
        return
    wide = page.width >= 100
    header = ["collective", "group", "phase", "count", "each", *(["all"] if wide else []), "time"]
    rows = [[f"{c.kind} {c.dtype}", f"{c.axis} {c.group}", c.phase, count(c.count), size(c.message_bytes),
             *([size(c.count * c.message_bytes)] if wide else []), duration(c.total_s)] for c in collectives]
    page.table(header, rows, "<<<" + ">" * (len(header) - 3))
    if time and total is not None:
        by_axis = "; ".join(f"{axis} {duration(s)}, exposed {duration(time.exposed_s.get(axis, 0.0))}" for axis, s in time.communication_s.items())
        page.line()
        page.pairs([("total", f"{duration(total)}, of which the GPU waited for {duration(exposed)} ({share(exposed, time.step_s)} of the step)"),
                    *([("by axis", by_axis)] if len(time.communication_s) > 1 else [])])


def _scaling(report: StepReport, page: Page) -> None:
    s = report.scaling
    if s is None or (s.weak is None and s.strong is None):
        return
    page.heading("SCALING", "against one GPU of the same kind, its capacity ignored")
    fits = {True: "", False: "; it would not fit in memory", None: ""}[s.baseline_fits]
    rows = []
    if s.weak is not None:
        rows.append(("weak", f"{share(s.weak)} (same micro-batch per GPU)"))
    if s.strong is not None:
        rows.append(("strong", f"{share(s.strong)} (same global batch)"))
    if s.baseline_step_s is not None:
        rows.append(("one GPU", f"{duration(s.baseline_step_s)} a step{fits}"))
    page.pairs(rows)


def notes(report: StepReport, page: Page) -> None:
    """A prediction's notes, after what was made of it; and whether the run would run at all."""
    said = [*(["It would not fit in memory: `costmodel solve` says what would."] if report.verdict == "does not fit" else []), *report.notes]
    if said:
        page.heading("NOTES")
        page.bullets(said)


def _basis(report: StepReport, page: Page) -> None:
    if not report.basis:
        return
    kinds: dict[str, list[str]] = {}
    for name, basis in report.basis.items():
        kinds.setdefault(basis, []).append(name.replace("_", " "))
    page.heading("HOW SURE")
    page.pairs([(kind, f"{', '.join(kinds[kind])} ({why})") for kind, why in BASIS_WORDS.items() if kind in kinds])
