"""`execute validate [RUN ...]`: hold predictions against what is performed."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from costmodel.cli.guard import InputError
from execute import require_torch_or_refuse
from execute.commands import NoMemoryCheck, check_device, check_least, check_timeout, naming, perform_job, say
from execute.recording import keep, make_record, outcome_of, prepare_place

if TYPE_CHECKING:
    from costmodel.records import Outcome
    from costmodel.report import RoleReport
    from costmodel.spec import Run
    from execute.suite import Case
    from execute.support import Mode
    from execute.validate import Checked, Observe

OUTSIDE_TOLERANCE, SCHEMA = 4, 1


def validate(
    context: typer.Context,
    runs: Annotated[list[Path] | None, typer.Argument(metavar="[RUN ...]", show_default=False,
                                                      help="Run files. Default: a standard suite sized to this machine, over every strategy.")] = None,
    mode: Annotated[str, typer.Option("--mode", metavar="MODE", show_default=False,
                                      help="dryrun; solo: also one rank alone on a real device; run: also the job itself. Default: run.")] = "run",
    profile: Annotated[str | None, typer.Option("--profile", metavar="FILE", show_default=False,
                                                help="Machine constants fitted on this machine (.toml): then time is judged too.")] = None,
    gpu: Annotated[str, typer.Option("--gpu", metavar="NAME", show_default=False,
                                     help="This machine's device in the catalogue, where its own name is not found.")] = "",
    device: Annotated[str, typer.Option("--device", metavar="KIND", help="cuda or cpu. Default: cuda where there is a GPU.", show_default=False)] = "",
    only: Annotated[str, typer.Option("--only", metavar="TEXT", help="Only cases whose name holds this.", show_default=False)] = "",
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="Timed steps. Default: 10.", show_default=False)] = 10,
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="For each run. Default: 600.", show_default=False)] = 600.0,
    record: Annotated[Path | None, typer.Option("--record", metavar="FOLDER", help="Keep a record of each run that is performed.",
                                                show_default=False)] = None,
    no_memory_check: NoMemoryCheck = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON (docs/report.md) instead of the text.", show_default=False)] = False,
) -> None:
    """Predicted against dry run against measured: bytes, collectives and time.

    States must be equal to the byte, collectives equal, the peak within 5%; time within 25%, if the machine's constants were fitted on it.
    Exit code 4 names what is outside; 3, 5 or 6: a run ended badly.
    """
    require_torch_or_refuse()
    if mode not in ("dryrun", "solo", "run"):
        raise InputError(f"--mode {mode}: it is dryrun, solo or run. Use --mode run.")
    check_device(device)
    check_least(steps, "--steps", 1, 10)
    check_timeout(timeout, 600)
    if record is not None:
        prepare_place(record)
    cases = [case for case in _cases(runs or [], cast("Mode", mode), gpu, device) if only in case.name]
    if not cases:
        raise InputError(f"--only {only}: no case has this in its name. Leave it out for all.")
    from execute.validate import check, unlike
    _refuse_early(cases, cast("Mode", mode), profile, device, no_memory_check)
    observe = _observer(mode, device, steps, timeout, not no_memory_check, record)
    checked = []
    for number, case in enumerate(cases, 1):
        say(f"validate: {number} of {len(cases)}: {case.name}")
        checked.append(check(case, cast("Mode", mode), profile, observe))
        if checked[-1].outcome.kind == "interrupted":
            break
    _print(checked, mode, unlike(cases, profile) if mode != "dryrun" else [], as_json)
    _exit(checked)


def _cases(files: list[Path], mode: "Mode", gpu: str, device: str) -> "list[Case]":
    """The runs of some files, or the standard suite."""
    from costmodel.cli.options import collect
    from execute.suite import Case, standard, this_machine
    from execute.support import check_installed, check_supported, dry_runs, has_deepspeed
    from execute.validate import fits
    if not files:
        with naming({"gpu": "--gpu", "device": "--device"}):
            machine = this_machine(gpu, device)
        return standard(machine, fits, deepspeed=mode == "run" and has_deepspeed())
    cases = []
    for path in files:
        given = collect(path, {}, [])
        run = given.resolve().run
        with given.naming():
            if dry_runs(run):
                check_supported(run)
            check_supported(run, mode)
            check_installed(run)
        cases.append(Case(path.stem, run))
    return cases


def _refuse_early(cases: "list[Case]", mode: "Mode", profile: str | None, device: str, no_memory_check: bool) -> None:
    """Refuse now what would be refused in a later case: constants, a run that is not predicted, a device, a host that is too small."""
    from execute.validate import check_predictable
    with naming({"profile": "--profile", "device": "--device"}):
        check_predictable(cases, profile)
        if mode == "dryrun":
            return
        from execute.device import this_device
        on_cpu = this_device(device).name == "cpu"
    if on_cpu and not no_memory_check:
        from execute.host_memory import check_host_memory
        for case in cases:
            check_host_memory(case.run, 1 if mode == "solo" else case.run.plan.world_size)


def _observer(mode: str, device: str, steps: int, timeout: float, check_memory: bool, record: Path | None) -> "Observe":
    """What performs a run for real."""
    def observe(run: "Run") -> "tuple[Outcome, dict[int, RoleReport]]":
        outcome, roles, step_s, report = _alone(run, device, steps) if mode == "solo" else _launched(run, device, steps, timeout, check_memory)
        if record is not None:
            from costmodel.inputs import Resolved
            made = make_record(Resolved(run, {}), cast("Any", mode), outcome, report, step_s, f"execute validate --mode {mode}")
            say(f"wrote {keep(made, record)}")
        if outcome.kind != "ok":
            say(f"{outcome.kind}: {outcome.message}")
        return outcome, roles
    return observe


def _launched(run: "Run", device: str, steps: int, timeout: float, check_memory: bool) -> Any:
    ended, report = perform_job(run, device, steps, timeout, check_memory)
    roles = {rank: r.role for rank, r in ended.ranks.items() if r.role is not None}
    return ended.outcome, roles, {rank: r.step_s for rank, r in ended.ranks.items()}, report


def _alone(run: "Run", device: str, steps: int) -> Any:
    """The first rank of every pipeline stage, one after the other, on this device."""
    from costmodel.records import Outcome
    from execute.device import this_device
    from execute.solo import solo
    first_of_stage = range(0, run.plan.world_size, run.plan.world_size // run.plan.pp)
    roles, step_s, report = {}, {}, None
    try:
        for rank in first_of_stage:
            done = solo(run, this_device(device), rank, steps=steps)
            roles[rank], step_s[rank] = done.report.roles[0], done.step_s
            report = report or done.report
    except (RuntimeError, MemoryError, KeyboardInterrupt) as error:
        return outcome_of(error), {}, {}, None
    return Outcome(), roles, step_s, report


def _print(checked: "list[Checked]", mode: str, warnings: list[str], as_json: bool) -> None:
    from execute.validate import HEADER
    outside = [row for one in checked for row in one.outside()]
    if as_json:
        within = not outside and all(one.outcome.kind == "ok" for one in checked)
        cases = [one.to_dict() for one in checked]
        print(json.dumps({"schema": SCHEMA, "mode": mode, "within_tolerance": within, "warnings": warnings, "cases": cases}, indent=2))
        return
    print("\n".join([HEADER, *(line for one in checked for line in one.lines())]))
    if mode != "dryrun" and not any(one.time_judged for one in checked):
        print("time is shown, not judged: the constants were not fitted on this machine (--profile FILE.toml)")
    for words in warnings:
        print(f"warning: {words}; its times are judged all the same")
    bad = [f"ended badly: {one.name}: {one.outcome.message}" for one in checked if one.outcome.kind != "ok"]
    print("\n".join([*(f"outside: {row}" for row in outside), *bad] or ["all within tolerance"]))


def _exit(checked: "list[Checked]") -> None:
    """A run that ended badly says most; then what is outside."""
    for one in checked:
        if one.outcome.kind != "ok":
            raise typer.Exit(one.outcome.exit_code)
    if any(True for one in checked for _ in one.outside()):
        raise typer.Exit(OUTSIDE_TOLERANCE)
