"""What a forward pass leaves behind for the backward pass, in bytes. Pure.

After "Reducing Activation Recomputation" (arXiv 2205.05198), for blocks of RMSNorm, grouped-query attention
that keeps no scores, and SwiGLU. A token of a block of width h, with k values of keys and f hidden units,
keeps in numbers of the type that is computed with::

    input of each norm       2 h        queries and output of attention   2 h
    input of each product    2 h        keys and values                   2 k
                                        gate, up, both of these, product  4 f
"""

from __future__ import annotations

from trainkit.plan.workload import Workload

FLOAT32 = 4


def block_bytes(work: Workload) -> int:
    """Of one block in one pass, when nothing is computed again."""
    shape, tp, item = work.shape, work.layout.tp, work.itemsize
    kv_dim = shape.num_kv_heads * shape.head_dim
    norms = 2 * (_norm_bytes(work) + FLOAT32)
    # q, k and v are made from one input, and so are gate and up. A cast that is not part of the wrapping
    # is repeated for each.
    inputs = item * shape.dim * (2 if not _casts_as_it_goes(work) else 5)
    cp = work.layout.cp
    # Of a sequence that is shared, keys and values are gathered, and what came out of both parts is joined.
    attention = item * ((2 if cp == 1 else 3) * shape.dim + 2 * kv_dim * cp) / tp
    log_sums = FLOAT32 * shape.num_heads / tp
    feed_forward = item * 4 * shape.ffn_dim / tp
    a_token = norms + inputs + attention + log_sums + feed_forward + _dropout_bytes(work)
    return round(work.tokens_at_once * a_token) + _mask_bytes(work)


def kept_bytes(work: Workload) -> int:
    """Of one block in one pass, from the forward to the backward pass."""
    mode = work.parallel.activation_checkpointing
    if mode == "none":
        return block_bytes(work)
    shape, tp, item = work.shape, work.layout.tp, work.itemsize
    a_token: float = stream_bytes(work)
    if mode == "selective":
        # Attention, and every second matrix product: wq, wv, gate, down.
        kv_dim = shape.num_kv_heads * shape.head_dim
        a_token += item * ((2 * shape.dim + kv_dim + shape.ffn_dim) / tp + shape.dim)
        a_token += FLOAT32 * shape.num_heads / tp
    return round(work.tokens_at_once * a_token)


def recomputed_bytes(work: Workload) -> int:
    """Of the one block whose inside is being computed again."""
    return max(0, block_bytes(work) - kept_bytes(work))


def split_gradient_bytes(work: Workload) -> int:
    """Gradients of what came out of each weight of a block in one pass, where weights have theirs later."""
    shape, tp = work.shape, work.layout.tp
    kv_dim = shape.num_kv_heads * shape.head_dim
    numbers = 2 * shape.dim + (shape.dim + 2 * kv_dim + 2 * shape.ffn_dim) / tp
    return round(work.tokens_at_once * (work.itemsize * numbers + 2 * _norm_gradient_bytes(work)))


def gradient_bytes(work: Workload) -> int:
    """Gradients of activations that the backward pass of a block has at once: those inside the SwiGLU."""
    shape, tp = work.shape, work.layout.tp
    stream = shape.dim * (2 if tp > 1 else 1)
    return round(work.tokens_at_once * work.itemsize * (stream + 3 * shape.ffn_dim / tp))


def stream_bytes(work: Workload) -> int:
    """Of one token of the residual stream."""
    item = FLOAT32 if _casts_as_it_goes(work) else work.itemsize
    return item * work.shape.dim // _stream_ranks(work)


def head_bytes(work: Workload) -> int:
    """Of the last norm and of the input of the head in one pass."""
    return round(work.tokens_at_once * (_norm_bytes(work) + FLOAT32 + work.itemsize * work.shape.dim))


def loss_bytes(work: Workload) -> int:
    """Of the loss of one pass when its backward pass begins, all in float32.

    The logarithms of the probabilities, and the gradients of the loss with regard to these and to the logits;
    split over the vocabulary, torch's version holds one more. A pipeline has kept the logits too.
    """
    numbers = 4 if work.parallel.loss_parallel and work.layout.tp > 1 else 3
    return round(_logits(work) * (FLOAT32 * numbers + _pipeline_logits_bytes(work)))


def kept_loss_bytes(work: Workload) -> int:
    """Of the loss of one pass, from the forward to the backward pass."""
    return round(_logits(work) * (FLOAT32 + _pipeline_logits_bytes(work)))


def split_loss_bytes(work: Workload) -> int:
    """Gradients of the logits and of the last norm's output in one pass, where weights have theirs later."""
    stream = work.tokens_at_once * _norm_gradient_bytes(work)
    return round(_logits(work) * work.itemsize + stream)


def _logits(work: Workload) -> float:
    ranks = work.layout.tp if work.parallel.loss_parallel else 1
    return work.tokens_at_once * work.shape.vocab_size / ranks


def _pipeline_logits_bytes(work: Workload) -> int:
    return 0 if work.layout.pp == 1 else work.itemsize


def _casts_as_it_goes(work: Workload) -> bool:
    """Whether autocast chooses the types: the residual stream is then float32."""
    return work.dtype != "fp32" and not work.is_wrapped


def _stream_ranks(work: Workload) -> int:
    return work.layout.tp if work.splits_stream else 1


def _norm_bytes(work: Workload) -> int:
    """Of the input of a norm, a token; without a kernel of its own both it and the result are float32."""
    if work.device == "cpu":
        return 2 * FLOAT32 * work.shape.dim // _stream_ranks(work)
    return stream_bytes(work)


def _norm_gradient_bytes(work: Workload) -> int:
    """Of the gradient of what came out of a norm, a token."""
    item = FLOAT32 if work.device == "cpu" else work.itemsize
    return item * work.shape.dim // _stream_ranks(work)


def _dropout_bytes(work: Workload) -> float:
    """Of the masks of both residual branches, a token."""
    return 2 * work.itemsize * work.shape.dim / _stream_ranks(work) if work.shape.dropout else 0.0


def _mask_bytes(work: Workload) -> int:
    """Of the masks of both parts of a sequence that a context-parallel rank has.

    A part from the front and one from the back look at 2 x cp + 1 parts together.
    """
    cp = work.layout.cp
    if cp == 1 or work.device == "cuda":
        return 0  # the kernels of GPUs know this one without a mask
    part = work.seq_len // (2 * cp)
    return work.itemsize * part * part * (2 * cp + 1)
