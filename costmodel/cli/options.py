"""The options that describe a run, defined once for every command that takes one.

A run comes from a file, from flags, or from both: flags override the file, `--set` overrides both. `@takes_run` gives a
command the options and hands it a `Given`, which remembers who wrote which field, so that an error can name the flag or the file.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import field as default
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar

import typer
from typer.core import TyperCommand

from costmodel.cli.guard import InputError, set_debug, shown, subject

if TYPE_CHECKING:
    from costmodel.inputs import Resolved
    from costmodel.spec import PlanError

P = ParamSpec("P")
R = TypeVar("R")
Kind = Literal["word", "whole", "number", "switch", "factors"]
_METAVAR = {"word": "WORD", "whole": "N", "number": "X", "factors": "LINK=X"}
EXAMPLES = {"--gpus": "8", "--zero": "3", "--seq-len": "4096", "--dropout": "0.1", "--slow-rank": "1.2"}


class Flag(NamedTuple):
    """One option: how it is written, the field it sets, what it takes."""

    name: str
    field: str
    kind: Kind
    help: str

    @property
    def parameter(self) -> str:
        return self.name.removeprefix("--").replace("-", "_")


MODEL, SPREAD, STEP = "Model and machines", "How the step is spread", "What a step computes"
FLAGS: tuple[Flag, ...] = (
    Flag("--params", "params", "word", "Parameter count: 350M, 1B, 70e9. Takes a Llama-style shape within 1% and says which."),
    Flag("--model", "model", "word", "A model by name (`costmodel list models`), or its config.json."),
    Flag("--gpus", "cluster.gpus", "whole", "GPUs of the job: the world size. Default: the product of the degrees."),
    Flag("--nodes", "cluster.nodes", "whole", "Nodes they are spread over. Default: as few as hold them."),
    Flag("--gpu", "cluster.gpu", "word", "GPU by name (`costmodel list gpus`). Default: h100_sxm."),
    Flag("--cluster", "cluster.name", "word", "Node type by name (`costmodel list clusters`). Default: the GPU's usual one."),
    Flag("--slow-rank", "cluster.slow_rank", "number", "What if one rank computes so many times slower, 1.2 say: the others wait for it."),
    Flag("--link-factor", "cluster.link_factors", "factors", "What if links have a part of their rate: inter=0.5, or nvlink=0.8,network=0.5."),
    Flag("--strategy", "plan.strategy", "word", "single, dataparallel, ddp, zero1, zero2, zero3, fsdp, hsdp, megatron or megatron-fsdp."),
    Flag("--zero", "plan.zero", "whole", "ZeRO stage 0 to 3; 3 is FSDP2 in PyTorch, Megatron-FSDP in Megatron. Default: 0 (DDP)."),
    Flag("--framework", "plan.framework", "word", "Dialect: pytorch, deepspeed, megatron or nanochat. Default: pytorch."),
    Flag("--dp", "plan.dp", "whole", "Data-parallel degree. Default: the GPUs that tp, pp and cp leave."),
    Flag("--dp-replicate", "plan.dp_replicate", "whole", "Groups that each hold a copy of the state."),
    Flag("--dp-shard", "plan.dp_shard", "whole", "Ranks the state is split over; with --dp-replicate above 1: HSDP."),
    Flag("--tp", "plan.tp", "whole", "Tensor-parallel degree."),
    Flag("--sequence-parallel", "plan.sequence_parallel", "switch", "Split activations outside the tensor-parallel regions over tp."),
    Flag("--pp", "plan.pp", "whole", "Pipeline stages."),
    Flag("--schedule", "plan.schedule", "word", "Pipeline schedule: gpipe, 1f1b, interleaved, zb-h1, … Default: 1f1b."),
    Flag("--virtual-stages", "plan.virtual_stages", "whole", "Model chunks per pipeline rank, for interleaved schedules."),
    Flag("--cp", "plan.cp", "whole", "Context-parallel degree: ranks that share one sequence."),
    Flag("--cp-kind", "plan.cp_kind", "word", "How the ranks of a sequence see the whole of it: ring, allgather or ulysses. Default: ring."),
    Flag("--ep", "plan.ep", "whole", "Expert-parallel degree; it divides dp-shard x cp."),
    Flag("--checkpointing", "plan.checkpointing", "word", "none, full, full:4 (groups of 4 layers), every:2 (each second layer), "
         "selective (attention) or selective:op (keeps every other matmul). Default: none."),
    Flag("--seq-len", "recipe.seq_len", "whole", "Tokens in a sequence. Default: 4096."),
    Flag("--micro-batch", "recipe.micro_batch", "whole", "Sequences of one forward and backward of a data-parallel rank. Default: 1."),
    Flag("--grad-accum", "recipe.grad_accum", "whole", "Micro-batches before an optimizer step. Default: 1."),
    Flag("--global-batch", "recipe.global_batch", "whole", "Sequences of a step: micro-batch x grad-accum x dp."),
    Flag("--batch-tokens", "recipe.batch_tokens", "word", "Tokens of a step, like 4M, in place of --global-batch: the nearest number of sequences."),
    Flag("--train-tokens", "recipe.train_tokens", "word", "Tokens of the whole training, like 300B: its steps, days and GPU-hours."),
    Flag("--precision", "recipe.precision", "word", "fp32, tf32, fp16-mixed, bf16-mixed, bf16-pure or fp8. Default: bf16-mixed."),
    Flag("--optimizer", "recipe.optimizer", "word", "sgd, momentum, adam, adamw, adam8bit or muon; adamw:foreach names the kernel. "
         "Default: adamw."),
    Flag("--attention", "recipe.attention", "word", "Attention kernel: eager, sdpa, fa1, fa2, fa3 or cudnn. Default: sdpa."),
    Flag("--loss", "recipe.loss", "word", "Loss: eager (fp32 copy of the logits), bf16, chunked or fused. Default: eager."),
    Flag("--dropout", "recipe.dropout", "number", "Dropout probability. Default: 0."),
    Flag("--compile", "recipe.compile", "switch", "torch.compile, layer by layer. Default: off."),
    Flag("--profile", "profile", "word", "Machine constants (`costmodel list profiles`). Default: those of the GPU."),
)
_PANELS = {"params": MODEL, "model": MODEL, "cluster": MODEL, "profile": MODEL, "plan": SPREAD, "recipe": STEP}
BY_FIELD = {flag.field: flag for flag in FLAGS}
_BY_LAST_NAME = {flag.field.rpartition(".")[2]: flag for flag in FLAGS}


def flag_of(field: str) -> str:
    """How a field is given on the command line: its flag, else `--set field=…`."""
    if field in BY_FIELD:
        return BY_FIELD[field].name
    return f"--set {field}"


def _is_one_value(error: "PlanError") -> bool:
    return error.field.partition(".")[0] in ("model", "plan", "recipe") and "." in error.field and isinstance(error.value, str | int | float)


def as_flags(advice: str) -> str:
    """Advice in the words of a file ("Use zero = 3.") in those of the command line ("Use --zero 3.")."""
    def flag(match: re.Match[str]) -> str:
        name, value = match[1], match[2]
        known = _BY_LAST_NAME.get(name)
        if known is None:
            return match[0]
        if known.kind == "switch":
            return known.name if value == "true" else f"--no-{known.name[2:]}"
        return f"{known.name} {value.strip(chr(34))}"

    return re.sub(r'\b([a-z_]+) = ("[^"]*"|[\w-]+)', flag, advice)


class Origin(NamedTuple):
    """Where a field's value was written: the text to show, and whether that text already holds the value."""

    text: str
    holds_value: bool


@dataclass(frozen=True)
class Given:
    """What the user gave for a run: the input mapping of `costmodel.resolve`, and the origin of each field."""

    mapping: dict[str, Any]
    origins: dict[str, Origin]
    file: Path | None = None
    """The run file it came from."""
    flags: Mapping[str, Any] = default(default_factory=dict)
    """What was written behind each flag, by field."""
    settings: tuple[str, ...] = ()

    def on(self, file: Path) -> "Given":
        """The same flags on another run file."""
        return collect(file, self.flags, self.settings)

    def changed(self, text: str) -> "Given":
        """This run with more flags, written as on a command line, which override what was given."""
        import copy
        flags, settings = parsed(text)
        origins = {path: origin if not origin.holds_value else Origin(flag_of(path), False) for path, origin in self.origins.items()}
        mapping = copy.deepcopy(self.mapping)
        _merge(mapping, origins, flags, settings)
        return Given(mapping, origins, self.file)

    def read_from(self, path: Path) -> bool:
        """Whether the run was read from this very file."""
        return self.file is not None and path.exists() and path.samefile(self.file)

    @property
    def profile(self) -> str | None:
        """The profile asked for, by name or path."""
        value = self.mapping.get("profile")
        if value is not None and not isinstance(value, str):
            raise InputError(f"{self._subject('profile', value)}: is not the name of a profile. Use one of `costmodel list profiles`.")
        return value

    def resolve(self) -> "Resolved":
        """The Run and what was assumed; what is wrong with it is an InputError that names the flag or the file."""
        from costmodel.inputs import resolve
        with self.naming():
            return resolve(self.mapping)

    @contextmanager
    def naming(self) -> Iterator[None]:
        """A PlanError from inside becomes an InputError that names the flag or the file its field came from."""
        from costmodel.spec import PlanError
        try:
            yield
        except PlanError as error:
            raise InputError(self.message(error)) from error

    def message(self, error: "PlanError") -> str:
        """The error as one line: where the value was written, the value, the rule, what works."""
        error = self._as_written(error)
        field = self._written_field(error.field)
        if field is None and self.file is None and _is_one_value(error):
            return self._chosen(error)
        if field is not None:
            about = self._subject(field, error.value)
        else:
            is_table = isinstance(error.value, Mapping)
            inside = next((path for path in self.origins if is_table and path.startswith(f"{error.field}.")), None)
            about = subject(error) if inside is None else self._table(error.field, inside)
        by_flag = field is not None and self.origins[field].text.startswith("--") and not self.origins[field].text.startswith("--set")
        return f"{about}: {error.rule} {as_flags(error.fix) if by_flag else error.fix}"

    def _chosen(self, error: "PlanError") -> str:
        """The error about a value that nobody wrote, in words of the command line."""
        flag, (table, _, last) = flag_of(error.field), error.field.rpartition(".")
        fix = error.fix if error.field in BY_FIELD else re.sub(rf"\b({table}\.)?{last} = (\w+)", rf"{flag}=\2", error.fix)
        return f"{flag}{' ' if error.field in BY_FIELD else '='}{shown(error.value)} (not given, so chosen): {error.rule} {as_flags(fix)}"

    def _as_written(self, error: "PlanError") -> "PlanError":
        """An error about a derived field in terms of what was given: a batch for the accumulation, a strategy for a ZeRO stage."""
        from costmodel.inputs import strategy_key
        from costmodel.spec import PlanError
        field, value, rule, fix = error.field, error.value, error.rule, error.fix
        if field == "cluster.accelerator" and field not in self.origins and "cluster.gpu" in self.origins:
            field = "cluster.gpu"
        if "plan.strategy" in self.origins and "plan.zero" not in self.origins:
            words = ("ddp", "zero1", "zero2", "fsdp")
            if strategy_key(self.mapping["plan"]["strategy"]) == "megatronfsdp":
                words = ("megatron", "megatron and zero = 1", "megatron and zero = 2", "megatron-fsdp")
            fix = re.sub(r"\bzero = ([0-3])", lambda stage: f"strategy = {words[int(stage[1])]}", fix)
            if field == "plan.zero":
                field, value = "plan.strategy", self.mapping["plan"]["strategy"]
        if field == "recipe.grad_accum" and isinstance(value, int) and field not in self.origins and "recipe.global_batch" in self.origins:
            batch = self.mapping["recipe"]["global_batch"]
            fix = re.sub(r"\bgrad_accum = (\d+)", lambda count: f"global_batch = {int(count[1]) * (batch // value)}", fix)
            field, value, rule = "recipe.global_batch", batch, f"it makes grad_accum = {value}, and {rule}"
        return PlanError(field, value, rule, fix)

    def _written_field(self, field: str) -> str | None:
        """The written field an error is about: itself, the table around it, or the only one of that last name."""
        path = field
        while path:
            if path in self.origins:
                return path
            path = path.rpartition(".")[0]
        last = [name for name in self.origins if name.rpartition(".")[2] == field]
        if not last and field == "cluster":
            last = [name for name in self.origins if name == "cluster.name"]
        return last[0] if len(last) == 1 else None

    def _table(self, field: str, inside: str) -> str:
        """A table by one of the fields written inside it."""
        origin = self.origins[inside]
        return origin.text if origin.holds_value else origin.text.removesuffix(inside) + field

    def _subject(self, field: str, value: object) -> str:
        origin = self.origins[field]
        return origin.text if origin.holds_value else f"{origin.text} = {shown(value)}"


def collect(run_file: Path | None, flags: Mapping[str, Any], settings: Sequence[str]) -> Given:
    """Merge a run file, flags by field and `--set` assignments; the later override the earlier."""
    mapping: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    if run_file is not None:
        from costmodel.cli.files import read_run_file
        mapping = read_run_file(run_file)
        origins = {path: Origin(f"{run_file}: {path}", False) for path in _paths(mapping)}
    _merge(mapping, origins, flags, settings)
    return Given(mapping, origins, run_file, flags, tuple(settings))


def _merge(mapping: dict[str, Any], origins: dict[str, Origin], flags: Mapping[str, Any], settings: Sequence[str]) -> None:
    """Put flags and settings on top of what is there."""
    if "params" in flags and "model" in flags:
        raise InputError(f"--params {flags['params']} and --model {flags['model']}: a run has one model. Give one of the two.")
    for field, written in flags.items():
        flag = BY_FIELD[field]
        value = flag_value(flag, written)
        if field == "model" and str(value).lower().endswith(".json"):
            from costmodel.cli.files import model_of
            value = model_of(Path(str(value)))
        text = (flag.name if value else f"--no-{flag.name[2:]}") if flag.kind == "switch" else f"{flag.name} {shown(written)}"
        _drop_rivals(mapping, origins, field, value)
        _assign(mapping, origins, field, value, Origin(text, True))
    for setting in settings:
        field, equals, written = setting.partition("=")
        field = field.strip()
        if not equals or not all(field.split(".")):
            raise InputError(f"--set {shown(setting)}: it must be FIELD=VALUE. Write it like --set plan.tp=4.")
        value = toml_scalar(written.strip())
        _drop_rivals(mapping, origins, field, value)
        _assign(mapping, origins, field, value, Origin(f"--set {field}={shown(written)}", True))


def parsed(text: str) -> tuple[dict[str, Any], list[str]]:
    """Flags of a run and `--set` assignments, written as on a command line: by field what is behind each, and the assignments."""
    import shlex
    names = {flag.name: (flag, True) for flag in FLAGS} | {f"--no-{flag.name[2:]}": (flag, False) for flag in FLAGS if flag.kind == "switch"}
    try:
        words = iter(shlex.split(text))
    except ValueError as error:
        raise InputError(f"{shown(text)}: {error}.") from None
    flags: dict[str, Any] = {}
    settings: list[str] = []
    for word in words:
        name, equals, written = word.partition("=")
        flag, on = names.get(name, (None, True))
        if flag is None and name != "--set":
            raise InputError(f"{shown(text)}: {shown(word)} is not an option of a run. Write it like --gpus 16, or --set plan.tp=4.")
        if flag is not None and flag.kind == "switch":
            flags[flag.field] = on
            continue
        value = written if equals else next(words, None)
        if value is None:
            raise InputError(f"{shown(text)}: {name} needs a value.")
        if flag is None:
            settings.append(value)
        else:
            flags[flag.field] = value
    return flags, settings


def also(given: Given, field: str, value: Any, text: str) -> Given:
    """What was given, with one more field, which a command's own option wrote."""
    import copy
    mapping, origins = copy.deepcopy(given.mapping), dict(given.origins)
    _assign(mapping, origins, field, value, Origin(text, True))
    return Given(mapping, origins, given.file, given.flags, given.settings)


def toml_scalar(text: str) -> Any:
    """A TOML value (4, 0.1, true, "x", [1, 2]); any other text is the text itself."""
    import tomllib
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, ValueError, RecursionError):
        return text
    value = parsed["value"]
    return value if len(parsed) == 1 and isinstance(value, bool | int | float | str | list | dict) else text


def flag_value(flag: Flag, written: Any) -> Any:
    """What was written behind a flag, as the kind of value it takes."""
    if flag.kind in ("word", "switch"):
        return written
    if flag.kind == "factors":
        return _factors(flag, str(written))
    try:
        return int(written) if flag.kind == "whole" else float(written)
    except ValueError:
        rule = "must be a whole number" if flag.kind == "whole" else "must be a number"
        raise InputError(f"{flag.name} {shown(written)}: {rule}. Use {flag.name} {EXAMPLES.get(flag.name, '1')}.") from None


def _factors(flag: Flag, written: str) -> dict[str, float]:
    """"inter=0.5,nvlink=0.8" as a table."""
    out = {}
    for part in written.split(","):
        name, equals, factor = (text.strip() for text in part.partition("="))
        try:
            out[name] = float(factor)
        except ValueError:
            equals = ""
        if not name or not equals:
            raise InputError(f"{flag.name} {shown(written)}: it must be LINK=X. Use {flag.name} inter=0.5.")
    return out


def _paths(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in mapping.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from _paths(value, f"{path}.")
        else:
            yield path


def _follows(mapping: dict[str, Any], origins: dict[str, Origin], field: str) -> list[str]:
    """Of a file that holds a whole cluster (an answer of --json): what follows again from a field of the cluster or a degree. The device
    and the number of GPUs stay, unless the field says otherwise."""
    cluster, section = mapping.get("cluster"), field.partition(".")[0]
    if not isinstance(cluster, dict) or not isinstance(cluster.get("accelerator"), Mapping) or section != "cluster" and field not in DEGREES:
        return []
    if field.startswith(WHAT_IFS):
        return []
    if section == "cluster":
        mapping["cluster"] = {"gpu": cluster["accelerator"].get("name"), "gpus": None if field == "cluster.nodes" else cluster.get("gpus")}
        for path in [path for path in origins if path.startswith("cluster.")]:
            del origins[path]
    return [path for path in ("plan.dp_replicate", "plan.dp_shard", "recipe.global_batch") if path != field and _from_file(origins, path)]


BATCH = ("micro_batch", "grad_accum", "global_batch")
WHAT_IFS = ("cluster.slow_rank", "cluster.link_factors")
"""Fields of a cluster that change nothing else of it."""
DEGREES = frozenset({"plan.strategy", "plan.zero", "plan.tp", "plan.pp", "plan.cp", "plan.dp", "plan.dp_replicate", "plan.dp_shard"})


def _drop_rivals(mapping: dict[str, Any], origins: dict[str, Origin], field: str, value: Any) -> None:
    """Take out what says the same thing in other words: a model for params, a strategy for a ZeRO stage, the batch figure of a file
    that the two others give."""
    rivals = [*{"params": ["model"], "model": ["params"]}.get(field, []), *_follows(mapping, origins, field)]
    said = {"recipe.batch_tokens": ("recipe.global_batch", "recipe.grad_accum"), "recipe.global_batch": ("recipe.batch_tokens",)}.get(field, ())
    rivals += [rival for rival in said if _from_file(origins, rival)]
    written = [f"recipe.{key}" for key in BATCH if f"recipe.{key}" in {*origins, field}]
    if field in written and len(written) == 3:
        rival = "recipe.grad_accum" if field == "recipe.global_batch" else "recipe.global_batch"
        rivals += [rival] if _from_file(origins, rival) else []
    plan = mapping.get("plan")
    if isinstance(plan, dict):
        from costmodel.inputs import STRATEGY_FIELDS, strategy_key
        if field == "plan.strategy":
            means = STRATEGY_FIELDS.get(strategy_key(value), {})
            rivals += [f"plan.{key}" for key in means if key in plan and _from_file(origins, f"plan.{key}")]
        elif field.startswith("plan.") and plan.get("strategy") is not None and _from_file(origins, "plan.strategy"):
            means = STRATEGY_FIELDS.get(strategy_key(plan["strategy"]), {})
            if means.get(field.removeprefix("plan."), value) != value:
                rivals.append("plan.strategy")
    for rival in dict.fromkeys(rivals):
        section, _, key = rival.rpartition(".")
        inside = mapping.get(section) if section else mapping
        if isinstance(inside, dict):
            inside.pop(key, None)
        _forget(origins, rival)


def _from_file(origins: Mapping[str, Origin], field: str) -> bool:
    return field in origins and not origins[field].holds_value


def _forget(origins: dict[str, Origin], field: str) -> None:
    for path in [p for p in origins if p == field or p.startswith(f"{field}.")]:
        del origins[path]


def _assign(mapping: dict[str, Any], origins: dict[str, Origin], field: str, value: Any, origin: Origin) -> None:
    """Set a field by its dotted path. A word on the way becomes the table it stands for, so that one field of it can change."""
    *tables, last = field.split(".")
    inside = mapping
    for depth, key in enumerate(tables):
        below = inside.get(key)
        if not isinstance(below, dict):
            below = {} if below is None else _table_of(".".join(tables[: depth + 1]), below, origin)
            inside[key] = below
        inside = below
    _forget(origins, field)
    inside[last] = value
    origins[field] = origin


def _table_of(path: str, word: Any, origin: Origin) -> dict[str, Any]:
    key = "name" if path == "cluster" else "base"
    if path not in ("model", "cluster", "recipe.precision", "recipe.optimizer", "plan.checkpointing"):
        raise InputError(f"{origin.text}: {path} = {shown(word)} is a value, not a table of fields. Use --set {path}=VALUE.")
    return {key: word}


class SectionedCommand(TyperCommand):
    """A command whose --help groups the options in plain text."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                argument = parameter.param_type_name == "argument"
                panel = "Arguments" if argument else getattr(parameter, "rich_help_panel", None) or "Options"
                sections.setdefault(panel, []).append(record)
        for panel, records in sections.items():
            with formatter.section(panel):
                formatter.write_dl(records)


def takes_run(command: Callable[Concatenate[Given, P], R]) -> Callable[..., R]:
    """Give a command the options of a run in place of its first parameter, which receives them as a `Given`."""
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    shared = _parameters()
    names = [p.name for p in shared]

    def with_options(**values: Any) -> R:
        given = {name: values.pop(name) for name in names}
        del given["debug"]
        run_file, settings = given.pop("run"), given.pop("set") or []
        flags = {flag.field: given[flag.parameter] for flag in FLAGS if given[flag.parameter] is not None}
        return command(collect(run_file, flags, settings), **values)  # type: ignore[call-arg]

    parameters = [*shared, *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own)]
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {p.name: p.annotation for p in parameters}
    with_options.__doc__, with_options.__name__ = command.__doc__, command.__name__
    return with_options


def _parameters() -> list[inspect.Parameter]:
    argument = typer.Argument(metavar="RUN", show_default=False, help="A run file: TOML, YAML or JSON.")
    made = [_parameter("run", Annotated[Path | None, argument])]
    for flag in FLAGS:
        panel = _PANELS[flag.field.partition(".")[0]]
        if flag.kind == "switch":
            kind: Any = bool | None
            option = typer.Option(f"{flag.name}/--no-{flag.name[2:]}", help=flag.help, show_default=False, rich_help_panel=panel)
        else:
            kind = str | None
            option = typer.Option(flag.name, metavar=_METAVAR[flag.kind], help=flag.help, show_default=False, rich_help_panel=panel)
        made.append(_parameter(flag.parameter, Annotated[kind, option]))
    made.append(_parameter("set", Annotated[list[str] | None, typer.Option(
        "--set", metavar="FIELD=VALUE", help="Set any field of the run, like --set plan.tp=4. Repeatable.", show_default=False)]))
    made.append(_parameter("debug", Annotated[bool, typer.Option(
        "--debug", help="Show the traceback of an error.", callback=set_debug, is_eager=True, show_default=False)], False))
    return made


def _parameter(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
