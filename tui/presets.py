"""Runs to begin with: each shows one idea at a size that people train."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Preset(NamedTuple):
    """A run with a name and why one would look at it."""

    name: str
    why: str
    given: Mapping[str, Any]


START: Mapping[str, Any] = {"model": "llama-3-8b", "cluster": {"gpu": "h100_sxm", "gpus": 8}, "plan": {"strategy": "fsdp", "checkpointing": "full"},
                            "recipe": {"seq_len": 8192, "micro_batch": 1}}
PRESETS: tuple[Preset, ...] = (
    Preset("GPT-2 small on one A100", "everything on one GPU", {
        "model": "gpt2-small", "cluster": {"gpu": "a100_sxm_80gb", "gpus": 1}, "recipe": {"seq_len": 1024, "micro_batch": 16}}),
    Preset("1B on 8 H100, DDP", "state is copied to every GPU", {
        "params": "1B", "cluster": {"gpu": "h100_sxm", "gpus": 8}, "plan": {"strategy": "ddp"}}),
    Preset("Llama 3 8B on 8 H100, FSDP", "state is split eight ways", START),
    Preset("Llama 3 8B on 64 H100, HSDP", "split in nodes, copied across", {
        "model": "llama-3-8b", "cluster": {"gpu": "h100_sxm", "gpus": 64}, "plan": {"strategy": "hsdp", "checkpointing": "full"},
        "recipe": {"seq_len": 8192}}),
    Preset("Llama 3 70B on 64 H100, FSDP + TP", "two axes: tp within the node", {
        "model": "llama-3-70b", "cluster": {"gpu": "h100_sxm", "gpus": 64}, "plan": {"strategy": "fsdp", "tp": 4, "checkpointing": "full"},
        "recipe": {"seq_len": 8192, "micro_batch": 1}}),
    Preset("GPT-3 175B on 512 A100, Megatron 3D", "tp, pp, dp, and a bubble", {
        "model": "gpt3-175b", "cluster": {"gpu": "a100_sxm_80gb", "gpus": 512},
        "plan": {"framework": "megatron", "zero": 1, "tp": 8, "pp": 8, "sequence_parallel": True, "checkpointing": "selective"},
        "recipe": {"seq_len": 2048, "micro_batch": 1, "grad_accum": 32}}),
    Preset("Llama 3.1 405B on 1,024 H100, FSDP + TP", "the largest dense models", {
        "model": "llama-3.1-405b", "cluster": {"gpu": "h100_sxm", "gpus": 1024}, "plan": {"strategy": "fsdp", "tp": 8, "checkpointing": "full"},
        "recipe": {"seq_len": 8192, "micro_batch": 1, "grad_accum": 2}}),
)
