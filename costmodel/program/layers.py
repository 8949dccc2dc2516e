"""The operations of a Transformer's units: embedding, layer, head and loss, as PyTorch runs them.

What autograd saves depends on the kernels: the `cuda` table (fused norms, 1-byte dropout masks, flash attention) and the
`cpu` table differ, and so do eager and compiled code. Each op states its FLOPs, its bytes in device memory and what it saves.
"""

from dataclasses import dataclass

from costmodel.program import float8
from costmodel.program.experts import mixture
from costmodel.program.ir import Comm, Tensor
from costmodel.program.latent import kernel as latent_kernel
from costmodel.program.latent import queries_keys_values
from costmodel.program.parallel.context import ContextParallel
from costmodel.program.parallel.expert import ExpertParallel
from costmodel.program.parallel.tensor import TensorParallel, local_param
from costmodel.program.tape import Back, Inner, Tape, Value
from costmodel.spec import Run
from costmodel.spec.kinds import LayerKind, layer_kinds
from costmodel.spec.parameters import Param
from costmodel.spec.recipe import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class Numbers:
    """The dtypes that flow through a rank's program, and the kernels that run it."""

    table: str
    act: str
    """dtype of activations inside the blocks."""
    residual: str
    """dtype of the residual stream: fp32 under autocast, else that of the blocks."""
    weight: str
    """dtype in which kernels see weights."""
    param: str
    """dtype of the gradient that autograd accumulates: that of the parameter as the module sees it."""
    autocast: bool
    compiled: bool
    attention: str
    dropout: float
    fp8: bool = False
    """Linear layers inside the blocks run in fp8 (costmodel.program.float8)."""


def numbers_of(run: Run) -> Numbers:
    """Resolve the recipe's words to what runs on this accelerator."""
    r, acc = run.recipe, run.cluster.accelerator
    p = r.precision
    table = acc.kernel_table
    compute = "fp32" if p.compute == "tf32" else "bf16" if p.compute == "fp8" else p.compute
    attention = resolved_attention(run)
    seen = p.parameter if p.autocast else compute
    return Numbers(table=table, act=compute, residual="fp32" if p.autocast else compute, weight=compute,
                   param=seen, autocast=p.autocast and compute != p.parameter, compiled=r.compile,
                   attention=attention, dropout=r.dropout, fp8=p.compute == "fp8")


def resolved_attention(run: Run) -> str:
    """The kernel that runs: PyTorch's SDPA takes FlashAttention-2 on 16-bit CUDA inputs, memory-efficient attention on fp32.

    The memory-efficient kernel has no grouped queries: with fewer key heads the math path runs (unless keys are repeated first), as it does on a
    CPU with dropout.
    Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
    """
    r, acc = run.recipe, run.cluster.accelerator
    if r.attention != "sdpa":
        return r.attention
    if run.model.mla is not None:
        return latent_kernel(run)
    if acc.kernel_table == "cpu":
        return "math" if r.dropout else "cpu"
    low = r.precision.compute in ("bf16", "fp16", "fp8") and run.model.head_dim <= 256
    if low and acc.architecture not in ("volta", "turing", "pascal"):
        return "fa2"
    return "efficient" if run.model.heads == run.model.kv_heads or r.expand_kv else "math"


def megatron_fuses_softmax(squares: int, seq: int, dtype: str) -> bool:
    """Whether Megatron's kernel of scale, mask and softmax takes so many squares of scores (batch times heads of a rank): 16-bit, up to 4,096 long,
    and four of each count (NVIDIA/Megatron-LM megatron/core/fusions/fused_softmax.py, is_kernel_available)."""
    return dtype != "fp32" and 16 < seq <= 4096 and seq % 4 == 0 and squares % 4 == 0


class Walk:
    """Records the ops of one unit of a model on a tape."""

    __slots__ = ("tape", "run", "n", "batch", "seq", "tokens", "rows", "e", "weights_cast", "matmul_flops", "tp", "cp", "ep", "heads", "kv_heads", "ffn",
                 "vocab", "cached", "cached_flops", "matmuls", "style", "casts", "window", "value_dim")

    def __init__(self, run: Run, numbers: Numbers, kind: LayerKind | None = None, *, busiest: bool = True) -> None:
        self.tape = Tape(DTYPE_BYTES, numbers.compiled)
        self.run = run
        self.n = numbers
        self.batch = run.recipe.micro_batch
        self.seq = run.recipe.seq_len // run.plan.cp
        self.tokens = self.batch * self.seq
        """Tokens inside the blocks."""
        self.tp = TensorParallel(run)
        self.cp = ContextParallel(run)
        self.rows = self.tokens // self.tp.t if self.tp.sp else self.tokens
        """Tokens of the residual stream on this rank."""
        m, t = run.model, self.tp.t
        self.heads, self.kv_heads, self.ffn, self.vocab = m.heads // t, m.kv_heads // t, m.ffn // t, -(-m.vocab // t)
        self.e = DTYPE_BYTES[numbers.act]
        self.weights_cast = 0
        self.matmul_flops = 0.0
        self.cached: list[int] = []
        """Nodes whose results per-operation checkpointing keeps: attention, and every other matmul."""
        self.cached_flops = 0.0
        self.matmuls = 0
        self.ep = ExpertParallel(run, busiest=busiest) if kind is not None and kind.moe else None
        self.window = kind.window if kind is not None else 0
        """Tokens that a token sees in this layer; 0: all before it."""
        self.value_dim = m.mla.v_head_dim if m.mla else m.head_dim
        """Width of a head's values; that of its queries and keys is model.head_dim."""
        self.style = float8.style_of(run) if numbers.fp8 else None
        self.casts: dict[int, tuple[Value, Value]] = {}
        """fp8: the cast of a value, and what backward keeps of it."""

    # -- kernels -----------------------------------------------------------------------------------------------------

    def linear(self, x: Value, name: str, out: int, width: int, bias: bool) -> Value:
        """y = x W^T + b: saves x; backward is two matmuls of the same FLOPs, one per operand."""
        n, tape, m = self.n, self.tape, x.numel // width
        self.tp.dispatch(self, name)
        if n.fp8 and float8.takes(self.run.plan.framework, name, out, width, m):
            return float8.linear(self, x, name, out, width, bias)
        flops = 2.0 * m * width * out
        weight = Param(f"{name}.weight", (out, width))
        moved = float(self.e * (m * width + width * out + m * out))
        self.matmul_flops += flops
        extra: tuple[Tensor, ...] = ()
        source = x
        if n.autocast:
            source = self.cast(x, n.act)
            extra = (self.cast_weight(weight.name, weight.numel),)
            if bias:
                self.cast_weight(f"{name}.bias", out)
        y = tape.value(f"{name}.out", m * out, n.act)
        keep = source.regather or source
        give = None if n.autocast else weight
        backs = [Back("dgrad", "matmul", 0, flops, moved, (1, m, width, out), n.act),
                 Back("wgrad", "matmul", give, flops, moved, (1, out, width, m), n.act if n.autocast else n.param)]
        if bias:
            b = Param("head.bias" if name == "embedding" else f"{name}.bias", (out,))
            backs.insert(2 if n.autocast else 1, Back("bgrad", "memory", None if n.autocast else b, nbytes=float(self.e * m * out), dtype=n.param))
        if n.autocast:
            for at, param in enumerate((weight, b) if bias else (weight,), 1):
                low = Tensor(f"{param.name}.grad.{n.act}", "temporaries", param.numel * self.e)
                backs[at] = backs[at]._replace(opens=low)
                backs.append(self.cast_back(param)._replace(temp_bytes=0, closes=low, apart=True))
        if source.regather:
            again, event = self.tp.comm("all-gather", source.nbytes, source.dtype), f"{name}.regather"
            gathered = Tensor(f"{name}.regathered", "temporaries", source.nbytes)
            backs[-1] = backs[-1]._replace(closes=gathered)
            backs = [Back("regather", "collective", comm=again, dtype=source.dtype, event=event, opens=gathered), *backs[:-1],
                     Back("regather.wait", "wait", kernels=0, event=event), backs[-1]]
        if self.tp.megatron and self.tp.t > 1:
            backs[-1] = backs[-1]._replace(beside=True)
        tape.record(name, "matmul", (source,), (y,), saved=(keep,), extra=extra, backs=tuple(backs), flops=flops, nbytes=moved,
                    dims=(1, m, out, width), dtype=n.act)
        self.keep_every_other(flops)
        return y

    def keep_every_other(self, flops: float) -> None:
        """torchtitan's `selective_ac_option = "op"`: the first, third, … matmul of a layer is kept, of fp8 layers as well (torchao's
        Float8Tensor is a tensor to whose aten.mm the list applies)."""
        self.matmuls += 1
        if self.matmuls % 2:
            self.cached.append(len(self.tape.nodes) - 1)
            self.cached_flops += flops

    def cast(self, x: Value, dtype: str) -> Value:
        """A copy in another dtype; autocast makes one for each consumer of an activation."""
        if x.dtype == dtype:
            return x
        y = self.tape.value(f"{x.name}.{dtype}", x.numel, dtype, x.grad)
        moved = float(x.nbytes + y.nbytes)
        fused = self.n.compiled
        if fused:
            moved = 0.0
            x.read_bytes = min(x.read_bytes, y.ebytes)
        kernels = 0 if fused else 1
        back = Back("grad", "memory", 0, nbytes=moved, dtype=x.dtype, kernels=kernels)
        self.tape.record(f"{x.name}.to_{dtype}", "memory", (x,), (y,), backs=(back,), nbytes=moved, dtype=dtype, kernels=kernels)
        return y

    def cast_weight(self, name: str, numel: int) -> Tensor:
        """autocast's low-precision copy of a weight: cached until forward ends, saved for backward."""
        nbytes = numel * self.e
        self.weights_cast += nbytes
        copy = Tensor(f"{name}.{self.n.act}", "activations", nbytes)
        self.tape.record(f"{name}.cast", "memory", (), (), extra=(), nbytes=float(nbytes + 4 * numel), dtype=self.n.act)
        return copy

    def cast_back(self, param: Param) -> Back:
        low = param.numel * self.e
        return Back(f"{param.name.rsplit('.', 1)[-1]}.cast", "memory", param, nbytes=float(low + 4 * param.numel), dtype="fp32", temp_bytes=low)

    def norm(self, x: Value, name: str, width: int, *, heads: bool = False) -> Value:
        """LayerNorm or RMSNorm over the last dim; CUDA's autocast runs it in fp32.

        CUDA's fused kernels save the input and one (RMS) or two fp32 statistics a row. Written out in elementary ops
        (fused_norm = false; counted at 34 bytes an element forward, 56 backward) it saves an fp32 copy of the input and the normalised
        value; so does the CPU's RMSNorm, both in fp32. Compiled, the matmuls' casts are part of its kernels, and the gradients that meet at its
        input or output are read where they are needed; the weight's gradient is a reduction of its own, that reads both again.
        """
        model, r, n, tape = self.run.model, self.run.recipe, self.n, self.tape
        if n.autocast and n.table == "cuda" and not n.compiled:
            x = self.cast(x, "fp32")
        self.tp.dispatch(self, name)
        rows = x.numel // width
        weight, bias = Param(f"{name}.weight", (width,)), Param(f"{name}.bias", (width,))
        layer = model.norm == "layernorm"
        y = tape.value(f"{name}.out", x.numel, x.dtype)
        ebytes = x.ebytes
        composed = not r.fused_norm and not n.compiled
        plain = composed or (n.table == "cpu" and not layer)
        read = self.e if n.compiled and name != "embedding_norm" and model.norm_placement == "pre" else ebytes
        back_bytes = 56.0 * x.numel if plain else float(x.numel * (read + 2 * ebytes))
        backs = [Back("grad", "memory", 0, nbytes=back_bytes, dtype=x.dtype, kernels=14 if plain else 1)]
        if model.norm != "rmsnorm_no_weight":
            backs += self._replicated(Back("wgrad", "memory", weight, nbytes=float(x.numel * (read + ebytes)), dtype=n.param), heads)
            if model.norm_bias and not heads:
                backs += self._replicated(Back("bgrad", "memory", bias, nbytes=0.0, kernels=0, dtype=n.param), heads)
        fp32_rows = Tensor(f"{name}.rstd", "activations", rows * 4)
        wide = x.numel * 4
        if composed:
            widened = (Tensor(f"{name}.input.fp32", "activations", wide),) if layer or ebytes != 4 else ()
            normed = () if model.norm == "rmsnorm_no_weight" else (Tensor(f"{name}.normed", "activations", x.nbytes),)
            tape.record(name, "memory", (x,), (y,), saved=() if widened else (x,), extra=(fp32_rows, *widened, *normed), backs=tuple(backs),
                        nbytes=34.0 * x.numel, dtype=x.dtype, kernels=7)
        elif layer:
            stat = rows * (4 if n.table == "cuda" else ebytes)
            stats = (Tensor(f"{name}.mean", "activations", stat), Tensor(f"{name}.rstd", "activations", stat))
            tape.record(name, "memory", (x,), (y,), saved=(x,), extra=stats, backs=tuple(backs), nbytes=float(x.numel * (ebytes + read)), dtype=x.dtype)
        elif n.table == "cuda":
            tape.record(name, "memory", (x,), (y,), saved=(x,), extra=(fp32_rows,), backs=tuple(backs), nbytes=float(x.numel * (ebytes + read)),
                        dtype=x.dtype)
        else:
            widened = (Tensor(f"{name}.input.fp32", "activations", wide),) if ebytes != 4 else ()
            normed = () if model.norm == "rmsnorm_no_weight" else (Tensor(f"{name}.normed", "activations", wide),)
            tape.record(name, "memory", (x,), (y,), saved=() if widened else (x,), extra=(fp32_rows, *widened, *normed), backs=tuple(backs),
                        nbytes=34.0 * x.numel, dtype=x.dtype, kernels=6)
        return y

    def _replicated(self, back: Back, heads: bool) -> list[Back]:
        """The gradient of a weight that every tp rank holds: summed over the ranks where each saw part of the tokens (or heads)."""
        if self.tp.t == 1 or not (self.tp.sp or heads) or self.tp.sums_norms_late:
            return [back]
        assert isinstance(back.gives, Param)
        nbytes = back.gives.numel * DTYPE_BYTES[back.dtype]
        total = Back(f"{back.name}.all_reduce", "collective", back.gives, dtype=back.dtype, comm=self.tp.comm("all-reduce", nbytes, back.dtype))
        return [back._replace(gives=None, temp_bytes=nbytes), total]

    def rope(self, x: Value, name: str, fraction: float) -> Value:
        """q·cos + rotate_half(q)·sin, in Megatron one kernel of Transformer Engine (apply_rope_fusion); the constants are not saved activations."""
        if fraction == 0:
            return x
        y = self.tape.value(f"{name}.rotated", x.numel, x.dtype)
        fused = self.n.compiled or self.tp.megatron
        moved = (2.0 if fused else 9.0) * x.nbytes * fraction
        temp = 0 if fused else 2 * x.nbytes
        self.tape.record(f"{name}.rope", "memory", (x,), (y,), nbytes=moved, dtype=x.dtype, kernels=1 if fused else 5, temp_bytes=temp,
                         backs=(Back("grad", "memory", 0, nbytes=moved, dtype=x.dtype, kernels=1 if fused else 6, temp_bytes=temp),))
        return y

    def activation(self, x: Value, name: str) -> Value:
        """An elementwise non-linearity, in compiled code one kernel: saves its input (ReLU its output; eager ReLU² both halves)."""
        kind = self.run.model.activation
        y = self.tape.value(f"{name}.act", x.numel, x.dtype)
        back = (Back("grad", "memory", 0, nbytes=3.0 * x.nbytes, dtype=x.dtype),)
        if kind == "relu_squared" and not self.n.compiled:
            half = self.tape.value(f"{name}.relu", x.numel, x.dtype)
            self.tape.record(f"{name}.relu", "memory", (x,), (half,), saved=(half,), backs=back, nbytes=2.0 * x.nbytes, dtype=x.dtype)
            self.tape.record(f"{name}.square", "memory", (half,), (y,), saved=(half,), nbytes=2.0 * x.nbytes, dtype=x.dtype,
                             backs=(Back("grad", "memory", 0, nbytes=3.0 * x.nbytes, dtype=x.dtype, kernels=2, temp_bytes=x.nbytes),))
            x.last_use = len(self.tape.nodes) - 1  # relu(x).square(): the caller holds x until all of it is done
        else:
            saved = (y,) if kind == "relu" else (x,)
            self.tape.record(f"{name}.act", "memory", (x,), (y,), saved=saved, backs=back, nbytes=2.0 * x.nbytes, dtype=x.dtype)
        return y

    def gate(self, gate: Value, up: Value, name: str) -> Value:
        """act(gate)·up. Eager saves the gate, the activated gate and up; compiled code and Megatron's fused kernel compute the
        activated gate again."""
        y = self.tape.value(f"{name}.product", up.numel, up.dtype)
        b = up.nbytes
        if self.n.compiled or self.tp.megatron:
            self.tape.record(f"{name}.gate", "memory", (gate, up), (y,), saved=(gate, up), nbytes=3.0 * b, dtype=up.dtype,
                             backs=(Back("grad", "memory", 0, nbytes=5.0 * b, dtype=up.dtype), Back("grad_up", "memory", 1, kernels=0, dtype=up.dtype)))
            return y
        active = self.activation(gate, f"{name}.gate")
        self.tape.record(f"{name}.product", "memory", (active, up), (y,), saved=(active, up), nbytes=3.0 * b, dtype=up.dtype,
                         backs=(Back("grad", "memory", 0, nbytes=3.0 * b, dtype=up.dtype), Back("grad_up", "memory", 1, nbytes=3.0 * b, dtype=up.dtype)))
        return y

    def dropout(self, x: Value, name: str) -> Value:
        """Saves its mask: 1 byte an element on CUDA (native_dropout), an element of the tensor's dtype on the CPU."""
        p = self.n.dropout
        if not p:
            return x
        y = self.tape.value(f"{name}.dropped", x.numel, x.dtype)
        per = 1 if self.n.table == "cuda" else x.ebytes
        mask = Tensor(f"{name}.mask", "activations", x.numel * per)
        moved = 2.0 * x.nbytes + mask.nbytes
        self.tape.record(f"{name}.dropout", "memory", (x,), (y,), extra=(mask,), nbytes=moved, dtype=x.dtype,
                         backs=(Back("grad", "memory", 0, nbytes=moved, dtype=x.dtype),))
        return y

    def add(self, x: Value, y: Value, name: str) -> Value:
        """The residual sum; compiled, it is part of the norm that reads it; in Megatron of the dropout before it (core/fusions/fused_bias_dropout.py).
        Its gradient reaches both inputs as one tensor; an input of lower precision gets a cast copy."""
        out = self.tape.value(name, x.numel, x.dtype)
        after_dropout = self.tp.megatron and y.made_by >= 0 and self.tape.nodes[y.made_by].name.endswith(".dropout")
        moved = float(x.nbytes if after_dropout else y.nbytes + out.nbytes + (0 if self.n.compiled else x.nbytes))
        if x.dtype == y.dtype:
            back = Back("grad", "memory", 1, alias=True)
        else:
            back = Back("grad", "memory", 1, nbytes=float(x.nbytes + y.nbytes), dtype=y.dtype)
        self.tape.record(name, "memory", (x, y), (out,), backs=(Back("grad", "memory", 0, alias=True), back), nbytes=moved, dtype=x.dtype,
                         kernels=0 if self.n.compiled or after_dropout else 1)
        return out

    # -- attention -----------------------------------------------------------------------------------------------------

    def attention(self, x: Value) -> Value:
        """Self-attention from the normed input to the output projection."""
        m = self.run.model
        if m.mla is not None:
            q, k, v = (self.cast(t, self.n.act) for t in queries_keys_values(self, x))
        else:
            q, k, v = self.queries_keys_values(x)
        chk = self.run.plan.checkpointing
        if chk.mode == "selective" and "attention" in chk.ops:
            out = self._checkpointed_core(q, k, v)
        else:
            out = self.attention_core(q, k, v)
        out = self.cp.leave(self, out)
        return self.tp.leave(self, self.linear(out, "attention.out", m.hidden, self.heads * self.value_dim, m.attention_out_bias), "attention.out")

    def queries_keys_values(self, x: Value) -> tuple[Value, Value, Value]:
        """From the normed input to what attention takes."""
        m, n = self.run.model, self.n
        h, qw, kw = m.hidden, self.heads * m.head_dim, self.kv_heads * m.head_dim
        x = self.tp.enter(self, x, "attention")
        fused = m.fused_qkv or self.tp.megatron
        if fused:
            q, k, v = self.fused_linear(x, "attention.qkv", (("attention.q", qw), ("attention.k", kw), ("attention.v", kw)), m.qkv_bias)
        else:
            q = self.linear(x, "attention.q", qw, h, m.qkv_bias)
            k = self.linear(x, "attention.k", kw, h, m.qkv_bias)
            v = self.linear(x, "attention.v", kw, h, m.qkv_bias)
        if m.qk_norm != "none":
            q = self.norm(q, "attention.q_norm", qw if m.qk_norm == "full" else m.head_dim, heads=True)
            k = self.norm(k, "attention.k_norm", kw if m.qk_norm == "full" else m.head_dim, heads=True)
        if m.positions == "rope":
            q = self.rope(q, "attention.q", m.rotary_fraction)
            k = self.rope(k, "attention.k", m.rotary_fraction)
        chk = self.run.plan.checkpointing
        inside = chk.mode == "selective" and "attention" in chk.ops
        if not inside or self.cp.c > 1:  # a checkpoint keeps what enters it, and casts it when it runs
            q, k, v = (self.cast(t, n.act) for t in (q, k, v))
        q, k, v = self.cp.enter(self, (q, k, v), fused=fused)
        if self.run.recipe.expand_kv and n.attention not in ("eager", "math"):
            k, v = (self._repeat(t, self.heads // self.kv_heads) for t in (k, v))
        return q, k, v

    def fused_linear(self, x: Value, name: str, parts: tuple[tuple[str, int], ...], bias: bool) -> tuple[Value, ...]:
        """One matmul, views of its output; backward concatenates their gradients before its own matmuls.

        The views share one allocation, which lives as long as any of them does.
        """
        width, n = self.run.model.hidden, self.n
        y = self.linear(x, name, sum(size for _, size in parts), width, bias)
        node = self.tape.take_back()
        total = y.nbytes
        views = tuple(self.tape.value(view, self.tokens * size, n.act) for view, size in parts)
        for view in views:
            view.own_bytes, view.base = 0, y
        backs = tuple(b if b.apart else b._replace(temp_bytes=b.temp_bytes + total) for b in node.backs)
        cat = Back("cat", "memory", None, nbytes=2.0 * total, dtype=n.act, temp_bytes=total, joins=True)
        self.tape.record(node.name, node.kind, node.inputs, (y, *views), saved=node.saved, extra=node.extra, backs=(cat, *backs),
                         flops=node.flops, nbytes=node.nbytes, dims=node.dims, dtype=node.dtype)
        return views

    def attention_core(self, q: Value, k: Value, v: Value) -> Value:
        """From queries, keys and values to the heads' outputs, of the whole sequence where its ranks share it."""
        return self.cp.attention(self, q, k, v, self.local_attention)

    def local_attention(self, q: Value, k: Value, v: Value) -> Value:
        """Attention over what is here."""
        if self.n.attention in ("eager", "math"):
            wide = "fp32" if self.n.attention == "math" else self.n.act
            return self.cast(self.eager_attention(*(self.cast(t, wide) for t in (q, k, v))), self.n.act)
        out = self.flash_attention(q, k, v)
        self.cached.append(len(self.tape.nodes) - 1)
        return out

    def _checkpointed_core(self, q: Value, k: Value, v: Value) -> Value:
        """Attention alone is computed again in backward (Megatron's selective recompute, arXiv 2205.05198 section 5)."""
        outer, self.tape = self.tape, Tape(DTYPE_BYTES, self.n.compiled)
        entries = tuple(self.tape.input(t.name, t.numel, t.dtype) for t in (q, k, v))
        kept, self.cached = self.cached, []
        exit = self.attention_core(*(self.cast(t, self.n.act) for t in entries))
        inner, self.tape, self.cached = self.tape, outer, kept
        out = outer.value(exit.name, exit.numel, exit.dtype)
        outer.record_checkpointed("attention.checkpointed", (q, k, v), out, Inner(inner, entries, exit))
        return out

    def flash_attention(self, q: Value, k: Value, v: Value) -> Value:
        """Fused attention: saves q, k, v, the output and an fp32 log-sum-exp per head and token; no s² tensor.

        Forward 4·s²·d FLOPs per head, half where causality lets the kernel skip; with a window of w tokens (s - w/2)·w of the s²/2
        pairs are left. Backward 2.5 times that, for the scores are computed again (FlashAttention-2, arXiv 2307.08691): two products
        become five, of which three are as wide as queries and two as values, where those differ.
        """
        m, n, b, s = self.run.model, self.n, self.batch, self.seq
        causal = self.run.recipe.causal
        keys = windowed_keys(s, self.window)
        d, dv = m.head_dim, self.value_dim
        pairs = 2.0 * b * self.heads * float(s) * keys * (0.5 if causal else 1.0)
        flops, again = pairs * (d + dv), pairs * (3 * d + 2 * dv)
        out = self.tape.value("attention.core", b * s * self.heads * dv, q.dtype)
        lse = Tensor("attention.lse", "activations", b * self.heads * s * 4)
        dims = (b, self.heads, self.kv_heads, s, keys, m.head_dim, int(causal))
        moved = float(q.nbytes + out.nbytes + k.nbytes + v.nbytes)
        name = f"attention:{n.attention}"
        backs = (Back("grad_q", "attention", 0, again, 2.0 * moved + q.nbytes, (*dims, 1), n.act, kernels=3),
                 Back("grad_k", "memory", 1, kernels=0, dtype=n.act), Back("grad_v", "memory", 2, kernels=0, dtype=n.act))
        self.tape.record(name, "attention", (q, k, v), (out,), saved=(q, k, v, out), extra=(lse,), backs=backs, flops=flops,
                         nbytes=moved, dims=(*dims, 0), dtype=n.act, kernels=1)
        return out

    def eager_attention(self, q: Value, k: Value, v: Value) -> Value:
        """Attention as matmul, scale, mask, softmax, dropout, matmul: the s² tensors of Korthikanti et al., 5·a·s²·b bytes.

        Megatron's scaled, masked softmax is one kernel where it takes the shape; where not, an fp32 copy is scaled, masked, and its softmax cast
        back (core/fusions/fused_softmax.py). Saved in 16-bit: softmax output 2 (4 in fp32), dropout mask 1, dropped probabilities 2 bytes a score;
        scores themselves die. Causal FLOPs are not halved: the whole square is computed, whatever a window leaves of it. PyTorch's composed kernel
        ("math") does all of it in fp32 (aten/src/ATen/native/transformers/attention.cpp).
        """
        m, n, b, s = self.run.model, self.n, self.batch, self.seq
        groups, act = m.heads // m.kv_heads, q.dtype
        scores_numel, d, dv, e = b * self.heads * s * s, m.head_dim, self.value_dim, q.ebytes
        flops, weighing = (2.0 * b * self.heads * float(s) * s * width for width in (d, dv))
        moved, gathered = (float(e * (b * self.heads * (2 * s * width) + scores_numel)) for width in (d, dv))
        q, k, v = (self._own(t) for t in (q, self._repeat(k, groups), self._repeat(v, groups)))
        scores = self.tape.value("attention.scores", scores_numel, act)
        scored, weighted = (b * self.heads, s, s, d), (b * self.heads, s, d, s)
        valued, summed = (b * self.heads, s, s, dv), (b * self.heads, s, dv, s)
        self.tape.record("attention.qk", "matmul", (q, k), (scores,), saved=(q, k), flops=flops, nbytes=moved, dims=scored, dtype=act,
                         backs=(Back("grad_q", "matmul", 0, flops, moved, weighted, act),
                                Back("grad_k", "matmul", 1, flops, moved, weighted, act)))
        wide = self.tp.megatron and not megatron_fuses_softmax(b * self.heads, s, act)
        if wide:
            scores = self.cast(scores, "fp32")
        sb, dtype = scores.nbytes, scores.dtype
        scaled = self.tape.value("attention.scaled", scores_numel, dtype)
        fused = n.compiled or n.attention == "math" or self.tp.megatron and not wide
        self.tape.record("attention.scale", "memory", (scores,), (scaled,), nbytes=(0.0 if fused else 2.0 * sb), kernels=0 if fused else 1, dtype=dtype,
                         backs=(Back("grad", "memory", 0, nbytes=0.0 if fused else 2.0 * sb, kernels=0 if fused else 1, dtype=dtype),))
        masked = scaled
        if self.run.recipe.causal:
            masked = self.tape.value("attention.masked", scores_numel, dtype)
            self.tape.record("attention.mask", "memory", (scaled,), (masked,), nbytes=0.0 if fused else 2.0 * sb, kernels=0 if fused else 1, dtype=dtype,
                             backs=(Back("grad", "memory", 0, nbytes=0.0 if fused else 2.0 * sb, kernels=0 if fused else 1, dtype=dtype),))
        soft = "fp32" if n.autocast and n.table == "cuda" else dtype
        if not fused:
            masked = self.cast(masked, soft)
        probs = self.tape.value("attention.probs", scores_numel, soft)
        self.tape.record("attention.softmax", "memory", (masked,), (probs,), saved=(probs,), nbytes=float(sb + probs.nbytes), dtype=soft,
                         backs=(Back("grad", "memory", 0, nbytes=3.0 * probs.nbytes, dtype=soft),))
        used = self.cast(self.dropout(self.cast(probs, act) if wide else probs, "attention.probs"), act)
        out = self.tape.value("attention.core", b * s * self.heads * dv, act)
        self.tape.record("attention.pv", "matmul", (used, v), (out,), saved=(used, v), flops=weighing, nbytes=gathered, dims=summed, dtype=act,
                         backs=(Back("grad_p", "matmul", 0, weighing, gathered, valued, act),
                                Back("grad_v", "matmul", 1, weighing, gathered, summed, act)))
        merged = self.tape.value("attention.merged", out.numel, act)
        self.tape.record("attention.merge", "memory", (out,), (merged,), nbytes=2.0 * out.nbytes, dtype=act,
                         backs=(Back("grad", "memory", 0, alias=True),))
        return merged

    def _own(self, x: Value) -> Value:
        """A batched matmul folds batch and heads, and copies what it cannot fold: a view of more keeps nothing of it. Megatron's layout, tokens first,
        it reads as it lies."""
        if x.base is None or self.tp.megatron:
            return x
        y = self.tape.value(f"{x.name}.contiguous", x.numel, x.dtype)
        self.tape.record(f"{x.name}.contiguous", "memory", (x,), (y,), nbytes=2.0 * x.nbytes, dtype=x.dtype, backs=(Back("grad", "memory", 0, alias=True),))
        return y

    def _repeat(self, x: Value, groups: int) -> Value:
        """Keys or values repeated for the query heads that share them."""
        if groups == 1:
            return x
        y = self.tape.value(f"{x.name}.repeated", x.numel * groups, x.dtype)
        self.tape.record(f"{x.name}.repeat", "memory", (x,), (y,), nbytes=float(x.nbytes + y.nbytes), dtype=x.dtype,
                         backs=(Back("sum", "memory", 0, nbytes=float(x.nbytes + y.nbytes), dtype=x.dtype),))
        return y

    # -- units ---------------------------------------------------------------------------------------------------------

    def mlp(self, x: Value) -> Value:
        """The feed-forward block: dense, or a mixture of experts."""
        return self.feed_forward(x, "mlp", self.ffn, self.run.model.mlp_bias) if self.ep is None else mixture(self, x)

    def feed_forward(self, x: Value, name: str, ffn: int, bias: bool) -> Value:
        """Two matrices around an activation, or three with a gate; `ffn` is the inner width on this rank."""
        m = self.run.model
        x = self.tp.enter(self, x, name)
        if m.gated and self.tp.megatron:
            gate, up = self.fused_linear(x, f"{name}.up", ((f"{name}.gate", ffn), (f"{name}.up", ffn)), bias)
            inner = self.gate(gate, up, name)
        elif m.gated:
            gate = self.linear(x, f"{name}.gate", ffn, m.hidden, bias)
            up = self.linear(x, f"{name}.up", ffn, m.hidden, bias)
            inner = self.gate(gate, up, name)
        else:
            inner = self.activation(self.linear(x, f"{name}.up", ffn, m.hidden, bias), name)
        return self.tp.leave(self, self.linear(inner, f"{name}.down", m.hidden, ffn, bias), f"{name}.down")


@dataclass(frozen=True, slots=True)
class Unit:
    """One recorded unit: its tape, where it begins and ends, and the totals that other readings need."""

    tape: Tape
    entry: Value | None
    exit: Value
    matmul_flops: float
    attention_flops: float
    weights_cast_bytes: int
    kept: tuple[Value, ...] = ()
    """What the caller holds until the unit's backward is done."""
    cached: frozenset[int] = frozenset()
    """Nodes whose results per-operation checkpointing keeps."""
    cached_flops: float = 0.0
    """Forward FLOPs of the matmuls among them."""


def _unit(walk: Walk, entry: Value | None, out: Value, attention_flops: float = 0.0) -> Unit:
    return Unit(walk.tape, entry, out, walk.matmul_flops, attention_flops, walk.weights_cast, (), frozenset(walk.cached), walk.cached_flops)


def batch_tensors(run: Run) -> tuple[Tensor, ...]:
    """Token ids and targets of one micro-batch."""
    tokens = run.recipe.micro_batch * run.recipe.seq_len // run.plan.cp
    e = 8 if run.recipe.token_dtype == "int64" else 4
    return (Tensor("tokens", "activations", tokens * e), Tensor("targets", "activations", tokens * e))


def constant_tensors(run: Run, numbers: Numbers) -> tuple[Tensor, ...]:
    """Tables that live beside the parameters: rotary cosines and sines, the mask of eager attention."""
    m, s = run.model, run.recipe.seq_len // run.plan.cp
    out: list[Tensor] = []
    if m.positions == "rope" and m.rotary_fraction:
        width = m.mla.qk_rope_head_dim if m.mla else int(m.head_dim * m.rotary_fraction)
        out.append(Tensor("rotary tables", "framework", 2 * s * width * DTYPE_BYTES[numbers.act]))
    if m.position_rows and run.plan.cp > 1 and run.plan.framework == "pytorch":
        out.append(Tensor("positions of this rank's tokens", "framework", 8 * s))
    if numbers.attention == "eager" and run.recipe.causal:
        masks = len({kind.window for kind in set(layer_kinds(m, run.recipe.seq_len))})
        out.append(Tensor("attention mask", "framework", masks * run.recipe.seq_len ** 2))
    return tuple(out)


def windowed_keys(s: int, window: int) -> int:
    """2w - w²/s: the keys of a causal square's worth of work, of which half is as much as s queries have that see w tokens each; s without a window."""
    return 2 * window - window * window // s if window else s


def model_attention_flops(run: Run, kind: LayerKind) -> float:
    """Attention FLOPs of one layer's forward over one micro-batch on one rank: every query by every key, no causal halving; by w of them where
    tokens see w (OLMo-core, num_flops_per_token; nanochat, estimate_flops)."""
    m, r = run.model, run.recipe
    both = m.head_dim + (m.mla.v_head_dim if m.mla else m.head_dim)
    return 2.0 * r.micro_batch * m.heads * both * float(r.seq_len) * (kind.window or r.seq_len) / (run.plan.cp * run.plan.tp)


def layer_unit(run: Run, numbers: Numbers, kind: LayerKind, *, busiest: bool = True) -> Unit:
    """One layer: x + attention(norm(x)), then + mlp(norm(·)); or both from one norm (parallel residual)."""
    m = run.model
    w = Walk(run, numbers, kind, busiest=busiest)
    w.tp.dispatches &= not numbers.compiled
    x = w.tape.input("hidden", w.rows * m.hidden, numbers.residual)
    n = m.norms_per_layer
    if m.parallel_residual:
        first = w.norm(x, "attention_norm", m.hidden)
        second = w.norm(x, "mlp_norm", m.hidden) if n >= 2 else first
        a = w.dropout(w.attention(first), "attention.out")
        f = w.dropout(w.mlp(second), "mlp.down")
        y = w.add(w.add(x, a, "attention.residual"), f, "hidden")
        return _unit(w, x, y, model_attention_flops(run, kind))
    post = m.norm_placement == "post"
    a = w.dropout(w.attention(x if post else w.norm(x, "attention_norm", m.hidden)), "attention.out")
    if post:
        a = w.norm(a, "attention_norm", m.hidden)
    elif n == 4:
        a = w.norm(a, "attention_post_norm", m.hidden)
    mid = w.add(x, a, "attention.residual")
    norm = "mlp_norm" if n >= 2 else "attention_norm"
    f = w.dropout(w.mlp(mid if post else w.norm(mid, norm, m.hidden)), "mlp.down")
    if post:
        f = w.norm(f, "mlp_norm", m.hidden)
    elif n == 4:
        f = w.norm(f, "mlp_post_norm", m.hidden)
    y = w.add(mid, f, "hidden")
    return _unit(w, x, y, model_attention_flops(run, kind))


def embedding_unit(run: Run, numbers: Numbers) -> Unit:
    """Token (and position) lookup, in the dtype of the parameters as the module sees them."""
    m = run.model
    w = Walk(run, numbers)
    dtype = numbers.param
    e = DTYPE_BYTES[dtype]
    table = Param("embedding.weight", (w.vocab, m.embedding_dim))
    width = m.embedding_dim
    y = w.tape.value("embedding.out", w.tokens * width, dtype)
    grad_bytes = float(table.numel * e + w.tokens * width * e * 2)
    w.tp.dispatch(w, "embedding")
    w.tape.record("embedding", "memory", (), (y,), nbytes=2.0 * y.nbytes, dtype=dtype,
                  backs=(Back("wgrad", "memory", table, nbytes=grad_bytes, dtype=numbers.param, kernels=3,
                              grad_numel=table.numel if m.tied_embeddings else w.tp.lookup(table, m.vocab)),))
    y = w.tp.leave(w, y, "embedding")
    if m.position_rows:
        rows = local_param(Param("positions.weight", (m.position_rows, m.hidden)), w.tp.t, run.plan.framework)
        at = w.tape.value("positions.out", w.seq * m.hidden, dtype)
        w.tp.dispatch(w, "positions")
        w.tape.record("positions", "memory", (), (at,), nbytes=2.0 * at.nbytes, dtype=dtype,
                      extra=() if w.cp.c > 1 else (Tensor("positions.index", "activations", w.seq * 8),),
                      backs=(Back("wgrad", "memory", rows, nbytes=float(rows.numel * e), dtype=numbers.param,
                                  grad_numel=w.tp.lookup(rows, m.position_rows)),))
        if not w.tp.megatron:
            at = w.tp.leave(w, at, "positions")
        out = w.tape.value("embedding.sum", y.numel, dtype)
        w.tape.record("embedding.add", "memory", (y, at), (out,), nbytes=3.0 * y.nbytes, dtype=dtype,
                      backs=(Back("grad", "memory", 0, alias=True), Back("grad_positions", "memory", 1, nbytes=float(y.nbytes), dtype=dtype)))
        y = out
    if m.embedding_norm:
        y = w.norm(y, "embedding_norm", m.hidden)
    y = w.dropout(y, "embedding")
    y.name = "hidden"
    return _unit(w, None, y)


def head_unit(run: Run, numbers: Numbers) -> Unit:
    """Final norm, output matrix and loss of one micro-batch; the peak of many runs is here.

    A pipeline's last stage holds its logits until its backward is done. The normed hidden states stay referenced until forward
    returns. eager: logits in the compute dtype, their fp32 copy, and the log-softmax that cross-entropy saves; backward holds three
    fp32 tensors of that size for a moment (12 bytes a logit). bf16 skips the fp32 copy. chunked and fused are in `_chunked_loss`
    and `_fused_loss`.
    """
    m, r = run.model, run.recipe
    w = Walk(run, numbers)
    x = w.tape.input("hidden", w.rows * m.hidden, numbers.residual)
    y = w.norm(x, "final_norm", m.hidden) if m.final_norm else x
    kept: tuple[Value, ...] = ()
    if r.loss == "chunked":
        loss = _chunked_loss(w, y)
    elif r.loss == "fused":
        loss = _fused_loss(w, y)
    else:
        name = "embedding" if m.tied_embeddings else "head"
        logits = w.linear(w.tp.enter(w, y, "head"), name, w.vocab, m.hidden, m.head_bias)
        logits = w.tp.gather_logits(w, logits)
        alone = run.plan.single_process and run.plan.dp > 1
        if alone:
            logits = _gathered(w, logits)
        loss = _cross_entropy(w, logits, r.loss == "bf16")
        kept = (logits,) if alone or (run.plan.pp > 1 and run.plan.framework == "pytorch") else ()
    y.last_use = len(w.tape.nodes) - 1
    return Unit(w.tape, x, loss, w.matmul_flops, 0.0, w.weights_cast, kept)


def replica_head_unit(run: Run, numbers: Numbers) -> Unit:
    """Final norm and output matrix on one of DataParallel's other GPUs, whose logits go to GPU 0 and whose gradient comes from there."""
    m = run.model
    w = Walk(run, numbers)
    x = w.tape.input("hidden", w.rows * m.hidden, numbers.residual)
    y = w.norm(x, "final_norm", m.hidden) if m.final_norm else x
    logits = w.linear(y, "embedding" if m.tied_embeddings else "head", w.vocab, m.hidden, m.head_bias)
    sent = w.tape.value("loss", 1, "fp32")
    sends, receives = _moved(w, logits)
    w.tape.record("gather_logits", "collective", (logits,), (sent,), comm=sends, dtype=logits.dtype, kernels=0,
                  backs=(Back("scatter", "collective", 0, comm=receives, dtype=logits.dtype),))
    y.last_use = len(w.tape.nodes) - 1
    return Unit(w.tape, x, sent, w.matmul_flops, 0.0, w.weights_cast)


def _gathered(w: Walk, logits: Value) -> Value:
    """The logits of all GPUs on GPU 0; in backward its own part of their gradient is a view."""
    whole = w.tape.value("logits of all", w.run.plan.dp * logits.numel, logits.dtype)
    sends, receives = _moved(w, logits)
    w.tape.record("gather_logits", "collective", (logits,), (whole,), comm=sends, dtype=logits.dtype, kernels=0,
                  backs=(Back("scatter", "collective", None, comm=receives, dtype=logits.dtype), Back("own", "memory", 0, alias=True)))
    return whole


def _moved(w: Walk, logits: Value) -> tuple[Comm, Comm]:
    """DataParallel's gather of the logits to GPU 0, and the scatter of their gradient."""
    n = w.run.plan.dp
    return (Comm("dp_replicate", "gather", n * logits.nbytes, logits.nbytes, n * logits.nbytes, logits.dtype, n),
            Comm("dp_replicate", "scatter", n * logits.nbytes, n * logits.nbytes, logits.nbytes, logits.dtype, n))


def _cross_entropy(w: Walk, logits: Value, low: bool) -> Value:
    tape = w.tape
    if w.run.recipe.loss == "inplace":
        return _inplace_loss(w, logits)
    if w.tp.megatron:
        return _vocabulary_parallel_loss(w, logits)
    wide = logits if low else w.cast(logits, "fp32")
    if w.run.model.logit_softcap and not w.n.compiled:
        wide = _bounded(w, wide)
    if w.tp.loss_parallel:
        return _loss_parallel(w, wide)
    fused = w.n.compiled
    log_probs = tape.value("loss.log_softmax", wide.numel, wide.dtype)
    tape.record("loss.log_softmax", "memory", (wide,), (log_probs,), saved=(log_probs,), nbytes=(1.0 if fused else 2.0) * wide.nbytes,
                dtype=wide.dtype, backs=(Back("grad", "memory", 0, nbytes=(1.0 if fused else 3.0) * wide.nbytes, dtype=wide.dtype),))
    loss = tape.value("loss", 1, wide.dtype)
    tape.record("loss.nll", "memory", (log_probs,), (loss,), nbytes=float(w.tokens * 8), dtype=wide.dtype,
                extra=(Tensor("loss.total_weight", "activations", wide.ebytes),),
                backs=(Back("grad", "memory", 0, nbytes=(0.0 if fused else 2.0) * wide.nbytes, dtype=wide.dtype, kernels=0 if fused else 2),))
    return loss


def _bounded(w: Walk, logits: Value) -> Value:
    """c·tanh(logits/c): a quotient, its tanh, which is kept, and a product, while the logits are there; compiled code does it on the way."""
    tape, b, dtype = w.tape, logits.nbytes, logits.dtype
    quotient, tanh, y = (tape.value(f"loss.softcap.{name}", logits.numel, dtype) for name in ("quotient", "tanh", "product"))
    back = Back("grad", "memory", 0, nbytes=2.0 * b, dtype=dtype)
    tape.record("loss.softcap.quotient", "memory", (logits,), (quotient,), nbytes=2.0 * b, dtype=dtype, backs=(back,))
    tape.record("loss.softcap.tanh", "memory", (quotient,), (tanh,), saved=(tanh,), nbytes=2.0 * b, dtype=dtype, backs=(back._replace(nbytes=3.0 * b),))
    tape.record("loss.softcap.product", "memory", (tanh, logits), (y,), nbytes=2.0 * b, dtype=dtype, backs=(back,))
    return y


def _loss_parallel(w: Walk, wide: Value) -> Value:
    """DTensor's vocabulary-parallel cross-entropy: backward holds the log-softmax, zeros, exponentials and their sum, 16 bytes a local
    logit at the peak, and 33 bytes a token (torch/distributed/tensor/parallel/loss.py, _nll_loss_and_log_softmax_backward). Of 16-bit
    logits forward makes an fp32 copy and keeps all fp32 steps until the 16-bit result is there."""
    tape, each = w.tape, wide.nbytes
    low = wide.dtype != "fp32"
    w.tp.loss_sums(w, w.tokens, "loss.max")
    w.tp.loss_sums(w, w.tokens, "loss.sum")
    log_probs = tape.value("loss.log_softmax", wide.numel, wide.dtype)
    tape.record("loss.log_softmax", "memory", (wide,), (log_probs,), saved=(log_probs,), nbytes=6.0 * each, dtype=wide.dtype, kernels=4,
                temp_bytes=12 * wide.numel if low else each, backs=(Back("grad", "memory", 0, alias=True),))
    loss = tape.value("loss", 1, wide.dtype)
    tape.record("loss.nll", "memory", (log_probs,), (loss,), nbytes=float(w.tokens * 8), dtype=wide.dtype,
                extra=(Tensor("loss.total_weight", "activations", wide.ebytes),),
                backs=(Back("grad", "memory", 0, nbytes=9.0 * each, dtype=wide.dtype, kernels=5, temp_bytes=2 * each + 33 * w.tokens),))
    w.tp.loss_sums(w, w.tokens, "loss.target", wide.dtype)
    return loss


def _vocabulary_parallel_loss(w: Walk, logits: Value) -> Value:
    """Megatron's cross-entropy: the exponentials replace an fp32 copy of the logits in place and are saved; backward turns them into
    the gradient in place: 6 bytes a logit at the peak (NVIDIA/Megatron-LM core/tensor_parallel/cross_entropy.py)."""
    for name in ("loss.max", "loss.sum", "loss.target"):
        w.tp.loss_sums(w, w.tokens, name)
    loss = w.tape.value("loss", 1, "fp32")
    kept = Tensor("loss.softmax", "activations", logits.numel * 4)
    moved = float(logits.nbytes + 5 * kept.nbytes)
    w.tape.record("loss.cross_entropy", "memory", (logits,), (loss,), extra=(kept,), nbytes=moved, dtype="fp32", kernels=8,
                  backs=(Back("grad", "memory", 0, nbytes=float(2 * kept.nbytes + logits.nbytes), dtype=logits.dtype, kernels=3),))
    return loss


def _inplace_loss(w: Walk, logits: Value) -> Value:
    """A fused cross-entropy whose forward overwrites the logits with their gradient: 2 bytes a 16-bit logit, held until backward
    (Transformer Engine's parallel cross-entropy, flash-attention's with inplace_backward, llm.c's fused classifier)."""
    tape = w.tape
    loss = tape.value("loss", 1, "fp32")
    tape.record("loss.in_place", "memory", (logits,), (), kernels=0)
    end = len(tape.nodes) - 1
    kept = Tensor("loss.grad_logits", "activations", logits.nbytes)
    tape.record("loss.cross_entropy", "memory", (logits,), (loss,), extra=(kept,), nbytes=3.0 * logits.nbytes, dtype=logits.dtype, kernels=2,
                backs=(Back("release", "memory", kernels=0, release=True), Back("grad", "memory", 0, kernels=0, dtype=logits.dtype)))
    logits.last_use = end
    return loss


def _head_weight(w: Walk) -> Param:
    m = w.run.model
    return Param("embedding.weight" if m.tied_embeddings else "head.weight", (m.vocab, m.hidden))


def _chunked_loss(w: Walk, y: Value) -> Value:
    """Head and loss over pieces of the sequence, each checkpointed: the logits of one piece exist at a time."""
    m, n, chunks = w.run.model, w.n, w.run.recipe.loss_chunks
    weight = _head_weight(w)
    rows = -(-w.tokens // chunks)
    flops = 2.0 * rows * m.vocab * m.hidden
    w.matmul_flops += flops * chunks
    logits = rows * m.vocab
    e = w.e
    wide = logits * 4
    moved = float(e * (rows * m.hidden + weight.numel + logits))
    loss = w.tape.value("loss", 1, "fp32")
    forward_temp = logits * e + 2 * wide if e != 4 else 2 * wide
    cast = (w.cast_weight(weight.name, weight.numel),) if n.autocast else ()
    source = w.cast(y, n.act) if n.autocast else y
    backs: list[Back] = []
    grad_temp = 3 * wide
    for i in range(chunks):
        kept = Tensor(f"loss.chunk{i}.log_softmax", "activations", wide)
        backs.append(Back(f"chunk{i}.recompute", "matmul", None, flops, moved, (1, rows, m.hidden, m.vocab), n.act, temp_bytes=forward_temp - wide,
                          again=True, opens=kept))
        backs.append(Back(f"chunk{i}.loss", "memory", None, nbytes=8.0 * wide, kernels=6, temp_bytes=grad_temp - wide, closes=kept))
        backs.append(Back(f"chunk{i}.dgrad", "matmul", 0 if i == 0 else None, flops, moved, (1, rows, m.vocab, m.hidden), n.act,
                          temp_bytes=logits * e))
        backs.append(Back(f"chunk{i}.wgrad", "matmul", weight if i == 0 and not n.autocast else None, flops, moved, (1, m.vocab, rows, m.hidden),
                          n.act if n.autocast else n.param, temp_bytes=logits * e + (2 * weight.numel * e if i else 0)))
    if n.autocast:
        backs.append(w.cast_back(weight))
    if m.head_bias:
        backs.append(Back("bgrad", "memory", Param("head.bias", (m.vocab,)), nbytes=float(e * logits * chunks), dtype=n.param))
    w.tape.record("loss.chunked", "matmul", (source,), (loss,), saved=(source,), extra=cast, backs=tuple(backs), flops=flops * chunks,
                  nbytes=moved * chunks + 6.0 * wide * chunks, dims=(1, w.tokens, m.vocab, m.hidden), dtype=n.act, kernels=8 * chunks,
                  temp_bytes=forward_temp)
    return loss


def _fused_loss(w: Walk, y: Value) -> Value:
    """Linear and cross-entropy in one autograd function: forward computes loss and gradients piece by piece.

    It keeps the gradient of the hidden states and of the head's weight until backward, which only scales them; a piece's logits
    become their own gradient in place (linkedin/Liger-Kernel, fused_linear_cross_entropy; arXiv 2410.10989, section 3.2).
    """
    m, n, chunks = w.run.model, w.n, w.run.recipe.loss_chunks
    weight = _head_weight(w)
    rows = -(-w.tokens // chunks)
    flops = 2.0 * w.tokens * m.vocab * m.hidden
    w.matmul_flops += flops
    e = w.e
    source = w.cast(y, n.act)
    loss = w.tape.value("loss", 1, "fp32")
    stolen = "activations" if n.autocast else "gradients"
    kept: tuple[Tensor, ...] = (Tensor("loss.grad_hidden", "activations", source.nbytes), Tensor("loss.grad_weight", stolen, weight.numel * e))
    moved = float(e * (w.tokens * m.hidden * 2 + chunks * weight.numel * 3 + 6 * w.tokens * m.vocab))
    low = weight.numel * e if n.autocast else 0
    backs = [Back("release", "memory", kernels=0, release=True), Back("grad_hidden", "memory", 0, nbytes=2.0 * source.nbytes, dtype=n.act)]
    if n.autocast:
        backs.append(w.cast_back(weight))
    else:
        backs.append(Back("grad_weight", "memory", weight, nbytes=2.0 * weight.numel * e, dtype=n.param))
    if m.head_bias:
        kept += (Tensor("loss.grad_bias", "activations", m.vocab * e),)
        backs.append(Back("grad_bias", "memory", Param("head.bias", (m.vocab,)), nbytes=2.0 * m.vocab * e, dtype=n.param))
    w.tape.record("loss.fused", "matmul", (source,), (loss,), extra=kept, flops=3.0 * flops, nbytes=moved, dims=(1, w.tokens, m.vocab, m.hidden),
                  dtype=n.act, kernels=10 * chunks, temp_bytes=rows * m.vocab * e + weight.numel * e + low + w.tokens * 4, backs=tuple(backs))
    return loss
