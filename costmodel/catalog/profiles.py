"""Profiles: the constants of a machine, each with its unit, its uncertainty and where it comes from.

The shipped constants lie in three kinds of file, merged for one Run: the hardware file of its accelerator (with the
links its topology has), the software file of its framework, and the host constants of its machine. Every constant is a
table `{value, unit, log_sd, basis, source}`, with `date` and `versions` where it was measured; nested tables make dotted keys such as
"matmul.bf16.peak_share". A file's name in the tree is the constant's place: "hardware.h100_sxm", "links.shm", "software.pytorch",
"hosts.cpu". A file of one's own may give constants as they apply to every run, or under the place they replace: one file then
holds several machines, and a run takes what it would have taken from the shipped file of that place.
"""

import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, get_args

from costmodel.catalog.machines import Machine, machines_of
from costmodel.spec.base import PlanError
from costmodel.spec.cluster import Accelerator, Cluster
from costmodel.spec.plan import Plan

ConstantBasis = Literal["fitted", "measured", "datasheet", "assumed"]
DATA = Path(__file__).parent / "data" / "profiles"


class Constant(NamedTuple):
    """One constant of a machine.

    `log_sd` is the standard deviation of the natural logarithm of the value: 0.1 means that about two machines in
    three lie within 10%. `basis` says how the value was found; `source` says from what.
    """

    value: float
    unit: str
    log_sd: float
    source: str
    basis: ConstantBasis
    date: str = ""
    """When it was measured or fitted, ISO 8601."""
    versions: str = ""
    """Of what it was measured with: "torch 2.13.0"."""
    place: str = ""
    """The shipped file that gives it, such as "hardware.h100_sxm"."""


PLACES = ("hardware", "links", "software", "hosts")
GIVEN = ("value", "unit", "log_sd", "source", "basis", "date", "versions")
"""What a table of a file may hold."""


class MissingConstantError(KeyError):
    """A key that no file of the profile defines."""

    def __init__(self, profile: str, key: str, near: list[str]) -> None:
        self.profile, self.key, self.near = profile, key, near
        super().__init__(profile, key, near)

    def __str__(self) -> str:
        hint = f" Did you mean {' or '.join(self.near)}?" if self.near else " Add it to the profile, or use another."
        return f"profile {self.profile} has no constant {self.key!r}.{hint}"


@dataclass(frozen=True, slots=True)
class Profile:
    """The constants that price one Run. `guess` marks hardware for which no measured matrix multiplication is known."""

    name: str
    guess: bool
    constants: Mapping[str, Constant]
    machines: tuple[Machine, ...] = ()
    """What it was fitted on, where its file says so."""

    def constant(self, key: str) -> Constant:
        """The constant with its unit, uncertainty and source."""
        found = self.constants.get(key)
        if found is None:
            raise MissingConstantError(self.name, key, get_close_matches(key, self.constants, n=2))
        return found

    def value(self, key: str) -> float:
        """The constant's value, in the unit it states."""
        return self.constant(key).value

    def get(self, key: str, default: float) -> float:
        """The constant's value, or `default` where the profile has none: for effects that only some machines show."""
        found = self.constants.get(key)
        return default if found is None else found.value

    def keys(self) -> tuple[str, ...]:
        """Every key, in alphabetical order."""
        return tuple(sorted(self.constants))

    def replace(self, values: Mapping[str, float | Constant], name: str | None = None) -> "Profile":
        """This profile with some constants changed; a plain number keeps the unit, uncertainty and source."""
        merged = dict(self.constants)
        for key, new in values.items():
            merged[key] = new if isinstance(new, Constant) else self.constant(key)._replace(value=float(new))
        return Profile(name or self.name, self.guess, merged, self.machines)


class HasHardware(Protocol):
    """What `load_profile` reads of a Run."""

    @property
    def cluster(self) -> Cluster: ...
    @property
    def plan(self) -> Plan: ...


@cache
def list_profiles() -> tuple[str, ...]:
    """Names of the shipped hardware profiles; any of them can be asked for by `load_profile(run, name)`."""
    return tuple(sorted(p.stem for p in (DATA / "hardware").glob("*.toml") if p.stem != "common"))


def load_profile(run: HasHardware, name: str | None = None) -> Profile:
    """The constants for a Run: hardware, links, software and host files, merged.

    name: None takes the shipped constants of the Run's accelerator and framework; a shipped name ("h100_sxm") takes
    that hardware's; a path to a .toml file puts its constants on top of the shipped ones. Such a file may give a
    table like the shipped files do, or a bare number, which keeps the shipped unit and source; under a place
    ([hardware.h100_sxm.matmul]) it applies to the runs that take the constant from there.
    """
    if name is None or not name.endswith(".toml"):
        return _shipped(run, name)
    base = _shipped(run, None)
    return _override(base, Path(name))


def hardware_name(accelerator: Accelerator) -> str:
    """The shipped hardware file for an accelerator: its own, its kind's (CPU), or its vendor's fallback."""
    known = list_profiles()
    if accelerator.name in known:
        return accelerator.name
    if accelerator.kind == "cpu":
        return "cpu"
    vendor = f"vendor_{accelerator.vendor}"
    return vendor if vendor in known else "vendor_other"


def _shipped(run: HasHardware, name: str | None) -> Profile:
    c = run.cluster
    kinds = tuple(dict.fromkeys(level.kind for level in c.levels))
    return _merged(name, hardware_name(c.accelerator), c.accelerator.name, c.accelerator.architecture, kinds, run.plan.framework, c.host)


@cache
def _merged(name: str | None, own_hardware: str, accelerator: str, architecture: str, kinds: tuple[str, ...], framework: str, host: str) -> Profile:
    if name is not None and name not in list_profiles():
        near = get_close_matches(name, list_profiles(), n=3) or list_profiles()[:3]
        raise PlanError("profile", name, "no profile of that name is shipped.", f"Use {', '.join(near)}, or a path to a .toml file.")
    hardware = name or own_hardware
    meta, own = _hardware(hardware)
    merged = _links(architecture, kinds)
    merged |= own
    for base in ("pytorch",) if framework == "pytorch" else ("pytorch", framework):
        merged |= _constants(f"software/{base}.toml")
    host = host if host != "generic" else str(meta.get("host", "generic"))
    merged["host.multiplier"] = _host(host)
    label = hardware if hardware == accelerator else f"{accelerator} as {hardware}"
    return Profile(f"{label} / {framework} / {host}", bool(meta.get("guess", False)), merged)


@cache
def _hardware(name: str) -> tuple[dict[str, Any], dict[str, Constant]]:
    """The meta keys (guess, host) and constants of a hardware file, on top of what it is like."""
    data = _read(f"hardware/{name}.toml")
    like = data.get("like")
    if like:
        meta, constants = _hardware(like)
    else:
        meta, constants = {}, {} if name == "cpu" else _constants("hardware/common.toml")
    own = {k: v for k, v in data.items() if not isinstance(v, dict)}
    return {**meta, **own}, {**constants, **_constants(f"hardware/{name}.toml")}


def _links(generation: str, kinds: tuple[str, ...]) -> dict[str, Constant]:
    """Constants of the links a cluster has, as link.<kind>.<name>.

    A file `<kind>_<architecture>` wins over `<kind>`; architectures fall back on their stem (blackwell_ultra, blackwell).
    """
    common = _read("links/all.toml")["all"]
    merged: dict[str, Constant] = {}
    for kind in kinds:
        stems = (f"{kind}_{generation}", f"{kind}_{generation.partition('_')[0]}", kind)
        file = next(s for s in stems if s == kind or (DATA / "links" / f"{s}.toml").is_file())
        merged |= {f"link.{kind}.{key}": _constant(table, "links.all") for key, table in common.items()}
        merged |= _constants(f"links/{file}.toml")
    return merged


def _host(kind: str) -> Constant:
    hosts = _read("hosts.toml")
    if kind not in hosts:
        raise PlanError("cluster.host", kind, "no constants are known for this kind of host.", f"Use {' or '.join(sorted(hosts))}.")
    return _constant(hosts[kind]["multiplier"], f"hosts.{kind}")


@cache
def _read(file: str) -> dict[str, Any]:
    return tomllib.loads((DATA / file).read_text(encoding="utf-8"))


@cache
def _constants(file: str) -> dict[str, Constant]:
    place = file.removesuffix(".toml").replace("/", ".")
    return {key: _constant(table, place) for key, table in _flat(_read(file))}


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every constant's table with its dotted key."""
    for key, item in data.items():
        if isinstance(item, dict):
            if "value" in item:
                yield prefix + key, item
            else:
                yield from _flat(item, f"{prefix}{key}.")


def _constant(table: Mapping[str, Any], place: str) -> Constant:
    return Constant(float(table["value"]), table["unit"], float(table["log_sd"]), table["source"], table["basis"], table.get("date", ""),
                    table.get("versions", ""), place)


@cache
def constants_at(place: str) -> Mapping[str, Constant]:
    """The constants that the shipped file of a place gives; none where there is no such file."""
    room, _, name = place.partition(".")
    if room == "hosts":
        return {"host.multiplier": _host(name)} if name in _read("hosts.toml") else {}
    if place == "links.all":
        common = _read("links/all.toml")["all"]
        kinds = dict.fromkeys(p.stem.partition("_")[0] for p in sorted((DATA / "links").glob("*.toml")) if p.stem != "all")
        return {f"link.{kind}.{key}": _constant(table, place) for kind in kinds for key, table in common.items()}
    return _constants(f"{room}/{name}.toml") if room in PLACES and (DATA / room / f"{name}.toml").is_file() else {}


def _override(base: Profile, path: Path) -> Profile:
    """Constants of a user's file on top of the shipped ones; every mistake names its key."""
    data = _parsed(path)
    label, machines = data.pop("name", path.stem), _machines(data, path)
    new: dict[str, Constant] = {}
    for place, key, constant in _placed(data, path):
        if key in base.constants and base.constants[key].place == place:
            new[key] = constant
    for key, item in _entries({k: v for k, v in data.items() if k not in PLACES}):
        shipped = base.constants.get(key)
        if shipped is None:
            near = get_close_matches(key, base.constants, n=2)
            raise PlanError("profile", key, f"{path.name} sets a constant that does not exist for this run.",
                            f"Use {' or '.join(near)}." if near else "Remove it.")
        new[key] = _checked(key, item, shipped, path)
    found = base.replace(new, f"{label} over {base.name}")
    return Profile(found.name, found.guess, found.constants, machines)


def file_constants(path: Path) -> dict[tuple[str, str], Constant]:
    """(place, key) -> constant of a user's file; the place is empty for what it gives to every run. Raises PlanError."""
    data = _parsed(path)
    data.pop("name", None)
    _machines(data, path)
    found = {(place, key): constant for place, key, constant in _placed(data, path)}
    for key, item in _entries({k: v for k, v in data.items() if k not in PLACES}):
        found["", key] = _checked(key, item, Constant(0.0, item.get("unit", ""), 0.0, path.name, "assumed"), path)
    return found


def file_machines(path: Path) -> tuple[Machine, ...]:
    """The machines that a user's file says it was fitted on. Raises PlanError."""
    return _machines(_parsed(path), path)


def _parsed(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PlanError("profile", path, "there is no such file.", f"Use a path to a .toml file, or one of {', '.join(list_profiles())}.") from None
    except UnicodeDecodeError:
        raise PlanError("profile", path, "the file is not UTF-8 text.", "Save it as UTF-8.") from None
    except tomllib.TOMLDecodeError as error:
        raise PlanError("profile", path, f"the file is not valid TOML ({error}).", "Correct that line.") from None


def _machines(data: dict[str, Any], path: Path) -> tuple[Machine, ...]:
    """The machines of a file, taken out of it."""
    return machines_of(data.pop("machine"), path) if "machine" in data else ()


def _placed(data: Mapping[str, Any], path: Path) -> Iterator[tuple[str, str, Constant]]:
    """(place, key, constant) of all that a file gives under places."""
    for room in PLACES:
        files = data.get(room, {})
        for name, tables in files.items() if isinstance(files, dict) else ():
            place = f"{room}.{name}"
            shipped = constants_at(place)
            if not shipped:
                raise PlanError("profile", place, f"{path.name} gives constants for it, and no shipped file has that name.",
                                "Use a place such as hardware.h100_sxm, software.pytorch, links.shm or hosts.cpu.")
            for key, item in _entries(tables if isinstance(tables, dict) else {}):
                if key not in shipped:
                    near = get_close_matches(key, shipped, n=2)
                    raise PlanError("profile", f"{place}: {key}", f"{path.name} sets a constant that {place} does not have.",
                                    f"Use {' or '.join(near)}." if near else "Remove it.")
                yield place, key, _checked(key, item, shipped[key], path)


def _entries(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for key, item in data.items():
        if isinstance(item, dict) and "value" not in item:
            yield from _entries(item, f"{prefix}{key}.")
        else:
            yield prefix + key, item if isinstance(item, dict) else {"value": item}


def _checked(key: str, table: Mapping[str, Any], shipped: Constant, path: Path) -> Constant:
    unknown = set(table) - set(GIVEN)
    if unknown:
        raise PlanError("profile", f"{key}.{sorted(unknown)[0]}", f"a constant has {', '.join(GIVEN[:-1])} and {GIVEN[-1]}.", "Remove it.")
    for field in ("value", "log_sd"):
        number = table.get(field, 0.0)
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number) or number < 0:
            raise PlanError("profile", f"{key}.{field} = {number!r}", "it must be a finite number that is not negative.",
                            f"Use {getattr(shipped, field):g}, the shipped one.")
    if table.get("unit", shipped.unit) != shipped.unit:
        raise PlanError("profile", f"{key}.unit = {table['unit']!r}", f"this constant is in {shipped.unit}.",
                        f'Convert it, or use unit = "{shipped.unit}".')
    basis = table.get("basis", shipped.basis)
    if basis not in get_args(ConstantBasis):
        raise PlanError("profile", f"{key}.basis = {basis!r}", "a constant is fitted, measured, datasheet or assumed.",
                        'Use basis = "measured".')
    return Constant(float(table["value"]), shipped.unit, float(table.get("log_sd", shipped.log_sd)),
                    str(table.get("source", path.name)), basis, str(table.get("date", "")), str(table.get("versions", "")), shipped.place)
