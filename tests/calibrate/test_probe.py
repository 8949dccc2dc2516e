"""Probes: what a file says becomes evidence, drift divides out, and a short probe of this machine holds together."""

import math

import pytest

from calibrate.evidence import CollectiveEvidence, ContentionEvidence, HostEvidence, KernelEvidence
from calibrate.probe.record import Probe, ProbeError, Sample, probe_evidence, probe_from_dict, steady, typical_reference
from costmodel import catalog
from costmodel.records import Environment

HERE = Environment("a CPU", 1, None, "here", "Linux", 2, 1 << 34, {"torch": "2.13.0"})


def probe(*samples: Sample) -> Probe:
    return Probe(catalog.cluster(gpus=2, gpu="cpu_epyc_2core"), HERE, "2026-01-01T00:00:00+00:00", samples)


SAMPLES = (Sample("matmul", "linear", (1e-3, 1.1e-3), (1e-4, 1e-4), (1, 512, 512, 512), "fp32", 2.0 * 512**3, 12.0 * 512**2),
           Sample("memory", "add", (2e-3,), (1e-4,), nbytes=1.2e7), Sample("launch", "forward", (7e-6,)), Sample("tensor", "adamw fused", (4e-6,)),
           Sample("python", "tensor forward", (2.2e-3,), counts={"dtensor forward": 10.0, "collective": 2.0}),
           Sample("collective", "all-reduce", (5e-4,), nbytes=4096.0, group=2),
           Sample("contention", "matmul beside all-reduce", (3e-3,), group=2, alone_s=(2e-3, 1e-3)))


def test_a_probe_survives_its_file() -> None:
    one = probe(*SAMPLES)
    assert probe_from_dict(one.to_dict()) == one


def test_every_kind_of_sample_becomes_evidence_of_its_kind() -> None:
    kinds = {type(item) for item in probe_evidence(probe(*SAMPLES))}
    assert kinds == {KernelEvidence, HostEvidence, CollectiveEvidence, ContentionEvidence}
    assert sum(len(item.points) for item in probe_evidence(probe(*SAMPLES))) == len(SAMPLES)


def test_contention_is_the_longer_plus_a_share_of_the_shorter() -> None:
    item = next(i for i in probe_evidence(probe(*SAMPLES)) if isinstance(i, ContentionEvidence))
    half = item.profile.replace({"overlap.contention": 0.5})
    assert math.exp(item.log_predicted(half)[0]) == pytest.approx(2e-3 + 0.5 * 1e-3)


def test_a_machine_that_slows_down_for_a_while_slows_the_reference_too() -> None:
    """Every second repeat ran twice as slowly, and so did the reference beside it: the figure is that of the quiet machine."""
    quiet = Sample("matmul", "linear", (1.0,) * 4, (0.1,) * 4)
    busy = Sample("matmul", "linear", (1.0, 2.0, 1.0, 2.0), (0.1, 0.2, 0.1, 0.2))
    assert steady(busy, 0.1) == pytest.approx(steady(quiet, 0.1))
    assert typical_reference([quiet, quiet, busy]) == pytest.approx(0.1)


def test_a_strategys_work_is_priced_by_what_it_counts() -> None:
    item = next(i for i in probe_evidence(probe(Sample("python", "tensor forward", (2e-3,), counts={"dtensor forward": 10.0, "launch forward": 3.0}))))
    units = item.profile.replace({"host.dtensor.forward_s": 1e-4, "host.eager.forward_s": 1e-5, "host.multiplier": 0.5})
    assert math.exp(item.log_predicted(units)[0]) == pytest.approx(10 * 1e-4 + 3 * 1e-5 / 2)
    with pytest.raises(ProbeError, match="counts 'dtensor sideways', which is no price of the host: those are collective, launch forward, "):
        probe_evidence(probe(Sample("python", "tensor forward", (2e-3,), counts={"dtensor sideways": 1.0})))


@pytest.mark.parametrize(("change", "message"), [({"kind": "record"}, "it is not a probe"), ({"schema": 9}, "its schema is 9, and this version reads 1"),
                                                 ({"samples": [{"kind": "matmul"}]}, "samples.0.name: Field required")])
def test_a_file_that_is_no_probe_says_why(change: dict[str, object], message: str) -> None:
    with pytest.raises(ProbeError, match=message):
        probe_from_dict({**probe().to_dict(), **change})


@pytest.mark.slow
def test_a_short_probe_of_this_machine() -> None:
    """Two ranks under gloo, small messages: every kernel and collective is timed."""
    pytest.importorskip("torch")
    from calibrate.probe.clock import Clock
    from calibrate.probe.collectives import collective_samples, sizes
    from calibrate.probe.kernels import kernel_samples, launch_samples
    clock = Clock(lambda: None, lambda: sum(range(1000)), 2, 0.02)
    kernels = list(kernel_samples("cpu", clock, ("fp32",), 2.0 * 256**3, 1e6))
    squares = {s.dims[1]: min(s.values) for s in kernels if s.kind == "matmul" and len(set(s.dims[1:])) == 1}
    assert sorted(squares) == [64, 128, 256]
    assert min(squares.values()) > 0
    assert {s.kind for s in kernels} == {"matmul", "attention", "memory", "copy"}
    assert [s.name for s in launch_samples("cpu", clock)] == ["forward", "backward", "adamw fused"]
    sent = collective_samples(2, "cpu", 1 << 12, 2, 0.02)
    assert {(s.name, s.nbytes) for s in sent if s.kind == "collective"} == {(kind, n) for kind in (
        "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "send") for n in sizes(1 << 12)}
    assert all(len(s.values) == len(s.reference_s) and min(s.values) > 0 for s in sent if s.kind == "collective")
    assert [s.kind for s in sent if s.kind != "collective"] == ["contention"]


@pytest.mark.slow
def test_the_probe_of_pythons_work_finds_each_strategys_units() -> None:
    """A layer of eleven modules and redistributions that DTensor dispatches takes the host longer than one of two hooks."""
    torch = pytest.importorskip("torch")
    from calibrate.probe.clock import Clock
    from calibrate.probe.python import python_samples
    torch.set_num_threads(1)
    layers = {s.name: s for s in python_samples("cpu", catalog.accelerator("cpu_epyc_2core"), Clock(lambda: None, lambda: sum(range(1000)), 3, 0.02))}
    assert layers["tensor forward"].counts == {"dtensor forward": 11.0, "collective": 2.0}
    assert layers["fsdp forward"].counts["fsdp forward"] == 2.0
    assert min(layers["tensor forward"].values) > max(0.0, min(layers["fsdp forward"].values))
    assert all(sum(s.counts.values()) > 0 and len(s.values) == len(s.reference_s) for s in layers.values())
