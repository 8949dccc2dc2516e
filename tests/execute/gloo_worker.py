"""One rank of a real job under gloo: performs runs on real tensors and writes what rank 0 saw. Started by test_real_runs."""

import json
import sys
from typing import Any

import torch
import torch.distributed as dist

from costmodel.inputs import build_run


def seen(run: Any) -> dict[str, Any]:
    from execute.dryrun import observe_real, report
    role = report(observe_real(run), 0).roles[0]
    memory = role.memory
    assert memory is not None
    return {"states": memory.states, "activations": memory.activations_bytes, "phases": {k: p.total_bytes for k, p in memory.phases.items()},
            "collectives": sorted([c.kind, c.message_bytes, c.count, c.group, c.dtype] for c in role.collectives or ())}


def losses(run: Any) -> list[float]:
    """Three steps on the same data in every strategy; the mean over ranks."""
    from contextlib import nullcontext

    from execute import compat
    from execute.data import random_batch
    from execute.dryrun import build
    from execute.step import train_step
    from execute.strategies import strategy
    chosen, values = strategy(run), []
    model = build(run, "meta")
    chosen.shard(run, model)
    compat.materialise(model, lambda t: torch.empty(t.shape, dtype=t.dtype))
    fill(model)
    prepared = chosen.prepare(run, model, dry=False, region=lambda name: nullcontext())
    torch.manual_seed(100 + dist.get_rank())
    batch = random_batch(run)
    for _ in range(3):
        loss = train_step(run, prepared, lambda: batch).clone()
        dist.all_reduce(loss)
        values.append(loss.item() / dist.get_world_size())
    return values


def fill(model: torch.nn.Module) -> None:
    """The same values whatever the sharding: each parameter from its own seed, then cut."""
    from torch.distributed.tensor import DTensor, distribute_tensor
    model.init_weights()  # type: ignore[operator]
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            whole = torch.empty(p.shape).normal_(0, 0.02, generator=torch.Generator().manual_seed(i)) + (p.dim() == 1)
            p.copy_(distribute_tensor(whole, p.device_mesh, p.placements) if isinstance(p, DTensor) else whole)


def main() -> None:
    _, rendezvous, rank, world, cases, out = sys.argv
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=int(rank), world_size=int(world))
    results = {}
    for name, (what, given) in json.loads(cases).items():
        results[name] = {"seen": seen, "losses": losses}[what](build_run(**given))
    if int(rank) == 0:
        with open(out, "w") as file:
            json.dump(results, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
