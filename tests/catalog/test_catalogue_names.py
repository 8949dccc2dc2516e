"""People write names in many ways; each must find the entry it means, and only that one."""

import pytest

from costmodel.catalog import accelerator, model, node_shape
from costmodel.catalog.files import entry_names, read_aliases
from costmodel.catalog.names import spelling
from costmodel.spec.base import PlanError


@pytest.mark.parametrize(("written", "name"), [
    ("llama3-8b", "llama-3-8b"), ("LLaMA 3 8B", "llama-3-8b"), ("Llama-3.1-8B", "llama-3.1-8b"), ("llama_3_1_8b", "llama-3.1-8b"),
    ("llama31-8b", "llama-3.1-8b"), ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"), ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"),
    ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"), ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"), ("gpt2", "gpt2-small"),
    ("gpt2-124m", "gpt2-small"), ("gpt2-1.5b", "gpt2-xl"), ("gpt2-1558m", "gpt2-xl"), ("gpt3", "gpt3-175b"), ("GPT3-175B", "gpt3-175b"),
    ("mistralai/Mistral-7B-v0.1", "mistral-7b-v0.1"), ("Qwen/Qwen3-8B", "qwen3-8b"), ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
    ("deepseek-ai/DeepSeek-V3", "deepseek-v3"), ("deepseek-v3-671b", "deepseek-v3"), ("mosaicml/mpt-7b", "mpt-7b-released"),
    ("google/gemma-2-2b-it", "gemma-2-2b"), ("llama3.1-405b", "llama-3.1-405b"), ("mt-nlg", "korthikanti-530b"), ("bigscience/bloom", "bloom-176b"),
])
def test_a_model_is_found_however_it_is_written(written, name):
    assert model(written).name == name


@pytest.mark.parametrize(("written", "name"), [
    ("h100", "h100_sxm"), ("h100-80gb", "h100_sxm"), ("H100-SXM-80GB", "h100_sxm"), ("NVIDIA H100 80GB HBM3", "h100_sxm"), ("NVIDIA H100 PCIe", "h100_pcie"),
    ("a100", "a100_sxm_80gb"), ("A100-80G", "a100_sxm_80gb"), ("A100-40GB", "a100_sxm_40gb"), ("NVIDIA A100-SXM4-80GB", "a100_sxm_80gb"),
    ("NVIDIA A100 80GB PCIe", "a100_pcie_80gb"), ("4090", "rtx_4090"), ("NVIDIA GeForce RTX 4090", "rtx_4090"), ("RTX4090-24GB", "rtx_4090"),
    ("mi300x", "mi300x"), ("AMD Instinct MI300X", "mi300x"), ("gb200", "gb200"), ("GB200-NVL72-186GB", "gb200"), ("Tesla T4", "t4"),
    ("H100-SXM-96GB-HBM2e-500W", "h100_sxm_96gb_500w"), ("cpu", "cpu_xeon_2core"),
])
def test_an_accelerator_is_found_by_its_everyday_and_its_driver_name(written, name):
    assert accelerator(written).name == name


@pytest.mark.parametrize(("written", "name"), [
    ("DGX-H100", "dgx_h100"), ("p5.48xlarge", "aws_p5_48xlarge"), ("a3-megagpu-8g", "gcp_a3_megagpu_8g"), ("NVL72", "gb200_nvl72"),
])
def test_a_node_shape_is_found_by_its_instance_name(written, name):
    assert node_shape(written).name == name


def test_a_dot_between_digits_matters():
    assert (model("gpt3-13b").layers, model("gpt3-1.3b").layers) == (40, 24)  # Brown et al. 2020, Table 2.1
    assert (model("opt-13b").layers, model("opt-1.3b").layers) == (40, 24)    # Zhang et al. 2022, Table 1


def test_a_name_that_could_be_two_is_asked_back():
    with pytest.raises(PlanError, match=r"Did you mean gpt3-1\.3b, gpt3-13b"):
        model("gpt313b")


def test_an_unknown_model_suggests_the_nearest():
    with pytest.raises(PlanError) as error:
        model("llama3-8")
    assert str(error.value) == ("model = llama3-8: is not in the catalogue. "
                                "Did you mean llama-3-8b, llama-3.1-8b, llama-3-70b? `costmodel list models` shows all.")
    assert (error.value.field, error.value.value) == ("model", "llama3-8")


def test_a_name_like_no_other_only_says_where_to_look():
    with pytest.raises(PlanError) as error:
        model("zzzzzz")
    assert error.value.fix == "`costmodel list models` shows all."


def test_a_mirror_of_a_hub_model_is_not_taken_for_it_in_silence():
    with pytest.raises(PlanError, match=r"Did you mean llama-3\.1-8b"):
        model("somebody/Llama-3.1-8B")


def test_unknown_accelerators_and_clusters_name_their_own_list():
    with pytest.raises(PlanError, match=r"gpu = h101: .*h100_sxm.*`costmodel list gpus`"):
        accelerator("h101")
    with pytest.raises(PlanError, match=r"cluster = dgx-h10: .*dgx_h100.*`costmodel list clusters`"):
        node_shape("dgx-h10")


@pytest.mark.parametrize(("folder", "files"), [("models", ("models", "models_hub")), ("accelerators", ("accelerators",)), ("nodes", ("nodes",))])
def test_no_two_entries_share_a_spelling(folder, files):
    spellings = [(spelling(name), name) for name in entry_names(folder)]
    spellings += [(spelling(alias), name) for file in files for name, aliases in read_aliases(file).items() for alias in aliases]
    assert {name for _, name in spellings} == set(entry_names(folder))
    assert len({key for key, _ in spellings}) == len(set(spellings))


@pytest.mark.parametrize("name", list(read_aliases("models_hub")))
def test_every_hub_id_finds_its_model(name):
    assert {model(hub_id).name for hub_id in read_aliases("models_hub")[name]} == {name}
