"""The Transformer: its parameters are those of the spec, and its variants agree with one another in value."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from small_runs import GPT, LLAMA, cpu_run  # noqa: E402

from costmodel.spec.parameters import embedding_params, head_params, layer_params  # noqa: E402
from execute.assemble import build  # noqa: E402
from execute.data import random_batch  # noqa: E402
from execute.weights import init_weights  # noqa: E402

SHAPES = [LLAMA, GPT, {**LLAMA, "qk_norm": "per_head", "tied_embeddings": True}, {**LLAMA, "qk_norm": "full", "norm_placement": "post"},
          {**LLAMA, "norms_per_layer": 4, "norm_placement": "sandwich"}, {**GPT, "parallel_residual": True, "norms_per_layer": 1},
          {**GPT, "positions": "rope", "position_rows": 0, "rotary_fraction": 0.25, "tied_embeddings": False, "head_bias": True},
          {**LLAMA, "norm": "rmsnorm_no_weight", "activation": "relu_squared", "gated": False, "qk_norm": "no_weight"},
          {**GPT, "embedding_norm": True, "activation": "gelu_tanh"}]


@pytest.mark.parametrize("shape", SHAPES)
def test_parameters_have_the_names_shapes_and_order_of_the_spec(shape: dict[str, Any]) -> None:
    run = cpu_run(shape)
    model, m = build(run, "meta"), run.model
    expected = [(p.name, p.shape) for p in embedding_params(m)]
    for i in range(m.layers):
        expected += [(f"layers.{i}.{p.name}", p.shape) for p in layer_params(m)]
    expected += [(p.name, p.shape) for p in head_params(m)]
    assert [(n, tuple(p.shape)) for n, p in model.named_parameters()] == expected


def loss_and_gradients(run: Any) -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    model = build(run, "cpu")
    init_weights(model)
    torch.manual_seed(1)
    loss = model(*random_batch(run))
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("shape", SHAPES)
def test_loss_of_a_fresh_model_is_near_the_logarithm_of_the_vocabulary(shape: dict[str, Any]) -> None:
    loss, gradients = loss_and_gradients(cpu_run(shape))
    assert loss.item() == pytest.approx(torch.tensor(512.0).log().item(), rel=0.05)
    assert all(g is not None and g.isfinite().all() for g in gradients.values())


@pytest.mark.parametrize("recipe", [{"loss": "chunked", "loss_chunks": 3}, {"loss": "fused", "loss_chunks": 3}, {"loss": "bf16"},
                                    {"attention": "eager"}, {"fused_norm": False}])
def test_kinds_of_loss_attention_and_norm_agree(recipe: dict[str, Any]) -> None:
    loss, gradients = loss_and_gradients(cpu_run(LLAMA))
    other, others = loss_and_gradients(cpu_run(LLAMA, recipe=recipe))
    torch.testing.assert_close(other, loss, rtol=1e-5, atol=1e-5)
    for name, g in gradients.items():
        torch.testing.assert_close(others[name], g, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("checkpointing", ["full", "full:2", "every:2", "selective", "selective:op"])
def test_checkpointing_changes_no_value(checkpointing: str) -> None:
    loss, gradients = loss_and_gradients(cpu_run(GPT, recipe={"dropout": 0.1}))
    other, others = loss_and_gradients(cpu_run(GPT, recipe={"dropout": 0.1}, checkpointing=checkpointing))
    assert other.item() == loss.item()
    for name, g in gradients.items():
        torch.testing.assert_close(others[name], g, rtol=0, atol=0)


def test_eager_attention_is_the_reference_of_the_fused_one_in_a_gpt() -> None:
    loss, _ = loss_and_gradients(cpu_run(GPT))
    other, _ = loss_and_gradients(cpu_run(GPT, recipe={"attention": "eager"}))
    torch.testing.assert_close(other, loss)
