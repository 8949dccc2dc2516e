"""Reading a profiler's trace: synthetic ones whose overlap is known by construction, and one of a real DDP step under gloo."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from costmodel.report import Collective, TimeReport
from execute.observe.trace import TraceError, load_trace, read_step, read_trace

MS = 1e-3
ORIGIN = 5_115_122_788_515.25
"""Microseconds since boot, as real traces count them."""


def event(name: str, category: str, start_ms: float, end_ms: float, thread: Any = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, "ts": ORIGIN + start_ms * 1000, "dur": (end_ms - start_ms) * 1000,
            "args": args}


def trace_of(*events: dict[str, Any], step_ms: float = 100, **more: Any) -> dict[str, Any]:
    return {"traceEvents": [{"ph": "M", "name": "process_name"}, event("step", "user_annotation", 0, step_ms), *events], **more}


def parts_sum(report: TimeReport) -> None:
    assert sum(report.breakdown.values()) == pytest.approx(report.step_s, rel=1e-12)
    assert sum(report.phases.values()) == pytest.approx(report.step_s, rel=1e-12)


def in_ms(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(s / MS, 4) for name, s in seconds.items()}


# -- GPU ----------------------------------------------------------------------------------------------------------------------

COMPUTE, COMM, TP = 7, 20, 24
GPU = trace_of(
    event("forward", "user_annotation", 0, 20), event("backward", "user_annotation", 20, 40), event("optimizer", "user_annotation", 40, 45),
    event("forward", "gpu_user_annotation", 10, 40, COMPUTE), event("backward", "gpu_user_annotation", 40, 80, COMPUTE),
    event("optimizer", "gpu_user_annotation", 80, 95, COMPUTE), event("recompute", "gpu_user_annotation", 45, 50, COMPUTE),
    event("aten::mm", "cpu_op", 0, 8), event("cudaLaunchKernel", "cuda_runtime", 2, 5), event("aten::mm", "cpu_op", 20, 24, 2),
    event("cudaDeviceSynchronize", "cuda_runtime", 45, 100),
    event("sm90_xmma_gemm_bf16", "kernel", 10, 30, COMPUTE),
    event("flash_fwd_kernel", "kernel", 30, 40, COMPUTE),
    event("ncclDevKernel_AllGather_RING_LL", "kernel", 25, 45, COMM, **{"Process Group Name": "3"}),      # exposed from 40 to 45
    event("void at::native::elementwise", "kernel", 50, 60, COMPUTE),
    event("ncclDevKernel_ReduceScatter", "kernel", 55, 75, COMM, **{"Process Group Name": "3"}),           # exposed from 60 to 75,
    event("ncclDevKernel_AllReduce", "kernel", 70, 80, TP, **{"Process Group Name": "9"}),                 # shared with tp from 70 to 75
    event("Memcpy DtoD", "gpu_memcpy", 80, 82, COMPUTE),
    event("multi_tensor_apply", "kernel", 84, 90, COMPUTE),
    distributedInfo={"backend": "nccl", "pg_config": [{"pg_name": "9", "pg_desc": "mesh_tp"}]})


def test_a_gpu_trace_gives_the_exact_exposed_and_idle_seconds() -> None:
    report = read_trace(GPU, axes={"3": "dp_shard"})
    assert in_ms(report.breakdown) == {"matmul": 20, "attention": 10, "memory-bound": 10, "optimizer": 8, "exposed dp_shard": 20, "exposed tp": 5, "idle": 27}
    assert in_ms(report.communication_s) == {"dp_shard": 40, "tp": 10}
    assert in_ms(report.exposed_s) == {"dp_shard": 20, "tp": 5}
    assert report.step_s == pytest.approx(100 * MS)
    parts_sum(report)


def test_phases_on_a_gpu_are_those_of_the_device_and_recompute_is_backward() -> None:
    report = read_trace(GPU)
    assert in_ms(report.phases) == {"forward": 30, "backward": 40, "optimizer": 15, "other": 15}


def test_the_host_is_busy_while_it_launches_and_not_while_it_waits() -> None:
    """0 to 8 on one thread and 20 to 24 on another; cudaDeviceSynchronize is a wait."""
    assert read_trace(GPU).host_s == pytest.approx(12 * MS)


def test_a_group_nobody_names_is_the_world() -> None:
    assert set(read_trace(GPU).exposed_s) == {"world", "tp"}


def test_hidden_communication_is_not_exposed() -> None:
    report = read_trace(trace_of(event("gemm", "kernel", 0, 100, COMPUTE), event("ncclDevKernel_AllReduce", "kernel", 10, 90, COMM)))
    assert in_ms(report.breakdown) == {"matmul": 100, "exposed world": 0, "idle": 0}
    assert in_ms(report.communication_s) == {"world": 80}


def test_kernels_side_by_side_count_once() -> None:
    report = read_trace(trace_of(event("gemm", "kernel", 0, 60, 7), event("gemm", "kernel", 40, 80, 8), event("elementwise", "kernel", 70, 90, 9)))
    assert in_ms(report.breakdown) == {"matmul": 80, "memory-bound": 10, "idle": 10}


def test_work_outside_the_step_is_not_the_steps() -> None:
    report = read_trace(trace_of(event("gemm", "kernel", -50, 10, COMPUTE), event("gemm", "kernel", 90, 150, COMPUTE)))
    assert in_ms(report.breakdown) == {"matmul": 20, "idle": 80}


# -- CPU ----------------------------------------------------------------------------------------------------------------------

CPU = trace_of(
    event("forward", "user_annotation", 0, 40), event("backward", "user_annotation", 40, 90), event("clip", "user_annotation", 90, 92),
    event("aten::linear", "cpu_op", 0, 30),                        # works itself from 0 to 5, 10 to 12 and 28 to 30
    event("aten::copy_", "cpu_op", 5, 10), event("aten::addmm", "cpu_op", 12, 28),
    event("aten::_scaled_dot_product_flash_attention_for_cpu", "cpu_op", 30, 38),
    event("autograd::engine::evaluate_function: X", "cpu_op", 40, 88),  # hooks wait in it: no work of its own
    event("aten::mm", "cpu_op", 40, 50), event("c10d::allreduce_", "cpu_op", 50, 60), event("aten::clone", "cpu_op", 58, 60),
    event("aten::mm", "cpu_op", 4, 99, "worker"),
    event("gloo:all_reduce", "user_annotation", 45, 70, "a", **{"Input Dims": [[250]], "Input type": ["float"]}),
    event("gloo:all_gather", "user_annotation", 65, 80, "b", **{"Input Dims": [[10, 10]], "Input type": ["c10::BFloat16"]}),
    event("aten::norm", "cpu_op", 90, 91), event("gloo:send", "user_annotation", 50, 99, **{"Input Dims": [[25]], "Input type": ["float"]}),
    event("gloo:recv", "user_annotation", 92, 96, **{"Input Dims": [[25]], "Input type": ["float"]}))
SENT = (Collective("backward", "tp", "all-reduce", 2, 1, 1000, 1000, 1000, "fp32"),
        Collective("forward", "dp_shard", "all-gather", 2, 1, 200, 400, 400, "bf16"),
        Collective("forward", "dp_shard", "reduce-scatter", 2, 1, 2000, 1000, 2000, "fp32"), Collective("init", "pp", "recv", 2, 1, 0, 100, 100, "fp32"))


def test_a_cpu_trace_gives_the_exact_exposed_and_idle_seconds() -> None:
    report = read_trace(CPU, SENT)
    assert in_ms(report.breakdown) == {"matmul": 35, "attention": 8, "optimizer": 1, "memory-bound": 7, "exposed dp_shard": 15, "bubble": 4,
                                          "exposed tp": 13, "idle": 17}
    assert report.bubble_s == pytest.approx(4 * MS)
    assert set(report.exposed_s) == {"dp_shard", "tp"}
    assert in_ms(report.communication_s) == {"dp_shard": 15, "pp": 4, "tp": 25}
    assert in_ms(report.phases) == {"forward": 40, "backward": 50, "optimizer": 2, "other": 8}
    assert report.host_s is None
    parts_sum(report)


def test_each_collective_has_the_seconds_of_the_events_of_its_kind_and_size() -> None:
    """gloo's all-gather ran from 65 to 80, its all-reduce from 45 to 70; the reduce-scatter did not run, and a receive of 100 bytes waited from 92 to 96."""
    seen = read_step(CPU, SENT).collectives
    assert [None if c.total_s is None else round(c.total_s / MS, 4) for c in seen] == [25, 15, None, 4]
    assert [(c.axis, c.kind, c.count) for c in seen] == [(c.axis, c.kind, c.count) for c in SENT]


def test_equal_collectives_of_two_phases_share_their_seconds_by_their_number() -> None:
    first, second = SENT[0], Collective("optimizer", "tp", "all-reduce", 2, 4, 1000, 1000, 1000, "fp32")
    assert [c.total_s for c in read_step(CPU, (first, second)).collectives] == pytest.approx([5 * MS, 20 * MS])


def test_nccl_tells_kind_and_size_beside_the_kernel() -> None:
    """The arguments that PyTorch writes (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, ParamCommsUtils.cpp)."""
    def kernel(name: str, start: float, end: float, what: str, count: int, dtype: str) -> dict[str, Any]:
        return event(f"ncclDevKernel_{name}", "kernel", start, end, COMM, **{"Collective name": what, "In msg nelems": count, "Out msg nelems": 2 * count,
                                                                             "dtype": dtype, "Process Group Name": "3"})
    trace = trace_of(kernel("AllGather_RING", 0, 10, "_allgather_base", 100, "BFloat16"), kernel("ReduceScatter", 20, 50, "_reduce_scatter_base", 500, "Float"),
                     kernel("SendRecv", 60, 64, "recv", 25, "Float"))
    sent = (SENT[1], SENT[2], Collective("forward", "dp_shard", "recv", 2, 1, 0, 200, 200, "fp32"))
    assert [c.total_s for c in read_step(trace, sent, {"3": "dp_shard"}).collectives] == pytest.approx([10 * MS, 30 * MS, 4 * MS])


def test_the_only_axis_needs_no_sizes() -> None:
    assert set(read_trace(CPU, SENT[:1]).exposed_s) == {"tp"}
    assert set(read_trace(CPU).exposed_s) == {"world"}


# -- files --------------------------------------------------------------------------------------------------------------------


def test_a_file_is_read_gzipped_or_not(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(GPU))
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(json.dumps(GPU).encode()))
    assert read_trace(tmp_path / "a.json") == read_trace(tmp_path / "a.json.gz") == read_trace(GPU)


@pytest.mark.parametrize(("name", "content", "says"), [
    ("none.json", None, "there is no such file"), ("cut.json", b'{"traceEvents": [', "not valid JSON"), ("list.json", b"[]", "no Chrome trace"),
    ("text.json.gz", b"no gzip", "cannot be read"), ("empty.json", b'{"traceEvents": []}', 'no annotation "step"')])
def test_what_is_no_trace_is_refused(name: str, content: bytes | None, says: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(TraceError, match=says):
        read_trace(tmp_path / name)


# -- a real step --------------------------------------------------------------------------------------------------------------

WORKER = """
import sys, torch, torch.distributed as dist
from pathlib import Path
from execute.observe.profiling import profile_step
out, rank = Path(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{out / 'store'}", rank=rank, world_size=2)
x = torch.randn(256, 512)
def step(model, marks):
    model.zero_grad()
    with marks.forward():
        loss = model(x).square().mean()
    with marks.phase_of("backward"):
        loss.backward()
class Quiet:
    from contextlib import nullcontext
    forward = staticmethod(nullcontext)
    phase_of = staticmethod(nullcontext)
for bucket_mb in (1, 100):
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(6)])
    model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
    for _ in range(3):
        step(model, Quiet)
    profile_step(lambda marks: step(model, marks), lambda: None, out / f"trace-{bucket_mb}-{rank}.json.gz")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces of a DDP step on two real ranks: with buckets of 1 MiB, and with one of 100 MiB."""
    where = tmp_path_factory.mktemp("traces")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    ranks = [subprocess.Popen([sys.executable, "-c", WORKER, str(where), str(r)], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                              text=True) for r in range(2)]
    for rank in ranks:
        _, errors = rank.communicate(timeout=120)
        assert rank.returncode == 0, errors[-2000:]
    return where


@pytest.mark.parametrize("bucket", [1, 100])
def test_a_real_ddp_step_is_divided_without_rest(bucket: int, real: Path) -> None:
    report = read_trace(real / f"trace-{bucket}-0.json.gz", (Collective("backward", "dp_replicate", "all-reduce", 2, 1, 8, 8, 8, "fp32"),))
    parts_sum(report)
    assert min(report.breakdown.values()) >= -1e-9
    assert 0 < report.exposed_s["dp_replicate"] <= report.communication_s["dp_replicate"] < report.step_s
    assert report.breakdown["matmul"] > 0
    assert {"forward", "backward"} <= set(report.phases)


@pytest.mark.parametrize(("bucket", "early"), [(1, True), (100, False)])
def test_buckets_are_sent_before_backward_ends_and_one_big_one_is_not(bucket: int, early: bool, real: Path) -> None:
    """The order of the profiler's events: does an all-reduce start while matrix products of backward are still to come?"""
    events = load_trace(real / f"trace-{bucket}-0.json.gz")["traceEvents"]
    step = next(e for e in events if e["name"] == "step")
    first = min(e["ts"] for e in events if e["name"] == "gloo:all_reduce" and e["ts"] > step["ts"])
    last = max(e["ts"] for e in events if e["name"] == "aten::mm" and e["ts"] > step["ts"])
    assert (first < last) is early
