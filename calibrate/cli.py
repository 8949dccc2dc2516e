"""`calibrate probe | fit | show | diff`."""

import json
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from calibrate import ScipyMissing, require_scipy
from costmodel.cli.files import write_whole
from costmodel.cli.guard import GuardedGroup, InputError, set_debug

if TYPE_CHECKING:
    from collections.abc import Callable

    from costmodel.render.text import Page

app = typer.Typer(name="calibrate", cls=GuardedGroup, rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False,
                  no_args_is_help=True, context_settings={"max_content_width": 100},
                  help="Fit the constants that costmodel predicts with to a machine, and say how sure they are.")


@app.callback()
def _program(
    debug: Annotated[bool, typer.Option("--debug", callback=set_debug, is_eager=True, help="Show the traceback of an error.",
                                        show_default=False)] = False,
) -> None:
    """Exit codes: 0 done, 1 unexpected error, 2 bad input or a package is missing."""


@app.command()
def fit(
    records: Annotated[list[Path], typer.Argument(metavar="RECORDS…", help="Records (.json, .jsonl, folders) of execute and of calibrate probe.",
                                                  show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="PROFILE.toml", help="The profile to write.", show_default=False)],
    base: Annotated[str | None, typer.Option("--base", metavar="PROFILE", show_default=False,
                                             help="Constants before the fit, and their uncertainty. Default: the shipped ones.")] = None,
    constants: Annotated[list[str] | None, typer.Option("--constants", metavar="PATTERN", show_default=False,
                                                        help="Fit only these, such as 'bandwidth.*' or 'hosts.cpu: *'; may be given again.")] = None,
    loosen: Annotated[float, typer.Option("--loosen", metavar="FACTOR", min=0.01, help="Take the base profile's uncertainties this many times as wide.")] = 1.0,
    apart: Annotated[float, typer.Option("--apart", metavar="SHARE", min=0.0, help="What sources differ by that no constant has, such as 0.05 for "
                                         "publishers with software of their own.")] = 0.0,
    name: Annotated[str, typer.Option("--name", help="Name of the profile. Default: the file's.", show_default=False)] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON (docs/calibrating.md) instead of the text.", show_default=False)] = False,
) -> None:
    """Fit constants to records and probes; write those that the records determine."""
    _need_scipy()
    from calibrate.crossvalidation import hold_out
    from calibrate.fit import FitError, candidates
    from calibrate.fit import fit as fit_evidence
    from calibrate.profiles import fitted_profile
    from calibrate.reading import ReadingError, read_files
    from calibrate.report import SPLITS, data, text
    if output.suffix.lower() != ".toml":
        raise InputError(f"-o {output}: a profile is a .toml file. Name it so.")
    try:
        read = read_files(records, base)
        print(f"{len(read.evidence)} pieces of evidence read, {len(read.skipped)} left out; fitting", file=sys.stderr)
        patterns = constants or []

        def wanted(place: str, key: str) -> bool:
            return not patterns or any(fnmatchcase(key, p) or fnmatchcase(f"{place}: {key}", p) for p in patterns)

        chosen = candidates(read.evidence, wanted, loosen)
        exact = [p for p in chosen if p.key in patterns or p.name in patterns]
        found = fit_evidence(read.evidence, chosen, required=exact, apart=apart)
    except (ReadingError, FitError) as error:
        raise InputError(str(error)) from None
    held = {by: hold_out(found, by) for by in SPLITS}
    write_whole(output, fitted_profile(found, held, name or output.stem, read.dates, read.versions, read.machines))
    from costmodel.render.text import Page, screen_width, wants_colour
    if as_json:
        print(json.dumps(data(found, held, read.skipped), indent=1, allow_nan=False))
    else:
        print(text(found, held, read.skipped, Page(max(110, screen_width(sys.stdout)), wants_colour(sys.stdout))), end="")
    print(f"wrote {output}", file=sys.stderr)


@app.command()
def probe(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="PROBE.json", help="The file to write.", show_default=False)] = Path("probe.json"),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and repeats: under 90 s on two cores.", show_default=False)] = False,
    device: Annotated[str, typer.Option("--device", metavar="cpu|cuda", help="Default: the GPU where there is one.", show_default=False)] = "",
    ranks: Annotated[int | None, typer.Option("--ranks", metavar="N", min=1, show_default=False,
                                              help="Processes that talk to one another. Default: the GPUs, or the cores up to 8.")] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", metavar="NAME", show_default=False,
                                            help="The catalogue's accelerator, where it is not recognised.")] = None,
) -> None:
    """Measure this machine: kernels, launches, collectives, contention, and its links."""
    try:
        from execute import require_torch
        require_torch()
    except ImportError as error:
        raise InputError(str(error)) from None
    import torch

    from calibrate.probe.machine import UnknownDevice
    from calibrate.probe.run import probe_machine
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if chosen not in ("cpu", "cuda"):
        raise InputError(f"--device {device}: it measures a CPU or CUDA devices. Use cpu or cuda.")
    if chosen == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: PyTorch sees no GPU here. Use --device cpu.")
    if output.suffix.lower() != ".json":
        raise InputError(f"-o {output}: a probe is a .json file. Name it so.")
    progress = Progress(sys.stderr)
    try:
        found = probe_machine(chosen, ranks, gpu, quick, progress.say)
    except UnknownDevice as error:
        raise InputError(str(error)) from None
    finally:
        progress.end()
    write_whole(output, json.dumps(found.to_dict(), indent=1) + "\n")
    print(f"{len(found.samples)} samples of {found.cluster.gpus} x {found.cluster.accelerator.name} on {found.environment.host}")
    for line in found.links:
        print(f"  {line}")
    print(f"wrote {output}", file=sys.stderr)


RecordsOption = Annotated[list[Path] | None, typer.Option("--records", metavar="RECORDS", show_default=False,
                                                           help="Predict these records and probes too, and plot; may be given again.")]


@app.command()
def show(
    profile: Annotated[str, typer.Argument(metavar="PROFILE", help="A .toml file, or a shipped accelerator's name.", show_default=False)],
    records: RecordsOption = None,
) -> None:
    """The constants of a profile, and how well it predicts some records."""
    _need_scipy()
    from calibrate.show import show as shown
    _print(lambda page: shown(profile, records or [], page))


@app.command()
def diff(
    first: Annotated[str, typer.Argument(metavar="A", help="A .toml file, or a shipped accelerator's name.", show_default=False)],
    second: Annotated[str, typer.Argument(metavar="B", help="Another.", show_default=False)],
    records: RecordsOption = None,
) -> None:
    """Where two profiles differ, and how well each predicts some records."""
    _need_scipy()
    from calibrate.show import diff as differing
    _print(lambda page: differing(first, second, records or [], page))


def _print(write: "Callable[[Page], str]") -> None:
    from calibrate.reading import ReadingError
    from costmodel.render.text import Page, screen_width, wants_colour
    try:
        print(write(Page(max(110, screen_width(sys.stdout)), wants_colour(sys.stdout))), end="")
    except ReadingError as error:
        raise InputError(str(error)) from None


class Progress:
    """One line that is written over on a terminal; in a file, a line now and then."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream, self.said = stream, 0
        self.live = stream.isatty()

    def say(self, text: str) -> None:
        self.said += 1
        if self.live:
            self.stream.write(f"\r\x1b[K{text[:100]}")
        elif self.said % 25 == 1:
            self.stream.write(text + "\n")
        self.stream.flush()

    def end(self) -> None:
        if self.live and self.said:
            self.stream.write("\n")


def _need_scipy() -> None:
    try:
        require_scipy()
    except ScipyMissing as error:
        raise InputError(str(error)) from None
