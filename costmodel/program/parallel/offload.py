"""State in host memory: what every strategy that offloads shares, and who does.

The device sends gradients to its host (stream "d2h"), the host's CPU updates, and parameters come back ("h2d"). PyTorch's allocator of page-locked
memory rounds every block up to a power of two (at/src/ATen/core/CachingHostAllocator.h), so the host holds more than its tensors.
"""

from collections.abc import Iterable, Iterator

from costmodel.program.ir import COPIES, Op
from costmodel.spec import PlanError, Run

H2D, D2H = COPIES


def on_host(ops: Iterable[Op]) -> list[Op]:
    """Memory-bound work as the host's CPU does it: its tensors are in host memory."""
    return [op._replace(kind="cpu" if op.kind == "memory" else op.kind, allocs=(), frees=(), host_allocs=op.allocs, host_frees=op.frees)
            if op.kind in ("memory", "host") else op for op in ops]


def to_host(name: str, nbytes: int, *, tensors: int = 1, detached: bool = True, pinned: bool = True) -> Op:
    """A copy to host memory, which signals "d2h" when done; `tensors` copies one after the other."""
    return Op(name, "copy", nbytes=float(nbytes), kernels=tensors, axis=D2H, event=D2H, detached=detached, dims=() if pinned else (1,))


def to_device(name: str, nbytes: int, *, tensors: int = 1, detached: bool = True) -> Op:
    """A copy from page-locked host memory, which signals "h2d" when done."""
    return Op(name, "copy", nbytes=float(nbytes), kernels=tensors, axis=H2D, event=H2D, detached=detached)


def pinned_slack(sizes: Iterable[int]) -> int:
    """Bytes that page-locked blocks of these sizes hold beyond them."""
    return sum((1 << (size - 1).bit_length()) - size for size in sizes if size > 0)


def refusals(run: Run) -> Iterator[PlanError]:
    """What does not offload, or not like that."""
    p, r = run.plan, run.recipe
    if p.activation_offload:
        yield PlanError("plan.activation_offload", True, "activation offload: not predicted yet.", "Use activation_offload = false.")
    if p.offload == "none":
        return
    if run.cluster.accelerator.kernel_table == "cpu":
        yield PlanError("plan.offload", p.offload, "on a CPU device and host share one memory: there is nowhere to offload to.", "Use offload = none.")
    if p.framework == "megatron" or p.framework == "deepspeed" and not p.zero:
        yield PlanError("plan.offload", p.offload, "offload to host memory in Megatron's dialect: not predicted yet.",
                        "Use offload = none, or ZeRO in the dialect of pytorch or deepspeed.")
    if p.framework == "nanochat":
        yield PlanError("plan.offload", p.offload, "nanochat does not offload.", "Use offload = none.")
    if p.framework == "pytorch" and p.zero != 3:
        yield PlanError("plan.offload", p.offload, "PyTorch offloads state under FSDP2 alone (CPUOffloadPolicy).",
                        "Use zero = 3 (strategy fsdp), or offload = none.")
    if p.framework == "pytorch" and p.offload == "optimizer":
        yield PlanError("plan.offload", p.offload, "FSDP2's CPUOffloadPolicy moves parameters, gradients and optimizer states together.",
                        "Use offload = params.")
    if p.framework == "deepspeed" and p.offload == "params" and p.zero < 3:
        yield PlanError("plan.offload", p.offload, f"DeepSpeed offloads parameters at stage 3 alone (zero = {p.zero}).",
                        "Use offload = optimizer, or zero = 3.")
    for name, degree in (("ep", p.ep), ("pp", p.pp), *((("tp", p.tp),) if p.framework == "deepspeed" else ())):
        if degree > 1:
            yield PlanError("plan.offload", p.offload, f"offload with {name} = {degree}: not predicted yet.", f"Use {name} = 1, or offload = none.")
    if r.optimizer.name not in ("sgd", "momentum", "adam", "adamw"):
        yield PlanError("recipe.optimizer", r.optimizer.name, "this optimizer on a CPU: not predicted yet.", "Use adamw, or offload = none.")
    if r.precision.fp8_gather:
        yield PlanError("recipe.precision", r.precision.name, "offloaded parameters that are gathered in fp8: not predicted yet.",
                        "Use bf16-mixed, or offload = none.")
    if r.precision.loss_scaling and p.framework == "pytorch":
        yield PlanError("recipe.precision", r.precision.name, "a scaled loss whose gradients are in host memory: not predicted yet.",
                        "Use bf16-mixed, or offload = none.")
