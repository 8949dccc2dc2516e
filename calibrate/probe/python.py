# mypy: disable-error-code="no-untyped-call, no-any-return"
"""What PyTorch's strategies cost the host in Python: DTensor's dispatch, the hooks of fully_shard, the exchange of context parallelism.

Two models of small layers, one deeper than the other, under each strategy and without one, with a stand-in for the other rank. What a layer takes
more than the plain one is priced by what its program has more than the plain one's: launches, collectives, units of the host's work.
"""

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from calibrate.probe.clock import Clock
from calibrate.probe.record import Sample, steady
from costmodel import build_run
from costmodel.program.build import build
from costmodel.program.ir import expand
from costmodel.spec import Run
from costmodel.spec.cluster import Accelerator
from execute.assemble import assemble
from execute.stand_in import stand_in_world

PLANS: dict[str, dict[str, Any]] = {"plain": {}, "tensor": {"tp": 2}, "sequence": {"tp": 2, "sequence_parallel": True}, "fsdp": {"strategy": "fsdp"},
                                    "ring": {"cp": 2}, "ulysses": {"cp": 2, "cp_kind": "ulysses"}}
DEPTHS = 2, 6
PHASES = "forward", "backward"
TOKENS = 8
"""On a rank."""
PASSES = 5
"""Forward and backward passes of a repeat; the quickest counts."""
Counts = dict[str, float]


class Case(NamedTuple):
    """A plan, its models from shallow to deep, and what the program of one layer has."""

    name: str
    models: tuple[Any, ...]
    counts: dict[str, Counts]


def python_samples(device: str, accelerator: Accelerator, clock: Clock) -> Iterator[Sample]:
    """Seconds of a layer's forward and of its backward beyond those of a plain layer, for each strategy."""
    with stand_in_world(2, 0):
        plain, *spread = [_case(name, device, accelerator) for name in PLANS]
        tokens = torch.zeros(1, TOKENS, dtype=torch.int64, device=device)
        for case in (plain, *spread):
            _layer_s(case, tokens, clock)
        values: dict[str, list[tuple[float, ...]]] = {case.name: [] for case in spread}
        beside = []
        for _ in range(clock.repeats):
            before = clock.reference_s()
            own = _layer_s(plain, tokens, clock)
            for case in spread:
                values[case.name].append(tuple(a - b for a, b in zip(_layer_s(case, tokens, clock), own, strict=True)))
            beside.append((before + clock.reference_s()) / 2)
    for case in spread:
        for phase, seconds in zip(PHASES, zip(*values[case.name], strict=True), strict=True):
            found = Sample("python", f"{case.name} {phase}", seconds, tuple(beside), counts=_more(case.counts[phase], plain.counts[phase]))
            if steady(found, 1.0) > 0:  # else the machine was busier beside the plain layer
                yield found


def _case(name: str, device: str, accelerator: Accelerator) -> Case:
    runs = [_run(layers, PLANS[name], accelerator) for layers in DEPTHS]
    shallow, deep = (_counted(run) for run in runs)
    between = DEPTHS[1] - DEPTHS[0]
    counts = {phase: {what: (n - shallow[phase][what]) / between for what, n in deep[phase].items()} for phase in PHASES}
    return Case(name, tuple(assemble(run, f"{device}:0" if device == "cuda" else device) for run in runs), counts)


def _run(layers: int, plan: dict[str, Any], accelerator: Accelerator) -> Run:
    model = {"name": "small layers", "layers": layers, "hidden": 64, "heads": 2, "ffn": 128, "vocab": 64, "gated": True, "tied_embeddings": False}
    recipe = {"seq_len": TOKENS * plan.get("cp", 1), "micro_batch": 1, "precision": "fp32" if accelerator.kind == "cpu" else "bf16-pure"}
    return build_run(model=model, cluster={"gpu": accelerator.name, "gpus": 2 if plan else 1}, plan=plan, recipe=recipe)


def _counted(run: Run) -> dict[str, Counter[str]]:
    """How often the program of a step pays each price of the host (costmodel.cost.prices), by phase."""
    found: dict[str, Counter[str]] = {phase: Counter() for phase in PHASES}
    for block in expand(build(run).roles[0].step):
        if block.phase in found:
            for op in block.ops:
                price = f"{op.axis} {block.phase}" if op.kind == "host" else "collective" if op.comm else f"launch {block.phase}"
                found[block.phase][price] += 1 if op.comm else op.kernels
    return found


def _more(counts: Counts, plain: Counts) -> Counts:
    """What a layer has beyond a plain one."""
    return {what: n - plain.get(what, 0.0) for what, n in counts.items() if n > plain.get(what, 0.0)}


def _layer_s(case: Case, tokens: Any, clock: Clock) -> tuple[float, float]:
    """Seconds of one layer's forward and backward: the deeper model's less the other's, over the layers between."""
    shallow, deep = (_passes(prepared, tokens, clock) for prepared in case.models)
    ahead, back = ((b - a) / (DEPTHS[1] - DEPTHS[0]) for a, b in zip(shallow, deep, strict=True))
    return ahead, back


def _passes(prepared: Any, tokens: Any, clock: Clock) -> tuple[float, float]:
    """Seconds of forward and of backward, each of the quickest pass; kernels are done when a pass begins, so that the host alone is timed."""
    seconds = []
    for _ in range(PASSES):
        prepared.optimizer.zero_grad(True)
        clock.finish()
        with prepared.micro_batch(True):
            start = time.perf_counter()
            loss = prepared.model(tokens, tokens)
            between = time.perf_counter()
            loss.backward()
            seconds.append((between - start, time.perf_counter() - between))
    ahead, back = (min(each) for each in zip(*seconds, strict=True))
    return ahead, back
