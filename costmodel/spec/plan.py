"""Plan: how one training step is spread over the ranks."""

from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from costmodel.spec.base import Spec

Framework = Literal["pytorch", "deepspeed", "megatron", "nanochat"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "naive", "zb-h1", "interleaved-zb", "zbv", "dualpipev"]
MIB = 1 << 20


class Checkpointing(Spec):
    """Activation checkpointing: which layers keep only their input and run forward again in backward."""

    mode: Literal["none", "full", "selective"] = "none"
    group: PositiveInt = 1
    """full: consecutive layers that share one saved input."""
    every: PositiveInt = 1
    """full: checkpoint every k-th layer, the first of each k."""
    ops: tuple[str, ...] = ()
    """selective: ("attention",) recomputes the attention core; ("op",) saves every other matmul and attention."""


class Plan(Spec):
    """Degrees of parallelism, what is sharded, and the dialect that does it."""

    framework: Framework = "pytorch"
    zero: int = Field(0, ge=0, le=3)
    """0 replicates all state (DDP); 1 shards optimizer state; 2 also gradients; 3 also parameters (PyTorch: FSDP2; Megatron: Megatron-FSDP)."""
    single_process: bool = False
    """torch.nn.DataParallel: one process drives all GPUs of the data-parallel axis."""
    dp_replicate: PositiveInt = 1
    """Ranks that hold copies of the state."""
    dp_shard: PositiveInt = 1
    """Ranks over which the state of the ZeRO stage is split."""
    tp: PositiveInt = 1
    sequence_parallel: bool = False
    tp_overlap: Literal["none", "async", "userbuffers"] = "none"
    loss_parallel: bool = False
    """Logits stay split by vocabulary over tp."""
    pp: PositiveInt = 1
    schedule: Schedule = "1f1b"
    """Order of forwards and backwards on the pipeline's ranks; zb-h1, interleaved-zb, zbv and dualpipev split backward into gradients of inputs and
    of weights."""
    virtual_stages: PositiveInt = 1
    """Stages a rank holds; left out, zbv and dualpipev have 2."""
    stage_layers: tuple[int, ...] = ()
    """Layers of each stage, in order of the model; empty divides evenly."""
    cp: PositiveInt = 1
    cp_kind: Literal["ring", "allgather", "ulysses"] = "ring"
    """How attention sees the whole sequence: keys and values pass from rank to rank, or are gathered; or heads are split for it instead."""
    cp_balance: bool = True
    """Under causal ring or all-gather attention a rank takes a piece of the sequence's head and its mirror of the tail, so that all compute
    the same (Megatron, torch's context_parallel); False: consecutive pieces, of which the last rank's has most to compute."""
    ep: PositiveInt = 1
    ep_overlap: bool = False
    ep_dispatcher: Literal["alltoall", "allgather", "flex"] = "alltoall"
    """Rows of tokens travel to their experts and back; or (Megatron) every rank of an ep group gets the tokens of all of it; or (Megatron's flex: DeepEP,
    HybridEP) a token travels once to each rank that has some of its experts."""
    checkpointing: Checkpointing = Checkpointing()
    offload: Literal["none", "optimizer", "params"] = "none"
    """What lives in host memory between uses."""
    activation_offload: bool = False
    bucket_bytes: PositiveInt = 25 * MIB
    """DDP's and ZeRO's gradient bucket (DeepSpeed: reduce_bucket_size in bytes of the gradient dtype; left out, its 5e8 elements)."""
    first_bucket_bytes: PositiveInt = 1 * MIB
    """DDP's first bucket."""
    gradient_as_bucket_view: bool = False
    sync_each_micro_batch: bool = False
    """Reduce gradients after every micro-batch; False accumulates locally and reduces after the last (no_sync). Left out, it is
    what the framework does: True for ZeRO-2 and ZeRO-3 / FSDP, else False."""
    reshard_after_forward: bool = True
    """FSDP frees gathered parameters after forward and gathers them again in backward. Left out, it is what the framework does: False under a
    pipeline in PyTorch, else True."""
    forward_prefetch: int = Field(0, ge=0)
    """FSDP layers gathered ahead explicitly in forward, beyond the implicit one."""
    backward_prefetch: bool = True
    overlap_grad_reduce: bool = True
    """Megatron and DeepSpeed (overlap_comm): reduce gradients during backward. Left out, it is what the framework does: False for
    DeepSpeed's stages 1 and 2, else True."""
    overlap_param_gather: bool = False
    """Megatron's distributed optimizer: gather parameters during the next forward."""
    prefetch_bucket_params: int = Field(50_000_000, ge=0)
    """DeepSpeed stage 3: stage3_prefetch_bucket_size, in parameters."""
    max_live_params: int = Field(1_000_000_000, ge=0)
    """DeepSpeed stage 3: stage3_max_live_parameters, beyond which nothing is gathered ahead."""
    allgather_bucket_params: int = Field(500_000_000, ge=1)
    """DeepSpeed stages 1 and 2: allgather_bucket_size, in parameters; where torch can gather into one tensor, DeepSpeed does not read it."""
    double_buffer: bool = False
    """Megatron-FSDP: two fixed buffers each for the parameters and the gradients of a layer (fsdp_double_buffer, which NCCL user buffers need)."""
    communication_unit_params: PositiveInt | None = None
    """Megatron-FSDP: suggested_communication_unit_size, in parameters: gradients that may wait to be reduced, half as many are gathered ahead; None: two
    layers, and at least 1e9."""
    contention: PositiveFloat | None = None
    """Seconds of compute lost per second of hidden communication; None: the profile's."""

    @classmethod
    def of_framework(cls, framework: str, zero: int, pp: int) -> dict[str, Any]:
        """Fields whose value, left out, is not the default here but what the framework does."""
        found: dict[str, Any] = {"sync_each_micro_batch": zero in (2, 3)}
        if framework == "pytorch" and zero == 3 and pp > 1:
            found["reshard_after_forward"] = False
        if framework == "deepspeed" and zero:
            found |= {"bucket_bytes": 2 * 500_000_000, "overlap_grad_reduce": zero == 3}
        return found

    @property
    def dp(self) -> int:
        """Data-parallel degree of the batch arithmetic: dp_replicate x dp_shard."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return self.dp_replicate * self.dp_shard * self.cp * self.tp * self.pp

    @property
    def state_shards(self) -> int:
        """Ranks over which sharded state is split: dp_shard x cp."""
        return self.dp_shard * self.cp

    @property
    def expert_ranks(self) -> int:
        """Ranks over which experts can be spread: dp_shard x cp, or, where nothing is sharded, the replicas x cp."""
        return (self.dp_shard if self.zero else self.dp) * self.cp

    @property
    def expert_replicas(self) -> int:
        """Ranks that have the same experts, of those over which experts can be spread."""
        return self.expert_ranks // self.ep
