"""What a field case asks, as a predicted step."""

from typing import Any

from costmodel import StepReport, build_run, predict
from costmodel.report import MemoryReport, TimeReport
from costmodel.spec import Run

GB, GIB, MIB = 1e9, 1 << 30, 1 << 20

GPT: dict[str, Any] = {
    "gated": False, "activation": "gelu", "norm": "layernorm", "norm_bias": True, "qkv_bias": True, "attention_out_bias": True, "mlp_bias": True,
    "fused_qkv": True}
"""A GPT layer; its sizes are the case's."""


def run_of(*, model: Any = None, params: str | None = None, gpus: int = 1, gpu: str = "a100", plan: dict[str, Any] | None = None,
           cluster: dict[str, Any] | None = None, **recipe: Any) -> Run:
    """The run of a case; recipe fields as keywords."""
    return build_run(model=model, params=params, cluster={"gpus": gpus, "gpu": gpu, **(cluster or {})}, plan=plan or {}, recipe=recipe)


def predicted(**given: Any) -> StepReport:
    """Its step."""
    return predict(run_of(**given), scaling=False)


def memory(report: StepReport, role: int = 0) -> MemoryReport:
    """Memory of a role, the first unless named."""
    found = report.roles[role].memory
    assert found is not None
    return found


def states(report: StepReport, role: int = 0) -> dict[str, int]:
    """What stays between steps on a rank of a role, without the rotary tables and masks."""
    return {k: v for k, v in memory(report, role).states.items() if k != "framework"}


def kept(report: StepReport, role: int = 0) -> int:
    """Their sum."""
    return sum(states(report, role).values())


def activations(report: StepReport, role: int = 0) -> int:
    """Highest sum of saved activations."""
    found = memory(report, role).activations_bytes
    assert found is not None
    return found


def time(report: StepReport, role: int = 0) -> TimeReport:
    found = report.roles[role].time
    assert found is not None
    return found


def seconds(report: StepReport) -> float:
    """Of the step."""
    assert report.step_s is not None
    return report.step_s


def with_capacity(run: Run, gib: float) -> Run:
    """The run on a card of another size."""
    accelerator = run.cluster.accelerator.model_copy(update={"memory_bytes": int(gib * GIB)})
    return run.model_copy(update={"cluster": run.cluster.model_copy(update={"accelerator": accelerator})})


def network(gpus: int, per_node: int, gbit_per_s: float, inside: float = 300 * GB, kind: str = "ethernet") -> dict[str, Any]:
    """A cluster whose nodes share a network of so many Gb/s each; `inside` is what a GPU sends in its node, in bytes/s."""
    levels = ({"name": "node", "kind": "nvlink" if inside > 64 * GB else "pcie", "domain": per_node, "bytes_per_s": inside},
              {"name": "network", "kind": kind, "domain": gpus, "bytes_per_s": gbit_per_s * 1e9 / 8 / per_node})
    return {"gpus_per_node": per_node, "levels": levels}
