"""The accuracy harness: what it reads from a record, what it counts, and the figures of a toy set worked by hand."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.accuracy.__main__ import main
from benchmarks.accuracy.assumptions import Rules, applies, load_rules
from benchmarks.accuracy.markdown import fill
from benchmarks.accuracy.plot import plot_all, ticks
from benchmarks.accuracy.reader import Refused, network_rate, read
from benchmarks.accuracy.score import Pair, Row, line, load_records, score, score_all
from benchmarks.accuracy.statistics import (
    changed_setting,
    direction,
    distinct,
    errors_of,
    flat,
    pairs_of,
    quantile,
    refusals,
    regret,
    summary,
    verdicts,
)
from benchmarks.accuracy.text import report
from costmodel.spec import Run

LLAMA = {"name": "llama3-8b", "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "ffn": 14336, "mlp": "swiglu",
         "vocab": 128256, "tied_embeddings": False, "attention": "gqa", "positions": "rope", "biases": False, "norm": "rmsnorm"}
GPT = {"name": "gpt", "layers": 12, "hidden": 512, "heads": 8, "kv_heads": 8, "head_dim": 64, "ffn": 2048, "mlp": "gelu", "vocab": 50257,
       "tied_embeddings": True, "attention": "mha", "positions": "learned", "biases": True, "norm": "layernorm"}
FSDP = {"strategy": "fsdp", "dp": 8, "dp_shard": 8, "dp_replicate": 1, "tp": 1, "sequence_parallel": False, "pp": 1, "vpp": 1, "cp": 1, "ep": 1,
        "reshard_after_forward": True}
MEGATRON = {"strategy": "megatron", "dp": 8, "tp": 1, "sequence_parallel": False, "pp": 1, "vpp": 1, "cp": 1, "ep": 1}


def record(**changes: Any) -> dict[str, Any]:
    """A torchtitan record of one FSDP run; keys such as "plan.tp" or "measured" change it, None removes."""
    made: dict[str, Any] = {
        "id": "one", "source": "pytorch/torchtitan commit 0", "source_date": "2024-12", "model": dict(LLAMA),
        "cluster": {"gpus": 8, "gpus_per_node": 8, "intra_node": "NVLink4 900GB/s", "accelerator": "h100_sxm"}, "plan": dict(FSDP),
        "recipe": {"seq_len": 8192, "micro_batch": 2, "grad_accum": 1, "global_batch": 16, "precision": "bf16-mixed", "param_dtype": "fp32",
                   "grad_dtype": "fp32", "reduce_dtype": "fp32", "optimizer": "adamw", "checkpointing": "full", "compile": False,
                   "flash_attention": True, "other": ""},
        "measured": {"step_time_s": 2.0, "peak_mem_gib": 50.0, "mem_kind": "reserved", "oom": False}, "quality": "A", "inferred": []}
    for path, value in changes.items():
        *keys, last = path.replace("__", ".").split(".")
        table = made
        for key in keys:
            table = table[key]
        if value is None:
            table.pop(last, None)
        else:
            table[last] = value
    return copy.deepcopy(made)


def run_of(**changes: Any) -> Run:
    return read(record(**changes), load_rules()).run


def assumed(**changes: Any) -> dict[str, Any]:
    return {name: value for name, value, _ in read(record(**changes), load_rules()).assumed}


# -- reading ------------------------------------------------------------------------------------------------------------------


def test_an_fsdp_record_becomes_its_run() -> None:
    run = run_of()
    assert (run.model.layers, run.model.vocab, run.model.gated, run.model.qkv_bias) == (32, 128256, True, False)
    assert (run.plan.zero, run.plan.dp_shard, run.plan.framework, run.plan.checkpointing.mode) == (3, 8, "pytorch", "full")
    assert run.recipe.precision.parameter == "fp32"
    assert run.recipe.attention == "fa2"


def test_stated_dtypes_change_the_preset() -> None:
    assert run_of(recipe__reduce_dtype="bf16").recipe.precision.reduce == "bf16"


def test_the_same_word_means_other_dtypes_under_megatron() -> None:
    run = run_of(source="NVIDIA/Megatron-LM tests/x", model=GPT, plan=MEGATRON, recipe__param_dtype=None, recipe__grad_dtype=None,
                 recipe__reduce_dtype=None, recipe__seq_len=1024)
    assert (run.recipe.precision.parameter, run.recipe.precision.master) == ("bf16", "fp32")


def test_an_unstated_distributed_optimizer_is_a_rule_of_the_source() -> None:
    unstated: dict[str, Any] = {"model": GPT, "plan": MEGATRON, "recipe__seq_len": 1024}
    assert run_of(source="NVIDIA-NeMo/Megatron-Bridge docs", **unstated).plan.zero == 1
    assert run_of(source="VIA-Research/vTrain data", **unstated).plan.zero == 0
    stated = {**unstated, "plan": {**MEGATRON, "distributed_optimizer": False}}
    assert run_of(source="NVIDIA-NeMo/Megatron-Bridge docs", **stated).plan.zero == 0


def test_megatron_pads_the_vocabulary_to_a_multiple_of_128_tp() -> None:
    megatron: dict[str, Any] = {"source": "NVIDIA/Megatron-LM tests/x", "model": GPT, "recipe__seq_len": 1024}
    assert run_of(plan=MEGATRON, **megatron).model.vocab == 50304
    assert run_of(plan={**MEGATRON, "dp": 2, "tp": 4}, recipe__global_batch=4, **megatron).model.vocab == 50688


def test_flags_in_free_text_are_read() -> None:
    run = run_of(source="NVIDIA/Megatron-LM tests/x", model=GPT, plan=MEGATRON, recipe__seq_len=1024,
                 recipe__other="transformer-impl=local; max-position-embeddings=2048; attention-dropout=0.1, hidden-dropout=0.1")
    assert (run.recipe.dropout, run.recipe.attention, run.model.position_rows) == (0.1, "eager", 2048)
    assert run.plan.overlap_grad_reduce is False


def test_dp_shard_of_a_record_that_includes_cp_does_not_count_it_twice() -> None:
    run = run_of(**{"plan.dp": 4, "plan.dp_shard": 8, "plan.cp": 2, "recipe.global_batch": 8})
    assert (run.plan.dp_shard, run.plan.cp) == (4, 2)


def test_hybrid_sharding_keeps_its_replicas() -> None:
    run = run_of(**{"plan.dp": 8, "plan.dp_replicate": 2, "plan.dp_shard": 4})
    assert (run.plan.dp_replicate, run.plan.dp_shard) == (2, 4)


def test_stage_layers_where_the_partition_counts_embedding_and_head() -> None:
    run = run_of(source="bigscience-workshop/bigscience train", model={**GPT, "layers": 70}, recipe__seq_len=1024, recipe__optimizer="adam",
                 plan={**MEGATRON, "strategy": "megatron+zero1", "dp": 1, "pp": 12, "pp_schedule": "1f1b"}, recipe__global_batch=2,
                 cluster={"gpus": 12, "gpus_per_node": 4, "accelerator": "a100_sxm_80gb"},
                 recipe__other="partition counts embedding layers")
    assert run.plan.stage_layers == (5, *[6] * 10, 5)


@pytest.mark.parametrize(("words", "ranks", "kind", "rate"), [
    ("1600Gb/s RoCE per node", 8, "roce", 25e9), ("800 Gb/s per node (from config)", 8, "", 12.5e9),
    ("HDR InfiniBand, 8x200Gb/s per node (Selene)", 8, "infiniband", 25e9), ("4x Omni-Path 100Gb/s (Jean Zay)", 8, "infiniband", 6.25e9),
    ("400Gb/s RDMA per GPU (Grand Teton)", 8, "roce", 50e9)])
def test_network_words_are_one_way_rates_of_a_gpu(words: str, ranks: int, kind: str, rate: float) -> None:
    assert network_rate(words, ranks) == (kind, rate)


def test_words_without_a_rate_leave_the_catalogues_network() -> None:
    assert network_rate("not stated (AWS EFA likely)", 8) is None


def test_nvlink_in_words_counts_both_ways() -> None:
    assert run_of().cluster.levels[0].bytes_per_s == pytest.approx(450e9, rel=0.01)
    assert run_of(**{"cluster.intra_node": "NVLink3 600GB/s"}).cluster.levels[0].bytes_per_s == 300e9


def test_a_measured_value_decides_nothing() -> None:
    before = read(record(), load_rules())
    after = read(record(measured={"step_time_s": 99.0, "peak_mem_gib": 1.0, "mem_kind": "active", "oom": True}), load_rules())
    assert before.run == after.run
    assert before.assumed == after.assumed


def test_a_rule_on_a_measured_value_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text('[[assume]]\nfield = "recipe.loss"\nvalue = "fused"\nreason = "r"\nwhen = {"measured.oom" = true}\n')
    with pytest.raises(ValueError, match=r"depends on measured\.oom"):
        load_rules(path)


def test_every_rule_has_a_reason() -> None:
    rules = load_rules()
    for source in (rules.general, *rules.sources):
        assert all(rule.reason for rule in source.assume)
        assert all(reason for reason, _ in source.refuse)
    assert all(s.reason and set(s.kinds) <= {"time", "memory"} for s in rules.suspects)


def test_what_a_record_states_wins_over_a_rule() -> None:
    assert "plan.checkpointing" not in assumed()
    assert assumed(recipe__checkpointing=None)["plan.checkpointing"] == "none"


@pytest.mark.parametrize(("when", "holds"), [
    ({"source_date": {"from": "2024-06"}}, True), ({"source_date": {"before": "2024-06"}}, False), ({"recipe.other": {"lacks": "async"}}, True),
    ({"plan.tp": {"above": 1}}, False), ({"plan.nothing": {"missing": True}}, True), ({"cluster.accelerator": ["a100", "h100_sxm"]}, True),
    ({"quality": "B"}, False), ({"model.name": {"has": "llama"}, "quality": "A"}, True)])
def test_conditions(when: dict[str, Any], holds: bool) -> None:
    assert applies(when, record()) is holds


@pytest.mark.parametrize(("changes", "reason"), [
    ({"model": {"name": "secret"}}, "model shape not stated"), ({"cluster.gpus": None}, "number of GPUs not stated"),
    ({"recipe.seq_len": None}, "sequence length not stated"), ({"recipe.precision": "nvfp4"}, "4-bit arithmetic"),
    ({"recipe.optimizer": "SOAP"}, 'optimizer "SOAP" is not described'), ({"model.mlp": "maxout"}, 'feed-forward block "maxout" is not described'),
    ({"model.positions": "none"}, "hybrid model (Mamba layers)")])
def test_refusals_say_what_is_missing(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(Refused) as refused:
        read(record(**changes), load_rules())
    assert str(refused.value) == reason


# -- scoring ------------------------------------------------------------------------------------------------------------------


def test_a_plan_that_cannot_be_is_refused_without_its_numbers() -> None:
    rows = score_all([record(**{"plan.dp": 5}), record(**{"plan.dp": 3})], load_rules())
    assert set(refusals(rows).values()) == {2}
    assert not any(digit in next(iter(refusals(rows))) for digit in "0123456789")


def test_a_records_memory_is_compared_by_its_kind() -> None:
    row = score(record(), load_rules())
    kinds = {pair.kind: pair for pair in row.pairs}
    assert set(kinds) == {"time", "reserved"}
    allocated = score(record(**{"measured.mem_kind": "allocated"}), load_rules()).figure("allocated")
    assert allocated
    assert kinds["reserved"].predicted > allocated.predicted
    unknown = score(record(**{"measured.mem_kind": "unknown"}), load_rules())
    assert [pair.kind for pair in unknown.pairs] == ["time"]


def test_further_figures_of_a_record_are_scored_as_their_kind() -> None:
    row = score(record(**{"measured.other": {"peak_active_gib": 40.0}}), load_rules())
    assert {pair.kind for pair in row.pairs} == {"time", "reserved", "active"}


def test_tokens_per_second_stand_in_for_a_missing_step_time() -> None:
    row = score(record(measured={"tokens_per_s_per_gpu": 8192.0}), load_rules())
    time = row.figure("time")
    assert time
    assert time.measured == 2.0  # 2 sequences of 8192 tokens a GPU


def test_the_format_of_rows() -> None:
    made = line(score(record(), load_rules()))
    assert list(made) == ["id", "source", "quality", "refused", "step_time_s", "memory_gib", "oom"]
    assert made["step_time_s"]["measured"] == 2.0
    assert made["step_time_s"]["predicted"] > 0
    assert made["step_time_s"]["low"] is made["step_time_s"]["high"] is made["refused"] is None
    assert made["memory_gib"]["mem_kind"] == "reserved"
    assert made["oom"] == {"predicted": False, "measured": False}
    refused = line(score(record(**{"recipe.seq_len": None}), load_rules()))
    assert refused["refused"] == "sequence length not stated"
    assert refused["step_time_s"] == {"predicted": None, "measured": 2.0, "low": None, "high": None}
    json.dumps([made, refused])


# -- statistics ---------------------------------------------------------------------------------------------------------------


def test_errors_against_hand_computation() -> None:
    pairs = [Pair("time", 1.1, 1.0), Pair("time", 0.8, 1.0), Pair("time", 1.5, 1.0), Pair("time", 1.0, 1.0)]
    found = errors_of(pairs)
    assert found
    assert found.count == 4
    assert found.mean_abs == pytest.approx(0.2)
    assert found.median_abs == pytest.approx(0.15)
    assert found.p90_abs == pytest.approx(0.41)  # between 0.2 and 0.5, at 2.7 of 3
    assert found.bias == pytest.approx(0.1)
    assert errors_of([]) is None


def test_quantile_interpolates() -> None:
    assert quantile([1.0, 2.0, 3.0], 0.9) == pytest.approx(2.8)


def toy(name: str, measured: float, predicted: float, rules: Rules, oom: bool = False, **changes: Any) -> Row:
    """A row whose predicted time is given, for a record changed in some settings."""
    row = score(record(id=name, measured={"step_time_s": measured, "oom": oom}, **changes), rules)
    assert row.run
    per = row.run.cluster.gpus / row.run.tokens_per_step
    row.pairs = [Pair("time", predicted, measured)]
    row.seconds_per_token, row.predicted_per_token = measured * per, predicted * per
    return row


def test_direction_counts_pairs_one_setting_and_ten_percent_apart() -> None:
    rules = load_rules()
    base = toy("base", 2.0, 2.0, rules)
    compiled = toy("compiled", 1.5, 1.6, rules, recipe__compile=True)
    close = toy("close", 1.9, 9.0, rules, recipe__allocator="x", recipe__checkpointing="none")  # 5% apart from base: no direction
    assert direction([base, compiled]) == {"compile": (1, 1)}
    assert direction([base, close]) == {}
    wrong = toy("wrong", 1.0, 3.0, rules, recipe__checkpointing="none")
    assert direction([base, wrong]) == {"checkpointing": (0, 1)}
    both = toy("both", 1.0, 1.0, rules, recipe__checkpointing="none", recipe__compile=True)
    assert direction([base, both]) == {}


def test_a_longer_sequence_may_bring_its_batch() -> None:
    rules = load_rules()
    short = toy("short", 2.0, 2.0, rules)
    long = toy("long", 2.5, 2.2, rules, recipe__seq_len=16384, recipe__micro_batch=1, recipe__global_batch=8)
    assert direction([short, long]) == {"sequence": (1, 1)}
    assert short.run and long.run
    assert changed_setting(flat(short.run), flat(long.run)) == "sequence"
    assert changed_setting(flat(short.run), flat(short.run)) is None


def test_repeats_count_once_with_their_median() -> None:
    rules = load_rules()
    rows = [toy(f"r{i}", measured, 2.0, rules) for i, measured in enumerate((1.0, 2.0, 4.0))]
    merged = distinct(rows)
    assert [row.figure("time") for row in merged] == [Pair("time", 2.0, 2.0)]


def test_regret_of_the_plan_predicted_best() -> None:
    rules = load_rules()
    rows = [toy("a", 2.0, 1.0, rules), toy("b", 1.6, 1.1, rules, recipe__checkpointing="none"),
            toy("c", 2.4, 3.0, rules, recipe__micro_batch=1, recipe__grad_accum=2)]
    found = regret(rows)
    assert found
    assert (found.groups, found.plans) == (1, 3)
    assert found.mean == found.worst == pytest.approx(2.0 / 1.6)
    assert found.random == pytest.approx(2.0 / 1.6)  # (2.0 + 1.6 + 2.4) / 3
    assert regret(rows[:1]) is None


def test_verdicts_are_counted() -> None:
    rules = load_rules()
    rows = [toy("ran", 2.0, 2.0, rules), toy("oom", 2.0, 2.0, rules, oom=True)]
    for row, predicted, risky in zip(rows, (False, True), (True, False), strict=True):
        row.oom_predicted, row.risky = predicted, risky
    assert verdicts(rows) == {"ran, called risky": 1, "out of memory, foreseen": 1}


def test_doubtful_records_are_reported_both_ways_and_launch_bound_ones_apart() -> None:
    rules = load_rules()
    good, bad, tiny = (toy(name, 2.0, 3.0, rules) for name in ("good", "bad", "tiny"))
    bad.suspect, tiny.launch_bound = {"time": "why"}, True
    rows = [good, bad, tiny]
    assert len(pairs_of(rows, "time")) == 2
    assert len(pairs_of(rows, "time", suspects=False)) == 1
    assert len(pairs_of(rows, "time, launch-bound")) == 1


def test_known_doubtful_records_match_records_that_exist() -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "published" / "runs.jsonl"
    rules = load_rules()
    ids = [str(r["id"]) for r in load_records(path)]
    assert len(ids) == len(set(ids)) > 1000
    for suspect in rules.suspects:
        assert any(rules.suspicions(i).get(kind) == suspect.reason for i in ids for kind in suspect.kinds), suspect.ids


# -- the command ----------------------------------------------------------------------------------------------------------------


def test_any_file_of_that_form_is_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [record(id="known"), record(id="stranger", source="somewhere else entirely", quality=None, inferred=None),
               {"id": "bare", "source": "x", "model": {"name": "m"}}]
    path = tmp_path / "others.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    rows = tmp_path / "rows.jsonl"
    assert main(["--records", str(path), "--rows", str(rows), "--plot", str(tmp_path / "plots")]) == 0
    printed = capsys.readouterr().out
    assert "3 records, 2 predicted, 1 refused" in printed
    assert "1  model shape not stated" in printed
    assert "ASSUMED" in printed
    assert [json.loads(text)["id"] for text in rows.read_text().splitlines()] == ["known", "stranger", "bare"]
    assert main(["--records", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["all"]["records"] == 3


def test_the_report_and_the_plots_of_a_few_rows(tmp_path: Path) -> None:
    rules = load_rules()
    rows = [score(record(id=f"r{i}", **{"measured.step_time_s": 1.0 + i, "recipe.micro_batch": 1 + i, "recipe.global_batch": 8 + 8 * i}), rules)
            for i in range(3)]
    text = "\n".join(report(rows, summary(rows), 2))
    assert text.count("GiB for") + text.count(" s for") == 2
    plots = plot_all(rows, tmp_path)
    assert sorted(p.name for p in plots) == ["torchtitan-reserved.svg", "torchtitan-time.svg"]
    assert plots[0].read_text().count("<circle") == 3


def test_ticks_lie_inside() -> None:
    assert ticks(0.9, 120) == [1, 2, 5, 10, 20, 50, 100]
    assert all(10 <= t <= 11.5 for t in ticks(10, 11.5))
    assert len(ticks(10, 11.5)) >= 3


def test_a_page_keeps_its_text_and_gets_its_tables(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- rows -->\nold\n<!-- /rows -->\nbetween\n<!-- refused -->\n<!-- /refused -->\nafter\n")
    found = summary([score(record(), load_rules()), score(record(**{"recipe.seq_len": None}), load_rules())])
    for _ in range(2):
        fill(page, found)
    assert page.read_text() == ("before\n<!-- rows -->\n2 records: 1 predicted, 1 refused.\n<!-- /rows -->\nbetween\n<!-- refused -->\n"
                                "| rows | refused because |\n|---|---|\n| 1 | sequence length not stated |\n<!-- /refused -->\nafter\n")
