"""Profiles: what is shipped, how files merge, and what a user's own file may say."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from costmodel.catalog import cluster, list_accelerators
from costmodel.catalog.profiles import DATA, MissingConstantError, Profile, list_profiles, load_profile
from costmodel.spec import Cluster, Model, Plan, PlanError, Recipe, Run

KEYS_A_STEP_NEEDS = ("matmul.bf16.peak_share", "matmul.fp32.peak_share", "attention.backward", "bandwidth.share", "copy.share",
                     "host.eager.forward_s", "host.eager.backward_s", "host.eager.recompute_s", "host.compile.op_s", "host.graph.kernel_s",
                     "host.collective_s", "host.optimizer.fused_s", "host.multiplier", "overlap.contention", "step.fixed_s",
                     "jitter.per_doubling", "moe.layer_s", "memory.context_bytes", "memory.nccl_node_bytes",
                     "memory.workspace_bytes", "memory.split_default", "memory.split_expandable")


def run_on(where: Cluster, framework: Any = "pytorch") -> Run:
    model = Model(layers=2, hidden=256, heads=4, ffn=512, vocab=1024)
    plan = Plan(framework=framework, zero=1, dp_shard=where.gpus) if framework == "nanochat" else Plan(framework=framework, dp_replicate=where.gpus)
    precision = Recipe().precision.model_copy(update={"compute": "bf16" if "bf16" in where.accelerator.flops_per_s else "fp32"})
    return Run(model=model, cluster=where, plan=plan, recipe=Recipe(seq_len=512, global_batch=where.gpus, precision=precision))


def profile_of(gpu: str, gpus: int = 8, framework: str = "pytorch") -> Profile:
    return load_profile(run_on(cluster(gpus, gpu=gpu), framework))


@pytest.mark.parametrize("framework", ["pytorch", "deepspeed", "megatron", "nanochat"])
def test_every_framework_defines_the_same_constants(framework: str) -> None:
    profile = profile_of("h100", framework=framework)
    assert profile.keys() == profile_of("h100").keys()
    for key in KEYS_A_STEP_NEEDS:
        assert profile.value(key) >= 0


def test_every_catalogued_accelerator_has_a_profile_with_all_constants() -> None:
    for entry in list_accelerators():
        profile = profile_of(entry.name, gpus=1)
        for key in KEYS_A_STEP_NEEDS:
            profile.constant(key)


def test_accelerators_with_measured_matmuls_are_no_guess_and_others_are() -> None:
    assert not profile_of("a100").guess
    assert not profile_of("h800").guess
    assert not profile_of("mi300x").guess
    assert profile_of("v100").guess
    assert profile_of("l4", gpus=1).guess


def test_rates_sustained_in_training_are_below_those_of_benchmarks_but_not_by_more_than_power_explains() -> None:
    """ai-dynamo/aiconfigurator, median of large GEMMs over the peak: A100 0.833, H100 0.784. A GPU that trains is up to 1.3 times slower than one
    that runs a single kernel for a moment (costmodel/cost/compute.py)."""
    for gpu, benchmark in (("a100", 0.833), ("h100", 0.784)):
        profile = profile_of(gpu)
        on_large = profile.value("matmul.bf16.peak_share") * 5120 / (5120 + profile.value("matmul.k_half"))
        assert benchmark / 1.3 <= on_large <= benchmark


def test_a_constant_carries_unit_spread_source_and_basis() -> None:
    constant = profile_of("h100").constant("tp.async_exposed")
    assert constant.unit == "share"
    assert constant.basis == "fitted"
    assert constant.log_sd == 0.3
    assert "torchtitan" in constant.source
    assert constant.place == "software.pytorch"


def test_a_file_may_hold_several_machines_by_place(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text('[hardware.h100_sxm.bandwidth]\nshare = 0.5\n'
                    '[hardware.a100_sxm_80gb.bandwidth]\nshare = {value = 0.6, unit = "share", date = "2026-01-01"}\n'
                    "[links.shm.link.shm]\nshare = 0.2\n")
    on = {gpu: load_profile(run_on(cluster(8, gpu=gpu)), str(path)) for gpu in ("h100", "a100", "b200")}
    assert on["h100"].value("bandwidth.share") == 0.5
    assert on["a100"].value("bandwidth.share") == 0.6
    assert on["a100"].constant("bandwidth.share").date == "2026-01-01"
    assert on["b200"].value("bandwidth.share") == profile_of("b200").value("bandwidth.share")


@pytest.mark.parametrize(("text", "message"), [("[hardware.nowhere.bandwidth]\nshare = 0.5\n", "no shipped file has that name"),
                                               ("[hardware.h100_sxm.bandwidth]\nshares = 0.5\n", "a constant that hardware.h100_sxm does not have"),
                                               ("[hosts.cpu.host]\nmultiplier = -1\n", "a finite number that is not negative")])
def test_a_mistake_under_a_place_names_it(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(PlanError, match=message):
        load_profile(run_on(cluster(8, gpu="h100")), str(path))


def test_every_shipped_constant_is_complete_and_plausible() -> None:
    for gpu in ("h100", "mi300x", "gaudi2", "l40s", "gb300"):
        profile = profile_of(gpu)
        for key, c in profile.constants.items():
            assert c.source and c.unit and c.basis in ("fitted", "measured", "datasheet", "assumed"), key
            assert 0 <= c.log_sd <= 1, key
            assert c.unit != "share" or 0 < c.value <= 1, key


def test_links_follow_the_topology_and_the_generation() -> None:
    one_node, two_nodes = profile_of("h100", 8), profile_of("h100", 16)
    assert "link.infiniband.share" not in one_node.constants
    assert "link.infiniband.share" in two_nodes.constants
    assert profile_of("a100").value("link.nvlink.hop_s") != one_node.value("link.nvlink.hop_s")
    assert profile_of("b300").value("link.nvlink.hop_s") == profile_of("b200").value("link.nvlink.hop_s")


def test_hosts_scale_by_machine() -> None:
    assert profile_of("gb200").value("host.multiplier") > profile_of("b200").value("host.multiplier")
    host = cluster(8, gpu="h100").model_copy(update={"host": "abacus"})
    with pytest.raises(PlanError, match=r"cluster\.host = abacus: no constants are known .* Use cpu or generic or grace"):
        load_profile(run_on(host))


def test_a_missing_constant_names_its_key_and_a_near_one() -> None:
    with pytest.raises(MissingConstantError, match=r"has no constant 'matmul\.bf16\.peak_shar'\. Did you mean matmul\.bf16\.peak_share"):
        profile_of("h100").value("matmul.bf16.peak_shar")


def test_a_profile_cannot_be_changed_only_replaced() -> None:
    profile = profile_of("h100")
    with pytest.raises(AttributeError):
        profile.guess = True  # type: ignore[misc]
    changed = profile.replace({"step.fixed_s": 0.5})
    assert (changed.value("step.fixed_s"), changed.constant("step.fixed_s").unit) == (0.5, "s")
    assert profile.value("step.fixed_s") != 0.5


def test_a_users_file_overrides_single_constants(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    table = '{value = 0.6, log_sd = 0.02, source = "our cluster", basis = "measured"}'
    path.write_text(f"[matmul.bf16]\npeak_share = {table}\n[step]\nfixed_s = 0.01\n")
    run = run_on(cluster(8, gpu="h100"))
    profile, shipped = load_profile(run, str(path)), load_profile(run)
    assert profile.value("matmul.bf16.peak_share") == 0.6
    assert profile.constant("matmul.bf16.peak_share").source == "our cluster"
    assert profile.constant("step.fixed_s").unit == "s"
    assert profile.value("bandwidth.share") == shipped.value("bandwidth.share")
    assert profile.name.startswith("mine over h100_sxm")


@pytest.mark.parametrize(("text", "message"), [
    ("[matmul.bf16]\npeak_shar = 0.6\n",
     r"matmul\.bf16\.peak_shar: mine\.toml sets a constant that does not exist .* Use matmul\.bf16\.peak_share"),
    ("[step]\nfixed_s = -1.0\n", r"step\.fixed_s\.value = -1\.0: it must be a finite number"),
    ("[step]\nfixed_s = {value = 1.0, unit = 'ms'}\n", r"step\.fixed_s\.unit = 'ms': this constant is in s"),
    ("[step]\nfixed_s = {value = 1.0, basis = 'hunch'}\n", "a constant is fitted, measured, datasheet or assumed"),
    ("[step]\nfixed_s = {value = 1.0, sd = 2}\n", r"step\.fixed_s\.sd: a constant has value, unit"),
    ("[step\n", "the file is not valid TOML"),
])
def test_a_users_mistake_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(PlanError, match=message):
        load_profile(run_on(cluster(8, gpu="h100")), str(path))


def test_a_shipped_profile_can_be_named() -> None:
    run = run_on(cluster(8, gpu="b100_sxm"))
    assert load_profile(run).guess
    assert not load_profile(run, "b200_sxm").guess
    assert "h100_sxm" in list_profiles()
    with pytest.raises(PlanError, match="no profile of that name is shipped"):
        load_profile(run, "h100_sx")
    with pytest.raises(PlanError, match="there is no such file"):
        load_profile(run, "nowhere.toml")


def test_accelerator_files_stay_small_enough_to_parse_at_once() -> None:
    for path in DATA.glob("hardware/*.toml"):
        assert path.stat().st_size < (6000 if path.stem == "common" else 3200), path.name


def test_loading_a_profile_imports_nothing_heavy() -> None:
    code = ("import sys, costmodel.catalog.profiles, costmodel.cost.compute, costmodel.cost.network\n"
            "print([m for m in ('torch', 'scipy', 'textual', 'numpy') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert done.stdout.strip() == "[]"
