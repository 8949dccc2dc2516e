"""Latent attention in the model that execute runs: names, and its values against the absorbed form that decoding uses."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from small_runs import LLAMA, cpu_run, small_run  # noqa: E402

from costmodel.spec import PlanError  # noqa: E402
from costmodel.spec.parameters import layer_params  # noqa: E402
from execute.assemble import build  # noqa: E402
from execute.model import rotate  # noqa: E402
from execute.support import check_supported  # noqa: E402
from execute.weights import init_weights  # noqa: E402

MLA = {"q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16}
LATENT: dict[str, Any] = {**LLAMA, "kv_heads": 4, "mla": MLA}


@pytest.mark.parametrize("rank", [0, 48])
def test_parameters_have_the_names_shapes_and_order_of_the_spec(rank: int) -> None:
    run = cpu_run({**LATENT, "mla": {**MLA, "q_lora_rank": rank}})
    found = [(n, tuple(p.shape)) for n, p in build(run, "meta").layers[0].named_parameters()]
    assert found == [(p.name, p.shape) for p in layer_params(run.model)]


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_values_are_those_of_the_absorbed_form(kind: str) -> None:
    """arXiv 2405.04434, section 2.1.2: q_nope·(W_k latent) = (W_kᵀ q_nope)·latent, and Σ p (W_v latent) = W_v Σ p latent; no key or value is made."""
    torch.manual_seed(0)
    model = build(cpu_run(LATENT, recipe={"attention": kind}), "cpu")
    init_weights(model)
    model.init_constants()
    attention, tables, x = model.layers[0].attention, model.tables(), torch.randn(2, 128, 256)
    for p in attention.parameters():
        p.data.add_(torch.randn_like(p) * 0.2)
    q = attention.q_b(attention.q_a_norm(attention.q_a(x))).view(2, 128, 4, 32)
    latent, k_rope = attention.kv_a(x).split((32, 8), -1)
    latent, k_rope = attention.kv_a_norm(latent), rotate(k_rope.unsqueeze(2), tables).squeeze(2)
    w_k, w_v = attention.kv_b.weight.view(4, 40, 32).split((24, 16), 1)
    absorbed = torch.einsum("bqhd,hdr->bqhr", q[..., :24], w_k)
    scores = torch.einsum("bqhr,bkr->bhqk", absorbed, latent) + torch.einsum("bqhd,bkd->bhqk", rotate(q[..., 24:], tables), k_rope)
    hidden = torch.ones(128, 128, dtype=torch.bool).triu(1)
    weights = (scores * 32 ** -0.5).masked_fill(hidden, float("-inf")).softmax(-1)
    heads = torch.einsum("bhqk,bkr,hdr->bqhd", weights, latent, w_v)
    expected = attention.out(heads.reshape(2, 128, 64))
    torch.testing.assert_close(attention(x, tables), expected, rtol=1e-3, atol=1e-4 * expected.detach().abs().max().item())


@pytest.mark.parametrize(("recipe", "plan", "named"), [
    ({"attention": "fa2", "precision": "bf16-pure"}, {}, "recipe.attention"), ({}, {"strategy": "fsdp", "gpus": 2, "cp": 2, "cp_kind": "ulysses"}, "plan.cp"),
    ({}, {"strategy": "fsdp", "gpus": 4, "tp": 2}, "plan.tp")])
def test_what_execute_does_not_perform_with_latents_is_refused(recipe: dict[str, Any], plan: dict[str, Any], named: str) -> None:
    with pytest.raises(PlanError, match=named):
        check_supported(small_run(LATENT, recipe=recipe, **plan))
