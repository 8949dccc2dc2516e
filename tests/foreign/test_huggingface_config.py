"""config.json of the Hugging Face hub: the parameters that transformers counts.

files/huggingface.json holds configurations of transformers 5.24 (mostly of few layers) and the parameters of AutoModelForCausalLM.from_config on the meta
device, each tensor counted once. """

import json
from pathlib import Path
from typing import Any

import pytest

from costmodel import PlanError
from costmodel.catalog import model
from costmodel.foreign import huggingface
from costmodel.spec import Model
from costmodel.spec.kinds import layer_kinds

CASES: dict[str, Any] = json.loads((Path(__file__).parent / "files" / "huggingface.json").read_text())


def shape(config: dict[str, Any]) -> Model:
    return Model.model_validate(huggingface.read(config).given()["model"])


@pytest.mark.parametrize("name", CASES)
def test_parameters_are_those_that_transformers_counts(name: str) -> None:
    """transformers holds the router's correction bias of DeepSeek-V3 as a buffer (one number an expert), which is counted here; a gate's row of Qwen2-MoE's
    shared expert is left out, and said to be."""
    config, counted = CASES[name]["config"], CASES[name]["parameters"]
    mixture = config["num_hidden_layers"] - config.get("first_k_dense_replace", 0) if "num_hidden_layers" in config else 0
    known = {"deepseek_v3": mixture * config.get("n_routed_experts", 0), "qwen2_moe": -mixture * config.get("hidden_size", 0)}
    assert shape(config).params - counted == known.get(config["model_type"], 0)


def test_every_type_is_checked() -> None:
    assert {case["config"]["model_type"] for case in CASES.values()} >= huggingface.FAMILIES.keys() - {"kimi_k2"}


@pytest.mark.parametrize(("config", "name"), [
    ({"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
      "vocab_size": 128256, "tie_word_embeddings": False}, "llama-3.1-8b"),
    ({"model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
      "intermediate_size": 12288, "vocab_size": 151936, "sliding_window": 4096, "use_sliding_window": False}, "qwen3-8b"),
    ({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257, "n_inner": None}, "gpt2-small"),
    ({"model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
      "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}, "mixtral-8x7b"),
    ({"model_type": "gemma2", "hidden_size": 3584, "num_hidden_layers": 42, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
      "intermediate_size": 14336, "vocab_size": 256000, "sliding_window": 4096, "final_logit_softcapping": 30.0}, "gemma-2-9b"),
    ({"model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
      "vocab_size": 32000, "sliding_window": 4096}, "mistral-7b-v0.1")])
def test_a_published_configuration_is_the_catalogues_shape(config: dict[str, Any], name: str) -> None:
    """The values are those of the released configurations; the catalogue's shapes come from other sources."""
    same = {"name", "attention_pattern", "moe"}
    ours, theirs = model(name).model_dump(exclude=same), shape(config).model_dump(exclude=same)
    assert theirs == ours


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name]["config"].get("layer_types") and CASES[name]["config"].get("sliding_window")])
def test_windows_are_in_the_layers_that_transformers_names(name: str) -> None:
    config = CASES[name]["config"]
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    kinds = layer_kinds(shape(config), 1 << 20)
    assert [kind.window for kind in kinds] == [config["sliding_window"] * on for on in slides]


def test_vision_is_left_out_and_said() -> None:
    text = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 100}
    found = huggingface.read({"model_type": "llava", "text_config": text, "vision_config": {"hidden_size": 1024}})
    assert found.get("model.hidden") == 64 and "llava" in found.notes[0]


def test_a_type_that_is_not_known_is_refused() -> None:
    config = {"model_type": "mamba", "hidden_size": 64}
    with pytest.raises(PlanError, match="not known here"):
        huggingface.read(config)
    with pytest.raises(PlanError, match="whole number above 0"):
        huggingface.read(config, "llama")
