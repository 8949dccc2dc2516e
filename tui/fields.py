"""The fields of the form: what each is called, which values it steps through, and what it shows of a run."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

from costmodel.catalog import accelerator_entry, list_accelerators, list_clusters, list_models
from costmodel.changes import as_input
from costmodel.program.schedule import PREDICTED
from costmodel.spec import Run
from costmodel.spec.plan import Framework
from costmodel.spec.presets import WORDS
from costmodel.spec.recipe import AttentionKernel, LossKind
from costmodel.spec.run import INTERLEAVED

Kind = Literal["own", "derived", "idle"]
"""own: can be set. derived: follows from others, marked `=`. idle: without meaning in this run."""


class Field(NamedTuple):
    """One row of the form."""

    path: str
    """Dotted path, as in a run file."""
    label: str
    help: str
    values: Callable[[Run], Sequence[Any]]
    """Values to step through, smallest first."""
    read: Callable[[Run, Mapping[str, Any]], Any]
    """The value of a run, given also its shortest input."""
    kind: Callable[[Run], Kind] = lambda run: "own"


class Section(NamedTuple):
    """A heading of the form and its fields."""

    title: str
    fields: tuple[Field, ...]


def _powers(low: int, high: int) -> tuple[int, ...]:
    return tuple(1 << n for n in range(low.bit_length() - 1, high.bit_length()))


def _plan(name: str) -> Callable[[Run, Mapping[str, Any]], Any]:
    return lambda run, given: getattr(run.plan, name)


def _recipe(name: str) -> Callable[[Run, Mapping[str, Any]], Any]:
    return lambda run, given: getattr(run.recipe, name)


def _word(section: str, name: str, default: str) -> Callable[[Run, Mapping[str, Any]], Any]:
    """A table that is shown as the word it stands for."""
    def read(run: Run, given: Mapping[str, Any]) -> Any:
        value = given[section].get(name, default)
        return value if isinstance(value, str) else "custom"
    return read


@cache
def _models() -> tuple[str, ...]:
    return tuple(entry.name for entry in list_models() if entry.predictable)


@cache
def _gpus() -> tuple[str, ...]:
    return tuple(entry.name for entry in list_accelerators() if entry.predictable and entry.bf16_flops_per_s and entry.vendor != "cpu")


def _nodes(run: Run) -> tuple[str, ...]:
    own = run.cluster.accelerator.name
    return tuple(shape.name for shape in list_clusters() if shape.accelerator == own or accelerator_entry(own).node == shape.name)


def _world(run: Run) -> tuple[int, ...]:
    node = run.cluster.gpus_per_node
    return tuple(sorted({*(n for n in _powers(1, node) if n < node), *(node << n for n in range(12))}))


def _constant(*values: Any) -> Callable[[Run], Sequence[Any]]:
    return lambda run: values


def _where(rule: Callable[[Run], bool]) -> Callable[[Run], Kind]:
    """A field that has a meaning in some runs only."""
    return lambda run: "own" if rule(run) else "idle"


def _replicate(run: Run) -> Kind:
    return "derived" if run.plan.zero == 0 else "own" if run.plan.zero == 3 and run.plan.framework == "pytorch" else "idle"


def _shard(run: Run) -> Kind:
    return "idle" if run.plan.zero == 0 else "derived"


SWITCH = (False, True)
SECTIONS: tuple[Section, ...] = (
    Section("MODEL", (
        Field("model", "model", "The architecture; a number with B or M (1B) asks for a Llama-style shape.", lambda run: _models(),
              lambda run, given: run.model.name),
    )),
    Section("CLUSTER", (
        Field("cluster.gpu", "gpu", "The accelerator.", lambda run: _gpus(), lambda run, given: run.cluster.accelerator.name),
        Field("cluster.gpus", "gpus", "GPUs of the job: its ranks.", _world, lambda run, given: run.cluster.gpus),
    )),
    Section("PLAN", (
        Field("plan.framework", "framework", "Whose buffers, dtypes and collectives.", _constant(*get_args(Framework)),
              _plan("framework")),
        Field("plan.zero", "zero", "ZeRO stage: 0 copies all state, 1 shards optimizer state, 2 also gradients, 3 also parameters (FSDP).",
              _constant(0, 1, 2, 3), _plan("zero")),
        Field("plan.dp_replicate", "dp_replicate", "Groups of ranks that each hold a copy of the state.", lambda run: _powers(1, run.plan.dp),
              _plan("dp_replicate"), _replicate),
        Field("plan.dp_shard", "dp_shard", "Ranks over which the state is split: what the GPUs and the other degrees leave.",
              lambda run: _powers(1, run.plan.dp), _plan("dp_shard"), _shard),
        Field("plan.tp", "tp", "Tensor-parallel degree: ranks that share every matrix multiplication.", _constant(*_powers(1, 64)), _plan("tp")),
        Field("plan.sequence_parallel", "seq parallel", "Activations outside the tensor-parallel regions are split over tp too.", _constant(*SWITCH),
              _plan("sequence_parallel"), _where(lambda run: run.plan.tp > 1)),
        Field("plan.pp", "pp", "Pipeline stages: ranks that each hold some of the layers.", _constant(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64), _plan("pp")),
        Field("plan.schedule", "schedule", "The order of forwards and backwards in the pipeline.", _constant(*PREDICTED), _plan("schedule"),
              _where(lambda run: run.plan.pp > 1)),
        Field("plan.virtual_stages", "virtual stages", "Model chunks per pipeline rank, for interleaved schedules.", _constant(1, 2, 3, 4, 6, 8),
              _plan("virtual_stages"), _where(lambda run: run.plan.schedule in INTERLEAVED)),
        Field("plan.checkpointing", "checkpointing", "Which activations are computed again in backward instead of kept.",
              _constant("none", "selective", "selective:op", "every:2", "full"), _word("plan", "checkpointing", "none")),
    )),
    Section("RECIPE", (
        Field("recipe.seq_len", "sequence", "Tokens in a sequence.", _constant(*_powers(256, 1 << 20)), _recipe("seq_len")),
        Field("recipe.micro_batch", "micro-batch", "Sequences of one forward and backward of a data-parallel rank.", _constant(*_powers(1, 1024)),
              _recipe("micro_batch")),
        Field("recipe.grad_accum", "accumulation", "Micro-batches before an optimizer step.", _constant(*_powers(1, 4096)), _recipe("grad_accum")),
        Field("recipe.global_batch", "global batch", "Sequences of a step = micro-batch x accumulation x dp.",
              lambda run: tuple(run.plan.dp * run.recipe.micro_batch * n for n in _powers(1, 4096)), _recipe("global_batch"), lambda run: "derived"),
        Field("recipe.precision", "precision", "The dtypes of parameters, compute, gradients and their reduction.", _constant(*WORDS),
              _word("recipe", "precision", "custom")),
        Field("recipe.optimizer", "optimizer", "The update rule; adamw:foreach names the kernel.",
              _constant("sgd:foreach", "momentum:foreach", "adam", "adamw", "adamw:foreach", "adam8bit", "muon"), _word("recipe", "optimizer", "adamw")),
        Field("recipe.attention", "attention", "The attention kernel.", _constant(*get_args(AttentionKernel)), _recipe("attention")),
        Field("recipe.loss", "loss", "How the loss treats the logits.", _constant(*get_args(LossKind)), _recipe("loss")),
        Field("recipe.compile", "compile", "torch.compile, layer by layer.", _constant(*SWITCH), _recipe("compile")),
    )),
    Section("MORE", (
        Field("cluster.name", "node type", "The servers: GPUs of a node, and the links.", _nodes, lambda run, given: run.cluster.name),
        Field("cluster.slow_rank", "slow rank", "What if one rank computes so many times slower: the others wait for it.",
              _constant(1.0, 1.05, 1.1, 1.2, 1.5, 2.0), lambda run, given: run.cluster.slow_rank),
        Field("plan.reshard_after_forward", "reshard", "FSDP frees gathered parameters after forward and gathers them again in backward.",
              _constant(*SWITCH), _plan("reshard_after_forward"), _where(lambda run: run.plan.zero == 3 and run.plan.framework == "pytorch")),
        Field("plan.loss_parallel", "loss parallel", "Logits stay split by vocabulary over tp.", _constant(*SWITCH), _plan("loss_parallel"),
              _where(lambda run: run.plan.tp > 1)),
        Field("plan.tp_overlap", "tp overlap", "What hides tensor-parallel communication (Megatron).", _constant("none", "async", "userbuffers"),
              _plan("tp_overlap"), _where(lambda run: run.plan.tp > 1 and run.plan.framework == "megatron")),
        Field("plan.overlap_grad_reduce", "overlap reduce", "Reduce gradients during backward (Megatron, DeepSpeed).", _constant(*SWITCH),
              _plan("overlap_grad_reduce"), _where(lambda run: run.plan.framework != "pytorch")),
        Field("recipe.dropout", "dropout", "Dropout probability.", _constant(0.0, 0.1, 0.2), _recipe("dropout")),
        Field("recipe.clip_norm", "clip norm", "Gradient-norm clipping; 0 is off.", _constant(0.0, 1.0), _recipe("clip_norm")),
        Field("recipe.allocator", "allocator", "expandable: PyTorch's expandable segments, which fragment less.", _constant("default", "expandable"),
              _recipe("allocator")),
    )),
)
FIELDS: tuple[Field, ...] = tuple(field for section in SECTIONS for field in section.fields)
BY_PATH: dict[str, Field] = {field.path: field for field in FIELDS}
LAST_NAMES: dict[str, str] = {field.path.rpartition(".")[2]: field.path for field in FIELDS}


def shown(value: Any) -> str:
    """A value as the form writes it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int) and value >= 100_000:
        return f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def reading(run: Run) -> dict[str, Any]:
    """The value of every field of a run, by path."""
    given = as_input(run)
    return {field.path: field.read(run, given) for field in FIELDS}


def neighbours(field: Field, run: Run, value: Any, by: int) -> Sequence[Any]:
    """Values beyond the present one in a direction, nearest first."""
    values = list(field.values(run))
    if value in values:
        at = values.index(value)
        return values[at + 1:] if by > 0 else values[:at][::-1]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return [v for v in values if v > value] if by > 0 else [v for v in values if v < value][::-1]
    return values if by > 0 else values[::-1]
