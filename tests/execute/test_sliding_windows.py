"""Sliding windows in the model that execute runs: which keys a token sees, and what is refused."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from small_runs import LLAMA, cpu_run, small_run  # noqa: E402

from costmodel.spec import PlanError  # noqa: E402
from execute.assemble import build  # noqa: E402
from execute.support import check_supported  # noqa: E402
from execute.weights import init_weights  # noqa: E402

WINDOW: dict[str, Any] = {**LLAMA, "sliding_window": 9}


def test_a_token_sees_the_last_tokens_and_itself() -> None:
    """torch.nn.functional.scaled_dot_product_attention with a mask written token by token."""
    model = build(cpu_run(WINDOW, recipe={"attention": "eager"}), "cpu")
    init_weights(model)
    model.init_constants()
    q, k, v = (torch.randn(2, heads, 128, 64) for heads in (4, 2, 2))
    seen = torch.tensor([[0 <= i - j < 9 for j in range(128)] for i in range(128)])
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    attention = model.layers[0].attention
    torch.testing.assert_close(attention.eager(q, k, v, dict(model.named_buffers())["mask9"]), expected)


def test_each_layer_has_its_own_mask() -> None:
    model = build(cpu_run({**WINDOW, "layers": 3, "window_pattern": "SSL"}, recipe={"attention": "eager"}), "cpu")
    model.init_constants()
    seen = [int((~model.tables().masks[layer.attention.window]).sum()) for layer in model.layers]
    assert seen == [sum(min(i + 1, 9) for i in range(128))] * 2 + [128 * 129 // 2]


@pytest.mark.parametrize(("recipe", "plan", "named"), [
    ({"attention": "sdpa"}, {}, "sliding windows"), ({"attention": "eager", "causal": False}, {}, "look ahead"),
    ({"attention": "fa2", "precision": "bf16-pure"}, {"strategy": "fsdp", "gpus": 2, "cp": 2}, "Ulysses")])
def test_what_execute_does_not_perform_with_windows_is_refused(recipe: dict[str, Any], plan: dict[str, Any], named: str) -> None:
    with pytest.raises(PlanError, match=named):
        check_supported(small_run(WINDOW, recipe=recipe, **plan))
