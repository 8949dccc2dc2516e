"""From what a user wrote to a Run: batch arithmetic, strategy words, and errors that say what works."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel import PlanError, build_run, predict, resolve
from costmodel.catalog import STRATEGIES

ONE_B = {"params": "1B"}


def run(plan: dict[str, Any] | None = None, recipe: dict[str, Any] | None = None, gpus: int = 8, **cluster: Any) -> Any:
    return build_run(params="1B", cluster={"gpus": gpus, **cluster}, plan=plan or {}, recipe=recipe or {})


def error_of(**given: Any) -> PlanError:
    with pytest.raises(PlanError) as caught:
        resolve({**ONE_B, **given} if "model" not in given else given)
    return caught.value


# --- the batch: global = micro-batch x accumulation x dp (DeepSpeed's docs: train_batch_size = micro x accumulation x ranks)

@given(micro=st.integers(1, 8), accum=st.integers(1, 16), dp=st.sampled_from([1, 2, 4, 8, 16]))
def test_any_sufficient_set_of_batch_figures_gives_the_same_batch(micro: int, accum: int, dp: int) -> None:
    figures = {"micro_batch": micro, "grad_accum": accum, "global_batch": micro * accum * dp}
    whole = run(recipe=figures, gpus=dp).recipe
    for left_out in figures:
        part = {key: value for key, value in figures.items() if key != left_out}
        assert run(recipe=part, gpus=dp).recipe == whole


def test_the_batch_figures_give_the_gpus_where_none_are_given() -> None:
    resolved = resolve({**ONE_B, "plan": {"tp": 2}, "recipe": {"micro_batch": 2, "grad_accum": 4, "global_batch": 64}})
    assert resolved.run.cluster.gpus == 16
    assert "dp = 8" in resolved.assumed["cluster.gpus"]


def test_a_global_batch_that_does_not_divide_names_its_neighbours_that_do() -> None:
    error = error_of(cluster={"gpus": 8}, recipe={"global_batch": 33, "micro_batch": 2})
    assert str(error) == "recipe.global_batch = 33: it must be a multiple of micro_batch 2 x dp 8 = 16 sequences. Use 32 or 48."


def test_a_batch_given_whole_and_wrong_is_an_error() -> None:
    error = error_of(cluster={"gpus": 8}, recipe={"global_batch": 32, "micro_batch": 2, "grad_accum": 4})
    assert error.field == "recipe.global_batch"
    assert "micro_batch 2 x grad_accum 4 x dp 8 = 64" in error.rule


@pytest.mark.parametrize(("words", "beside", "sequences"), [
    ("4M", {}, 976), (4_194_304, {}, 1024), ("4M", {"micro_batch": 16}, 1024), ("1K", {}, 8), ("4M", {"grad_accum": 3}, 984)])
def test_a_batch_in_tokens_is_the_nearest_that_the_ranks_share(words: str | int, beside: dict[str, int], sequences: int) -> None:
    """By hand: 4,000,000 / 4096 = 976.6 sequences, in multiples of 8 ranks, of 16 x 8, of 3 x 8."""
    resolved = resolve({**ONE_B, "cluster": {"gpus": 8}, "recipe": {"seq_len": 4096, "batch_tokens": words, **beside}})
    assert resolved.run.recipe.global_batch == sequences
    assert resolved.assumed["recipe.global_batch"].startswith(f"{sequences} sequences = {sequences * 4096:,} tokens")


@pytest.mark.parametrize(("recipe", "field"), [
    ({"batch_tokens": "many"}, "recipe.batch_tokens"), ({"batch_tokens": True}, "recipe.batch_tokens"), ({"batch_tokens": -4}, "recipe.batch_tokens"),
    ({"batch_tokens": "4M", "global_batch": 64}, "recipe.batch_tokens"), ({"batch_tokens": "4M", "micro_batch": 1, "grad_accum": 2}, "recipe.batch_tokens"),
    ({"batch_tokens": "4M", "micro_batch": 0}, "recipe.micro_batch"), ({"batch_tokens": "4M", "seq_len": 0}, "recipe.seq_len"),
    ({"train_tokens": "1e99"}, "recipe.train_tokens"), ({"train_tokens": 0}, "recipe.train_tokens")])
def test_bad_tokens_name_their_field(recipe: dict[str, object], field: str) -> None:
    assert error_of(recipe=recipe).field == field


def test_tokens_are_sequences_times_length() -> None:
    assert run(recipe={"micro_batch": 2, "grad_accum": 4, "seq_len": 2048}).tokens_per_step == 2 * 4 * 8 * 2048


# --- strategies

@pytest.mark.parametrize(("word", "zero", "replicate", "shard"), [
    ("ddp", 0, 16, 1), ("zero1", 1, 1, 16), ("ZeRO-2", 2, 1, 16), ("zero_3", 3, 1, 16), ("fsdp", 3, 1, 16), ("FSDP2", 3, 1, 16), ("hsdp", 3, 2, 8)])
def test_a_strategy_word_means_its_stage_and_degrees(word: str, zero: int, replicate: int, shard: int) -> None:
    plan = run({"strategy": word}, gpus=16).plan
    assert (plan.zero, plan.dp_replicate, plan.dp_shard) == (zero, replicate, shard)


def test_data_parallel_words_that_are_no_sharding() -> None:
    assert run({"strategy": "dataparallel"}).plan.single_process
    assert run({"strategy": "megatron"}).plan.framework == "megatron"
    assert run({"strategy": "single"}, gpus=1).plan.world_size == 1


def test_a_strategy_and_a_stage_that_contradict_each_other_are_an_error() -> None:
    assert str(error_of(cluster={"gpus": 8}, plan={"strategy": "ddp", "zero": 3})) == (
        "plan.zero = 3: strategy ddp means zero = 0. Leave zero out, or the strategy.")


def test_one_degree_gives_the_other() -> None:
    assert run({"zero": 3, "dp_shard": 4}).plan.dp_replicate == 2
    assert run({"zero": 3, "dp_replicate": 4}).plan.dp_shard == 2


# --- words

def test_params_land_within_a_percent_and_say_the_shape() -> None:
    resolved = resolve(ONE_B)
    assert abs(resolved.run.model.params / 1e9 - 1) <= 0.01
    assert f"{resolved.run.model.params:,} parameters" in resolved.assumed["model"]


def test_every_default_that_decides_figures_is_said() -> None:
    assumed = resolve(ONE_B).assumed
    for field in ("cluster.gpu", "recipe.seq_len", "recipe.micro_batch", "recipe.grad_accum", "recipe.precision", "recipe.optimizer", "recipe.attention",
                  "recipe.loss", "recipe.compile", "recipe.cuda_graphs", "recipe.allocator", "recipe.grad_accum_fusion", "recipe.dropout",
                  "plan.checkpointing"):
        assert field in assumed, field


def test_tensor_parallelism_alone_in_pytorch_is_given_what_it_allows() -> None:
    """DTensor refuses torch.autocast here; FSDP has a mixed precision of its own."""
    resolved = resolve({**ONE_B, "cluster": {"gpus": 8}, "plan": {"tp": 8}})
    assert resolved.run.recipe.precision.name == "bf16-pure"
    assert resolved.assumed["recipe.precision"] == "bf16-pure (default under tensor parallelism, where torch.autocast is not predicted)"
    for plan in ({"tp": 2, "zero": 3}, {"tp": 8, "framework": "megatron"}):
        assert resolve({**ONE_B, "cluster": {"gpus": 8}, "plan": plan}).run.recipe.precision.name == "bf16-mixed"


def test_a_pipeline_in_pytorch_is_given_what_it_allows_and_says_so() -> None:
    resolved = resolve({**ONE_B, "cluster": {"gpus": 8}, "plan": {"pp": 4}})
    run = resolved.run
    assert (run.recipe.precision.name, run.model.tied_embeddings, run.recipe.grad_accum) == ("bf16-pure", False, 4)
    assert "autocast is not predicted" in resolved.assumed["recipe.precision"]
    assert "untied" in resolved.assumed["model"]
    sharded = resolve({**ONE_B, "cluster": {"gpus": 8}, "plan": {"pp": 4, "zero": 3}})
    assert (sharded.run.plan.reshard_after_forward, sharded.run.recipe.precision.name) == (False, "bf16-mixed")
    assert sharded.assumed["plan.reshard_after_forward"] == "false (under a pipeline FSDP2 keeps its parameters gathered)"
    assert resolve({**ONE_B, "cluster": {"gpus": 8, "gpu": "v100"}, "plan": {"pp": 4}}).run.recipe.precision.name == "fp32"
    for plan in ({"pp": 4, "strategy": "megatron"}, {"pp": 4, "framework": "megatron"}, {"zero": 3}):
        other = resolve({**ONE_B, "cluster": {"gpus": 8}, "plan": plan})
        assert (other.run.recipe.precision.name, other.run.model.tied_embeddings, other.run.plan.reshard_after_forward) == ("bf16-mixed", True, True)
        assert "plan.reshard_after_forward" not in other.assumed


@pytest.mark.parametrize(("recipe", "model", "plan"), [
    ({"precision": "bf16"}, {}, {}), ({}, {"tied_embeddings": True}, {}), ({}, {}, {"zero": 3, "reshard_after_forward": True})])
def test_what_is_given_stays_though_a_pipeline_refuses_it(recipe: dict[str, Any], model: dict[str, Any], plan: dict[str, Any]) -> None:
    given = {**ONE_B, "cluster": {"gpus": 8}, "plan": {"pp": 4, **plan}, "recipe": recipe, **({"model": model} if model else {})}
    with pytest.raises(PlanError, match=r"autocast|tie weights|gathered"):
        predict(resolve(given).run)


def test_what_is_given_is_not_assumed() -> None:
    resolved = resolve({"model": "llama-3-8b", "cluster": {"gpu": "a100", "gpus": 8}, "plan": {"strategy": "fsdp", "framework": "pytorch"},
                        "recipe": {"seq_len": 1024, "precision": "bf16-pure", "attention": "fa2", "micro_batch": 2, "grad_accum": 1}})
    assert {"model", "cluster.gpu", "plan.strategy", "plan.framework", "recipe.seq_len", "recipe.precision", "recipe.attention", "recipe.micro_batch",
            "recipe.grad_accum"}.isdisjoint(resolved.assumed)


@pytest.mark.parametrize(("word", "mode", "group", "every"), [
    ("none", "none", 1, 1), ("full", "full", 1, 1), ("full:4", "full", 4, 1), ("every:2", "full", 1, 2)])
def test_checkpointing_words(word: str, mode: str, group: int, every: int) -> None:
    c = run({"checkpointing": word}).plan.checkpointing
    assert (c.mode, c.group, c.every) == (mode, group, every)


def test_a_table_may_change_some_fields_of_a_word() -> None:
    r = run(recipe={"precision": {"base": "bf16-pure", "reduce": "fp32"}, "optimizer": {"base": "adamw:foreach", "lr": 0.1}}).recipe
    assert (r.precision.parameter, r.precision.reduce) == ("bf16", "fp32")
    assert (r.optimizer.name, r.optimizer.implementation, r.optimizer.lr) == ("adamw", "foreach", 0.1)


def test_part_of_a_precision_changes_the_default_one() -> None:
    changed = resolve({**ONE_B, "recipe": {"precision": {"reduce": "bf16"}}})
    assert changed.run.recipe.precision.model_dump(exclude={"reduce", "name"}) == resolve(ONE_B).run.recipe.precision.model_dump(exclude={"reduce", "name"})
    assert "recipe.precision.base" in changed.assumed


def test_a_changed_catalogue_model_keeps_no_width_that_followed_from_the_old_one() -> None:
    model = build_run(model={"base": "llama-3-8b", "hidden": 2048, "heads": 16}).model
    assert (model.embedding_dim, model.head_dim, model.kv_heads, model.layers) == (2048, 128, 8, 32)


def test_a_written_run_reads_back_as_itself() -> None:
    first = run({"strategy": "hsdp", "checkpointing": "full:2"}, {"global_batch": 64}, gpus=16)
    assert build_run(**first.model_dump(mode="json")) == first


# --- errors: the field, the value, the rule, a value that works

@pytest.mark.parametrize(("given", "text"), [
    ({"plan": {"zero": 4}}, "plan.zero = 4: a ZeRO stage is 0 (DDP), 1, 2 or 3 (FSDP). Use zero = 3."),
    ({"plan": {"zero": True}}, "plan.zero = True: a ZeRO stage is 0 (DDP), 1, 2 or 3 (FSDP). Use zero = 3."),
    ({"plan": {"zero": "3"}}, "plan.zero = 3: a ZeRO stage is 0 (DDP), 1, 2 or 3 (FSDP). Use zero = 3."),
    ({"plan": {"tp": 3}}, "plan.tp = 3: model.heads = 32 must be a multiple of tp. Use tp = 2 or 4."),
    ({"plan": {"tp": 16}}, "plan.tp = 16: model.kv_heads = 8 must be a multiple of tp. Use tp = 8."),
    ({"plan": {"pp": 16, "framework": "megatron"}}, "plan.pp = 16: 16 stages need at least 16 layers, and the model has 14. Use pp x virtual_stages <= 14."),
    ({"plan": {"tpp": 2}}, "plan.tpp = 2: there is no such field. Did you mean tp?"),
    ({"tp": 2}, "tp = 2: there is no such field. Did you mean plan.tp?"),
    ({"plan": {"schedule": "1f2b"}}, "plan.schedule = 1f2b: is not one of the choices. Did you mean 1f1b? Use one of gpipe, 1f1b, interleaved, naive, "
                                     "zb-h1, interleaved-zb, zbv, dualpipev."),
    ({"plan": {"strategy": "fspd"}}, "plan.strategy = fspd: is not a strategy. Did you mean fsdp?"),
    ({"plan": {"bucket_mb": "big"}}, "plan.bucket_mb = big: must be a number of MiB above 0. Use bucket_mb = 25."),
    ({"plan": 3}, "plan = 3: must be a table of fields. Write [plan] with its fields below it."),
    ({"cluster": {"gpus": 8}, "plan": {"dp_shard": 4}}, "plan.dp_shard = 4: zero = 0 shards no state. Use dp_replicate = 8, or zero = 3 (FSDP)."),
    ({"cluster": {"gpus": 8}, "plan": {"dp": 4}}, "plan.dp = 4: 8 GPUs / (tp x pp x cp = 1) leave dp = 8. Use dp = 8, or --gpus 4."),
    ({"cluster": {"gpus": 12}}, "cluster.gpus = 12: more than one node is used whole: gpus must be a multiple of gpus_per_node = 8. Use gpus = 8 or 16."),
    ({"cluster": {"gpus": 0}}, "cluster.gpus = 0: must be a whole number of at least 1. Use gpus = 8."),
    ({"cluster": {"gpus": 10**40}}, "cluster.gpus = 100000000000...: is too large for anything here. Stay below 1,000,000,000,000,000."),
    ({"recipe": {"seq_len": True}}, "recipe.seq_len = True: must be a whole number. Use seq_len = 8, say."),
    ({"cluster": {"memory_bytes": 20e9}}, "cluster.accelerator.memory_bytes = 20000000000.0: must be a whole number. Use memory_bytes = 20000000000."),
    ({"recipe": {"seq_len": 4096.7}}, "recipe.seq_len = 4096.7: must be a whole number. Use seq_len = 4097."),
    ({"recipe": {"seq_len": "4096"}}, "recipe.seq_len = 4096: must be a whole number. Use seq_len = 8, say."),
    ({"recipe": {"seq_len": 0}}, "recipe.seq_len = 0: must be above 0. Use seq_len = 1."),
    ({"recipe": {"dropout": float("nan")}}, "recipe.dropout = nan: is not a finite number. Use one such as 0.1."),
    ({"recipe": {"optimizer": "adm"}}, "recipe.optimizer = adm: is not an optimizer of the catalogue. Did you mean adam?"),
    ({"recipe": {"optimizer": {"betas": [0.9]}}}, "recipe.optimizer.betas: it takes 2 items, and 1 is given. docs/run.md says what it takes."),
    ({"recipe": {"precision": 16}}, "recipe.precision = 16: must be a word or a table of fields. docs/run.md lists both."),
    ({"params": "1Q"}, "params = 1Q: is not a number of parameters. Write it as 350M, 1B or 70e9."),
    ({"params": "1e999"}, "params = 1e999: is not a finite number of parameters. Write it as 350M, 1B or 70e9."),
    ({"model": {"base": "gpt2", "layers": 10**12}}, "model.layers = 1000000000000: a model has at most 100,000 layers here. Use layers = 100, say."),
    ({"model": {"layers": 2}}, "model.hidden: it is needed and not given. Give hidden; docs/run.md says what it takes."),
])
def test_an_impossible_run_is_one_message_with_field_value_rule_and_a_way_out(given: dict[str, Any], text: str) -> None:
    error = error_of(**given)
    shown = str(error) if error.value is not None else f"{error.field}: {error.rule} {error.fix}"
    assert shown == text


def test_a_run_without_a_model_says_how_to_give_one() -> None:
    with pytest.raises(PlanError, match=r"Use --params 1B, or --model"):
        resolve({})


JUNK = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates(), lambda inner: st.lists(inner, max_size=3)
                    | st.dictionaries(st.text(max_size=6), inner, max_size=3), max_leaves=6)
FIELDS = ["params", "model", "cluster", "plan", "recipe", "plan.zero", "plan.tp", "plan.dp_shard", "plan.strategy", "plan.checkpointing", "plan.bucket_mb",
          "plan.stage_layers", "plan.contention", "cluster.gpus", "cluster.nodes", "cluster.gpu", "cluster.name", "cluster.levels", "cluster.accelerator",
          "cluster.host", "recipe.seq_len", "recipe.precision", "recipe.optimizer", "recipe.micro_batch", "recipe.global_batch", "recipe.moe_capacity_factor",
          "recipe.precision.base", "recipe.optimizer.base", "recipe.optimizer.betas", "model.base", "model.layers", "model.heads", "model.moe"]


@settings(max_examples=500)
@given(st.dictionaries(st.sampled_from(FIELDS), JUNK, max_size=4))
def test_any_input_gives_a_run_or_a_plan_error(fields: dict[str, Any]) -> None:
    mapping: dict[str, Any] = {"params": "1B"}
    for path, value in fields.items():
        *tables, last = path.split(".")
        inside: Any = mapping
        for key in tables:
            inside = inside.setdefault(key, {}) if isinstance(inside, dict) else {}
        if isinstance(inside, dict):
            inside[last] = value
    if "model" in mapping:
        mapping.pop("params", None)
    try:
        resolve(mapping)
    except PlanError as error:
        assert error.rule
        assert error.fix


def test_a_parameter_count_and_a_field_that_is_no_size() -> None:
    run = build_run(params="1B", model={"tied_embeddings": False})
    tied = build_run(params="1B").model
    assert (run.model.tied_embeddings, run.model.layers, run.model.hidden) == (False, tied.layers, tied.hidden)
    assert run.model.params == tied.params + tied.vocab * tied.hidden


@pytest.mark.parametrize("model", ["llama-3-8b", {"base": "llama-3-8b"}])
def test_a_parameter_count_and_a_shape_are_too_much(model: Any) -> None:
    with pytest.raises(PlanError, match="both a model and a parameter count"):
        build_run(params="1B", model=model)


def test_a_size_beside_a_parameter_count_is_named() -> None:
    with pytest.raises(PlanError, match=r"model\.layers = 0: it follows from params = 1B, which is given as well\. Give one of the two\."):
        build_run(params="1B", model={"layers": 0})


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_listed_strategy_is_a_word_or_says_which_field_it_is(name: str) -> None:
    try:
        build_run(params="1B", cluster={"gpus": 1 if name == "single" else 8}, plan={"strategy": name})
    except PlanError as error:
        assert "has a field of its own" in error.rule
