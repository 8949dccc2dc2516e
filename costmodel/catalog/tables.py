"""Number formats, optimizers and strategies in plain words: the tables behind `costmodel list` and the explanations."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """A floating-point format."""

    name: str
    bits: int
    """Bits that carry information; see `storage_bytes` for memory."""
    sign_bits: int
    exponent_bits: int
    mantissa_bits: int
    largest: float
    smallest_normal: float
    epsilon: float
    """Distance from 1 to the next number."""
    storage_bytes: int
    loss_scaling: bool
    """Gradients underflow without it."""
    note: str
    source: str


NUMBER_FORMATS: dict[str, NumberFormat] = {f.name: f for f in (
    NumberFormat("fp32", 32, 1, 8, 23, 3.4028234663852886e38, 2.0**-126, 2.0**-23, 4, False,
                 "Reference. Master weights, optimizer states and reductions are usually fp32.", "IEEE 754 binary32"),
    NumberFormat("tf32", 19, 1, 8, 10, 3.4011621342146535e38, 2.0**-126, 2.0**-10, 4, False,
                 "How a matmul reads fp32 inputs on Ampere and later; memory and accumulation stay fp32.",
                 "NVIDIA A100 Tensor Core GPU Architecture whitepaper"),
    NumberFormat("fp16", 16, 1, 5, 10, 65504.0, 2.0**-14, 2.0**-10, 2, True,
                 "Small range: gradients need loss scaling, and an overflow skips a step.", "IEEE 754 binary16; Micikevicius et al. 2018 (arXiv 1710.03740)"),
    NumberFormat("bf16", 16, 1, 8, 7, 3.3895313892515355e38, 2.0**-126, 2.0**-7, 2, False,
                 "The range of fp32 with 8 significant bits: an update below 1/256 of a weight is lost without fp32 master weights.",
                 "Kalamkar et al. 2019 (arXiv 1905.12322)"),
    NumberFormat("fp8_e4m3", 8, 1, 4, 3, 448.0, 2.0**-6, 2.0**-3, 1, False,
                 "Weights and activations. Each tensor, row or block carries its own scale instead of one loss scale. No infinity.",
                 "Micikevicius et al. 2022 (arXiv 2209.05433)"),
    NumberFormat("fp8_e5m2", 8, 1, 5, 2, 57344.0, 2.0**-14, 2.0**-2, 1, False,
                 "Gradients, for their wider range. Each tensor carries its own scale.", "Micikevicius et al. 2022 (arXiv 2209.05433)"),
)}


@dataclass(frozen=True, slots=True)
class OptimizerFacts:
    """An update rule and what it keeps. g is the gradient, p the parameter, λ the weight decay, t the step."""

    name: str
    update: str
    states: tuple[str, ...]
    state_bytes_per_param: float
    """With fp32 states (adam8bit: as quantised). Master weights are counted apart."""
    weight_decay: str
    """coupled (added to the gradient) or decoupled (shrinks the parameter)."""
    defaults: dict[str, float] = field(default_factory=dict)
    note: str = ""
    source: str = ""


_ADAM = "m ← β1·m + (1-β1)·g; v ← β2·v + (1-β2)·g²; p ← p - lr·(m/(1-β1^t)) / (√(v/(1-β2^t)) + ε)"

OPTIMIZERS: dict[str, OptimizerFacts] = {o.name: o for o in (
    OptimizerFacts("sgd", "p ← p - lr·(g + λ·p)", (), 0.0, "coupled", {"lr": 1e-3}, "", "torch.optim.SGD"),
    OptimizerFacts("momentum", "m ← μ·m + g + λ·p; p ← p - lr·m", ("momentum",), 4.0, "coupled", {"lr": 1e-3, "momentum": 0.9},
                   "torch allocates the buffer at the first step.", "torch.optim.SGD; Sutskever et al. 2013"),
    OptimizerFacts("adam", f"g ← g + λ·p; {_ADAM}", ("exp_avg", "exp_avg_sq"), 8.0, "coupled",
                   {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}, "", "Kingma & Ba 2015 (arXiv 1412.6980)"),
    OptimizerFacts("adamw", f"p ← (1 - lr·λ)·p; {_ADAM}", ("exp_avg", "exp_avg_sq"), 8.0, "decoupled",
                   {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 1e-2}, "",
                   "Loshchilov & Hutter 2019 (arXiv 1711.05101); torch.optim.AdamW"),
    OptimizerFacts("adam8bit", f"g ← g + λ·p; {_ADAM}, m and v kept in 8 bits", ("exp_avg", "exp_avg_sq"), 2.03125, "coupled",
                   {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8},
                   "Two bytes and two fp32 scales per block of 256 (the paper uses blocks of 2048); small tensors stay in fp32.",
                   "Dettmers et al. 2022 (arXiv 2110.02861); torchao.optim"),
    OptimizerFacts("muon", "m ← μ·m + g; p ← (1 - lr·λ)·p - lr·√max(1, rows/cols)·NewtonSchulz(g + μ·m)", ("momentum",), 4.0, "decoupled",
                   {"lr": 2e-2, "momentum": 0.95, "newton_schulz_steps": 5},
                   "Hidden matrices only; embeddings, head, norms and biases use AdamW (8 bytes). Newton-Schulz needs the whole matrix.",
                   "Jordan et al. 2024 (KellerJordan/Muon)"),
)}


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to spread a step over n ranks. Volumes are bytes one rank sends in ring collectives."""

    name: str
    divides: str
    """What work it splits."""
    shards: str
    """What state it splits."""
    sends: str
    """What it sends per step, and when."""
    forbids: str
    predicted: bool
    source: str = ""


_ZERO = "Rajbhandari et al. 2020 (arXiv 1910.02054)"

STRATEGIES: dict[str, Strategy] = {s.name: s for s in (
    Strategy("single", "nothing", "nothing", "nothing", "more than one rank", True),
    Strategy("dataparallel", "the batch, over the GPUs of one process", "nothing; GPU 0 also holds the gathered outputs and gradients",
             "parameters from GPU 0 to the others in each forward, outputs back to it, gradients summed on it after each backward",
             "more than one node", True, "torch.nn.DataParallel"),
    Strategy("ddp", "the batch", "nothing", "all-reduce of gradients, 2(n-1)/n of their bytes, in buckets during the last micro-batch's backward",
             "a model whose whole training state exceeds one device", True,
             "Li et al. 2020 (arXiv 2006.15704); Megatron without distributed optimizer does the same"),
    Strategy("zero1", "the batch", "optimizer states and master weights",
             "reduction of gradients in backward, then all-gather of updated parameters after the optimizer step: together 2(n-1)/n of the parameters' bytes "
             "where gradients are reduce-scattered, 3(n-1)/n where they are all-reduced",
             "Megatron, which has the distributed optimizer instead", True, _ZERO),
    Strategy("zero2", "the batch", "optimizer states, master weights and gradients",
             "reduce-scatter of gradients in each backward, all-gather of updated parameters after the optimizer step: 2(n-1)/n of the parameters' bytes "
             "with one micro-batch", "pipeline parallelism (DeepSpeed)", True, _ZERO),
    Strategy("zero3", "the batch", "optimizer states, master weights, gradients and parameters",
             "all-gather of parameters in forward and again in backward, reduce-scatter of gradients in backward: 3(n-1)/n of the parameters' bytes, "
             "in every micro-batch", "pipeline parallelism (DeepSpeed)", True, _ZERO),
    Strategy("fsdp", "the batch", "optimizer states, gradients and parameters, per wrapped module",
             "all-gather of each module's parameters before its forward and, where it resharded, before its backward; reduce-scatter of its gradients after "
             "its backward: 3(n-1)/n of the parameters' bytes, or 2(n-1)/n without resharding",
             "parameters that are changed outside forward and backward", True,
             "Zhao et al. 2023 (arXiv 2304.11277); torch.distributed.fsdp.fully_shard"),
    Strategy("hsdp", "the batch", "as fsdp, within a group of dp_shard ranks; the groups are replicas",
             "fsdp's collectives within a group, then all-reduce of each gradient shard across groups",
             "a world size that dp_replicate x dp_shard does not give", True, "Zhao et al. 2023 (arXiv 2304.11277)"),
    Strategy("megatron-distributed-optimizer", "the batch", "optimizer states and master weights, by equal parts of the gradient buffer",
             "reduce-scatter of gradients in backward (overlapped on request), all-gather of parameters after the optimizer step or during the next forward: "
             "(n-1)/n of the gradient buffer's bytes and (n-1)/n of the parameters'; several instances (dp_replicate) all-reduce the gradients' shards",
             "sharded gradients or parameters in the same buffers", True, "NVIDIA/Megatron-LM docs, distributed optimizer"),
    Strategy("megatron-fsdp", "the batch", "optimizer states, master weights, gradients and parameters, in flat buffers per layer",
             "all-gather of each layer's parameters before its forward and before its backward, one or more layers ahead, reduce-scatter of its gradients "
             "after its backward, in every micro-batch: 3(n-1)/n of the parameters' elements; embedding and head are gathered once a step; replicas "
             "(dp_replicate) all-reduce the gradients' shards once a step", "pipelines, and mixtures of experts (not predicted)", True,
             "NVIDIA/Megatron-LM megatron/core/distributed/fsdp"),
    Strategy("tp", "every matmul, by heads and by columns or rows", "parameters, their states, and part of the activations",
             "all-reduce of a layer's activations after attention and after the feed-forward block, in forward and in backward: four per layer "
             "and micro-batch, "
             "on the critical path", "degrees that do not divide heads", True, "Shoeybi et al. 2019 (arXiv 1909.08053)"),
    Strategy("sequence-parallel", "norms and dropout between the tensor-parallel regions, by sequence", "the activations tp leaves whole",
             "all-gather and reduce-scatter in place of tp's all-reduces: the same bytes", "tp = 1; sequences that tp does not divide", True,
             "Korthikanti et al. 2022 (arXiv 2205.05198)"),
    Strategy("pp", "the layers", "parameters and their states, by stage", "one activation forward and one gradient backward per micro-batch and stage border",
             "more stages than layers; it idles (p-1)/m of the work time with m micro-batches on p stages (1F1B)", True,
             "Narayanan et al. 2021 (arXiv 2104.04473)"),
    Strategy("cp", "the sequence", "activations; with fsdp, state as well",
             "keys and values to every rank, cp-1 times forward and backward, and their gradients back (ring, or all-gather and reduce-scatter), or "
             "four all-to-alls of heads against tokens, forward and backward (Ulysses); in every layer and micro-batch",
             "sequences that 2·cp does not divide (causal ring and all-gather); heads that tp·cp does not divide (Ulysses)", True,
             "Liu et al. 2023 (arXiv 2310.01889); Jacobs et al. 2023 (arXiv 2309.14509)"),
    Strategy("ep", "the experts", "expert parameters and their states",
             "all-to-all of tokens to their experts and back in every MoE layer, in forward and in backward",
             "dense models; degrees that do not divide the experts and the data-parallel ranks", True,
             "Lepikhin et al. 2020 (arXiv 2006.16668)"),
    Strategy("muon-distributed", "the batch, and the orthogonalisation, matrix by matrix", "momentum, by whole matrices; AdamW's states, by rows",
             "after the last backward: reduce-scatter of gradients, then all-gather of updated matrices and rows: 2(n-1)/n of the parameters' bytes",
             "sharding inside a matrix, and any axis besides the data's", True,
             "karpathy/nanochat nanochat/optim.py"),
)}
