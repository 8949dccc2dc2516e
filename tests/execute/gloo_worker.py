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
    """Three steps on the same data in every strategy; the mean over the ranks that know it."""
    from contextlib import nullcontext

    from execute import compat
    from execute.data import random_batch
    from execute.dryrun import build
    from execute.step import train_step
    from execute.strategies import strategy
    from execute.weights import init_weights
    chosen, values = strategy(run), []
    model = build(run, "meta")
    chosen.shard(run, model)
    compat.materialise(model, lambda t: torch.empty(t.shape, dtype=t.dtype))
    init_weights(model)
    prepared = chosen.prepare(run, model, dry=False, region=lambda name: nullcontext())
    torch.manual_seed(100 + (dist.get_rank() if run.plan.dp > 1 else 0))
    batch: Any = random_batch(run)
    if run.plan.pp > 1:
        batch = tuple(t.repeat(run.micro_batches, 1) if here else None for t, here in zip(batch, model.ends, strict=True))
    for _ in range(3):
        loss = train_step(run, prepared, lambda: batch)
        known = torch.tensor([0.0, 0.0] if loss is None else [float(loss), 1.0])
        dist.all_reduce(known)
        values.append((known[0] / known[1]).item())
    return values


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
