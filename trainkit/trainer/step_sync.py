"""One small all-reduce per step, in which the ranks agree on everything that must be equal on all of them.

It carries the loss, the number of tokens, the time spent waiting for data, whether a rank was asked to stop,
and whether a checkpoint is due. Logging, clipping and signals need no other communication.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.trainer.distributed import World


@dataclass(frozen=True)
class StepReport:
    """The result of a step, equal on all ranks."""

    num_tokens: int
    loss: float
    """Mean over the valid tokens of all ranks."""
    grad_norm: float
    finite: bool
    stop: bool
    save: bool
    data_wait_s: float
    """Mean over the ranks."""


def all_reduce_sum(values: Tensor, world: World) -> Tensor:
    """Sum a tensor over all ranks, in place."""
    if world.distributed:
        dist.all_reduce(values)
    return values


class AsyncSum:
    """An asynchronous all-reduce, which overlaps with the computation of this rank."""

    def __init__(self, values: Tensor, world: World) -> None:
        self._values = values
        self._work = dist.all_reduce(values, async_op=True) if world.distributed else None

    def wait(self) -> Tensor:
        """The sum, equal on all ranks."""
        if self._work is not None:
            self._work.wait()
        return self._values


def any_rank(flag: bool, world: World) -> bool:
    """Whether the flag is set on at least one rank; a collective, so every rank must call it."""
    if not world.distributed:
        return flag
    return bool(all_reduce_sum(torch.tensor([float(flag)], device=world.device), world).item())


def pack_report(
    world: World, nll_sum: Tensor, num_tokens: int, stop: bool, save: bool, data_wait_s: float
) -> Tensor:
    """This rank's terms of the step report, float64 [5] on the device."""
    cuda = world.device.type == "cuda"
    numbers = (float(num_tokens * world.counts_samples), float(stop), float(save), data_wait_s)
    # Pinned, since a copy from pageable memory would wait for all enqueued kernels.
    rest = torch.tensor(numbers, dtype=torch.float64, pin_memory=cuda)
    return torch.cat((nll_sum.detach().double().view(1), rest.to(world.device, non_blocking=True)))


class ReportReadback:
    """Copies the step report to the host without stalling the device.

    Call `start` before the optimizer's kernels are enqueued and `finish` afterwards: the host then waits only
    for the gradients, while the device computes the update.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._host: Tensor | None = None
        self._event: torch.cuda.Event | None = None

    def start(self, totals: Tensor, grad_norm: Tensor) -> None:
        values = torch.cat((totals, grad_norm.double().view(1)))
        if values.device.type != "cuda":
            self._host = values
            return
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._host.copy_(values, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def finish(self) -> StepReport:
        assert self._host is not None
        if self._event is not None:
            self._event.synchronize()
        nll_sum, num_tokens, stop, save, data_wait_s, grad_norm = self._host.tolist()
        loss = nll_sum / num_tokens if num_tokens else 0.0
        finite = abs(loss) < float("inf") and abs(grad_norm) < float("inf")
        return StepReport(
            int(num_tokens), loss, grad_norm, finite, stop > 0, save > 0, data_wait_s / self._world.size
        )
