"""Gradients averaged on the host while the backward pass goes on.

`replicate` reduces on a stream of the device. The host has none: there it would stop the backward pass to
wait for the network. gloo has threads of its own, so what is started early is done when the pass is.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

MIN_BUCKET_BYTES = 4 * 2**20
"""Small enough to start early, large enough that the latency of a reduction does not matter."""


class HostReduction:
    """Averages the gradients of a model over a group; done when `backward` returns.

    Gradients travel in buckets, a bucket as soon as its last gradient is there, and the buckets in the same
    order on all ranks, whatever order a rank's gradients come in.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self._enabled = True
        self._group = group
        self._options = dist.AllreduceCoalescedOptions()
        self._options.reduceOp = cast(dist.ReduceOp, dist.ReduceOp.AVG)
        self._buckets = buckets([param for param in model.parameters() if param.requires_grad])
        self._bucket_of = {param: index for index, bucket in enumerate(self._buckets) for param in bucket}
        self._num_missing: list[int] = []
        self._works: list[dist.Work] = []
        for param in self._bucket_of:
            cast(Any, param).register_post_accumulate_grad_hook(self._on_gradient)

    def set_enabled(self, enabled: bool) -> None:
        """Whether the next backward pass ends with averages; without, gradients add up on each rank."""
        self._enabled = enabled

    def _on_gradient(self, param: Tensor) -> None:
        if not self._enabled:
            return
        if not self._num_missing:
            self._num_missing = [len(bucket) for bucket in self._buckets]
            cast(Any, Variable)._execution_engine.queue_callback(self._finish)
        self._num_missing[self._bucket_of[cast(nn.Parameter, param)]] -= 1
        while len(self._works) < len(self._buckets) and not self._num_missing[len(self._works)]:
            self._start_next()

    def _start_next(self) -> None:
        grads = [cast(Tensor, param.grad) for param in self._buckets[len(self._works)]]
        self._works.append(self._group.allreduce_coalesced(grads, self._options))

    def _finish(self) -> None:
        while len(self._works) < len(self._buckets):
            # A parameter that this rank's batch did not touch; on another rank it may have a gradient.
            for param in self._buckets[len(self._works)]:
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
            self._start_next()
        for work in self._works:
            work.wait()
        self._works, self._num_missing = [], []


def buckets(params: list[nn.Parameter], min_bytes: int = MIN_BUCKET_BYTES) -> list[list[nn.Parameter]]:
    """Parameters from last to first, as their gradients come, in groups of at least `min_bytes`."""
    groups: list[list[nn.Parameter]] = [[]]
    size = 0
    for param in reversed(params):
        if size >= min_bytes:
            groups.append([])
            size = 0
        groups[-1].append(param)
        size += param.numel() * param.element_size()
    return groups
