"""The host's units of work in a predicted program against what PyTorch does in Python: its hooks, its modules of DTensors, its collectives."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from small_runs import LLAMA, cpu_run  # noqa: E402
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.distributed.tensor.debug import CommDebugMode  # noqa: E402

from costmodel.program.build import build  # noqa: E402
from costmodel.program.host import DTENSOR, FSDP_HOOK  # noqa: E402
from costmodel.program.ir import expand  # noqa: E402
from costmodel.spec import Run  # noqa: E402
from execute.assemble import assemble  # noqa: E402
from execute.stand_in import stand_in_world  # noqa: E402

DEPTHS = 2, 4


def units(run: Run, cause: str) -> Counter[str]:
    """Units of a cause in a step, by phase."""
    found: Counter[str] = Counter()
    for block in expand(build(run).roles[0].step):
        found[block.phase] += sum(op.kernels for op in block.ops if op.kind == "host" and op.axis == cause)
    return found


def a_layer(count: Callable[[Run], Counter[str]], **how: Any) -> dict[str, float]:
    """What one layer has more, by phase of forward and backward."""
    shallow, deep = (count(cpu_run({**LLAMA, "layers": n}, **how)) for n in DEPTHS)
    return {phase: (deep[phase] - shallow[phase]) / (DEPTHS[1] - DEPTHS[0]) for phase in ("forward", "backward")}


def performed(run: Run, watch: Callable[[Any, str], Any]) -> Any:
    """Forward and backward of one micro-batch of the real model, each inside what `watch` gives for it."""
    tokens = torch.zeros(run.recipe.micro_batch, run.recipe.seq_len, dtype=torch.int64)
    with stand_in_world(run.plan.world_size, 0):
        prepared = assemble(run, "cpu")
        with prepared.micro_batch(True):
            with watch(prepared.model, "forward"):
                loss = prepared.model(tokens, tokens)
            with watch(prepared.model, "backward"):
                loss.backward()
        return prepared.model


def test_fully_shard_runs_as_many_hooks_around_a_layer_as_are_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py: pre_forward, post_forward, pre_backward and post_backward of each group."""
    seen: Counter[str] = Counter()

    def counted(own: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def hook(*arguments: Any, **named: Any) -> Any:
            seen[phase] += 1
            return own(*arguments, **named)
        return hook

    for name in ("pre_forward", "post_forward", "pre_backward", "post_backward"):
        monkeypatch.setattr(FSDPParamGroup, name, counted(getattr(FSDPParamGroup, name), name.partition("_")[2]))

    def hooks(run: Run) -> Counter[str]:
        seen.clear()
        performed(run, lambda model, phase: nullcontext())
        return Counter(seen)

    how = {"strategy": "fsdp", "gpus": 2}
    assert a_layer(lambda run: units(run, FSDP_HOOK), **how) == a_layer(hooks, **how) == {"forward": 2, "backward": 2}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dtensor_has_a_unit_for_each_module_and_each_collective_of_a_layer(sequence_parallel: bool) -> None:
    """Modules whose own parameters are DTensors run forward and backward; torch's CommDebugMode counts the collectives of their redistributions."""
    def modules_and_collectives(run: Run) -> Counter[str]:
        modes = {phase: CommDebugMode() for phase in ("forward", "backward")}
        model = performed(run, lambda _, phase: modes[phase])
        modules = sum(any(isinstance(p, DTensor) for p in module.parameters(recurse=False)) for module in model.modules())
        return Counter({phase: modules + mode.get_total_counts() for phase, mode in modes.items()})

    how = {"strategy": "ddp", "gpus": 2, "tp": 2, "sequence_parallel": sequence_parallel}
    assert a_layer(lambda run: units(run, DTENSOR), **how) == a_layer(modules_and_collectives, **how)
