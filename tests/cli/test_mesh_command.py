"""`costmodel mesh`: the text and the JSON."""

import json

import pytest
from calling import call, error

TWO_NODES = "mesh --params 1B --gpus 16 --tp 2 --pp 2 --framework megatron"
HUGE = "mesh --model llama-3.1-405b --gpus 100000 --tp 8 --pp 5 --zero 3"


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("line", [TWO_NODES, HUGE, f"{TWO_NODES} --rank 13", f"{HUGE} --rank 73123", f"{TWO_NODES} --all", "mesh --params 1B --gpus 1",
                                  "mesh --params 1B --gpus 64 --tp 2 --cp 2 --zero 3 --axis dp_shardxcp"])
def test_the_text_fits_its_width(line: str, width: int) -> None:
    result = call(line, COLUMNS=str(width))
    assert result.exit_code == 0, result.output
    assert max(len(text) for text in result.stdout.splitlines()) <= width
    assert "\x1b" not in result.stdout


def test_the_text_says_who_is_with_whom_and_over_which_link() -> None:
    text = call(TWO_NODES).stdout
    assert "rank   = tp + 2 x dp_replicate + 8 x pp" in text
    assert "dp_replicate       4     4  0, 2, 4, 6  9, 11, 13, 15" in text
    assert "tp            nvlink 450 GB/s, inside a node" in text
    assert "pp            infiniband 50 GB/s, between nodes" in text
    assert "\n    13     1           5   1             2   1\n" in text


def test_one_rank() -> None:
    text = call(f"{TWO_NODES} --rank 13").stdout
    assert "node         1, local rank 5 of 8" in text
    assert "dp_replicate #3     4     9          2  nvlink 450 GB/s     9, 11, [13], 15" in text
    assert "receives from rank 5; computes the loss" in text


def test_a_huge_world_is_summed_up() -> None:
    text = call(HUGE).stdout
    assert "dp_shard      40  2,500  0, 8, …, 19992      80007, 80015, …, 99999" in text
    assert "and 99,984 ranks more" in text
    assert len(text.splitlines()) < 60


def test_limit_and_all_list_more() -> None:
    assert "and 12 ranks more" in call(f"{TWO_NODES} --limit 4").stdout
    everything = call(f"{HUGE.replace('100000', '1000')} --all").stdout
    assert "more:" not in everything
    assert "\n   999" in everything


def test_json_has_stable_keys_and_is_bounded() -> None:
    data = json.loads(call(f"{HUGE} --json").stdout)
    assert list(data) == ["schema", "world_size", "nodes", "gpus_per_node", "axes", "stages", "groups", "ranks", "rank"]
    assert (data["schema"], data["world_size"], data["rank"]) == (1, 100_000, None)
    tp = next(g for g in data["groups"] if g["axis"] == "tp")
    assert (tp["count"], tp["size"], tp["stride"], len(tp["listed"])) == (12_500, 8, 1, 16)
    assert tp["listed"][1] == {"group": 1, "root": 8, "last": 15, "members": list(range(8, 16)), "link": tp["links"][0]["level"]}
    assert len(data["ranks"]) == 16


def test_json_of_a_rank_lists_all_its_peers() -> None:
    data = json.loads(call(f"{HUGE} --rank 73123 --json").stdout)["rank"]
    assert (data["node"], data["local_rank"], data["receives_from"], data["sends_to"]) == (9140, 3, 53123, 93123)
    assert len(next(g for g in data["groups"] if g["axis"] == "dp_shard")["members"]) == 2500


@pytest.mark.parametrize(("line", "text"), [
    ("--axis foo", "error: --axis foo: the mesh has no such axis. Use one of pp, dp_replicate, dp_shard, cp, tp."),
    ("--rank 8", "error: --rank 8: the ranks are 0 to 7. Use --rank 7."), ("--rank x", "error: --rank x: must be a whole number. Use --rank 1."),
    ("--limit 0", "error: --limit 0: must be at least 1. Use --limit 16, or --all."),
    ("--limit 3 --all", "error: --limit 3 and --all: --all has no limit. Give one of the two."),
    ("--tp 3", "error: plan: tp x pp x cp = 3: it must divide the 8 GPUs. Use --gpus 9.")])
def test_bad_input_is_one_message(line: str, text: str) -> None:
    assert error(f"mesh --params 1B --gpus 8 {line}") == text
