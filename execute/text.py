"""A report of what was performed, for people."""

from collections.abc import Iterator, Sequence
from statistics import quantiles

from costmodel.report import Collective, RoleReport, StepReport

TITLES = {"dryrun": "bytes allocated in the second step, on fake tensors", "solo": "one rank, alone on a real device", "run": "a real job"}


def as_text(report: StepReport, samples: Sequence[float] = ()) -> str:
    """Memory, time and collectives of each role. `samples`: seconds of each timed step of a rank that was timed alone."""
    lines = []
    for role in report.roles:
        lines.append(f"{role.role} of {report.world_size}: {TITLES.get(report.provenance, report.provenance)}")
        lines += [*_memory(role), *_time(role, samples)]
        if role.collectives is not None:
            lines.append("  collectives of a step")
            lines += [_collective(c) for c in role.collectives] or ["    none"]
    return "\n".join([*lines, *_utilisation(report), *(f"note: {note}" for note in report.notes)])


def _collective(c: Collective) -> str:
    took = "" if c.total_s is None else f"  {c.total_s * 1e3:>10,.3f} ms together"
    return f"    {c.phase:<10}{c.axis:<14}{c.kind:<15}{c.count:>5} x {c.message_bytes:>16,} bytes  {c.dtype:<6} over {c.group} ranks{took}"


def _utilisation(report: StepReport) -> Iterator[str]:
    """MFU and HFU, where the peak of the device is known."""
    if report.mfu is None or report.peak_flops_per_s is None:
        return
    again = "" if report.hfu is None else f", HFU {report.hfu:.1%}"
    alone = "; nothing was waited for" if report.provenance == "solo" else ""
    yield f"MFU {report.mfu:.1%}{again} of {report.peak_flops_per_s / 1e12:,.2f} TFLOP/s a rank{alone}"


def _memory(role: RoleReport) -> list[str]:
    memory = role.memory
    if memory is None:
        return []
    lines = [f"  {'peak':<24}{memory.allocated.total_bytes:>18,}  {memory.allocated.moment}"]
    lines += [f"    {name:<22}{size:>18,}" for name, size in memory.allocated.by_category.items()]
    lines.append("  between steps")
    lines += [f"    {name:<22}{size:>18,}" for name, size in memory.states.items()]
    figures = (("activations alone", memory.activations_bytes), ("workspaces of libraries", memory.workspace_bytes),
               ("reserved", memory.reserved_bytes), ("device in use", memory.device_bytes))
    lines += [f"  {name:<24}{size:>18,}" for name, size in figures if size is not None]
    return lines + [f"  {'peak of ' + name:<24}{peak.total_bytes:>18,}  {peak.moment}" for name, peak in memory.phases.items()]


def _time(role: RoleReport, samples: Sequence[float]) -> list[str]:
    time = role.time
    if time is None:
        return []
    spread = ""
    if len(samples) > 1:
        low, *_, high = quantiles(samples, n=10, method="inclusive")
        spread = f"  median of {len(samples)} steps; 10% and 90%: {low * 1e3:.2f} and {high * 1e3:.2f} ms"
    lines = [f"  {'step':<24}{time.step_s * 1e3:>15,.3f} ms{spread}"]
    for title, parts in (("by phase", time.phases), ("what was done", time.breakdown), ("communication", time.communication_s), ("exposed", time.exposed_s)):
        if parts:
            lines.append(f"  {title}")
            lines += [f"    {name:<22}{seconds * 1e3:>15,.3f} ms  {seconds / time.step_s:>6.1%}" for name, seconds in parts.items()]
    if time.bubble_s is not None:
        lines.append(f"  {'bubble':<24}{time.bubble_s * 1e3:>15,.3f} ms  {time.bubble_s / time.step_s:>6.1%}  waiting for neighbours, transfers included")
    if time.host_s is not None:
        lines.append(f"  {'host':<24}{time.host_s * 1e3:>15,.3f} ms to issue the work")
    return lines
