"""Computes the fraction of time that a run spends on useful steps if nodes fail at random.

The failure model is from "Revisiting Reliability in Large-Scale Machine Learning Research Clusters" (arXiv
2410.21680). Failures occur at random, at a rate proportional to the number of nodes; each failure costs a
restart and all work since the last checkpoint. Unlike the formula in the paper, this module's formula is also
valid if failures occur close together.

All functions in this module are pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import exp, expm1
from typing import TYPE_CHECKING

from trainkit.formats import duration
from trainkit.plan.gpus import RESTART_S

if TYPE_CHECKING:
    from trainkit.config import RunConfig

FAILURES_PER_NODE_DAY = 0.0065
"""Failures per day of a node with 8 A100 GPUs, as measured in the larger of the paper's clusters."""
SAVE_S = 1.0
"""Seconds that a save blocks the ranks; the checkpoint is then written in the background."""
DAY_S = 86400.0
NOTABLE = 0.5
"""Minimum number of expected failures per run for which the effective time is shown."""


@dataclass(frozen=True)
class Assumed:
    """Values that must be assumed, because they cannot be measured on this machine."""

    failures_per_node_day: float = FAILURES_PER_NODE_DAY
    restart_s: float = RESTART_S
    save_s: float = SAVE_S


def effective_share(failures_per_s: float, interval_s: float, assumed: Assumed) -> float:
    """Return the fraction of time spent on useful steps; each interval of `interval_s` ends with a save.

    Let t be the duration of an interval and its save in seconds, without failures. If the interval and its
    save are repeated until they succeed, they take (exp(rate t) - 1) / rate seconds on average. Restarts,
    during which nodes can also fail, multiply this average time by exp(rate restart).
    """
    rate, wait_s = failures_per_s, interval_s + assumed.save_s
    # Use negative exponents, because they cannot overflow.
    return rate * interval_s * exp(-rate * (assumed.restart_s + wait_s)) / -expm1(-rate * wait_s)


def best_interval_s(failures_per_s: float, save_s: float) -> float:
    """Return the interval in seconds between checkpoints that maximizes the effective time.

    For this optimal interval i, the derivative of `effective_share` is 0: 1 - rate i = exp(-rate (i + save)).
    """
    low_s, high_s = 0.0, 1 / failures_per_s
    for _ in range(60):
        middle_s = (low_s + high_s) / 2
        is_low = 1 - failures_per_s * middle_s > exp(-failures_per_s * (middle_s + save_s))
        low_s, high_s = (middle_s, high_s) if is_low else (low_s, middle_s)
    return low_s


@dataclass(frozen=True)
class EffectiveTime:
    """The estimated fraction of a run's time that is spent on useful steps."""

    failure_every_s: float
    interval_s: float
    """Seconds between checkpoints, as configured."""
    share: float
    best_interval_s: float
    best_steps: int
    """The optimal number of steps between checkpoints; these steps take `best_interval_s` seconds."""
    best_share: float
    step_s: float
    assumed: Assumed

    def lines(self) -> Iterator[str]:
        """Yield the result and the assumptions as lines of text."""
        best = f"checkpoint.every_steps={self.best_steps}"
        yield (
            f"effective time: {self.share:.1%} with a checkpoint every {duration(self.interval_s)}; at most"
            f" {self.best_share:.1%}, with a checkpoint every {duration(self.best_interval_s)} "
            f"({best}); on average,"
            f" a node fails every {duration(self.failure_every_s)}"
        )
        given = self.assumed
        rate = f"{given.failures_per_node_day:g} failures per node and day (--failures-per-node-day)"
        yield (
            f"assumed: {rate}, {given.restart_s:g} s for a restart (--restart-s), {given.save_s:g} s for a"
            f" save (--save-s), steps of {self.step_s:.3g} s"
        )


def effective_time(
    config: RunConfig, num_nodes: int, step_s: float, assumed: Assumed
) -> EffectiveTime | None:
    """Return the effective time of a run, or None if the run saves no checkpoints.

    Also returns None for a run that is short or uses one node, unless the user changed an assumed value.
    """
    saves, steps = config.checkpoint, config.train.steps
    rate = num_nodes * assumed.failures_per_node_day / DAY_S
    intervals = [item * s for item, s in ((saves.every_steps, step_s), (saves.every_minutes, 60)) if item]
    is_notable = num_nodes > 1 and steps is not None and rate * steps * step_s >= NOTABLE
    if not intervals or not (is_notable or assumed != Assumed()):
        return None
    interval_s, best_s = min(intervals), best_interval_s(rate, assumed.save_s)
    best_steps = max(1, round(best_s / step_s))
    return EffectiveTime(
        failure_every_s=1 / rate,
        interval_s=interval_s,
        share=effective_share(rate, interval_s, assumed),
        best_interval_s=best_steps * step_s,
        best_steps=best_steps,
        best_share=effective_share(rate, best_steps * step_s, assumed),
        step_s=step_s,
        assumed=assumed,
    )
