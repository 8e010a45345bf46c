"""Make the ranks agree on all values that must be equal on all ranks, with one small all-reduce per step.

The all-reduce sums the loss, the number of tokens, the wait for data, whether a rank received a stop signal,
whether a checkpoint is due, and how long each rank computed before it first waited for another rank. Logging,
clipping and stop signals need no further communication between ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.trainer.distributed import World

LOSS_OF = "{}_loss"
"""Name of the metric that contains an optimizer's loss if optimizers take turns (see `Task.turns`)."""


@dataclass(frozen=True)
class StepReport:
    """The result of a step, equal on all ranks."""

    num_tokens: int
    loss: float
    """Mean loss over all valid tokens on all ranks."""
    grad_norm: float
    finite: bool
    stop: bool
    save: bool
    data_wait_s: float
    """Mean time that ranks waited for data, in seconds."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics from a user's task, already divided by their divisors."""
    rank_times: tuple[float, ...] = ()
    """The times returned by `StepClock.report` on all ranks; empty if the step reports no times."""


def join_turns(turns: Sequence[tuple[str, StepReport]]) -> StepReport:
    """Combine the step reports of optimizers that took turns in one step (see `Task.turns`).

    The combined loss is the sum of the optimizers' losses, which are also reported as metrics. The gradient
    norm covers the parameters of all optimizers.
    """
    name, first = turns[0]
    if not name:
        return first
    last, reports = dict(turns), [report for _, report in turns]
    metrics = {LOSS_OF.format(name): report.loss for name, report in last.items()}
    for report in reports:
        metrics |= report.metrics
    return replace(
        first,
        loss=sum(report.loss for report in last.values()),
        grad_norm=math.hypot(*(report.grad_norm for report in last.values())),
        finite=all(report.finite for report in reports),
        stop=any(report.stop for report in reports),
        save=any(report.save for report in reports),
        metrics=metrics,
    )


def with_metrics(report: StepReport, other: StepReport, suffix: str) -> StepReport:
    """Return a validation report to which the loss and metrics of another validation are added as metrics.

    The suffix is appended to the names of the added metrics.
    """
    added = {f"{name}{suffix}": value for name, value in {"loss": other.loss, **other.metrics}.items()}
    return replace(report, metrics={**report.metrics, **added})


def all_reduce_sum(values: Tensor, world: World) -> Tensor:
    """Sum a tensor across all ranks in place."""
    if world.distributed:
        dist.all_reduce(values)
    return values


def copy_from_main(tensors: Sequence[Tensor], world: World) -> None:
    """Overwrite tensors in place with rank 0's values, using one collective per dtype."""
    if not world.distributed:
        return
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        same = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.reshape(-1) for tensor in same])
        dist.broadcast(flat, src=0)
        chunks = torch.split(flat, [tensor.numel() for tensor in same])
        for tensor, chunk in zip(same, chunks, strict=True):
            tensor.copy_(chunk.view(tensor.shape))


def any_rank(flag: bool, world: World) -> bool:
    """Return whether the flag is set on any rank; this is a collective, so every rank must call it."""
    if not world.distributed:
        return flag
    return bool(all_reduce_sum(torch.tensor([float(flag)], device=world.device), world).item())


def pack_report(
    world: World, sums: Tensor, num_tokens: int | None, stop: bool, save: bool, data_wait_s: float
) -> Tensor:
    """Return this rank's values, to be summed for the step report: float64 [5 + 2 x metrics] on the device.

    If `num_tokens` is given, `sums` is the loss. If `num_tokens` is None, `sums` contains the loss and its
    divisor, followed by the value and divisor of each metric.
    """
    sums = sums.detach().double().view(-1)
    numbers = [float(stop), float(save), data_wait_s]
    if num_tokens is not None:
        numbers.insert(0, float(num_tokens * world.counts_samples))
    # Pin the memory, because copying from pageable memory would wait for all enqueued kernels.
    host = torch.tensor(numbers, dtype=torch.float64, pin_memory=world.device.type == "cuda")
    rest = host.to(world.device, non_blocking=True)
    return torch.cat((sums, rest) if num_tokens is not None else (sums[:2], rest, sums[2:]))


class ReportReadback:
    """Copies the step report to the host without stalling the device.

    Create a `ReportReadback` before the optimizer's kernels are enqueued, and call `finish` afterwards. In
    this order, the host waits only for the gradients, while the device already computes the update.
    """

    def __init__(
        self,
        world: World,
        totals: Tensor,
        grad_norm: Tensor,
        metric_names: Sequence[str] = (),
        num_times: int = 0,
        own: Sequence[Tensor] = (),
    ) -> None:
        """`totals` contains `num_times` time values; `own` contains this rank's 0-dim float64 values."""
        self._world, self._metric_names, self._num_times = world, metric_names, num_times
        self._num_own = len(own)
        self.own: tuple[float, ...] = ()
        """The values of `own`, copied to the host; empty before `finish` is called."""
        self._event: torch.cuda.Event | None = None
        self._host = values = torch.cat(
            (totals, grad_norm.double().view(1), *(value.view(1) for value in own))
        )
        if values.device.type == "cuda":
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def finish(self) -> StepReport:
        if self._event is not None:
            self._event.synchronize()
        values = self._host.tolist()
        end = len(values) - self._num_own
        values, self.own = values[:end], tuple(values[end:])
        total, count, stop, save, data_wait_s, *sums, grad_norm = values
        end = len(sums) - self._num_times
        sums, times = sums[:end], tuple(sums[end:])
        loss = total / count if count else 0.0
        finite = abs(loss) < float("inf") and abs(grad_norm) < float("inf")
        pairs = zip(self._metric_names, sums[::2], sums[1::2], strict=True)
        metrics = {name: value / divisor for name, value, divisor in pairs if divisor}
        wait_s = data_wait_s / self._world.size
        return StepReport(int(count), loss, grad_norm, finite, stop > 0, save > 0, wait_s, metrics, times)
