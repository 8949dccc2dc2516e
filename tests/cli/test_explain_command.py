"""`costmodel explain`: the text and the JSON."""

import json
import re

import pytest
from calling import call, error

ONE = "explain --params 1B --gpus 8 --zero 3"
DEEP = "explain --params 70B --gpus 512 --framework megatron --zero 1 --tp 8 --pp 8 --grad-accum 16 --sequence-parallel"


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("line", [ONE, "explain --params 1B --gpus 1",
                                  "explain --params 8B --gpus 64 --strategy hsdp --dp-shard 8 --tp 2 --checkpointing full"])
def test_the_text_fits_its_width(line: str, width: int) -> None:
    result = call(line, COLUMNS=str(width))
    assert result.exit_code == 0, result.output
    assert max(len(text) for text in result.stdout.splitlines()) <= width
    assert "\x1b" not in result.stdout


def test_the_text_tells_parallelism_from_sharding() -> None:
    text = call(DEEP, COLUMNS="120").stdout
    tp, dp = text.split("  dp_shard 8: ")[0].split("  tp 8: ")[1], text.split("  dp_shard 8: ")[1].split("  pp 8: ")[0]
    assert "divides  heads, matmuls of a layer, vocabulary, tokens between the matmuls" in tp
    assert "shards" not in tp
    assert "shards   master weights, optimizer: each rank stores a piece" in dp
    assert "copies   parameters, gradients: whole on each rank" in dp
    assert max(len(line) for line in text.splitlines()) <= 120


def test_the_text_has_the_bytes_per_parameter_the_layer_and_the_stages() -> None:
    text = call(DEEP).stdout
    assert re.search(r"between steps +18 +7\.5\n", text)
    assert "mlp.down.weight" in text and "by row: its inputs" in text
    assert "     7          1  layers 55 to 61, norm, head and loss" in text
    assert "in the optimizer step" in text


def test_one_gpu_sends_nothing() -> None:
    text = call("explain --params 1B --gpus 1").stdout
    assert "One rank: nothing is divided, sharded, copied or sent." in text
    assert "WHAT A RANK SENDS" not in text


def test_json_has_stable_keys() -> None:
    data = json.loads(call(f"{ONE} --json").stdout)
    assert list(data) == ["schema", "run", "profile", "explanation", "constants"]
    e = data["explanation"]
    assert list(e) == ["role", "ranks", "example_rank", "model_params", "params", "axes", "holdings", "movements", "terms", "layer", "pipeline", "on_host",
                       "basis"]
    assert list(e["holdings"][0]) == ["name", "here_bytes", "whole_bytes", "placements"]
    assert {w["figure"] for w in data["constants"]} == {"step_s", "reserved_bytes", "device_bytes"}
    assert all(w["source"] for w in data["constants"])


def test_bad_input_is_one_message() -> None:
    assert error("explain --params 1B --gpus 8 --tp 3") == "error: plan: tp x pp x cp = 3: it must divide the 8 GPUs. Use --gpus 9."
