"""Configuration files of other programs: the field cases of kind "file", each a file with the published one's values, shortened."""

from pathlib import Path
from typing import Any

import pytest

from costmodel import PlanError, predict
from costmodel.foreign.detect import read_foreign
from costmodel.foreign.said import Foreign
from costmodel.inputs import resolve
from costmodel.spec import Run

FILES = Path(__file__).parent / "files"


def read(name: str, **given: str) -> Foreign:
    return read_foreign(name, (FILES / name).read_text(), given)


def run_of(found: Foreign, gpus: int | None = None, **more: Any) -> Run:
    """The run of what a file says, with the world size that its launcher gives."""
    given = found.given()
    if gpus:
        given["cluster"] = {**given.get("cluster", {}), "gpus": gpus}
    for field, value in more.items():
        table, _, key = field.partition("__")
        given[table] = {**given.get(table, {}), key: value}
    return resolve(given).run


def test_bigsciences_slurm_script_is_bloom_on_its_stages() -> None:
    """F01, bigscience's tr11-176B-ml.slurm: nodes from #SBATCH, variables, nested quotes, DeepSpeed's JSON in a here-document, numbers with underscores; tp
    4, pp 12, dp 4, 176,247,271,424 parameters; embedding and head count as layers (5, 6, ..., 6, 5); DeepSpeed's stage 0 shards optimizer states in bf16."""
    found = read("bloom.slurm")
    run = run_of(found)
    assert run.model.params == 176_247_271_424
    assert (run.plan.tp, run.plan.pp, run.plan.dp, run.cluster.gpus) == (4, 12, 4, 192)
    assert run.plan.stage_layers == (5, *[6] * 10, 5)
    assert (run.plan.zero, run.plan.checkpointing.mode, run.model.positions, run.model.embedding_norm) == (1, "full", "alibi", True)
    assert (run.recipe.micro_batch, run.recipe.global_batch, run.recipe.precision.name) == (2, 2048, "bf16-mixed")
    assert found.fields["plan.zero"].source == "--bf16 (DeepSpeed's stage 0 shards optimizer states in bf16)"
    assert any("rampup" in note for note in found.notes) and not found.missing and not found.lost


def test_neoxs_configuration_is_read_with_its_launchers_gpus() -> None:
    """F02, gpt-neox's configs/20B.yml: bare True, trailing commas, comments, dashes and underscores in one file; 20.555B parameters, dp 12 of 96 GPUs,
    buckets of 2.35 GiB."""
    found = read("neox-20b.yml")
    assert list(found.missing) == ["cluster.gpus"]
    run = run_of(found, 96, cluster__gpu="a100_sxm_40gb")
    assert run.plan.dp == 12 and run.model.vocab == 50432
    assert run.model.params == pytest.approx(20.555e9, rel=1e-4)
    assert (run.recipe.grad_accum, run.recipe.precision.name, run.plan.zero, run.model.parallel_residual) == (32, "fp16-mixed", 1, True)
    assert any("2.35 GiB" in note for note in found.notes)


def test_nanotrons_tiny_llama_is_not_tiny() -> None:
    """F04, nanotron's config_tiny_llama.yaml: 2,420,754,432 parameters; 20 bytes a parameter with an fp32 sum of gradients; longest position = vocabulary is
    a slip."""
    found = read("nanotron-tiny.yaml")
    run = run_of(found)
    assert run.model.params == 2_420_754_432 == found.params
    assert (run.plan.dp, run.plan.tp, run.plan.sequence_parallel, run.plan.zero, run.recipe.micro_batch) == (4, 2, True, 0, 3)
    assert any("20 bytes" in note for note in found.notes) and any("slip" in note for note in found.notes)


def test_a_key_that_appears_twice_is_said_and_the_last_taken() -> None:
    """F05, nanotron's config_qwen_with_moe.yaml: moe_config is null, then a mapping; all-to-all with one expert-parallel rank; a window of 20 tokens."""
    found = read("nanotron-moe.yaml")
    assert found.get("model.moe") == {"experts": 8, "top_k": 1, "expert_ffn": 768, "shared_experts": 1, "shared_ffn": 768}
    assert any(note.startswith("moe_config appears twice") for note in found.notes)
    assert (found.get("model.sliding_window"), found.get("plan.ep_dispatcher")) == (20, "alltoall")


def test_both_spellings_of_fsdp_are_one_plan() -> None:
    """F07, axolotl: fsdp_version and keys with or without `fsdp_`; Muon has AdamW for the rest; 8-bit AdamW has 2 bytes of state a parameter."""
    muon, oss = read("axolotl-muon.yaml"), read("axolotl-gpt-oss.yaml")
    spread = [{field: said.value for field, said in found.fields.items() if field in ("plan.framework", "plan.zero", "plan.reshard_after_forward")}
              for found in (muon, oss)]
    assert spread[0] == spread[1] == {"plan.framework": "pytorch", "plan.zero": 3, "plan.reshard_after_forward": True}
    assert all("FSDP2" in found.fields["plan.framework"].source for found in (muon, oss))
    assert any("AdamW" in note for note in muon.notes)
    assert (oss.get("recipe.optimizer"), oss.get("plan.activation_offload"), oss.get("recipe.loss")) == ("adam8bit", True, "fused")
    small = run_of(muon, 8, recipe__optimizer="adam8bit")
    report = predict(small, scaling=False)
    assert report.roles[0].memory is not None
    state = report.roles[0].memory.states["optimizer"]
    assert state == pytest.approx(2 * small.model.params / 8, rel=0.03)


def test_deepspeeds_auto_is_asked_for_and_other_names_are_said() -> None:
    """F08, axolotl's zero2.json and zero3_bf16_cpuoffload_params.json: offload behind the name zero2, "auto" everywhere, max_live_parameters without stage3_
    (which DeepSpeed's configuration takes as well: 0, where the default is 1e9)."""
    two, three = read("ds-zero2.json"), read("ds-zero3-params.json")
    assert (two.get("plan.zero"), two.get("plan.offload"), three.get("plan.zero"), three.get("plan.offload")) == (2, "optimizer", 3, "params")
    assert list(two.missing) == ["model", "cluster.gpus"]
    waiting = next(note for note in two.notes if "auto" in note)
    assert "train_batch_size" in waiting and "gradient_clipping" in waiting and "bf16.enabled" in waiting
    assert three.get("plan.max_live_params") == 0 and any("stage3_max_live_parameters under another name" in note for note in three.notes)
    assert "zero_optimization.sub_group_size" in three.unread
    with pytest.raises(PlanError, match="a run needs a model"):
        run_of(two, 8)


def test_torchtitans_presets_take_the_gpus_of_their_launcher() -> None:
    """F10, torchtitan's llama3_405b.toml and qwen3_30b_a3b_memory_test.toml: dp_shard -1 is the rest (16 of 128 GPUs), the shape hides behind a flavor
    (405.85B), old key names, a branch's own keys."""
    found = read("titan-405b.toml")
    assert list(found.missing) == ["cluster.gpus"]
    run = run_of(found, 128)
    assert run.model.params == pytest.approx(405.85e9, rel=1e-4)
    assert (run.plan.dp_shard, run.plan.tp, run.plan.tp_overlap, run.plan.checkpointing.mode, run.recipe.compile) == (16, 8, "async", "full", True)
    assert (run.recipe.micro_batch, run.recipe.precision.compute, run.recipe.precision.fp8_gather) == (2, "fp8", True)
    other = read("titan-qwen3.toml")
    assert other.get("plan.ep") == 8 and other.get("recipe.precision") == {"base": "bf16-mixed", "optimizer_state": "bf16"}
    assert other.get("plan.offload") == "params" and "recipe.compile" not in other.fields
    assert {"training.aggressive_memory_mode", "debug"} <= set(other.unread)


def test_megatrons_mixtral_needs_32_gpus() -> None:
    """F11, Megatron-LM's train_mixtral_8x7b_distributed.sh: one node makes dp = 2, which ep = 8 does not divide; four nodes do. 46.70B parameters; sequence
    parallelism is nothing with tp = 1; the script's arguments are unset."""
    with pytest.raises(PlanError, match="must divide dp_shard"):
        run_of(read("mixtral.sh"))
    found = read("mixtral.sh", SLURM_NNODES="4")
    run = run_of(found)
    assert run.model.params == pytest.approx(46.70e9, rel=1e-3)
    assert (run.plan.dp, run.plan.pp, run.plan.ep, run.plan.zero, run.plan.sequence_parallel, run.recipe.global_batch) == (8, 4, 8, 1, False, 256)
    assert any("--sequence-parallel does nothing" in note for note in found.notes)
    assert any(note.startswith("not set in the script") and "1" in note for note in found.notes)
    assert "--wandb-project" not in found.unread


def test_a_padded_model_is_told_from_the_one_of_its_name() -> None:
    """F13, SimuMax's llama3-405b_padding_128.json as it was (128 layers, 16 key-value heads): 416.5B parameters, not Llama's 405.85B."""
    found = read("llama3-405b_padding_128.json")
    assert found.params == 416_523_763_712
    assert any("405,853,388,800" in note for note in found.notes)


@pytest.mark.parametrize(("name", "total", "active"), [("deepseek-671b.json", 671.03e9, 37.6e9), ("deepseek-16b.json", 15.706e9, 2.66e9)])
def test_deepseeks_own_names_give_its_parameters(name: str, total: float, active: float) -> None:
    """F14, DeepSeek-V3's inference/configs: own names, q_lora_rank 0 is no compression, first layers dense. Totals and active parameters of the field case,
    which counts embedding and head."""
    from costmodel.spec import Model
    from costmodel.spec.parameters import active_parameter_count
    model = Model.model_validate(read(name).given()["model"])
    assert model.params == pytest.approx(total, rel=1e-4)
    assert active_parameter_count(model) == pytest.approx(active, rel=5e-3)


@pytest.mark.parametrize("name", ["bloom.slurm", "neox-20b.yml", "nanotron-tiny.yaml", "titan-405b.toml", "mixtral.sh"])
def test_what_is_read_is_predicted(name: str) -> None:
    gpus = {"neox-20b.yml": 96, "titan-405b.toml": 128, "mixtral.sh": 32}.get(name)
    more = {"plan__tp_overlap": "none"} if name == "nanotron-tiny.yaml" else {"recipe__precision": "bf16-mixed"} if name == "titan-405b.toml" else {}
    report = predict(run_of(read(name), gpus, **more), scaling=False)
    assert report.tokens_per_step > 0 and report.roles[0].time is not None
