"""`execute run RUN`: the job itself, under torchrun, on this node."""

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from costmodel.cli.guard import InputError
from costmodel.cli.options import Given, takes_run
from execute import require_torch_or_refuse
from execute.commands import NoMemoryCheck, check_device, check_least, check_timeout, naming, say
from execute.recording import keep, make_record, prepare_place

if TYPE_CHECKING:
    from costmodel.inputs import Resolved
    from costmodel.records import Outcome, Record
    from execute.job import Job, RankResult

UNEXPECTED = 1
OWN = {name: f"--{name}" for name in ("nproc", "device", "data")}
"""Options that a rank may find fault with."""
TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@takes_run
def run(
    given: Given,
    nproc: Annotated[int | None, typer.Option("--nproc", metavar="N", show_default=False,
                                              help="Ranks that this node starts. Default: the run's, shared out evenly over the nodes.")] = None,
    nnodes: Annotated[int, typer.Option("--nnodes", metavar="N", help="Nodes of the job. Default: 1.", show_default=False)] = 1,
    node_rank: Annotated[int, typer.Option("--node-rank", metavar="R", help="Which of them this is. Default: 0.", show_default=False)] = 0,
    master_addr: Annotated[str, typer.Option("--master-addr", metavar="HOST", help="Where node 0 is.", show_default=False)] = "127.0.0.1",
    master_port: Annotated[int, typer.Option("--master-port", metavar="PORT", help="A free port of node 0. Default: 29500.",
                                             show_default=False)] = 29500,
    device: Annotated[str, typer.Option("--device", metavar="KIND", show_default=False,
                                        help="cuda (NCCL) or cpu (gloo). Default: cuda where there is a GPU.")] = "",
    warmup: Annotated[int, typer.Option("--warmup", metavar="N", help="Steps before the timed ones. Default: 3.", show_default=False)] = 3,
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="Timed steps. Default: 10.", show_default=False)] = 10,
    data: Annotated[Path | None, typer.Option("--data", metavar="FILE", show_default=False,
                                              help="Train on the bytes of this text. Default: random tokens.")] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of weights and random tokens. Default: 0.", show_default=False)] = 0,
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="End the job after this long. Default: 1800.",
                                           show_default=False)] = 1800.0,
    record: Annotated[Path | None, typer.Option("--record", "-o", metavar="PLACE", show_default=False,
                                                help="Keep a record: a .json file, or a folder in which it gets a name of its own.")] = None,
    trace: Annotated[Path | None, typer.Option("--trace", metavar="FILE", show_default=False,
                                               help="Keep rank 0's Chrome trace of one more step: .json or .json.gz.")] = None,
    no_memory_check: NoMemoryCheck = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record (docs/report.md) instead of the text.", show_default=False)] = False,
) -> None:
    """Perform a run for real, under torchrun: time, memory and communication of each rank role.

    It starts torchrun itself; or it is one of torchrun's ranks: torchrun --nproc-per-node N -m execute run RUN.
    Exit code 3: a rank ran out of memory; 5: a rank failed; 6: no end within --timeout.
    """
    require_torch_or_refuse()
    resolved = given.resolve()
    _check(device, warmup, steps, timeout, trace, data)
    for place in (record, trace and trace.parent):
        if place is not None:
            prepare_place(place)
    from execute.job import Job
    from execute.support import check_installed, check_supported
    with given.naming():
        check_supported(resolved.run, "run")
        check_installed(resolved.run)
    job = Job(resolved.run, steps, warmup, device, None if data is None else str(data.absolute()), seed,
              None if trace is None else str(trace.absolute()), timeout, not no_memory_check)
    command = " ".join(["execute run", *sys.argv[2:]]) if sys.argv[1:2] == ["run"] else "execute run"
    if all(name in os.environ for name in TORCHRUN):
        with _naming(given):
            _as_a_rank(job, resolved, command, record, as_json)
        return
    from execute.launch import Nodes, launch
    count = _ranks_here(resolved.run.plan.world_size, nproc, nnodes, node_rank)
    with _naming(given):
        ended = launch(job, count, Nodes(nnodes, node_rank, master_addr, master_port), lambda doing: say(f"run: {doing}"))
    if ended.outcome.kind == "ok" and node_rank > 0:
        say("done; node 0 has the report")
        return
    _finish(resolved, ended.outcome, ended.ranks, command, record, as_json)


@contextmanager
def _naming(given: Given) -> Iterator[None]:
    """A PlanError from inside becomes an InputError that names an option of this command, the run's flag, or its file."""
    with given.naming(), naming(OWN):
        yield


def _check(device: str, warmup: int, steps: int, timeout: float, trace: Path | None, data: Path | None) -> None:
    check_device(device)
    check_least(warmup, "--warmup", 1, 1)
    check_least(steps, "--steps", 1, 1)
    check_timeout(timeout, 1800)
    if data is not None and not data.is_file():
        raise InputError(f"--data {data}: there is no such file. Give a text file, or leave it out for random tokens.")
    if trace is not None and not trace.name.endswith((".json", ".json.gz")):
        raise InputError(f"--trace {trace}: a Chrome trace ends in .json or .json.gz. Use --trace {trace}.json.")


def _ranks_here(world: int, nproc: int | None, nnodes: int, node_rank: int) -> int:
    """How many ranks this node starts; a number that does not fit the run is refused."""
    if nnodes < 1 or not 0 <= node_rank < nnodes:
        raise InputError(f"--node-rank {node_rank}: nodes of --nnodes {nnodes} are numbered from 0. Use --node-rank 0 to {max(nnodes - 1, 0)}.")
    if nproc is None:
        if world % nnodes:
            raise InputError(f"--nnodes {nnodes}: the run has {world} ranks, which {nnodes} nodes cannot share evenly. Use a divisor of {world}.")
        return world // nnodes
    if nproc * nnodes != world:
        ranks = f"{nnodes} x {nproc} = {nnodes * nproc}" if nnodes > 1 else f"{nproc}"
        raise InputError(f"--nproc {nproc}: it starts {ranks} ranks, and the run has {world} (--gpus). Leave it out, or use --gpus {nproc * nnodes}.")
    return nproc


def _as_a_rank(job: "Job", resolved: "Resolved", command: str, record: Path | None, as_json: bool) -> None:
    """Be the rank that torchrun's environment says; rank 0 reports, and a rank that fails keeps its own record."""
    from costmodel.spec import PlanError
    from execute.rank import end, perform
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world != resolved.run.plan.world_size:
        raise InputError(f"torchrun started {world} ranks, and the run has {resolved.run.plan.world_size} (--gpus). Use --gpus {world}.")
    with tempfile.TemporaryDirectory() as folder:
        result = perform(job, lambda doing: say(f"run: {doing}") if rank == 0 else None, Path(folder))
    if result.refused is not None:
        raise PlanError(*result.refused)
    try:
        if result.outcome.kind != "ok" or rank == 0:
            _finish(resolved, result.outcome, {r.rank: r for r in result.others}, command, record, as_json and rank == 0)
    finally:
        sys.stdout.flush()
        end(result)


def _finish(resolved: "Resolved", outcome: "Outcome", ranks: "dict[int, RankResult]", command: str, place: Path | None, as_json: bool) -> None:
    """Write the record, print what was seen, and exit as the job ended."""
    from execute.roles import mean_losses, report_of
    from execute.text import as_text
    report = report_of(resolved.run, ranks) if outcome.kind == "ok" else None
    record = make_record(resolved, "run", outcome, report, {rank: r.step_s for rank, r in ranks.items()}, command)
    losses = mean_losses(ranks)
    if as_json:
        print(json.dumps({**record.to_dict(), "losses": losses}, indent=2, ensure_ascii=False))
    elif report is not None:
        print(as_text(report))
        print(f"job: {report.tokens_per_s:,.0f} tokens/s; loss {losses[0]:.4f} at the first step, {losses[-1]:.4f} at the last of {len(losses)}")
    if place is not None:
        say(f"wrote {_kept(record, place, outcome)}")
    if outcome.kind != "ok":
        say(f"{outcome.kind}: {outcome.message}")
        raise typer.Exit(outcome.exit_code)


def _kept(record: "Record", place: Path, outcome: "Outcome") -> Path:
    """Write the record; how the job ended matters more than that it could not be written."""
    try:
        return keep(record, place)
    except InputError as error:
        say(f"error: {error}")
        raise typer.Exit(outcome.exit_code or UNEXPECTED) from None
