"""DeepSpeed's own ZeRO: what it computes against one process, and what it holds and sends against the prediction of its dialect."""

import json
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from gloo_ranks import perform_once  # noqa: E402
from running_jobs import Running  # noqa: E402
from small_runs import LLAMA  # noqa: E402
from test_same_mathematics import CLIPPED, GPT, OPTIMIZERS  # noqa: E402
from test_same_mathematics import LLAMA as UNEVEN  # noqa: E402

from costmodel.inputs import build_run  # noqa: E402
from costmodel.prediction import predict  # noqa: E402
from costmodel.spec import PlanError  # noqa: E402
from execute import support  # noqa: E402

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="the extra deepspeed is not installed")
SMALL_BUCKET = {"bucket_bytes": 1 << 20}
MODELS = {"llama": UNEVEN, "gpt": GPT}


def run_of(stage: int, model: dict[str, Any] = LLAMA, recipe: dict[str, Any] | None = None, **plan: Any) -> dict[str, Any]:
    return {"model": model, "cluster": {"gpu": "cpu_xeon_2core", "gpus": 2}, "plan": {"framework": "deepspeed", "zero": stage, **plan},
            "recipe": {"seq_len": 128, "micro_batch": 2, "precision": "fp32", **(recipe or {})}}


def learning(model: str, grad_accum: int, optimizer: str) -> dict[str, Any]:
    return {"seq_len": 16, "micro_batch": 2, "grad_accum": grad_accum, "precision": "fp32", "optimizer": OPTIMIZERS[optimizer], "clip_norm": CLIPPED,
            "warmup_steps": 2}


LEARN = {f"stage {stage}, {model}, {m} micro-batches, {optimizer}": (stage, model, m, optimizer)
         for stage in (1, 2, 3) for model, m, optimizer in (("llama", 1, "sgd"), ("llama", 2, "adamw"), ("gpt", 2, "sgd"))}
HOLD = {f"stage {stage}, {precision}, {buckets}, {m} micro-batches": run_of(
            stage, recipe={"precision": precision, "grad_accum": m, "optimizer": "adamw:foreach"}, **(SMALL_BUCKET if buckets == "small buckets" else {}))
        for stage in (1, 2, 3) for precision, buckets, m in (("fp32", "small buckets", 2), ("bf16-mixed", "one bucket", 1), ("bf16-mixed", "small buckets", 2))}
HOLD["stage 2, fp32 gradients"] = run_of(2, recipe={"precision": {"base": "bf16-mixed", "gradient": "fp32"}}, **SMALL_BUCKET)
HOLD["stage 1, overlapping"] = run_of(1, recipe={"precision": "bf16-mixed", "grad_accum": 2}, overlap_grad_reduce=True, **SMALL_BUCKET)
OFFLOADED = {f"stage {stage}, {offload} offloaded, {m} micro-batches": {**given, "cluster": {"gpu": "h100", "gpus": 2}}
             for stage, offload, m in ((1, "optimizer", 2), (2, "optimizer", 1), (2, "optimizer", 3), (3, "optimizer", 2), (3, "params", 1))
             for given in [run_of(stage, recipe={"precision": {"base": "bf16-mixed", "gradient": "bf16", "reduce": "bf16"}, "grad_accum": m,
                                                 "optimizer": "adamw:foreach"}, offload=offload, **SMALL_BUCKET)]}
HOLD["stage 2, unclipped"] = run_of(2, recipe={"precision": "bf16-mixed", "clip_norm": 0.0})


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What two real ranks saw."""
    cases: dict[str, Any] = {name: ("arrive", run_of(stage, MODELS[model], learning(model, m, optimizer), bucket_bytes=8192))
                             for name, (stage, model, m, optimizer) in LEARN.items()}
    cases |= {name: ("seen last", given) for name, given in HOLD.items()}
    cases |= {name: ("offloads", given) for name, given in OFFLOADED.items()}
    return perform_once(cases, 2, tmp_path_factory, "deepspeed")


@needs_deepspeed
@pytest.mark.parametrize("name", LEARN)
def test_it_computes_what_one_process_computes(name: str, real: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    """Losses of five steps, and where the parameters arrived, of one process with both ranks' sequences."""
    from gloo_worker import arrive
    _, model, m, optimizer = LEARN[name]
    alone = build_run(model=MODELS[model], cluster={"gpu": "cpu_xeon_2core", "gpus": 1}, plan={"strategy": "single"},
                      recipe={**learning(model, m, optimizer), "micro_batch": 4})
    losses = arrive(alone, tmp_path)
    done = real[0][name]
    assert max(losses) - min(losses) > 1e-2 * losses[0]
    assert done["result"] == pytest.approx(losses, rel=1e-4)
    expected, found = torch.load(tmp_path / "0.pt"), torch.load(real[1] / str(done["number"]) / "1.pt")
    assert found.keys() == expected.keys()
    for parameter, values in expected.items():
        assert torch.linalg.vector_norm(found[parameter] - values) <= 1e-3 * torch.linalg.vector_norm(values), parameter


@needs_deepspeed
@pytest.mark.parametrize("name", HOLD)
def test_it_holds_and_sends_what_is_predicted(name: str, real: tuple[dict[str, Any], Path]) -> None:
    """States between steps to the byte, collectives one by one, the peak within 5%."""
    seen, role = real[0][name]["result"], predict(build_run(**HOLD[name]), scaling=False).roles[0]
    memory = role.memory
    assert memory is not None
    assert {k: v for k, v in seen["states"].items() if k != "temporaries"} == memory.states
    sent: Counter[tuple[Any, ...]] = Counter()
    for kind, nbytes, count, group, dtype in seen["collectives"]:
        sent[kind, nbytes, group, dtype] += count
    predicted: Counter[tuple[Any, ...]] = Counter()
    for c in role.collectives or ():
        predicted[c.kind, c.message_bytes, c.group, c.dtype] += c.count
    assert sent == predicted
    assert seen["phases"]["steady step"] == pytest.approx(memory.allocated.total_bytes, rel=0.05)


@needs_deepspeed
@pytest.mark.parametrize("name", OFFLOADED)
def test_it_keeps_in_host_memory_what_is_predicted(name: str, real: tuple[dict[str, Any], Path]) -> None:
    """To the byte, by DeepSpeed's own names of its tensors."""
    memory = predict(build_run(**OFFLOADED[name]), scaling=False).roles[0].memory
    assert memory is not None and memory.host is not None
    assert real[0][name]["result"] == memory.host.states


@needs_deepspeed
def test_a_job_is_timed_and_reported(start: Callable[..., Running]) -> None:
    running = start("--framework", "deepspeed", "--precision", "bf16-mixed", "--steps", "2", "--warmup", "1", "--json", strategy="zero2")
    code, out, errors = running.ended()
    assert code == 0, errors
    report = json.loads(out)["report"]
    assert [(r["role"], r["ranks"]) for r in report["roles"]] == [("every rank", 2)]
    assert report["roles"][0]["time"]["communication_s"]["dp_shard"] > 0


def test_without_the_extra_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "find_spec", lambda name: None)
    run = build_run(**run_of(2))
    support.check_supported(run, "run")
    with pytest.raises(PlanError, match=r"plan.framework = deepspeed: DeepSpeed is not installed. Install it with: pip install .*\[deepspeed\]"):
        support.check_installed(run)


@pytest.mark.parametrize(("given", "field"), [
    (run_of(0), "plan.zero"), (run_of(2, recipe={"precision": "bf16-pure"}), "recipe.precision"),
    (run_of(1, recipe={"precision": {"base": "bf16-mixed", "gradient": "fp32"}}), "recipe.precision.gradient"),
    (run_of(2, recipe={"optimizer": "muon"}), "recipe.optimizer"), (run_of(2, recipe={"compile": True}), "recipe.compile"),
    (run_of(2, sync_each_micro_batch=False), "plan.sync_each_micro_batch")])
def test_what_it_is_not_given_is_refused(given: dict[str, Any], field: str) -> None:
    with pytest.raises(PlanError) as error:
        support.check_supported(build_run(**given), "run")
    assert error.value.field == field


@pytest.mark.parametrize("mode", ["dryrun", "solo"])
def test_it_has_no_dry_run_and_is_not_alone(mode: Any) -> None:
    with pytest.raises(PlanError, match=r"plan.framework = deepspeed: DeepSpeed"):
        support.check_supported(build_run(**run_of(2)), mode)
