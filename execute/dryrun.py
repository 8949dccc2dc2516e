"""The dry run: the real PyTorch program of one rank, on fake tensors and a fake process group, at any world size.

Bytes and collectives are exact; there is no time, no allocator rounding, no workspace of a library. The first step is reported too
(optimizer state is born in it, DDP's buckets are not rebuilt yet); the second is the one that counts.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from costmodel.report import HostMemory, MemoryReport, Peak, RoleReport, StepReport
from costmodel.spec import Run
from execute import compat
from execute.assemble import give_storage, outline, prepare
from execute.data import pipeline_batch, random_batch
from execute.observe.collectives import CollectiveRecorder
from execute.observe.storage import HOST, LIBRARY, Instant, StorageTracker, steady_gc
from execute.optim import state_tensors
from execute.step import train_step
from execute.strategies import Prepared
from execute.strategies.pipeline import Stages
from execute.support import check_supported
from execute.weights import init_weights

STEPS = ("first step", "steady step")
FLATTENED = ("zero2.flatten", "deepspeed.reduce_gradients")


class Observation(NamedTuple):
    """A dry run with everything that was seen."""

    run: Run
    tracker: StorageTracker
    collectives: CollectiveRecorder
    states: dict[str, int]
    """Bytes alive after the last step, by category."""
    host: HostMemory | None = None
    """What is offloaded."""


def dry_run(run: Run, rank: int = 0) -> StepReport:
    """Perform two steps of `rank` on fake tensors and report the second."""
    return report(observe(run, rank), rank)


def observe(run: Run, rank: int = 0) -> Observation:
    """Perform two steps of `rank` on fake tensors, every storage and collective recorded."""
    check_supported(run)
    with compat.fake_world(run.plan.world_size, rank):
        return _perform(run, STEPS, dry=True)


def observe_real(run: Run, device: str = "cpu") -> Observation:
    """The same on real tensors, in the caller's process group: three steps, the last is the one that counts.

    In the second step the real DDP agrees on its rebuilt buckets, which the dry run does not re-enact.
    """
    check_supported(run, "run")
    return _perform(run, (STEPS[0], "second step", STEPS[1]), dry=False, device=device)


def _perform(run: Run, steps: tuple[str, ...], *, dry: bool, device: str = "cpu") -> Observation:
    recorder = CollectiveRecorder()
    tracker = StorageTracker([recorder])
    offloads = run.plan.offload != "none"
    with steady_gc():
        model = outline(run, torch.device(device).type, real=not dry, around=tracker.recompute)
        with compat.FakeTensorMode() if dry else nullcontext(), tracker, tracker.offload() if offloads else nullcontext():
            give_storage(model, device)
            if not dry:
                with tracker.pause():
                    init_weights(model)
            tracker.label(model.parameters(), "parameters")
            tracker.label(model.buffers(), "framework")
            tracker.follow(model)
            prepared = prepare(run, model, dry=dry, device=device, region=partial(_region, tracker, model))
            recorder.name_axes(prepared.axes)
            batch = partial(pipeline_batch, run, model.ends, device) if isinstance(model, Stages) else partial(random_batch, run, device)
            as_cuda = run.cluster.accelerator.kernel_table == "cuda" if dry else device != "cpu"
            marks = Marks(tracker, prepared, cuda=as_cuda and not offloads)
            for step in steps:
                tracker.step = step
                train_step(run, prepared, batch, marks)
                marks.step_ended()
            states, host = tracker.alive(), tracker.host(STEPS[1])
            del prepared, marks
        del model
    return Observation(run, tracker, recorder, states, host)


def _region(tracker: StorageTracker, model: nn.Module, name: str) -> AbstractContextManager[None]:
    """A strategy's communication hook; the gradients that ZeRO is about to flatten and free were gradients."""
    if name in FLATTENED:
        tracker.label([p.grad for p in model.parameters()], "gradients")
    return tracker.hook(name)


class Marks:
    """Tells the tracker what the step is doing, and what its tensors became (execute.step.Marks)."""

    def __init__(self, tracker: StorageTracker, prepared: Prepared, *, cuda: bool) -> None:
        self.tracker, self.prepared, self.cuda = tracker, prepared, cuda
        self.forward, self.phase_of = tracker.forward, tracker.phase_of

    def backward_ended(self) -> None:
        with torch.no_grad():
            for group in compat.fsdp_groups(self.prepared.model):
                self.tracker.label(compat.unsharded_gradients(group), "communication")
            self._label_gradients()

    def _label_gradients(self) -> None:
        optimized = [p for group in self.prepared.optimizer.param_groups for p in group["params"]]
        self.tracker.label([p.grad for p in (*self.prepared.model.parameters(), *optimized)], "gradients")
        self._label_held()

    def _label_held(self) -> None:
        for category, tensors in self.prepared.holds():
            self.tracker.label(tensors, category)

    def step_ended(self) -> None:
        self.tracker.label(self.prepared.model.parameters(), "parameters")
        self._label_held()
        device, host = state_tensors(self.prepared.optimizer)
        if self.prepared.loss_scale is not None:
            self.tracker.label([self.prepared.loss_scale.scale, self.prepared.loss_scale.growth_tracker], "framework")
        self.tracker.label(device + ([] if self.cuda else host), "optimizer")
        if self.cuda:
            self.tracker.label(host, HOST)


def report(seen: Observation, rank: int) -> StepReport:
    """The StepReport of an observation."""
    run, tracker = seen.run, seen.tracker
    steady, optimizer = tracker.peak(STEPS[1]), tracker.peak(STEPS[1], ("unscale", "clip", "optimizer"))
    assert steady is not None
    phases: dict[str, Peak | None] = {"init": tracker.peak("init"), "first step": tracker.peak(STEPS[0]), "steady step": steady,
                                      "optimizer step": optimizer}
    memory = MemoryReport(allocated=steady, phases={k: v for k, v in phases.items() if v is not None}, states=seen.states,
                          activations_bytes=tracker.highest(STEPS[1], "activations"),
                          workspace_bytes=tracker.highest(STEPS[1], LIBRARY) or None,
                          capacity_bytes=run.cluster.accelerator.memory_bytes, host=seen.host)
    role = RoleReport(role=f"rank {rank}", ranks=run.plan.world_size // run.plan.pp, example_rank=rank, memory=memory, time=None,
                      collectives=seen.collectives.summary(STEPS[1]))
    return StepReport(provenance="dryrun", roles=(role,), world_size=run.plan.world_size, tokens_per_step=run.tokens_per_step,
                      basis={"memory": "exact", "collectives": "exact"})


def timeline(run: Run, rank: int = 0) -> list[Instant]:
    """The allocation timeline of the steady step of a dry run: (moment, total bytes, bytes by category) at every change."""
    return observe(run, rank).tracker.timeline(STEPS[1])
