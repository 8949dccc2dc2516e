"""One small Transformer, the same batch, spread in every way: what each measures against one device, and against its prediction.

Throughput is that of the same global batch, so that ranks share the work of the one device (strong scaling). A step that is not n times
shorter than the one device's is longer by three parts, which sum: work (computation that is repeated, or slower), exposed communication,
and idle time (the host, and waiting for others).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from costmodel.explain import Explanation, explain
from costmodel.inputs import build_run
from costmodel.prediction import predict
from costmodel.records import Outcome
from costmodel.report import StepReport, TimeReport
from costmodel.spec import Run
from execute.strategies import strategy_name
from execute.suite import SMALL, Case, Machine, model_of

SEQUENCES = 8
"""Of a step, whatever the plan."""
PIPELINED = 4
"""Micro-batches of a pipeline's step."""


def cases(machine: Machine, ranks: int, model: dict[str, Any] | None = None, *, deepspeed: bool = False) -> Iterator[Case]:
    """The one device first; DeepSpeed's ZeRO where it is asked for."""
    on_gpu = machine.on_gpu
    model = model or (model_of(1024) if on_gpu else SMALL)
    base = {"seq_len": 2048, "precision": "bf16-pure"} if on_gpu else {"seq_len": 128, "precision": "fp32"}

    def case(name: str, n: int, strategy: str, *, dp: int, micro_batches: int = 1, **plan: Any) -> Case:
        """The whole batch, over dp ranks, in as few micro-batches as the plan allows."""
        recipe = {**base, "global_batch": SEQUENCES, "micro_batch": SEQUENCES // (dp * micro_batches)}
        return Case(name, build_run(model=model, cluster={"gpu": machine.gpu, "gpus": n}, plan={"strategy": strategy, "dp": dp, **plan}, recipe=recipe))

    yield case("one device", 1, "single", dp=1)
    if ranks == 1:
        return
    yield case("DDP", ranks, "ddp", dp=ranks)
    yield case("ZeRO-1", ranks, "zero1", dp=ranks)
    yield case("ZeRO-2", ranks, "zero2", dp=ranks)
    yield case("ZeRO-3 (FSDP)", ranks, "fsdp", dp=ranks)
    yield case("FSDP, kept gathered", ranks, "fsdp", dp=ranks, reshard_after_forward=False)
    yield case("TP", ranks, "ddp", dp=1, tp=ranks)
    yield case("PP (1F1B)", ranks, "ddp", dp=1, pp=ranks, micro_batches=PIPELINED)
    for stage in (1, 2, 3) if deepspeed and not on_gpu else ():  # on GPUs the others compute in pure bf16, and DeepSpeed keeps an fp32 copy
        yield case(f"DeepSpeed ZeRO-{stage}", ranks, f"zero{stage}", dp=ranks, framework="deepspeed", bucket_bytes=1 << 22)


class Figures(NamedTuple):
    """What is laid side by side; of the slowest and of the fullest role. None where it was not seen."""

    step_s: float | None
    tokens_per_s: float | None
    peak_bytes: int | None
    states_bytes: int | None
    communication_s: float | None
    exposed_s: float | None
    """Waited for. A measurement cannot tell a pipeline's bubble from it; so the predicted bubble is in it too."""

    @property
    def overlap(self) -> float | None:
        """The share of communication that computation hides; None where a bubble is waited for beside it."""
        total, exposed = self.communication_s, self.exposed_s
        return 1 - exposed / total if total and exposed is not None and exposed <= total else None


class Longer(NamedTuple):
    """Why a step is not n times shorter than the one device's: seconds, which sum to the difference."""

    ideal_s: float
    """The one device's step over the ranks."""
    work_s: float
    exposed_s: float
    idle_s: float


@dataclass(frozen=True, slots=True)
class Entry:
    """One way to spread the step."""

    name: str
    run: Run
    outcome: Outcome
    measured: StepReport | None
    predicted: StepReport
    explanation: Explanation

    @property
    def ranks(self) -> int:
        return self.run.plan.world_size


def entry(case: Case, outcome: Outcome, measured: StepReport | None) -> Entry:
    """A case that was performed, beside its prediction."""
    report = predict(case.run)
    return Entry(case.name, case.run, outcome, measured, report, explain(case.run, report))


def slowest(report: StepReport) -> TimeReport | None:
    """The time of the role that takes longest."""
    return max((r.time for r in report.roles if r.time is not None), key=lambda t: t.step_s, default=None)


def figures(report: StepReport | None) -> Figures:
    """Of a measurement or a prediction."""
    if report is None:
        return Figures(None, None, None, None, None, None)
    time, memory = slowest(report), report.fullest.memory
    return Figures(report.step_s, report.tokens_per_s, memory.allocated.total_bytes if memory else None, sum(memory.states.values()) if memory else None,
                   sum(time.communication_s.values()) if time else None, sum(time.exposed_s.values()) + (time.bubble_s or 0.0) if time else None)


def longer(one: Entry, other: Entry) -> Longer | None:
    """Where the seconds went by which a measured step misses the ideal."""
    if one.measured is None or other.measured is None:
        return None
    base, time = slowest(one.measured), slowest(other.measured)
    if base is None or time is None:
        return None
    def idle(t: TimeReport) -> float:
        return t.breakdown.get("idle", 0.0)

    n = other.ranks
    return Longer(base.step_s / n, _work(time) - _work(base) / n, sum(time.exposed_s.values()), idle(time) - idle(base) / n)


def _work(time: TimeReport) -> float:
    """Seconds of computation."""
    return sum(s for name, s in time.breakdown.items() if name != "idle" and not name.startswith("exposed "))


# -- in words -----------------------------------------------------------------------------------------------------------------

PLACED = {"copied": "replicated", "sharded": "sharded (each rank stores a piece)", "divided": "divided (each rank works with its own part alone)",
          "partly divided": "partly divided"}


def placed(e: Entry) -> list[str]:
    """What is replicated, sharded and divided, one line a way."""
    ways: dict[str, list[str]] = {}
    for holding in e.explanation.holdings:
        for placement in holding.placements.values():
            ways.setdefault(PLACED.get(placement, placement), []).append(holding.name.replace("_", " "))
    return [f"{way}: {', '.join(dict.fromkeys(names))}" for way, names in ways.items()]


def sent(e: Entry) -> list[str]:
    """What is communicated in a step, as measured: kind, axis, how often, how much."""
    role = e.measured.fullest if e.measured is not None else e.predicted.fullest
    totals: dict[tuple[str, str, str], tuple[int, int]] = {}
    for c in role.collectives or ():
        if c.group > 1:
            count, size = totals.get((c.kind, c.axis, c.phase), (0, 0))
            totals[c.kind, c.axis, c.phase] = count + c.count, size + c.count * c.message_bytes
    return [f"{count} x {kind} over {axis} {_when(phase)}, {size / (1 << 20):.2f} MiB together" for (kind, axis, phase), (count, size) in totals.items()]


def _when(phase: str) -> str:
    """The recorder calls what a pipeline's schedule does between the passes of its micro-batches init."""
    return "between stages" if phase == "init" else f"in {phase}"


def why(one: Entry, other: Entry) -> list[str]:
    """Why throughput and memory differ from the one device's, in words with the measured figures."""
    parts, mine, base = longer(one, other), figures(other.measured), figures(one.measured)
    lines = []
    if parts is not None and mine.step_s is not None:
        n = other.ranks
        lines.append(f"An even share of the one device's step would be {parts.ideal_s * 1e3:.1f} ms; it took {mine.step_s * 1e3:.1f} ms: "
                     f"{_signed(parts.work_s)} of work, {_signed(parts.exposed_s)} waiting for communication, {_signed(parts.idle_s)} idle.")
        lines += list(_causes(other, parts))
        if mine.peak_bytes and base.peak_bytes:
            lines.append(f"A rank's peak is {mine.peak_bytes / base.peak_bytes:.0%} of the one device's (an even share would be {1 / n:.0%}); "
                         f"between steps it holds {(mine.states_bytes or 0) / (base.states_bytes or 1):.0%} of its state. "
                         f"At the peak: {_split(other)}; the one device: {_split(one)}.")
    return lines


def _split(e: Entry) -> str:
    """What fills the fullest rank at its peak, the largest first."""
    assert e.measured is not None
    memory = e.measured.fullest.memory
    parts = sorted(memory.allocated.by_category.items(), key=lambda part: -part[1]) if memory else []
    return ", ".join(f"{name.replace('_', ' ')} {size / (1 << 20):.1f} MiB" for name, size in parts if size >= 1 << 17)


SMALLER = "matrix products of fewer sequences are less efficient"
MORE_WORK = {"ddp": f"gradients are copied into buckets, every rank updates all parameters, and {SMALLER}.",
             "zero1": f"gradients are copied into buckets, and {SMALLER}.", "zero2": f"gradients are flattened into buckets, and {SMALLER}.",
             "deepspeed": f"gradients are copied into buckets and flattened again to be sent and to be used, and {SMALLER}.",
             "fsdp": f"gathered parameters are copied out of buffers and gradients into them, and {SMALLER}.",
             "tensor": "norms, residuals and the embedding's output are computed whole on every rank, and narrower matrix products are less efficient.",
             "pipeline": f"{SMALLER}, and stages are not even: the last one has the head and the loss."}
WAITED_FOR = {"tensor": "a layer cannot go on before its all-reduce is done.", "pipeline": "a stage has nothing to do before its neighbour has sent"}
LAST = "the last reduction has no computation left to hide it, and the others are hidden only where they take no longer than what runs beside them."


def _causes(other: Entry, parts: Longer) -> Iterator[str]:
    """The mechanisms of a plan, where the measurement shows their cost: above one fiftieth of the step."""
    p, kind = other.run.plan, strategy_name(other.run)
    noticed = 0.02 * ((other.measured.step_s if other.measured else None) or 0.0)
    if parts.work_s > noticed:
        yield f"More work: {MORE_WORK[kind]}"
    if parts.exposed_s > noticed:
        m = other.run.micro_batches
        bubble = f"; the bubble is at least (p-1)/(m+p-1) = {(p.pp - 1) / (m + p.pp - 1):.0%} of a step with {m} micro-batches on {p.pp} stages."
        yield f"Waiting for communication: {WAITED_FOR.get(kind, LAST)}{bubble if kind == 'pipeline' else ''}"
    if parts.idle_s > noticed:
        yield "Idle: the host issues more and smaller operations, and ranks wait for the slowest."


def _signed(seconds: float) -> str:
    return f"{seconds * 1e3:+.1f} ms"
