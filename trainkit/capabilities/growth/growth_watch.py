"""Decides when to requeue a run with fewer than its maximum number of nodes, to restart it on more nodes.

The watch regularly asks Slurm whether additional nodes are available.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import pairwise

from trainkit.capability import Watch
from trainkit.errors import TrainkitError
from trainkit.formats import duration, plural
from trainkit.job.attempt_end import previous_ends
from trainkit.job.decision import PlannedStop, restarts_limit
from trainkit.job.processes import log_line
from trainkit.plan.launch import LaunchPlan, option_argv, with_excluded
from trainkit.run.events import log_event
from trainkit.run.history import Attempt, RunHistory, seconds_left
from trainkit.run.rundir import AttemptDir
from trainkit.slurm.submit import ask_starts

ASK_EVERY_S = 1800.0
ENOUGH_S = 5.0
"""Total time limit in seconds for all Slurm queries; signals are not handled during these queries."""
MOST_ASKED = 4
"""Maximum number of node counts for which Slurm is asked to estimate the start time."""
SOON_S = 60.0
"""A job is considered able to start now if it would start within this number of seconds."""
REQUEUE_S = 120.0
"""Seconds needed to save and requeue, excluding the time to start the ranks."""
MIN_SHARE = 0.1
"""Minimum fraction of the remaining time that requeueing with more nodes must save, after subtracting the
restart time.
"""
MAX_VAIN = 2
"""Maximum number of requeues that may fail to get more nodes; after that, the run no longer tries to grow."""


@dataclass(frozen=True)
class Growth:
    """The decision whether to requeue a run so that it restarts on more nodes."""

    num_nodes: int | None
    """Number of nodes on which the run restarts, or None if the run does not requeue."""
    reason: str

    @property
    def sentence(self) -> str:
        """Return the decision as one sentence."""
        to = "does not grow" if self.num_nodes is None else f"grows to {plural(self.num_nodes, 'node')}"
        return f"{to}: {self.reason}"


def decide_growth(
    left_s: float, restart_s: float, num_nodes: int, waits: Mapping[int, float | None]
) -> Growth:
    """Decide whether a run should be requeued to restart on more nodes.

    The run needs `left_s` more seconds on `num_nodes`, and speed is assumed to be proportional to the number
    of nodes. `waits` maps each possible number of nodes to the seconds until the additional nodes are
    available, or to None if Slurm predicts no time.
    """
    known = {size: wait_s for size, wait_s in waits.items() if wait_s is not None}
    if not known:
        return Growth(None, "Slurm predicts no start time for additional nodes")
    free = [size for size, wait_s in known.items() if wait_s <= SOON_S]
    if not free:
        size, wait_s = min(known.items(), key=lambda one: one[1])
        return Growth(None, f"{plural(size, 'node')} would be free in {duration(wait_s)}")
    best = max(free)
    then_s = left_s * num_nodes / best
    reason = (
        f"{plural(best, 'node')} are free: the run would need {duration(then_s)} instead of "
        f"{duration(left_s)}, plus {duration(restart_s)} for the restart"
    )
    is_worth_it = left_s - then_s - restart_s >= MIN_SHARE * left_s
    return Growth(best if is_worth_it else None, reason)


def vain_growths(attempts: Sequence[Attempt]) -> int:
    """Return the number of requeues for more nodes after which the run did not get more nodes."""
    return sum(
        one.cause == "grow" and (following.num_nodes or 0) <= (one.num_nodes or 0)
        for one, following in pairwise(attempts)
    )


class GrowthWatch(Watch):
    """Checks during an attempt, at most every `ASK_EVERY_S`, whether to restart the run on more nodes."""

    while_stopping = False

    def __init__(self, attempt: AttemptDir, plan: LaunchPlan, hosts: Sequence[str], num_good: int) -> None:
        """Watch an attempt, which can use `num_good` of the allocated `hosts`."""
        self._attempt, self._plan, self._hosts, self._num_good = attempt, plan, hosts, num_good
        self._larger = sorted((size for size in map(int, plan.sizes) if size > plan.num_nodes), reverse=True)
        self._asked_s = time.monotonic()

    def poll(self) -> PlannedStop | None:
        """Return a planned stop if the run should restart on more nodes, or None; may raise OSError."""
        now_s = time.monotonic()
        if not self._larger or now_s < self._asked_s + ASK_EVERY_S:
            return None
        self._asked_s = now_s
        run, number = self._attempt.run, self._attempt.number
        found = self._ask()
        log_event(run, number, "growth", num_nodes=found.num_nodes, reason=found.sentence)
        if found.num_nodes is not None:
            return PlannedStop("grow", found.sentence)
        log_line(f"attempt {number}: {found.sentence}")
        return None

    def _ask(self) -> Growth:
        history, number = RunHistory(self._attempt.run), self._attempt.number
        history.events.update()
        attempts = history.events.attempts
        steps = [step for step in history.newest_steps() if step.attempt == number]
        left_s = seconds_left(steps, history.events.total_steps)
        if left_s is None:
            return Growth(None, "the remaining time is unknown")
        limit = restarts_limit(list(previous_ends(self._attempt).values()), self._plan.requeue)
        if limit is None and (vain := vain_growths([attempts[one] for one in sorted(attempts)])) >= MAX_VAIN:
            limit = f"the run was restarted {plural(vain, 'time')} without getting more nodes"
        if limit is not None:
            return Growth(None, limit)
        own = attempts[number]
        start_s = own.first_step - own.started if own.first_step and own.started else 0.0
        return decide_growth(left_s, REQUEUE_S + start_s, self._plan.num_nodes, self._waits())

    def _waits(self) -> dict[int, float | None]:
        """Map each larger number of nodes to the seconds until the additional nodes are available."""
        assert self._plan.slurm is not None
        # Exclude the run's own nodes, because they may have room for another job but would not be additional
        # nodes.
        others = with_excluded(self._plan.slurm, self._hosts).sbatch
        partition = os.environ.get("SLURM_JOB_PARTITION") or others.get("partition", False)
        others = {**others, "partition": partition, "comment": False, "dependency": False}
        sizes = self._larger[:: -(-len(self._larger) // MOST_ASKED)]
        asked = [option_argv({**others, "nodes": size - self._num_good}) for size in sizes]
        try:
            starts = [answer.start_time for answer in ask_starts(asked, ENOUGH_S)]
        except TrainkitError as error:
            log_line(f"cannot determine when more nodes will be free: {error.message}")
            return {}
        now = datetime.now(timezone.utc)
        waits = (None if start is None else (start - now).total_seconds() for start in starts)
        return dict(zip(sizes, waits, strict=True))
