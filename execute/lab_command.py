"""`execute lab`: one small Transformer, spread in every way, on this machine."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from costmodel.cli.guard import InputError
from execute import require_torch_or_refuse
from execute.commands import NoMemoryCheck, check_device, check_least, check_timeout, naming, perform_job, say
from execute.recording import keep, make_record, prepare_place

if TYPE_CHECKING:
    from execute.lab import Entry
    from execute.suite import Case


def lab(
    ranks: Annotated[int | None, typer.Option("--ranks", metavar="N", show_default=False,
                                              help="Ranks that share the step. Default: this machine's GPUs; on a CPU 2.")] = None,
    gpu: Annotated[str, typer.Option("--gpu", metavar="NAME", show_default=False,
                                     help="This machine's device in the catalogue, where its own name is not found.")] = "",
    device: Annotated[str, typer.Option("--device", metavar="KIND", help="cuda or cpu. Default: cuda where there is a GPU.", show_default=False)] = "",
    only: Annotated[str, typer.Option("--only", metavar="TEXT", help="Beside the one device, only what has this in its name.", show_default=False)] = "",
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="Timed steps. Default: 10.", show_default=False)] = 10,
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="For each run. Default: 600.", show_default=False)] = 600.0,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FOLDER", show_default=False,
                                                help="Write lab.md, lab.json and records/ there, instead of printing.")] = None,
    no_memory_check: NoMemoryCheck = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON (docs/report.md) instead of Markdown.", show_default=False)] = False,
) -> None:
    """Measure DDP, ZeRO-1/2/3, FSDP, TP and PP of one small Transformer against one device, beside their predictions, and say why they differ.

    Exit code 3, 5 or 6: a run ended badly.
    """
    require_torch_or_refuse()
    check_device(device)
    check_least(steps, "--steps", 1, 10)
    check_timeout(timeout, 600)
    if output is not None:
        prepare_place(output / "records")
    from execute.lab import cases
    from execute.lab_text import document, markdown
    from execute.observe.environment import environment
    from execute.suite import this_machine
    from execute.support import has_deepspeed
    with naming({"gpu": "--gpu", "device": "--device"}):
        machine = this_machine(gpu, device)
    count = _ranks(ranks, machine.devices, machine.on_gpu)
    if not machine.on_gpu:
        os.environ["OMP_NUM_THREADS"] = "1"  # a rank is a core, alone or with others
    one, *spread = cases(machine, count, deepspeed=has_deepspeed())
    wanted = only.lower().replace("-", "")
    chosen = [one, *(case for case in spread if wanted in case.name.lower().replace("-", ""))]
    if spread and len(chosen) == 1:
        raise InputError(f"--only {only}: no strategy has this in its name. Use a part of {', '.join(case.name for case in spread)}.")
    if not machine.on_gpu and not no_memory_check:
        from execute.host_memory import check_host_memory
        for case in chosen:
            check_host_memory(case.run, case.run.plan.world_size)
    entries = []
    for number, case in enumerate(chosen, 1):
        say(f"lab: {number} of {len(chosen)}: {case.name}")
        entries.append(_perform(case, device, steps, timeout, not no_memory_check, output and output / "records"))
        if entries[-1].outcome.kind == "interrupted":
            break
    here = environment()
    text, data = markdown(entries, here, None if machine.on_gpu else here.cores), json.dumps(document(entries, here), indent=2, ensure_ascii=False)
    if output is not None:
        from costmodel.atomic import write_atomically
        write_atomically(output / "lab.md", text)
        write_atomically(output / "lab.json", data + "\n")
        print(f"wrote {output}/lab.md and lab.json", file=sys.stderr)
    else:
        print(data if as_json else text, end="")
    for performed in entries:
        if performed.outcome.kind != "ok":
            raise typer.Exit(performed.outcome.exit_code)


def _ranks(asked: int | None, devices: int, on_gpu: bool) -> int:
    """A number that divides the batch, no more than there are devices."""
    possible = [n for n in (1, 2, 4, 8) if n <= devices]
    if asked is not None and asked not in possible:
        raise InputError(f"--ranks {asked}: it must be one of {', '.join(map(str, possible))}, which divide the batch and have a device each. "
                         f"Use --ranks {possible[-1]}.")
    return asked or (possible[-1] if on_gpu else 2)


def _perform(case: "Case", device: str, steps: int, timeout: float, check_memory: bool, place: Path | None) -> "Entry":
    """Perform a case under torchrun, and keep its record."""
    from costmodel.inputs import Resolved
    from execute.lab import entry
    ended, report = perform_job(case.run, device, steps, timeout, check_memory)
    if place is not None:
        record = make_record(Resolved(case.run, {}), "run", ended.outcome, report, {rank: r.step_s for rank, r in ended.ranks.items()}, "execute lab")
        keep(record, place)
    return entry(case, ended.outcome, report)
