"""DataParallel's programs: that of GPU 0, which owns the model and the loss, and that of any other GPU."""

from costmodel.program.build import Builder, Program, layer_flops, refuse
from costmodel.program.inventory import inventory_of
from costmodel.program.ir import RankProgram
from costmodel.program.layers import constant_tensors, numbers_of, replica_head_unit
from costmodel.program.parallel.base import HEAD
from costmodel.program.parallel.dataparallel import GPU_0, OTHERS, DataParallel
from costmodel.spec import Run


def build_replicas(run: Run) -> Program:
    """The programs of one process that drives all GPUs. Raises PlanError for what is not predicted."""
    refuse(run)
    numbers, inventory = numbers_of(run), inventory_of(run)
    main = DataParallel(run, numbers, inventory)
    for error in main.refusals():
        raise error
    builder, other = (Builder(run, numbers, s, inventory) for s in (main, DataParallel(run, numbers, inventory, OTHERS)))
    other.unit[HEAD] = replica_head_unit(run, numbers)
    roles = []
    for b, name in ((builder, GPU_0), (other, OTHERS)):
        (role, ranks, example), = b.strategy.roles()
        persistent = (*b.strategy.persistent(name), *constant_tensors(run, numbers))
        roles.append(RankProgram(role, ranks, example, persistent, b.step(role, False), b.step(role, True)))
    return Program(tuple(roles), main, inventory, numbers, layer_flops(builder.unit, builder.names),
                   builder.unit[HEAD].matmul_flops, builder.recomputed_flops, builder)
