"""A probe: samples of one machine, each with a reference kernel timed beside it, as one JSON file and as evidence."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from calibrate.evidence import CollectiveEvidence, ContentionEvidence, DirectEvidence, Evidence, HostEvidence, KernelEvidence, Point
from costmodel.catalog.profiles import load_profile
from costmodel.cost.network import group_of
from costmodel.program.host import IN_PYTHON
from costmodel.program.ir import Op
from costmodel.records import Environment
from costmodel.spec import Model, Plan, Recipe, Run
from costmodel.spec.cluster import Cluster

SCHEMA = 1
Kind = Literal["matmul", "attention", "memory", "copy", "launch", "tensor", "python", "collective", "contention", "context"]
NOISE = {"matmul": 0.1, "attention": 0.15, "memory": 0.15, "copy": 0.1, "launch": 0.1, "tensor": 0.2, "python": 0.15, "collective": 0.2, "contention": 0.1,
         "context": 0.05}
"""Standard deviation of log(predicted / measured) that the formulas leave, before residuals say how much."""
PHASES = ("forward", "backward", "recompute")


class ProbeError(ValueError):
    """A file that is no probe; the message says why."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One thing timed, several times.

    matmul, attention, memory, copy: an Op of the cost model, by its dims, dtype, flops, nbytes and kernels. launch: host seconds of issuing
    one kernel (`name` is the phase). tensor: host seconds of an optimizer step per tensor. python: host seconds of what a strategy does for one
    layer, `counts` how often each price is paid for it. collective: `name` is its kind, `group` its
    ranks, nbytes in the convention of ir.Comm. contention: a kernel and a collective together, and in `alone_s` each alone. context: bytes.
    """

    kind: Kind
    name: str
    values: tuple[float, ...]
    """Seconds of each repeat; of a context, bytes."""
    reference_s: tuple[float, ...] = ()
    """Seconds of the reference kernel beside each repeat."""
    dims: tuple[int, ...] = ()
    dtype: str = "fp32"
    flops: float = 0.0
    nbytes: float = 0.0
    kernels: int = 1
    group: int = 1
    alone_s: tuple[float, float] | None = None
    counts: dict[str, float] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """A name that no other sample of a probe has."""
        shape = "x".join(map(str, self.dims)) or (f"{self.nbytes:.0f} B" if self.nbytes else "")
        return " ".join(part for part in (self.kind, self.name, self.dtype, shape, f"over {self.group}" if self.group > 1 else "") if part)


@dataclass(frozen=True, slots=True)
class Probe:
    """A machine, measured."""

    cluster: Cluster
    """One rank's device and the links of the largest group that was timed."""
    environment: Environment
    date: str
    """UTC, ISO 8601."""
    samples: tuple[Sample, ...]
    links: tuple[str, ...] = field(default=())
    """What was found of the links, in words."""

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "kind": "probe", "cluster": self.cluster.model_dump(mode="json"), "environment": asdict(self.environment),
                "date": self.date, "links": list(self.links), "samples": [asdict(s) for s in self.samples]}


def probe_from_dict(data: Any) -> Probe:
    """Read what `Probe.to_dict` wrote. Raises ProbeError."""
    from pydantic import TypeAdapter, ValidationError
    if not isinstance(data, dict) or data.get("kind") != "probe":
        raise ProbeError("it is not a probe: a probe is a JSON object whose kind is \"probe\".")
    if data.get("schema") != SCHEMA:
        raise ProbeError(f"its schema is {data.get('schema')}, and this version reads {SCHEMA}.")
    try:
        return TypeAdapter(Probe).validate_python({k: v for k, v in data.items() if k not in ("schema", "kind")})
    except ValidationError as error:
        first = error.errors()[0]
        raise ProbeError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}.") from None


def typical_reference(samples: Sequence[Sample]) -> float:
    """Median seconds of the reference kernel over a probe; 1 where it was not timed."""
    seconds = [s for sample in samples for s in sample.reference_s]
    return statistics.median(seconds) if seconds else 1.0


def steady(sample: Sample, reference_s: float) -> float:
    """The median repeat, each divided by how slow the reference kernel beside it was: a machine that drifts slows both."""
    if sample.kind == "context" or len(sample.reference_s) != len(sample.values):
        return statistics.median(sample.values)
    return statistics.median(v / r * reference_s for v, r in zip(sample.values, sample.reference_s, strict=True))


def probe_run(cluster: Cluster) -> Run:
    """The smallest run on a cluster: it carries the machine to the profiles."""
    compute = "bf16" if cluster.accelerator.flops_per_s.get("bf16") else "fp32"
    precision = Recipe().precision.model_copy(update={"compute": compute})
    return Run(model=Model(layers=1, hidden=64, heads=1, ffn=64, vocab=64), cluster=cluster, plan=Plan(dp_replicate=cluster.gpus),
               recipe=Recipe(seq_len=8, global_batch=cluster.gpus, precision=precision))


def probe_evidence(probe: Probe, base: str | None = None) -> list[Evidence]:
    """A probe as evidence, priced on the base profile."""
    run, reference = probe_run(probe.cluster), typical_reference(probe.samples)
    profile = load_profile(run, base)
    source = f"probe of {probe.environment.host}"
    grouped: dict[str, list[tuple[Sample, Point]]] = defaultdict(list)
    for sample in probe.samples:
        if sample.kind == "contention" and sample.alone_s is None:
            raise ProbeError(f"{sample.label} does not say what each takes alone (alone_s).")
        point = Point(sample.label, f"{source}, {sample.kind}", "time", steady(sample, reference), NOISE[sample.kind], sample.kind,
                      f"{probe.cluster.gpus} x {probe.cluster.accelerator.name}", sample.label)
        grouped["kernel" if sample.kind in ("matmul", "attention", "memory", "copy") else sample.kind].append((sample, point))
    out: list[Evidence] = []
    for kind, pairs in grouped.items():
        samples, points = [s for s, _ in pairs], tuple(p for _, p in pairs)
        if kind == "kernel":
            ops = tuple(Op(s.name, _kernel_kind(s.kind), s.flops, s.nbytes, s.dims, s.dtype, s.kernels) for s in samples)
            out.append(KernelEvidence(probe.cluster.accelerator, run.recipe, profile, points, ops))
        elif kind == "collective":
            calls = tuple((s.name, int(s.nbytes), group_of(probe.cluster, s.group)) for s in samples)
            out.append(CollectiveEvidence(probe.cluster, profile, points, calls))
        elif kind in ("launch", "tensor"):
            counts = tuple({"per tensor" if kind == "tensor" else f"launch {s.name}": 1.0} for s in samples)
            out.append(HostEvidence(run, profile, points, counts))
        elif kind == "python":
            out.append(HostEvidence(run, profile, points, tuple(_known(s) for s in samples)))
        elif kind == "contention":
            out.append(ContentionEvidence(profile, points, tuple(s.alone_s for s in samples if s.alone_s)))
        elif profile.value("memory.context_bytes") > 0:
            out.append(DirectEvidence(profile, points, ("memory.context_bytes",) * len(points)))
    return out


def _known(sample: Sample) -> dict[str, float]:
    """What a sample of a strategy's work is made of. Raises ProbeError at a price that there is not."""
    known = [f"{what} {phase}" for what in ("launch", *IN_PYTHON) for phase in ("forward", "backward")]
    for price in sample.counts or {"": 0.0}:
        if price not in (*known, "collective"):
            raise ProbeError(f"{sample.label} counts {price!r}, which is no price of the host: those are collective, {', '.join(known)}.")
    return sample.counts


def _kernel_kind(kind: Kind) -> Literal["matmul", "attention", "memory", "copy"]:
    assert kind in ("matmul", "attention", "memory", "copy")
    return kind
