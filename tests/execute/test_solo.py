"""One rank alone on a real device: its bytes against the dry run's, what stands in for the others, what is recorded however it ends."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from small_runs import LLAMA, cpu_run, small_run  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from costmodel.records import read_record, read_records, record_from_dict  # noqa: E402
from costmodel.spec import PlanError  # noqa: E402
from execute import compat  # noqa: E402
from execute.assemble import assemble  # noqa: E402
from execute.cli import app  # noqa: E402
from execute.device import Cpu, Gpu, Peaks, out_of_memory, this_device  # noqa: E402
from execute.dryrun import dry_run  # noqa: E402
from execute.solo import solo, states_of  # noqa: E402
from execute.stand_in import POOL, stand_in_world  # noqa: E402

MIXTURE = {**LLAMA, "moe": {"experts": 8, "top_k": 2, "expert_ffn": 96, "shared_experts": 1, "shared_ffn": 64}}
RUNS: dict[str, tuple[Any, int]] = {
    "single": (cpu_run(), 0), "ddp": (cpu_run(LLAMA, "ddp", 8, gradient_as_bucket_view=True), 7), "zero1": (cpu_run(LLAMA, "zero1", 3), 2),
    "zero2": (cpu_run(LLAMA, "zero2", 4), 3), "fsdp, bf16": (cpu_run(LLAMA, "fsdp", 8, {"precision": "bf16-mixed"}), 5),
    "tp": (cpu_run(LLAMA, "ddp", 2, tp=2), 0), "tp, loss parallel": (cpu_run(LLAMA, "ddp", 2, tp=2, sequence_parallel=True, loss_parallel=True), 1),
    "pp, first": (cpu_run(LLAMA, "ddp", 2, {"grad_accum": 4}, pp=2), 0), "pp with ddp, last": (cpu_run(LLAMA, "ddp", 4, {"grad_accum": 4}, pp=2), 3),
    "hsdp": (cpu_run(LLAMA, "hsdp", 4, dp_replicate=2), 3), "fsdp with tp": (cpu_run(LLAMA, "fsdp", 4, tp=2, sequence_parallel=True), 1),
    "cp ring": (cpu_run(LLAMA, "fsdp", 4, cp=4), 3),
    "cp ulysses": (cpu_run(LLAMA, "fsdp", 2, cp=2, cp_kind="ulysses"), 1),
    "pp zb-h1": (cpu_run(LLAMA, "ddp", 2, {"grad_accum": 4}, pp=2, schedule="zb-h1"), 1),
    "pp zbv": (cpu_run({**LLAMA, "layers": 4}, "ddp", 2, {"grad_accum": 4}, pp=2, schedule="zbv"), 0),
    "pp gpipe": (cpu_run(LLAMA, "ddp", 2, {"grad_accum": 2}, pp=2, schedule="gpipe"), 1),
    "pp interleaved": (cpu_run({**LLAMA, "layers": 4}, "ddp", 2, {"grad_accum": 2}, pp=2, schedule="interleaved", virtual_stages=2), 0),
    "fsdp with ep": (cpu_run(MIXTURE, "fsdp", 4, ep=2), 3), "fsdp with ep, slots": (cpu_run(MIXTURE, "fsdp", 4, {"moe_capacity_factor": 1.25}, ep=4), 1),
    "pp with ep": (cpu_run(MIXTURE, "fsdp", 4, {"grad_accum": 2}, pp=2, ep=2, reshard_after_forward=False), 3),
    "nanochat": (cpu_run(LLAMA, "muon-distributed", 4), 3)}


@pytest.mark.parametrize("name", RUNS)
def test_a_rank_alone_takes_the_bytes_of_its_dry_run(name: str) -> None:
    run, rank = RUNS[name]
    done = solo(run, this_device("cpu"), rank, warmup=1, steps=1)
    role, fake = done.report.roles[0], dry_run(run, rank).roles[0]
    assert role.memory is not None and fake.memory is not None and role.time is not None
    assert role.memory.states == fake.memory.states
    assert role.memory.activations_bytes == fake.memory.activations_bytes
    assert role.memory.allocated.total_bytes == fake.memory.allocated.total_bytes
    assert len(done.step_s) == 1
    assert sum(role.time.breakdown.values()) == pytest.approx(role.time.step_s)
    assert sum(role.time.phases.values()) == pytest.approx(role.time.step_s)
    assert {"forward", "backward", "optimizer"} <= set(role.time.phases)
    assert role.time.breakdown["matmul"] > 0


def test_a_world_of_any_size_is_played_by_one_process() -> None:
    done = solo(cpu_run(LLAMA, "fsdp", 1024), this_device("cpu"), 1000, warmup=1, steps=1)
    assert (done.report.world_size, done.report.roles[0].example_rank, done.report.provenance) == (1024, 1000, "solo")


# -- the others ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def world() -> Any:
    with stand_in_world(4, 2) as others:
        yield others


def no_zeros_and_no_nans(values: Any) -> bool:
    return bool(torch.isfinite(values).all() and (values != 0).float().mean() > 0.99 and values.std() > 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_gathered_is_random_but_for_this_ranks_part(world: Any, dtype: Any) -> None:
    mine, full = torch.arange(300, dtype=torch.float32).to(dtype), torch.full((1200,), float("nan"), dtype=dtype)
    compat.all_gather(full, mine)
    assert torch.equal(full[600:900], mine)
    assert all(no_zeros_and_no_nans(full[a:b].float()) for a, b in ((0, 600), (900, 1200)))


def test_a_gather_in_place_keeps_this_ranks_part(world: Any) -> None:
    full = torch.zeros(8)
    mine = full[4:6]
    mine.copy_(torch.tensor([5.0, 6.0]))
    compat.all_gather(full, mine)
    assert full[4:6].tolist() == [5.0, 6.0]
    assert (full != 0).all()


def test_a_gather_larger_than_the_values_kept_repeats_them(world: Any) -> None:
    full = torch.full((4 * (POOL // 2 + 3),), float("nan"))
    compat.all_gather(full, torch.ones(POOL // 2 + 3))
    assert torch.isfinite(full).all()
    assert world.bytes == 4 * POOL


def test_bytes_are_repeated_not_invented(world: Any) -> None:
    """Packed parameters of several dtypes are gathered as bytes: random ones could be NaNs."""
    full = torch.zeros(8, dtype=torch.uint8)
    compat.all_gather(full, torch.tensor([1, 2], dtype=torch.uint8))
    assert full.tolist() == [1, 2] * 4


def test_reductions_leave_what_this_rank_gave(world: Any) -> None:
    tensor, part = torch.arange(8.0), torch.empty(2)
    dist.all_reduce(tensor)
    dist.broadcast(tensor, src=0)
    assert tensor.tolist() == list(range(8))
    compat.reduce_scatter(part, tensor)
    assert part.tolist() == [4.0, 5.0]


def test_what_is_received_is_random(world: Any) -> None:
    buffer = torch.full((100,), float("nan"))
    dist.recv(buffer, src=1)
    assert no_zeros_and_no_nans(buffer)


def test_the_others_end_with_their_world() -> None:
    with stand_in_world(4, 2) as others:
        compat.all_gather(torch.empty(8), torch.ones(2))
        assert others.bytes > 0
    with stand_in_world(2, 0) as fresh:
        assert fresh.bytes == 0
    assert not dist.is_initialized()


# -- the device ---------------------------------------------------------------------------------------------------------------


class Counting(Cpu):
    """A device whose allocator counts, as a GPU's does: 1,000,000 allocated at the peak, 2,000,000 reserved, 3,000 of it workspace."""

    def peaks(self) -> Peaks:
        from execute.stand_in import StandIn
        return Peaks(1_000_000 + StandIn.others.bytes, 2_000_000 + StandIn.others.bytes)

    def workspace_bytes(self) -> int:
        return 3_000

    def used_bytes(self) -> int:
        from execute.stand_in import StandIn
        return 2_500_000 + StandIn.others.bytes

    def capacity_bytes(self) -> int:
        return 80 << 30


def test_where_an_allocator_counts_its_figures_are_taken_without_the_stand_ins_values() -> None:
    run = cpu_run(LLAMA, "fsdp", 8)
    role = solo(run, Counting(), warmup=1, steps=1).report.roles[0]
    assert role.memory is not None
    m = role.memory
    assert (m.allocated.total_bytes, m.reserved_bytes, m.device_bytes, m.workspace_bytes) == (997_000, 2_000_000, 2_500_000, 3_000)
    assert m.outside == {"context": 500_000}
    assert m.capacity_bytes == 80 << 30
    assert m.allocated.by_category == {}
    assert set(m.phases) == {"init", "first step", "steady step"}
    fake = dry_run(run).roles[0].memory
    assert fake is not None
    assert m.states == fake.states


@pytest.mark.parametrize("name", ["fsdp, bf16", "tp, loss parallel", "zero1", "pp, first"])
def test_states_counted_tensor_by_tensor_are_those_of_the_dry_run(name: str) -> None:
    """What a GPU's record says of states, where nobody watches."""
    from execute.data import source_of
    from execute.train import Training, make_ready
    run, rank = RUNS[name]
    with stand_in_world(run.plan.world_size, rank):
        prepared = assemble(run, "cpu")
        make_ready(Training(run, prepared, source_of(run), rank, "cpu", 1), 0)(None)
        counted = states_of(prepared)
    fake = dry_run(run, rank).roles[0].memory
    assert fake is not None
    assert counted == {name: size for name, size in fake.states.items() if name != "communication"}


def test_a_gpus_failed_allocation_is_out_of_memory() -> None:
    outcome = out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 79.11 GiB"), 3)
    assert outcome is not None
    assert (outcome.kind, outcome.rank, outcome.tried_bytes, outcome.exit_code) == ("oom", 3, 3 << 29, 3)
    assert out_of_memory(RuntimeError("something else")) is None


def test_a_gpus_kernel_is_refused_on_a_cpu() -> None:
    with pytest.raises(PlanError, match="this kernel runs on GPUs only"):
        solo(small_run(recipe={"precision": "bf16-pure", "attention": "fa2"}), Cpu())


def test_tf32_holds_while_the_steps_run_and_no_longer() -> None:
    with Cpu().settings(small_run(recipe={"precision": "tf32"})):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == "highest"


def test_what_a_recipe_asks_of_a_gpu_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """With PyTorch's CUDA calls replaced: the words of the allocator, the attention kernels left to choose from, and every name is PyTorch's."""
    called: list[Any] = []
    names = ("set_device", "init", "empty_cache", "synchronize", "reset_peak_memory_stats", "max_memory_allocated", "max_memory_reserved",
             "memory_allocated", "mem_get_info", "get_device_properties")
    for name in names:
        monkeypatch.setattr(f"torch.cuda.{name}", lambda *a, name=name: called.append((name, *a)) or 7)
    monkeypatch.setattr("execute.compat.allocator_settings", lambda words: called.append(words))
    run = small_run(recipe={"precision": "bf16-pure", "attention": "fa2", "allocator": "expandable"})
    gpu = Gpu()
    with gpu.settings(run):
        assert torch.backends.cuda.flash_sdp_enabled()
        assert not torch.backends.cuda.math_sdp_enabled()
        assert gpu.peaks() == Peaks(7, 7)
        gpu.reset_peaks()
    assert torch.backends.cuda.math_sdp_enabled()
    assert called[:4] == ["expandable_segments:True", ("set_device", 0), ("init",), ("empty_cache",)]
    assert ("reset_peak_memory_stats", 0) in called
    assert gpu.name == "cuda:0"


def test_a_gpu_that_is_not_there_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(PlanError, match="PyTorch sees no GPU"):
        this_device("cuda")


# -- the command --------------------------------------------------------------------------------------------------------------

SMALL = ["solo", "--set", "model.layers=1", "--set", "model.hidden=64", "--set", "model.heads=2", "--set", "model.ffn=128", "--set", "model.vocab=128",
         "--gpu", "cpu_epyc_2core", "--gpus", "2", "--strategy", "fsdp", "--seq-len", "32", "--precision", "fp32", "--warmup", "1", "--steps", "2"]


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, [*SMALL, *arguments])


def test_a_record_is_kept_and_says_where_and_how(tmp_path: Path) -> None:
    result = call("--rank", "1", "-o", str(tmp_path / "records"), "--trace", str(tmp_path / "step.json.gz"))
    assert result.exit_code == 0, result.output
    [(_, record)] = list(read_records(tmp_path / "records"))
    assert (record.provenance, record.outcome.kind, list(record.step_s)) == ("solo", "ok", [1])
    assert record.environment is not None and record.environment.versions["torch"] == str(torch.__version__)
    assert record.source == "execute solo --rank 1 --warmup 1 --steps 2"
    assert "recipe.optimizer" in record.assumed
    assert (tmp_path / "step.json.gz").stat().st_size > 0


def test_json_is_the_record_with_the_comparison(tmp_path: Path) -> None:
    result = call("--json", "--against", "predict", "-o", str(tmp_path / "one.json"))
    printed = json.loads(result.stdout)
    assert result.exit_code == (0 if printed["comparison"]["within_tolerance"] else 4)
    states = [row for row in printed["comparison"]["bytes"] if row["name"] == "between steps: optimizer"]
    assert states and states[0]["predicted"] == states[0]["solo"]
    assert printed.pop("comparison")["seconds"][0]["name"] == "step without communication"
    assert read_record(tmp_path / "one.json") == record_from_dict(printed)


def test_text_says_time_and_memory() -> None:
    result = call()
    assert result.exit_code == 0
    assert "median of 2 steps" in result.stdout
    assert "peak" in result.stdout


@pytest.mark.parametrize(("arguments", "says"), [
    (["--rank", "2"], "--rank 2: the run has 2 ranks"), (["--device", "tpu"], "--device tpu: it is cpu or cuda"), (["--steps", "0"], "--steps 0: must be"),
    (["--against", "me"], "--against me: it knows the prediction only"), (["-o", "{file}/records"], "nothing can be written there"),
    (["--set", "plan.ep=2"], "has no experts")])
def test_bad_input_exits_2_before_any_work(arguments: list[str], says: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = call(*(a.format(file=tmp_path / "file") for a in arguments))
    assert result.exit_code == 2
    assert says in result.output


@pytest.mark.parametrize(("error", "kind", "code"), [(RuntimeError("no kernel"), "failed", 5), (KeyboardInterrupt(), "interrupted", 130),
                                                     (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."), "oom", 3)])
def test_a_step_that_does_not_end_well_leaves_a_record(error: BaseException, kind: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any, **options: Any) -> None:
        raise error
    monkeypatch.setattr("execute.solo.solo", fails)
    result = call("-o", str(tmp_path))
    assert result.exit_code == code
    [(_, record)] = list(read_records(tmp_path))
    assert (record.outcome.kind, record.report, record.outcome.rank) == (kind, None, 0)
    assert kind in result.output


def test_out_of_memory_is_recorded(tmp_path: Path) -> None:
    """For real: the child may have 1.5 GB of data, and the logits alone are 4 GB."""
    limited = ("import resource, sys; resource.setrlimit(resource.RLIMIT_DATA, (1_500_000_000,) * 2); from execute.cli import app; "
               "app(sys.argv[1:], standalone_mode=True)")
    huge = [*SMALL, "--set", "model.vocab=500000", "--seq-len", "2048", "-o", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", limited, *huge], capture_output=True, text=True, env=environment, check=False, timeout=120)
    assert done.returncode == 3, done.stderr[-2000:]
    [(_, record)] = list(read_records(tmp_path))
    assert record.outcome.kind == "oom"
    assert record.outcome.tried_bytes is not None and record.outcome.tried_bytes > 100_000_000


def test_compiled_layers_compute_what_eager_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under FSDP's hooks and full checkpointing; what inductor makes of the graphs is PyTorch's own affair, and slow."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    from execute.data import source_of
    from execute.train import Training, make_ready
    shape = {**LLAMA, "hidden": 64, "ffn": 128, "layers": 3}
    losses = []
    for on in (False, True):
        run = cpu_run(shape, "fsdp", 2, {"compile": on}, checkpointing="full")
        with stand_in_world(2, 0):
            torch.manual_seed(0)
            job = Training(run, assemble(run, "cpu"), source_of(run), 0, "cpu", 3)
            losses.append([make_ready(job, step)(None).item() for step in range(2)])  # type: ignore[union-attr]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize(("asked", "field"), [({"recipe": {"attention": "fa3", "precision": "bf16-pure"}}, "recipe.attention"),
                                              ({"recipe": {"compile": True}, "checkpointing": "selective"}, "recipe.compile")])
def test_what_real_tensors_would_not_do_is_refused(asked: dict[str, Any], field: str) -> None:
    with pytest.raises(PlanError) as error:
        solo(small_run(**asked), Cpu())
    assert error.value.field == field
