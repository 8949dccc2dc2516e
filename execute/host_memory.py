"""Whether this host's memory can hold what the ranks of a job on its CPU need at least: asked before any of it is allocated.

At least: the states (parameters, gradients, master weights, optimizer), what a layer keeps of its input, the logits, and what a process with
PyTorch takes. It is counted from the run alone, without a prediction, and short of what a step needs: a run that passes may still not fit.
"""

from pathlib import Path

from costmodel.render.units import count, plural, size
from costmodel.spec import DTYPE_BYTES, PlanError, Run

PROCESS_BYTES = 300 << 20
"""Resident memory of a process that has loaded PyTorch and runs a tiny model: 320 to 470 MB were measured (torch 2.13, Linux)."""
STATES = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2, "adam8bit": 2, "muon": 1}
"""Copies of the parameters that an optimizer keeps."""


def check_host_memory(run: Run, ranks: int, available_bytes: int | None = None) -> None:
    """Raise PlanError where `ranks` of the run's ranks need more than this host has available; where that is not known, nothing."""
    available = available_host_bytes() if available_bytes is None else available_bytes
    each = least_bytes(run)
    if available is None or ranks * each <= available:
        return
    share = state_bytes(run) / run.model.params
    most = max(0, int((available / ranks - (each - state_bytes(run))) / share))
    fix = f"Use a model of at most {count(most)} parameters" if most else "Use a smaller batch or vocabulary, or fewer ranks"
    if run.plan.zero < 3 and run.plan.dp > 1:
        fix += ", zero = 3"
    raise PlanError("host memory", size(ranks * each), f"{plural(ranks, 'rank')} of this run need that much at least ({size(each)} each: "
                    f"{size(state_bytes(run))} of states, {size(each - state_bytes(run))} of inputs, logits and the process), and {size(available)} are "
                    "available.", f"{fix}, another host, or --no-memory-check.")


def available_host_bytes() -> int | None:
    """What new processes can have without swapping (MemAvailable of /proc/meminfo); None where the system does not tell."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return None


def least_bytes(run: Run) -> int:
    """Memory that one rank needs in a step, at least."""
    m, r, p = run.model, run.recipe, run.plan
    tokens = r.micro_batch * r.seq_len // p.cp
    element = DTYPE_BYTES[r.precision.compute if r.precision.compute != "fp8" else "bf16"]
    group = p.checkpointing.group if p.checkpointing.mode == "full" else 1
    inputs = tokens * m.hidden * (m.layers // (p.pp * group)) * element // (p.tp if p.sequence_parallel else 1)
    logits = tokens * m.vocab // p.tp * element // (r.loss_chunks if r.loss in ("chunked", "fused") else 1)
    return state_bytes(run) + inputs + (logits if p.pp == 1 else 0) + PROCESS_BYTES


def state_bytes(run: Run) -> int:
    """Parameters, gradients, master weights and optimizer states of one rank, each divided where the plan shards it."""
    p, precision = run.plan, run.recipe.precision
    mine = run.model.params / (p.tp * p.pp)
    low, gradient, kept = (DTYPE_BYTES[dtype] for dtype in (precision.parameter, precision.gradient, precision.optimizer_state))
    if run.recipe.optimizer.name == "adam8bit":
        kept = 1
    master = DTYPE_BYTES[precision.master] if precision.master else 0
    shards = p.state_shards

    def held(nbytes: int, from_stage: int) -> float:
        return mine * nbytes / (shards if p.zero >= from_stage else 1)

    return int(held(low, 3) + held(gradient, 2) + held(master + STATES[run.recipe.optimizer.name] * kept, 1))
