"""The schedules of the project are those of torch.distributed.pipelining, action by action; and what a stage performs is its schedule."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from small_runs import LLAMA, small_run
from torch import distributed as dist
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.utils.checkpoint import checkpoint

from costmodel.program.schedule import rank_order
from costmodel.spec import PlanError
from execute import compat
from execute.dryrun import observe
from execute.strategies.pipeline import ScheduleNaive, Stage

KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def actions(order: Any) -> list[tuple[str, int, int]]:
    """torch's actions without its idle slots and its reductions; of an overlapped pair one after the other, as the runtime performs it."""
    flat = [part for a in order if a is not None for part in (a.sub_actions or (a,))]
    return [(KINDS[a.computation_type.name], a.stage_index, a.microbatch_index) for a in flat if a.computation_type.name in KINDS]


class Recorder:
    """A stage that only writes down what a schedule asks it to do."""

    def __init__(self, rank: int, stages: int) -> None:
        self.stage_index, self.is_last = rank, rank == stages - 1
        self.done: list[tuple[str, int, int]] = []

    def forward_one_chunk(self, chunk: int, *args: Any, **kwargs: Any) -> None:
        self.done.append(("F", self.stage_index, chunk))

    def backward_one_chunk(self, chunk: int, **kwargs: Any) -> None:
        self.done.append(("B", self.stage_index, chunk))

    def perform_reduce_grad(self, factor: int) -> None:
        assert factor == 1

    def __getattr__(self, name: str) -> Any:
        assert name.endswith("_ops"), name
        return lambda chunk: []


def performed(kind: Any, p: int, m: int, rank: int) -> list[tuple[str, int, int]]:
    """What torch's schedule performs (its `_get_pipeline_order` of 1F1B counts the last rank's micro-batches from 1)."""
    stage = Recorder(rank, p)
    nothing = [()] * m
    schedule = SimpleNamespace(_n_microbatches=m, _num_stages=p, _stage=stage, scale_grads=False, _check_inputs=lambda *a: (nothing, nothing),
                               _initialize_stage=lambda *a: None, _maybe_compute_loss=lambda *a: None, _maybe_get_loss=lambda *a: None,
                               _update_losses=lambda *a: None)
    kind._step_microbatches(schedule)
    return stage.done


@pytest.mark.parametrize(("name", "kind"), [("gpipe", ScheduleGPipe), ("1f1b", Schedule1F1B), ("naive", ScheduleNaive)])
def test_one_stage_a_rank_runs_in_torch_s_order(name: str, kind: Any) -> None:
    for p in (1, 2, 3, 4, 8):
        for m in (p, p + 1, 2 * p, 3 * p + 2):
            for rank in range(p):
                assert [tuple(a) for a in rank_order(name, p, 1, m, rank)] == performed(kind, p, m, rank), (p, m, rank)


def test_interleaved_stages_run_in_torch_s_order() -> None:
    for p in (2, 3, 4, 8):
        for v in (2, 3, 4):
            for m in (1, p, p + 1, 2 * p - 1, 2 * p, 2 * p + 2, 5 * p):
                rounds = max(1, m // p)
                schedule = SimpleNamespace(n_local_stages=v, pp_group_size=p, _n_microbatches=m, microbatches_per_round=m // rounds)
                for rank in range(p):
                    torch_order = ScheduleInterleaved1F1B._calculate_single_rank_operations(schedule, rank)  # type: ignore[arg-type]
                    assert [tuple(a) for a in rank_order("interleaved", p, v, m, rank)] == actions(torch_order), (p, v, m, rank)


@pytest.mark.parametrize(("name", "kind", "virtual"), [("zb-h1", ScheduleInterleavedZeroBubble, (1,)),
                                                       ("interleaved-zb", ScheduleInterleavedZeroBubble, (2, 3, 4)),
                                                       ("zbv", ScheduleZBVZeroBubble, (2,)), ("dualpipev", ScheduleDualPipeV, (2,))])
def test_split_backwards_run_in_torch_s_order(name: str, kind: Any, virtual: tuple[int, ...]) -> None:
    for p in (1, 2, 3, 4, 8):
        for v in virtual:
            for m in (1, p, p + 1, 2 * p - 1, 2 * p, 2 * p + 2, 5 * p):
                if name == "dualpipev" and m < 2 * p:
                    continue
                rounds = max(1, m // p)
                schedule = SimpleNamespace(n_local_stages=v, pp_group_size=p, _n_microbatches=m, microbatches_per_round=m // rounds, num_stages=p * v)
                for rank in range(p):
                    torch_order = kind._calculate_single_rank_operations(schedule, rank)
                    assert [tuple(a) for a in rank_order(name, p, v, m, rank)] == actions(torch_order), (p, v, m, rank)


@pytest.mark.parametrize(("schedule", "p", "v", "rank"), [("naive", 2, 1, 1), ("gpipe", 2, 1, 0), ("1f1b", 4, 1, 1), ("interleaved", 2, 2, 0),
                                                          ("zb-h1", 4, 1, 2), ("interleaved-zb", 2, 2, 1), ("zbv", 2, 2, 0), ("dualpipev", 2, 2, 1)])
def test_the_dry_run_performs_the_schedule(schedule: str, p: int, v: int, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the stages are called for in two steps, against the order of one."""
    done: list[tuple[str, int, int]] = []

    def record(kind: str, name: str) -> None:
        original = getattr(Stage, name)

        def one_chunk(self: Stage, chunk: int, *args: Any, **kwargs: Any) -> Any:
            done.append((kind if kwargs.get("full_backward", True) else "I", self.stage_index, chunk))
            return original(self, chunk, *args, **kwargs)

        monkeypatch.setattr(Stage, name, one_chunk)

    for kind, name in (("F", "forward_one_chunk"), ("B", "backward_one_chunk"), ("W", "backward_weight_one_chunk")):
        record(kind, name)
    run = small_run({**LLAMA, "layers": 4}, "ddp", p, pp=p, schedule=schedule, virtual_stages=v, recipe={"grad_accum": 4, "seq_len": 32})
    observe(run, rank)
    assert done == 2 * [tuple(a) for a in rank_order(schedule, p, v, 4, rank)]


def test_ddp_sees_no_gradient_of_a_split_backward() -> None:
    """Why such a pipeline is refused: torch.autograd.grad, of which both passes are made, runs no hook of a parameter, and nothing says so."""
    sent: list[int] = []

    def reduced(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        sent.append(bucket.buffer().numel())
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    with compat.fake_world(2, 0):
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
        model.register_comm_hook(None, reduced)
        x = torch.randn(2, 4, requires_grad=True)
        model(x).sum().backward()
        assert sent == [20]
        model.zero_grad()
        with model.no_sync():
            y = model(x)
        model.reducer.prepare_for_backward([y])  # as backward_maybe_with_nosync does for the last micro-batch
        _, groups = stage_backward_input([y], [torch.ones_like(y)], [x], model.parameters())
        stage_backward_weight(model.parameters(), groups)
        assert all(p.grad is not None for p in model.parameters())
        assert sent == [20]
    run = small_run({**LLAMA, "layers": 4}, "ddp", 4, pp=2, schedule="zb-h1", recipe={"grad_accum": 4, "seq_len": 32})
    with pytest.raises(PlanError, match="would not reduce them"):
        observe(run, 0)


def test_a_checkpoint_is_computed_again_for_every_weight_of_a_split_backward() -> None:
    """Why that is refused: each torch.autograd.grad, one for the input and one for every group of weights, unpacks what was saved anew."""
    computed: list[int] = []
    layer = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(x: torch.Tensor) -> torch.Tensor:
        computed.append(1)
        return x + layer[2](layer[0](x).relu() * layer[1](x))

    x = torch.randn(2, 4, requires_grad=True)
    y = checkpoint(forward, x, use_reentrant=False)
    computed.clear()
    _, groups = stage_backward_input([y], [torch.ones_like(y)], [x], layer.parameters())
    assert len(computed) == 1
    stage_backward_weight(layer.parameters(), groups)
    assert len(computed) == 1 + len(groups) == 1 + 3
