"""One rank of a real job under gloo: performs runs on real tensors, one after the other, and writes what was seen. Started by gloo_ranks."""

import json
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from costmodel.inputs import build_run
from execute import compat
from execute.assemble import assemble
from execute.data import Text
from execute.experts import Experts
from execute.marks import NoMarks
from execute.observe.profiling import profile_step
from execute.strategies.pipeline import Stages
from execute.train import Training, make_ready

COUNTING = Text(torch.arange(10_000).remainder(64).to(torch.uint8))
"""A text that is easily learnt."""


def seen(run: Any, keep: Path) -> dict[str, Any]:
    """Bytes and collectives of a watched step."""
    from execute.dryrun import observe_real, report
    role = report(observe_real(run), 0).roles[0]
    memory = role.memory
    assert memory is not None
    return {"states": memory.states, "activations": memory.activations_bytes, "phases": {k: p.total_bytes for k, p in memory.phases.items()},
            "collectives": sorted([c.kind, c.message_bytes, c.count, c.group, c.dtype] for c in role.collectives or ())}


def seen_last(run: Any, keep: Path) -> dict[str, Any]:
    """The same, as the last rank saw it."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, seen(run, keep))
    last: dict[str, Any] = everywhere[-1]
    return last


def learn(run: Any, keep: Path) -> list[float]:
    """The losses of five steps; the gradients of the first go to a file."""
    job, losses = training(run, 5), []
    for step in range(job.steps):
        losses.append(mean_over_ranks(make_ready(job, step)(None)))
        if step == 0:
            torch.save(gradients(job.prepared), keep / f"{dist.get_rank() if dist.is_initialized() else 0}.pt")
    return losses


def arrive(run: Any, keep: Path) -> list[float]:
    """The losses of five steps; the whole parameters that they led to go to a file."""
    job, losses = training(run, 5), []
    for step in range(job.steps):
        losses.append(mean_over_ranks(make_ready(job, step)(None)))
    model = getattr(job.prepared.model, "module", job.prepared.model)
    with whole(model):
        torch.save({name: p.detach().float().clone() for name, p in model.named_parameters()}, keep / f"{dist.get_rank() if dist.is_initialized() else 0}.pt")
    return losses


def whole(model: Any) -> Any:
    """A context in which DeepSpeed's stage 3 has its parameters whole."""
    if not any(hasattr(p, "ds_id") for p in model.parameters()):
        return nullcontext()
    import deepspeed
    return deepspeed.zero.GatheredParameters(list(model.parameters()))


def trace(run: Any, keep: Path) -> None:
    """The trace of the fourth step."""
    job = training(run, 4)
    for step in range(3):
        make_ready(job, step)()
    profile_step(make_ready(job, 3), lambda: None, keep / f"trace{dist.get_rank()}.json")


def overflow(run: Any, keep: Path) -> dict[str, Any]:
    """A step whose gradients are infinite on the last rank alone, then one that is not: how far the parameters moved, and the scale."""
    job = training(run, 3)
    parameters = [p for group in job.prepared.optimizer.param_groups for p in group["params"]]
    moved, scales = [], []
    for step in range(2):
        before = [t.clone() for t in compat.inner_tensors(parameters)]
        make_ready(job, step)(Poison(parameters) if step == 0 and dist.get_rank() == dist.get_world_size() - 1 else None)
        moved.append(float(sum((a - b).detach().abs().sum() for a, b in zip(compat.inner_tensors(parameters), before, strict=True))))
        assert job.prepared.loss_scale is not None
        scales.append(job.prepared.loss_scale.scale.item())
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, {"moved": moved, "scales": scales})
    return {"ranks": everywhere}


class Poison(NoMarks):
    """Makes a gradient infinite before it is unscaled."""

    def __init__(self, parameters: list[Any]) -> None:
        self.parameters = parameters

    @contextmanager
    def phase_of(self, name: str) -> Any:
        if name == "unscale":
            next(compat.inner_tensors([p.grad for p in self.parameters if p.grad is not None and p.numel()])).view(-1)[0] = torch.inf
        yield


def training(run: Any, steps: int) -> Training:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return Training(run, assemble(run, "cpu", seed=3), COUNTING, rank, "cpu", steps)


def mean_over_ranks(loss: Any) -> float:
    known = torch.tensor([0.0, 0.0] if loss is None else [float(loss), 1.0])
    if dist.is_initialized():
        dist.all_reduce(known)
    return (known[0] / known[1]).item()


def gradients(prepared: Any) -> dict[str, Any]:
    """The whole gradient of every parameter that this rank has, by its name in the model."""
    model = getattr(prepared.model, "module", prepared.model)
    flats = {}
    for shard in (p for group in prepared.optimizer.param_groups for p in group["params"]):
        if shard.grad is not None and not isinstance(shard, DTensor) and shard.untyped_storage().nbytes() > shard.numel() * shard.element_size():
            whole = torch.empty(shard.numel() * dist.get_world_size())  # a slice of ZeRO-2's flat parameters; nanochat's rows
            dist.all_gather_into_tensor(whole, shard.grad.flatten())
            flats[shard.untyped_storage().data_ptr()] = whole
    found = {}
    spread = {id(p): module.group for module in model.modules() if isinstance(module, Experts) and module.group is not None for p in module.parameters()}
    for name, p in model.named_parameters():
        name = model.name_in_model(name) if isinstance(model, Stages) else name
        flat = flats.get(p.untyped_storage().data_ptr()) if not isinstance(p, DTensor) else None
        if isinstance(p.grad, DTensor):
            found[name] = p.grad.full_tensor()
            if id(p) in spread:
                parts = [torch.empty_like(found[name]) for _ in range(dist.get_world_size(spread[id(p)]))]
                dist.all_gather(parts, found[name], group=spread[id(p)])
                found[name] = torch.cat(parts)
        elif flat is not None:
            start = p.storage_offset()
            found[name] = flat[start:start + p.numel()].view(p.shape).clone()
        else:
            found[name] = p.grad.clone()
    return found


def offloads(run: Any, keep: Path) -> dict[str, int]:
    """Bytes that DeepSpeed holds of an offloaded run on the last rank, after two steps: what is what by its own names, for here all memory is the host's."""
    from execute.assemble import give_storage, outline
    from execute.data import random_batch
    from execute.strategies.deepspeed import _engine
    from execute.weights import init_weights
    model = outline(run, "cpu", real=True)
    give_storage(model, "cpu")
    init_weights(model)
    engine = _engine(run, model)
    for _ in range(2 * run.micro_batches):
        engine.backward(engine(*random_batch(run, "cpu")))
        engine.step()
    optimizer = engine.optimizer
    stage3 = run.plan.zero == 3
    masters = optimizer.fp32_partitioned_groups_flat if stage3 else optimizer.single_partition_of_fp32_groups
    held = {"master_weights": masters, "gradients": [p.grad for p in masters],
            "optimizer": [value for state in optimizer.optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]}
    if stage3:
        held["gradients"] += [optimizer.grad_partitions_flat_buffer]
        held["parameters"] = optimizer.fp16_partitioned_groups_flat if run.plan.offload == "params" else []
    else:
        held["gradients"] += optimizer.accumulated_grads_in_cpu.values()
        held["communication"] = [*optimizer.param_buffer_of_bit16_for_cpu_offload_groups, optimizer.temp_grad_buffer_for_cpu_offload]
    mine = {name: sum(t.untyped_storage().nbytes() for t in tensors) for name, tensors in held.items()}
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, {name: nbytes for name, nbytes in mine.items() if nbytes})
    last: dict[str, int] = everywhere[-1]
    return last


WHAT: dict[str, Any] = {"offloads": offloads, "seen": seen, "seen last": seen_last, "learn": learn, "arrive": arrive, "overflow": overflow, "trace": trace}


def main() -> None:
    _, rendezvous, rank, world, cases, out = sys.argv
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=int(rank), world_size=int(world))
    results, folder = {}, Path(out)
    for number, (name, (what, given)) in enumerate(json.loads(cases).items()):
        keep = folder / str(number)
        keep.mkdir(exist_ok=True)
        results[name] = {"number": number, "result": WHAT[what](build_run(**given), keep)}
    if int(rank) == 0:
        (folder / "out.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
