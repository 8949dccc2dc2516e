"""The runs of the study: widths, depths, sequence lengths, seven strategies, one and two ranks, over a factor of 30 and more in step time."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from costmodel import build_run
from costmodel.spec import PlanError, Run

STRATEGIES: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("single", 1, {}), ("ddp", 2, {"strategy": "ddp"}), ("zero1", 2, {"strategy": "zero1"}), ("zero2", 2, {"strategy": "zero2"}),
    ("fsdp", 2, {"strategy": "fsdp"}), ("tensor", 2, {"tp": 2}), ("pipeline", 2, {"pp": 2}))
SHAPES = ((128, 2, 128, 2), (160, 2, 128, 2), (192, 2, 256, 1), (256, 2, 128, 2), (320, 2, 128, 2), (384, 3, 128, 2), (448, 3, 256, 1), (512, 3, 128, 2),
          (576, 4, 128, 2), (640, 4, 128, 2), (704, 4, 128, 2), (768, 5, 128, 2))
"""(width, layers, sequence, micro-batch), small to large: odd places are fitted, even ones held out, so no shape is in both."""


class Case(NamedTuple):
    name: str
    held_out: bool
    run: Run


def cases(gpu: str) -> Iterator[Case]:
    """Every run that its strategy can spread."""
    for place, (width, layers, seq_len, micro) in enumerate(SHAPES):
        for name, ranks, plan in STRATEGIES:
            model = {"name": f"study-{width}", "layers": layers, "hidden": width, "heads": width // 32, "ffn": 4 * width, "vocab": 1024,
                     "tied_embeddings": False}
            recipe = {"seq_len": seq_len, "micro_batch": micro, "precision": "fp32", "grad_accum": 4 if "pp" in plan else 1}
            try:
                run = build_run(model=model, cluster={"gpu": gpu, "gpus": ranks}, plan=plan, recipe=recipe)
            except PlanError:  # heads that two ranks do not divide
                continue
            yield Case(f"{name}-{width}", place % 2 == 1, run)
