"""Write what the pages take from the code: the tables of docs/run.md, docs/report.md and docs/support.md, the outputs of README.md, docs/explain.md
and docs/questions.md.

    python docs/generate.py

A table stands between `<!-- table: Name -->` and `<!-- end -->`, a command's output between `<!-- output: arguments -->` and
`<!-- end -->`, what support_table.py says between `<!-- support: name -->` and `<!-- end -->`; the text around them is written by hand. A test
holds that the files are what this writes.

`<!-- output: arguments :: VERDICT :: MEMORY > A, activations -->` shows parts of a long output: the paragraphs that begin with these words, and of MEMORY
only its first line and the lines that begin with `A` or `activations`.
"""

import ast
import dataclasses
import inspect
import itertools
import re
import shlex
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent), str(DOCS)]

MEANINGS = {
    "Model.name": "Name, for people.", "Model.layers": "Transformer layers.", "Model.hidden": "Width of the residual stream.",
    "Model.heads": "Attention (query) heads.", "Model.activation": "Non-linearity of the feed-forward block.",
    "Model.tied_embeddings": "The output head is the embedding table.", "Model.norm": "Kind of normalisation.",
    "Model.norm_bias": "Norms have a bias.", "Model.norm_placement": "Norms before, after, or around a block.",
    "Model.final_norm": "A norm before the head.", "Model.embedding_norm": "A norm after the embedding.",
    "Model.positions": "How positions enter.", "Model.rotary_fraction": "Part of a head that rotates.",
    "Model.qkv_bias": "Query, key and value projections have biases.", "Model.attention_out_bias": "The attention output has a bias.",
    "Model.mlp_bias": "Feed-forward projections have biases.", "Model.head_bias": "The output head has a bias.",
    "Model.qk_norm": "Norm of queries and keys.", "Model.attention_sinks": "One learned sink per head.",
    "Model.parallel_residual": "Attention and feed-forward read the same input.",
    "Model.attention_pattern": "Which layers see a window.", "Model.moe": "Routed experts; absent in a dense model.",
    "Model.mla": "Latent attention; absent otherwise.", "Model.extra_params_note": "What the extra parameters are.",
    "MoE.shared_experts": "Experts every token uses.", "MoE.router_bias": "The router has a bias.", "MoE.expert_bias": "Experts have biases.",
    "MLA.kv_lora_rank": "Rank of the shared key and value projection.", "MLA.qk_nope_head_dim": "Head size without rotary.",
    "MLA.qk_rope_head_dim": "Head size with rotary.", "MLA.v_head_dim": "Head size of values.",
    "Accelerator.name": "Name in the catalogue.", "Accelerator.vendor": "Who makes it.", "Accelerator.kind": "Which software stack runs it.",
    "Accelerator.architecture": "Generation.", "Accelerator.memory_bytes_per_s": "Memory bandwidth.", "Accelerator.l2_bytes": "L2 cache.",
    "Accelerator.link": "Kind of scale-up link.", "Accelerator.pcie_bytes_per_s": "Host link, one way.", "Accelerator.tdp_w": "Power limit.",
    "Accelerator.confidence": "How the figures were found.", "Accelerator.source": "Where.",
    "Level.name": "Name of the level.", "Level.kind": "Kind of link.", "Level.switch_reduces": "The switch can reduce.",
    "Cluster.name": "Node type.", "Cluster.accelerator": "The device.", "Cluster.gpus_per_node": "GPUs of one node.",
    "Cluster.levels": "Topology, innermost first.",
    "Checkpointing.mode": "What is recomputed in backward.",
    "Plan.framework": "Dialect: same idea, other buffers, dtypes and collectives.", "Plan.tp": "Tensor-parallel degree.",
    "Plan.sequence_parallel": "Activations outside the tp regions split by sequence over tp.", "Plan.tp_overlap": "How tp's communication overlaps.",
    "Plan.pp": "Pipeline stages.", "Plan.schedule": "Order of micro-batches on each stage.",
    "Plan.virtual_stages": "Model chunks per pipeline rank.", "Plan.cp": "Context-parallel degree.",
    "Plan.ep": "Expert-parallel degree; divides dp_shard x cp.", "Plan.ep_overlap": "Expert all-to-alls overlap compute.",
    "Plan.checkpointing": "Activation checkpointing; a word (`full:4`) or the table below.",
    "Plan.activation_offload": "Saved activations live in host memory.",
    "Plan.gradient_as_bucket_view": "DDP's gradients are views of its buckets.",
    "Plan.backward_prefetch": "FSDP gathers the next layer during backward.",
    "Recipe.seq_len": "Tokens in a sequence.", "Recipe.precision": "A word (`bf16-mixed`) or the table below.",
    "Recipe.optimizer": "A word (`adamw:foreach`) or the table below.", "Recipe.attention": "Attention kernel.",
    "Recipe.loss": "How the loss is computed, which decides the bytes per logit.", "Recipe.causal": "Attention is causal.",
    "Recipe.dropout": "Dropout probability.", "Recipe.cuda_graphs": "Kernels are replayed from CUDA graphs.",
    "Recipe.allocator": "`expandable`: expandable segments.", "Recipe.zero_set_to_none": "Gradients are freed after the step.",
    "Recipe.token_dtype": "dtype of token ids.", "Recipe.warmup_steps": "Steps of linear warm-up.", "Recipe.schedule": "Learning-rate schedule.",
    "Precision.name": "Name, for people.", "Precision.parameter": "dtype the module holds and gathers from.",
    "Precision.compute": "dtype that kernels see.", "Precision.optimizer_state": "dtype of the optimizer's states.",
    "Precision.loss_scaling": "The loss is scaled against underflow.",
    "OptimizerSpec.name": "Update rule.", "OptimizerSpec.implementation": "Which kernels run it.", "OptimizerSpec.lr": "Learning rate.",
    "OptimizerSpec.betas": "Decay of Adam's moments.", "OptimizerSpec.eps": "Adam's ε.", "OptimizerSpec.weight_decay": "Weight decay.",
    "OptimizerSpec.momentum": "Momentum of SGD and Muon.",
    "Peak.total_bytes": "Bytes at that moment.", "Peak.moment": "When it is, in words.", "Peak.by_category": "Its split; sums to total_bytes.",
    "MemoryReport.capacity_bytes": "What the device offers to programs.",
    "MemoryReport.verdict": "`fits`, `risky`, `does not fit` or `unknown`.",
    "MemoryReport.headroom_bytes": "Capacity less need; negative where it does not fit.",
    "Collective.phase": "Part of the step.", "Collective.axis": "Axis of the mesh.",
    "Collective.kind": "all-reduce, all-gather, reduce-scatter, …", "Collective.group": "Ranks that take part.",
    "Collective.count": "How many in a step.", "Collective.in_bytes": "Input of one rank, each.", "Collective.out_bytes": "Output of one rank, each.",
    "Collective.message_bytes": "Message, each: the full tensor for all-gather and reduce-scatter.", "Collective.dtype": "dtype on the wire.",
    "Collective.total_s": "Seconds of all of them; measured: of the profiler's events of this kind and size, scaled to the timed step.",
    "TimeReport.step_s": "Seconds of one optimizer step.",
    "TimeReport.bubble_s": "Seconds idle because of the pipeline schedule; measured: waiting for neighbours, transfers included.",
    "RoleReport.role": "Name of the role.", "RoleReport.ranks": "How many ranks play it.", "RoleReport.example_rank": "One of them.",
    "RoleReport.memory": "Its memory.", "RoleReport.time": "Its time.", "RoleReport.collectives": "What it sends in a step.",
    "Scaling.baseline_step_s": "Seconds of a step of the one GPU.", "Scaling.baseline_fits": "Whether that step would fit in its memory.",
    "StepReport.provenance": "`predicted`, `dryrun`, `solo`, `run` or `published`.", "StepReport.roles": "One entry per rank role.",
    "StepReport.world_size": "Ranks of the job.", "StepReport.tokens_per_step": "Tokens of one optimizer step over all ranks.",
    "StepReport.scaling": "Efficiency against one GPU.", "StepReport.bound_by": "What bounds the step, in words.",
    "Record.run": "What was performed, every field (docs/run.md).", "Record.outcome": "How it ended.",
    "Outcome.message": "What was said then, one line.", "Environment.host": "Name of the host.",
    "StepReport.basis": "How sure each kind of figure is: `exact`, `modelled`, `fitted` or `guess`.",
    "Waterfall.predicted_s": "Seconds of the predicted step.", "Waterfall.measured_s": "What `--measured` gave; null without it.",
    "Waterfall.peak_flops_per_s": "Dense peak of the compute dtype of one GPU.", "Waterfall.bars": "The bars, in order.",
    "Bar.name": "Its name.", "Bar.meaning": "What it is, in words.",
    "Comparison.entries": "The runs; the first is the base.", "Comparison.notes": "What a reader of the figures should know.",
    "Entry.name": "File, flags, or `one GPU`.", "Entry.gpus": "World size.", "Entry.nodes": "Nodes.", "Entry.params": "Parameters of the model.",
    "Entry.tokens_per_step": "Tokens of a step over all ranks.", "Entry.step_s": "Seconds of a step.", "Entry.tokens_per_s": "Of the job.",
    "Entry.tokens_per_s_per_gpu": "Of each GPU.", "Entry.mfu": "Model FLOPs per second over the peak.", "Entry.hfu": "With recompute.",
    "Entry.memory": "Of the fullest rank.", "Training.tokens": "Tokens that are trained on.", "Training.steps": "Steps that takes.",
    "Training.seconds": "Seconds of them.", "Training.days": "The same in days.", "Training.gpu_hours": "Hours of all GPUs together.",
    "Memory.role": "The role that peaks highest.", "Memory.allocated": "Live tensors at the peak.", "Memory.reserved": "What the allocator holds.",
    "Memory.device": "What nvidia-smi shows.", "Memory.capacity": "What the device offers.", "Memory.verdict": "Of the run: its worst role.",
    "Difference.label": "The run that is compared with A.", "Difference.before_s": "Seconds of a step of A.",
    "Difference.after_s": "Seconds of this run for as many tokens a GPU.", "Difference.mfu_before": "MFU of A.", "Difference.mfu_after": "MFU of this run.",
    "Difference.bars": "The bars of both.", "BarDifference.name": "Name of the bar.", "BarDifference.meaning": "What it is, in words.",
    "Explanation.role": "Name of the role.", "Explanation.ranks": "How many ranks play it.", "Explanation.example_rank": "One of them.",
    "Explanation.model_params": "Parameters of the model.", "Explanation.holdings": "What it holds, by kind of tensor.",
    "Explanation.pipeline": "Stages; null without a pipeline.",
    "Axis.name": "Axis of the mesh.", "Axis.degree": "Its ranks.", "Axis.stride": "How far apart they are in the rank order.",
    "Axis.communication_s": "Seconds of its communication, hidden or not.", "Axis.exposed_s": "Seconds of it that compute waits for.",
    "Movement.collective": "all-gather, reduce-scatter, all-reduce, broadcast, send, …", "Movement.axis": "Axis of the mesh.",
    "Movement.phase": "Part of the step.", "Movement.count": "How many in a step.", "Movement.dtype": "dtype on the wire.",
    "Term.name": "What it is.", "Term.category": "Category of memory.", "Term.dtype": "Its dtype.",
    "LayerSplit.tp": "Ranks of the group.", "LayerSplit.sequence_parallel": "Tokens between the matmuls are split too.",
    "LayerSplit.weights": "Weights of embedding, layer and head.", "LayerSplit.heads": "Query heads of a rank.",
    "WeightCut.name": "The weight.", "WeightCut.shape": "Its shape.", "WeightCut.local": "The part on one rank.",
    "Fall.phase": "forward or backward.", "Fall.collective": "Its kind.", "Fall.message_bytes": "Message, each.",
    "Pipeline.schedule": "Order of the micro-batches.", "Pipeline.micro_batches": "Of a step.", "Pipeline.stages": "In order of the model.",
    "StageHeld.stage": "Its number.", "StageHeld.first_layer": "Its first layer.", "StageHeld.layers": "How many.",
    "StageHeld.embedding": "Holds the embedding.", "StageHeld.head": "Holds the last norm and the head.",
    "Weight.key": "Key in the profile.", "Weight.value": "Its value.", "Weight.unit": "Its unit.", "Weight.basis": "How it was found.",
    "Weight.source": "From what.",
}
"""What a field means, where the type itself does not say it."""


def types() -> dict[str, type]:
    """The described types by name."""
    from costmodel import comparison, explain, records, report, spec, waterfall
    found: list[type] = [spec.Model, spec.MoE, spec.MLA, spec.Cluster, spec.Accelerator, spec.Level, spec.Plan, spec.Checkpointing, spec.Recipe, spec.Precision,
             spec.OptimizerSpec, report.StepReport, report.RoleReport, report.MemoryReport, report.Peak, report.TimeReport, report.Collective,
             report.Scaling, report.Training, waterfall.Waterfall, waterfall.Bar, comparison.Comparison, comparison.Entry, comparison.Memory,
             comparison.Difference, comparison.BarDifference, explain.Explanation, explain.Axis, explain.Holding, explain.Movement, explain.Term,
             explain.LayerSplit, explain.WeightCut, explain.Fall, explain.Pipeline, explain.StageHeld, explain.Weight,
             records.Record, records.Outcome, records.Environment]
    return {kind.__name__: kind for kind in found}


def docstrings(kind: type) -> dict[str, str]:
    """The string below each field of a class."""
    body = ast.parse(inspect.getsource(kind)).body[0].body  # type: ignore[attr-defined]
    found = {}
    for field, below in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            found[field.target.id] = " ".join(str(below.value.value).split())  # type: ignore[union-attr]
    return found


def annotations(kind: type) -> dict[str, str]:
    """The type of each field as its source has it, Literal choices spelt out."""
    import typing
    module = sys.modules[kind.__module__]
    body = ast.parse(inspect.getsource(kind)).body[0].body  # type: ignore[attr-defined]
    found = {}
    for field in body:
        if isinstance(field, ast.AnnAssign):
            text = ast.unparse(field.annotation)
            alias = getattr(module, text, None)
            if typing.get_origin(alias) is typing.Literal:
                text = ", ".join(str(a) for a in typing.get_args(alias))
            text = re.sub(r"Literal\[([^\]]*)\]", lambda m: m[1].replace("'", ""), text)
            for word, plain in (("PositiveInt", "int > 0"), ("NonNegativeFloat", "float >= 0"), ("PositiveFloat", "float > 0")):
                text = text.replace(word, plain)
            found[field.target.id] = text  # type: ignore[union-attr]
    return found


def default_of(kind: type, name: str) -> str:
    """A field's default as a file has it; "needed" where there is none."""
    value: Any
    if dataclasses.is_dataclass(kind):
        return ""
    info = kind.model_fields[name]  # type: ignore[attr-defined]
    if info.is_required():
        return "needed"
    value = info.get_default(call_default_factory=True)
    if value is None:
        return "none"
    if hasattr(value, "model_dump"):
        return "its defaults"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(list(value)) if isinstance(value, tuple) else str(value)


def table(kind: type) -> str:
    """The markdown table of a type's fields."""
    said, kinds = docstrings(kind), annotations(kind)
    is_report = dataclasses.is_dataclass(kind)
    names = [f.name for f in dataclasses.fields(kind)] if is_report else list(kind.model_fields)  # type: ignore[attr-defined]
    lines = ["| field | type | meaning |", "|---|---|---|"] if is_report else ["| field | takes | default | meaning |", "|---|---|---|---|"]
    for name in names:
        key = f"{kind.__name__}.{name}"
        meaning = said.get(name) or MEANINGS[key]
        cells = [f"`{name}`", kinds[name], *([] if is_report else [default_of(kind, name)]), meaning]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


DOES_NOT_FIT = 3
"""Exit code of an answer that is an answer all the same."""


def output(arguments: str) -> str:
    """What `costmodel ARGUMENTS` prints on 80 columns, or the parts of it that are named."""
    from typer.testing import CliRunner

    from costmodel.cli.app import app
    command, *parts = arguments.split(" :: ")
    done = CliRunner().invoke(app, shlex.split(command), env={"COLUMNS": "80"})
    if done.exit_code not in (0, DOES_NOT_FIT):
        raise SystemExit(f"costmodel {command}: {done.stderr}")
    text = "\n\n".join(excerpt(done.stdout, part) for part in parts) if parts else done.stdout.rstrip()
    return f"```text\n{text}\n```"


def excerpt(text: str, part: str) -> str:
    """The paragraph of an output that begins with some words; with ` > a, b` of its lines the first and those that begin with a or b."""
    words, _, rows = part.partition(" > ")
    paragraph = next((p for p in text.rstrip().split("\n\n") if p.strip().startswith(words)), None)
    if paragraph is None:
        raise SystemExit(f"no paragraph begins with {words!r}")
    first, *lines = paragraph.splitlines()
    wanted = tuple(f"{row.strip()} " for row in rows.split(",")) if rows else ("",)
    return "\n".join([first, *(line for line in lines if f"{line.strip()} ".startswith(wanted))])


def filled(text: str) -> str:
    """A page with its tables and outputs as the code has them now."""
    known = types()
    text = re.sub(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", lambda m: f"{m[1]}{table(known[m[2]])}\n{m[3]}", text, flags=re.DOTALL)
    if "<!-- support: " in text:
        from support_table import tables
        found = dict(tables())
        text = re.sub(r"(<!-- support: (\w+) -->\n).*?(<!-- end -->)", lambda m: f"{m[1]}{found[m[2]]}\n{m[3]}", text, flags=re.DOTALL)
    return re.sub(r"(<!-- output: (.*?) -->\n).*?(<!-- end -->)", lambda m: f"{m[1]}{output(m[2])}\n{m[3]}", text, flags=re.DOTALL)


PAGES = ("docs/run.md", "docs/report.md", "docs/support.md", "docs/explain.md", "docs/fit.md", "docs/questions.md", "README.md")

if __name__ == "__main__":
    for page in PAGES:
        path = DOCS.parent / page
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"wrote {path}")
