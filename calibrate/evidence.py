"""Evidence: measurements, and what the cost model says of them on given constants.

A piece of evidence has one base profile and one or more points that are priced together: the time and memory of a step (`StepEvidence`),
the kernels or collectives of one machine (`KernelEvidence`, `CollectiveEvidence`). They share one currency, the natural logarithm of a
figure, and one vocabulary, the constants of a Profile, so that a fit takes any mix of them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from costmodel.catalog.profiles import Profile
from costmodel.cost.compute import compute_costs
from costmodel.cost.network import Group, network_costs
from costmodel.cost.prices import RunPrices
from costmodel.memory import memory_of
from costmodel.program.build import Program
from costmodel.program.host import IN_PYTHON, TENSOR
from costmodel.program.ir import Op
from costmodel.repricing import program_of, step_seconds
from costmodel.spec import Run
from costmodel.spec.cluster import Accelerator, Cluster
from costmodel.spec.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Point:
    """One measured figure."""

    name: str
    source: str
    """Who measured: residuals are summed up, and their scatter is estimated, by source."""
    figure: str
    """"time", or a kind of memory."""
    measured: float
    """Seconds or bytes, above 0."""
    noise: float
    """Standard deviation of its logarithm: repeats, and what the formulas are known to miss."""
    model: str = ""
    cluster: str = ""
    twin: str = ""
    """Points of one twin describe one configuration; a split never parts them."""
    setting: str = ""
    """Points of one setting (a publisher's software on one kind of machine) may share an offset that no constant has; empty: the source."""


class Evidence(Protocol):
    """Points that one profile prices."""

    @property
    def profile(self) -> Profile:
        """The constants before the fit, with their places."""
        ...

    @property
    def points(self) -> tuple[Point, ...]: ...

    def bears_on(self, key: str) -> bool:
        """Whether a constant can matter to any point; a cheap first look."""
        ...

    def log_predicted(self, profile: Profile) -> list[float]:
        """Natural logarithm of the prediction for every point, on other constants."""
        ...


@dataclass(frozen=True, slots=True)
class StepEvidence:
    """Time and memory of one step of a run. The program is built once; constants only price it."""

    run: Run
    profile: Profile
    points: tuple[Point, ...]
    program: Program
    pools_bytes: int = 0
    """Of the fullest rank: the peaks of its allocator pools, summed."""

    def bears_on(self, key: str) -> bool:
        if key.startswith("memory."):
            return any(point.figure == "reserved" for point in self.points)
        if not any(point.figure == "time" for point in self.points) or key.startswith("scatter."):
            return False
        compiled, tp = self.run.recipe.compile, self.run.plan.tp > 1
        python, p = self.run.plan.framework == "pytorch", self.run.plan
        mode = {"host.dtensor.": python and (tp or p.zero == 3), "host.fsdp.": python and p.zero == 3, "host.context.": p.cp > 1,
                "moe.": self.run.model.moe is not None, "host.eager.": not compiled, "host.compile.": compiled,
                "host.graph.": compiled and self.run.recipe.cuda_graphs, "tp.": tp,
                "link.": self.run.cluster.gpus > 1, "jitter.": self.run.cluster.gpus > 1, "overlap.": self.run.cluster.gpus > 1}
        return all(on for prefix, on in mode.items() if key.startswith(prefix))

    def log_predicted(self, profile: Profile) -> list[float]:
        return [math.log(self._figure(point.figure, profile)) for point in self.points]

    def _figure(self, figure: str, profile: Profile) -> float:
        if figure == "time":
            return step_seconds(self.run, self.program, profile)
        if figure == "reserved":
            split = "memory.split_expandable" if self.run.recipe.allocator == "expandable" else "memory.split_default"
            return self.pools_bytes * profile.value(split) + profile.value("memory.workspace_bytes")
        raise ValueError(f"no figure {figure!r}")


FIGURES = ("time", "reserved")
"""What a step's evidence can hold. Live tensors are counted, not fitted; what lies outside the allocator is measured by itself."""


def step_evidence(run: Run, profile: Profile, points: Sequence[Point]) -> StepEvidence:
    """Evidence of one step; builds its program."""
    program = program_of(run)
    pools = max(sum(memory_of(role).pool_peaks) for role in program.roles) if any(p.figure == "reserved" for p in points) else 0
    return StepEvidence(run, profile, tuple(points), program, pools)


@dataclass(frozen=True, slots=True)
class KernelEvidence:
    """Kernels of one accelerator, each timed alone: device seconds of an Op."""

    accelerator: Accelerator
    recipe: Recipe
    profile: Profile
    points: tuple[Point, ...]
    ops: tuple[Op, ...]

    def bears_on(self, key: str) -> bool:
        return key.startswith(("matmul.", "attention.", "bandwidth.", "copy."))

    def log_predicted(self, profile: Profile) -> list[float]:
        costs = compute_costs(self.accelerator, profile, self.recipe)
        return [math.log(costs.op_s(op)) for op in self.ops]


@dataclass(frozen=True, slots=True)
class CollectiveEvidence:
    """Collectives of one cluster: (kind, bytes, group) with bytes in the convention of ir.Comm."""

    cluster: Cluster
    profile: Profile
    points: tuple[Point, ...]
    calls: tuple[tuple[str, int, Group], ...]

    def bears_on(self, key: str) -> bool:
        return key.startswith("link.")

    def log_predicted(self, profile: Profile) -> list[float]:
        costs = network_costs(self.cluster, profile)
        return [math.log(costs.collective_s(kind, nbytes, group)) for kind, nbytes, group in self.calls]


@dataclass(frozen=True, slots=True)
class HostEvidence:
    """Host seconds of a run's host constants, timed alone: each point names the price (`launch forward`, `collective`, `per tensor`)."""

    run: Run
    profile: Profile
    points: tuple[Point, ...]
    counts: tuple[Mapping[str, float], ...]
    """Per point: how often each price is paid."""

    def bears_on(self, key: str) -> bool:
        return key.startswith(("host.", "step."))

    def log_predicted(self, profile: Profile) -> list[float]:
        prices = RunPrices(self.run, profile)
        cost = {**{f"launch {phase}": s for phase, s in prices.launch.items()}, "collective": prices.collective_host_s,
                "per tensor": prices.work_s(TENSOR, "optimizer"), "fixed": prices.fixed,
                **{f"{cause} {phase}": prices.work_s(cause, phase) for cause in IN_PYTHON for phase in ("forward", "backward")}}
        return [math.log(sum(n * cost[name] for name, n in count.items())) for count in self.counts]


@dataclass(frozen=True, slots=True)
class ContentionEvidence:
    """A kernel beside a collective: alone each takes (kernel_s, collective_s), together the longer plus contention times the shorter."""

    profile: Profile
    points: tuple[Point, ...]
    alone: tuple[tuple[float, float], ...]

    def bears_on(self, key: str) -> bool:
        return key == "overlap.contention"

    def log_predicted(self, profile: Profile) -> list[float]:
        kappa = profile.value("overlap.contention")
        return [math.log(max(pair) + kappa * min(pair)) for pair in self.alone]


@dataclass(frozen=True, slots=True)
class DirectEvidence:
    """Constants that were measured as they are, such as the bytes of a context."""

    profile: Profile
    points: tuple[Point, ...]
    keys: tuple[str, ...]

    def bears_on(self, key: str) -> bool:
        return key in self.keys

    def log_predicted(self, profile: Profile) -> list[float]:
        return [math.log(profile.value(key)) for key in self.keys]
