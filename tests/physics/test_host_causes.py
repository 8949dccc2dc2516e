"""The host's own work in Python: where it is, and where it costs time."""

from typing import Any

import pytest

from costmodel import Run, build_run, predict
from costmodel.catalog.profiles import load_profile
from costmodel.program.build import build
from costmodel.program.host import CONTEXT, DTENSOR
from costmodel.program.ir import expand

SMALL = {"layers": 4, "hidden": 64, "heads": 4, "ffn": 128, "vocab": 256}
CAUSES: dict[str, dict[str, Any]] = {"dtensor": {"tp": 2}, "fsdp": {"strategy": "fsdp"}, "context": {"cp": 2}}


def run_of(plan: dict[str, Any], model: Any = SMALL, gpu: str = "cpu_epyc_2core", **recipe: Any) -> Run:
    return build_run(model=model, cluster={"gpu": gpu, "gpus": 2}, plan=plan, recipe={"seq_len": 64, "micro_batch": 1, "precision": "fp32", **recipe})


def seconds(run: Run, cause: str, factor: float) -> float:
    """The step where a unit of the cause takes `factor` times as long."""
    base = load_profile(run)
    keys = (f"host.{cause}.forward_s", f"host.{cause}.backward_s")
    step_s = predict(run, base.replace({key: factor * base.value(key) for key in keys}), scaling=False, intervals=False).step_s
    assert step_s
    return step_s


def units(run: Run, cause: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for block in expand(build(run).roles[0].step):
        for op in block.ops:
            if op.kind == "host" and op.axis == cause:
                found[block.phase] = found.get(block.phase, 0) + op.kernels
    return found


def added(run: Run, cause: str) -> float:
    """Seconds of all its units."""
    base = load_profile(run)
    return sum(n * base.value(f"host.{cause}.{'backward' if phase == 'backward' else 'forward'}_s") for phase, n in units(run, cause).items())


@pytest.mark.parametrize("cause", CAUSES)
def test_on_one_thread_every_unit_adds_its_time(cause: str) -> None:
    """A CPU rank does one thing after another: twice the seconds a unit, and the step is longer by the units times these seconds."""
    run = run_of(CAUSES[cause])
    slower = 1 + load_profile(run).value("jitter.per_doubling")
    assert seconds(run, cause, 2.0) - seconds(run, cause, 1.0) == pytest.approx(slower * added(run, cause))


@pytest.mark.parametrize("cause", CAUSES)
def test_a_gpu_waits_for_it_where_kernels_are_small_and_else_at_the_beginning_of_a_step_alone(cause: str) -> None:
    """The host is ahead of kernels of milliseconds, but for the first and last of a step."""
    small = run_of(CAUSES[cause], gpu="h100", precision="bf16-pure")
    large = run_of(CAUSES[cause], "llama-3-8b", "h100", seq_len=8192, precision="bf16-pure", optimizer="sgd")
    for run, least, most in ((small, 0.9, 1.01), (large, 0.0, 0.05)):
        assert least <= (seconds(run, cause, 2.0) - seconds(run, cause, 1.0)) / added(run, cause) <= most


def test_a_compiled_layer_dispatches_nothing_and_the_modules_around_the_layers_still_do() -> None:
    eager, compiled = (units(run_of({"tp": 2}, {**SMALL, "layers": n}, compile=c), DTENSOR) for n, c in ((1, False), (1, True)))
    deeper = [units(run_of({"tp": 2}, {**SMALL, "layers": 3}, compile=c), DTENSOR) for c in (False, True)]
    assert deeper[0]["forward"] > eager["forward"] > compiled["forward"] > 0
    assert deeper[1]["forward"] == compiled["forward"]
    assert deeper[1]["backward"] == compiled["backward"]


def test_megatron_has_no_work_of_this_kind() -> None:
    run = run_of({"tp": 2, "framework": "megatron"}, precision="bf16-mixed", gpu="h100")
    assert not units(run, DTENSOR)
    assert not units(run_of({"cp": 2, "framework": "megatron"}, precision="bf16-mixed", gpu="h100"), CONTEXT)
