"""The tables of docs/support.md: what the product itself predicts, performs or refuses, asked run by run, and the oracle of each answer.

Yes and no come from `costmodel.prediction` and `execute.support`; which oracle checks which cell is written here, and
tests/execute/test_support_page.py holds that the oracle has such a case.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from costmodel.inputs import build_run
from costmodel.prediction import predict
from costmodel.records import Record, read_records
from costmodel.spec import PlanError, Run
from execute.support import Mode, check_supported

LLAMA: dict[str, Any] = {"layers": 8, "hidden": 256, "heads": 8, "kv_heads": 4, "ffn": 512, "vocab": 512}
MEASURED = Path(__file__).parent.parent / "benchmarks" / "measured"
PURE = {"precision": "bf16-pure"}
NOTHING: Mapping[str, Any] = MappingProxyType({})


class Oracle(NamedTuple):
    """What an answer was checked against."""

    words: str
    place: str
    """A file of this repository."""


ORACLES = {
    "dry run": Oracle("the dry run, byte by byte and collective by collective", "benchmarks/bytes.py"),
    "papers' bytes": Oracle("bytes a parameter of the papers and of other tools", "tests/physics/test_state_bytes.py"),
    "papers' layers": Oracle("activations, messages and bubbles of arXiv 1909.08053, 2205.05198 and 2104.04473", "tests/physics/test_tensor_and_pipeline.py"),
    "papers' experts": Oracle("shards, messages and routed copies of arXiv 2006.16668 and 2401.04088, counted by hand", "tests/physics/test_experts.py"),
    "published runs": Oracle("memory and time of published runs", "docs/accuracy.md"),
    "torch's code": Oracle("counts by hand of what torch.nn.DataParallel's code does, and a published comparison with DDP",
                           "tests/physics/test_dataparallel.py"),
    "Megatron's code": Oracle("bytes, messages and buffers of Megatron-FSDP, counted by hand from its code, and the ZeRO paper's traffic",
                              "tests/physics/test_megatron_fsdp.py"),
    "real ranks": Oracle("real tensors, byte by byte: one process, or two ranks under gloo", "tests/execute/test_real_runs.py"),
    "its dry run": Oracle("the dry run of the same rank, byte by byte, on a CPU", "tests/execute/test_solo.py"),
    "one process": Oracle("gradients and losses of one process with the same batch", "tests/execute/test_same_mathematics.py"),
    "real job": Oracle("DeepSpeed's own ranks under gloo: states and messages exactly, the peak within 5%; losses and parameters of one process",
                       "tests/execute/test_deepspeed.py"),
    "record": Oracle("a record of such a job on GPUs", "benchmarks"),
    "untried": Oracle("nothing yet: the code is the same as under gloo, but nobody has run it on several GPUs", "docs/executing.md"),
}


class Row(NamedTuple):
    """A way to spread a step, and what each answer about it was checked against where it is yes."""

    strategy: str
    """As the catalogue names it."""
    how: str
    """The dialect, or the schedule."""
    plan: dict[str, Any]
    predicted: tuple[str, ...] = ("dry run",)
    dry: tuple[str, ...] = ("real ranks",)
    alone: tuple[str, ...] = ("its dry run",)
    gloo: tuple[str, ...] = ("one process",)
    gpus: int = 8
    recipe: Mapping[str, Any] = NOTHING
    model: Any = LLAMA

    def run(self) -> Run:
        return build_run(model=self.model, cluster={"gpu": "h100_sxm", "gpus": self.gpus}, plan=self.plan, recipe={"seq_len": 256, **self.recipe})


MIXTURE: dict[str, Any] = {**LLAMA, "moe": {"experts": 8, "top_k": 2, "expert_ffn": 256}}
MEGATRON = {"framework": "megatron"}
PIPED = {"grad_accum": 4, **PURE}
ROWS = (
    Row("single", "PyTorch", {"strategy": "single"}, gpus=1, gloo=("real ranks",)),
    Row("dataparallel", "PyTorch", {"strategy": "dataparallel"}, ("torch's code",)),
    Row("ddp", "PyTorch", {"strategy": "ddp"}),
    Row("ddp", "Megatron", {**MEGATRON, "zero": 0}, ("papers' bytes", "published runs")),
    Row("zero1", "PyTorch", {"strategy": "zero1"}, ("dry run", "papers' bytes")),
    Row("zero1", "DeepSpeed", {"strategy": "zero1", "framework": "deepspeed"}, ("real job", "papers' bytes"), gloo=("real job",)),
    Row("zero2", "plain PyTorch", {"strategy": "zero2"}, ("dry run", "papers' bytes")),
    Row("zero2", "DeepSpeed", {"strategy": "zero2", "framework": "deepspeed"}, ("real job", "papers' bytes"), gloo=("real job",)),
    Row("zero3", "DeepSpeed", {"strategy": "zero3", "framework": "deepspeed"}, ("real job", "papers' bytes", "published runs"), gloo=("real job",)),
    Row("fsdp", "PyTorch (also called zero3)", {"strategy": "fsdp"}, ("dry run", "papers' bytes", "published runs")),
    Row("hsdp", "PyTorch", {"strategy": "hsdp", "dp_replicate": 2}, dry=()),
    Row("megatron-distributed-optimizer", "Megatron", {**MEGATRON, "zero": 1}, ("papers' bytes", "published runs")),
    Row("megatron-distributed-optimizer", "Megatron, two instances", {**MEGATRON, "zero": 1, "dp_replicate": 2}, ("papers' bytes", "published runs")),
    Row("megatron-fsdp", "Megatron", {**MEGATRON, "zero": 3}, ("Megatron's code", "published runs")),
    Row("megatron-fsdp", "Megatron, with replicas (HSDP)", {**MEGATRON, "zero": 3, "dp_replicate": 2}, ("Megatron's code",)),
    Row("tp", "PyTorch, alone", {"strategy": "ddp", "tp": 8, "dp": 1}, gpus=8, recipe=PURE, model={**LLAMA, "kv_heads": 8}),
    Row("tp", "PyTorch, sequence-parallel, with FSDP", {"strategy": "fsdp", "tp": 2, "sequence_parallel": True}, dry=(), recipe=PURE),
    Row("tp", "Megatron", {**MEGATRON, "zero": 1, "tp": 2}, ("papers' layers", "published runs")),
    Row("sequence-parallel", "PyTorch", {"strategy": "ddp", "tp": 4, "dp": 1, "sequence_parallel": True}, gpus=4, recipe=PURE),
    Row("sequence-parallel", "Megatron", {**MEGATRON, "zero": 1, "tp": 2, "sequence_parallel": True}, ("papers' layers", "published runs")),
    Row("pp", "PyTorch, naive", {"strategy": "ddp", "pp": 4, "dp": 1, "schedule": "naive"}, dry=(), alone=(), gpus=4, recipe=PIPED),
    Row("pp", "PyTorch, GPipe", {"strategy": "ddp", "pp": 4, "dp": 1, "schedule": "gpipe"}, gpus=4, recipe=PIPED),
    Row("pp", "PyTorch, 1F1B", {"strategy": "ddp", "pp": 4, "dp": 1}, gpus=4, recipe=PIPED),
    Row("pp", "PyTorch, interleaved", {"strategy": "ddp", "pp": 4, "dp": 1, "schedule": "interleaved", "virtual_stages": 2}, dry=(), gpus=4,
        recipe=PIPED),
    Row("pp", "Megatron, 1F1B", {**MEGATRON, "zero": 1, "pp": 4}, ("papers' layers", "published runs"), recipe={"grad_accum": 4}),
    Row("pp", "PyTorch, zero-bubble (ZB-H1)", {"strategy": "ddp", "pp": 4, "dp": 1, "schedule": "zb-h1"}, dry=(), gpus=4, recipe=PIPED),
    Row("pp", "PyTorch, interleaved zero-bubble", {"strategy": "ddp", "pp": 4, "dp": 1, "schedule": "interleaved-zb", "virtual_stages": 2}, dry=(), alone=(),
        gpus=4, recipe=PIPED),
    Row("pp", "PyTorch, ZBV", {"strategy": "ddp", "pp": 4, "dp": 1, "schedule": "zbv"}, dry=(), gpus=4, recipe=PIPED),
    Row("pp", "PyTorch, DualPipeV", {"strategy": "ddp", "pp": 4, "dp": 1, "schedule": "dualpipev"}, dry=(), alone=(), gpus=4,
        recipe={"grad_accum": 8, **PURE}),
    Row("cp", "plain PyTorch, ring", {"strategy": "fsdp", "cp": 2}, gpus=2),
    Row("cp", "plain PyTorch, all-gather", {"strategy": "fsdp", "cp": 2, "cp_kind": "allgather"}, alone=(), gpus=2),
    Row("cp", "plain PyTorch, Ulysses", {"strategy": "fsdp", "cp": 2, "cp_kind": "ulysses"}, gpus=2),
    Row("cp", "plain PyTorch, ring, with FSDP", {"strategy": "fsdp", "cp": 2}, dry=(), alone=()),
    Row("cp", "Megatron, ring and Ulysses", {**MEGATRON, "zero": 1, "cp": 2}, ("published runs",)),
    Row("ep", "PyTorch, with FSDP", {"strategy": "fsdp", "ep": 4}, ("dry run", "papers' experts"), dry=(), alone=(), model=MIXTURE),
    Row("ep", "Megatron", {**MEGATRON, "zero": 1, "ep": 4}, ("papers' experts", "published runs"), model=MIXTURE),
    Row("muon-distributed", "nanochat", {"strategy": "muon-distributed"}),
)


class Part(NamedTuple):
    """A part of a run that a strategy does not name."""

    words: str
    recipe: Mapping[str, Any] = NOTHING
    plan: Mapping[str, Any] = NOTHING
    model: Any = LLAMA
    gpu: str = "h100_sxm"


PARTS = (
    Part("fp32", {"precision": "fp32"}), Part("tf32", {"precision": "tf32"}), Part("fp16-mixed", {"precision": "fp16-mixed"}),
    Part("bf16-mixed", {"precision": "bf16-mixed"}), Part("bf16-pure", PURE), Part("fp8: one scale a tensor", {"precision": "fp8"}),
    Part("fp8: scales by rows", {"precision": {"base": "fp8", "fp8_recipe": "rowwise"}}),
    Part("fp8: blocks of 32 (mxfp8)", {"precision": {"base": "fp8", "fp8_recipe": "mxfp8"}, "compile": True}, gpu="b200"),
    Part("fp8: gathered by FSDP2", {"precision": {"base": "fp8", "fp8_gather": True}}, {"strategy": "fsdp"}),
    Part("SGD", {"optimizer": "sgd:foreach"}), Part("SGD with momentum", {"optimizer": "momentum:foreach"}), Part("Adam", {"optimizer": "adam"}),
    Part("AdamW, fused", {"optimizer": "adamw"}), Part("AdamW, foreach", {"optimizer": "adamw:foreach"}), Part("8-bit Adam", {"optimizer": "adam8bit"}),
    Part("Muon", {"optimizer": "muon"}),
    Part("checkpointing: full", {}, {"checkpointing": "full"}), Part("checkpointing: groups of layers", {}, {"checkpointing": "full:4"}),
    Part("checkpointing: every k-th layer", {}, {"checkpointing": "every:2"}), Part("checkpointing: attention", {}, {"checkpointing": "selective"}),
    Part("checkpointing: per operation", {}, {"checkpointing": "selective:op"}),
    Part("attention: eager", {"attention": "eager"}), Part("attention: FlashAttention-2", {**PURE, "attention": "fa2"}),
    Part("attention: FlashAttention-3", {**PURE, "attention": "fa3"}), Part("attention: cuDNN", {**PURE, "attention": "cudnn"}),
    Part("loss: bf16", {"loss": "bf16"}), Part("loss: chunked", {"loss": "chunked"}), Part("loss: fused", {"loss": "fused"}),
    Part("loss: in place", {"loss": "inplace"}),
    Part("torch.compile", {"compile": True}), Part("CUDA graphs", {"cuda_graphs": True}), Part("dropout", {"dropout": 0.1}),
    Part("offload of optimizer states", {}, {"offload": "optimizer"}),
    Part("mixture of experts", model="mixtral-8x7b"), Part("dense layers before a mixture of experts", model={
        **MIXTURE, "moe": {**MIXTURE["moe"], "first_dense_layers": 1}}), Part("latent attention", model={**LLAMA, "kv_heads": LLAMA["heads"], "mla": {
        "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}}),
    Part("sliding windows", model={**LLAMA, "sliding_window": 128}),
    Part("sliding windows in some layers", model={**LLAMA, "sliding_window": 128, "attention_pattern": "alternating"}),
)


def predicts(run: Run) -> bool:
    """Whether `costmodel predict` answers."""
    try:
        predict(run)
    except PlanError:
        return False
    return True


def performs(mode: Mode) -> Callable[[Run], bool]:
    """Whether `execute` performs a run in a mode."""
    def asked(run: Run) -> bool:
        try:
            check_supported(run, mode)
        except PlanError:
            return False
        return True
    return asked


ASKED: tuple[Callable[[Run], bool], ...] = (predicts, performs("dryrun"), performs("solo"), performs("run"), performs("run"))


def answers(run: Run) -> list[bool]:
    """Predicted; dry-run; one device; gloo; NCCL."""
    return [asked(run) for asked in ASKED]


@cache
def gpu_records() -> tuple[Record, ...]:
    """The records of GPUs that this repository keeps."""
    kept = [record for _, record in read_records(MEASURED)] if MEASURED.is_dir() else []
    return tuple(r for r in kept if r.outcome.kind == "ok" and r.environment is not None and "cuda" in r.environment.versions)


def way(run: Run) -> tuple[Any, ...]:
    """What makes two plans the same way to spread a step."""
    p = run.plan
    spread = p.framework, p.zero, p.dp > 1, (p.zero == 3 or p.framework == "megatron" and p.zero > 0) and p.dp_replicate > 1, p.tp > 1, p.sequence_parallel
    return *spread, p.schedule if p.pp > 1 else None, p.cp_kind if p.cp > 1 else None, p.ep > 1


def oracles_of(row: Row) -> tuple[tuple[str, ...], ...]:
    """In the order of `answers`."""
    tried = any(record.provenance == "run" and way(record.run) == way(row.run()) for record in gpu_records())
    return row.predicted, row.dry, row.alone, row.gloo, ("record",) if tried else ("untried",)


def gpus_line() -> str:
    """What is known of GPUs."""
    counts = {provenance: sum(record.provenance == provenance for record in gpu_records()) for provenance in ("solo", "run")}
    if not any(counts.values()):
        return "No record of a GPU is kept in benchmarks/measured: what is said here of one device and of NCCL has been tried on CPUs alone."
    return f"benchmarks/measured keeps {counts['solo']} records of one GPU (`execute solo`) and {counts['run']} of jobs (`execute run`)."


def strategies_table() -> str:
    """Every strategy of the catalogue, one row a dialect or schedule."""
    lines = ["| strategy | how | predicted | dry run | one device | gloo | NCCL |", "|---|---|---|---|---|---|---|"]
    for row in ROWS:
        cells = [_cell(yes, oracles) for yes, oracles in zip(answers(row.run()), oracles_of(row), strict=True)]
        lines.append(f"| `{row.strategy}` | {row.how} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(yes: bool, oracles: tuple[str, ...]) -> str:
    if not yes or oracles == ("untried",):
        return "untried" if yes else "no"
    return f"yes: {', '.join(oracles)}" if oracles else "yes"


def oracles_table() -> str:
    """What the words in the cells mean."""
    lines = ["| word | checked against | where |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {o.words} | `{o.place}` |" for name, o in ORACLES.items())])


def parts_table() -> str:
    """Every part of a run, under FSDP over 8 ranks where it needs ranks, else on one."""
    lines = ["| part of a run | predicted | dry run | one device | gloo, NCCL |", "|---|---|---|---|---|"]
    for part in PARTS:
        found = answers(build_run(model=part.model, cluster={"gpu": part.gpu, "gpus": 1}, plan={"strategy": "single", **part.plan},
                                  recipe={"seq_len": 256, **part.recipe}))
        lines.append(f"| {part.words} | " + " | ".join("yes" if yes else "no" for yes in found[:4]) + " |")
    return "\n".join(lines)


def tables() -> Iterator[tuple[str, str]]:
    """Each table of the page with its name."""
    yield "strategies", strategies_table()
    yield "oracles", oracles_table()
    yield "parts", parts_table()
    yield "gpus", gpus_line()
