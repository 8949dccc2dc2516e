"""A documented Llama-style shape for a parameter count that someone has in mind."""

import math
import re

from costmodel.spec.base import PlanError
from costmodel.spec.model import Model

_SUFFIX = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
SMALLEST, LARGEST = 100_000, 20_000_000_000_000


def parse_count(text: str | int | float, field: str = "params") -> int:
    """"1B", "350M", "1.5e9" -> a count."""
    match = re.fullmatch(r"\s*((?:[0-9]{1,3}(?:[,_][0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?:e[0-9]+)?)\s*([kmbt]?)\s*", str(text), re.IGNORECASE)
    if not match:
        raise PlanError(field, text, "is not a number of parameters.", "Write it as 350M, 1B or 70e9.")
    return round(float(match[1].replace(",", "").replace("_", "")) * _SUFFIX[match[2].lower()])


def model_from_params(text: str | int, *, untied: bool = False) -> Model:
    """A Llama-style Model whose parameter count lies within 1% of the one asked for; `untied` embeddings whatever the rule says.

    The rule: RMSNorm, rotary positions, gated SiLU, no biases; vocabulary 128,256 (from 500M), 32,000 (from 20M) or 1,024;
    embeddings tied below 4B; head size 128 (64 below 3B), heads in multiples of 8 from 1B; 8 KV heads where that divides;
    hidden/layers near 128 and ffn near 3.5 hidden, in multiples of 128: among the shapes within 0.5% (else 1%) of the count,
    the one nearest to both ratios.
    """
    target = parse_count(text)
    if not SMALLEST <= target <= LARGEST:
        raise PlanError("params", text, f"the shape rule covers {SMALLEST:,} to {LARGEST:,} parameters.", "Use --params 1B, or --model.")
    vocab = 128_256 if target >= 5e8 else 32_000 if target >= 2e7 else 1_024
    tied = target < 4e9 and not untied
    head_dim = 128 if target >= 3e9 else 64 if target >= 2e7 else 32
    step = head_dim * (8 if target >= 1e9 else 2 if target >= 2e7 else 1)
    granule = 128 if target >= 2e7 else 16
    embed_tables = 1 if tied else 2
    best: tuple[float, tuple[int, int, int, int]] | None = None
    guess = (target * 128 / 12) ** (1 / 3)
    lo, hi = max(step, int(guess / 4) // step * step), int(guess * 4) // step * step + step
    for hidden in range(lo, hi + 1, step):
        heads = hidden // head_dim
        kv = next(k for k in (8, 4, 2, 1) if heads % k == 0)
        attention = 2 * hidden * hidden + 2 * hidden * kv * head_dim
        rest = target - embed_tables * vocab * hidden - hidden
        if rest <= 0:
            break
        for layers in range(max(1, hidden // 300), max(3, hidden // 40) + 1):
            ffn = round((rest / layers - attention - 2 * hidden) / (3 * hidden) / granule) * granule
            if not 2 * hidden <= ffn <= 6 * hidden:
                continue
            count = embed_tables * vocab * hidden + hidden + layers * (attention + 2 * hidden + 3 * hidden * ffn)
            miss = abs(count / target - 1)
            if miss > 0.01:
                continue
            odd = 0.05 * (layers % 2 == 1) + (0.5 if miss > 0.005 else 0.0)
            score = abs(math.log(hidden / layers / 128)) + 2 * abs(math.log(ffn / (3.5 * hidden))) + odd
            if best is None or score < best[0]:
                best = score, (hidden, layers, ffn, kv)
    if best is None:
        raise PlanError("params", text, "no shape of the rule lands within 1%.", "Use a nearby count, or give the shape in a file.")
    hidden, layers, ffn, kv = best[1]
    shape = Model(name=f"llama-style-{str(text).strip()}", layers=layers, hidden=hidden, heads=hidden // head_dim, kv_heads=kv,
                  head_dim=head_dim, ffn=ffn, vocab=vocab, tied_embeddings=tied)
    rule = (f"Llama-style shape for {text}: {layers} layers, hidden {hidden}, ffn {ffn}, {shape.heads} heads, {kv} KV heads, "
            f"vocabulary {vocab}, {'tied' if tied else 'untied'} embeddings = {shape.params:,} parameters")
    return shape.model_copy(update={"shape_rule": rule})
