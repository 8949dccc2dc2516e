"""`costmodel solve`: the largest or smallest value that still fits, every plan of the GPUs, or what would make a run fit."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from costmodel.cli.guard import DOES_NOT_FIT, InputError
from costmodel.cli.options import Flag, Given, flag_value, takes_run
from costmodel.cli.screen import json_text, screen
from costmodel.cli.written import flags_behind

if TYPE_CHECKING:
    from costmodel.advice import Advice, Suggestion
    from costmodel.report import StepReport
    from costmodel.solve import Choice, Plans, Progress, Solution, Watch
    from costmodel.spec import Run

SCHEMA = 1
DEFAULT_TOP = 10
_TOP = Flag("--top", "top", "whole", "")
LARGEST = ("micro_batch", "seq_len", "layers")


@takes_run
def solve(
    given: Given,
    maximum: Annotated[str | None, typer.Option("--max", metavar="WORD", show_default=False,
                                                help="The largest that fits: micro_batch, seq_len or layers.")] = None,
    minimum: Annotated[str | None, typer.Option("--min", metavar="WORD", show_default=False, help="The fewest that fit: gpus.")] = None,
    every_plan: Annotated[bool, typer.Option("--plans", show_default=False,
                                             help="Every plan of the GPUs at this global batch, fastest first among those that fit.")] = False,
    top: Annotated[str | None, typer.Option(metavar="N", show_default=False, help=f"Plans to show. Default: {DEFAULT_TOP}.")] = None,
    risky: Annotated[bool, typer.Option("--risky", show_default=False, help="Take a run that uses the last tenth of the device as one that fits.")] = False,
    same_batch: Annotated[bool, typer.Option("--same-batch", show_default=False,
                                             help="Keep the global batch: the accumulation follows. Default: the accumulation stays.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON (docs/report.md) instead of the text.", show_default=False)] = False,
) -> None:
    """Find the largest micro-batch, sequence or model that still fits, the fewest GPUs, or the fastest plan.

    Without a question: what makes the run fit, or where it fits, what makes it faster. Exit code 3: nothing fits.
    """
    asked = [name for name, on in (("--max", maximum), ("--min", minimum), ("--plans", every_plan)) if on]
    if len(asked) > 1:
        raise InputError(f"{' and '.join(asked)}: one question at a time. Use --max {', --max '.join(LARGEST)}, --min gpus or --plans.")
    rows = DEFAULT_TOP if top is None else int(flag_value(_TOP, top))
    if rows < 1 or top is not None and not every_plan:
        raise InputError(f"--top {top}: must be at least 1, and goes with --plans. Use --plans --top {DEFAULT_TOP}.")
    run = given.resolve().run
    with given.naming(), _watching() as watch:
        if every_plan:
            from costmodel.solve import plans
            found = plans(run, given.profile, risky=risky, watch=watch)
            text, answered = _plans_text(given, run, found, rows, as_json), bool(found.best)
        elif asked:
            solution = _solution(run, given.profile, maximum, minimum, risky, same_batch, watch)
            text, answered = _solution_text(given, run, solution, as_json), solution.value is not None
        else:
            from costmodel.advice import advise
            advice = advise(run, given.profile, watch=watch)
            text, answered = _advice_text(given, run, advice, as_json), bool(advice.report.verdict == "fits" or advice.fit or advice.together)
    print(text, end="")
    if not answered:
        raise typer.Exit(DOES_NOT_FIT)


def _solution(run: "Run", profile: str | None, maximum: str | None, minimum: str | None, risky: bool, same_batch: bool, watch: "Watch") -> "Solution":
    from costmodel.changes import Keep
    from costmodel.solve import fewest_gpus, largest
    keep: Keep = get_args(Keep)[1 if same_batch else 0]
    if minimum is not None:
        if minimum != "gpus":
            raise InputError(f"--min {minimum}: is not sought. Use --min gpus.")
        return fewest_gpus(run, profile, risky=risky, keep=keep, watch=watch)
    quantity = (maximum or "").replace("-", "_")
    if quantity not in LARGEST:
        raise InputError(f"--max {maximum}: is not sought. Use --max {', --max '.join(LARGEST[:-1])} or --max {LARGEST[-1]}.")
    return largest(run, quantity, profile, risky=risky, keep=keep, watch=watch)  # type: ignore[arg-type]


@contextmanager
def _watching() -> "Iterator[Watch]":
    """A watcher that shows progress on a terminal, and that Ctrl-C tells to stop: what was found so far is the answer."""
    import time
    shows, stop, said = sys.stderr.isatty(), False, 0.0

    def interrupted(*_: Any) -> None:
        nonlocal stop
        stop = True

    def watch(progress: "Progress") -> bool:
        nonlocal said
        now = time.monotonic()
        if shows and now - said > 0.1:
            said = now
            of = f" of {progress.of:,}" if progress.of else ""
            print(f"\r\x1b[K{progress.done:,}{of}: {progress.words}"[:100], end="", file=sys.stderr, flush=True)
        return not stop

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield watch
    finally:
        signal.signal(signal.SIGINT, before)
        if said:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _solution_text(given: Given, run: "Run", solution: "Solution", as_json: bool) -> str:
    if as_json:
        return json_text({"schema": SCHEMA, "run": run.model_dump(mode="json"), "solution": solution_document(solution)})
    from costmodel.prediction import predict
    from costmodel.render.prediction import title
    from costmodel.render.solve import render_solution
    from costmodel.solve.limits import FIELDS
    flags = "" if solution.run is None else flags_behind(given, run, {FIELDS[solution.quantity]: solution.value}, solution.run)
    return render_solution(title(run), solution, predict(run, given.profile, scaling=False), flags, screen(run))


def _plans_text(given: Given, run: "Run", found: "Plans", rows: int, as_json: bool) -> str:
    if as_json:
        return json_text({"schema": SCHEMA, "run": run.model_dump(mode="json"), "plans": plans_document(found, rows)})
    from costmodel.render.prediction import title
    from costmodel.render.solve import render_plans
    return render_plans(title(run), found, rows, screen(run), [flags_behind(given, run, c.changes, c.run) for c in found.best[:1]])


def _advice_text(given: Given, run: "Run", advice: "Advice", as_json: bool) -> str:
    if as_json:
        return json_text({"schema": SCHEMA, "run": run.model_dump(mode="json"), "advice": advice_document(advice)})
    from costmodel.render.advice import render_advice
    from costmodel.render.prediction import title
    return render_advice(title(run), advice, lambda s: flags_behind(given, run, s.changes, s.run), screen(run))


def solution_document(solution: "Solution") -> dict[str, Any]:
    """The answer of a search as plain data with stable keys: docs/report.md."""
    return {"quantity": solution.quantity, "given": solution.given, "value": solution.value,
            "run": None if solution.run is None else solution.run.model_dump(mode="json"),
            "report": None if solution.report is None else solution.report.to_dict(),
            "beyond": solution.beyond, "beyond_report": None if solution.beyond_report is None else solution.beyond_report.to_dict(),
            "bound": asdict(solution.bound), "predictions": solution.predictions, "stopped": solution.stopped}


def plans_document(found: "Plans", rows: int) -> dict[str, Any]:
    """The plans of a job as plain data with stable keys: docs/report.md."""
    return {"best": [_choice(c) for c in found.best[:rows]], "candidates": found.candidates, "fit": found.fit, "too_large": found.too_large,
            "refused": found.refused, "pruned": found.pruned, "predictions": found.predictions, "stopped": found.stopped}


def advice_document(advice: "Advice") -> dict[str, Any]:
    """What to change, as plain data with stable keys: docs/report.md."""
    lists = {"fit": advice.fit, "together": advice.together, "helps": advice.helps, "faster": advice.faster}
    return {"verdict": advice.report.verdict, "states_alone": advice.states_alone, "stopped": advice.stopped,
            **{name: [_suggestion(s) for s in found] for name, found in lists.items()}}


def _suggestion(s: "Suggestion") -> dict[str, Any]:
    return {"words": s.words, "changes": s.changes, "keep": s.keep, "remark": s.remark, "needs_bytes_before": s.needs_before,
            "step_s_before": s.step_before, "tokens_per_s_before": s.tokens_per_s_before, "per_gpu": s.per_gpu, **summary(s.report)}


def _choice(choice: "Choice") -> dict[str, Any]:
    return {"changes": choice.changes, **summary(choice.report)}


def summary(report: "StepReport") -> dict[str, Any]:
    """The figures of a prediction by which changes are compared."""
    from costmodel.solve.trials import held_bytes, worst
    memory = worst(report).memory
    return {"verdict": report.verdict, "needs_bytes": held_bytes(memory) if memory else None, "headroom_bytes": memory.headroom_bytes if memory else None,
            "step_s": report.step_s, "tokens_per_s": report.tokens_per_s, "mfu": report.mfu}
