"""Some runs of benchmarks/bytes.py: the prediction against the dry run."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

_spec = importlib.util.spec_from_file_location("bytes_benchmark", Path(__file__).resolve().parents[2] / "benchmarks" / "bytes.py")
assert _spec is not None and _spec.loader is not None
benchmark = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(benchmark)

NAMES = ("single llama autocast", "single gpt eager dropout", "single llama cpu fp32", "single llama loss bf16", "ddp gpt small buckets 64",
         "ddp llama accumulate", "zero1 llama 4", "zero2 gpt 8, 2 MB buckets", "fsdp llama 8 full ckpt", "fsdp gpt 7, uneven shards",
         "fsdp llama 8 accumulate, no sync", "hsdp llama 16",
         "tp 2 sp loss llama", "tp 4 gpt", "fsdp 4 x tp 2 sp loss deep tiny", "pp 4 1f1b rank 1", "pp 4 gpipe rank 3", "pp 2 x 2 interleaved last",
         "single gpt muon tiny batch", "nanochat gpt 64, padded stacks", "ddp gpt fp8 8", "fsdp gpt fp8 8 tiny batch",
         "pp 4 x ddp 4 middle", "pp 4 x fsdp 4 last", "moe single deep autocast", "moe fsdp 8 x ep 8 shared", "moe fsdp 64 x ep 4, cut by rows",
         "moe fsdp 8 x ep 4 every 2nd tiny", "fsdp 2 x cp 4 ring deep", "fsdp 2 x cp 2 allgather attention ckpt", "zero1 x cp 2 ulysses gpt dropout",
         "window single flash autocast dropout", "window fsdp 2 x cp 2 ulysses",
         "latent single wide heads autocast", "latent single cpu sdpa fp32", "latent fsdp 8 op ckpt",
         "kinds windows fsdp 8 groups of 2", "kinds dense first fsdp 8 x ep 4 full ckpt", "kinds dense first pp 4 x fsdp 2 rank 1",
         "kinds dense first ddp 8")
CASES = {c.name: c for c in benchmark.cases()}


def test_the_benchmark_has_at_least_seventy_runs_and_at_most_six_of_8b() -> None:
    assert len(CASES) == len(benchmark.cases()) >= 70
    assert sum(c.given["model"] == "llama-3-8b" for c in CASES.values()) <= 6


@pytest.mark.parametrize("name", NAMES)
def test_prediction_has_the_states_and_collectives_of_the_dry_run_and_its_peak_within_5_percent(name: str) -> None:
    comparison: Any = benchmark.judge(CASES[name])[0]
    assert comparison.within_tolerance, comparison.text()
