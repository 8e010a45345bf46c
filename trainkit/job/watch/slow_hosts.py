"""Hosts whose ranks hold the others up: which to continue without, now or after an interruption."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from trainkit.errors import TrainkitError
from trainkit.job.attempt_end import previous_attempts
from trainkit.job.decision import SlowHost, slow_restart_refusal
from trainkit.job.processes import log_line
from trainkit.job.requeue import excludable
from trainkit.plan.launch import LaunchPlan
from trainkit.run.events import SLOWDOWN_EVENTS, open_slowdowns
from trainkit.run.files import JsonlTail
from trainkit.run.rundir import AttemptDir

POLL_S = 2.0


def slow_hosts(attempt: AttemptDir, plan: LaunchPlan, hosts: Sequence[str]) -> dict[str, str]:
    """The `hosts` whose ranks were slow when an attempt ended, if the config excludes them."""
    if plan.requeue.slow_hosts == "ignore":
        return {}
    found = {}
    for event in open_slowdowns(attempt.run, attempt.number):
        if event.get("host") in hosts:
            log_line(f"excluding {event['host']}: rank {event['rank']} is {event['ratio']} times slower")
            found[str(event["host"])] = "slow"
    return found


class SlowHostWatch:
    """Polls the events of one attempt for ranks that stay slow."""

    def __init__(self, attempt: AttemptDir, plan: LaunchPlan, hosts: Sequence[str]) -> None:
        """`hosts` are the good hosts of the allocation, as Slurm names them."""
        self._attempt, self._plan, self._hosts = attempt, plan, hosts
        self._events = JsonlTail(attempt.run.events_file, SLOWDOWN_EVENTS)
        self._slow: dict[int, tuple[dict[str, Any], float]] = {}
        """Ranks that are slow: their event, and when it was read."""
        self._kept: set[str] = set()
        """Hosts that the run cannot do without."""
        self._next_s = 0.0

    def poll(self) -> SlowHost | None:
        """The host to continue without; None as long as there is none. Raises OSError."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return None
        self._next_s = now_s + POLL_S
        for event in self._events.read():
            rank = event.get("rank")
            if event.get("attempt") != self._attempt.number or not isinstance(rank, int):
                continue  # a slow run has no rank
            if event.get("event") == "slow_rank":
                self._slow.setdefault(rank, (event, now_s))
            else:
                self._slow.pop(rank, None)
        for rank, (event, since_s) in self._slow.items():
            host = str(event.get("host"))
            is_due = now_s - since_s >= self._plan.requeue.slow_after_s
            if not is_due or host in self._kept or host not in self._hosts:
                continue
            refusal = self._refusal(host)
            why = f"rank {rank} slow since step {event.get('since_step')} ({event.get('phase')})"
            if refusal is None:
                return SlowHost(host, why)
            log_line(f"not restarting without {host} ({why}): {refusal}")
            self._kept.add(host)
        return None

    def _refusal(self, host: str) -> str | None:
        """Why the run must not be stopped to continue without a host; None when it can continue."""
        previous = [attempt for _, attempt in previous_attempts(self._attempt)]
        refusal = slow_restart_refusal(previous, self._plan.requeue)
        if refusal is not None or len(self._hosts) > self._plan.num_nodes:
            return refusal
        try:
            found = [] if self._plan.slurm is None else excludable([host], self._plan.slurm)
        except TrainkitError as error:
            return error.message
        return None if found else "no spare node, and Slurm would not start the job on others"
