"""What a configuration file of another program says of a run, and how a reader of such files takes it down."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Said(NamedTuple):
    """A field's value, and where the file says so, in its own words."""

    value: Any
    source: str


class Foreign:
    """The fields of a run (dotted paths of a run file) that a file of `program` decides, and what is to be said of the rest."""

    def __init__(self, program: str) -> None:
        self.program = program
        self.fields: dict[str, Said] = {}
        self.notes: list[str] = []
        """What a reader had to decide."""
        self.lost: list[str] = []
        """Settings that change memory or time, and for which a run has no field."""
        self.missing: dict[str, str] = {}
        """Fields that the file leaves to something else, and to what."""
        self.unread: list[str] = []
        """Keys that no reader looked at: paths, logging, learning rates, and what is not known."""

    def say(self, field: str, value: Any, source: str) -> None:
        """A field of the run, as a key of the file gives it."""
        self.fields[field] = Said(value, source)

    def get(self, field: str, default: Any = None) -> Any:
        """What has been said of a field."""
        said = self.fields.get(field)
        return default if said is None else said.value

    def needs(self, keys: "Keys", table: str, named: Iterable[tuple[str, str]]) -> None:
        """Whole numbers, by field and key, that a run cannot do without."""
        for field, key in named:
            if (value := keys.count(key)) is not None:
                self.say(f"{table}.{field}", value, f"{keys.prefix}{key}")
            else:
                self.lacks(f"{table}.{field}", f"{keys.prefix}{key}")

    def lacks(self, field: str, why: str) -> None:
        """A field that is needed, and that the file does not say."""
        if field not in self.fields:
            self.missing[field] = why

    @property
    def params(self) -> int | None:
        """Parameters of the model, where all of it is said."""
        from pydantic import ValidationError

        from costmodel.spec.base import PlanError
        from costmodel.spec.model import Model
        shape = self.given().get("model")
        try:
            return Model.model_validate(shape).params if isinstance(shape, Mapping) else None
        except (ValidationError, PlanError):
            return None

    def over(self, base: "Foreign") -> "Foreign":
        """Two files of one run: this one's fields on top of the other's."""
        both = Foreign(f"{base.program}, {self.program}" if base.program != self.program else self.program)
        words = self.fields.keys() & {"params", "model"}
        both.fields = {k: v for k, v in base.fields.items() if not (words and (k in ("params", "model") or k.startswith("model.")))} | self.fields
        both.notes, both.lost, both.unread = base.notes + self.notes, base.lost + self.lost, base.unread + self.unread
        named = any(field.partition(".")[0] == "model" for field in both.fields)
        both.missing = {field: why for field, why in (base.missing | self.missing).items() if field not in both.fields and not (field == "model" and named)}
        return both

    def given(self) -> dict[str, Any]:
        """The fields as a run file holds them."""
        out: dict[str, Any] = {}
        for path, said in self.fields.items():
            *tables, last = path.split(".")
            inside = out
            for key in tables:
                inside = inside.setdefault(key, {})
            inside[last] = said.value
        return out


class Keys:
    """The keys of a file, which remember who was looked at."""

    def __init__(self, data: Mapping[str, Any], prefix: str = "") -> None:
        self.data = data
        self.prefix = prefix
        self.seen: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return self.data.get(key) is not None

    def has(self, *names: str) -> str | None:
        """The first of these names that the file gives, null left out; all of them count as looked at."""
        self.seen.update(names)
        return next((name for name in names if self.data.get(name) is not None), None)

    def get(self, *names: str, default: Any = None) -> Any:
        """The value of the first of these names that the file gives."""
        name = self.has(*names)
        return default if name is None else self.data[name]

    def count(self, *names: str, default: int | None = None) -> int | None:
        """A whole number behind the first of these names that the file gives."""
        return whole(self.get(*names, default=default))

    def on(self, *names: str) -> bool:
        """Whether a switch is on: true, or a word that says so."""
        value = self.get(*names, default=False)
        return value.lower() in ("true", "1", "yes", "on") if isinstance(value, str) else bool(value)

    def table(self, name: str) -> "Keys":
        """A table inside; empty where the file has none."""
        self.seen.add(name)
        inside = self.data.get(name)
        return Keys(inside if isinstance(inside, Mapping) else {}, f"{self.prefix}{name}.")

    def unread(self) -> list[str]:
        """Keys that nobody looked at."""
        return [f"{self.prefix}{key}" for key in self.data if key not in self.seen]


def padded(rows: int, unit: int) -> int:
    """The least multiple of `unit` that has so many rows."""
    return -(-rows // unit) * unit


def full_checkpointing(layers: int) -> str:
    """The word for checkpoints of so many layers each."""
    return "full" if layers == 1 else f"full:{layers}"


def whole(value: Any) -> int | None:
    """A whole number, also written as text ("4", "9_765_625"); None where it is not one ("auto")."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float) and value == int(value):
        return int(value)
    try:
        return int(str(value).strip())
    except ValueError:
        return None


def number(value: Any) -> float | None:
    """A number, also written as text; None where it is not one."""
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
