"""fp8 linear layers against what others measured, and against bytes counted by hand."""

from typing import Any

import pytest

from costmodel import PlanError, build_run, predict
from costmodel.catalog.profiles import load_profile
from costmodel.cost.compute import compute_costs
from costmodel.program.ir import Op
from costmodel.program.layers import Walk, numbers_of

ROWWISE = {"base": "fp8", "fp8_recipe": "rowwise"}
D26 = {"base": "nanochat-d20-oct2025", "layers": 26, "hidden": 1664, "heads": 13, "ffn": 6656, "vocab": 32768}


def linear_s(m: int, k: int, n: int, precision: Any, *, compile: bool = True) -> tuple[float, float]:
    """Device seconds of a linear layer, [m, k] times [k, n], on an H100: forward, and forward with backward."""
    run = build_run(model={"layers": 1, "hidden": k, "heads": k // 64, "ffn": n, "vocab": 512}, cluster={"gpu": "h100", "gpus": 1}, plan={"strategy": "fsdp"},
                    recipe={"seq_len": m, "precision": precision, "compile": compile})
    walk, costs = Walk(run, numbers_of(run)), compute_costs(run.cluster.accelerator, load_profile(run), run.recipe)
    x = walk.tape.input("x", m * k, "bf16")
    y = walk.linear(x, "mlp.up", n, k, False)
    forward = sum(costs.op_s(op) for op in walk.tape.forward((y,)))
    return forward, forward + sum(costs.op_s(op) for op in walk.tape.backward(y, x) if isinstance(op, Op))


def test_the_forward_of_nanochats_widest_layer_gains_what_it_measured() -> None:
    """karpathy/nanochat dev/LOG.md, 2026-02-02: [65536, 1664] x [1664, 6656] on an H100, compiled: bf16 2.00 ms, fp8 1.45 ms, by rows 1.84 ms. Rates
    here are those sustained in training, about a sixth lower. By rows 1.22 times is predicted where 1.09 was measured: only the order is held."""
    bf16, tensorwise, rowwise = (1e3 * linear_s(65536, 1664, 6656, precision)[0] for precision in ("bf16-mixed", "fp8", ROWWISE))
    assert bf16 / tensorwise == pytest.approx(2.00 / 1.45, rel=0.1)
    assert tensorwise < rowwise < bf16
    assert tensorwise == pytest.approx(1.45, rel=0.2)


def test_large_layers_gain_small_ones_lose_and_rows_gain_less() -> None:
    """pytorch/ao torchao/float8/README.md, H100, forward and backward: 1.39 for M, K, N = 4096, 8192, 16384; 0.80 for 1024, 2048, 1024."""
    large, rows, small = (linear_s(*shape, "bf16-mixed")[1] / linear_s(*shape, precision)[1] for shape, precision in (
        ((4096, 8192, 16384), "fp8"), ((4096, 8192, 16384), ROWWISE), ((1024, 2048, 1024), "fp8")))
    assert large == pytest.approx(1.39, rel=0.15)
    assert small < 0.8 < rows < large


def test_eager_casts_eat_the_gain() -> None:
    """karpathy/nanochat dev/LOG.md: without torch.compile fp8 is slower than bf16."""
    shape = 65536, 1664, 6656
    assert linear_s(*shape, "fp8", compile=False)[1] > linear_s(*shape, "bf16-mixed", compile=False)[1]


def test_compiled_code_keeps_half_of_what_linear_layers_keep_in_bf16() -> None:
    """karpathy/nanochat dev/LOG.md: about 9 GB less for d26 at 16 sequences of 2,048 tokens a GPU, its activations being stored in fp8."""
    def kept(precision: str) -> int:
        memory = predict(build_run(model=D26, cluster={"gpus": 8}, plan={"strategy": "muon-distributed"},
                                   recipe={"seq_len": 2048, "micro_batch": 16, "compile": True, "precision": precision})).fullest.memory
        assert memory is not None and memory.activations_bytes is not None
        return memory.activations_bytes
    assert (kept("bf16-mixed") - kept("fp8")) / 1e9 == pytest.approx(9, rel=0.35)


def weights_held(gpu: str, recipe: str) -> int:
    memory = [predict(build_run(model="llama-3-8b", cluster={"gpu": gpu, "gpus": 8}, plan={"framework": "megatron", "zero": 1},
                                recipe={"seq_len": 2048, "precision": precision})).fullest.memory
              for precision in ({"base": "fp8", "fp8_recipe": recipe}, "bf16-mixed")]
    assert memory[0] is not None and memory[1] is not None
    return memory[0].states["framework"] - memory[1].states["framework"]


@pytest.mark.parametrize(("gpu", "recipe", "per_weight"), [("h100", "tensorwise", 2), ("b200", "tensorwise", 1), ("b200", "mxfp8", 2 + 2 / 32),
                                                          ("h100", "delayed", 2)])
def test_transformer_engine_holds_fp8_weights_in_the_layouts_that_the_hardware_needs(gpu: str, recipe: str, per_weight: float) -> None:
    """Of 32 layers: queries and outputs 4096², keys and values 4096 x 1024, three matrices 4096 x 14336."""
    assert weights_held(gpu, recipe) == int(per_weight * 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336))


def test_fsdp2_gathers_one_byte_a_weight_and_reduces_the_scales_once() -> None:
    def sent(precision: Any) -> Any:
        run = build_run(model="llama-3-8b", cluster={"gpus": 8}, plan={"strategy": "fsdp"}, recipe={"seq_len": 2048, "compile": True, "precision": precision})
        return predict(run).roles[0].collectives
    layer, norms = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336, 2 * 4096
    plain, cast = ({c.message_bytes: c.count for c in sent(p) if c.kind == "all-gather"} for p in ("fp8", {"base": "fp8", "fp8_gather": True}))
    assert plain[2 * (layer + norms)] == cast[layer + 2 * norms] == 32
    assert [c.count for c in sent({"base": "fp8", "fp8_gather": True}) if c.kind == "all-reduce" and c.message_bytes == 4 * 32 * 7] == [1]


def test_torchtitans_8b_gains_a_quarter() -> None:
    """pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md, table 1: 1.25 to 1.36 from float8 with its gather, on 8 H100 of 500 W."""
    def step_s(precision: Any) -> float:
        run = build_run(model="llama-3.1-8b", cluster={"gpu": "h100_sxm_96gb_500w", "gpus": 8}, plan={"strategy": "fsdp", "checkpointing": "selective:op"},
                        recipe={"seq_len": 8192, "micro_batch": 2, "compile": True, "precision": precision})
        time = predict(run).fullest.time
        assert time is not None
        return time.step_s
    assert 1.15 < step_s("bf16-mixed") / step_s({"base": "fp8", "fp8_gather": True}) < 1.36


@pytest.mark.parametrize(("gpu", "plan", "precision", "field"), [
    ("a100", {"strategy": "fsdp"}, "fp8", "recipe.precision"), ("v100", {"strategy": "ddp"}, "fp8", "recipe.precision"),
    ("h100", {"strategy": "fsdp"}, {"base": "fp8", "fp8_recipe": "mxfp8"}, "recipe.precision.fp8_recipe"),
    ("h100", {"strategy": "fsdp"}, {"base": "fp8", "fp8_recipe": "blockwise"}, "recipe.precision.fp8_recipe"),
    ("h100", {"strategy": "zero3", "framework": "deepspeed"}, "fp8", "recipe.precision"),
    ("h100", {"strategy": "ddp"}, {"base": "fp8", "fp8_gather": True}, "recipe.precision.fp8_gather"),
    ("h100", {"strategy": "fsdp"}, {"base": "bf16-mixed", "fp8_gather": True}, "recipe.precision"),
    ("h100", {"strategy": "fsdp"}, {"base": "fp8", "parameter": "fp8", "gradient": "fp8"}, "recipe.precision")])
def test_what_has_no_fp8_is_refused_by_name(gpu: str, plan: dict[str, Any], precision: Any, field: str) -> None:
    with pytest.raises(PlanError) as error:
        predict(build_run(model="llama-3-8b", cluster={"gpu": gpu, "gpus": 8}, plan=plan, recipe={"seq_len": 2048, "precision": precision}))
    assert error.value.field.startswith(field)
