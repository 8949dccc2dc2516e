# mypy: disable-error-code="no-untyped-call, no-any-return, misc"
"""The kernels that a Run's device would pick, as seen by autograd: which tensors each saves for backward.

`PLAIN` calls PyTorch and takes what it picks on the device at hand: right for a CPU Run and for a real GPU.
`CUDA` serves the dry run of a CUDA Run, whose fake tensors live on the CPU: it calls the CUDA-only operators directly, and where
PyTorch has a CUDA kernel behind a device-independent name, an autograd function of ours allocates what that kernel allocates and
saves what it saves. Those functions compute no values: they are for fake tensors only.
"""

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from execute import compat

aten = torch.ops.aten


class Kernels(Protocol):
    """The operations whose saved tensors depend on the device."""

    def norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: str, eps: float) -> Tensor: ...
    def dropout(self, x: Tensor, p: float) -> Tensor: ...
    def softmax(self, scores: Tensor) -> Tensor: ...
    def attention(self, q: Tensor, k: Tensor, v: Tensor, p: float, causal: bool, kind: str, window: int = 0) -> Tensor: ...
    def flash(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]: ...
    def flash_backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]: ...
    def grouped(self, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor: ...


class Plain:
    """PyTorch's own choice on the device of the tensors."""

    def norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: str, eps: float) -> Tensor:
        if kind == "layernorm":
            return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
        y = F.rms_norm(x, x.shape[-1:], weight, eps)
        return y if bias is None else y + bias

    def dropout(self, x: Tensor, p: float) -> Tensor:
        return F.dropout(x, p) if p > 0 else x

    def softmax(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, p: float, causal: bool, kind: str, window: int = 0) -> Tensor:
        if window:
            return windowed_flash(q, k, v, p, window)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])

    def flash(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """Attention with its log-sum-exps, by the device's flash kernel and outside autograd: q [batch, heads, tokens, head_dim], lse [batch, heads,
        tokens] in fp32."""
        if q.is_cuda:
            return cuda_flash(q, k, v, causal)
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        return out, lse

    def flash_backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v; `out` and `lse` may be those of more keys than these."""
        if q.is_cuda:
            return cuda_flash_backward(grad, q, k, v, out, lse, causal)
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, causal)

    def grouped(self, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        return grouped_product(rows, weights, ends)


class CudaTable:
    """What CUDA kernels allocate and save, on fake CPU tensors.

    torch.autocast's rules for CUDA (ATen/autocast_mode.h: AT_FORALL_FP32, AT_FORALL_FP32_SET_OPT_DTYPE) are applied here where they
    differ from the CPU's: layer_norm, rms_norm and softmax run in float32 under autocast.
    """

    def norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: str, eps: float) -> Tensor:
        if _autocast():
            x, weight, bias = x.float(), _float(weight), _float(bias)
        if kind == "layernorm":
            return FusedLayerNorm.apply(x, weight, bias)
        y = FusedRMSNorm.apply(x, weight)
        return y if bias is None else y + bias

    def dropout(self, x: Tensor, p: float) -> Tensor:
        """CUDA's fused dropout: autograd keeps the mask alone, one byte an element (aten/src/ATen/native/cuda/Dropout.cu)."""
        return torch.native_dropout(x, p, True)[0] if p > 0 else x

    def softmax(self, scores: Tensor) -> Tensor:
        return (scores.float() if _autocast() else scores).softmax(-1)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, p: float, causal: bool, kind: str, window: int = 0) -> Tensor:
        """The operator that scaled_dot_product_attention picks on CUDA (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).

        16-bit inputs: flash (or cuDNN where asked), which keeps q, k, v, the output and a float32 log-sum-exp. float32: the
        memory-efficient kernel, which has no grouped queries: with fewer key heads than query heads the math path runs. Values narrower
        than queries: the memory-efficient kernel, or cuDNN's, which keep the same.
        """
        if _autocast():
            low = torch.get_autocast_dtype("cpu")
            q, k, v = q.to(low), k.to(low), v.to(low)
        if window:
            return windowed_flash(q, k, v, p, window)
        if q.shape[-1] != v.shape[-1] and kind != "cudnn":
            return aten._scaled_dot_product_efficient_attention(q, k, v, None, True, p, causal)[0]
        if q.dtype == torch.float32:
            if q.shape[1] != k.shape[1]:
                return aten._scaled_dot_product_attention_math(q, k, v, None, p, causal, enable_gqa=True)[0]
            return aten._scaled_dot_product_efficient_attention(q, k, v, None, True, p, causal)[0]
        if kind == "cudnn":
            return aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, p, causal, False)[0]
        return aten._scaled_dot_product_flash_attention(q, k, v, p, causal, False)[0]

    def flash(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        return cuda_flash(q, k, v, causal)

    def flash_backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
        return cuda_flash_backward(grad, q, k, v, out, lse, causal)

    def grouped(self, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        return grouped_product(rows, weights, ends)


def cuda_flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """FlashAttention-2's operator, on a GPU or on fake tensors."""
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False)
    return out, lse


def windowed_flash(q: Tensor, k: Tensor, v: Tensor, p: float, window: int) -> Tensor:
    """FlashAttention-2's operator with a window, causal: each token sees `window` tokens, itself the last of them. Only that operator takes one."""
    parts = (t.transpose(1, 2) for t in (q, k, v))
    return aten._flash_attention_forward(*parts, None, None, q.shape[2], k.shape[2], p, True, False, window_size_left=window - 1,
                                         window_size_right=0)[0].transpose(1, 2)


def cuda_flash_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Its backward; without dropout nobody reads the state of the random numbers."""
    seed, offset = q.new_empty(2, dtype=torch.uint64), q.new_empty((), dtype=torch.uint64)
    return aten._scaled_dot_product_flash_attention_backward(grad, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal,
                                                             seed, offset)


def grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """rows [n, width] times the matrix [out, width] of the expert they belong to, in one kernel: rows up to ends[0] are the first expert's, and so on."""
    if isinstance(rows, compat.FakeTensor):
        return GroupedProduct.apply(rows, weights, ends)
    return F.grouped_mm(rows, weights.transpose(-2, -1), offs=ends)


class GroupedProduct(torch.autograd.Function):
    """torch.nn.functional.grouped_mm on fake tensors, whose own shape function takes bf16 alone. It saves the rows, the weights and the ends.

    Source: tools/autograd/derivatives.yaml, _grouped_mm. Shapes only.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, ends)
        return rows.new_empty(rows.shape[0], weights.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weights, _ = ctx.saved_tensors
        return torch.empty_like(rows), torch.empty_like(weights), None


def _like(x: Tensor, placements: tuple[Any, ...] | None = None) -> Tensor:
    """An empty tensor like another one; of a DTensor, the local part is made, whatever its placements will be."""
    if not isinstance(x, compat.DTensor):
        return torch.empty_like(x)
    return compat.DTensor.from_local(torch.empty_like(x._local_tensor), x.device_mesh, placements or x.placements, run_check=False,
                                     shape=x.shape, stride=x.stride())


def _summed_like(weight: Tensor | None, x: Tensor) -> Tensor | None:
    """The gradient of a norm's weight: of a DTensor, a partial sum over the axes that split the rows of its input.

    Source: torch/distributed/tensor/_ops/_math_ops.py, layer_norm_bwd_single_dim_strategy and rms_norm_bwd_single_dim_strategy.
    """
    if weight is None or not isinstance(x, compat.DTensor):
        return None if weight is None else torch.empty_like(weight)
    return _like(weight, tuple(compat.Partial() if p.is_shard() else p for p in x.placements))


def _row_statistics(x: Tensor) -> Tensor:
    rows = x._local_tensor if isinstance(x, compat.DTensor) else x
    return rows.new_empty((*rows.shape[:-1], 1), dtype=torch.float32)


class FusedRMSNorm(torch.autograd.Function):
    """aten::_fused_rms_norm on CUDA: saves the input, the weight and the float32 reciprocal root mean square of each row.

    Source: aten/src/ATen/native/cuda/layer_norm_kernel.cu, _fused_rms_norm_cuda and _fused_rms_norm_backward_cuda;
    tools/autograd/derivatives.yaml, _fused_rms_norm. Shapes only.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        y = _like(x)
        ctx.save_for_backward(x, weight, _row_statistics(x))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        return _like(x), _summed_like(weight, x)


class FusedLayerNorm(torch.autograd.Function):
    """aten::native_layer_norm on CUDA: saves the input, the weight, the bias, and float32 mean and reciprocal deviation of each row.

    Source: aten/src/ATen/native/cuda/layer_norm_kernel.cu, layer_norm_cuda (statistics in acc_type, float32 for 16-bit inputs,
    where the CPU kernel keeps them in 16 bits); tools/autograd/derivatives.yaml, native_layer_norm. Shapes only.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        y = _like(x)
        mean = _row_statistics(x)
        ctx.save_for_backward(x, weight, bias, mean, torch.empty_like(mean))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, _, _ = ctx.saved_tensors
        return _like(x), _summed_like(weight, x), _summed_like(bias, x)


def composed_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: str, eps: float) -> Tensor:
    """A norm written out in elementary operations, in float32, as the first Llama code does (`fused_norm = false`)."""
    wide = x.float()
    if kind == "layernorm":
        wide = wide - wide.mean(-1, keepdim=True)
    y = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).type_as(x)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _autocast() -> bool:
    return torch.is_autocast_enabled("cpu")


def _float(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.float()


class _Tables(NamedTuple):
    plain: Kernels
    cuda: Kernels


TABLES = _Tables(Plain(), CudaTable())
