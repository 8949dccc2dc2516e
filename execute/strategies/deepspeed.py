# mypy: disable-error-code="no-untyped-call, no-any-return, misc"
"""DeepSpeed's ZeRO-1, -2 and -3, performed by DeepSpeed itself (the extra `deepspeed`): the same model, optimizer and samples in its engine.

Shards: an fp32 copy of the parameters and the optimizer state, in one flat slice a rank; stage 2 also gradients, stage 3 also parameters.
Sends: stages 1 and 2 all-reduce flat buckets of gradients (stage 1 when backward is over, stage 2 during each), and after the update gather
the parameters in one piece; stage 3 gathers before use and reduce-scatters. Every step also sums a norm, and where a 16-bit dtype may
overflow, a flag. The engine scales the loss by the accumulation, clips, and forgets its gradients when it has updated.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from costmodel.spec import DTYPE_BYTES, Run
from execute.marks import Marks
from execute.optim import make_optimizer
from execute.strategies import Prepared, Region, no_region

BUILT_FOR_INFERENCE = "deepspeed_shm_comm"
"""An operator for inference that DeepSpeed would compile on a CPU when it starts."""


def shard(run: Run, model: nn.Module, device: str = "cpu") -> None:
    """Nothing on the meta device: deepspeed.initialize divides a model that has values."""


def prepare(run: Run, model: nn.Module, *, dry: bool, region: Region = no_region) -> Prepared:
    """The model inside DeepSpeed's engine."""
    assert not dry, "DeepSpeed is performed on real tensors only"
    engine = _engine(run, model)
    optimizer = engine.optimizer
    for name in PERFORMED[run.plan.zero]:
        _inside(optimizer, name, region)
    if run.plan.zero == 3:
        _inside(optimizer.parameter_offload.get_param_coordinator(), "fetch_sub_module", region)
    return Prepared(engine, optimizer.optimizer, micro_batches=lambda batch, marks: _micro_batches(run, engine, batch, marks), clip=lambda norm: None,
                    step=engine.step, zero_grad=lambda to_none: None, holds=lambda: held(run, optimizer), axes={"dp_shard": dist.group.WORLD})


def _micro_batches(run: Run, engine: Any, batch: Callable[[], tuple[Tensor, Tensor]], marks: Marks) -> Tensor:
    """Forward and backward of each; the engine counts them by `step`, which updates after the last alone."""
    total: Tensor | None = None
    for i in range(run.micro_batches):
        with marks.forward():
            tokens, targets = batch()
            loss = engine(tokens, targets)
            total = loss.detach() if total is None else total + loss.detach()
        with marks.phase_of("backward"):
            engine.backward(loss)
            marks.backward_ended()
        del loss
        if i < run.micro_batches - 1:
            engine.step()
    assert total is not None
    return total / run.micro_batches


def configuration(run: Run) -> dict[str, Any]:
    """DeepSpeed's own configuration of a run. Source: deepspeed/runtime/config.py, zero/config.py."""
    p, r, precision = run.plan, run.recipe, run.recipe.precision
    zero: dict[str, Any] = {"stage": p.zero, "reduce_bucket_size": max(1, p.bucket_bytes // DTYPE_BYTES[precision.gradient]),
                            "overlap_comm": p.overlap_grad_reduce, "allgather_bucket_size": 2 * (p.allgather_bucket_params // 2)}
    if p.zero == 3:
        zero |= {"stage3_prefetch_bucket_size": p.prefetch_bucket_params, "stage3_max_live_parameters": p.max_live_params}
    if p.offload != "none":  # page-locked memory needs a GPU
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": run.cluster.accelerator.kernel_table == "cuda" and torch.cuda.is_available()}
    if p.offload == "params":
        zero["offload_param"] = zero["offload_optimizer"]
    types: dict[str, Any] = {} if precision.gradient == precision.parameter else {"data_types": {"grad_accum_dtype": precision.gradient}}
    low: dict[str, Any] = {} if precision.parameter == "fp32" else {str(precision.parameter): {"enabled": True}}
    return {"train_micro_batch_size_per_gpu": r.micro_batch, "gradient_accumulation_steps": r.grad_accum, "gradient_clipping": r.clip_norm,
            "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "zero_optimization": zero, **types, **low}


def _engine(run: Run, model: nn.Module) -> Any:
    """deepspeed.initialize in the caller's process group."""
    on_cpu = next(model.parameters()).device.type == "cpu"
    if on_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", "0")
    import deepspeed
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__[BUILT_FOR_INFERENCE] = False
    if run.plan.zero == 3:
        from deepspeed.runtime.zero.linear import zero3_linear_wrap
        torch.nn.functional.linear = zero3_linear_wrap  # as deepspeed.zero.Init does: plain autograd would keep gathered weights for backward
    optimizer = make_optimizer(run.recipe.optimizer, model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=configuration(run))
    return engine


# -- for whoever watches ------------------------------------------------------------------------------------------------------

PERFORMED: Mapping[int, tuple[str, ...]] = {
    1: ("setup_buckets", "reduce_gradients", "average_tensor"), 2: ("setup_buckets", "average_tensor"),
    3: ("_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads", "_post_step")}
"""Methods of DeepSpeed's optimizer that make buffers of communication, by stage."""


def _inside(owner: Any, name: str, region: Region) -> None:
    """Run a method of an object inside a region of its name."""
    original = getattr(owner, name)

    @wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        with region(f"deepspeed.{name.rpartition('__')[2] or name}"):
            return original(*args, **kwargs)

    setattr(owner, name, method)


def held(run: Run, optimizer: Any) -> Iterator[tuple[str, list[Tensor]]]:
    """(category, tensors) of what DeepSpeed's optimizer keeps that neither the model nor torch's optimizer shows."""
    if run.plan.zero == 3:
        yield "parameters", [*optimizer.fp16_partitioned_groups_flat]
        yield "master_weights", [*optimizer.fp32_partitioned_groups_flat]
        yield "gradients", [optimizer.grad_partitions_flat_buffer]
        yield "communication", [bucket.buffer for bucket in optimizer.ipg_buckets.values()]
        return
    yield "parameters", [*optimizer.bit16_groups_flat]
    yield "master_weights", [*optimizer.single_partition_of_fp32_groups]
    yield "gradients", [t for group in (*optimizer.averaged_gradients.values(), *optimizer.all_grad_tensors.values()) if group for t in group]
