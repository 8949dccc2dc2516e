"""The machines that a fitted profile was measured on, as its file names them.

A file says `[machine]`, or `[[machine]]` for each of several, in the words below; nothing is priced by it. Whoever judges a time by the profile can say
whether it is this machine's.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from costmodel.spec.base import PlanError


class Machine(NamedTuple):
    """One machine, as it named itself when it was measured."""

    host: str
    device: str = ""
    """The GPU's name, or the CPU's model."""
    accelerator: str = ""
    """What the runs and probes took it for in the catalogue."""
    torch: str = ""
    """Version of PyTorch."""
    date: str = ""
    """Of the last measurement, ISO 8601."""

    @property
    def words(self) -> str:
        """In one line: "vm (AMD EPYC, torch 2.13.0, 2026-12-01)"."""
        known = ", ".join(part for part in (self.device, self.torch and f"torch {self.torch}", self.date) if part)
        return f"{self.host} ({known})" if known else self.host


def machines_of(given: Any, path: Path) -> tuple[Machine, ...]:
    """What a profile's file gives as `machine`. Raises PlanError."""
    tables = given if isinstance(given, list) else [given]
    return tuple(_machine(table, path) for table in tables)


def _machine(table: Any, path: Path) -> Machine:
    words = ", ".join(Machine._fields[:-1]) + f" and {Machine._fields[-1]}"
    if not isinstance(table, dict):
        raise PlanError("profile", f"machine = {table!r}", f"{path.name} names a machine by a table of {words}.", 'Write [machine] and under it host = "…".')
    for key, value in table.items():
        if key not in Machine._fields:
            raise PlanError("profile", f"machine.{key}", f"a machine has {words}.", "Remove it.")
        if not isinstance(value, str):
            raise PlanError("profile", f"machine.{key} = {value!r}", "it must be text.", "Put it in quotes.")
    if not table.get("host"):
        raise PlanError("profile", "machine", f"{path.name} names a machine without its host.", 'Give host = "…", or remove the table.')
    return Machine(**table)


def distinct(machines: Iterable[Machine]) -> tuple[Machine, ...]:
    """Each machine once, as it was last measured."""
    last: dict[tuple[str, str, str], Machine] = {}
    for one in sorted(machines, key=lambda m: m.date):
        last[one.host, one.device, one.accelerator] = one
    return tuple(last[key] for key in sorted(last))


def differences(fitted: Iterable[Machine], here: Machine, accelerators: Iterable[str]) -> list[str]:
    """What is unlike this machine in those that a profile was fitted on, in words; `accelerators` are those of the runs it is to price."""
    fitted = tuple(fitted)
    if not fitted:
        return ["it does not say which machine it was fitted on"]
    out = []
    mine = [one for one in fitted if one.host == here.host and one.device in ("", here.device)]
    if not mine:
        out.append(f"it was fitted on {' and '.join(one.words for one in fitted)}, and this is {here.words}")
    out += other_devices(fitted, accelerators)
    old = sorted({one.torch for one in mine if one.torch} - {here.torch})
    if mine and old and all(one.torch in old for one in mine):
        out.append(f"it was fitted with torch {' and '.join(old)}, and this is torch {here.torch}")
    return out


def other_devices(fitted: Iterable[Machine], accelerators: Iterable[str]) -> list[str]:
    """The same of the catalogue's names alone: devices to price that are none of those it was fitted for."""
    known = {one.accelerator for one in fitted if one.accelerator}
    strange = [name for name in dict.fromkeys(accelerators) if known and name not in known]
    return [f"it was fitted for {' and '.join(sorted(known))}, and prices {' and '.join(strange)} here"] if strange else []
