"""Every private piece of PyTorch that execute uses exists, and does what it is used for."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from execute import compat  # noqa: E402


def test_the_pinned_version_is_installed() -> None:
    assert torch.__version__.split("+")[0] == "2.13.0"


def test_fsdp_s_hooks_have_the_names_that_are_watched() -> None:
    assert all(name in compat.FSDPParamGroup.__dict__ for name in compat.FSDP_METHODS)


def test_the_engine_adds_in_place_exactly_where_the_tracker_does() -> None:
    """The profiler tells what happens unwatched; the tracker must add in place as often."""
    from torch.profiler import ProfilerActivity, profile

    from execute.observe.storage import StorageTracker
    F, wide = torch.nn.functional, torch.nn.Linear(64, 64)
    table, index = torch.randn(100, 64, requires_grad=True), torch.randint(100, (4, 32))

    def loss() -> torch.Tensor:
        x = F.embedding(index, table)
        n = F.layer_norm(x, (64,))
        x = x + wide(n) * wide(n)
        x = x + wide(F.gelu(F.layer_norm(x, (64,))))
        return (x @ table.t()).logsumexp(-1).mean()

    unwatched = loss()
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        unwatched.backward()
    expected = sum(e.name == "aten::add_" for e in trace.events())
    seen = []
    watched = loss()
    wide.weight.grad = wide.bias.grad = table.grad = None
    with StorageTracker([lambda tracker, func, *rest: seen.append(func._schema.name)]):
        watched.backward()
    assert seen.count("aten::add_") == expected > 0


def test_a_fake_world_has_any_size_and_leaves_nothing_behind() -> None:
    import torch.distributed as dist
    with compat.fake_world(1024, 7):
        assert (dist.get_world_size(), dist.get_rank()) == (1024, 7)
    assert not dist.is_initialized()


def test_bucket_assignment_closes_a_bucket_once_its_cap_is_reached() -> None:
    tensors = [torch.empty(n) for n in (10, 10, 10, 10)]
    assert compat.bucket_assignment(tensors, [40, 80], [0, 1, 2, 3]) == [[0], [1, 2], [3]]


def test_a_fake_wait_makes_a_copy_that_the_real_one_does_not() -> None:
    wait, tensor = torch.ops._c10d_functional.wait_tensor.default, torch.ones(2)
    assert wait(tensor) is tensor or wait(tensor).data_ptr() == tensor.data_ptr()
    with compat.FakeTensorMode():
        fake = torch.ones(2)
        copy = wait(fake)
        assert compat.storage_key(copy.untyped_storage()) != compat.storage_key(fake.untyped_storage())
        assert compat.waits_for_fake(wait, (fake,))
    assert not compat.waits_for_fake(wait, (tensor,))


def test_worlds_of_one_process_do_not_share_dtensor_s_decisions() -> None:
    """Two ranks of one mesh, one after the other: each reduces over its own group."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    used: list[str] = []
    for rank in (0, 2):
        with compat.fake_world(4, rank):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
            with seen_groups(used):
                norm = torch.linalg.vector_norm(DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False))
                torch.linalg.vector_norm(torch.stack([norm, norm]))
            assert used[-1] == mesh.get_group().group_name


def seen_groups(used: list[str]) -> Any:
    class Groups(compat.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(issubclass(t, compat.DTensor) for t in types):
                return NotImplemented
            if func is torch.ops._c10d_functional.all_reduce.default:
                used.append(args[2])
            return func(*args, **(kwargs or {}))
    return Groups()


def test_a_pipeline_stage_has_the_hooks_that_are_wrapped() -> None:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineSchedule
    assert all(name in PipelineStage.__dict__ for name in ("_prepare_forward_infra", "_prepare_backward_infra"))
    assert "_warmup_p2p" in _PipelineSchedule.__dict__
