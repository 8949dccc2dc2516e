"""The storage tracker against counts made by hand."""

import pytest

torch = pytest.importorskip("torch")

from execute.compat import FakeTensorMode  # noqa: E402
from execute.observe.storage import LIBRARY, StorageTracker, steady_gc  # noqa: E402

ROWS, WIDTH, INNER = 512, 64, 256


def observe_mlp(tracker: StorageTracker) -> None:
    """One step of a 64-256-64 network on 512 rows, float32, on fake tensors; its input and target are nobody's activations."""
    with steady_gc(), FakeTensorMode(), tracker:
        model = torch.nn.Sequential(torch.nn.Linear(WIDTH, INNER, bias=False), torch.nn.GELU(), torch.nn.Linear(INNER, WIDTH, bias=False))
        x, y = torch.empty(ROWS, WIDTH), torch.empty(ROWS, WIDTH)
        tracker.label(model.parameters(), "parameters")
        tracker.label([x, y], "framework")
        tracker.follow(model)
        tracker.step = "step"
        with tracker.forward():
            loss = torch.nn.functional.mse_loss(model(x), y)
        with tracker.phase_of("backward"):
            loss.backward()
            tracker.label([p.grad for p in model.parameters()], "gradients")
        del loss, x, y
        tracker.left = tracker.alive()  # type: ignore[attr-defined]


def test_activations_of_an_mlp_are_those_counted_by_hand() -> None:
    tracker = StorageTracker()
    observe_mlp(tracker)
    hidden = gelu = ROWS * INNER * 4
    out, loss = ROWS * WIDTH * 4, 4
    assert tracker.highest("step", "activations") == hidden + gelu + out + loss == 1_179_652


def test_peak_of_an_mlp_is_where_its_second_matrix_runs_backward() -> None:
    """The output is gone by then; its gradient, that of gelu's output and that of the loss (one number) live, and one weight gradient."""
    tracker = StorageTracker()
    observe_mlp(tracker)
    peak = tracker.peak("step")
    assert peak is not None
    weight, wide, out = WIDTH * INNER * 4, ROWS * INNER * 4, ROWS * WIDTH * 4
    assert peak.by_category == {"parameters": 2 * weight, "gradients": weight, "activations": 2 * wide + 4, "framework": 2 * out,
                                "temporaries": out + wide + 4}
    assert peak.total_bytes == sum(peak.by_category.values())
    assert peak.moment.startswith("backward")


def test_totals_return_to_the_states_when_a_step_is_over() -> None:
    tracker = StorageTracker()
    observe_mlp(tracker)
    weights = 2 * WIDTH * INNER * 4
    assert tracker.left == {"parameters": weights, "gradients": weights}  # type: ignore[attr-defined]


def test_timeline_ends_where_the_living_storages_sum() -> None:
    tracker = StorageTracker()
    observe_mlp(tracker)
    last = tracker.timeline()[-1]
    assert last.total_bytes == sum(tracker.alive().values())
    assert max(i.total_bytes for i in tracker.timeline("step")) == tracker.peak("step").total_bytes


def test_a_storage_resized_to_zero_counts_as_freed() -> None:
    tracker = StorageTracker()
    with tracker:
        t = torch.empty(1000)
        assert sum(tracker.alive().values()) == 4000
        t.untyped_storage().resize_(0)
        assert sum(tracker.alive().values()) == 0
        t.untyped_storage().resize_(2000)
        assert sum(tracker.alive().values()) == 2000


def test_views_share_their_storage() -> None:
    tracker = StorageTracker()
    with tracker:
        t = torch.empty(10, 10)
        views = [t.view(-1), t[2:], t.t()]
        assert sum(tracker.alive().values()) == 400
        del t
        assert sum(tracker.alive().values()) == 400
        del views
        assert sum(tracker.alive().values()) == 0


def test_what_a_library_made_for_itself_is_left_out_and_a_constant_is_not() -> None:
    """A view of a storage that nobody saw being born; torch.tensor gives its constant through lift_fresh, which is a view too."""
    before = torch.empty(1024)
    tracker = StorageTracker()
    with tracker:
        tracker.step = "step"
        view = before.view(32, 32)
        constant = torch.tensor([1.0, 2.0])
        made = torch.empty(256)
        assert tracker.alive() == {"temporaries": constant.nbytes + made.nbytes}
        assert tracker.highest("step", LIBRARY) == view.nbytes
