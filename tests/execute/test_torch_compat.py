"""Every private piece of PyTorch that execute uses exists, and does what it is used for."""

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
