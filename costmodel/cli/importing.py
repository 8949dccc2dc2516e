"""`costmodel import`: a run file from the configuration of another program."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from costmodel.cli.files import read_foreign_file, write_whole
from costmodel.cli.guard import InputError, shown
from costmodel.cli.options import toml_scalar

Files = Annotated[list[Path], typer.Argument(
    metavar="FILE...", show_default=False, help="config.json of the Hugging Face hub; a launch script of Megatron-LM or Megatron-DeepSpeed; DeepSpeed's JSON; "
    "YAML of GPT-NeoX, nanotron or axolotl; TOML of torchtitan; a model of SimuMax or DeepSeek. Of several files, the later one's fields win.")]


def import_(
    files: Files,
    env: Annotated[list[str] | None, typer.Option("--env", metavar="NAME=VALUE", show_default=False,
                                                  help="A variable of a launch script, or one of its arguments (1=…). Repeatable.")] = None,
    kind: Annotated[str | None, typer.Option("--as", metavar="WORD", show_default=False, help="Read a config.json as this model_type: llama, say.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", show_default=False,
                                                       help="Set a field of the run, like --set model.vocab=50304. Repeatable.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", show_default=False, help="Write the run file here (.toml).")] = None,
) -> None:
    """Make a run file from the configuration of another training program.

    Every field says where it was read; what has no field, what is missing and what nobody looked at stands in comments. `costmodel predict` takes the file,
    with flags for what is missing: --gpus 64, say.
    """
    from costmodel.foreign.run_file import text_of
    if output is not None and output.suffix.lower() != ".toml":
        raise InputError(f"-o {output}: a run file is written as TOML. Use {output.with_suffix('.toml')}.")
    given = dict(_assignment("--env", item) for item in env or [])
    found = None
    for path in files:
        if output is not None and output.exists() and path.exists() and output.samefile(path):
            raise InputError(f"-o {output}: it would overwrite the file that is read. Use another name.")
        one = read_foreign_file(path, given, kind)
        found = one if found is None else one.over(found)
    assert found is not None
    for item in settings or []:
        field, value = _assignment("--set", item)
        found.say(field, toml_scalar(value), "--set")
        found.missing = {name: why for name, why in found.missing.items() if name != field and not name.startswith(f"{field}.")}
    text = text_of(found, [path.name for path in files])
    if output is None:
        print(text, end="")
    else:
        write_whole(output, text)
        print(f"wrote {output}", file=sys.stderr)
    for item in found.lost:
        print(f"warning: no field of a run says {item}; what is predicted is without it", file=sys.stderr)
    for field, why in found.missing.items():
        print(f"missing: {field} ({why})", file=sys.stderr)


def _assignment(flag: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise InputError(f"{flag} {shown(text)}: it must be {'FIELD' if flag == '--set' else 'NAME'}=VALUE.")
    return name.strip(), value.strip()
