"""Bytes of activations that a forward pass keeps for the backward pass. Pure.

Follows "Reducing Activation Recomputation" (arXiv 2205.05198), for blocks of RMSNorm, grouped-query attention
without stored scores, and SwiGLU. In a block of width h with key and value width k and f hidden units, each
token keeps this many elements of the compute type::

    norm inputs                 2 h     queries, attention output            2 h
    inputs of qkv and gate/up   2 h     keys, values                         2 k
                                        gate, up, silu(gate), their product  4 f
"""

from __future__ import annotations

from trainkit.plan.step_work import StepWork

FLOAT32 = 4


def block_bytes(work: StepWork) -> int:
    """The activation bytes that one block keeps per pass without recomputation."""
    shape, tp, item = work.shape, work.layout.tp, work.itemsize
    # The GPU kernel that takes a mask needs as many key and value heads as query heads.
    repeats = work.document_mask and work.device == "cuda"
    num_kv_heads = shape.num_heads if repeats else shape.num_kv_heads
    kv_dim = num_kv_heads * shape.head_dim
    norms = 2 * (_norm_bytes(work) + FLOAT32)
    inputs = item * shape.dim * 2  # q, k and v share one, as do gate and up
    cp = work.layout.cp
    # Context parallelism gathers keys and values, and concatenates the outputs of both chunks.
    attention = item * ((2 if cp == 1 else 3) * shape.dim + 2 * kv_dim * cp) / tp
    log_sums = FLOAT32 * shape.num_heads / tp
    feed_forward = item * 4 * shape.ffn_dim / tp
    a_token = norms + inputs + attention + log_sums + feed_forward + _dropout_bytes(work)
    return round(work.tokens_per_pass * a_token) + _mask_bytes(work)


def kept_bytes(work: StepWork) -> int:
    """The activation bytes that one block keeps per pass until its backward pass."""
    mode = work.parallel.activation_checkpointing
    if mode == "none":
        return block_bytes(work)
    shape, tp, item = work.shape, work.layout.tp, work.itemsize
    a_token: float = stream_bytes(work)
    if mode == "selective":
        # Keeps attention and every second matrix product: wq, wv, gate, down.
        kv_dim = shape.num_kv_heads * shape.head_dim
        a_token += item * ((2 * shape.dim + kv_dim + shape.ffn_dim) / tp + shape.dim)
        a_token += FLOAT32 * shape.num_heads / tp
        # And what is reduced over tensor-parallel ranks: the results of attention and feed-forward.
        a_token += 2 * stream_bytes(work) if tp > 1 else 0
    return round(work.tokens_per_pass * a_token)


def recomputed_bytes(work: StepWork) -> int:
    """The additional activation bytes of the block that is being recomputed."""
    return max(0, block_bytes(work) - kept_bytes(work))


def document_mask_bytes(work: StepWork) -> int:
    """The bytes of the mask of a pass, which all blocks share until the end of its backward pass."""
    return work.itemsize * work.samples_per_pass * work.seq_len**2 if work.document_mask else 0


def split_gradient_bytes(work: StepWork) -> int:
    """The bytes of output gradients that one block keeps per pass for deferred weight gradients."""
    shape, tp = work.shape, work.layout.tp
    kv_dim = shape.num_kv_heads * shape.head_dim
    numbers = 2 * shape.dim + (shape.dim + 2 * kv_dim + 2 * shape.ffn_dim) / tp
    return round(work.tokens_per_pass * (work.itemsize * numbers + 2 * _norm_gradient_bytes(work)))


def gradient_bytes(work: StepWork) -> int:
    """The peak bytes of activation gradients in the backward pass of a block, inside the SwiGLU."""
    shape, tp = work.shape, work.layout.tp
    stream = shape.dim * (2 if tp > 1 else 1)
    return round(work.tokens_per_pass * work.itemsize * (stream + 3 * shape.ffn_dim / tp))


def stream_bytes(work: StepWork) -> int:
    """The bytes per token of the residual stream on one rank."""
    return work.itemsize * work.shape.dim // _stream_ranks(work)


def head_bytes(work: StepWork) -> int:
    """The activation bytes of the final norm and the head's input per pass."""
    return round(work.tokens_per_pass * (_norm_bytes(work) + FLOAT32 + work.itemsize * work.shape.dim))


def loss_bytes(work: StepWork) -> int:
    """The bytes of the loss of one pass at the start of its backward pass.

    These are log-probabilities and the gradients of log-probabilities and logits, in float32. torch's loss
    parallelism has one more copy, and a pipeline also keeps the logits. A loss in parts needs these for one
    part, and the gradients of the head's weight and of the hidden states.
    """
    if work.loss_chunks > 1:
        weight = work.shape.vocab_size * work.shape.dim * (FLOAT32 + work.itemsize)
        hidden = work.tokens_per_pass * work.shape.dim * work.itemsize
        return round(_logits(work) / work.loss_chunks * FLOAT32 * 3) + weight + hidden
    numbers = 4 if work.parallel.loss_parallel and work.layout.tp > 1 else 3
    return round(_logits(work) * (FLOAT32 * numbers + _pipeline_logits_bytes(work)))


def kept_loss_bytes(work: StepWork) -> int:
    """The bytes of the loss that one pass keeps until its backward pass."""
    return round(_logits(work) * (FLOAT32 + _pipeline_logits_bytes(work)))


def split_loss_bytes(work: StepWork) -> int:
    """The bytes of gradients of the logits and the final norm's output per pass.

    They are kept for deferred weight gradients.
    """
    stream = work.tokens_per_pass * _norm_gradient_bytes(work)
    return round(_logits(work) * work.itemsize + stream)


def _logits(work: StepWork) -> float:
    ranks = work.layout.tp if work.parallel.loss_parallel else 1
    return work.tokens_per_pass * work.shape.vocab_size / ranks


def _pipeline_logits_bytes(work: StepWork) -> int:
    return 0 if work.layout.pp == 1 else work.itemsize


def _stream_ranks(work: StepWork) -> int:
    return work.layout.tp if work.shards_stream else 1


def _norm_bytes(work: StepWork) -> int:
    """The bytes per token that a norm keeps; on CPUs, its input and its result in float32."""
    if work.device == "cpu":
        return 2 * FLOAT32 * work.shape.dim // _stream_ranks(work)
    return stream_bytes(work)


def _norm_gradient_bytes(work: StepWork) -> int:
    """The bytes per token of the gradient of a norm's output."""
    item = FLOAT32 if work.device == "cpu" else work.itemsize
    return item * work.shape.dim // _stream_ranks(work)


def _dropout_bytes(work: StepWork) -> float:
    """The bytes per token of the dropout masks of both residual branches."""
    return 2 * work.itemsize * work.shape.dim / _stream_ranks(work) if work.shape.dropout else 0.0


def _mask_bytes(work: StepWork) -> int:
    """The bytes of the attention masks of both chunks of a context-parallel rank.

    Its chunks, one from the start and one from the end of the sequence, attend to 2 x cp + 1 chunks in total.
    """
    cp = work.layout.cp
    if cp == 1 or work.device == "cuda":
        return 0  # GPU kernels apply causal masks without storing them
    part = work.seq_len // (2 * cp)
    return work.itemsize * part * part * (2 * cp + 1)
