"""Parameters, gradients, optimizer states, buckets: what is replicated, what is sharded.

Each test names its case (C01) and public source; sources are repository#number, figures those reported or computed there.
"""

import itertools
from typing import Any

import pytest
from asked import GB, GIB, GPT, MIB, kept, memory, predicted, run_of, states

from costmodel import StepReport, predict
from costmodel.explain import explain
from costmodel.program.build import build
from costmodel.program.ir import Tensor

BF16_GRADIENTS = {"base": "bf16-mixed", "gradient": "bf16", "reduce": "bf16"}


# -- bytes a parameter -------------------------------------------------------------------------------------------------------


def llm_c(base: str, zero: int) -> StepReport:
    """llm.c as Megatron's data parallel with bf16 gradients: whole bf16 weights and gradients in one buffer, fp32 m, v and master."""
    return predicted(model={"base": base, "vocab": 50304}, gpus=4, plan={"framework": "megatron", "zero": zero}, seq_len=1024, micro_batch=4,
                     precision=BF16_GRADIENTS, optimizer="adamw:foreach")


@pytest.mark.parametrize(("base", "params", "saved_mib", "tolerance"), [
    ("gpt2", 124_475_904, 1068, 2), ("gpt2-xl", 1_557_686_400, 13374, 5)])
def test_llm_c_saves_three_quarters_of_the_fp32_states_with_zero_1(base: str, params: int, saved_mib: float, tolerance: float) -> None:
    """C01, karpathy/llm.c#309, four GPUs: nvidia-smi fell by 1068 MiB (124M) and 13374 MiB (1558M) with stage 1."""
    off, on = llm_c(base, 0), llm_c(base, 1)
    assert (kept(off) - kept(on)) / MIB == pytest.approx(saved_mib, abs=tolerance)
    assert states(off)["parameters"] == 2 * params


def test_llm_c_lists_its_buffers() -> None:
    """C01: params 237, grads 237, m 118, v 118, master 118 MiB."""
    found = states(llm_c("gpt2", 1))
    assert found["parameters"] / MIB == pytest.approx(237, abs=1)
    assert found["gradients"] / MIB == pytest.approx(237, abs=1)
    assert found["master_weights"] / MIB == pytest.approx(118.7, abs=0.1)
    assert found["optimizer"] / MIB == pytest.approx(2 * 118.7, abs=0.2)


def test_a_gated_mlp_has_three_matrices() -> None:
    """C10, EleutherAI/cookbook#36: Qwen1.5-72B has 72.29e9 parameters; two matrices a block would make it 56.2e9."""
    shape = {"layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 64, "ffn": 24576, "vocab": 152064, "qkv_bias": True}
    assert run_of(model=shape).model.params == pytest.approx(72.29e9, abs=0.01e9)
    assert run_of(model={**shape, "gated": False}).model.params == pytest.approx(56.18e9, abs=0.01e9)


def test_deepspeeds_zero_2_takes_2_bytes_a_parameter_and_18_sharded_at_the_step() -> None:
    """C11, deepspeedai/DeepSpeed#965 and #5099: 2P + 18P/N for 2851M parameters on 8 GPUs is 11.3 GiB; buckets are not in the estimate.

    18 = 2-byte and 4-byte gradients, 4 master, 8 Adam: the 4-byte gradients exist only while the step runs. DeepSpeed itself (0.19.8) needs more than
    its estimate for a moment: the 2-byte gradients once more, as one flat piece, and whole the parameters that its slice touches.
    """
    given: dict[str, Any] = {"params": "2851M", "gpus": 8, "plan": {"framework": "deepspeed", "zero": 2}, "seq_len": 64}
    model = run_of(**given).model
    params = model.params
    peak = memory(predicted(**given)).phases["optimizer step"].by_category
    found = sum(v for k, v in peak.items() if k not in ("communication", "framework"))
    estimate, flat = 2 * params + 18 * params / 8, 2 * params / 8
    assert estimate * 2851e6 / params / GIB == pytest.approx(11.3, abs=0.05)
    assert estimate + flat <= found * (1 + 1e-6) <= (estimate + flat + 2 * 2 * model.vocab * model.hidden) * (1 + 1e-6)


def test_deepspeeds_zero_3_estimate_leaves_the_16_bit_gradients_out() -> None:
    """C11, DeepSpeed#4527: 29.01 GiB for 6805M on 4 GPUs is 18P/N + 4 bytes a parameter of the largest layer (131M).

    The estimator's 18 are the sharded parameters (2), master (4), Adam (8) and fp32 gradients (4). The 16-bit gradients from which the
    last are made are still there at the step, and once more as one flat piece: 4P/N more.
    """
    given: dict[str, Any] = {"params": "6805M", "gpus": 4, "plan": {"framework": "deepspeed", "zero": 3}, "seq_len": 64}
    params = run_of(**given).model.params
    peak = memory(predicted(**given)).phases["optimizer step"].by_category
    estimated = sum(peak[k] for k in ("parameters", "master_weights", "optimizer", "temporaries"))
    estimated -= 2 * params / 4
    assert (estimated * 6805e6 / params + 4 * 131e6) / GIB == pytest.approx(29.01, abs=0.02)
    assert peak["gradients"] == pytest.approx(2 * params / 4, rel=1e-6)


@pytest.mark.parametrize("d", [1, 8, 64])
@pytest.mark.parametrize(("gradients", "whole"), [("fp32", 6), ("bf16", 4)])
def test_megatrons_distributed_optimizer_leaves_weights_and_gradients_whole(d: int, gradients: str, whole: int) -> None:
    """C12, NVIDIA/Megatron-LM#654 (maintainer): 2 + 4 + 4 + 8 = 18 bytes a parameter, or 6 + 12/d; with 16-bit gradients 4 + 12/d."""
    precision = {"base": "bf16-mixed", "gradient": gradients, "reduce": gradients}
    run = run_of(params="7B", gpus=d, plan={"framework": "megatron", "zero": 1}, seq_len=128, precision=precision, optimizer="adam:foreach")
    assert kept(predict(run, scaling=False)) == pytest.approx((whole + 12 / d) * run.model.params, rel=1e-6)
    off = run.model_copy(update={"plan": run.plan.model_copy(update={"zero": 0, "dp_replicate": d, "dp_shard": 1})})
    assert kept(predict(off, scaling=False)) == (whole + 12) * run.model.params


@pytest.mark.parametrize("d", [1, 8])
def test_16_bit_gradients_need_a_passing_fp32_shard_at_the_step(d: int) -> None:
    """C13, NVIDIA/Megatron-LM#6984: below torch 2.10 main gradients are made from the shard of the buffer, 4/d bytes a parameter."""
    def update_peak(gradients: str) -> int:
        precision = {"base": "bf16-mixed", "gradient": gradients, "reduce": gradients}
        report = predicted(params="1B", gpus=d, plan={"framework": "megatron", "zero": 1}, seq_len=128, precision=precision)
        return memory(report).phases["optimizer step"].by_category.get("temporaries", 0)

    shard = -(-run_of(params="1B").model.params // d)
    assert update_peak("bf16") == 4 * shard
    assert update_peak("fp32") == 0


def test_mpt_7b_needs_16_bytes_a_parameter_not_12() -> None:
    """C58, mosaicml/llm-foundry#183 and #468: fp32 parameters, gradients and Adam over 2 GPUs are 49.5 GiB; the rule of 12 gives 37.2."""
    report = predicted(model="mpt-7b-released", gpus=2, plan={"strategy": "fsdp", "checkpointing": "full"}, seq_len=2048)
    assert kept(report) / GIB == pytest.approx(49.5, abs=0.1)


def test_deepspeeds_stage_0_in_bf16_shards_its_states() -> None:
    """C55, deepspeedai/DeepSpeed#2352 (BLOOM's script says stage 0): 2 bytes of weights and 4 of gradients whole, 12/n sharded."""
    run = run_of(model="llama-7b", gpus=8, plan={"framework": "deepspeed", "zero": 0}, seq_len=128, optimizer="adamw:foreach")
    found = states(predict(run, scaling=False))
    expected = {"parameters": 2.0, "gradients": 4.0, "master_weights": 4 / 8, "optimizer": 8 / 8}
    assert {k: v / run.model.params for k, v in found.items()} == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("framework", "zero", "expected"), [
    ("megatron", 1, {"parameters": (2, 2), "gradients": (4, 4), "master weights": (4, 0.5), "first moment": (4, 0.5), "second moment": (4, 0.5)}),
    ("deepspeed", 2, {"parameters": (2, 2), "gradients": (2, 0.25), "master weights": (4, 0.5), "first moment": (4, 0.5), "second moment": (4, 0.5)}),
    ("deepspeed", 3, {"parameters": (2, 0.25), "gradients": (2, 0.25), "master weights": (4, 0.5), "first moment": (4, 0.5), "second moment": (4, 0.5)}),
    ("pytorch", 3, {"parameters": (4, 0.5), "gradients": (4, 0.5), "first moment": (4, 0.5), "second moment": (4, 0.5)})])
def test_each_frameworks_bytes_are_listed_term_by_term(framework: str, zero: int, expected: dict[str, tuple[float, float]]) -> None:
    """C11 and C12: the same number of bytes a parameter hides different contents, so `explain` lists them, whole and over 8 ranks. The gradients of
    DeepSpeed's stage 2 live until the update, those of the parameters that its slice touches whole."""
    run = run_of(params="7B", gpus=8, plan={"framework": framework, "zero": zero}, seq_len=128, optimizer="adamw:foreach")
    terms = {t.name: t for t in explain(run).terms if t.name in expected}
    assert set(terms) == set(expected)
    touched = {"gradients": 2 * 2 * run.model.ffn * run.model.hidden / run.model.params} if (framework, zero) == ("deepspeed", 2) else {}
    for name, (whole, here) in expected.items():
        assert (terms[name].whole, terms[name].between_steps) == (pytest.approx(whole, rel=1e-3), name not in touched)
        assert here * (1 - 1e-3) <= terms[name].here <= here * (1 + 1e-3) + touched.get(name, 0.0), name


# -- sharded over how many ---------------------------------------------------------------------------------------------------


def test_more_fsdp_ranks_shrink_model_states_only() -> None:
    """C08, pytorch/pytorch#82001, a 2.85B model on 8 to 32 GPUs: states fall by 4.28 GB; activations stay, and the curve flattens."""
    reports = {n: predicted(params="2.85B", gpus=n, plan={"strategy": "fsdp"}, seq_len=512, micro_batch=8) for n in (8, 16, 24, 32)}
    assert 4.1 <= (kept(reports[8]) - kept(reports[32])) / GB <= 4.5
    assert len({memory(r).activations_bytes for r in reports.values()}) == 1
    allocated = [memory(r).allocated.total_bytes for r in reports.values()]
    steps = [a - b for a, b in itertools.pairwise(allocated)]
    assert steps == sorted(steps, reverse=True)
    assert allocated[-1] > 0.8 * allocated[0]


NEOX = {**GPT, "layers": 44, "hidden": 6144, "heads": 64, "ffn": 24576, "vocab": 50432, "rotary_fraction": 0.25, "parallel_residual": True}


@pytest.mark.parametrize(("gpus", "gpu", "plan", "gib", "verdict"), [
    (2, "a100_sxm_40gb", {"tp": 2}, 172, "does not fit"),
    (24, "a100_sxm_40gb", {"tp": 4, "pp": 6}, 14.4, "fits"),
    (8, "a100_sxm_80gb", {"tp": 2, "pp": 4, "checkpointing": "full"}, 43.1, "fits"),
    (8, "a100_sxm_80gb", {"tp": 8, "checkpointing": "full"}, 43.1, "fits")])
def test_how_many_gpus_gpt_neox_20b_needs(gpus: int, gpu: str, plan: dict[str, Any], gib: float, verdict: str) -> None:
    """C14, EleutherAI/gpt-neox#892, #606 and #707: 18 bytes of 20.55e9 parameters over tp x pp; the mean of the stages, for the ends have more."""
    assert run_of(model=NEOX).model.params == pytest.approx(20.555e9, rel=1e-3)
    report = predicted(model=NEOX, gpus=gpus, gpu=gpu, plan={"framework": "megatron", **plan}, seq_len=2048, micro_batch=1)
    assert sum(kept(report, i) for i in range(len(report.roles))) / len(report.roles) / GIB == pytest.approx(gib, rel=0.02)
    assert report.verdict == verdict


@pytest.mark.parametrize(("plan", "copy_mib"), [({"gradient_as_bucket_view": True}, 5480), ({"strategy": "fsdp"}, 2740)])
def test_two_ranks_with_momentum_hold_three_copies_whole_or_halved(plan: dict[str, Any], copy_mib: float) -> None:
    """C17, facebookresearch/fairscale#627: 1.4365B fp32 parameters; DDP 5480, 10960, 16440 MiB before, after backward and after the step,
    FSDP half of each."""
    given: dict[str, Any] = {"params": "1.4365B", "gpus": 2, "plan": plan, "precision": "fp32", "optimizer": "momentum", "seq_len": 128}
    scale = 1.4365e9 / run_of(**given).model.params
    found = {k: v * scale / MIB for k, v in states(predicted(**given)).items()}
    assert found == pytest.approx({"parameters": copy_mib, "gradients": copy_mib, "optimizer": copy_mib}, abs=1)


def test_not_reducing_each_micro_batch_keeps_whole_gradients() -> None:
    """C49, meta-pytorch/tnt#1057, 26B over 16 GPUs with bf16 gradients: 52 GB whole instead of 3.25 GB sharded."""
    whole, sharded = (memory(predicted(params="26B", gpus=16, gpu="h100", plan={"strategy": "fsdp", "checkpointing": "full", "sync_each_micro_batch": each},
                                       precision="bf16-pure", seq_len=512, grad_accum=4, loss="fused")).phases["steady step"].by_category
                      for each in (False, True))
    held = [m["gradients"] + m["communication"] for m in (whole, sharded)]
    model = run_of(params="26B").model
    a_layer_in_flight = 2 * model.params / model.layers
    assert held[0] - held[1] == pytest.approx(48.75 * GB, abs=a_layer_in_flight)


def test_a_layer_is_the_unit_that_fsdp_gathers() -> None:
    """C53, facebookresearch/fairscale#1050: wrapped as a whole a model is gathered whole, 2P bytes; by layer one or two layers are."""
    given: dict[str, Any] = {"gpus": 8, "gpu": "h100", "plan": {"strategy": "fsdp", "checkpointing": "full"}, "seq_len": 128, "loss": "fused",
                             "precision": "bf16-pure"}
    few, many = (memory(predicted(model={"base": "llama-2-7b", "layers": n}, **given)).phases["steady step"].by_category["communication"]
                 for n in (8, 32))
    assert few == many
    assert many < 0.2 * 2 * run_of(model="llama-2-7b").model.params


def test_two_layers_and_the_root_are_gathered_at_once() -> None:
    """C52, pytorch/pytorch#83917 and #108234, Llama-3-8B over 8 GPUs: the root, which has embedding and head (1.96 GiB in bf16), and two layers
    (0.81 GiB). At the loss one of the two is gone; in a layer's backward both are there, and beside them gradients being reduced."""
    given: dict[str, Any] = {"model": "llama-3-8b", "gpus": 8, "gpu": "h100", "plan": {"strategy": "fsdp"}}
    loss = memory(predicted(**given, seq_len=8192)).allocated
    layer = memory(predicted(**given, seq_len=2048, loss="fused")).allocated
    assert (loss.moment.split(":")[0], layer.moment.split(":")[0]) == ("backward of head", "backward of layer")
    assert loss.by_category["communication"] / GIB == pytest.approx(1.957 + 0.406, abs=0.001)
    gathered, reduced = 1.957 + 2 * 0.406, 4 * 0.406
    assert gathered < layer.by_category["communication"] / GIB < gathered + 1.25 * reduced


# -- buckets -----------------------------------------------------------------------------------------------------------------


BERT_LARGE = {**GPT, "layers": 24, "hidden": 1024, "heads": 16, "ffn": 4096, "vocab": 30528, "positions": "learned", "position_rows": 512,
              "tied_embeddings": True}


def bert(zero: int, bucket_elements: float, micro_batch: int = 1, **plan: Any) -> int:
    plan |= {"framework": "deepspeed", "zero": zero, "bucket_bytes": int(2 * bucket_elements)}
    report = predicted(model=BERT_LARGE, gpus=4, gpu="v100_sxm2_32gb", plan=plan, seq_len=128, micro_batch=micro_batch, precision="fp16-mixed",
                       causal=False)
    return memory(report).allocated.total_bytes


def test_deepspeeds_buckets_outweigh_what_stage_2_saves() -> None:
    """C47, deepspeedai/DeepSpeed#1302 and #6936: a bucket of 5e8 fp16 elements is 954 MiB, and overlapping needs two, while a 340M model's
    stage 2 saves 340M x 2 x 3/4 = 0.5 GB. (In that report stage 1 was the one of 2021, which had no such buckets.)"""
    assert bert(2, 5e8) > bert(1, 5e7)
    assert bert(2, 5e7) < bert(1, 5e7)
    assert bert(1, 5e8) - bert(1, 5e7) == 4.5e8 * 2
    assert bert(2, 5e8, overlap_grad_reduce=True) - bert(2, 5e8) == 5e8 * 2


def test_left_out_the_bucket_is_deepspeeds_own() -> None:
    """C47: reduce_bucket_size is 5e8 elements unless set (deepspeed/runtime/zero/config.py), and overlap_comm is off in stages 1 and 2."""
    given: dict[str, Any] = {"model": BERT_LARGE, "gpus": 4, "seq_len": 128, "precision": "fp16-mixed", "gpu": "v100"}
    run = run_of(**given, plan={"framework": "deepspeed", "zero": 2})
    assert build(run).strategy.buffers() == (Tensor("reduce buckets", "communication", int(5e8 * 2)),)
    assert states(predict(run, scaling=False)).get("communication", 0) == 0, "it lives during backward"


def test_at_the_losss_peak_stage_2_has_nothing_to_save() -> None:
    """C47: with activations enough that the loss's backward is the peak, no gradient exists yet and the stages need the same."""
    assert bert(2, 5e7, micro_batch=32) == bert(1, 5e7, micro_batch=32)


@pytest.mark.parametrize(("view", "bytes_a_parameter"), [(False, 8), (True, 4)])
def test_ddps_buckets_double_gradients_unless_they_are_views(view: bool, bytes_a_parameter: int) -> None:
    """C79, pytorch/pytorch#41954 and #71483: gradients and buckets 8P bytes, with gradient_as_bucket_view 4P."""
    run = run_of(model="gpt2", gpus=8, plan={"gradient_as_bucket_view": view}, precision="fp32", seq_len=64)
    found = states(predict(run, scaling=False))
    assert found["gradients"] + found.get("communication", 0) == bytes_a_parameter * run.model.params


def test_the_largest_tensor_bounds_what_zero_1_saves() -> None:
    """C80, pytorch/pytorch#59410: whole tensors are placed, so of GPT-2's 124M parameters over 8 ranks the one with the embedding (38.6M) has 31%,
    not 12.5%."""
    run = run_of(model="gpt2", gpus=8, plan={"zero": 1}, precision="fp32", seq_len=64, optimizer="adamw:foreach")
    report = predict(run, scaling=False)
    shares = [states(report, i)["optimizer"] / 8 / run.model.params for i in range(len(report.roles))]
    assert max(shares) == pytest.approx(50257 * 768 / run.model.params, rel=1e-3)
    assert max(shares) >= 0.31


# -- shapes of other programs' files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "params"), [
    ("bloom-176b", 176_247_271_424),
    ({"layers": 28, "hidden": 2048, "heads": 16, "kv_heads": 2, "ffn": 11008, "vocab": 128256, "tied_embeddings": True}, 2_420_754_432),
    ("llama-3.1-405b", 405_853_388_800),
    ({"base": "llama-3.1-405b", "layers": 128, "kv_heads": 16}, 416_523_763_712)])
def test_shapes_that_files_describe_have_their_parameters(model: Any, params: int) -> None:
    """F01 bigscience's tr11-176B-ml.slurm; F04 nanotron's config_tiny_llama.yaml (2.42B, not tiny); F10 torchtitan's llama3_405b.toml; F13 SimuMax's
    llama3-405b_padding_128.json (416.5B, not Llama's 405.85B). tests/foreign reads the files themselves."""
    assert run_of(model=model).model.params == params


# -- Muon and fp8 ------------------------------------------------------------------------------------------------------------


def test_muon_leaves_tables_and_head_to_adamw_and_copies_none_of_them() -> None:
    """C32, NVIDIA/Megatron-LM#5034: an embedding of 0.53e9 elements in Muon's stacks was padded to one copy a rank, 4.77e9 elements over 8 ranks.
    Muon takes the layers' matrices alone: embedding and head cost two states over the ranks, and their bytes stay what they are."""
    shape = {"layers": 2, "hidden": 4096, "heads": 32, "ffn": 4096, "vocab": 129_280, "norm": "rmsnorm_no_weight"}
    small, large = (states(predicted(model={**shape, "vocab": vocab}, gpus=8, gpu="gb200", plan={"strategy": "muon-distributed"}, seq_len=256))
                    for vocab in (1_280, 129_280))
    tables = 2 * 128_000 * 4096
    assert {name: large[name] - small[name] for name in large} == {"parameters": 4 * tables, "gradients": 4 * tables, "optimizer": 8 * tables // 8}


@pytest.mark.parametrize(("gpu", "recipe", "parameters", "more"), [
    ("h100", "tensorwise", False, 2), ("b200", "tensorwise", False, 1), ("b200", "mxfp8", False, 2 + 2 / 32),
    ("h100", "tensorwise", True, 0), ("b200", "tensorwise", True, -1), ("b200", "mxfp8", True, 2 / 32)])
def test_fp8_adds_copies_of_the_weights(gpu: str, recipe: str, parameters: bool, more: float) -> None:
    """C77, NVIDIA/TransformerEngine#1261: weights stay in 16 bits, beside their fp8 copy and, on Hopper, its transpose: 2 + 1 + 1 bytes. In fp8 alone they
    take 2 on Hopper, 1 on Blackwell, and 2 with mxfp8, whose scales come on top."""
    def held(precision: Any) -> int:
        step = predicted(model="llama-3-8b", gpus=8, gpu=gpu, plan={"framework": "megatron", "zero": 1}, seq_len=256, precision=precision)
        return sum(memory(step).states.values())
    linear = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert held({"base": "fp8", "fp8_recipe": recipe, "fp8_parameters": parameters}) - held("bf16-mixed") == int(more * linear)
