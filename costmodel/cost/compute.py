"""Seconds of the operations that run on a device: matrix multiplications, attention, memory-bound operations, copies.

Every formula is a roofline: the larger of arithmetic and memory time, plus the time of the smallest kernel. All rates
are shares of the data sheet taken from a Profile, sustained in training: a GPU that runs a benchmark for a second draws
less power, and is up to 1.3 times faster. Host time (launches, dispatch) is not here.
"""

from dataclasses import dataclass, replace

from costmodel.catalog.profiles import Profile
from costmodel.program.ir import Op
from costmodel.spec.base import PlanError
from costmodel.spec.cluster import Accelerator
from costmodel.spec.recipe import Precision, Recipe

GENERATIONS = ("sdpa", "fa1", "fa2", "fa3", "cudnn")
ALSO_SDPA = ("cpu", "efficient")
"""Kernels that PyTorch's SDPA falls to where no flash kernel runs: the profile's "sdpa" rate."""
SIXTEEN_BIT = ("bf16", "fp16", "fp8")


@dataclass(frozen=True, slots=True)
class AttentionRate:
    """One generation of attention kernel: FLOP/s by dtype at full saturation and head size 128, and its head-size loss."""

    flops_per_s: dict[str, float]
    head_half: float


@dataclass(frozen=True, slots=True)
class ComputeCosts:
    """Rates and fixed times of one device, as plain numbers; `compute_costs` builds it, `op_s` reads it."""

    flops_per_s: dict[str, float]
    """matmul: sustained FLOP/s by dtype, before the shape's own losses."""
    memory_bytes_per_s: float
    copy_bytes_per_s: float
    matmul_fixed_s: float
    memory_fixed_s: float
    attention_fixed_s: float
    copy_fixed_s: float
    units: int
    k_half: float
    k_half_fp8: float
    tile: int
    small_tile_factor: float
    split_k: int
    align: int
    unaligned: float
    unaligned_batched: float
    attention: dict[str, AttentionRate]
    attention_backward: float
    s_half: float
    causal_s_half_factor: float
    pad_to: int
    q_tile: int

    def op_s(self, op: Op) -> float:
        """Device seconds of one operation of a rank's program; 0 for host work, waits and collectives."""
        kind = op.kind
        if kind in ("memory", "side"):
            return self.memory_s(op)
        if kind == "matmul":
            return self.matmul_s(op)
        if kind == "attention":
            return self.attention_s(op)
        if kind == "copy":
            return self.copy_fixed_s + op.nbytes / self.copy_bytes_per_s
        return 0.0

    def memory_s(self, op: Op) -> float:
        """Seconds of a memory-bound operation: a fixed time for each kernel, and its bytes at the sustained bandwidth."""
        return self.memory_fixed_s * op.kernels + op.nbytes / self.memory_bytes_per_s

    def matmul_s(self, op: Op) -> float:
        """Seconds of a (batched) matrix multiplication C[m, n] = A[m, k] B[k, n].

        t = fixed + max(FLOPs / (peak · share · fill · k/(k + k_half) · alignment), bytes / sustained bandwidth).
        `fill` is the useful part of the last wave of 128 x 128 tiles, or of 64 x 64 tiles at small_tile_factor if that
        is better (NVIDIA, "Matrix Multiplication Background", tile and wave quantisation); a deep k is split over idle
        units. Constants: aiconfigurator GEMM tables; the share is lower, as sustained in training. Grouped GEMMs of
        uneven groups are priced at their mean size.
        """
        fixed, rate = self.matmul_fixed_s * op.kernels, self.flops_per_s[op.dtype]
        if op.dims:
            batch, m, n, k = op.dims
            rate *= self.fill(batch, m, n, k) * k / (k + (self.k_half_fp8 if op.dtype == "fp8" else self.k_half))
            if op.dtype in SIXTEEN_BIT and (n % self.align or k % self.align):
                rate *= self.unaligned_batched if batch > 1 else self.unaligned
        arithmetic, memory = op.flops / rate, op.nbytes / self.memory_bytes_per_s
        return fixed + (arithmetic if arithmetic > memory else memory)

    def fill(self, batch: int, m: int, n: int, k: int) -> float:
        """The part of the arithmetic units that useful output keeps busy, between 0 and 1."""
        units, tile = self.units, self.tile
        if not units:
            return 1.0
        area, small = batch * m * n, tile >> 1
        tiles = batch * -(-m // tile) * -(-n // tile)
        fill = area / (-(-tiles // units) * units * tile * tile)
        tiles = batch * -(-m // small) * -(-n // small)
        waves = -(-tiles // units)
        other = self.small_tile_factor * area / (waves * units * small * small)
        if waves == 1 and k > self.split_k:
            other *= max(1, min(k // self.split_k, units // tiles))
        return fill if fill > other else other

    def attention_s(self, op: Op) -> float:
        """Seconds of a fused attention kernel; dims are (batch, heads, kv_heads, s_q, s_k, head_dim, causal, backward).

        t = fixed + max(FLOPs / rate, bytes / sustained bandwidth), where
        rate = peak · share(generation) · s/(s + s_half) · head · occupancy [· backward].
        s is the shorter of the two sequences and s_half doubles under causality, as FLOPs (given by the op) leave out
        the skipped half. head = d/(d + head_half) relative to d = 128, over padding to `pad_to`; occupancy is the
        part of the units that have a block of q_tile query rows. The generation stands after ":" in the op's name ("attention:fa2.grad_q").
        A window's s_k is the causal length of as much work (layers.windowed_keys), so that s/2 is the mean row in either case; beside the
        diagonal, which causality has too, it has a far edge, whose blocks are computed whole: half a block more for each row that begins
        inside the sequence, (1 - w/s) of them. Sources: FlashAttention-3 paper (arXiv 2407.08608), pytorch/benchmark, aiconfigurator.
        """
        generation = op.name.partition(":")[2].partition(".")[0]
        kernel = self.attention.get(generation)
        if kernel is None:
            known = ", ".join(self.attention)
            raise PlanError("recipe.attention", op.name, f"no rate is known for this attention kernel (known: {known}).",
                            f"Use attention = {next(iter(self.attention), 'sdpa')}.")
        batch, heads, _, s_q, s_k, d, causal, backward = op.dims
        s, half = (s_q if s_q < s_k else s_k), self.s_half
        if causal:
            half *= self.causal_s_half_factor
        wide = d if d < 128 else 128
        head_half = kernel.head_half
        rate = kernel.flops_per_s[op.dtype] * s / (s + half) * wide / (wide + head_half) * (1 + head_half / 128)
        rate *= d / (-(-d // self.pad_to) * self.pad_to)
        if self.units:
            blocks = batch * heads * -(-s_q // self.q_tile)
            if blocks < self.units:
                rate *= blocks / self.units
        if backward:
            rate *= self.attention_backward
        if causal and s_k < s_q:
            rate /= 1 + self.q_tile * (1 - s_k / s_q) ** 0.5 / s_k
        arithmetic, memory = op.flops / rate, op.nbytes / self.memory_bytes_per_s
        return self.attention_fixed_s * op.kernels + (arithmetic if arithmetic > memory else memory)


def compute_costs(accelerator: Accelerator, profile: Profile, recipe: Recipe) -> ComputeCosts:
    """The rates of one device under a recipe: data-sheet peaks times the profile's sustained shares."""
    rates = matmul_rates(accelerator, profile, recipe.precision)
    copy_rate = accelerator.pcie_bytes_per_s or accelerator.memory_bytes_per_s
    return ComputeCosts(
        flops_per_s=rates,
        memory_bytes_per_s=accelerator.memory_bytes_per_s * profile.value("bandwidth.share"),
        copy_bytes_per_s=copy_rate * profile.value("copy.share"),
        matmul_fixed_s=profile.value("matmul.fixed_s"),
        memory_fixed_s=profile.value("bandwidth.fixed_s"),
        attention_fixed_s=profile.value("attention.fixed_s"),
        copy_fixed_s=profile.value("copy.fixed_s"),
        units=accelerator.units,
        k_half=profile.value("matmul.k_half"),
        k_half_fp8=profile.get("matmul.fp8.k_half", profile.value("matmul.k_half")),
        tile=int(profile.value("matmul.tile")),
        small_tile_factor=profile.value("matmul.small_tile_factor"),
        split_k=int(profile.value("matmul.split_k")),
        align=int(profile.value("matmul.align")),
        unaligned=profile.value("matmul.unaligned"),
        unaligned_batched=profile.value("matmul.unaligned_batched"),
        attention=attention_rates(accelerator, profile),
        attention_backward=profile.value("attention.backward"),
        s_half=profile.value("attention.s_half"),
        causal_s_half_factor=profile.value("attention.causal_s_half_factor"),
        pad_to=int(profile.value("attention.pad_to")),
        q_tile=int(profile.value("attention.q_tile")),
    )


def slowed(costs: ComputeCosts, factor: float) -> ComputeCosts:
    """A device whose kernels take `factor` times as long; its copies do not."""
    return replace(
        costs, flops_per_s={dtype: rate / factor for dtype, rate in costs.flops_per_s.items()}, memory_bytes_per_s=costs.memory_bytes_per_s / factor,
        matmul_fixed_s=costs.matmul_fixed_s * factor, memory_fixed_s=costs.memory_fixed_s * factor, attention_fixed_s=costs.attention_fixed_s * factor,
        attention={name: AttentionRate({dtype: r / factor for dtype, r in rate.flops_per_s.items()}, rate.head_half)
                   for name, rate in costs.attention.items()})


def op_s(op: Op, costs: ComputeCosts) -> float:
    """Device seconds of one operation; `costs.op_s(op)` as a function."""
    return costs.op_s(op)


def matmul_rates(accelerator: Accelerator, profile: Profile, precision: Precision) -> dict[str, float]:
    """Sustained matmul FLOP/s by dtype: dense peak x share.

    fp32 runs on the vector units unless the precision computes in tf32. A dtype the device lacks runs at the slowest
    rate it has: only side computations (an fp32 router on a device without fp32) can ask for one.
    """
    fp8 = profile.get(f"matmul.fp8.{precision.fp8_recipe}_factor", 1.0)
    rates = {dtype: peak * profile.value(f"matmul.{dtype}.peak_share") * (fp8 if dtype == "fp8" else 1.0)
             for dtype, peak in accelerator.flops_per_s.items() if f"matmul.{dtype}.peak_share" in profile.constants and peak > 0}
    if not rates:
        raise PlanError("cluster.accelerator", accelerator.name, "its data sheet gives no arithmetic rate.", "Use another accelerator.")
    if precision.compute == "tf32" and "tf32" in rates:
        rates["fp32"] = rates["tf32"]
    slowest = min(rates.values())
    return {dtype: rates.get(dtype, slowest) for dtype in ("fp32", "tf32", "fp16", "bf16", "fp8", *rates)}


def attention_rates(accelerator: Accelerator, profile: Profile) -> dict[str, AttentionRate]:
    """Attention FLOP/s by kernel generation and dtype; fp8 recipes compute attention in 16 bits."""
    peaks = {d: p for d, p in accelerator.flops_per_s.items() if p > 0}
    sixteen = peaks.get("bf16") or peaks.get("fp16") or min(peaks.values())
    fp32 = peaks.get("fp32", min(peaks.values()))
    if accelerator.kind == "cpu":  # the CPU kernel does its softmax, and so most of its work, in fp32
        sixteen = min(sixteen, fp32)
    peak = {"bf16": sixteen, "fp16": sixteen, "fp8": sixteen, "fp32": fp32, "tf32": peaks.get("tf32", fp32)}
    out: dict[str, AttentionRate] = {}
    for generation in GENERATIONS:
        share = profile.get(f"attention.{generation}.share", 0.0)
        if share > 0:
            out[generation] = AttentionRate({d: share * p for d, p in peak.items()}, profile.value(f"attention.{generation}.head_half"))
    if "sdpa" in out:
        out |= dict.fromkeys(ALSO_SDPA, out["sdpa"])
    return out
