"""Parameter counts are held against published totals; the catalogue's files say where each is published."""

import pytest

from costmodel.catalog import list_models, model, model_entry, unsupported_reason
from costmodel.catalog.files import DATA, entry_names
from costmodel.spec.model import MLA, Model, MoE
from costmodel.spec.parameters import active_parameter_count

NAMES = entry_names("models")
SMALL = {"layers": 2, "hidden": 64, "heads": 4, "ffn": 128, "vocab": 100}


def test_there_are_124_models_and_all_load():
    assert len(NAMES) == 124
    assert [model(name).name for name in NAMES] == list(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_parameter_count_is_the_published_one(name):
    entry = model_entry(name)
    if entry.exactness == "exact" and not entry.difference:
        assert entry.params == entry.published
    elif entry.exactness == "exact":
        assert entry.params == pytest.approx(entry.published, rel=1e-4)
    elif entry.exactness == "rounded":
        assert entry.params == pytest.approx(entry.published, rel=0.03)
    elif entry.exactness == "nominal":
        assert entry.params == pytest.approx(entry.published, rel=0.10)
    else:
        assert (entry.exactness, entry.published) == ("none", 0)
    if entry.shape_params:
        assert entry.params == entry.shape_params


def test_only_three_exact_counts_differ_from_their_shape_and_say_why():
    differing = {name for name in NAMES if model_entry(name).difference}
    assert differing == {"llama-2-13b", "llama-2-70b", "kimi-k2"}


@pytest.mark.parametrize(("name", "total"), [
    ("gpt2", 124_439_808),                 # openai-community/gpt2 checkpoint
    ("gpt2-xl", 1_557_611_200),
    ("llama-2-7b", 6_738_415_616),         # safetensors totals on the hub, here and below
    ("llama-3-8b", 8_030_261_248),
    ("llama-3.1-405b", 405_853_388_800),
    ("mistral-7b-v0.1", 7_241_732_096),
    ("qwen3-8b", 8_190_735_360),
    ("gemma-2-2b", 2_614_341_888),
    ("bloom", 176_247_271_424),
    ("mixtral-8x7b", 46_702_792_704),
    ("deepseek-v2", 235_741_434_880),
    ("gpt-oss-120b", 116_829_156_672),
])
def test_well_known_totals_are_reproduced(name, total):
    assert model(name).params == total


@pytest.mark.parametrize(("name", "active"), [
    ("mixtral-8x7b", 12.9e9),      # Jiang et al. 2024 (arXiv 2401.04088)
    ("qwen3-235b-a22b", 22e9),     # Qwen3 model card
    ("deepseek-v3", 37e9),         # DeepSeek-V3 README
])
def test_a_token_uses_the_published_active_parameters(name, active):
    assert active_parameter_count(model(name)) == pytest.approx(active, rel=0.02)


def test_shapes_are_those_of_the_papers():
    gpt3 = model("gpt3-175b")  # Brown et al. 2020, Table 2.1
    assert (gpt3.layers, gpt3.hidden, gpt3.heads, gpt3.head_dim) == (96, 12288, 96, 128)
    llama = model("llama-2-70b")  # Touvron et al. 2023 (arXiv 2307.09288): grouped-query attention with 8 key-value heads
    assert (llama.layers, llama.hidden, llama.heads, llama.kv_heads, llama.ffn) == (80, 8192, 64, 8, 28672)
    v3 = model("deepseek-v3")  # DeepSeek-V3 report (arXiv 2412.19437), section 4.2
    assert v3.moe == MoE(experts=256, top_k=8, expert_ffn=2048, shared_experts=1, shared_ffn=2048, first_dense_layers=3, router_bias=True)
    assert v3.mla == MLA(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)


def test_gated_activations_are_a_flag_and_an_elementwise_function():
    assert (model("llama-3-8b").gated, model("llama-3-8b").activation) == (True, "silu")
    assert (model("gemma-2-9b").gated, model("gemma-2-9b").activation) == (True, "gelu_tanh")
    assert (model("gpt2").gated, model("gpt2").activation) == (False, "gelu_tanh")


def test_families_with_one_qkv_matrix_say_so():
    assert all(model(name).fused_qkv for name in ("gpt2", "gpt3", "megatron-7.5b", "mpt-7b", "bloom", "falcon-7b", "pythia-1b", "phi-3-mini"))
    assert not any(model(name).fused_qkv for name in ("llama-3-8b", "opt-1.3b", "qwen3-8b", "gemma-2-2b", "nanochat-d20"))


def test_attention_patterns_keep_their_words_in_the_note():
    assert model("nanochat-d20").attention_pattern == "mixed"
    assert "SSSL" in model_entry("nanochat-d20").note
    assert model("gemma-2-2b").attention_pattern == "alternating"
    assert model("mistral-7b-v0.1").sliding_window == 4096


def test_current_nanochat_value_embeddings_are_extra_parameters():
    # karpathy/nanochat dev/LOG.md: value embeddings of d12 hold 150,994,944 parameters; gates and scalars add 482
    assert model("nanochat-d12").extra_params == 150_994_944 + 482


@pytest.mark.parametrize(("model_", "words"), [
    (model("deepseek-v3"), "not predicted yet: multi-token prediction (MTP)"),
    (model("gpt-oss-20b"), "not predicted yet: biases of experts, attention sinks"),
    (Model.model_validate(SMALL | {"hybrid": "mamba"}), "not predicted yet: hybrid layers (mamba)"),
    (Model.model_validate(SMALL | {"attention_sinks": True}), "not predicted yet: attention sinks"),
    (Model.model_validate(SMALL | {"mtp_depth": 1}), "not predicted yet: multi-token prediction (MTP)"),
])
def test_a_model_that_cannot_be_predicted_names_the_missing_feature(model_, words):
    assert unsupported_reason(model_) == words


@pytest.mark.parametrize("name", ["llama-3-8b", "mixtral-8x7b", "qwen3-30b-a3b", "bloom", "mpt-7b-released", "mistral-7b-v0.1", "gemma-2-9b",
                                  "nanochat-d20-oct2025", "deepseek-v2-lite", "deepseek-v2", "kimi-k2", "gemma-3-1b"])
def test_models_with_experts_alibi_or_sliding_windows_are_predictable(name):
    assert unsupported_reason(model(name)) is None


def test_the_list_holds_every_model_with_its_source():
    entries = list_models()
    assert {entry.name for entry in entries} == set(NAMES)
    assert all(entry.source and entry.published_source and entry.confidence in ("read", "recalled") for entry in entries)
    assert {entry.family for entry in entries if not entry.predictable} == {"deepseek_v3", "gpt_oss", "nanochat", "opt"}
    assert all(bool(entry.why_not) is not entry.predictable for entry in entries)


def test_every_file_stays_small_because_reading_toml_is_slow():
    folders = ("models", "accelerators", "nodes", "aliases")
    assert max(path.stat().st_size for folder in folders for path in (DATA / folder).glob("*.toml")) < 6_000
