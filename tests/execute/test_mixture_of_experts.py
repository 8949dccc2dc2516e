"""The mixture of experts that execute runs: its names, its values against a loop over tokens, its auxiliary loss, and what a dry run routes."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from small_runs import LLAMA, cpu_run, small_run  # noqa: E402

from costmodel.spec import PlanError  # noqa: E402
from costmodel.spec.parameters import layer_params  # noqa: E402
from costmodel.spec.routing import rows_by_rank  # noqa: E402
from execute.assemble import build  # noqa: E402
from execute.dryrun import dry_run  # noqa: E402
from execute.experts import balance, mixture  # noqa: E402
from execute.support import check_supported  # noqa: E402
from execute.weights import init_weights  # noqa: E402

MOE: dict[str, Any] = {"experts": 8, "top_k": 2, "expert_ffn": 96, "shared_experts": 1, "shared_ffn": 64, "router_bias": True}
MIXTURE: dict[str, Any] = {**LLAMA, "moe": MOE}


def layer_of(run: Any) -> Any:
    torch.manual_seed(0)
    model = build(run, "cpu")
    init_weights(model)
    for p in model.parameters():
        p.data.mul_(20)  # far from even routing
    return model.layers[0]


@pytest.mark.parametrize("gated", [True, False])
def test_parameters_have_the_names_shapes_and_order_of_the_spec(gated: bool) -> None:
    run = cpu_run({**MIXTURE, "gated": gated, "activation": "silu" if gated else "gelu"})
    found = [(n, tuple(p.shape)) for n, p in build(run, "meta").layers[0].named_parameters()]
    assert found == [(p.name, p.shape) for p in layer_params(run.model, moe=True)]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_values_are_those_of_a_loop_over_tokens(score: str) -> None:
    """arXiv 2401.04088, section 2.1: Σ over the top k of share_e · W_down (silu(W_gate x) · W_up x), written token by token."""
    layer = layer_of(cpu_run({**MIXTURE, "moe": {**MOE, "router_score": score}}))
    x = torch.randn(2, 9, 256, requires_grad=True)
    y = mixture(x, layer.router, layer.experts, 2, score, 0.0)
    gate, up, down = (getattr(layer.experts, name).weight for name in ("gate", "up", "down"))
    rows = []
    for token in x.view(-1, 256):
        logits = layer.router(token)
        scores = logits.softmax(0) if score == "softmax" else logits.sigmoid()
        best = scores.argsort(descending=True)[:2].tolist()
        total = sum(scores[e] for e in best)
        rows.append(sum(scores[e] / total * (down[e] @ (torch.nn.functional.silu(gate[e] @ token) * (up[e] @ token))) for e in best))
    expected = torch.stack(rows).view(2, 9, 256)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5 * expected.detach().abs().max().item())
    weights = (x, gate, up, down, layer.router.weight)
    ours, theirs = (torch.autograd.grad(out.square().sum(), weights, retain_graph=True) for out in (y, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * b.abs().max().item())


def test_slots_enough_for_all_change_nothing_and_too_few_drop_the_last_tokens() -> None:
    """arXiv 2006.16668, section 3.2: what is over an expert's capacity is not computed; here the later rows are. 18 tokens x 2 of 8 experts: a factor of 4
    is 18 slots, all there can be; a factor of 0.2 is one slot."""
    x = torch.randn(2, 9, 256)

    def of(factor: float | None) -> Any:
        layer = layer_of(cpu_run(MIXTURE, recipe={"moe_capacity_factor": factor}))
        return layer, mixture(x, layer.router, layer.experts, 2, "softmax", 0.0).view(18, 256)

    layer, whole = of(None)
    close = {"rtol": 1e-4, "atol": 1e-5 * whole.abs().max().item()}
    torch.testing.assert_close(of(4.0)[1], whole, **close)
    few = of(0.2)[1]
    chosen = layer.router(x.view(18, 256)).topk(2)[1].tolist()
    first = {expert: min(t for t in range(18) if expert in chosen[t]) for row in chosen for expert in row}
    for token, experts in enumerate(chosen):
        kept = [e for e in experts if first[e] == token]
        if len(kept) == 2:
            torch.testing.assert_close(few[token], whole[token], **close)
        else:
            assert bool((few[token] == 0).all()) is (not kept)
    assert any(len([e for e in experts if first[e] == t]) == 0 for t, experts in enumerate(chosen))


def test_the_auxiliary_loss_is_one_where_routing_is_even_and_e_where_one_expert_gets_all() -> None:
    """arXiv 2101.03961, equation 4: E Σ f_i P_i."""
    even, one = torch.full((16, 4), 0.25), torch.zeros(16, 4)
    one[:, 2] = 1.0
    assert balance(even, torch.full((4,), 8)) == pytest.approx(1.0)
    assert balance(one, torch.tensor([0, 0, 32, 0])) == pytest.approx(4.0)


def test_the_auxiliary_loss_reaches_the_router_and_nothing_else() -> None:
    """α E Σ f_i P_i has the gradient α E / n Σ f_i ∂s_i for every token's scores, added to what the output gives."""
    layer = layer_of(cpu_run({**MIXTURE, "moe": {**MOE, "shared_experts": 0, "shared_ffn": 0}}))
    x, weight = torch.randn(2, 9, 256), layer.router.weight

    def gradients(alpha: float) -> Any:
        y = mixture(x, layer.router, layer.experts, 2, "softmax", alpha)
        return torch.autograd.grad(y.sum(), (weight, layer.experts.up.weight))

    with_loss, without = gradients(0.1), gradients(0.0)
    scores = layer.router(x.view(-1, 256)).softmax(-1)
    counts = torch.bincount(scores.topk(2, -1)[1].flatten(), minlength=8)
    expected, = torch.autograd.grad(0.1 * 8 * (counts / counts.sum() * scores.mean(0)).sum(), weight)
    torch.testing.assert_close(with_loss[0] - without[0], expected, rtol=1e-2, atol=1e-4 * float(without[0].abs().max()))
    torch.testing.assert_close(with_loss[1], without[1])


@pytest.mark.parametrize(("rows", "ranks", "imbalance", "expected"), [
    (100, 4, 1.0, [25, 25, 25, 25]), (10, 4, 1.0, [3, 3, 2, 2]), (100, 4, 2.0, [50, 17, 17, 16]), (7, 1, 1.0, [7])])
def test_rows_are_dealt_out(rows: int, ranks: int, imbalance: float, expected: list[int]) -> None:
    assert rows_by_rank(rows, ranks, imbalance) == expected


def test_a_dry_run_sends_what_the_imbalance_says() -> None:
    """256 tokens x 2 experts, ep 4: 1.5 even shares to the busiest rank are 192 of 512 rows from each of four; another gets 107 or 106."""
    run = small_run(MIXTURE, "fsdp", 8, ep=4, recipe={"moe_imbalance": 1.5})
    for rank, received in ((0, 4 * 192), (1, 4 * 107), (3, 4 * 106)):
        sent = dry_run(run, rank).roles[0].collectives or ()
        seen = [c for c in sent if (c.axis, c.kind, c.phase, c.dtype) == ("ep", "all-to-all", "forward", "fp32")]
        assert sorted((c.in_bytes, c.out_bytes) for c in seen) == sorted([(512 * 1024, received * 1024), (received * 1024, 512 * 1024)])


@pytest.mark.parametrize(("field", "mode", "given"), [
    ("recipe.moe_imbalance", "solo", {"strategy": "fsdp", "gpus": 8, "ep": 2, "recipe": {"moe_imbalance": 1.5}}),
    ("plan.ep", "run", {"strategy": "zero1", "gpus": 8, "ep": 2}),
    ("plan.tp", "dryrun", {"strategy": "fsdp", "gpus": 8, "tp": 2}), ("plan.ep_overlap", "run", {"strategy": "fsdp", "gpus": 8, "ep": 2, "ep_overlap": True})])
def test_what_is_not_performed_is_refused_by_name(field: str, mode: Any, given: dict[str, Any]) -> None:
    with pytest.raises(PlanError) as refused:
        check_supported(small_run(MIXTURE, **given), mode)
    assert refused.value.field == field
