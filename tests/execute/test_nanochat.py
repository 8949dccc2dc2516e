"""nanochat's optimizer performed: against torch.optim.Muon, torch's own FLOP counter, and one process with the same batch."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from gloo_ranks import perform_once  # noqa: E402
from small_runs import cpu_run  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from costmodel.inputs import build_run  # noqa: E402
from costmodel.program.build import build  # noqa: E402
from costmodel.program.ir import expand  # noqa: E402
from execute.muon import StackedMuon, orthogonalised  # noqa: E402

THREE: dict[str, Any] = {"layers": 3, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 64}
"""Three layers over two ranks: stacks of an odd number of matrices, padded."""
MUON = {"base": "muon", "lr": 0.02, "momentum": 0.95, "weight_decay": 0.1}


def given(gpus: int, plan: dict[str, Any], micro_batch: int = 2) -> dict[str, Any]:
    recipe = {"seq_len": 16, "micro_batch": micro_batch, "grad_accum": 2, "precision": "fp32", "optimizer": MUON, "clip_norm": 0.0}
    return {"model": THREE, "cluster": {"gpu": "cpu_epyc_2core", "gpus": gpus}, "plan": plan, "recipe": recipe}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two ranks under gloo did."""
    return perform_once({"muon": ("learn", given(2, {"strategy": "muon-distributed"}))}, 2, tmp_path_factory, "nanochat_ranks")[0]


def test_two_ranks_learn_as_one_process_with_torchs_own_optimizers(pair: dict[str, Any], tmp_path: Path) -> None:
    """The iterations are in bfloat16, and a batch of matrices is not rounded as one matrix is."""
    from gloo_worker import learn
    losses = learn(build_run(**given(1, {"strategy": "single"}, micro_batch=4)), tmp_path)
    assert max(losses) - min(losses) > 1e-2 * losses[0]
    assert pair["muon"]["result"] == pytest.approx(losses, rel=2e-3)


@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16)])
def test_a_stack_is_updated_as_torch_updates_matrix_by_matrix(shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    stack, grads = torch.randn(3, *shape), torch.randn(3, *shape)
    alone = [torch.nn.Parameter(m.clone()) for m in stack]
    together = torch.nn.Parameter(stack.clone())
    one, all_three = torch.optim.Muon(alone, lr=0.02, weight_decay=0.1, momentum=0.9), StackedMuon([together], 0.02, 0.9, 0.1)
    for _ in range(3):
        for p, g in zip(alone, grads, strict=True):
            p.grad = g.clone()
        together.grad = grads.clone()
        one.step()
        all_three.step()
    assert torch.allclose(torch.stack([*alone]), together, atol=2e-3)


def test_a_matrix_of_zeros_stays_zero() -> None:
    assert orthogonalised(torch.zeros(2, 8, 16)).count_nonzero() == 0


@pytest.mark.parametrize("plan", [{"strategy": "single"}, {"framework": "nanochat"}])
def test_the_flops_of_the_update_are_those_that_torch_counts(plan: dict[str, Any]) -> None:
    from execute.assemble import assemble
    run = cpu_run(THREE, recipe={"optimizer": "muon", "clip_norm": 0.0}, **plan)
    prepared = assemble(run, "cpu")
    for p in prepared.model.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    with FlopCounterMode(display=False) as counter:
        (prepared.step or prepared.optimizer.step)()
    ops = [op for block in expand(build(run).roles[0].step) if block.name == "update" for op in block.ops]
    assert sum(op.flops for op in ops if op.kind == "matmul") == counter.get_total_flops()
