"""When a run on fewer nodes than it may have returns to the queue, to restart on more.

Asks Slurm from time to time whether the nodes that it lacks are free, then decides.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import pairwise

from trainkit.errors import TrainkitError
from trainkit.formats import duration, plural
from trainkit.job.attempt_end import previous_ends
from trainkit.job.decision import Growth, restarts_limit
from trainkit.job.processes import log_line
from trainkit.plan.launch import LaunchPlan, option_argv, with_excluded
from trainkit.run.events import log_event
from trainkit.run.history import Attempt, RunHistory, ended_attempts, find_restarts, timestamp
from trainkit.run.rundir import AttemptDir
from trainkit.slurm.submit import ask_starts

ASK_EVERY_S = 1800.0
ENOUGH_S = 5.0
"""Seconds for all questions to Slurm together, during which no signal is handled."""
MOST_ASKED = 4
"""Numbers of nodes that Slurm is asked about."""
SOON_S = 60.0
"""A job that would start within this time would start now."""
REQUEUE_S = 120.0
"""What a save and a requeue take, unless the run has had one."""
MIN_SHARE = 0.1
"""Share of the remaining time that a growth must save, besides what the restart takes."""
MAX_VAIN = 2
"""Growths after which the run had no more nodes than before."""


@dataclass(frozen=True)
class Size:
    """A number of nodes that the run may have."""

    num_nodes: int
    step_s: float
    wait_s: float | None
    """Seconds until the nodes that the run lacks are free; None if Slurm names no time."""


def decide_growth(left_steps: int, step_s: float, restart_s: float, larger: Sequence[Size]) -> Growth:
    """Whether a run with this many steps left, and this speed, restarts on one of the larger sizes."""
    waits = [(size.wait_s, size) for size in larger if size.wait_s is not None]
    free = [size for wait_s, size in waits if wait_s <= SOON_S]
    if not waits:
        return Growth(None, "Slurm does not say when it would start more")
    if not free:
        wait_s, size = min(waits, key=lambda one: one[0])
        return Growth(None, f"{plural(size.num_nodes, 'node')} would be free in {duration(wait_s)}")
    best = min(free, key=lambda size: (size.step_s, size.num_nodes))
    left_s, then_s = left_steps * step_s, left_steps * best.step_s
    reason = (
        f"{plural(best.num_nodes, 'node')} are free: {duration(then_s)} instead of {duration(left_s)} to go,"
        f" and {duration(restart_s)} for the restart"
    )
    is_worth_it = left_s - then_s - restart_s >= MIN_SHARE * left_s
    return Growth(best.num_nodes if is_worth_it else None, reason)


def step_seconds(attempts: Sequence[Attempt], last_step: int) -> dict[int, float]:
    """Number of nodes -> seconds of a step, with saves and evaluations, in its newest attempt.

    Attempts in other partitions than that of the newest do not count; `last_step` is the run's.
    """
    found = {}
    for attempt in attempts:
        begin = attempt.training or attempt.first_step or attempt.started
        num_steps = min(attempt.kept_step, last_step) - attempt.start_step
        is_alike = attempt.partition == attempts[-1].partition
        if is_alike and attempt.num_nodes and begin and attempt.ended and num_steps > 0:
            found[attempt.num_nodes] = (attempt.ended - begin) / num_steps
    return found


def vain_growths(attempts: Sequence[Attempt]) -> int:
    """The growths after which the run had no more nodes than before."""
    return sum(
        one.cause == "grow" and (following.num_nodes or 0) <= (one.num_nodes or 0)
        for one, following in pairwise(attempts)
    )


class GrowthWatch:
    """Asks during an attempt, at most every `ASK_EVERY_S`, whether the run is to grow."""

    def __init__(self, attempt: AttemptDir, plan: LaunchPlan, hosts: Sequence[str], num_good: int) -> None:
        """`hosts` are those of the allocation, of which `num_good` can be used."""
        self._attempt, self._plan, self._hosts, self._num_good = attempt, plan, hosts, num_good
        self._larger = sorted((size for size in map(int, plan.sizes) if size > plan.num_nodes), reverse=True)
        self._asked_s = time.monotonic()

    def poll(self) -> Growth | None:
        """What is decided, if it is time to ask; None else. Raises OSError."""
        now_s = time.monotonic()
        if not self._larger or now_s < self._asked_s + ASK_EVERY_S:
            return None
        self._asked_s = now_s
        run, number = self._attempt.run, self._attempt.number
        found = self._ask()
        log_line(f"attempt {number}: {found.sentence}")
        log_event(run, number, "growth", num_nodes=found.num_nodes, reason=found.sentence)
        return found

    def _ask(self) -> Growth:
        history = RunHistory(self._attempt.run)
        history.events.update()
        last, total_steps = history.newest_steps()[-1:], history.events.total_steps
        if not last or total_steps is None:
            return Growth(None, "it is not known how many steps are left")
        attempts = ended_attempts(history.events.attempts, timestamp(last[0].time))
        limit = restarts_limit(list(previous_ends(self._attempt).values()), self._plan.requeue)
        if limit is None and (vain := vain_growths(attempts)) >= MAX_VAIN:
            limit = f"it restarted with no more nodes {plural(vain, 'time')}"
        measured = step_seconds(attempts, last[0].step)
        step_s = measured.get(self._plan.num_nodes)
        if limit is not None or step_s is None:
            return Growth(None, limit or "no step of this attempt is measured yet")
        larger = [
            # What was not measured is assumed to be in proportion.
            Size(size, measured.get(size, step_s * self._plan.num_nodes / size), wait_s)
            for size, wait_s in self._waits().items()
        ]
        restart_s = self._restart_s(history.events.attempts)
        return decide_growth(total_steps - last[0].step, step_s, restart_s, larger)

    def _restart_s(self, attempts: Mapping[int, Attempt]) -> float:
        """What a restart takes: the fastest that the run has had, since others waited for nodes."""
        measured = [one.total_s for one in find_restarts(attempts) if one.action != "restart"]
        own = attempts[self._attempt.number]
        start_s = (own.first_step or 0.0) - (own.started or 0.0) if own.first_step else 0.0
        return min(filter(None, measured), default=REQUEUE_S + start_s)

    def _waits(self) -> dict[int, float | None]:
        """Larger numbers of nodes, and in how many seconds those that the run lacks are free."""
        assert self._plan.slurm is not None
        # Its own nodes may have room for another job, but not for another node of this one.
        others = with_excluded(self._plan.slurm, self._hosts).sbatch
        partition = os.environ.get("SLURM_JOB_PARTITION") or others.get("partition", False)
        others = {**others, "partition": partition, "comment": False, "dependency": False}
        sizes = self._larger[:: -(-len(self._larger) // MOST_ASKED)]
        asked = [option_argv({**others, "nodes": size - self._num_good}) for size in sizes]
        try:
            starts = [answer.start_time for answer in ask_starts(asked, ENOUGH_S)]
        except TrainkitError as error:
            log_line(f"cannot ask when more nodes are free: {error.message}")
            return {}
        now = datetime.now(timezone.utc)
        waits = (None if start is None else (start - now).total_seconds() for start in starts)
        return dict(zip(sizes, waits, strict=True))
