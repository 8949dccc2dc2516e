"""Predicted steps in one line, and models whose every dim is a multiple of 256."""

from typing import Any

from costmodel import Run, StepReport, build_run, predict
from costmodel.program.build import build
from costmodel.program.ir import expand
from costmodel.report import MemoryReport, RoleReport

GIB, MIB = 1 << 30, 1 << 20

LLAMA: dict[str, Any] = {"layers": 4, "hidden": 256, "heads": 8, "ffn": 512, "vocab": 1024}
"""RMSNorm, rotary, gated SiLU, no biases, untied: 2 V h + h + L (4 h² + 3 h f + 2 h) parameters."""
LLAMA_PARAMS = 2 * 1024 * 256 + 256 + 4 * (4 * 256**2 + 3 * 256 * 512 + 2 * 256)
LLAMA_TENSORS = 3 + 4 * 9
GPT: dict[str, Any] = {
    "layers": 2, "hidden": 1024, "heads": 16, "ffn": 4096, "vocab": 512, "gated": False, "activation": "gelu", "norm": "layernorm", "norm_bias": True,
    "positions": "learned", "position_rows": 2048, "qkv_bias": True, "attention_out_bias": True, "mlp_bias": True, "fused_qkv": True,
    "tied_embeddings": True}


def step(model: Any, gpus: int = 1, gpu: str = "a100", plan: dict[str, Any] | None = None, **recipe: Any) -> StepReport:
    """One predicted step; recipe fields as keywords, a short sequence unless given."""
    fields = {"seq_len": 64, "optimizer": "adamw:foreach", **recipe}
    return predict(build_run(model=model, cluster={"gpus": gpus, "gpu": gpu}, plan=plan or {}, recipe=fields), scaling=False)


def memory(report: StepReport) -> MemoryReport:
    """Memory of the first role."""
    found = report.roles[0].memory
    assert found is not None
    return found


def states(report: StepReport) -> dict[str, int]:
    """What stays between steps, without the rotary tables and masks."""
    return {k: v for k, v in memory(report).states.items() if k != "framework"}


def most(run: Run, category: str) -> int:
    """The most bytes of a category that the first role ever has, in the order of its program."""
    role = build(run).roles[0]
    live = top = sum(t.nbytes for t in role.persistent if t.category == category)
    for part in (role.first_step, role.step):
        for op in (op for block in expand(part) for op in block.ops):
            live += sum(t.nbytes for t in op.allocs if t.category == category)
            top = max(top, live)
            live -= sum(t.nbytes for t in op.frees if t.category == category)
    return top


def sent(role: RoleReport, wire: int | None = None) -> dict[str, int]:
    """Message bytes of one step by collective, groups of one left out; in elements where the bytes of one are given."""
    out: dict[str, int] = {}
    for c in role.collectives or ():
        if c.group > 1:
            out[c.kind] = out.get(c.kind, 0) + c.count * c.message_bytes // (wire or 1)
    return out
