"""`costmodel list`."""

import json

import pytest
from calling import call, error

from costmodel.catalog import NUMBER_FORMATS, OPTIMIZERS, STRATEGIES

KINDS = ("models", "gpus", "clusters", "profiles", "strategies", "precisions", "optimizers")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [80, 120])
def test_a_list_is_a_table_that_fits_the_screen(kind: str, width: int) -> None:
    result = call(f"list {kind}", COLUMNS=str(width))
    assert result.exit_code == 0
    assert max(len(line) for line in result.stdout.splitlines()) <= width
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_a_list_as_json_has_every_entry(kind: str) -> None:
    data = json.loads(call(f"list {kind} --json").stdout)
    assert (data["schema"], data["kind"]) == (1, kind)
    assert all(entry["name"] for entry in data["entries"])


def names(line: str) -> set[str]:
    return {entry["name"] for entry in json.loads(call(f"{line} --json").stdout)["entries"]}


def test_filters_narrow_a_list() -> None:
    assert names("list gpus h100_sxm") >= {"h100_sxm"}
    assert "a100_sxm_80gb" not in names("list gpus --min-memory 100")
    assert names("list gpus --vendor amd") == {n for n in names("list gpus") if n.startswith(("mi", "cpu_epyc"))}
    assert names("list models --family llama") < names("list models")
    assert "deepseek-v3" not in names("list models --predicted")
    assert names("list clusters --gpu h100") >= {"dgx_h100"}
    assert names("list strategies --predicted") == {name for name, strategy in STRATEGIES.items() if strategy.predicted} <= names("list strategies")


def test_precisions_optimizers_and_strategies_are_the_catalogues() -> None:
    assert names("list precisions") == set(NUMBER_FORMATS)
    assert names("list optimizers") == set(OPTIMIZERS)
    assert names("list strategies") == set(STRATEGIES)


def test_a_search_reads_words_and_not_figures() -> None:
    """falcon-40b has 41.8B parameters and megatron-1008b is a name: of a text only what is written in words counts."""
    assert names("list models 8b") >= {"llama-3-8b", "qwen3-8b", "pythia-2.8b"}
    assert names("list models 8b").isdisjoint({"falcon-40b", "llama-3-70b"})
    assert names("list models 'llama3 8b'") == {"llama-3-8b", "llama-3.1-8b"}
    assert names("list gpus nvidia") == names("list gpus --vendor nvidia")


def test_why_something_is_not_predicted_stands_below_the_table() -> None:
    table, _, below = call("list gpus").stdout.partition("NOT PREDICTED YET")
    assert "runtime" not in table
    assert "tpu_v4, tpu_v5e, tpu_v5p, tpu_v6e: the TPU's runtime" in below


def test_nothing_found_says_so() -> None:
    result = call("list models no-such-thing")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "no models match; `costmodel list models` shows all\n"


def test_an_unknown_gpu_in_a_filter_is_bad_input() -> None:
    assert error("list clusters --gpu h1000").startswith("error: --gpu h1000: is not in the catalogue. Did you mean h100_sxm")
