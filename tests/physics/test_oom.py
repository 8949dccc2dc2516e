"""Out-of-memory messages: PyTorch's wordings, published failures, and messages made from a run's own program."""

from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import GIB, MIB

from costmodel import PlanError, Run, build_run, predict
from costmodel.oom import Figure, Message, block_bytes, diagnose, read_message, read_size
from costmodel.program.build import build
from costmodel.program.ir import Tensor, expand

TORCHTITAN_620 = ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 112.00 MiB. GPU 0 has a total capacity of 47.48 GiB of which 92.81 MiB is "
                  "free. Including non-PyTorch memory, this process has 47.38 GiB memory in use. Of the allocated memory 45.56 GiB is allocated by "
                  "PyTorch, and 448.00 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting …")
COOKBOOK_234 = ("RuntimeError: CUDA out of memory. Tried to allocate 98.00 MiB (GPU 0; 15.77 GiB total capacity; 13.76 GiB already allocated; "
                "56.00 MiB free; 14.29 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory try setting max_split_size_mb …")
"""The figures that the issues report, in PyTorch's wording of their time."""


# -- reading -----------------------------------------------------------------------------------------------------------------------


def bytes_of(m: Message) -> dict[str, float]:
    """The figures of a message in MiB."""
    return {name: f.nbytes / MIB for name, f in vars_of(m) if f is not None}


def vars_of(m: Message) -> Iterator[tuple[str, Figure | None]]:
    for name in ("tried", "capacity", "free", "allocated", "reserved", "process", "others"):
        yield name, getattr(m, name)


@pytest.mark.parametrize(("text", "figures"), [
    # 2.1 and later, meta-pytorch/torchtune issue 2071: a container hides what the process has in use
    ("CUDA out of memory. Tried to allocate 1.96 GiB. GPU 5 has a total capacity of 23.43 GiB of which 210.06 MiB is free. Including non-PyTorch memory, "
     "this process has 0 bytes memory in use. Of the allocated memory 22.41 GiB is allocated by PyTorch, and 206.09 MiB is reserved by PyTorch but "
     "unallocated.", {"tried": 1.96 * 1024, "capacity": 23.43 * 1024, "free": 210.06, "allocated": 22.41 * 1024, "reserved": 22.41 * 1024 + 206.09}),
    # with private pools of CUDA graphs
    ("CUDA out of memory. Tried to allocate 1.96 GiB. GPU 1 has a total capacity of 63.29 GiB of which 1.82 GiB is free. Including non-PyTorch memory, "
     "this process has 61.46 GiB memory in use. Of the allocated memory 22.97 GiB is allocated by PyTorch, with 2.14 GiB allocated in private pools "
     "(e.g., CUDA Graphs), and 37.00 GiB is reserved by PyTorch but unallocated.",
     {"tried": 1.96 * 1024, "capacity": 63.29 * 1024, "free": 1.82 * 1024, "process": 61.46 * 1024, "allocated": 22.97 * 1024, "reserved": 59.97 * 1024}),
    # 2.1's own spelling, another process on the device, across lines
    ("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total\n capacty of 79.15 GiB of which 5.00 MiB is free. Process 4711 has 40.00 GiB memory "
     "in use. Process 12 has 1.00 GiB memory in use. Including non-PyTorch memory, this process has 38.00 GiB memory in use. Of the allocated memory "
     "37.00 GiB is allocated by PyTorch, and 1.00 MiB is reserved by PyTorch but unallocated.",
     {"tried": 20, "capacity": 79.15 * 1024, "free": 5, "others": 41 * 1024, "process": 38 * 1024, "allocated": 37 * 1024, "reserved": 37 * 1024 + 1}),
    # 1.4 to 2.0
    ("RuntimeError: CUDA out of memory. Tried to allocate 36.00 MiB (GPU 0; 7.93 GiB total capacity; 130.35 MiB already allocated; 47.06 MiB free; "
     "188.00 MiB reserved in total by PyTorch)", {"tried": 36, "capacity": 7.93 * 1024, "allocated": 130.35, "free": 47.06, "reserved": 188}),
    # before 1.4
    ("RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 1; 10.92 GiB total capacity; 9.50 GiB already allocated; 500.00 MiB free; "
     "300.00 MiB cached)", {"tried": 2048, "capacity": 10.92 * 1024, "allocated": 9.5 * 1024, "free": 500, "reserved": 300}),
    # of several ranks, the first
    ("[rank1]: Tried to allocate 4.00 MiB. x [rank0]: Tried to allocate 8.00 MiB. GPU 0 has a total capacity of 1.00 GiB of which", {"tried": 4}),
])
def test_every_wording_is_read(text: str, figures: dict[str, float]) -> None:
    assert bytes_of(read_message(text)) == pytest.approx(figures, rel=1e-6)


@pytest.mark.parametrize("text", ["", "all is well", "CUDA error: an illegal memory access was encountered"])
def test_no_message_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="no out-of-memory message"):
        read_message(text)


def test_sizes_know_how_far_they_are_rounded() -> None:
    figure = read_size("1.96 GiB")
    assert figure.holds(1.9551 * GIB)
    assert figure.holds(1.9649 * GIB)
    assert not figure.holds(1.966 * GIB)
    assert read_size("117440512").nbytes == 112 * MIB
    assert read_size("112MiB").nbytes == read_size("112.00 MB").nbytes
    with pytest.raises(PlanError, match="not a number of bytes"):
        read_size("many")


@pytest.mark.parametrize(("request_", "block"), [(1, 2), (1 << 20, 2), ((1 << 20) + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (10 * MIB + 1, 12),
                                                  (202_383_360 * 4 // 8, 98), (112 * MIB, 112)])
def test_blocks_are_the_allocators(request_: int, block: int) -> None:
    """c10/cuda/CUDACachingAllocator.cpp: kSmallSize 1 MiB from 2 MiB, kMinLargeAlloc 10 MiB from 20 MiB, kRoundLarge 2 MiB."""
    assert block_bytes(request_) == block * MIB


# -- published failures ------------------------------------------------------------------------------------------------------------


def llama_3_8b() -> Run:
    return build_run(model="llama-3-8b", cluster={"gpu": "rtx_a6000", "gpus": 2}, plan={"strategy": "fsdp", "checkpointing": "full"}, recipe={"seq_len": 8192})


def test_llama_3_8b_died_making_the_optimizers_state() -> None:
    """C02, torchtitan issue 620: 112 MiB is a shard of a feed-forward weight (14336 x 4096 fp32 over 2), asked for as Adam's state is made in the
    first step; parameters and gradients are 29.9 GiB then, with all state 59.8 GiB, and 45.56 GiB lie between. No activation setting helps."""
    found = diagnose(llama_3_8b(), read_message(TORCHTITAN_620))
    best = found.matches[0]
    assert best.tensor in ("mlp.gate.weight", "mlp.up.weight", "mlp.down.weight")
    assert best.part_of in ("exp_avg", "exp_avg_sq")
    assert (best.nbytes, best.step, best.moment) == (112 * MIB, "first step", "optimizer of update: optimizer.host")
    assert best.live_low / GIB == pytest.approx(29.9, abs=0.1)
    assert best.live_high / GIB == pytest.approx(59.8, abs=0.1)
    assert (found.agrees, found.cause) == (True, "need")
    assert found.advice is not None
    assert found.advice.states_alone
    more, offloaded = (s for s in found.advice.fit if not s.remark)
    assert more.changes == {"cluster.gpus": more.run.cluster.gpus} and offloaded.changes == {"plan.offload": "params"}, "more GPUs, or the host's memory"
    assert offloaded.report.step_s > more.report.step_s


def test_llama_2_7b_died_in_the_foreach_update() -> None:
    """C05, meta-llama/llama-cookbook issue 234: out of memory in _multi_tensor_adamw's square root. 98 MiB is one layer's flat shard of 96.5 MiB
    (202,383,360 fp32 elements over 8), rounded to 2 MiB; 12.55 GiB of states and up to one more state of 3.14 GiB."""
    run = build_run(model="llama-2-7b", cluster={"gpus": 8, "gpu": "v100"}, plan={"strategy": "fsdp", "checkpointing": "full"},
                    recipe={"seq_len": 128, "precision": "fp16-mixed", "optimizer": "adamw:foreach"})
    found = diagnose(run, read_message(COOKBOOK_234))
    best = found.matches[0]
    assert (best.part_of, best.step, best.nbytes) == ("optimizer.sqrt", "first step", 202_383_360 * 4 // 8)
    assert (found.agrees, found.cause) == (True, "need")
    assert found.advice is not None
    fused = next(s for s in (*found.advice.fit, *found.advice.helps) if s.changes == {"recipe.optimizer.implementation": "fused"})
    assert fused.report.verdict != "does not fit"


# -- causes ------------------------------------------------------------------------------------------------------------------------


def gpt2() -> Run:
    return build_run(model="gpt2", cluster={"gpu": "rtx_3090", "gpus": 1}, recipe={"seq_len": 1024, "micro_batch": 8})


def said(**gib: float) -> Message:
    return Message(**{name: Figure(int(value * GIB), 0.005 * GIB) for name, value in gib.items()})


def test_a_request_of_the_logits_is_named() -> None:
    """8 x 1024 x 50257 fp32 logits are 1570.5 MiB, asked for as 1572 MiB = 1.535 GiB, which prints as 1.54 though the tensor has 1.53."""
    found = diagnose(gpt2(), said(tried=1.54))
    assert found.matches
    assert {m.nbytes for m in found.matches} == {8 * 1024 * 50257 * 4}
    assert any("log_softmax" in m.tensor for m in found.matches)
    assert found.agrees is None


def test_reserved_memory_that_nobody_uses_is_fragmentation() -> None:
    assert diagnose(gpt2(), said(tried=1.53, allocated=5, reserved=22, capacity=24, free=0.3)).cause == "fragmentation"


def test_memory_of_another_process_is_found() -> None:
    found = diagnose(gpt2(), said(tried=1.53, allocated=5, reserved=5.1, capacity=24, free=0.3))
    assert found.cause == "other process"
    assert (found.others_bytes or 0) / GIB == pytest.approx(24 - 0.3 - 5.1, abs=0.6)
    assert diagnose(gpt2(), said(tried=1.53, allocated=5, reserved=5.1, capacity=24, free=0.3, process=23.6)).cause != "other process"


def test_more_than_the_run_explains_is_said() -> None:
    found = diagnose(gpt2(), said(tried=1.53, allocated=22, reserved=22.5, capacity=24, free=0.5))
    assert found.cause == "not described"
    assert found.advice is None


def test_a_size_of_nothing_in_the_run_shows_the_nearest() -> None:
    found = diagnose(gpt2(), said(tried=1.25))
    assert not found.matches
    nearest = [abs(block_bytes(m.nbytes) - 1.25 * GIB) for m in found.closest]
    assert nearest == sorted(nearest)


def test_a_small_block_names_no_tensor() -> None:
    found = diagnose(gpt2(), read_message("Tried to allocate 20.00 MiB."))
    assert found.names_no_tensor
    assert not found.matches


def requests(run: Run) -> list[tuple[Tensor, int]]:
    """What the first step's activations ask for, and what is live when they do."""
    role = build(run).roles[0]
    live, out = sum(t.nbytes for t in role.persistent), []
    for block in expand(role.first_step):
        for op in block.ops:
            for t in op.allocs:
                if t.category in ("activations", "temporaries") and t.nbytes > 10 * MIB and block.phase != "optimizer":
                    out.append((t, live))
                live += t.nbytes
            live -= sum(t.nbytes for t in op.frees)
    return out


@settings(max_examples=25)
@given(st.sampled_from(["gpt2", "llama-3.2-1b", "pythia-410m"]), st.sampled_from(["ddp", "fsdp", "zero1"]), st.sampled_from([1, 4]),
       st.sampled_from(["none", "full"]), st.randoms(use_true_random=False))
def test_the_message_of_any_tensor_names_it(model: str, strategy: str, micro_batch: int, checkpointing: str, random: Random) -> None:
    run = build_run(model=model, cluster={"gpu": "a100", "gpus": 4}, plan={"strategy": strategy, "checkpointing": checkpointing},
                    recipe={"seq_len": 1024, "micro_batch": micro_batch})
    tensor, live = random.choice(requests(run))
    memory = predict(run, scaling=False).roles[0].memory
    assert memory is not None
    message = Message(tried=Figure(block_bytes(tensor.nbytes)), allocated=Figure(live + (memory.workspace_bytes or 0)))
    found = diagnose(run, message)
    assert any(m.tensor == tensor.name and m.off_bytes == 0 for m in found.matches)
    assert found.agrees
