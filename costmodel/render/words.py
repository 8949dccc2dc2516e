"""Moments in words: "backward of layer: mlp.gate.wgrad" is "backward of a layer, feed-forward gate: weight gradient".

A moment names the phase, the block and the operation that runs. The report's JSON keeps that name; what this table does not know is
shown as it is.
"""

import re

_MOMENT = re.compile(r"(\w+) of ([\w ]+): (.+)")
BLOCKS = {"layer": "a layer", "head": "the head", "embedding": "the embedding", "stage": "a stage", "batch": "a micro-batch"}
PARTS = {
    "loss.log_softmax": "the loss (log-softmax)", "loss.cross_entropy": "the loss (cross-entropy)", "loss.nll": "the loss (targets' logits)",
    "loss.fused": "the loss (fused with the head)", "loss.chunked": "the loss (head and loss by chunks)", "loss": "the loss",
    "head": "the head", "final_norm": "the final norm", "embedding_norm": "the embedding's norm", "embedding": "the embedding",
    "positions": "the position table", "hidden": "the residual stream",
    "attention.qkv": "a layer, queries, keys and values", "attention.q_norm": "a layer, norm of queries", "attention.k_norm": "a layer, norm of keys",
    "attention.q": "a layer, queries", "attention.k": "a layer, keys", "attention.v": "a layer, values", "attention.qk": "a layer, attention scores",
    "attention.scale": "a layer, attention scores scaled", "attention.mask": "a layer, attention mask", "attention.softmax": "a layer, attention softmax",
    "attention.probs": "a layer, attention probabilities", "attention.pv": "a layer, attention over the values",
    "attention.merge": "a layer, attention heads merged", "attention.out": "a layer, attention output",
    "attention.residual": "a layer, residual after attention",
    "attention_norm": "a layer, norm before attention", "attention_post_norm": "a layer, norm after attention", "attention": "a layer, attention",
    "mlp.gate": "a layer, feed-forward gate", "mlp.up": "a layer, feed-forward up", "mlp.down": "a layer, feed-forward down",
    "mlp.act": "a layer, feed-forward activation", "mlp.product": "a layer, gate times up",
    "mlp.residual": "a layer, residual after the feed-forward block",
    "mlp_norm": "a layer, norm before the feed-forward block",
    "mlp_post_norm": "a layer, norm after the feed-forward block", "mlp": "a layer, feed-forward block"}
"""What an operation belongs to, by the beginning of its name."""
ENDINGS = {
    "grad": "", "out": "", "rope": "rotary embedding", "rotated": "", "dropped": "", "gathered": "", "act": "activation", "add": "sum", "cat": "joined",
    "scattered": "", "reduced": "", "weight": "", "bias": "", "wgrad": "weight gradient", "dgrad": "input gradient", "bgrad": "bias gradient",
    "grad_q": "gradient of the queries", "grad_k": "gradient of the keys", "grad_v": "gradient of the values",
    "grad_p": "gradient of the probabilities", "grad_up": "gradient of up", "grad_hidden": "input gradient", "grad_weight": "weight gradient",
    "grad_positions": "gradient of the positions", "cast": "cast of its weight", "to_bf16": "cast to bf16", "to_fp16": "cast to fp16",
    "to_fp32": "cast to fp32", "dropout": "dropout", "repeat": "heads repeated", "sum": "summed", "accumulate": "gradients added up",
    "accumulate_grad": "gradient accumulated", "accumulate_tied": "the tied table's gradients added up", "to_bucket": "gradient copied to its bucket",
    "to_buffer": "gradient added to its buffer", "all_reduce": "all-reduce", "all_gather": "all-gather", "reduce_scatter": "reduce-scatter",
    "regather": "input gathered again", "slice": "own slice", "recompute": "logits again", "loss": "loss", "release": "end", "nll": "targets' logits"}
"""What happens to it, by the parts of the name that follow; "" says nothing that a reader misses."""
WHOLE = {
    "optimizer.host": "optimizer state created", "optimizer.update": "the update itself", "gradient.to_fp32": "fp32 copy of the gradients",
    "gradient.release": "gradients released", "clip.norm": "gradient norm", "clip.scale": "gradients clipped", "clip.all_reduce": "gradient norm summed",
    "gather_parameters": "updated parameters gathered", "broadcast_parameters": "updated parameters broadcast", "zero_grad": "gradients zeroed",
    "gradients.to_fp32": "fp32 copy of the gradients", "gradients.flatten": "gradients made one flat piece",
    "bucket.flatten": "bucket flattened for the all-reduce", "bucket.keep": "this rank's part of a bucket kept",
    "gradient slice": "place for this rank's gradients made", "gradients.to_bucket": "gradients copied to the bucket",
    "deepspeed.buckets": "reduce bucket made", "deepspeed.copy_out": "gathered parameters copied out", "gradients.accumulate": "gradients added up",
    "gather_small": "small parameters gathered",
    "zero2.flatten": "gradients flattened for the reduce-scatter", "zero2.copy": "reduced gradients copied", "zero2.accumulate": "reduced gradients added up",
    "bucket.all_reduce": "gradient bucket all-reduced", "bucket.reduce_scatter": "gradient bucket reduce-scattered",
    "ddp.copy_back": "reduced gradients copied back",
    "fsdp.copy_in": "shards copied for the all-gather", "fsdp.copy_out": "gathered parameters copied out", "all_gather": "parameters gathered",
    "scatter_tokens": "tokens scattered", "gather_logits": "logits gathered on GPU 0", "replicate.flatten": "parameters put together for the broadcast",
    "reduce.flatten": "gradients put together for their sum", "reduce_gradients": "gradients summed on GPU 0",
    "fsdp.reduce_copy_in": "gradients copied for the reduce-scatter", "reduce_scatter": "gradients reduce-scattered", "all_reduce": "gradients all-reduced",
    "fsdp.shard_grad": "gradient shards kept", "fsdp.accumulate": "gradients added up",
    "batch": "the batch arrives", "receive activation": "its input is received", "receive gradient": "its gradient is received"}
"""Operations of a strategy and of the update."""
_WHOSE = {"root": " (embedding, final norm and head)", "layer": "", "head": " (head)", "embedding": " (embedding)"}


def moment(text: str) -> str:
    """A report's moment as a person says it; what the tables do not know stays as it is."""
    found = _MOMENT.fullmatch(text)
    if not found:
        return text
    phase, block, op = found.groups()
    name, _, whose = op.removesuffix(")").partition("(")
    if name in WHOLE:
        words = WHOLE[name] + _WHOSE.get(whose, f" ({whose})" if whose else "")
        return f"optimizer step: {words}" if phase == "optimizer" else f"{phase} of {BLOCKS.get(block, block)}: {words}"
    said = operation(op)
    return text if said is None else f"{phase} of {said}"


def operation(name: str) -> str | None:
    """An operation of the model in words; None where a part of its name is not known."""
    stem, colon, kernel = name.partition(":")
    if colon:  # attention:fa2.grad_q
        kernel, _, rest = kernel.partition(".")
        stem = stem + (f".{rest}" if rest else "")
    pieces = stem.split(".")
    length = next((n for n in range(len(pieces), 0, -1) if ".".join(pieces[:n]) in PARTS), 0)
    if not length:
        return None
    part = PARTS[".".join(pieces[:length])]
    ends: list[str] = []
    for piece in pieces[length:]:
        if re.fullmatch(r"chunk\d+", piece):
            piece_words = f"chunk {int(piece[5:]) + 1}"
        elif piece in ENDINGS:
            piece_words = ENDINGS[piece]
        else:
            return None
        ends += [piece_words] if piece_words else []
    if colon:
        part += f" ({kernel})"
    return f"{part}: {', '.join(ends)}" if ends else part
