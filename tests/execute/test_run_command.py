"""`execute run`: what it prints and keeps, inside torchrun, over two nodes."""

import json
import socket
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from running_jobs import Running  # noqa: E402

from costmodel.records import read_record, record_from_dict  # noqa: E402
from costmodel.report import Collective, RoleReport, StepReport, report_from_dict  # noqa: E402
from execute.dryrun import dry_run  # noqa: E402
from execute.job import RankResult  # noqa: E402
from execute.observe.trace import load_trace  # noqa: E402
from execute.roles import mean_losses, roles_of  # noqa: E402

FEW = ("--steps", "3", "--warmup", "2")


def counted(role: RoleReport) -> list[tuple[Any, ...]]:
    def key(c: Collective) -> tuple[Any, ...]:
        return c.phase, c.axis, c.kind, c.group, c.message_bytes, c.count, c.dtype
    return sorted(key(c) for c in role.collectives or ())


def holds_what_the_dry_run_says(report: StepReport, run: Any) -> None:
    for role in report.roles:
        dry = dry_run(run, role.example_rank).roles[0]
        assert role.memory is not None
        assert dry.memory is not None
        assert {k: v for k, v in role.memory.states.items() if k != "temporaries"} == dry.memory.states
        assert counted(role) == counted(dry)


def test_a_job_is_timed_watched_and_recorded(start: Callable[..., Running]) -> None:
    """Bytes and collectives are those of the dry run; the trace has the profiler's own names."""
    running = start(*FEW, "--trace", "trace.json", "--json", "--record", "records", "--seed", "3", strategy="zero1")
    code, out, errors = running.ended()
    assert code == 0, errors
    printed = json.loads(out)
    kept, = (running.folder / "records").iterdir()
    record = read_record(kept)
    losses = printed.pop("losses")
    assert record_from_dict(printed) == record
    report = record.report
    assert report is not None
    assert [(r.role, r.ranks, r.example_rank) for r in report.roles] == [("fullest shard", 1, 0), ("emptiest shard", 1, 1)]
    assert {rank: len(samples) for rank, samples in record.step_s.items()} == {0: 3, 1: 3}
    assert len(losses) == 5
    assert all(3 < loss < 6 for loss in losses)
    holds_what_the_dry_run_says(report, record.run)
    for role in report.roles:
        time = role.time
        assert time is not None
        assert sum(time.phases.values()) == pytest.approx(time.step_s)
        assert sum(time.breakdown.values()) == pytest.approx(time.step_s)
        assert 0 < time.exposed_s["dp_shard"] <= time.communication_s["dp_shard"]
        took = [c.total_s for c in role.collectives or ()]
        assert all(took)
        assert sum(s or 0.0 for s in took) >= time.communication_s["dp_shard"] * (1 - 1e-9), "one after the other they are no shorter than together"
    tokens, matrices, head = 2 * 16, 4 * 32 * 32 + 3 * 32 * 64, 32 * 64
    assert report.model_flops == tokens * (6 * (matrices + head) + 12 * 2 * 16 * 16)
    assert (report.mfu is None) is any(note.endswith("there is no MFU.") for note in report.notes), "on another CPU than the run's"
    names = {e.get("name") for e in load_trace(running.folder / "trace.json")["traceEvents"]}
    assert {"step", "forward", "backward", "optimizer", "aten::mm", "gloo:all_reduce", "gloo:broadcast"} <= names
    assert running.left() == []


def test_inside_torchrun_rank_0_reports(start: Callable[..., Running]) -> None:
    program = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2", "-m", "execute", "run")
    running = start(*FEW, "--json", program=program, strategy="fsdp")
    code, out, errors = running.ended()
    assert code == 0, errors
    report = report_from_dict(json.loads(out)["report"])
    assert [(r.role, r.ranks) for r in report.roles] == [("every rank", 2)]
    holds_what_the_dry_run_says(report, record_from_dict({k: v for k, v in json.loads(out).items() if k != "losses"}).run)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def test_two_nodes_meet_and_the_first_reports(start: Callable[..., Running]) -> None:
    """Two launchers, two torchruns, on this host."""
    meeting = ("--nnodes", "2", "--nproc", "1", "--master-port", str(free_port()), *FEW, "--set", "recipe.grad_accum=2", "--pp", "2", "--set",
               "model.layers=2")
    first, second = (start(*meeting, "--node-rank", rank) for rank in ("0", "1"))
    code, out, errors = first.ended()
    assert code == 0, errors
    assert "pipeline rank 0 of 2: a real job" in out
    assert "pipeline rank 1 of 2: a real job" in out
    assert out.count("waiting for neighbours, transfers included") == 2
    code, out, errors = second.ended()
    assert (code, out) == (0, ""), errors
    assert errors.splitlines()[-1] == "done; node 0 has the report"
    assert first.left() == second.left() == []


def test_losses_are_means_over_the_ranks_that_know_them() -> None:
    ranks = {rank: RankResult(rank, 0.0, losses=losses) for rank, losses in enumerate([(None, None), (1.0, 2.0), (3.0, 4.0)])}
    assert mean_losses(ranks) == [2.0, 3.0]


def test_pipeline_ranks_are_roles_of_their_own() -> None:
    from small_runs import LLAMA, cpu_run
    run = cpu_run(LLAMA, "ddp", 4, pp=2, recipe={"grad_accum": 2})
    ranks = [RoleReport(f"rank {r}", 1, r, None, None, None) for r in range(4)]
    assert [(r.role, r.ranks, r.example_rank) for r in roles_of(run, ranks)] == [("pipeline rank 0", 2, 0), ("pipeline rank 1", 2, 2)]
