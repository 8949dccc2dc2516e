"""What a host must hold at least: against counts made by hand and what a step is known to hold."""

import pytest

pytest.importorskip("torch")

from small_runs import LLAMA, cpu_run

from costmodel.spec import PlanError
from execute.dryrun import dry_run
from execute.host_memory import available_host_bytes, check_host_memory, least_bytes, state_bytes

GIB = 1 << 30


@pytest.mark.parametrize(("strategy", "each"), [("single", 16), ("ddp", 16), ("zero1", 8 + 8 / 2), ("zero2", 4 + 12 / 2), ("fsdp", 16 / 2)])
def test_states_are_the_bytes_a_parameter_of_the_zero_paper(strategy: str, each: float) -> None:
    """arXiv 1910.02054, in fp32: 4 of parameters, 4 of gradients, 8 of Adam, divided over two ranks from its stage on."""
    run = cpu_run(LLAMA, strategy, 1 if strategy == "single" else 2)
    assert state_bytes(run) == each * run.model.params


@pytest.mark.parametrize("name", ["single", "full checkpointing", "zero1", "zero2", "fsdp", "tp", "pp", "chunked"])
def test_it_is_never_more_than_the_dry_run_s_peak_and_a_process(name: str) -> None:
    """A lower bound: what it refuses cannot run."""
    run = {"single": cpu_run(LLAMA), "full checkpointing": cpu_run(LLAMA, checkpointing="full"), "zero1": cpu_run(LLAMA, "zero1", 2),
           "zero2": cpu_run(LLAMA, "zero2", 2), "fsdp": cpu_run(LLAMA, "fsdp", 2), "tp": cpu_run(LLAMA, "ddp", 2, tp=2, dp=1),
           "pp": cpu_run(LLAMA, "ddp", 2, pp=2, dp=1, recipe={"grad_accum": 2}), "chunked": cpu_run(LLAMA, recipe={"loss": "chunked"})}[name]
    memory = dry_run(run).roles[0].memory
    assert memory is not None
    highest = max(peak.total_bytes for peak in memory.phases.values())
    assert 0.3 * highest < least_bytes(run) - (300 << 20) <= highest


def test_what_fits_passes_and_what_does_not_is_refused_with_what_would_work() -> None:
    run = cpu_run(LLAMA, "ddp", 2)
    check_host_memory(run, 2, 2 * least_bytes(run))
    with pytest.raises(PlanError) as error:
        check_host_memory(run, 2, 2 * least_bytes(run) - 1)
    assert error.value.field == "host memory"
    assert "zero = 3" in error.value.fix
    most = int(error.value.fix.split("at most ")[1].split(" ")[0].replace(",", ""))
    assert most == pytest.approx(run.model.params, rel=1e-3)


def test_this_host_says_what_it_has() -> None:
    """No more than it has in all; /proc/meminfo is Linux's."""
    available = available_host_bytes()
    assert available is None or 0 < available < 1 << 50
