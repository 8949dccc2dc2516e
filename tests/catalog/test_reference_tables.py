"""Number formats are held against torch.finfo, optimizer states against torch's own state dicts."""

import math
import subprocess
import sys

import pytest

from costmodel.catalog import NUMBER_FORMATS, OPTIMIZERS, STRATEGIES

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(("name", "dtype"), [
    ("fp32", "float32"), ("fp16", "float16"), ("bf16", "bfloat16"), ("fp8_e4m3", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2"),
])
def test_number_formats_are_torch_s(name, dtype):
    ours, theirs = NUMBER_FORMATS[name], torch.finfo(getattr(torch, dtype))
    assert (ours.largest, ours.smallest_normal, ours.epsilon) == (theirs.max, theirs.smallest_normal, theirs.eps)
    assert ours.storage_bytes * 8 == theirs.bits == ours.bits


def test_the_bits_of_a_format_add_up():
    assert all(f.bits == f.sign_bits + f.exponent_bits + f.mantissa_bits for f in NUMBER_FORMATS.values())
    assert NUMBER_FORMATS["tf32"].largest == (2 - 2.0**-10) * 2.0**127


def test_only_fp16_needs_loss_scaling():
    # Micikevicius et al. 2018: fp16 gradients underflow; bf16 has the exponent of fp32
    assert [name for name, f in NUMBER_FORMATS.items() if f.loss_scaling] == ["fp16"]


@pytest.mark.parametrize(("name", "make"), [
    ("sgd", lambda p: torch.optim.SGD(p)), ("momentum", lambda p: torch.optim.SGD(p, momentum=0.9)),
    ("adam", lambda p: torch.optim.Adam(p)), ("adamw", lambda p: torch.optim.AdamW(p)), ("muon", lambda p: torch.optim.Muon(p)),
])
def test_optimizer_states_are_those_torch_allocates(name, make):
    weight = torch.nn.Parameter(torch.ones(64, 64))
    optimizer = make([weight])
    weight.sum().backward()
    optimizer.step()
    state = [value for value in optimizer.state[weight].values() if torch.is_tensor(value) and value.dim()]
    assert sum(value.nbytes for value in state) == OPTIMIZERS[name].state_bytes_per_param * weight.numel()
    assert len(state) == len(OPTIMIZERS[name].states)


def test_adam_defaults_are_torch_s():
    defaults = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))]).defaults
    ours = OPTIMIZERS["adam"].defaults
    assert (ours["beta1"], ours["beta2"]) == defaults["betas"] and ours["eps"] == defaults["eps"] and ours["lr"] == defaults["lr"]
    assert math.isclose(OPTIMIZERS["adamw"].defaults["weight_decay"], torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))]).defaults["weight_decay"])


def test_every_strategy_answers_the_same_questions():
    assert all(s.divides and s.shards and s.sends and s.forbids for s in STRATEGIES.values())
    predicted = {name for name, s in STRATEGIES.items() if s.predicted}
    assert predicted == {"single", "dataparallel", "ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp", "megatron-distributed-optimizer", "megatron-fsdp", "tp",
                         "sequence-parallel", "pp", "cp", "ep", "muon-distributed"}


def test_importing_the_catalogue_stays_light():
    code = ("import sys, costmodel.catalog as c; from costmodel.catalog import files; "
            "print([m for m in ('torch', 'scipy', 'textual', 'yaml') if m in sys.modules], files.entry_names.cache_info().currsize)")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[] 0"
