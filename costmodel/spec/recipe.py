"""Recipe: what one step computes: batch, numbers, optimizer, kernels."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from costmodel.spec.base import Spec

DType = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]
DTYPE_BYTES: dict[str, int] = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1, "int64": 8}

AttentionKernel = Literal["eager", "sdpa", "fa1", "fa2", "fa3", "cudnn"]
LossKind = Literal["eager", "bf16", "chunked", "fused", "inplace"]


class Precision(Spec):
    """The dtypes of a step. `parameter` is what the module holds and gathers from; `compute` what kernels see."""

    name: str = "custom"
    parameter: DType = "fp32"
    compute: DType = "bf16"
    gradient: DType = "fp32"
    """dtype in which gradients are kept and accumulated."""
    reduce: DType = "fp32"
    """dtype on the wire of a gradient reduction."""
    master: DType | None = None
    """A master copy of the parameters, kept by the optimizer; None: the parameters are it."""
    optimizer_state: DType = "fp32"
    autocast: bool = False
    """Casts happen op by op (torch.autocast) instead of per module."""
    loss_scaling: bool = False
    fp8_recipe: Literal["none", "tensorwise", "delayed", "rowwise", "mxfp8", "blockwise"] = "none"
    """How fp8 operands are scaled: by a tensor's largest magnitude, by that of earlier steps, by rows and columns, or by blocks."""
    fp8_gather: bool = False
    """FSDP2 gathers the weights of fp8 layers in fp8."""
    fp8_parameters: bool = False
    """Megatron keeps the weights of fp8 layers in fp8 alone (fp8-param-gather), beside the optimizer's master copy."""


class OptimizerSpec(Spec):
    """The update rule and how it is implemented."""

    name: Literal["sgd", "momentum", "adam", "adamw", "adam8bit", "muon"] = "adamw"
    implementation: Literal["foreach", "fused", "for-loop"] = "fused"
    lr: float = Field(3e-4, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    momentum: float = Field(0.9, ge=0)


class Recipe(Spec):
    """Everything of a step that is neither the model nor the spreading. Batches count sequences."""

    seq_len: PositiveInt = 4096
    micro_batch: PositiveInt = 1
    """Sequences in one forward and backward of one data-parallel rank."""
    grad_accum: PositiveInt = 1
    """Micro-batches before an optimizer step."""
    global_batch: PositiveInt = 1
    """micro_batch x grad_accum x dp."""
    precision: Precision = Precision()
    optimizer: OptimizerSpec = OptimizerSpec()
    attention: AttentionKernel = "sdpa"
    loss: LossKind = "eager"
    loss_chunks: PositiveInt = 8
    """chunked: pieces of the sequence whose logits exist one at a time."""
    fused_norm: bool = True
    """RMSNorm and LayerNorm are one kernel (CUDA); False composes them from elementary ops."""
    expand_kv: bool = False
    """Keys and values are repeated for the query heads that share them before a flash kernel (code without grouped-query kernels)."""
    causal: bool = True
    dropout: NonNegativeFloat = 0.0
    compile: bool = False
    """torch.compile, per layer."""
    cuda_graphs: bool = False
    allocator: Literal["default", "expandable"] = "default"
    grad_accum_fusion: bool = False
    """The weight-gradient GEMM adds into the gradient buffer (Megatron)."""
    clip_norm: NonNegativeFloat = 1.0
    """Gradient-norm clipping; 0 is off."""
    zero_set_to_none: bool = True
    moe_imbalance: float = Field(1.0, ge=1)
    """Tokens of the busiest expert rank over the even share."""
    moe_capacity_factor: float | None = Field(None, gt=0)
    """None drops no token."""
    token_dtype: Literal["int64", "int32"] = "int64"
    warmup_steps: int = Field(0, ge=0)
    schedule: Literal["constant", "cosine", "linear"] = "cosine"
    train_tokens: PositiveInt | None = None
    """Tokens of the whole training, which no step depends on: how many steps, days and GPU-hours they take."""
