"""Sliding windows: which attention runs where a token sees the last w tokens alone, itself among them.

FlashAttention-2 and -3 take a window and skip the blocks outside it (Dao-AILab/flash-attention, `window_size`), as do the kernels of Transformer
Engine in Megatron's dialect: FLOPs and time follow the window, what is saved for backward does not. Eager attention masks the scores it has
computed, all of them. PyTorch's scaled_dot_product_attention knows no window: a mask that says one takes it from its flash kernel to the
memory-efficient one, which skips nothing and keeps the mask in the dtype of the scores; that is refused here. Under Ulysses every rank
has whole sequences, and a window is what it is on one GPU; rings and gathered keys are refused.
Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (check_for_attn_mask), 2.13.
"""

from collections.abc import Iterator

from costmodel.spec import PlanError, Run
from costmodel.spec.kinds import layer_kinds


def refusals(run: Run) -> Iterator[PlanError]:
    """What does not go with a window, or not yet."""
    m, p, r = run.model, run.plan, run.recipe
    if not 0 < m.sliding_window < r.seq_len:
        return
    if not any(kind.window for kind in layer_kinds(m, r.seq_len)):
        return
    window = f"sliding-window attention (window {m.sliding_window})"
    megatron = p.framework == "megatron"
    if r.attention == "sdpa" and not megatron:
        yield PlanError("recipe.attention", r.attention, f"{window} in scaled_dot_product_attention, which needs a mask for it and skips nothing: "
                        "not predicted.", "Use attention = fa2 (a flash kernel that skips), eager, or model.sliding_window = 0 to count full attention.")
    if r.attention == "fa1" or r.attention == "cudnn" and not megatron:
        yield PlanError("recipe.attention", r.attention, f"{window}: FlashAttention-1 has no windows, nor has PyTorch's cuDNN attention.",
                        "Use attention = fa2, fa3 or eager.")
    if not r.causal:
        yield PlanError("recipe.causal", False, f"{window} that looks ahead: not predicted yet.", "Use causal = true.")
    if p.cp > 1 and p.cp_kind != "ulysses":
        yield PlanError("plan.cp_kind", p.cp_kind, f"{window} under {p.cp_kind} attention: not predicted yet.", "Use cp_kind = ulysses, or cp = 1.")
