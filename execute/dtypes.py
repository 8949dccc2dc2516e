"""The dtype words of a Recipe in PyTorch, both ways."""

import torch

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16, "int64": torch.int64,
          "int32": torch.int32}
"""fp8 is what execute.float8 multiplies inside a linear layer; what flows between layers is bf16."""
WORDS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int64: "int64", torch.int32: "int32",
         torch.uint8: "uint8", torch.bool: "bool"}


def word(dtype: torch.dtype) -> str:
    """"bf16" for torch.bfloat16; PyTorch's own name where we have none."""
    return WORDS.get(dtype, str(dtype).removeprefix("torch."))
