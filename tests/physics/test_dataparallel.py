"""torch.nn.DataParallel against hand counts of torch's own code, and a published comparison with DDP."""

from collections import Counter
from typing import Any

import pytest

from costmodel import PlanError, build_run, predict
from costmodel.program.ir import expand
from costmodel.repricing import program_of

MIB = 1 << 20
SMALL: dict[str, Any] = {"layers": 4, "hidden": 512, "heads": 8, "kv_heads": 8, "ffn": 1024, "vocab": 4096, "tied_embeddings": False}
LAYER = 4 * 512 * 512 + 3 * 512 * 1024 + 2 * 512
PARAMS = 4 * LAYER + 2 * 4096 * 512 + 512


def run_of(gpus: int = 4, strategy: str = "dataparallel", model: Any = None, gpu: str = "a100", **recipe: Any) -> Any:
    return build_run(model=model or SMALL, cluster={"gpu": gpu, "gpus": gpus}, plan={"strategy": strategy},
                     recipe={"precision": "fp32", "seq_len": 256, **recipe})


def messages(run: Any, role: int) -> Counter[tuple[str, int]]:
    return Counter((op.comm.kind, op.comm.nbytes) for block in expand(program_of(run).roles[role].step) for op in block.ops if op.comm)


def test_gpu_0_holds_all_state_and_the_others_none() -> None:
    """data_parallel.py: the module lies on device_ids[0]; replicas are made anew by each forward. A fused Adam has a step counter (4 bytes) a tensor."""
    roles = predict(run_of()).roles
    assert [(r.role, r.ranks, r.example_rank) for r in roles] == [("GPU 0", 1, 0), ("the other GPUs", 3, 1)]
    states = [{name: size for name, size in r.memory.states.items() if name in ("parameters", "gradients", "optimizer")} for r in roles if r.memory]
    assert states[0] == {"parameters": 4 * PARAMS, "gradients": 4 * PARAMS, "optimizer": 8 * PARAMS + 4 * (3 + 4 * 9)}
    assert not any(states[1].values())


def test_a_micro_batch_moves_what_torch_s_code_moves() -> None:
    """replicate.py broadcasts every parameter: by take_tensors a chunk of 10 MiB is closed by the tensor that fills it. The embedding (8 MiB) and
    half a layer's first matrices fill one. comm.py's reduce_add_coalesced closes a chunk before the tensor that does not fit. Tokens are int64."""
    for role in (0, 1):
        for accumulation in (1, 3):
            sent = messages(run_of(grad_accum=accumulation), role)
            totals = Counter[str]()
            for (kind, nbytes), n in sent.items():
                totals[kind] += n * nbytes
            assert totals["broadcast"] == totals["reduce"] == accumulation * 4 * PARAMS
            logits = 256 * 4096 * 4
            assert sent["gather", 4 * logits] == accumulation
            assert sent["scatter", 4 * logits] == accumulation
            assert sent["scatter", 4 * 256 * 8] == accumulation
    first = 4 * (4096 * 512 + 512 + 2 * 512 * 512)
    assert first - 4 * 512 * 512 < 10 * MIB <= first
    assert messages(run_of(), 0)["broadcast", first] == 1
    assert messages(run_of(), 0)["reduce", first - 4 * 512 * 512] == 1


def test_gpu_0_is_fuller_by_the_logits_of_the_others() -> None:
    """GPU 0 gathers n times the logits (fp32: 4 bytes), keeps them and their log-softmax (4), where one GPU keeps the log-softmax alone. All else that
    it saves is one GPU's."""
    model = {**SMALL, "vocab": 32768}
    n, logits = 4, 256 * 32768 * 4
    alone = predict(build_run(model=model, cluster={"gpu": "a100", "gpus": 1}, recipe={"precision": "fp32", "seq_len": 256})).roles[0].memory
    spread = predict(run_of(n, model=model)).roles[0].memory
    assert alone and spread and alone.activations_bytes and spread.activations_bytes
    batch = 2 * 256 * 8
    assert spread.activations_bytes - alone.activations_bytes == (2 * n - 1) * logits + (n - 1) * batch


def test_gradients_of_all_are_there_before_any_is_summed() -> None:
    """One Broadcast node has all parameters as inputs (_functions.py), so ReduceAddCoalesced gets all replicas' gradients at once: when it is done, GPU 0
    holds its own and the sums, beside parameters and Adam's states; another GPU its own alone."""
    tiny = run_of(model={**SMALL, "vocab": 256, "hidden": 1024, "ffn": 4096, "heads": 8, "layers": 8}, seq_len=8)
    params = 4 * tiny.model.params
    first, other = (r.memory.allocated for r in predict(tiny).roles if r.memory)
    chunk = 16 * MIB  # a matrix of ffn x hidden is larger than 10 MiB, and a chunk of its own
    assert params * 5 <= first.total_bytes <= params * 5 + chunk + MIB
    assert params * 1 <= other.total_bytes <= params * 1.2 + chunk


def test_forwards_are_launched_one_after_the_other() -> None:
    """parallel_apply.py starts a thread per GPU in one interpreter; a small model's forward waits for the host n times as long as DDP's."""
    small = {**SMALL, "hidden": 128, "ffn": 256, "vocab": 256, "heads": 2, "kv_heads": 2, "layers": 12}
    ddp, one = (predict(run_of(8, s, small, seq_len=64)).roles[0].time for s in ("ddp", "dataparallel"))
    assert ddp and one
    assert one.phases["forward"] > 7 * ddp.phases["forward"]
    assert one.phases["backward"] < 2 * ddp.phases["backward"]


def test_dataparallel_is_slower_than_ddp_as_published() -> None:
    """Hugging Face, transformers, docs/source/en/perf_train_gpu_many.mdx: GPT-2 with 4 sequences of 1,024 a GPU, fp32, two TITAN RTX on two NVLinks
    (50 GB/s one way): 200 steps take 110.6 s under DataParallel, 101.9 s under DDP. A V100 (15.7 against 16.3 TFLOP/s in fp32) on a third of its
    links stands in; its own step is not compared. The published outputs hold the loss of each replica besides the logits."""
    steps = []
    for strategy in ("dataparallel", "ddp"):
        run = build_run(model="gpt2-small", cluster={"gpu": "v100", "gpus": 2, "link_factors": {"nvlink": 1 / 3}}, plan={"strategy": strategy},
                        recipe={"precision": "fp32", "micro_batch": 4, "seq_len": 1024, "attention": "eager", "dropout": 0.1})
        steps.append(predict(run, scaling=False).step_s)
    assert steps[0] and steps[1]
    assert steps[0] / steps[1] == pytest.approx(110.5948 / 101.9003, rel=0.06)


@pytest.mark.parametrize(("change", "field"), [
    ({"cluster": {"gpu": "h100", "gpus": 16}}, "plan.single_process"), ({"plan": {"strategy": "dataparallel", "tp": 2}}, "plan.single_process"),
    ({"plan": {"strategy": "dataparallel", "pp": 2}}, "plan.single_process"),
    ({"plan": {"strategy": "dataparallel", "framework": "megatron"}}, "plan.framework"),
    ({"recipe": {"loss": "chunked"}}, "recipe.loss"), ({"recipe": {"compile": True}}, "recipe.compile"),
    ({"cluster": {"gpu": "cpu_epyc_2core", "gpus": 2}}, "plan.strategy")])
def test_what_dataparallel_cannot_do_is_refused(change: dict[str, Any], field: str) -> None:
    given: dict[str, Any] = {"model": SMALL, "cluster": {"gpu": "h100", "gpus": 4}, "plan": {"strategy": "dataparallel"}, **change}
    with pytest.raises(PlanError) as caught:
        predict(build_run(**given))
    assert caught.value.field == field
