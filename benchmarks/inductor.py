"""python -m benchmarks.inductor: bytes that inductor's fused kernels read and write, for one layer and for the loss.

torch.compile on a CPU, small sizes; the scheduler's own count after fusion (`get_read_write_buffers_sizes`), matrix multiplications and
attention left out. A layer is the difference of three and two layers. What a compiled run is predicted to move is held against these figures
(tests/physics/test_compiled_traffic.py). Needs PyTorch and a C++ compiler; about a minute.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.scheduler import Scheduler

BATCH, SEQ, HIDDEN, HEADS, FFN, VOCAB = 2, 256, 256, 2, 1024, 1024
ELEMENTS = BATCH * SEQ * HIDDEN


class Layer(nn.Module):
    """A pre-norm layer: RMSNorm, rotary queries and keys, attention, and a feed-forward block, gated or squared ReLU with normed queries and keys."""

    def __init__(self, gated: bool) -> None:
        super().__init__()
        self.gated = gated
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(HIDDEN, FFN, bias=False), nn.Linear(FFN, HIDDEN, bias=False)
        self.gate = nn.Linear(HIDDEN, FFN, bias=False) if gated else None
        self.norms = nn.ParameterList(nn.Parameter(torch.ones(HIDDEN)) for _ in range(2)) if gated else (None, None)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.randn(1, SEQ, 1, HIDDEN // HEADS // 2))

    def rotated(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def forward(self, x: Tensor) -> Tensor:
        n = F.rms_norm(x, (HIDDEN,), self.norms[0])
        q, k, v = (m(n).view(BATCH, SEQ, HEADS, -1) for m in (self.q, self.k, self.v))
        q, k = self.rotated(q), self.rotated(k)
        if not self.gated:
            q, k = F.rms_norm(q, q.shape[-1:]), F.rms_norm(k, k.shape[-1:])
        a = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(BATCH, SEQ, HIDDEN))
        n = F.rms_norm(x, (HIDDEN,), self.norms[1])
        inner = F.silu(self.gate(n)) * self.up(n) if self.gate else F.relu(self.up(n)).square()
        return x + self.down(inner)


def counted(work: Callable[..., Tensor], *inputs: Any) -> tuple[int, int]:
    """Bytes of the fused kernels of forward and of backward."""
    found: list[int] = []
    plain = Scheduler.codegen

    def codegen(self: Scheduler) -> Any:
        found.append(sum(node.get_read_write_buffers_sizes() for node in self.nodes if "Extern" not in type(node).__name__))
        return plain(self)

    torch._dynamo.reset()
    Scheduler.codegen = codegen  # type: ignore[method-assign]
    try:
        torch.compile(work, fullgraph=True)(*inputs).float().sum().backward()
    finally:
        Scheduler.codegen = plain  # type: ignore[method-assign]
    return found[0], found[1]


def layer_bytes(gated: bool, autocast: bool) -> tuple[int, int]:
    """(forward, backward) of one layer among others; autocast: fp32 parameters and residual stream."""
    dtype = torch.float32 if autocast else torch.bfloat16
    totals = []
    for layers in (2, 3):
        stack = nn.Sequential(*(Layer(gated) for _ in range(layers))).to(dtype)

        def work(x: Tensor, stack: nn.Sequential = stack) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                out: Tensor = stack(x)
                return out

        totals.append(counted(work, torch.randn(BATCH, SEQ, HIDDEN, dtype=dtype, requires_grad=True)))
    (a, b), (c, d) = totals
    return c - a, d - b


def loss_bytes() -> tuple[int, int]:
    """(forward, backward) of cross-entropy on an fp32 copy of bf16 logits."""
    logits = torch.randn(BATCH * SEQ, VOCAB, dtype=torch.bfloat16, requires_grad=True)
    return counted(lambda x, t: F.cross_entropy(x.float(), t), logits, torch.randint(0, VOCAB, (BATCH * SEQ,)))


def main() -> None:
    for name, found in (("gated layer, bf16", layer_bytes(True, False)), ("ReLU² layer, autocast", layer_bytes(False, True))):
        print(f"{name:24} forward {found[0] / ELEMENTS:6.1f}  backward {found[1] / ELEMENTS:6.1f}  bytes an element of the residual stream")
    found = loss_bytes()
    print(f"{'loss':24} forward {found[0] / (BATCH * SEQ * VOCAB):6.2f}  backward {found[1] / (BATCH * SEQ * VOCAB):6.2f}  bytes a logit")


if __name__ == "__main__":
    main()
