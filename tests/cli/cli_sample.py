"""A report made by hand, for tests of the command line and of the text: round figures, every field filled."""

from typing import Any

from costmodel.report import Collective, MemoryReport, Peak, RoleReport, Scaling, StepReport, TimeReport

GIB = 1 << 30


def memory(**changes: Any) -> MemoryReport:
    split = {"parameters": GIB // 2, "gradients": GIB // 2, "optimizer": GIB, "activations": 8 * GIB, "communication": GIB, "temporaries": GIB}
    kept = {"parameters": GIB // 2, "gradients": 0, "optimizer": GIB}
    values: dict[str, Any] = {
        "allocated": Peak(12 * GIB, "backward of the head, last micro-batch", split),
        "phases": {"init": Peak(GIB // 2, "end of init", {"parameters": GIB // 2}),
                   "first step": Peak(11 * GIB, "backward of the head", split),
                   "steady step": Peak(12 * GIB, "backward of the head, last micro-batch", split),
                   "optimizer step": Peak(4 * GIB, "fused update", kept)},
        "states": kept, "activations_bytes": 8 * GIB, "workspace_bytes": GIB // 2, "reserved_bytes": 14 * GIB, "device_bytes": 16 * GIB,
        "outside": {"context": GIB, "nccl": GIB}, "capacity_bytes": 80 * GIB, "verdict": "fits",
        "headroom_bytes": 64 * GIB}
    return MemoryReport(**{**values, **changes})


def report(**changes: Any) -> StepReport:
    """A step of 100 ms over 8 ranks, on which nothing is None."""
    time = TimeReport(step_s=0.1, phases={"forward": 0.03, "backward": 0.06, "optimizer": 0.01},
                      breakdown={"matmul": 0.06, "attention": 0.015, "memory-bound": 0.01, "exposed dp": 0.005, "optimizer": 0.01},
                      communication_s={"dp": 0.02}, exposed_s={"dp": 0.005}, host_s=0.05, bubble_s=0.0)
    collectives = (
        Collective("forward", "dp", "all-gather", 8, 15, GIB // 16, GIB // 2, GIB // 2, "bf16", 0.006),
        Collective("backward", "dp", "all-gather", 8, 15, GIB // 16, GIB // 2, GIB // 2, "bf16", 0.006),
        Collective("backward", "dp", "reduce-scatter", 8, 16, GIB, GIB // 8, GIB, "fp32", 0.008))
    values: dict[str, Any] = {
        "provenance": "predicted", "roles": (RoleReport("every rank", 8, 0, memory(), time, collectives),), "world_size": 8,
        "tokens_per_step": 32768, "model_flops": 2e14, "hardware_flops": 2.4e14, "peak_flops_per_s": 1e15,
        "scaling": Scaling(weak=0.95, strong=0.8, baseline_step_s=0.095, baseline_fits=False), "bound_by": "matmul: 60% of the step",
        "notes": ("Made by hand.",), "basis": {"memory": "modelled", "time": "guess"}, "interval": {"step_s": (0.08, 0.13)}}
    return StepReport(**{**values, **changes})
