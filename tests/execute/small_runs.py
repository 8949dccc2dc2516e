"""Small runs that every test of this folder takes."""

from typing import Any

LLAMA: dict[str, Any] = {"layers": 2, "hidden": 256, "heads": 4, "kv_heads": 2, "ffn": 688, "vocab": 512}
GPT: dict[str, Any] = {"layers": 2, "hidden": 256, "heads": 4, "ffn": 1024, "vocab": 512, "gated": False, "activation": "gelu", "norm": "layernorm",
                       "norm_bias": True, "positions": "learned", "position_rows": 128, "qkv_bias": True, "attention_out_bias": True,
                       "mlp_bias": True, "fused_qkv": True, "tied_embeddings": True}


def small_run(model: Any = None, strategy: str = "single", gpus: int = 1, gpu: str = "h100_sxm", recipe: dict[str, Any] | None = None,
              **plan: Any) -> Any:
    """A run of a small model: 128 tokens, micro-batch 2, float32 unless the recipe says otherwise."""
    from costmodel.inputs import build_run
    return build_run(model=model or LLAMA, cluster={"gpu": gpu, "gpus": gpus}, plan={"strategy": strategy, **plan},
                     recipe={"seq_len": 128, "micro_batch": 2, "precision": "fp32", **(recipe or {})})


def cpu_run(model: Any = None, strategy: str = "single", gpus: int = 1, recipe: dict[str, Any] | None = None, **plan: Any) -> Any:
    """The same on the CPU's kernels."""
    return small_run(model, strategy, gpus, "cpu_epyc_2core", recipe, **plan)
