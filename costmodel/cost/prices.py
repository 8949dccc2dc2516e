"""Prices of a run: every op's seconds on its stream and on the host, from the profile's constants."""

from costmodel.catalog.profiles import Profile
from costmodel.cost.compute import ComputeCosts, compute_costs, slowed
from costmodel.cost.network import Group, NetworkCosts, group_of, network_costs
from costmodel.program.host import COMPILE, IN_PYTHON, PLACED, TENSOR
from costmodel.program.ir import Comm, Op
from costmodel.spec import Run

EMBEDDING_AXIS = "embedding"
"""First and last pipeline stage, which share a tied embedding."""
EXPERT_AXIS, REPLICA_AXIS = "ep", "edp"
"""Ranks over which the experts are spread, consecutive but for tp; ranks that have the same experts."""
AXIS_ORDER = ("tp", "cp", "dp_shard", "dp_replicate", "pp")
"""Rank order, innermost first: consecutive ranks differ in tp, then cp, then the data-parallel axes, then pp."""


def axis_groups(run: Run) -> dict[str, Group]:
    """The process group of every axis: its size, and the stride of its ranks in the rank order.

    State shards over dp_shard x cp, so that axis spans both; where nothing is sharded, dp_replicate does, whose ranks average gradients.
    """
    p = run.plan
    sizes = {"tp": p.tp, "cp": p.cp, "dp_shard": p.dp_shard, "dp_replicate": p.dp_replicate, "pp": p.pp}
    groups: dict[str, Group] = {}
    stride = 1
    for axis in AXIS_ORDER:
        if axis == "dp_shard":
            groups[axis] = group_of(run.cluster, sizes[axis] * p.cp, stride // p.cp)
        elif axis == "dp_replicate" and p.zero == 0 and p.cp > 1:
            groups[axis] = group_of(run.cluster, sizes[axis] * p.cp, stride // p.cp)
        else:
            groups[axis] = group_of(run.cluster, sizes[axis], stride)
        stride *= sizes[axis]
    if p.ep > 1:
        groups[EXPERT_AXIS] = group_of(run.cluster, p.ep, p.tp)
        groups[REPLICA_AXIS] = group_of(run.cluster, p.expert_replicas, p.tp * p.ep)
    if p.pp > 1:
        groups[EMBEDDING_AXIS] = group_of(run.cluster, 2, run.cluster.gpus // 2)
    return groups


def priced_bytes(kind: str, message: int, out_bytes: int) -> int:
    """The bytes that decide how long a collective takes: of an all-to-all the larger of what a rank sends and what it gets."""
    return max(message, out_bytes) if kind == "all-to-all" else message


_WORK = slice(Op._fields.index("kind"), Op._fields.index("kernels") + 1)
"""The fields of an op that its price on a device follows from; of attention also the kernel in its name, one in a run."""


class RunPrices:
    """Seconds of the ops of one run."""

    def __init__(self, run: Run, profile: Profile, slower: float = 1.0) -> None:
        self.synchronous = run.cluster.accelerator.kernel_table == "cpu"
        costs = compute_costs(run.cluster.accelerator, profile, run.recipe)
        self.compute: ComputeCosts = slowed(costs, slower) if slower > 1.0 else costs
        """`slower`: of a rank whose kernels take longer than the others'."""
        self.network: NetworkCosts = network_costs(run.cluster, profile)
        self.groups = axis_groups(run)
        multiplier = profile.value("host.multiplier")
        r = run.recipe
        eager = {"forward": "host.eager.forward_s", "backward": "host.eager.backward_s", "recompute": "host.eager.recompute_s",
                 "optimizer": "host.eager.forward_s"}
        if r.compile:
            kernel = profile.value("host.graph.kernel_s" if r.cuda_graphs else "host.compile.op_s") * multiplier
            self.launch = dict.fromkeys(eager, kernel)
            self.launch["optimizer"] = profile.value(eager["optimizer"]) * multiplier
        else:
            self.launch = {phase: profile.value(key) * multiplier for phase, key in eager.items()}
        if run.plan.single_process:  # threads that share one interpreter launch forwards one after the other; backward has a C++ thread per GPU
            for phase in ("forward", "recompute"):
                self.launch[phase] *= run.plan.dp
        self.collective_host_s = profile.value("host.collective_s") * multiplier
        which = {"foreach": "foreach_s", "fused": "fused_s", "for-loop": "for_loop_s"}[r.optimizer.implementation]
        tensor_s = profile.value(f"host.optimizer.{which}") * multiplier
        self.contention = run.plan.contention if run.plan.contention is not None else profile.value("overlap.contention")
        self.megatron = run.plan.framework == "megatron"
        overlap = run.plan.tp_overlap
        self.tp_exposed = profile.value("tp.async_exposed") if overlap == "async" else 1.0
        """Share of a tp collective's time that is not hidden behind the matmul it is pipelined with."""
        slower = profile.value("tp.compile_factor" if r.compile else "tp.eager_factor")
        self.tp_factor = profile.value("tp.userbuffers_factor") if overlap == "userbuffers" else self.tp_exposed * slower
        """Time of a gather or scatter of the sequence over that of the plain collective."""
        call_s = profile.value("host.graph.launch_s" if r.cuda_graphs else "host.compile.region_s") * multiplier if r.compile else 0.0
        self.work = {TENSOR: (tensor_s, tensor_s), COMPILE: (call_s, call_s)}
        """Host seconds of a unit of each cause, in forward and in backward. Python's own take as long beside any device: multipliers are of launches."""
        for cause in IN_PYTHON:
            self.work[cause] = profile.value(f"host.{cause}.forward_s"), profile.value(f"host.{cause}.backward_s")
        placed_s = profile.value("host.dtensor.tensor_s")
        self.work[PLACED] = placed_s, placed_s
        scaled = (profile.get("moe.graph_factor", 1.0) if r.cuda_graphs else 1.0) * multiplier / 2
        self.routing = scaled * profile.get("moe.layer_s", 0.0), scaled * profile.get("moe.local_expert_s", 0.0)
        """Host seconds of one pass of a layer's token dispatcher: for itself, and for each local expert; the constants are of both passes."""
        self.fixed = profile.value("step.fixed_s")
        self.jitter = profile.value("jitter.per_doubling")
        self.memory_s = self.compute.memory_s
        """Seconds of a memory-bound op."""
        self._device: dict[object, float] = {}
        self._comm: dict[tuple[str, str, int, int], float] = {}

    def device_s(self, op: Op) -> float:
        """Seconds of an op on its stream; ops that do the same to the same shapes are priced once."""
        work = op[_WORK]
        known = self._device.get(work)
        if known is None:
            known = self._device[work] = self.compute.op_s(op)
        return known

    def launch_s(self, phase: str) -> float:
        """Host seconds of one kernel launch in a phase."""
        return self.launch[phase]

    def work_s(self, cause: str, phase: str) -> float:
        """Host seconds of a unit of a cause (costmodel.program.host); what runs forward again takes what it takes in forward."""
        return self.work[cause][phase == "backward"]

    def route_s(self, experts: int) -> float:
        """Host seconds in which compute waits for one pass of a layer's token dispatcher."""
        return self.routing[0] + experts * self.routing[1]

    def collective_s(self, comm: Comm) -> float:
        return self.seconds_of(comm.axis, comm.kind, priced_bytes(comm.kind, comm.nbytes, comm.out_bytes), comm.group)

    def seconds_of(self, axis: str, kind: str, nbytes: int, size: int) -> float:
        """Seconds of one collective of `nbytes` (the message convention of ir.Comm) over `size` ranks of an axis."""
        if size == 1:
            return 0.0
        key = (axis, kind, nbytes, size)
        seconds = self._comm.get(key)
        if seconds is None and kind == "recv":
            seconds = self._comm[key] = 0.0
        if seconds is None:
            group = self.groups[axis]
            factor = 1.0
            if axis == "tp":
                factor = self.tp_factor if self.megatron or kind in ("all-gather", "reduce-scatter") else self.tp_exposed
            assert group.size == size, f"axis {axis} has {group.size} ranks, not {size}"
            seconds = self._comm[key] = factor * self.network.collective_s(kind, nbytes, group)
        return seconds
