"""Linear layers whose three matrix multiplications run in fp8: E4M3 operands, E5M2 gradients, 16-bit results.

Every operand is scaled and cast first, which costs bytes, not FLOPs: its largest magnitude is found (one reading), then it is read again and written
with one byte an element. What backward keeps and casts again is the dialect's:

torchao (PyTorch; nanochat's own code does the same): eager code keeps the 16-bit input and casts input and weight again in backward; compiled code
keeps the fp8 input (the compiler cuts where fewest bytes cross) and casts the weight again. The hardware multiplies rows with rows, so the
operands of backward are copied transposed. Rows and columns have scales of their own in `rowwise` and `mxfp8`: operands are cast once for each.
Transformer Engine (Megatron; PyTorch's `delayed`): one kernel casts and transposes; the transposed fp8 input is kept. Megatron's fp8 weights in both
layouts live from the first micro-batch of a step on; elsewhere every forward casts them and backward keeps the transposed ones. From Blackwell on, one
layout serves all of a tensor with one scale.

Attention, norms, the loss and (but for nanochat) the head stay in 16 bits, as does a layer with a side that 16 does not divide.
Sources: pytorch/ao torchao/float8 (float8_linear.py, README.md); NVIDIA/TransformerEngine transformer_engine/pytorch/module/linear.py and
tensor/float8_tensor.py; karpathy/nanochat nanochat/fp8.py; arXiv 2209.05433.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from costmodel.program.ir import Tensor
from costmodel.program.tape import Back, Value
from costmodel.spec import PlanError, Run
from costmodel.spec.parameters import Param

if TYPE_CHECKING:
    from costmodel.program.layers import Walk

GRAIN = 16
"""torch._scaled_mm and cuBLAS take fp8 operands whose sides are multiples of it."""
BLOCK = 32
"""Elements of an mxfp8 block, which share a one-byte scale."""
EAGER_KERNELS = 9
"""Of one cast: magnitude, largest, four on the scale, product, clamp, cast."""
RECIPES = {"pytorch": ("tensorwise", "rowwise", "mxfp8", "delayed"), "nanochat": ("tensorwise", "rowwise"),
           "megatron": ("tensorwise", "delayed", "blockwise", "mxfp8")}
WHOLE_BACKWARD = ("1f1b", "gpipe", "interleaved", "naive")
BLACKWELL = ("blackwell", "blackwell_ultra")


class Style(NamedTuple):
    """How a dialect casts operands."""

    finds_amax: bool
    """The largest magnitude takes a reading of its own."""
    engine: bool
    """Transformer Engine's kernels."""
    eager: bool
    directions: int
    """Casts with scales of their own: 2 where rows and columns have theirs."""
    transposes: bool
    """The operands of backward are copied transposed."""
    scale_bytes: float
    """Of one element."""
    gathered: bool
    """FSDP gathers the weights in fp8."""
    holds_weights: bool
    """fp8 weights live through the step."""

    def stored(self, numel: int) -> int:
        """Elements of one byte that a cast tensor and its scales take."""
        return numel + int(numel * self.scale_bytes)

    def cast_bytes(self, numel: int, element: int) -> float:
        """Bytes of one cast, for one direction; the engine's writes all layouts at once."""
        if self.eager:
            return float(numel * (8 * element + 1))
        reads = element * (2 if self.finds_amax else 1)
        return numel * (reads + (1 + self.scale_bytes) * (self.layouts if self.engine else 1))

    @property
    def layouts(self) -> int:
        """That the engine writes: two where backward needs another one."""
        return 2 if self.directions == 2 or self.transposes else 1

    @property
    def kernels(self) -> int:
        return EAGER_KERNELS if self.eager else 3 if self.finds_amax else 1


def style_of(run: Run) -> Style:
    """The casts of a run."""
    p, recipe = run.recipe.precision, run.recipe.precision.fp8_recipe
    megatron = run.plan.framework == "megatron"
    engine = megatron or recipe == "delayed"
    block = recipe in ("mxfp8", "blockwise")
    one_layout = engine and run.cluster.accelerator.architecture in BLACKWELL
    return Style(finds_amax=recipe in ("tensorwise", "rowwise"), engine=engine, eager=not engine and not run.recipe.compile,
                 directions=2 if recipe == "rowwise" or block else 1, transposes=not block and not one_layout, scale_bytes=1 / BLOCK if block else 0.0,
                 gathered=p.fp8_gather, holds_weights=megatron)


def refusals(run: Run) -> Iterator[PlanError]:
    """What no code does, or is not predicted yet."""
    p, r = run.plan, run.recipe.precision
    known = RECIPES.get(p.framework, ())
    architecture = run.cluster.accelerator.architecture
    for on, field, value, rule, fix in (
            (r.compute != "fp8", "recipe.precision", r.name, "only fp8 layers have fp8 weights to gather or to keep.",
             "Use precision = fp8, or neither fp8_gather nor fp8_parameters."),
            (r.fp8_parameters and (p.framework != "megatron" or p.ep > 1), "recipe.precision.fp8_parameters", True,
             "parameters in fp8 outside Megatron, or spread by experts: not predicted yet.", "Use fp8_parameters = false."),
            (p.pp > 1 and p.schedule not in WHOLE_BACKWARD, "plan.schedule", p.schedule, "fp8 where backward runs in two halves: not predicted yet.",
             f"Use {', '.join(WHOLE_BACKWARD)}."),
            (run.model.moe is not None and p.framework != "megatron", "recipe.precision", r.name, "fp8 experts outside Megatron: not predicted yet.",
             "Use bf16-mixed, or framework = megatron."),
            (not known, "recipe.precision", r.name, "fp8 in this dialect: not predicted yet.", "Use framework = pytorch or megatron."),
            (bool(known) and r.fp8_recipe not in known, "recipe.precision.fp8_recipe", r.fp8_recipe, f"{p.framework}'s fp8 is scaled in other ways.",
             f"Use {' or '.join(known)}."),
            (r.fp8_recipe == "mxfp8" and architecture not in BLACKWELL, "recipe.precision.fp8_recipe", "mxfp8",
             f"blocks of {BLOCK} with one scale need Blackwell, and {run.cluster.accelerator.name} is {architecture}.", "Use tensorwise."),
            (r.fp8_recipe == "blockwise" and architecture not in ("hopper", *BLACKWELL), "recipe.precision.fp8_recipe", "blockwise",
             f"Transformer Engine's block scaling needs Hopper, and {run.cluster.accelerator.name} is {architecture}.", "Use tensorwise."),
            (r.fp8_gather and not (p.framework == "pytorch" and p.zero == 3 and r.fp8_recipe == "tensorwise"), "recipe.precision.fp8_gather", True,
             "FSDP2 gathers weights in fp8 that have one scale each.", "Use precision = fp8 (tensorwise) with zero = 3 in PyTorch, or fp8_gather = false."),
            ("fp8" in (r.parameter, r.gradient, r.reduce, r.master, r.optimizer_state), "recipe.precision", r.name,
             "parameters, gradients or states in fp8: not predicted yet.", "Use fp8 for compute alone.")):
        if on:
            yield PlanError(field, value, rule, fix)


def takes(framework: str, name: str, out: int, width: int, rows: int) -> bool:
    """Whether a linear layer runs in fp8."""
    inside = name.startswith(("attention.", "mlp.", "shared.")) or framework == "nanochat"
    return inside and out % GRAIN == 0 and width % GRAIN == 0 and rows % GRAIN == 0


def linear(w: "Walk", x: Value, name: str, out: int, width: int, bias: bool) -> Value:
    """y = x W^T + b with casts of x and W, and in backward of the gradient; backward's two matmuls have the FLOPs of forward's."""
    m = x.numel // width
    w.matmul_flops += 2.0 * m * width * out
    y = _product(w, x, Param(f"{name}.weight", (out, width)), Sides(1, m, out, width), bias)
    w.keep_every_other(2.0 * m * width * out)
    return y


def grouped(w: "Walk", x: Value, name: str, groups: int, each: int, out: int, width: int) -> Value:
    """The same for rows of `groups` experts, about `each` of them for one, in one kernel."""
    return _product(w, x, Param(f"{name}.weight", (groups, out, width)), Sides(groups, each, out, width), False)


class Sides(NamedTuple):
    """Of a product: how many, and rows, columns and depth of each."""

    groups: int
    rows: int
    out: int
    width: int


def _product(w: "Walk", x: Value, weight: Param, sides: Sides, bias: bool) -> Value:
    n, tape, style, e = w.n, w.tape, w.style, w.e
    assert style is not None
    name, m = weight.name.removesuffix(".weight"), x.numel // sides.width
    held = 4 if n.autocast else e
    source = w.cast(x, n.act) if n.autocast else x
    low, kept, fresh = _input(w, source, name, style)
    inputs: tuple[Value, ...] = (source, *low)
    saved: tuple[Value, ...] = (kept,)
    if not style.holds_weights and not style.gathered:
        cast = tape.value(f"{name}.weight.fp8", style.stored(weight.numel), "fp8", False)
        tape.record(f"{name}.weight.to_fp8", "memory", (), (cast,), nbytes=style.cast_bytes(weight.numel, held), dtype="fp8", kernels=style.kernels,
                    temp_bytes=held * weight.numel if style.eager else 0)
        inputs = (*inputs, cast)
        if style.engine:
            saved = (kept, _part(w, cast, f"{name}.weight.transposed", style) if style.layouts == 2 else cast)
    y = tape.value(f"{name}.out", m * sides.out, n.act)
    moved = float(x.numel + weight.numel + e * m * sides.out)
    backs = _backward(w, style, name, weight, sides, m, bias, fresh)
    tape.record(name, "matmul", inputs, (y,), saved=saved, backs=tuple(backs), flops=2.0 * x.numel * sides.out, nbytes=moved,
                dims=(sides.groups, sides.rows, sides.out, sides.width), dtype="fp8")
    return y


def _input(w: "Walk", source: Value, name: str, style: Style) -> tuple[tuple[Value, ...], Value, bool]:
    """The cast of a matmul's input: what the matmul reads, what backward keeps, and whether the cast is made here. Compiled code and the engine
    cast an input once, whoever uses it."""
    if style.eager:
        x8 = _cast(w, source, f"{name}.in", style)
        return (x8,), source.regather or source, True
    known = w.casts.get(id(source))
    if known is not None:
        return (known[0],), known[1], False
    x8 = _cast(w, source, f"{name}.in", style)
    kept = x8
    if source.regather is not None:
        kept = _part(w, source.regather, f"{name}.in.shard", style)
    elif style.engine and style.layouts == 2:
        kept = _part(w, source, f"{name}.in.transposed", style)
    w.casts[id(source)] = x8, kept
    return (x8,), kept, True


def _cast(w: "Walk", source: Value, name: str, style: Style) -> Value:
    x8 = w.tape.value(f"{name}.fp8", style.stored(source.numel), "fp8", False)
    w.tape.record(f"{name}.to_fp8", "memory", (source,), (x8,), nbytes=style.cast_bytes(source.numel, source.ebytes), dtype="fp8", kernels=style.kernels,
                  temp_bytes=source.nbytes if style.eager else 0)
    return x8


def _part(w: "Walk", source: Value, name: str, style: Style) -> Value:
    """Another fp8 tensor that the same cast wrote."""
    part = w.tape.value(f"{name}.fp8", style.stored(source.numel), "fp8", False)
    w.tape.record(f"{name}.written", "memory", (source,), (part,), dtype="fp8", kernels=0)
    return part


def _backward(w: "Walk", style: Style, name: str, weight: Param, sides: Sides, m: int, bias: bool, fresh: bool) -> list[Back]:
    """Casts and matmuls of backward, those of the input's gradient first."""
    n, e = w.n, w.e
    count, each, out, width = sides
    flops = 2.0 * m * width * out
    grad, gave, weights = m * out, m * width, weight.numel
    g8 = Tensor(f"{name}.grad.fp8", "temporaries", style.stored(grad))
    backs = [Back("grad.to_fp8", "memory", nbytes=style.cast_bytes(grad, e), dtype="fp8", kernels=style.kernels, temp_bytes=e * grad if style.eager else 0,
                  opens=g8)]
    again = _weight_again(style, weights, 4 if n.autocast else e)
    w8 = Tensor(f"{name}.weight.fp8_again", "temporaries", 0 if style.engine else style.stored(weights))
    if again:
        backs.append(Back("weight.to_fp8", "memory", nbytes=again, dtype="fp8", kernels=style.kernels, opens=w8))
    backs.append(Back("dgrad", "matmul", 0, flops, float(grad + weights + e * gave), (count, each, width, out), "fp8", closes=w8 if again else None))
    moved, held = _operands_again(style, grad, gave, e, fresh)
    pair = Tensor(f"{name}.operands.fp8", "temporaries", held)
    if moved:
        backs.append(Back("operands.to_fp8", "memory", nbytes=moved, dtype="fp8", kernels=2 * (style.kernels if style.directions == 2 else 1), opens=pair))
    low = Tensor(f"{weight.name}.grad.{n.act}", "temporaries", e * weights)
    backs.append(Back("wgrad", "matmul", None, flops, float(grad + gave + e * weights), (count, out, width, each), "fp8", closes=g8,
                      opens=low if n.autocast else None, beside=w.tp.megatron and w.tp.t > 1))
    if moved:
        backs.append(Back("operands.release", "host", kernels=0, closes=pair))
    if bias:
        b = Param("head.bias" if name == "embedding" else f"{name}.bias", (out,))
        backs.insert(0, Back("bgrad", "memory", b, nbytes=float(e * grad), dtype=n.param))
    if n.autocast:
        return [*backs, w.cast_back(weight)._replace(temp_bytes=0, closes=low, apart=True)]
    return [*backs, Back("wgrad.out", "memory", weight, kernels=0, dtype=n.param)]


def _weight_again(style: Style, weights: int, element: int) -> float:
    """Bytes for the weight as backward's first matmul takes it."""
    if style.engine:
        return 0.0
    if style.gathered:
        return 2.0 * weights
    if style.directions == 2 and not style.eager:
        return style.cast_bytes(weights, element)
    return style.cast_bytes(weights, element) + 2.0 * weights if style.eager else float(weights * (element + 1))


def _operands_again(style: Style, grad: int, gave: int, element: int, fresh: bool) -> tuple[float, int]:
    """Bytes moved for gradient and input as backward's second matmul takes them, and what they take. Compiled code makes the input's once."""
    if style.engine:
        return 0.0, 0
    moved = 2.0 * grad + (2.0 * gave if fresh else 0.0) if style.transposes and (style.eager or style.directions == 1) else 0.0
    if style.directions == 2:
        moved += style.cast_bytes(grad, element) + (style.cast_bytes(gave, element) if fresh else 0.0)
    elif style.eager:
        moved += style.cast_bytes(gave, element)
    return moved, style.stored(grad + gave)
