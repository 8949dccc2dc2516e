"""Models of the catalogue: shapes of known language models and their published parameter counts."""

from dataclasses import dataclass
from functools import cache

from costmodel.catalog.files import entry_names, read_aliases, read_entry
from costmodel.catalog.names import resolve
from costmodel.spec.model import Model


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """What the catalogue knows of a model besides its shape. Parameters are counts; 0 where none is published."""

    name: str
    family: str
    params: int
    """Counted from the shape."""
    published: int
    exactness: str
    """exact (a checkpoint's total), rounded (by its source), nominal (a size name) or none."""
    published_active: int
    published_source: str
    shape_params: int
    """Count of the shape from a second source, where it is not the published figure; 0 where it is."""
    difference: str
    """Why an exact published count is not the shape's."""
    max_positions: int
    """Longest sequence of the released configuration, in tokens."""
    hub: tuple[str, ...]
    source: str
    confidence: str
    """read (in the source named) or recalled (confirmed by the parameter count only)."""
    note: str
    predictable: bool
    why_not: str


def model(name: str) -> Model:
    """The architecture of a known model, by its name, an alias or its hub id ("llama3-8b", "Qwen/Qwen3-8B")."""
    return _model(resolve("models", name))


@cache
def _model(name: str) -> Model:
    return Model.model_validate({"name": name, **read_entry("models", name)["shape"]})


def model_entry(name: str) -> ModelEntry:
    """Published counts and sources of a known model."""
    return _entry(resolve("models", name))


@cache
def _entry(name: str) -> ModelEntry:
    data, shape = read_entry("models", name), _model(name)
    why_not = unsupported_reason(shape) or ""
    return ModelEntry(name=name, family=data["family"], params=shape.params, published=data["published_params"],
                      exactness=data["exactness"], published_active=data.get("published_active_params", 0),
                      published_source=data["published_source"], shape_params=data.get("shape_params", 0),
                      difference=data.get("difference", ""), max_positions=data["max_positions"],
                      hub=tuple(read_aliases("models_hub").get(name, ())), source=data["source"], confidence=data["confidence"],
                      note=data["note"], predictable=not why_not, why_not=why_not)


def list_models() -> tuple[ModelEntry, ...]:
    """Every model, by family, smallest first. Reads every file."""
    return tuple(sorted((_entry(name) for name in entry_names("models")), key=lambda entry: (entry.family, entry.params)))


def unsupported_reason(model: Model) -> str | None:
    """Why a model is listed but not yet predicted, naming the missing feature; None where it is predicted."""
    missing = [feature for feature, present in (
        ("biases of experts", model.moe is not None and model.moe.expert_bias),
        ("multi-token prediction (MTP)", model.mtp_depth > 0),
        (f"hybrid layers ({model.hybrid})", bool(model.hybrid)),
        ("attention sinks", model.attention_sinks),
        (model.extra_params_note or "extra parameters", model.extra_params > 0),
    ) if present]
    return f"not predicted yet: {', '.join(missing)}" if missing else None
