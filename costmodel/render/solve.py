"""The answer of a search as a text: the value, its neighbour, and what binds; plans as a table."""

from collections.abc import Sequence

from costmodel.render.prediction import checkpointing
from costmodel.render.text import Page
from costmodel.render.units import count, duration, plural, share, size
from costmodel.render.words import moment
from costmodel.report import StepReport
from costmodel.solve import Bound, Choice, Plans, Quantity, Solution
from costmodel.solve.trials import held_bytes, worst
from costmodel.spec import Plan

HEADINGS = {"micro_batch": "LARGEST MICRO-BATCH that fits", "seq_len": "LONGEST SEQUENCE that fits", "layers": "MOST LAYERS that fit",
            "gpus": "FEWEST GPUS that fit"}
HELD = 5
"""What the memory holds, so many of the largest."""
NAMES = {"micro_batch": "micro-batch", "seq_len": "sequence length", "layers": "layers", "gpus": "GPUs"}
COLUMNS = {"micro_batch": "batch", "seq_len": "tokens", "layers": "layers", "gpus": "GPUs"}
ONE_STEP = {"micro_batch": "one more sequence adds", "seq_len": "the longer sequence adds", "layers": "one more layer adds", "gpus": "the smaller job adds"}


def render_solution(title: str, solution: Solution, given: StepReport | None, flags: str, page: Page) -> str:
    """given: the prediction of the run as it was; flags: how the answer is written on the command line."""
    name = NAMES[solution.quantity]
    page.line(title, "bold")
    page.heading(HEADINGS[solution.quantity])
    if solution.value is None:
        page.line(_nothing(solution), "red", "  ")
    else:
        page.line(f"{name} {solution.value:,}" + (f" (the run has {solution.given:,})" if solution.given != solution.value else " (as the run has)")
                  + ("; the search was stopped, and more may fit" if solution.stopped else ""), "green", "  ")
    rows = []
    if given is not None and solution.given not in (solution.value, solution.beyond):
        rows.append(_row(solution.given, "as given", given))
    if solution.value is not None and solution.report is not None:
        rows.append(_row(solution.value, "the answer", solution.report))
    if solution.beyond is not None and solution.beyond_report is not None:
        words = "as given" if solution.beyond == solution.given else "the next" if solution.value is not None else "tried"
        rows.append(_row(solution.beyond, words, solution.beyond_report))
    page.line()
    page.table([COLUMNS[solution.quantity], "which", "device total", "to spare", "step", "tokens/s", "verdict"], rows, "><>>>><")
    page.line()
    page.pairs([("binds", bound_words(solution.bound, solution.quantity)), *_more(solution),
                *([("use", flags)] if flags and solution.value not in (None, solution.given) else []),
                ("search", plural(solution.predictions, "prediction"))])
    return str(page)


def _nothing(solution: Solution) -> str:
    tried = {"micro_batch": "Not even a micro-batch of 1 fits.", "seq_len": "Not even the shortest sequence fits.",
             "layers": "Not even the smallest number of layers fits.", "gpus": "No number of GPUs is enough with this plan."}[solution.quantity]
    return tried if not solution.stopped else "Nothing was found before the search was stopped."


def _row(value: int, words: str, report: StepReport) -> list[str]:
    memory = worst(report).memory
    assert memory is not None
    return [f"{value:,}", words, size(held_bytes(memory)), size(memory.headroom_bytes), duration(report.step_s), count(report.tokens_per_s),
            report.verdict]


def bound_words(bound: Bound, quantity: Quantity) -> str:
    """What binds, in a sentence or two."""
    if bound.kind == "stopped":
        return "nothing yet: the search was stopped"
    if bound.kind in ("rule", "range"):
        return bound.rule
    if bound.states_alone and quantity == "gpus":
        return (f"the model state alone ({size(bound.states_bytes)} on {bound.role}) exceeds the device: shard it (ZeRO, FSDP) or split the model "
                "(tensor or pipeline parallelism)")
    if bound.states_alone:
        return (f"the model state alone ({size(bound.states_bytes)} on {bound.role}) exceeds the device: neither batch, sequence nor checkpointing "
                "helps; more shards, more GPUs or smaller states do")
    largest, n = next(iter(bound.holds.items()))
    return f"{largest.replace('_', ' ')}: {size(n)}, the largest part of {bound.role}'s memory at the moment of: {moment(bound.moment)}"


def _more(solution: Solution) -> list[tuple[str, str]]:
    b = solution.bound
    if b.kind != "memory":
        return []
    beside = list(b.holds.items())[0 if b.states_alone else 1:HELD]
    rows = [("held" if b.states_alone else "beside it", ", ".join(f"{name.replace('_', ' ')} {size(n)}" for name, n in beside))]
    if b.growing_bytes > 0:
        rows.append(("one step", f"{ONE_STEP[solution.quantity]} {size(b.growing_bytes)} of {b.growing.replace('_', ' ')}"))
    if not b.states_alone and solution.quantity in ("micro_batch", "seq_len"):
        rows.append(("state", f"{size(b.states_bytes)} is there whatever the batch and the sequence"))
    return rows


def render_plans(title: str, plans: Plans, top: int, page: Page, uses: Sequence[str]) -> str:
    """The fastest plans that fit; uses: how the first ones are written on the command line."""
    page.line(title, "bold")
    shown = plans.best[:top]
    remark = f"fastest first, {len(shown)} of {plans.fit} that fit" if plans.fit > len(shown) else "fastest first"
    page.heading("PLANS", remark if shown else "")
    if not shown:
        page.line("No plan of these GPUs fits." if not plans.stopped else "No plan that fits was found before the search was stopped.", "red", "  ")
    wide = page.width >= 100
    if shown:
        experts = any(c.run.plan.ep > 1 for c in shown)
        header = ["tp", "pp", "dp", *(["ep"] if experts else []), "ZeRO", "sp", "recompute", "batch", "needs", "step", "tokens/s", "MFU",
                  *(["most of it"] if wide else [])]
        page.table(header, [_plan_row(c, wide, experts) for c in shown], (">" if experts else "") + ">>>><<>>>>>" + ("<" if wide else ""))
        page.line()
        page.line("batch: micro-batch x accumulation; needs: device total of the fullest rank", "dim", "  ")
    page.line()
    page.pairs([*([("use", uses[0] or "the run as it is")] if shown else []),
                ("counted", f"{plural(plans.candidates, 'plan')}: {plans.fit:,} fit, {plans.too_large:,} do not, {plans.refused:,} are refused, "
                 f"{plans.pruned:,} need no prediction (larger than one that does not fit, or recomputing without need)"
                 + ("; the search was stopped" if plans.stopped else "")),
                ("search", plural(plans.predictions, "prediction"))])
    return str(page)


def _plan_row(c: Choice, wide: bool, experts: bool) -> list[str]:
    p, memory = c.run.plan, worst(c.report).memory
    assert memory is not None
    dp = f"{p.dp_replicate}x{p.dp_shard}" if p.dp_replicate > 1 and p.dp_shard > 1 else str(p.dp)
    row = [str(p.tp), str(p.pp), dp, *([str(p.ep)] if experts else []), str(p.zero), "yes" if p.sequence_parallel else "-", _recompute(p),
           f"{c.run.recipe.micro_batch} x {c.run.recipe.grad_accum}", size(held_bytes(memory)), duration(c.report.step_s), count(c.report.tokens_per_s),
           share(c.report.mfu)]
    return [*row, _most(c.report)] if wide else row


def _recompute(p: Plan) -> str:
    """Checkpointing in a word, as --checkpointing takes it where it is selective."""
    c = p.checkpointing
    return ":".join(("selective", *(op for op in c.ops if op != "attention"))) if c.mode == "selective" else checkpointing(p)


def _most(report: StepReport) -> str:
    """The largest part of the step of the slowest rank."""
    time = max((r.time for r in report.roles if r.time), key=lambda t: t.step_s)
    name, seconds = max(time.breakdown.items(), key=lambda kv: kv[1])
    return f"{name} {share(seconds, time.step_s)}"
