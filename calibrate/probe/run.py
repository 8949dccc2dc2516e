"""All probes of this machine, one after another, with progress."""

import datetime
from collections.abc import Callable

import torch

from calibrate.probe.clock import Clock
from calibrate.probe.collectives import collective_samples
from calibrate.probe.kernels import context_samples, kernel_samples, launch_samples
from calibrate.probe.machine import detect
from calibrate.probe.python import python_samples
from calibrate.probe.record import Probe, Sample
from execute.observe.environment import environment, usable_cores

Say = Callable[[str], None]
REFERENCE_SIDE = {"cpu": 256, "cuda": 4096}


def probe_machine(device: str, ranks: int | None, gpu: str | None, quick: bool, say: Say) -> Probe:
    """Measure this machine. `ranks`: how many processes talk to one another (None: the GPUs, or the cores up to 8)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a rank runs on one core, as under torchrun
    try:
        world = ranks or (torch.cuda.device_count() if device == "cuda" else min(8, usable_cores()))
        cluster, links = detect(device, world, gpu)
        clock = _clock(device, quick)
        big = device == "cuda"
        dtypes = tuple(d for d in ("fp32", "bf16") if cluster.accelerator.flops_per_s.get(d))
        samples: list[Sample] = []

        def take(sample: Sample) -> None:
            samples.append(sample)
            say(f"{len(samples)} samples: {sample.label}")

        for sample in launch_samples(device, clock):
            take(sample)
        for sample in python_samples(device, cluster.accelerator, clock):
            take(sample)
        for sample in kernel_samples(device, clock, dtypes, (2e12 if big else 5e9 if quick else 2e10), (4e9 if big else 2e8 if quick else 8e8)):
            take(sample)
        for sample in context_samples(device):
            take(sample)
        if world > 1:
            say(f"{len(samples)} samples; now {world} ranks that talk to one another")
            for sample in collective_samples(world, device, (1 << 24) if quick else (1 << 28), 5 if quick else 9, 0.25 if quick else 1.0):
                take(sample)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return Probe(cluster, environment(), now, tuple(samples), links)
    finally:
        torch.set_num_threads(threads)


def _clock(device: str, quick: bool) -> Clock:
    side = REFERENCE_SIDE[device]
    square = torch.randn(side, side, device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    finish = torch.cuda.synchronize if device == "cuda" else lambda: None
    return Clock(finish, lambda: torch.mm(square, square), 5 if quick else 9, 0.4 if quick else 1.5)
