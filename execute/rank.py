# mypy: disable-error-code="no-untyped-call, no-any-return, misc"
"""One rank of a real job: times its steps, records one with the profiler and watches three, and says what it saw, or how it failed.

    python -m execute.rank FOLDER     as torchrun starts it for execute.launch
"""

import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from costmodel.records import Outcome
from costmodel.spec import PlanError
from execute import job as files
from execute.agent import end_with_parent
from execute.job import Job, RankResult

Say = Callable[[str], None]
MARGIN_S = 60.0
"""A collective gives up this long after the job's time is over: the launcher ends the job first, if there is one."""


def main() -> int:
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    agent = files.read(folder, "agent.json")["pid"]
    end_with_parent(agent, lambda: os._exit(1))

    def say(doing: str) -> None:
        files.write(folder, files.state_name(rank), {"rank": rank, "pid": os.getpid(), "doing": doing})

    say("loading PyTorch")
    result = perform(files.job_from_dict(files.read(folder, "job.json")), say, folder)
    files.write_result(folder, result)
    return end(result)


def end(result: RankResult) -> int:
    """Leave the process group; after a failure leave the process at once, for peers and NCCL's threads may never answer."""
    import torch.distributed as dist
    if result.outcome.kind != "ok" or result.refused is not None:
        sys.stderr.flush()
        os._exit(1)
    dist.destroy_process_group()
    return 0


def perform(job: Job, say: Say, folder: Path) -> RankResult:
    """This rank's part of a job, as torchrun's environment places it; traces that nobody keeps go to `folder`. What goes wrong is in the result."""
    rank = int(os.environ["RANK"])
    try:
        result = _perform(job, rank, int(os.environ["LOCAL_RANK"]), say, folder)
    except PlanError as error:
        value = error.value if isinstance(error.value, (str, int, float, bool)) else str(error.value)
        return RankResult(rank, files.now_s(), Outcome("failed", rank, str(error)), (error.field, value, error.rule, error.fix))
    except (Exception, KeyboardInterrupt) as error:
        from execute.recording import outcome_of
        traceback.print_exception(error)
        return RankResult(rank, files.now_s(), outcome_of(error, rank))
    return result


def _perform(job: Job, rank: int, local_rank: int, say: Say, folder: Path) -> RankResult:
    import torch
    import torch.distributed as dist

    from execute.device import is_described, performed_elsewhere, this_device
    from execute.host_memory import check_host_memory
    from execute.measure import measure
    from execute.support import check_installed, check_supported
    check_supported(job.run, "run")
    check_installed(job.run)
    device = this_device(job.device, local_rank)
    if device.name != "cpu" and local_rank >= torch.cuda.device_count():
        raise PlanError("nproc", local_rank + 1, f"this machine has {torch.cuda.device_count()} GPUs.",
                        f"Use --nproc {torch.cuda.device_count()}, more nodes, or --device cpu.")
    if job.check_memory and device.name == "cpu":
        check_host_memory(job.run, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    say("meeting the other ranks")
    patience = timedelta(seconds=job.timeout_s + MARGIN_S)
    on_gpu: dict[str, Any] = {} if device.name == "cpu" else {"device_id": torch.device(device.name)}
    dist.init_process_group("gloo" if device.name == "cpu" else "nccl", timeout=patience, **on_gpu)
    trace = Path(job.trace) if job.trace and rank == 0 else folder / f"trace{rank}.json"
    role, step_s, losses = measure(job, rank, device, trace, say)
    result = RankResult(rank, files.now_s(), role=role, step_s=step_s, losses=losses, notes=performed_elsewhere(job.run, device),
                        elsewhere=not is_described(job.run, device))
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, result)
    return replace(result, others=tuple(everybody)) if rank == 0 else result


if __name__ == "__main__":
    sys.exit(main())
