"""The collective recorder: what a step sends, in order, read off the dispatched c10d operations."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from costmodel.report import Collective
from execute import compat
from execute.dtypes import word


class Sent(NamedTuple):
    """One collective as it was issued. Bytes follow costmodel.program.ir.Comm."""

    step: str
    phase: str
    where: str
    axis: str
    kind: str
    group: int
    in_bytes: int
    out_bytes: int
    message_bytes: int
    dtype: str


KINDS = {"_allgather_base_": "all-gather", "_reduce_scatter_base_": "reduce-scatter", "allreduce_": "all-reduce", "broadcast_": "broadcast",
         "allgather_": "all-gather", "reduce_scatter_": "reduce-scatter", "alltoall_base_": "all-to-all", "alltoall_": "all-to-all",
         "send": "send", "recv_": "recv", "reduce_": "reduce", "allreduce_coalesced_": "all-reduce",
         "allgather_into_tensor_coalesced_": "all-gather", "reduce_scatter_tensor_coalesced_": "reduce-scatter",
         "all_reduce": "all-reduce", "all_reduce_": "all-reduce", "all_gather_into_tensor": "all-gather",
         "reduce_scatter_tensor": "reduce-scatter", "broadcast": "broadcast", "all_to_all_single": "all-to-all"}
FULL_IS_OUT = ("all-gather", "recv")


class CollectiveRecorder:
    """A listener of the storage tracker; `sent` is the list, in order."""

    def __init__(self) -> None:
        self.sent: list[Sent] = []
        self._axes: dict[str, str] = {}
        self._axes_of_ranks: dict[tuple[int, ...], str] = {}

    def name_axes(self, axes: Mapping[str, Any]) -> None:
        """Which process group is which axis of the Run: {"dp_shard": group, ...}; those that spoke before are looked up again; of axes with the same
        ranks, the first is meant where the name does not tell."""
        self._axes.clear()
        for axis, group in axes.items():
            self._axes[group.group_name] = axis
            self._axes_of_ranks.setdefault(tuple(dist.get_process_group_ranks(group)), axis)

    def _axis(self, group: Any) -> str:
        """By name, else by its ranks: a mesh equal to an earlier one of this process may go on with the groups of that one."""
        if group is None:
            return "world"
        if group.group_name not in self._axes:
            self._axes[group.group_name] = self._axes_of_ranks.get(tuple(dist.get_process_group_ranks(group)), "world")
        return self._axes[group.group_name]

    def __call__(self, tracker: Any, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        namespace, _, name = func._schema.name.partition("::")
        if namespace not in ("c10d", "_c10d_functional") or name not in KINDS:
            return
        kind = KINDS[name]
        if namespace == "c10d":
            sizes, group = _c10d_sizes(name, args), _group_of(args, kwargs)
        else:
            sizes, group = (args[0], out), _named_group(args, kwargs)
        inputs, outputs = (list(compat.inner_tensors(side)) for side in sizes)
        in_bytes, out_bytes = (sum(t.numel() * t.element_size() for t in side) for side in (inputs, outputs))
        message = out_bytes if kind in FULL_IS_OUT else in_bytes
        axis = self._axis(group)
        self.sent.append(Sent(tracker.step, tracker.phase, tracker.where, axis, kind, group.size() if group is not None else 0, in_bytes, out_bytes,
                              message, word((inputs or outputs)[0].dtype)))

    def summary(self, step: str) -> tuple[Collective, ...]:
        """Equal collectives of a step counted together, in order of first use; recompute counts as backward."""
        counts: Counter[tuple[Any, ...]] = Counter()
        for s in self.sent:
            if s.step == step:
                phase = {"recompute": "backward", "unscale": "optimizer", "clip": "optimizer"}.get(s.phase, s.phase)
                counts[(phase, s.axis, s.kind, s.group, s.in_bytes, s.out_bytes, s.message_bytes, s.dtype)] += 1
        return tuple(Collective(phase=k[0], axis=k[1], kind=k[2], group=k[3], count=n, in_bytes=k[4], out_bytes=k[5], message_bytes=k[6], dtype=k[7])
                     for k, n in counts.items())


def _c10d_sizes(name: str, args: Any) -> tuple[Any, Any]:
    """The input and output tensors of a c10d operation, by its schema (torch/csrc/distributed/c10d/Ops.cpp)."""
    if name in ("_allgather_base_", "_reduce_scatter_base_", "allgather_", "reduce_scatter_", "alltoall_base_", "alltoall_",
                "allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_"):
        return args[1], args[0]
    if name == "send":
        return args[0], []
    if name == "recv_":
        return [], args[0]
    return args[0], args[0]


def _group_of(args: Any, kwargs: Any) -> Any:
    for value in (*args, *kwargs.values()):
        if isinstance(value, dist.ProcessGroup):
            return value
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value)
    return None


def _named_group(args: Any, kwargs: Any) -> Any:
    for value in (*reversed(args), *kwargs.values()):
        if isinstance(value, str) and (group := compat.group_by_name(value)) is not None:
            return group
    return None


