"""What the processes of a job tell one another, as files in one folder: what to perform, how far each rank is, how it ended.

    job.json            what every rank performs
    agent.json          written by torchrun's process: its number, and of ranks that ended badly how
    rank<r>.state.json  where rank r is, since it began
    rank<r>.json        how rank r ended; rank 0's holds every rank's where all came through
"""

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from costmodel.atomic import write_atomically
from costmodel.records import Outcome
from costmodel.report import RoleReport
from costmodel.spec import Run


@dataclass(frozen=True, slots=True)
class Job:
    """A run to perform, and how."""

    run: Run
    steps: int = 10
    """Timed ones."""
    warmup: int = 3
    device: str = ""
    """cpu, cuda, or "" for a GPU where there is one."""
    data: str | None = None
    """A text; None: random tokens."""
    seed: int = 0
    trace: str | None = None
    """Where rank 0's trace is kept."""
    timeout_s: float = 1800.0
    check_memory: bool = True
    """Refuse a job that this host's memory cannot hold."""

    def to_dict(self) -> dict[str, Any]:
        return {**{name: getattr(self, name) for name in self.__dataclass_fields__}, "run": self.run.model_dump(mode="json")}


def job_from_dict(data: dict[str, Any]) -> Job:
    """Read what `Job.to_dict` wrote."""
    return Job(**{**data, "run": Run.model_validate(data["run"])})


@dataclass(frozen=True, slots=True)
class RankResult:
    """How a rank ended, and what it saw."""

    rank: int
    ended_s: float
    """Seconds since the epoch."""
    outcome: Outcome = field(default_factory=Outcome)
    refused: tuple[str, Any, str, str] | None = None
    """What its machine cannot do: a PlanError's field, value, rule and fix."""
    role: RoleReport | None = None
    step_s: tuple[float, ...] = ()
    """Raw samples: seconds of each timed step, in order."""
    losses: tuple[float | None, ...] = ()
    """The mean loss of each of its steps, warm-up included; None where it does not know it."""
    notes: tuple[str, ...] = ()
    elsewhere: bool = False
    """The device is not the one that the run describes: its peak is not known."""
    others: "tuple[RankResult, ...]" = ()
    """Rank 0: those of all ranks, its own too."""


def rank_result_from_dict(data: Any) -> RankResult:
    """Read what `dataclasses.asdict` made of one."""
    from pydantic import TypeAdapter
    return TypeAdapter(RankResult).validate_python(data)


def write(folder: Path, name: str, data: Any) -> None:
    write_atomically(folder / name, json.dumps(data))


def read(folder: Path, name: str) -> Any:
    """What a file of a job holds; None where it is not there."""
    try:
        return json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def state_name(rank: int) -> str:
    return f"rank{rank}.state.json"


def result_name(rank: int) -> str:
    return f"rank{rank}.json"


def write_result(folder: Path, result: RankResult) -> None:
    write(folder, result_name(result.rank), asdict(result))


def read_results(folder: Path) -> dict[int, RankResult]:
    """The results of the ranks that wrote one."""
    found = (rank_result_from_dict(read(folder, path.name)) for path in folder.glob("rank*.json") if not path.name.endswith(".state.json"))
    return {result.rank: result for result in found}


def now_s() -> float:
    return time.time()
