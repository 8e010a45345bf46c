"""Activation checkpointing: recompute activations in the backward pass instead of storing them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainkit.trainer.torch_private import ATTENTION_OPS, REDUCTION_OPS


def recompute_and_compile(
    blocks: list[nn.Module],
    mode: Literal["none", "selective", "full"],
    *,
    compiled: bool,
    preserve_rng_state: bool = False,
) -> None:
    """Wrap the forward of each block, in place, in activation checkpointing and in torch.compile.

    `full` recomputes the whole block, `selective` all but attention, every second matmul and the reductions
    over tensor-parallel ranks. Parameter names do not change. The dropout of `trainkit` is a function of the
    sample, so the recomputation draws the same mask; other modules need `preserve_rng_state`.
    """
    for block in blocks:
        if mode == "full":
            # Compile inside `checkpoint`: around it, the compiler would silently fall back to eager.
            inner = torch.compile(block.forward) if compiled else block.forward
            block.forward = partial(
                checkpoint, inner, use_reentrant=False, preserve_rng_state=preserve_rng_state
            )
            continue
        if mode == "selective":
            block.forward = _selectively(block.forward, preserve_rng_state)
        if compiled:
            # Not `block.compile()`, which would include the FSDP hooks and fail on them.
            block.forward = torch.compile(block.forward)


def _selectively(inner: Callable[..., Any], preserve_rng_state: bool) -> Callable[..., Any]:
    """The function with selective checkpointing; a closure, since the compiler cannot trace `partial`."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(
            inner,
            *args,
            use_reentrant=False,
            preserve_rng_state=preserve_rng_state,
            context_fn=_selective_contexts,
            **kwargs,
        )

    return forward


def _selective_contexts() -> Any:
    """A new policy per call, so that matmuls are counted from the start of each block."""
    counts: Counter[bool] = Counter()

    def policy(context: Any, op: Callable[..., Any], *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in ATTENTION_OPS or op in REDUCTION_OPS:
            return CheckpointPolicy.MUST_SAVE
        if op is torch.ops.aten.mm.default:
            counts[context.is_recompute] += 1
            if counts[context.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
