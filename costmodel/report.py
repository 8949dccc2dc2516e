"""StepReport: what a step costs, whoever says it: the prediction, the dry run, or a measurement.

What was not observed is None, never 0. Bytes are int, times are seconds per optimizer step unless named otherwise.
"""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

CATEGORIES = ("parameters", "gradients", "master_weights", "optimizer", "activations", "communication", "temporaries", "framework")
Provenance = Literal["predicted", "dryrun", "solo", "run", "published"]
Basis = Literal["exact", "modelled", "fitted", "guess"]
Verdict = Literal["fits", "risky", "does not fit", "unknown"]


@dataclass(frozen=True, slots=True)
class Peak:
    """A moment of high memory: its total, in words when it happens, and its split."""

    total_bytes: int
    moment: str
    by_category: dict[str, int]


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Memory of one rank role. Allocated, reserved and device total are three different figures."""

    allocated: Peak
    """Live tensors at the highest moment of training (PyTorch's max_memory_allocated)."""
    phases: dict[str, Peak]
    """init, first step, steady step, optimizer step: the peak within each."""
    states: dict[str, int]
    """Bytes that persist between steady steps, by category."""
    activations_bytes: int | None
    """Highest sum of saved activations alone."""
    workspace_bytes: int | None = None
    """Workspaces of libraries (cuBLAS), which the allocator serves: PyTorch's own max_memory_allocated is `allocated` plus these."""
    reserved_bytes: int | None = None
    """What the caching allocator holds, workspaces included (max_memory_reserved)."""
    device_bytes: int | None = None
    """Reserved plus context and NCCL (nvidia-smi)."""
    outside: dict[str, int] = field(default_factory=dict)
    """Parts of device_bytes outside the allocator: context, nccl."""
    capacity_bytes: int | None = None
    verdict: Verdict = "unknown"
    headroom_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Collective:
    """One kind of collective of a step: how many, over which group, how much each."""

    phase: str
    axis: str
    kind: str
    group: int
    count: int
    in_bytes: int
    out_bytes: int
    message_bytes: int
    dtype: str
    total_s: float | None = None


@dataclass(frozen=True, slots=True)
class TimeReport:
    """Time of one step on one rank role; the parts of `breakdown` sum to step_s."""

    step_s: float
    phases: dict[str, float]
    """forward, backward, optimizer, …: sums to step_s."""
    breakdown: dict[str, float]
    """What the compute stream did: matmul, attention, memory-bound, recompute, host wait, exposed communication per
    axis, contention, bubble, optimizer, fixed; sums to step_s."""
    communication_s: dict[str, float]
    """Seconds of communication by axis, hidden or not."""
    exposed_s: dict[str, float]
    """Seconds of it that compute waited for, by axis."""
    host_s: float | None = None
    """Seconds the host spends issuing work."""
    bubble_s: float | None = None
    flops: dict[str, float] | None = None
    """FLOPs that its matmuls and attention kernels run, without recompute: attention's causal half is left out where it is skipped, and
    the scores that a flash backward computes again are counted."""


@dataclass(frozen=True, slots=True)
class RoleReport:
    """One rank role: ranks that run the same program."""

    role: str
    ranks: int
    example_rank: int
    memory: MemoryReport | None
    time: TimeReport | None
    collectives: tuple[Collective, ...] | None


@dataclass(frozen=True, slots=True)
class Scaling:
    """Efficiency against one GPU of the same kind, whose capacity is ignored."""

    weak: float | None
    """tokens/s/GPU over one GPU at the same micro-batch."""
    strong: float | None
    """The same for the same global batch."""
    baseline_step_s: float | None
    baseline_fits: bool | None


@dataclass(frozen=True, slots=True)
class Training:
    """Steps like this one, one after another, until so many tokens were seen: no restart, evaluation or checkpoint between them."""

    tokens: int
    steps: int
    seconds: float
    days: float
    gpu_hours: float
    interval_days: tuple[float, float] | None = None
    """By the step's interval."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """The answer about one step; the roles, and the figures of the whole job."""

    provenance: Provenance
    roles: tuple[RoleReport, ...]
    world_size: int
    tokens_per_step: int
    model_flops: float | None = None
    """FLOPs of one step over all ranks, without recompute; see docs/time.md for the convention."""
    hardware_flops: float | None = None
    """With activation recompute."""
    peak_flops_per_s: float | None = None
    """Dense peak of the compute dtype of one GPU."""
    scaling: Scaling | None = None
    bound_by: str = ""
    notes: tuple[str, ...] = ()
    """Findings a user should read: rules of thumb broken, guesses made."""
    basis: dict[str, Basis] = field(default_factory=dict)
    interval: dict[str, tuple[float, float]] | None = None
    """10% and 90% quantiles of step_s, reserved_bytes and device_bytes, where the profile has uncertainty and they were asked for."""

    @property
    def step_s(self) -> float | None:
        """Seconds of the slowest role."""
        times = [r.time.step_s for r in self.roles if r.time]
        return max(times) if times else None

    @property
    def tokens_per_s(self) -> float | None:
        return self.tokens_per_step / self.step_s if self.step_s else None

    @property
    def tokens_per_s_per_gpu(self) -> float | None:
        return self.tokens_per_s / self.world_size if self.tokens_per_s else None

    def _utilisation(self, flops: float | None) -> float | None:
        if not (flops and self.step_s and self.peak_flops_per_s):
            return None
        return flops / self.step_s / self.world_size / self.peak_flops_per_s

    @property
    def mfu(self) -> float | None:
        """Model FLOPs per second over the peak."""
        return self._utilisation(self.model_flops)

    @property
    def hfu(self) -> float | None:
        """Hardware FLOPs per second over the peak."""
        return self._utilisation(self.hardware_flops)

    def training(self, tokens: int) -> Training | None:
        """What a training on so many tokens takes, where the step's time is known."""
        if not self.step_s:
            return None
        steps = -(-tokens // self.tokens_per_step)
        seconds, day = steps * self.step_s, 86400
        low, high = (self.interval or {}).get("step_s", (0.0, 0.0))
        return Training(tokens, steps, seconds, seconds / day, seconds / 3600 * self.world_size,
                        (steps * low / day, steps * high / day) if high else None)

    @property
    def fullest(self) -> RoleReport:
        """The role with the highest allocated peak."""
        return max(self.roles, key=lambda r: r.memory.allocated.total_bytes if r.memory else -1)

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of any role."""
        order: dict[Verdict, int] = {"does not fit": 3, "risky": 2, "unknown": 1, "fits": 0}
        verdicts: list[Verdict] = [r.memory.verdict for r in self.roles if r.memory]
        return max(verdicts, key=lambda v: order[v], default="unknown")

    def to_dict(self) -> dict[str, Any]:
        """Plain data with stable keys (docs/report.md), derived figures included under `derived`."""
        data = asdict(self)
        data["derived"] = {"step_s": self.step_s, "tokens_per_s": self.tokens_per_s,
                           "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu, "mfu": self.mfu, "hfu": self.hfu,
                           "verdict": self.verdict}
        return data


def report_from_dict(data: dict[str, Any]) -> StepReport:
    """Read what `StepReport.to_dict` wrote; a wrong shape is a pydantic ValidationError."""
    from pydantic import TypeAdapter
    data = {k: v for k, v in data.items() if k != "derived"}
    return TypeAdapter(StepReport).validate_python(data)
