"""A standard list of runs that this machine can perform: every strategy, the model as large as half of a device's memory and no larger than it need be."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from costmodel.inputs import build_run
from costmodel.spec import Run

SMALL: dict[str, Any] = {"name": "validate-small", "layers": 4, "hidden": 256, "heads": 8, "kv_heads": 4, "ffn": 688, "vocab": 2048}
"""For CPUs, whose steps would else take minutes."""
SIZES = (2048, 1536, 1024, 512)
"""Hidden sizes for GPUs, the largest that fits first."""


class Machine(NamedTuple):
    """What runs are made for."""

    gpu: str
    """An accelerator of the catalogue."""
    devices: int
    """GPUs; on a CPU the ranks that may share it."""
    on_gpu: bool


class Case(NamedTuple):
    """A run with a name."""

    name: str
    run: Run


def this_machine(gpu: str = "", device: str = "") -> Machine:
    """This machine in the catalogue's words; `gpu` where its own name is not known there."""
    import torch

    from costmodel.catalog import accelerator
    from execute.device import catalogue_name, this_device
    here = this_device(device)
    if here.name == "cpu":
        return Machine(accelerator(gpu or catalogue_name(here) or "cpu_xeon_2core").name, 4, False)
    return Machine(accelerator(gpu or torch.cuda.get_device_name(0)).name, torch.cuda.device_count(), True)


def model_of(width: int) -> dict[str, Any]:
    """A Llama-style model of eight layers: about 0.5 billion parameters at 2048."""
    return {"name": f"validate-{width}", "layers": 8, "hidden": width, "heads": width // 64, "kv_heads": width // 128, "ffn": width * 11 // 4, "vocab": 32000}


def standard(machine: Machine, fits: Callable[[Run], bool], *, deepspeed: bool = False) -> list[Case]:
    """The cases that the machine's devices are enough for; with DeepSpeed's where they can be performed (a dry run of them there is none)."""
    models = [model_of(width) for width in SIZES] if machine.on_gpu else [SMALL]
    runs = {model["name"]: [*_cases(machine, model), *(_deepspeed(machine, model) if deepspeed and machine.devices > 1 else ())] for model in models}
    return next((cases for cases in runs.values() if all(fits(case.run) for case in cases)), list(runs.values())[-1])


def _case(machine: Machine, model: dict[str, Any], name: str, ranks: int, strategy: str, recipe: dict[str, Any] | None = None, **plan: Any) -> Case:
    base = {"seq_len": 2048, "micro_batch": 2} if machine.on_gpu else {"seq_len": 128, "micro_batch": 2, "precision": "fp32"}
    run = build_run(model=model, cluster={"gpu": machine.gpu, "gpus": ranks}, plan={"strategy": strategy, **plan}, recipe={**base, **(recipe or {})})
    return Case(f"{name}, {ranks} rank{'s' if ranks > 1 else ''}", run)


def _deepspeed(machine: Machine, model: dict[str, Any]) -> Iterator[Case]:
    """Several buckets each."""
    bucket = {"framework": "deepspeed", "bucket_bytes": 1 << (27 if machine.on_gpu else 22)}
    for stage in (1, 2, 3):
        yield _case(machine, model, f"deepspeed zero{stage}", 2, f"zero{stage}", {"precision": "bf16-mixed"}, **bucket)


def _cases(machine: Machine, model: dict[str, Any]) -> Iterator[Case]:
    pair, case = min(2, machine.devices), partial(_case, machine, model)

    pure = {"precision": "bf16-pure"} if machine.on_gpu else {}
    yield case("single", 1, "single")
    yield case("single, full checkpointing", 1, "single", checkpointing="full")
    if pair == 1:
        return
    yield case("ddp", pair, "ddp")
    yield case("ddp, accumulating", pair, "ddp", {"grad_accum": 2})
    yield case("zero1", pair, "zero1")
    yield case("zero2", pair, "zero2")
    yield case("fsdp", pair, "fsdp")
    yield case("tensor", pair, "ddp", pure, tp=2)
    yield case("tensor, sequence", pair, "ddp", pure, tp=2, sequence_parallel=True, loss_parallel=True)
    flash = {} if machine.on_gpu else pure
    yield case("context, ring", pair, "ddp", flash, cp=2)
    yield case("context, all-gather", pair, "fsdp", flash, cp=2, cp_kind="allgather")
    yield case("context, ulysses", pair, "fsdp", flash, cp=2, cp_kind="ulysses")
    yield case("pipeline, gpipe", pair, "ddp", {"grad_accum": 4, **pure}, pp=2, schedule="gpipe")
    yield case("pipeline, 1f1b", pair, "ddp", {"grad_accum": 4, **pure}, pp=2)
    yield case("pipeline, interleaved", pair, "ddp", {"grad_accum": 4, **pure}, pp=2, schedule="interleaved", virtual_stages=2)
    if machine.devices >= 4:
        yield case("hsdp", 4, "fsdp", dp_replicate=2, dp_shard=2)
        yield case("fsdp and tensor", 4, "fsdp", tp=2, sequence_parallel=True)
