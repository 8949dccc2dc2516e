"""Solve: what can be searched for, how far a search is, and its answers as rows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from costmodel.changes import Keep
from costmodel.render.prediction import checkpointing
from costmodel.render.solve import bound_words
from costmodel.render.units import count, duration, share
from costmodel.report import StepReport
from costmodel.solve import Choice, Plans, Progress, Solution, Watch, fewest_gpus, largest, plans
from costmodel.solve.trials import held_bytes, worst
from costmodel.spec import Run
from tui.lines import Line, Span, bold, dim, fitted, line, wrapped
from tui.views.explore import gib


class Search(NamedTuple):
    """Something to look for."""

    name: str
    does: str
    start: Callable[[Run, str | None, Keep, Watch], "Solution | Plans"]


SEARCHES: tuple[Search, ...] = (
    Search("every plan", "every way to spread the batch over these GPUs",
           lambda run, profile, keep, watch: plans(run, profile, watch=watch)),
    Search("largest micro-batch", "the largest that fits, all else as it is",
           lambda run, profile, keep, watch: largest(run, "micro_batch", profile, keep=keep, watch=watch)),
    Search("longest sequence", "the longest that fits, in multiples of 128",
           lambda run, profile, keep, watch: largest(run, "seq_len", profile, keep=keep, watch=watch)),
    Search("fewest GPUs", "with the same tp and pp; dp follows", lambda run, profile, keep, watch: fewest_gpus(run, profile, keep=keep, watch=watch)))
COLUMNS = ("tp", "pp", "dp", "zero", "sp", "recompute", "batch", "GiB", "step", "tok/s", "MFU")


class Found(NamedTuple):
    """A row of the answer, and what enter applies."""

    cells: tuple[str, ...]
    changes: Mapping[str, Any]
    keep: Keep


@dataclass(frozen=True, slots=True)
class Searching:
    """Where the pane is."""

    choice: int = 0
    progress: Progress | None = None
    answer: "Solution | Plans | None" = None
    error: str = ""


MOST_ROWS = 200


def rows(answer: "Solution | Plans", keep: Keep) -> list[Found]:
    """The answer as rows of the table, best first."""
    if isinstance(answer, Plans):
        return [Found(_cells(choice.run, choice.report), choice.changes, "global_batch") for choice in answer.best[:MOST_ROWS]]
    if answer.value is None or answer.run is None or answer.report is None:
        return []
    paths = {"micro_batch": "recipe.micro_batch", "seq_len": "recipe.seq_len", "layers": "model.layers", "gpus": "cluster.gpus"}
    return [Found(_cells(answer.run, answer.report), {paths[answer.quantity]: answer.value}, keep)]


def _cells(run: Run, report: StepReport) -> tuple[str, ...]:
    p, r = run.plan, run.recipe
    memory = worst(report).memory
    dp = f"{p.dp_replicate}x{p.dp_shard}" if p.dp_replicate > 1 and p.dp_shard > 1 else str(p.dp)
    return (str(p.tp), str(p.pp), dp, str(p.zero), "yes" if p.sequence_parallel else "-", checkpointing(p), f"{r.micro_batch} x {r.grad_accum}",
            gib(held_bytes(memory)) if memory else "-", duration(report.step_s), count(report.tokens_per_s),
            share(report.mfu))


def head(now: Searching, running: bool, width: int) -> list[Line]:
    """Seven rows: the searches, how far the present one is, and what came of it."""
    out: list[Line] = [line(Span("SOLVE ", "head"), dim("↑ ↓ choose  "), Span("g", "accent bold", "app.search"), dim(" go  "),
                            Span("c", "accent bold", "app.cancel"), dim(" stop  ⏎ apply a row"))]
    for i, search in enumerate(SEARCHES):
        here = i == now.choice
        out.append(fitted(line(Span(f" {'▸' if here else ' '} {search.name:<21}", "bold" if here else "", f"app.pick_choice({i})"), dim(search.does)), width))
    out += said(now, running, width)
    return [*out, *[[] for _ in range(HEAD - len(out))]]


HEAD = 8


def said(now: Searching, running: bool, width: int) -> list[Line]:
    """Progress while a search runs; then its counts and what binds."""
    if now.error:
        return wrapped(now.error, width, 3, "warn")
    if running and now.progress is not None:
        done, of, words = now.progress
        wide = max(10, min(40, width - 40))
        if of:
            full = round(wide * min(1.0, done / of))
            return [line(Span("█" * full, "bar"), Span("░" * (wide - full), "dim"), f" {done:,} of {of:,}  ", dim(words))]
        return [line(Span("looking  ", "accent"), f"{done:,} predictions  ", dim(words))]
    answer = now.answer
    if isinstance(answer, Plans):
        stopped = "  stopped before the end" if answer.stopped else ""
        text = (f"{answer.candidates:,} plans: {answer.fit:,} fit, {answer.too_large:,} do not, {answer.refused:,} refused, "
                f"{answer.pruned:,} need no prediction.{stopped}")
        return [*wrapped(text, width, 2), [bold("No plan of these GPUs fits.")] if not answer.best else [dim("⏎ on a row makes it the run")]]
    if answer is not None:
        words = f"{answer.value:,}" if answer.value is not None else "no value fits"
        stopped = "; stopped, more may fit" if answer.stopped else ""
        return [line(bold(f"{SEARCHES[now.choice].name}: {words}"), dim(f" (the run has {answer.given:,}){stopped}")),
                *wrapped(f"bound by {bound_words(answer.bound, answer.quantity)}", width, 2)]
    return []


__all__ = ["COLUMNS", "HEAD", "SEARCHES", "Choice", "Found", "Search", "Searching", "head", "rows", "said"]
