"""Every key that the commands' JSON has is in docs/report.md."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from calling import call

PAGE = (Path(__file__).parents[2] / "docs" / "report.md").read_text(encoding="utf-8")
BY_NAME = {"run", "runs", "profile", "by_category", "fields", "placements", "basis"}
"""Tables whose keys are names of other things."""


def keys(data: Any) -> Iterator[str]:
    if isinstance(data, dict):
        for key, value in data.items():
            yield key
            if key not in BY_NAME:
                yield from keys(value)
    elif isinstance(data, list):
        for value in data:
            yield from keys(value)


@pytest.mark.parametrize("command", ["waterfall", "compare", "explain"])
def test_every_key_is_documented(command: str) -> None:
    result = call(f"{command} --params 1B --gpus 16 --framework megatron --tp 2 --pp 2 --grad-accum 4 --json")
    documented = set(re.findall(r"`(\w+)`", PAGE))
    assert set(keys(json.loads(result.stdout))) <= documented
