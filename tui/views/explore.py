"""Explore: does it fit, where the memory is, where the time goes, what bounds the step, and the one change that would help."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from costmodel.render.units import count, duration, share
from costmodel.render.words import moment
from costmodel.report import MemoryReport, RoleReport, StepReport, TimeReport
from costmodel.spec import PlanError, Run
from costmodel.waterfall import Bar, Waterfall, waterfall
from tui.bars import CAPACITY_AT, Parts, against, stacked, styled
from tui.fields import BY_PATH, LAST_NAMES, shown
from tui.lines import Line, Span, bold, dim, fitted, flowed, length, line, text_of, wrapped
from tui.propose import Proposals, Rested
from tui.state import State
from tui.views.pipeline import pipeline_map

GIB = 1 << 30
MEMORY: tuple[tuple[str, str, str], ...] = (
    ("P", "parameters", "param"), ("G", "gradients", "grad"), ("M", "master_weights", "master"), ("O", "optimizer", "optim"),
    ("A", "activations", "activ"), ("C", "communication", "comm"), ("T", "temporaries", "temp"), ("F", "framework", "frame"),
    ("S", "slack", "pool slack"), ("X", "outside", "context+NCCL"))
"""Letter, category, short word. The pool's slack and what lies outside the allocator complete what the device holds."""
WORK: tuple[tuple[str, str, str], ...] = (
    ("M", "matmul", "matmul"), ("A", "attention", "attention"), ("E", "memory-bound", "mem-bound"), ("R", "recompute", "recompute"),
    ("t", "exposed tp", "tp wait"), ("d", "exposed dp_shard", "shard wait"), ("r", "exposed dp_replicate", "replica wait"), ("p", "exposed pp", "pp wait"),
    ("e", "exposed embedding", "tied wait"), ("k", "contention", "contention"), ("h", "host wait", "host wait"), ("·", "bubble", "bubble"),
    ("O", "optimizer", "optim"), ("s", "stragglers", "strag"), ("w", "slow rank", "slow rank"), ("f", "fixed", "fixed"))
PHASES: tuple[tuple[str, str, str], ...] = (
    ("F", "forward", "fwd"), ("R", "recompute", "recomp"), ("B", "backward", "bwd"), ("·", "bubble", "bubble"), ("O", "optimizer", "optim"),
    ("s", "stragglers", "strag"), ("w", "slow rank", "slow rank"), ("f", "fixed", "fixed"))
SHORT_ROLES = {"every rank": "all", "fullest shard": "most", "emptiest shard": "least"}
SECONDS_FROM = 5.0
"""Steps from here on are written in seconds, shorter ones in milliseconds."""
SHOWN_SHARE = 0.002
"""Parts of the step below it have no cell in the bar, and no figure below it."""
SMALL_LOSS = 0.03
"""Of MFU: below it, losses join in one bar where rows are scarce."""


class Size(NamedTuple):
    """What fits on the pane."""

    width: int
    height: int

    @property
    def compact(self) -> bool:
        return self.height < 30

    @property
    def roles(self) -> int:
        """Rows kept for rank roles, whatever the run."""
        return 3 if self.height < 18 else 4 if self.height < 30 else 6 if self.height < 45 else 8


def explore(state: State, rested: Rested | None, size: Size) -> list[Line]:
    """The whole pane, at most `size.height` lines."""
    report = state.report
    gap: list[Line] = [] if size.compact else [[]]
    out = [*verdict(state, rested, size), *gap, *memory(report, size), *gap]
    slowest = max((r for r in report.roles if r.time), key=lambda r: r.time.step_s if r.time else 0.0, default=None)
    if slowest and slowest.time:
        out += [*step(slowest.time, size), *gap]
    end = bound(state, rested.proposals if rested else None, size)
    room = size.height - len(out) - len(end)
    out += losses(state, size, room)
    room = size.height - len(out) - len(end) - 1
    if room >= 5 and slowest is not None:
        end += [[], *(pipeline_map(state.run, None, 1.0, size.width, room) or traffic(slowest, size.width, room))]
    return [fitted(row, size.width) for row in [*out, *end]][:size.height]


# -- verdict -----------------------------------------------------------------------------------------------------------------


def role_name(role: RoleReport) -> str:
    """pp0 for pipeline rank 0; `all` where every rank runs one program."""
    return SHORT_ROLES.get(role.role, role.role.replace("pipeline rank ", "pp"))


def gib(n_bytes: float) -> str:
    return f"{n_bytes / GIB:,.1f}"


def held(memory: MemoryReport) -> int:
    """What the verdict lays beside the capacity."""
    return memory.device_bytes or memory.reserved_bytes or memory.allocated.total_bytes


def verdict(state: State, rested: Rested | None, size: Size) -> list[Line]:
    """Three rows, whatever there is to say."""
    if state.problem:
        return invalid(state, size)
    report = state.report
    fullest = max((r for r in report.roles if r.memory), key=lambda r: held(r.memory) if r.memory else 0, default=None)
    rows: list[Line] = []
    if fullest and fullest.memory:
        m = fullest.memory
        word, style = {"fits": ("FITS", "fits"), "risky": ("RISKY", "risky"), "does not fit": ("DOES NOT FIT", "invalid")}.get(
            report.verdict, ("UNKNOWN", "dim"))
        needs = f"{gib(held(m))} of {gib(m.capacity_bytes)} GiB" if m.capacity_bytes else f"{gib(held(m))} GiB"
        where = [Span(f" on {role_name(fullest)}  "), _room(m.headroom_bytes, bold_too=True)]
        if m.host and m.host.verdict == report.verdict == "does not fit" and (m.headroom_bytes or 0) >= 0:
            needs, where = f"{gib(m.host.node_bytes or 0)} of {gib(m.host.capacity_bytes or 0)} GiB", [Span(" of a host")]
        rows.append([Span(f" {word} ", style), bold(f"  {needs}"), *where])
    if report.step_s is not None:
        mfu = f"  MFU {share(report.mfu)}" if report.mfu is not None else ""
        hfu = f"  HFU {share(report.hfu)}" if report.hfu is not None and report.hfu != report.mfu and size.width > 60 else ""
        sure = dim(within(rested.report if rested else None))
        rows.append([bold(f"step {duration(report.step_s)}"), sure, Span(f"  {_thousands(report.tokens_per_s)} tok/s"), bold(mfu), dim(hfu)])
    return [*rows, batch_row(state.run, rested.report if rested else None, size)]


def batch_row(run: Run, report: StepReport | None, size: Size) -> Line:
    """The batch and the degrees; beside them the weak-scaling efficiency, once it is known."""
    p, batch = run.plan, run.recipe.global_batch
    degrees = " x ".join(f"{name} {n}" for name, n in (("dp", p.dp), ("tp", p.tp), ("pp", p.pp)) if n > 1 or name == "dp")
    if size.compact:
        return [dim(f"{batch:,} seqs = {run.tokens_per_step:,} tokens · {degrees}")]
    scaling = report.scaling if report else None
    weak = f" · weak {share(scaling.weak)}" if scaling and scaling.weak and p.world_size > 1 else ""
    return [dim(f"{batch:,} sequences = {run.tokens_per_step:,} tokens a step · {degrees} = {p.world_size:,}{weak}")]


def within(report: StepReport | None) -> str:
    """How far the constants' uncertainty moves the step, as half of its 80% interval."""
    if report is None or not report.interval or "step_s" not in report.interval or not report.step_s:
        return ""
    low, high = report.interval["step_s"]
    return f" ±{(high - low) / 2 / report.step_s:.0%}"


def invalid(state: State, size: Size) -> list[Line]:
    """The rule that a change breaks, and what would do."""
    assert state.problem is not None
    error = state.problem.error
    rule = wrapped(f"{said(error.field, error.value)}: {error.rule}", size.width - 10, 2)
    rows: list[Line] = [[Span(" INVALID ", "invalid"), Span(" "), *rule[0]]]
    rows.append([Span(" " * 10), *rule[1]] if len(rule) > 1 else [Span(" " * 10), dim(error.fix)])
    if state.problem.repair is not None:
        words = ", ".join(said(path, value) for path, value in state.problem.repair.items())
        rows.append([Span(" s ", "key", "app.propose"), bold(f" {words}"), Span(" is whole", "good"),
                     *([] if size.compact else [dim("   u the last valid run, shown below")])])
    else:
        rows.append([dim(error.fix if len(rule) > 1 else "u back to the last valid run, which is shown below")])
    return rows


def said(path: str, value: object) -> str:
    """A field with its value, as the form names it."""
    field = BY_PATH.get(path) or BY_PATH.get(LAST_NAMES.get(path, ""))
    name = field.label if field else path.rpartition(".")[2]
    text = str(value)
    return text if " = " in text else name if value is None else f"{name} = {shown(value)}"


def _room(headroom: int | None, bold_too: bool = False) -> Span:
    if headroom is None:
        return Span("")
    style = "good" if headroom >= 0 else "bad"
    return Span(f"{headroom / GIB:+,.1f}", f"{style} bold" if bold_too else style)


def _thousands(n: float | None) -> str:
    if n is None:
        return "-"
    return f"{n / 1e6:,.2f}M" if n >= 1e6 else f"{n / 1e3:,.0f}k" if n >= 1e4 else count(n)


# -- memory ------------------------------------------------------------------------------------------------------------------


def parts_of(m: MemoryReport) -> Parts:
    """What a device holds at its peak, by letter: live tensors by category, the pool's slack, what lies outside the allocator."""
    by = m.allocated.by_category
    slack = max(0, (m.reserved_bytes or m.allocated.total_bytes) - m.allocated.total_bytes)
    extra = {"slack": slack, "outside": sum(m.outside.values())}
    return [(letter, extra[name] if name in extra else by.get(name, 0)) for letter, name, _ in MEMORY]


def memory(report: StepReport, size: Size) -> list[Line]:
    """A bar for each rank role against the capacity; where rows are left, also the fullest one's peak in each phase."""
    roles = [r for r in report.roles if r.memory]
    if not roles:
        return []
    fullest = max(roles, key=lambda r: held(r.memory) if r.memory else 0)
    assert fullest.memory is not None
    capacity = fullest.memory.capacity_bytes or held(fullest.memory)
    bar = size.width - 11 - 13
    head: Line = [Span("MEMORY", "head"), dim(" GiB" if size.compact else " GiB at the peak")]
    cap = f"cap {gib(capacity)} ▾"
    head += [Span(" " * max(1, 12 + int(bar * CAPACITY_AT) - length(head) - len(cap))), dim(cap)]
    rows = [head]
    shown_roles, hidden = folded(roles, fullest, size.roles)
    for role in shown_roles:
        if role is None:
            rows.append([dim(f" … {hidden} more between")])
            continue
        m = role.memory
        assert m is not None
        name = f"{role_name(role)} x{role.ranks}" if len(roles) > 1 or role.ranks > 1 else role_name(role)
        mark = "▸" if role is fullest and len(roles) > 1 else " "
        rows.append([Span(f"{mark}{name:<10}"[:11], "bold" if role is fullest else ""), *against(parts_of(m), bar, capacity, "m-"),
                     Span(f"{gib(held(m)):>7} ", "bold"), Span(f"{(m.headroom_bytes or 0) / GIB:+,.1f}".rjust(5),
                                                               "good" if (m.headroom_bytes or 0) >= 0 else "bad")])
    if len(roles) < size.roles:
        for phase, peak in list(fullest.memory.phases.items())[:size.roles - len(roles)]:
            letters = [(letter, peak.by_category.get(name, 0)) for letter, name, _ in MEMORY]
            rows.append([dim(f" {phase.removesuffix(' step'):<10}"[:11]), *against(letters, bar, capacity, "m-"), dim(f"{gib(peak.total_bytes):>7}")])
    rows += [[] for _ in range(size.roles + 1 - len(rows))]
    shares = [(letter, value / GIB) for letter, value in parts_of(fullest.memory) if value >= GIB / 20]
    rows += legend(shares, _words(MEMORY), "m-", size.width, 1 if size.compact else 2, 0, size.compact)
    rows += [[]] if not size.compact and len(rows) < size.roles + 3 else []
    host = fullest.memory.host
    apart = f"host {gib(host.node_bytes or 0)}{f' of {gib(host.capacity_bytes)}' if host.capacity_bytes else ''} GiB a node; " if host else ""
    rows.append(line(dim("moment "), f"{apart}{role_name(fullest)}, {moment(fullest.memory.allocated.moment)}"))
    return rows


def folded(roles: Sequence[RoleReport], fullest: RoleReport, limit: int) -> tuple[list[RoleReport | None], int]:
    """At most `limit` roles: the first ones, the fullest and the last; None stands for those between."""
    if len(roles) <= limit:
        return list(roles), 0
    keep: list[RoleReport | None] = list(roles[:limit - 2])
    if fullest not in keep and fullest is not roles[-1]:
        keep[-1] = fullest
    return [*keep, None, roles[-1]], len(roles) - limit + 1


# -- time --------------------------------------------------------------------------------------------------------------------


def step(time: TimeReport, size: Size) -> list[Line]:
    """The step of the slowest rank, by what the GPU did and (where there is room) by phase; both bars are the whole step."""
    known = {name for _, name, _ in WORK}
    other = sum(s for name, s in time.breakdown.items() if name not in known)
    work = [(letter, time.breakdown.get(name, 0.0)) for letter, name, _ in WORK]
    work[-1] = ("f", work[-1][1] + other)
    bar = size.width - 9
    scale, unit = (1.0, "s ") if time.step_s >= SECONDS_FROM else (1e3, "ms")
    rows: list[Line] = []
    if not size.compact:
        phases = [(letter, time.phases.get(name, 0.0)) for letter, name, _ in PHASES]
        rest = sum(time.phases.values()) - sum(s for _, s in phases)
        phases[-1] = ("f", phases[-1][1] + max(0.0, rest))
        rows.append([Span("STEP", "head"), dim(f" {unit}  "), *stacked(phases, bar, time.step_s, "p-")])
        rows += legend(_scaled(phases, scale, SHOWN_SHARE), _words(PHASES), "p-", size.width, 1, 9, False)
    head = [Span("STEP", "head"), dim(f" {unit}  ")] if size.compact else [dim("   work  ")]
    rows.append([*head, *stacked(work, bar, time.step_s, "t-")])
    least = SHOWN_SHARE * (3 if size.compact else 1)
    below = legend(_scaled(work, scale, least), _words(WORK), "t-", size.width, 1 if size.compact else 2, 0 if size.compact else 9, size.compact)
    return [*rows, *below, *([[]] if not size.compact and len(below) == 1 else [])]


def _scaled(parts: Parts, scale: float, least: float) -> Parts:
    """In the unit of the bar; what no bar could show is left out."""
    whole = sum(seconds for _, seconds in parts)
    return [(letter, scale * seconds) for letter, seconds in parts if seconds > least * whole]


def _words(table: Sequence[tuple[str, str, str]]) -> dict[str, str]:
    return {letter: word for letter, _, word in table}


def legend(parts: Parts, words: Mapping[str, str], prefix: str, width: int, rows: int, indent: int, compact: bool) -> list[Line]:
    """The parts of a bar with their figures: in words where they fit, close together, else by their letters alone."""
    out: list[Line] = []
    for gap, said in (((1, False),) if compact else ((2, True), (1, True), (1, False))):
        items = [[Span(letter, styled(prefix, letter)), Span(f" {words[letter]} {ms(value)}" if said else ms(value))] for letter, value in parts]
        out = flowed(items, width, rows, gap=gap, indent=indent)
        if not text_of(out[-1]).endswith("…"):
            break
    return out


def traffic(role: RoleReport, width: int, rows: int) -> list[Line]:
    """What the slowest rank sends in a step, the longest first; where there is room to spare."""
    sent = sorted(role.collectives or (), key=lambda c: -(c.total_s or 0.0))
    if not sent:
        return [line(Span("SENT ", "head"), dim("nothing: no rank talks to another"))]
    out: list[Line] = [line(Span("SENT ", "head"), dim("by the slowest rank in a step: how often, over whom, the message, all of them in ms"))]
    for c in sent[:rows - 1]:
        out.append(fitted(line(f" {c.count:>5,} x {c.kind + ' ' + c.dtype:<20}", dim(f" {c.axis} {c.group}".ljust(20)), dim(c.phase.ljust(10)),
                               f"{_bytes(c.message_bytes):>12}", bold(f"{ms(1e3 * (c.total_s or 0.0)):>10}")), width))
    return out


def _bytes(n: int) -> str:
    return f"{n / 1e9:,.2f} GB" if n >= 1e9 else f"{n / 1e6:,.1f} MB" if n >= 1e5 else f"{n / 1e3:,.1f} kB"


def ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}" if value >= 0.95 else f"{value:.2f}"


# -- what is lost ------------------------------------------------------------------------------------------------------------


def losses(state: State, size: Size, room: int) -> list[Line]:
    """The MFU waterfall: from the data sheet's peak down to what is achieved."""
    if room < 4:
        return []
    try:
        fall = waterfall(state.run, state.report, state.profile)
    except PlanError:
        return [[Span("MFU", "head"), dim("  not known: no peak of this device in these numbers")]]
    bars = _few(fall, room - 2)
    rows: list[Line] = [[Span("MFU", "head"), dim("  share of the peak FLOP/s lost to")]]
    name_width, value_width = 19, 7
    width = size.width - name_width - value_width
    worst = max(bars, key=lambda bar: bar.share, default=None)
    right = 1.0
    for bar in bars:
        left = min(right, bar.left)
        start, end = round(left * width), round(max(right, bar.left) * width)
        style = "loss" if bar.share >= 0 else "gain"
        shade = "▒" if bar.share >= 0 else "+"
        n = max(end - start, 0)
        emphasis = "bold" if bar is worst else ""
        rows.append([Span(f"{bar.name:<{name_width}}"[:name_width], emphasis or "dim"), Span(" " * start), Span(shade * n, style),
                     Span(" " * (width - start - n)), Span(f"{-100 * bar.share:+.1f}".rjust(value_width), emphasis or "dim")])
        right = bar.left
    full = round(fall.mfu * width)
    rows.append([bold(f"{'= MFU':<{name_width}}"), Span("█" * full, "bar"), Span(" " * (width - full)), bold(f"{100 * fall.mfu:.1f}".rjust(value_width))])
    return rows


def _few(fall: Waterfall, rows: int) -> list[Bar]:
    """The losses in their order; small ones join in one bar where there are more than rows."""
    bars = list(fall.bars[1:])
    if len(bars) <= rows:
        return bars
    ranked = sorted(bars, key=lambda bar: -abs(bar.share))
    kept = {bar.name for bar in ranked[:max(1, rows - 1)] if abs(bar.share) >= SMALL_LOSS} or {ranked[0].name}
    out: list[Bar] = []
    left = 1.0
    for bar in bars:
        if bar.name in kept:
            left -= bar.share
            out.append(Bar(bar.name, bar.meaning, bar.seconds, bar.share, left, bar.without))
    rest = [bar for bar in bars if bar.name not in kept]
    gone = sum(bar.share for bar in rest)
    out.append(Bar(f"other ({len(rest)})", "", sum(bar.seconds for bar in rest), gone, left - gone, 0.0))
    return out


def bound(state: State, proposals: Proposals | None, size: Size) -> list[Line]:
    """What bounds the step, the change that would help most (two rows, whatever it is), and what the figures rest on."""
    rows: list[Line] = [line(Span("BOUND BY ", "head"), bold(_bound_words(state.report, size)))]
    if state.problem:
        rows += [[dim("figures of the last valid run")], []]
    elif proposals is None:
        rows += [[dim("looking for what would help …")], []]
    elif proposals.found:
        first, others = proposals.found[0], len(proposals.found) - 1
        more = [dim(f"   S: {others} more")] if others else []
        rows += [[Span(" s ", "key", "app.propose"), bold(f" {first.words}")], [Span(f"    {first.promise}", "good"), *more]]
    else:
        rows += [[dim("no single change is known to help")], []]
    if size.compact:
        return rows
    kinds: dict[str, list[str]] = {}
    for name, basis in state.report.basis.items():
        kinds.setdefault(basis, []).append(name.replace("_", " "))
    rows += flowed([[dim(f"{kind}: {', '.join(names)}")] for kind, names in kinds.items()], size.width, 2, gap=2)
    if state.report.notes:
        others = len(state.report.notes) - 1
        rows += wrapped(f"note  {state.report.notes[0]}{f'  (i: {others} more)' if others else ''}", size.width, 2, "warn")
    return rows


def _bound_words(report: StepReport, size: Size) -> str:
    """What bounds the step; a remark in the middle gives way to the share at the end."""
    words = report.bound_by or "not known"
    head, _, tail = words.rpartition(" (")
    return f"{head.partition(' (')[0]} ({tail}" if len(words) > size.width - 9 and head else words
