"""The guided tour, as data: each stop sets a run, says what to watch, and asks one question whose answer the screen shows.

A new strategy adds its stop to STOPS. The answer is a change and what the prediction says before and after it; `claim` is what the
answer asserts, and a test holds every claim against the prediction.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from costmodel.program.schedule import bubble
from costmodel.render.units import share
from costmodel.report import StepReport, TimeReport
from costmodel.spec import Run

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Figures:
    """A run and its prediction, as the answers read them."""

    run: Run
    report: StepReport

    def state(self, category: str) -> float:
        """GiB that one category of model state takes on the fullest rank between steps."""
        memory = self.report.fullest.memory
        return (memory.states.get(category, 0) if memory else 0) / GIB

    def peak(self, category: str) -> float:
        """GiB of one category at the peak of the fullest rank."""
        memory = self.report.fullest.memory
        return (memory.allocated.by_category.get(category, 0) if memory else 0) / GIB

    @property
    def time(self) -> TimeReport:
        """Of the slowest rank."""
        return max((r.time for r in self.report.roles if r.time), key=lambda t: t.step_s)

    @property
    def step_ms(self) -> float:
        return 1e3 * self.time.step_s

    @property
    def mfu(self) -> float:
        return self.report.mfu or 0.0

    @property
    def speed(self) -> float:
        """Tokens per second of one GPU."""
        return self.report.tokens_per_s_per_gpu or 0.0

    def waited(self, axis: str) -> float:
        """Milliseconds that compute waited for an axis."""
        return 1e3 * self.time.exposed_s.get(axis, 0.0)

    def talked(self, axis: str) -> float:
        """Milliseconds of communication over an axis, hidden or not."""
        return 1e3 * self.time.communication_s.get(axis, 0.0)

    def sent(self, kind: str) -> float:
        """GB of the messages of one kind of collective."""
        return sum(c.count * c.message_bytes for c in self.report.fullest.collectives or () if c.kind == kind) / 1e9

    @property
    def idle(self) -> float:
        """Share of the step that is bubble."""
        return (self.time.bubble_s or 0.0) / self.time.step_s


@dataclass(frozen=True, slots=True)
class Stop:
    """One stop of the tour."""

    title: str
    given: Mapping[str, Any]
    """The run it sets, as an input."""
    what: str
    look: str
    replicated: str
    sharded: str
    sent: str
    question: str
    then: Mapping[str, Any]
    """The change that the question asks about; `a` makes it."""
    answer: Callable[[Figures, Figures], str]
    """In words, from the figures before and after the change."""
    claim: Callable[[Figures, Figures], bool]
    """What the answer asserts."""


def _one_b(gpus: int, plan: Mapping[str, Any] | None = None, **recipe: Any) -> dict[str, Any]:
    return {"params": "1B", "cluster": {"gpu": "h100_sxm", "gpus": gpus}, "plan": dict(plan or {}),
            "recipe": {"seq_len": 2048, "micro_batch": 4, **recipe}}


def _near(a: float, b: float, by: float = 0.02) -> bool:
    return abs(a - b) <= by * max(abs(a), abs(b))


STOPS: tuple[Stop, ...] = (
    Stop("A single GPU", _one_b(1),
         "One GPU holds all. A parameter costs 16 bytes: 4 itself (P), 4 its gradient (G), 8 Adam's two moments (O). The rest is what the batch needs.",
         "P and O stay through the step; A is what backward needs of forward.",
         "nothing", "nothing", "nothing: there is one rank",
         "If the sequence doubles, which letters of the memory bar grow?", {"recipe.seq_len": 4096},
         lambda a, b: f"A and T: they count tokens (A {a.peak('activations'):.1f} → {b.peak('activations'):.1f} GiB). P and O count parameters: they stay.",
         lambda a, b: b.peak("activations") > 1.7 * a.peak("activations") and _near(a.peak("optimizer"), b.peak("optimizer"))
         and _near(a.peak("parameters"), b.peak("parameters"))),
    Stop("Batch arithmetic", _one_b(1, micro_batch=1, grad_accum=8),
         "global batch = micro-batch x accumulation x dp. Accumulation runs micro-batches one after the other and updates once: activations exist for one.",
         "the line of sequences and tokens below the verdict; MFU, and A.",
         "nothing", "nothing", "nothing: there is one rank",
         "The same 8 sequences as one micro-batch of 8: what gets better, what worse?", {"recipe.micro_batch": 8, "recipe.grad_accum": 1},
         lambda a, b: f"Faster: MFU {share(a.mfu)} → {share(b.mfu)}, larger matrices run better. Larger: A {a.peak('activations'):.1f} → "
                      f"{b.peak('activations'):.1f} GiB.",
         lambda a, b: b.mfu > a.mfu and b.peak("activations") > 4 * a.peak("activations") and a.report.tokens_per_step == b.report.tokens_per_step),
    Stop("DDP", _one_b(8, {"strategy": "ddp"}),
         "Data parallelism: every GPU has a copy of all state and its own sequences. Gradients are averaged by an all-reduce before the update.",
         "P and O are as on one GPU; C is new: the buckets of the gradients.",
         "P G O", "the batch", "gradients, all-reduced once",
         "Do 16 GPUs instead of 8 need less memory each?", {"cluster.gpus": 16},
         lambda a, b: f"No: O is {a.peak('optimizer'):.2f} GiB on each, as before. It buys speed ({(a.report.tokens_per_s or 0) / 1e3:,.0f}k → "
                      f"{(b.report.tokens_per_s or 0) / 1e3:,.0f}k tok/s), not room.",
         lambda a, b: _near(a.peak("optimizer"), b.peak("optimizer"), 1e-6) and _near(a.peak("activations"), b.peak("activations"), 1e-6)
         and (b.report.tokens_per_s or 0) > 1.8 * (a.report.tokens_per_s or 1)),
    Stop("Overlap", _one_b(16, {"strategy": "ddp"}, micro_batch=1),
         "The last layers' gradients are ready first: their all-reduce runs while backward goes on. What backward does not cover is exposed: the GPU waits.",
         "r, the exposed part; k, how the hidden part slows the kernels.",
         "P G O", "the batch", "gradients, whatever the batch",
         "Micro-batch 1 → 8: what share of the step is spent waiting for gradients?", {"recipe.micro_batch": 8},
         lambda a, b: f"{share(a.waited('dp_replicate') / a.step_ms)} → {share(b.waited('dp_replicate') / b.step_ms)}. Still {b.waited('dp_replicate'):.1f} of "
                      f"{b.talked('dp_replicate'):.0f} ms (the last bucket has nothing to hide behind), but the step is {b.step_ms:.0f} ms, not "
                      f"{a.step_ms:.0f}.",
         lambda a, b: _near(a.talked("dp_replicate"), b.talked("dp_replicate"), 0.05) and b.waited("dp_replicate") < 0.5 * b.talked("dp_replicate")
         and b.waited("dp_replicate") / b.step_ms < 0.5 * a.waited("dp_replicate") / a.step_ms),
    Stop("ZeRO-1", _one_b(8, {"zero": 0}),
         "Copies of optimizer state are waste. With ZeRO-1 each rank keeps O for its own part of the parameters, updates that part and sends it to the others.",
         "O, at the peak and between steps.",
         "P G", "O", "gradients; then updated parameters",
         "zero 0 → 1 on 8 ranks: what share of O is left on the fullest rank?", {"plan.zero": 1},
         lambda a, b: f"{share(b.state('optimizer') / a.state('optimizer'))}, not an eighth: {a.state('optimizer'):.2f} → {b.state('optimizer'):.2f} "
                      f"GiB. PyTorch's ZeRO-1 deals out "
                      "whole tensors, and the embedding is a large one.",
         lambda a, b: 1 / 8 < b.state("optimizer") / a.state("optimizer") < 1 / 2 and _near(a.state("parameters"), b.state("parameters"), 1e-6)),
    Stop("ZeRO-2", _one_b(8, {"zero": 1}),
         "Who updates a part needs the gradient of that part alone: gradients are reduce-scattered, not all-reduced, and the rest is freed.",
         "G in the optimizer row of the memory bars, and O.",
         "P", "G O", "gradients, then parameters: as one all-reduce",
         "zero 1 → 2: how much of G is left between backward and update?", {"plan.zero": 2},
         lambda a, b: f"An eighth: {a.state('gradients'):.2f} → {b.state('gradients'):.2f} GiB. O is now an eighth too ({b.state('optimizer'):.2f} "
                      f"GiB): these shards "
                      "cut through tensors.",
         lambda a, b: _near(b.state("gradients"), a.state("gradients") / 8, 0.01) and b.state("optimizer") < a.state("optimizer")),
    Stop("ZeRO-3", _one_b(8, {"zero": 2}),
         "Parameters can be split too: those of a layer are gathered just before their use and freed after it. Nothing of the model is whole on any rank.",
         "P, and d: the wait for communication over the shards.",
         "nothing", "P G O", "parameters twice, gradients once",
         "zero 2 → 3: what is left of P, and how often are parameters gathered?", {"plan.zero": 3},
         lambda a, b: f"An eighth: {a.state('parameters'):.2f} → {b.state('parameters'):.2f} GiB. Gathered twice a step, in bf16: "
                      f"{b.sent('all-gather'):.1f} GB (before, once in fp32: {a.sent('all-gather') + a.sent('broadcast'):.1f} GB).",
         lambda a, b: _near(b.state("parameters"), a.state("parameters") / 8, 0.01) and b.sent("all-gather") > 0),
    Stop("FSDP", _one_b(8, {"strategy": "fsdp"}),
         "PyTorch's ZeRO-3 goes layer by layer and gathers the next while one computes. reshard frees a layer after forward and gathers it again in backward.",
         "C, which holds the gathered layers, and d.",
         "a layer or two", "P G O", "parameters twice, gradients once",
         "Without reshard: what does a step save, and what does it cost?", {"plan.reshard_after_forward": False},
         lambda a, b: f"All-gathers: {a.sent('all-gather'):.1f} → {b.sent('all-gather'):.1f} GB. But the layers stay whole until backward: C "
                      f"{a.peak('communication'):.2f} → {b.peak('communication'):.2f} GiB.",
         lambda a, b: b.sent("all-gather") < 0.8 * a.sent("all-gather") and b.peak("communication") > 2 * a.peak("communication")),
    Stop("Checkpointing", _one_b(8, {"strategy": "fsdp"}),
         "Activations can be forgotten and computed again: a checkpointed layer keeps its input alone, and runs its forward a second time in backward.",
         "A, and R in the step bars. MFU counts no second forward; HFU does.",
         "nothing", "P G O", "as before",
         "checkpointing none → full: what do you get, and at what price?", {"plan.checkpointing": "full"},
         lambda a, b: f"A {a.peak('activations'):.1f} → {b.peak('activations'):.1f} GiB, for a step of {b.step_ms:.0f} instead of {a.step_ms:.0f} ms. "
                      f"Worth it where "
                      "the room lets a larger batch in.",
         lambda a, b: b.peak("activations") < 0.5 * a.peak("activations") and b.step_ms > a.step_ms),
    Stop("Tensor parallelism", {"model": "llama-3-8b", "cluster": {"gpu": "h100_sxm", "gpus": 8}, "plan": {"strategy": "fsdp", "checkpointing": "full"},
                                "recipe": {"seq_len": 4096, "micro_batch": 2}},
         "tp splits every matmul, by heads and columns, over a group of ranks that work on the same sequences and sum their parts.",
         "t: these collectives stand between matmuls, where nothing hides them.",
         "some activations", "P G O, matmuls", "activations, 4 a layer",
         "tp 1 → 2 on the same 8 GPUs: does each GPU hold less model state?", {"plan.tp": 2},
         lambda a, b: f"No: {a.state('parameters'):.2f} and {b.state('parameters'):.2f} GiB of parameters, 2 x 4 = 8. It splits a sequence's "
                      f"work, for {b.waited('tp'):.0f} ms of waiting, all exposed.",
         lambda a, b: _near(a.state("parameters"), b.state("parameters"), 0.02) and _near(b.waited("tp"), b.talked("tp"), 0.01) and b.waited("tp") > 1),
    Stop("Pipeline parallelism", {"model": "llama-2-7b", "cluster": {"gpu": "h100_sxm", "gpus": 8},
                                  "plan": {"zero": 0, "pp": 8, "checkpointing": "full"},
                                  "recipe": {"seq_len": 4096, "micro_batch": 1, "grad_accum": 8, "precision": "bf16-pure"}},
         "pp gives each rank some of the layers, and micro-batches flow through. A rank waits for its first, and for the others at the end: the bubble.",
         "·, the bubble. pp0 holds the most micro-batches in flight: see A.",
         "nothing", "layers", "activations at borders: little",
         "accumulation 8 → 32: what happens to the bubble?", {"recipe.grad_accum": 32},
         lambda a, b: f"{share(a.idle)} → {share(b.idle)} of the step. Equal stages: (p-1)/(m+p-1) = {share(_textbook(a.run))} → "
                      f"{share(_textbook(b.run))}; uneven "
                      "stages and transfers add the rest.",
         lambda a, b: b.idle < 0.6 * a.idle and a.idle > _textbook(a.run) - 0.02 and b.idle > _textbook(b.run) - 0.02),
    Stop("Topology", {"model": "llama-2-7b", "cluster": {"gpu": "h100_sxm", "gpus": 16}, "plan": {"strategy": "fsdp", "tp": 8, "checkpointing": "full"},
                      "recipe": {"seq_len": 4096, "micro_batch": 2}},
         "Ranks are numbered tp first: tp 8 stays on NVLink, within a node of 8. The shards reach across nodes, over a link that is 9 times slower.",
         "t, tp wait, and MFU.",
         "some activations", "P G O, matmuls", "shards across nodes",
         "tp 8 → 16 leaves the node. What does the wait for tp become?", {"plan.tp": 16},
         lambda a, b: f"{share(a.waited('tp') / a.step_ms)} → {share(b.waited('tp') / b.step_ms)} of the step, for half the "
                      f"sequences; MFU {share(a.mfu)} → {share(b.mfu)}. Keep tp within a node.",
         lambda a, b: b.waited("tp") / b.step_ms > 1.5 * a.waited("tp") / a.step_ms and b.mfu < 0.8 * a.mfu),
    Stop("Scaling", {"model": "llama-3-8b", "cluster": {"gpu": "h100_sxm", "gpus": 8}, "plan": {"strategy": "fsdp", "checkpointing": "full"},
                     "recipe": {"seq_len": 4096, "micro_batch": 1}},
         "Weak scaling: more GPUs, the same work for each. State per GPU shrinks with the shards; what is gathered does not, and now it crosses nodes.",
         "P and O, d, and tok/s. Compare (3) draws the curve.",
         "nothing", "P G O", "the same bytes, over a slower link",
         "8 → 1,024 GPUs: how much of its speed does each GPU keep?", {"cluster.gpus": 1024},
         lambda a, b: f"{share(b.speed / a.speed)}: {a.speed:,.0f} → {b.speed:,.0f} tok/s; it waits {a.waited('dp_shard'):.0f} → "
                      f"{b.waited('dp_shard'):.0f} ms. "
                      f"O fell to {b.state('optimizer'):.2f} GiB: there is room for a larger micro-batch.",
         lambda a, b: 0.5 < b.speed / a.speed < 0.95 and b.waited("dp_shard") > 2 * a.waited("dp_shard") and b.state("optimizer") < 0.1),
)


def _textbook(run: Run) -> float:
    """Bubble of equal stages, of the whole step."""
    return bubble(run.plan.schedule, run.plan.pp, run.plan.virtual_stages, run.micro_batches)[1]
