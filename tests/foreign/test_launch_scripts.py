"""Launch scripts: the words of their commands are those that bash would have."""

import json
import shutil
import subprocess

import pytest

from costmodel.foreign import megatron, shell

SCRIPT = r'''
#!/bin/bash
WIDTH=1024 # a comment
DEPTH=$((2 * ${FACTOR:-3} + 1))
NAME="a b"
export LIST=(--one "$NAME"   # inside an array
    --two=2
    # --three
)
LIST+=(--four)
EXTRA=" --five ${WIDTH} \
   --six 7 \
   "
ARGS="--seven $DEPTH $EXTRA"
command --width $WIDTH "${LIST[@]}" $ARGS --ten ${UNSET:-"none"} --eleven=${WIDTH}x2 \
    --twelve
'''
SHOW = "command() { python3 -c 'import json, sys; print(json.dumps(sys.argv[1:]))' \"$@\"; }\n"


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize("factor", ["", "5"])
def test_options_are_those_that_bash_passes(factor: str) -> None:
    """Oracle: bash itself runs the script with a command that prints its arguments."""
    environment = {"FACTOR": factor} if factor else {}
    ran = subprocess.run(["bash", "-c", SHOW + SCRIPT], capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin:/usr/local/bin", **environment})
    words = json.loads(ran.stdout)
    found = shell.read(SCRIPT, environment)
    mine = next(command for command in found.commands if command[0] == "command")
    assert megatron.options(mine) == megatron.options(words)


def test_what_conditions_set_counts_only_where_nothing_else_does() -> None:
    found = shell.read("A=1\nif [ -n \"$X\" ]; then\n  A=2\n  B=3\nfi\nfor i in 1 2; do\n  C=$i\ndone\nrun --a $A --b $B\n", {})
    assert found.commands[-1] == ["run", "--a", "1", "--b", "3"]


def test_slurms_lines_and_what_is_given_win_over_defaults() -> None:
    text = "#SBATCH --nodes=6\n#SBATCH --gres=gpu:a100:4\nN=${SLURM_NNODES:-1}\nG=${GPUS:-2}\nrun --n $N --g $G --each $SLURM_GPUS_ON_NODE\n"
    assert shell.read(text, {}).commands[-1] == ["run", "--n", "6", "--g", "2", "--each", "4"]
    assert shell.read(text, {"GPUS": "8", "SLURM_NNODES": "9"}).commands[-1] == ["run", "--n", "9", "--g", "8", "--each", "4"]


def test_what_nothing_gives_is_known() -> None:
    found = shell.read("run --path $DATA --first $1 --when $(date) --tick `hostname`\n", {})
    assert found.unknown == ["DATA", "1"] and found.commands == [["run", "--path", "--first", "--when", "--tick"]]


@pytest.mark.parametrize(("words", "field", "value"), [
    ("--swiglu --hidden-size 4096", "model.ffn", 10880),
    ("--hidden-size 4096", "model.ffn", 16384),
    ("--vocab-size 50257 --tensor-model-parallel-size 4", "model.vocab", 50688),
    ("--vocab-size 50257", "model.vocab", 50304),
    ("--num-layers 24 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2", "plan.virtual_stages", 3),
    ("--num-layers 61 --num-experts 8 --moe-layer-freq ([0]*3+[1]*58)", "model.moe", {"experts": 8, "top_k": 2, "expert_ffn": 0, "aux_loss_coefficient": 0.0,
                                                                                       "first_dense_layers": 3}),
    ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 4", "plan.checkpointing", "full:4"),
    ("--recompute-granularity selective", "plan.checkpointing", "selective"),
    ("--bf16 --fp8-format hybrid --fp8-recipe blockwise", "recipe.precision", {"base": "fp8", "fp8_recipe": "blockwise"}),
    ("--bf16 --grad-reduce-in-bf16", "recipe.precision", {"base": "bf16-mixed", "gradient": "bf16", "reduce": "bf16"}),
    ("--num-layers 62 --pipeline-model-parallel-size 8 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split", "plan.stage_layers",
     [7, 8, 8, 8, 8, 8, 8, 7]),
    ("--context-parallel-size 4 --cp-comm-type a2a", "plan.cp_kind", "ulysses"),
    ("--multi-latent-attention --qk-layernorm --hidden-size 4096", "model.fused_qkv", None),
    ("--multi-latent-attention --qk-layernorm --hidden-size 4096", "model.qk_norm", None),
    ("--nproc_per_node=8 --nnodes=16", "cluster.gpus", 128)])
def test_megatrons_options_mean_what_its_arguments_say(words: str, field: str, value: object) -> None:
    """By hand from megatron/training/arguments.py: SwiGLU's width is 8/3 of hidden in whole 64s (4096: 10,880); a vocabulary is padded to a multiple of 128
    x tp."""
    assert megatron.read(words.split()).get(field) == value


FSDP = "--bf16 --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "


@pytest.mark.parametrize(("words", "plan", "precision"), [
    ("", {"zero": 3}, "bf16-mixed"),
    ("--use-distributed-optimizer --overlap-grad-reduce --num-distributed-optimizer-instances 2", {"zero": 3, "dp_replicate": 2}, "bf16-mixed"),
    ("--fsdp-double-buffer --suggested-communication-unit-size 800000000", {"zero": 3, "double_buffer": True, "communication_unit_params": 800_000_000},
     "bf16-mixed"),
    ("--use-nccl-ub --grad-reduce-in-bf16", {"zero": 3, "double_buffer": True}, {"base": "bf16-mixed", "gradient": "bf16", "reduce": "bf16"}),
    ("--megatron-fsdp-main-grads-dtype fp32 --megatron-fsdp-grad-comm-dtype bf16", {"zero": 3}, {"base": "bf16-mixed", "reduce": "bf16"}),
    ("--megatron-fsdp-main-grads-dtype auto", {"zero": 3}, {"base": "bf16-mixed", "gradient": "bf16", "reduce": "bf16"})])
def test_megatron_fsdp_is_zero_3(words: str, plan: dict[str, object], precision: object) -> None:
    """By hand from the options of Megatron-FSDP (its README; megatron/core/distributed/distributed_data_parallel_config.py)."""
    found = megatron.read((FSDP + words).split())
    assert found.given()["plan"] == {"framework": "megatron", **plan}
    assert found.get("recipe.precision") == precision
    assert not found.lost


@pytest.mark.parametrize("words", ["--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", "--use-torch-fsdp2",
                                   "--recompute-granularity full --recompute-method block", "--optimizer muon", "--cp-comm-type a2a+p2p "
                                   "--context-parallel-size 4", "--num-experts 8 --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1"])
def test_what_has_no_field_is_said(words: str) -> None:
    assert megatron.read(words.split()).lost
