# mypy: disable-error-code="no-untyped-call, no-any-return, misc"
"""Activation checkpointing: which layers keep only their input, and how they run again."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from costmodel.spec import Checkpointing

Around = Callable[[], AbstractContextManager[Any]]
"""Makes the context in which a recompute runs; an observer marks it, everyone else passes nullcontext."""


def layer_groups(checkpointing: Checkpointing, layers: int) -> list[tuple[range, bool]]:
    """The layers of a model in order, in runs that share one saved input, and whether each run is checkpointed."""
    if checkpointing.mode != "full":
        return [(range(i, i + 1), False) for i in range(layers)]
    if checkpointing.group > 1:
        return [(range(i, min(i + checkpointing.group, layers)), True) for i in range(0, layers, checkpointing.group)]
    return [(range(i, i + 1), i % checkpointing.every == 0) for i in range(layers)]


def checkpoint(function: Callable[..., Any], *args: Any, around: Around = nullcontext, keep_rng: bool = False) -> Any:
    """torch.utils.checkpoint, non-reentrant: keep the inputs, run `function` again when backward needs what it saved."""
    marked: dict[str, Any] = {} if around is nullcontext else {"context_fn": lambda: (nullcontext(), around())}  # torch.compile takes no context_fn
    return torch_checkpoint(function, *args, use_reentrant=False, preserve_rng_state=keep_rng, **marked)


class _Both:
    """Two contexts entered as one."""

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self.outer, self.inner = outer, inner

    def __enter__(self) -> None:
        self.outer.__enter__()
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.inner.__exit__(*error)
        self.outer.__exit__(*error)


SAVED_OPS = (torch.ops.aten._scaled_dot_product_flash_attention.default, torch.ops.aten._scaled_dot_product_efficient_attention.default,
             torch.ops.aten._scaled_dot_product_cudnn_attention.default,
             torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, torch.ops._c10d_functional.reduce_scatter_tensor.default)


MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._scaled_mm.default)
"""aten._scaled_mm: torchtitan's list sees the aten.mm of torchao's Float8Tensor before it becomes one."""


def checkpoint_ops(function: Callable[..., Any], *args: Any, around: Around = nullcontext, keep_rng: bool = False) -> Any:
    """Selective by operator: keep attention outputs, reduce-scatters and every other matrix product, recompute the rest.

    Source: torchtitan, models/llama3/infra/parallelize.py, `_op_sac_save_list`; distributed/activation_checkpoint.py.
    """
    def contexts() -> tuple[Any, Any]:
        seen = {"forward": 0, "recompute": 0}

        def policy(context: Any, op: Any, *a: Any, **k: Any) -> CheckpointPolicy:
            mode = "recompute" if context.is_recompute else "forward"
            if op in MATMULS:
                seen[mode] += 1
                return CheckpointPolicy.MUST_SAVE if seen[mode] % 2 else CheckpointPolicy.PREFER_RECOMPUTE
            return CheckpointPolicy.MUST_SAVE if op in SAVED_OPS else CheckpointPolicy.PREFER_RECOMPUTE

        forward, recompute = create_selective_checkpoint_contexts(policy)
        return forward, _Both(around(), recompute)

    return torch_checkpoint(function, *args, use_reentrant=False, preserve_rng_state=keep_rng, context_fn=contexts)
