"""A program already built, priced anew: on other constants, and how far the uncertainty of the constants moves its step.

A pricing costs about half of a prediction.
"""

import math
from collections.abc import Mapping

from costmodel.catalog.profiles import Profile
from costmodel.cost.prices import RunPrices
from costmodel.program.build import Program, build
from costmodel.program.host import CONTEXT, DTENSOR, FSDP_HOOK
from costmodel.program.layers import resolved_attention
from costmodel.program.replicas import build_replicas
from costmodel.program.stages import build_pipeline
from costmodel.report import TimeReport
from costmodel.simulate import Scan, seconds
from costmodel.spec import Run
from costmodel.timing import pipeline_seconds

NINE_IN_TEN = 1.2815515655446004
"""Standard deviations from the median of a normal distribution to its 90% quantile."""
Bounds = tuple[float, float]


def program_of(run: Run) -> Program:
    """The program of a run: of a pipeline's ranks, of DataParallel's GPUs, or of ranks that are alike."""
    if run.plan.pp > 1:
        return build_pipeline(run)
    return build_replicas(run) if run.plan.single_process and run.plan.dp > 1 else build(run)


def step_seconds(run: Run, program: Program, profile: Profile) -> float:
    """Seconds of one step of the slowest rank, as `predict` gives them, without the rest of the report."""
    prices = RunPrices(run, profile)
    scan = Scan(prices)
    longest = pipeline_seconds(run, program, prices, scan) if run.plan.pp > 1 else max(seconds(role.step, scan) for role in program.roles)
    return longest * (1.0 + prices.jitter * math.log2(run.cluster.gpus)) + prices.fixed


def interval(log_sd: float, value: float) -> Bounds | None:
    """10% and 90% quantiles of a log-normal figure; None where nothing is uncertain."""
    if log_sd <= 0.0:
        return None
    factor = math.exp(NINE_IN_TEN * log_sd)
    return value / factor, value * factor


def time_log_sd(run: Run, program: Program, profile: Profile, time: TimeReport) -> float:
    """Standard deviation of the logarithm of a step's time that follows from the profile's.

    The constants that whole kinds of work scale with are taken as independent. Host and links are moved by one standard deviation and
    the program priced again, so that what is hidden does not count. A step's time is homogeneous in its durations (Euler): what host,
    links and fixed times do not decide, kernels do, each kind by its share. Latencies and the losses of small shapes are left out:
    they matter to few steps, and `scatter.time`, what the formulas themselves miss, covers them there.
    """
    def sd(*keys: str) -> float:
        return math.hypot(*(profile.constants[key].log_sd for key in keys if key in profile.constants))

    def moved(keys: list[str], spread: float, direction: float) -> float:
        """d log(step) / d log(constant), over one standard deviation."""
        if spread <= 0.0:
            spread = SMALL
        other = profile.replace({key: profile.value(key) * math.exp(direction * spread) for key in keys})
        return math.log(step_seconds(run, program, other) / step) / spread * direction

    step = time.step_s - time.breakdown.get("slow rank", 0.0)
    share = {name: seconds / step for name, seconds in time.breakdown.items()}
    spreads = [(share.get("fixed", 0.0), sd("step.fixed_s")), (share.get("stragglers", 0.0), sd("jitter.per_doubling")),
               (share.get("contention", 0.0), sd("overlap.contention") if run.plan.contention is None else 0.0), (1.0, profile.get("scatter.time", 0.0))]
    kernels = 1.0 - share.get("fixed", 0.0)
    if (time.host_s or 0.0) > HOST_MATTERS * step:
        launch = "host.eager.forward_s" if not run.recipe.compile else "host.graph.kernel_s" if run.recipe.cuda_graphs else "host.compile.op_s"
        back = "host.eager.backward_s" if not run.recipe.compile else launch
        host = math.hypot(sd("host.multiplier"), HALF * sd(launch), HALF * sd(back))
        spreads.append(((moved(["host.multiplier"], host, 1.0) + moved(["host.multiplier"], host, -1.0)) / 2, host))
        kernels -= spreads[-1][0]
        for keys in _in_python(run):
            spread = math.hypot(*(HALF * sd(key) for key in keys))
            spreads.append((moved(keys, spread, 1.0), spread))
            kernels -= spreads[-1][0]
    if run.cluster.gpus > 1 and time.communication_s:
        links = [f"link.{kind}.share" for kind in dict.fromkeys(level.kind for level in run.cluster.levels)]
        slower = sd("tp.compile_factor" if run.recipe.compile else "tp.eager_factor") if run.plan.tp > 1 else 0.0
        network = math.hypot(max((sd(key) for key in links), default=0.0), slower)
        spreads.append((-moved(links, network, -1.0), network))
        kernels -= spreads[-1][0]
    spreads += _kernels(run, profile, share, kernels)
    return math.sqrt(sum((sensitivity * spread) ** 2 for sensitivity, spread in spreads))


HOST_MATTERS = 0.2
"""Share of the step's time that the host must be busy for its uncertainty to be looked at."""
HALF = 0.5
"""Of the host's launches are in forward, and as many in backward: either may be off without the other."""
SMALL = 1e-3
"""Step of a derivative where a constant is taken as certain."""


def _in_python(run: Run) -> list[list[str]]:
    """The constants of Python's own work that a run has, by cause."""
    p = run.plan
    python = p.framework == "pytorch"
    causes = {DTENSOR: python and p.tp > 1, FSDP_HOOK: python and p.zero == 3, CONTEXT: p.framework != "megatron" and p.cp > 1}
    return [[f"host.{cause}.forward_s", f"host.{cause}.backward_s"] for cause, on in causes.items() if on]


def _kernels(run: Run, profile: Profile, share: Mapping[str, float], whole: float) -> list[Bounds]:
    """(sensitivity, spread) of each kind of kernel; recompute repeats them in proportion. `whole` is what they decide together."""
    kernel = resolved_attention(run)
    rate = f"attention.{kernel if f'attention.{kernel}.share' in profile.constants else 'sdpa'}.share"
    keys = {"matmul": (f"matmul.{run.recipe.precision.compute}.peak_share",), "attention": (rate, "attention.backward"), "memory-bound": ("bandwidth.share",),
            "optimizer": ("bandwidth.share",)}
    times = {name: share.get(name, 0.0) for name in keys}
    again = share.get("recompute", 0.0) / max(1e-9, sum(times.values()) - times["optimizer"])
    times = {name: seconds * (1.0 if name == "optimizer" else 1.0 + again) for name, seconds in times.items()}
    times["memory-bound"] += times.pop("optimizer")
    busy = sum(times.values())
    scale = max(0.0, whole) / busy if busy else 0.0
    return [(seconds * scale, math.hypot(*(profile.constants[key].log_sd for key in keys[name] if key in profile.constants)))
            for name, seconds in times.items()]


def memory_intervals(run: Run, profile: Profile, pools_bytes: int, outside: Mapping[str, int]) -> dict[str, Bounds]:
    """Intervals of what the allocator holds and of what the device holds; live tensors are counted, not fitted, and have none."""
    split = profile.constant("memory.split_expandable" if run.recipe.allocator == "expandable" else "memory.split_default")
    workspace = profile.constant("memory.workspace_bytes")
    context = profile.constant("memory.context_bytes")
    nccl = max((profile.constant(f"memory.{key}").log_sd for key in ("nccl_node_bytes", "nccl_next_bytes")), default=0.0)
    reserved = pools_bytes * split.value + workspace.value
    inside = math.hypot(pools_bytes * split.value * split.log_sd, workspace.value * workspace.log_sd)
    device = reserved + sum(outside.values())
    whole = math.hypot(inside, outside.get("context", 0) * context.log_sd, outside.get("nccl", 0) * nccl)
    found = {"reserved_bytes": interval(inside / reserved if reserved else 0.0, reserved), "device_bytes": interval(whole / device if device else 0.0, device)}
    return {name: bounds for name, bounds in found.items() if bounds is not None}
