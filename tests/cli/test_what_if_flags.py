"""`--slow-rank` and `--link-factor`: what they set, where they are shown, and bad input."""

import json
from pathlib import Path

import pytest
from calling import call, error


def test_the_command_line_takes_both_and_says_so(tmp_path: Path) -> None:
    line = "predict --params 1B --gpus 16 --zero 3"
    both = "--slow-rank 1.2 --link-factor inter=0.5,nvlink=0.8"
    text = " ".join(call(f"{line} {both}").stdout.split())
    assert "what if one rank computes 1.2 times slower, inter links at 0.5 of their rate, nvlink links at 0.8 of their rate" in text
    assert "slow rank" in text
    data = json.loads(call(f"{line} {both} --json").stdout)
    assert data["run"]["cluster"]["slow_rank"] == 1.2
    assert data["run"]["cluster"]["link_factors"] == {"inter": 0.5, "nvlink": 0.8}
    plain, file = json.loads(call(f"{line} --json").stdout), tmp_path / "plain.json"
    file.write_text(json.dumps(plain), encoding="utf-8")
    again = json.loads(call(f"predict {file} {both} --json").stdout)
    assert again["report"] == data["report"]
    assert "infiniband 25 GB/s" in call("mesh --params 1B --gpus 16 --link-factor inter=0.5").stdout


@pytest.mark.parametrize(("flags", "message"), [
    ("--slow-rank 0.5", "must be at least 1"), ("--slow-rank fast", "must be a number"), ("--link-factor inter", "it must be LINK=X"),
    ("--link-factor rope=0.5", "no link is called that. Use inter, intra"), ("--link-factor inter=0", "must be above 0")])
def test_bad_what_ifs_are_one_message(flags: str, message: str) -> None:
    assert message in error(f"predict --params 1B --gpus 16 {flags}")
