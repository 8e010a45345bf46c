"""Watches the progress of a running attempt: reports what is wrong, and finds hosts to continue without."""

from __future__ import annotations

import time
from collections.abc import Sequence

from trainkit.errors import TrainkitError
from trainkit.job.attempt_end import last_step, previous_attempts
from trainkit.job.decision import SlowHost, slow_restart_refusal
from trainkit.job.notifications import Notification, Notifier, event_notification
from trainkit.job.processes import log_line
from trainkit.job.requeue import excludable
from trainkit.job.watch.silence import OutputWatch
from trainkit.plan.launch import LaunchPlan
from trainkit.run.events import (
    FAILED_SAVES,
    SAVE_EVENTS,
    SILENCE_EVENTS,
    SLOWDOWN_EVENTS,
    Event,
    events_of,
    read_events,
)
from trainkit.run.files import JsonlTail
from trainkit.run.history import Attempt, attempts_of
from trainkit.run.rundir import AttemptDir

SLOW_POLL_S = 2.0


def slow_hosts(attempt: AttemptDir, plan: LaunchPlan, hosts: Sequence[str]) -> dict[str, str]:
    """The `hosts` whose ranks were slow when an attempt ended, if the config excludes them."""
    if plan.requeue.slow_hosts == "ignore":
        return {}
    found = {}
    events = read_events(attempt.run, *SLOWDOWN_EVENTS, attempt=attempt.number)
    seen = attempts_of(events).get(attempt.number) or Attempt(attempt.number)
    for event in seen.slow.values():
        if event.host is not None and event.host in hosts:
            log_line(f"excluding {event.host}: rank {event.rank} is {event.number('ratio')} times slower")
            found[event.host] = "slow"
    return found


class SlowHostWatch:
    """Polls the events of one attempt for ranks that stay slow."""

    def __init__(self, attempt: AttemptDir, plan: LaunchPlan, hosts: Sequence[str]) -> None:
        """`hosts` are the good hosts of the allocation, as Slurm names them."""
        self._attempt, self._plan, self._hosts = attempt, plan, hosts
        self._events = JsonlTail(attempt.run.events_file, SLOWDOWN_EVENTS)
        self._slow: dict[int, tuple[Event, float]] = {}
        """Ranks that are slow: their event, and when it was read."""
        self._kept: set[str] = set()
        """Hosts that the run cannot do without."""
        self._next_s = 0.0

    def poll(self) -> SlowHost | None:
        """The host to continue without; None as long as there is none. Raises OSError."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return None
        self._next_s = now_s + SLOW_POLL_S
        for event in events_of(self._events.read()):
            rank = event.rank
            if event.attempt != self._attempt.number or rank is None:
                continue  # a slow run has no rank
            if event.name == "slow_rank":
                self._slow.setdefault(rank, (event, now_s))
            else:
                self._slow.pop(rank, None)
        for rank, (event, since_s) in self._slow.items():
            host = str(event.host)
            is_due = now_s - since_s >= self._plan.requeue.slow_after_s
            if not is_due or host in self._kept or host not in self._hosts:
                continue
            refusal = self._refusal(host)
            why = f"rank {rank} slow since step {event.count('since_step')} ({event.text('phase')})"
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


STALL_INTERVALS = 3.0
"""A run that writes metrics seldom is stalled after this many of its longest intervals."""
WATCHED_EVENTS = (*SLOWDOWN_EVENTS, *SILENCE_EVENTS, *SAVE_EVENTS)


class ProgressWatch:
    """Reports that an attempt is stalled, once until it makes progress again, and what its events say."""

    def __init__(self, attempt: AttemptDir, plan: LaunchPlan, notifier: Notifier) -> None:
        self._attempt = attempt
        self._notifier = notifier
        self._limit_s = plan.notify.stalled_after_s
        # The trainer logs metrics, and its logs may grow without progress; a command may write only logs.
        self._output = OutputWatch(attempt, self._limit_s, with_logs=not plan.workload.knows_run)
        self._events = JsonlTail(attempt.run.events_file, WATCHED_EVENTS)
        self._seen = Attempt(attempt.number)
        self._silent_s = self._longest_s = 0.0
        self._is_stalled = False

    def poll(self) -> None:
        """Report what has changed. Raises OSError."""
        silent_s = self._output.poll()
        if silent_s is None:
            return
        if silent_s < self._silent_s:
            if not self._is_stalled:
                self._longest_s = max(self._longest_s, self._silent_s)
            self._is_stalled = False
        self._silent_s = silent_s
        if not self._is_stalled and silent_s > max(self._limit_s, STALL_INTERVALS * self._longest_s):
            self._is_stalled = True
            step = last_step(self._attempt, None)
            after = "" if step is None else f" after step {step}"
            text = f"no progress for {silent_s / 60:.0f} minutes{after}"
            self._notifier.send(self._attempt, Notification("stalled", text, "stacks", step=step))
        for event in events_of(self._events.read()):
            if event.attempt == self._attempt.number:
                self._report(event)

    def _report(self, event: Event) -> None:
        if event.name in ("slow_rank", "slow_run", "silent"):
            self._notifier.send(self._attempt, event_notification(event))
        elif event.name in SAVE_EVENTS:
            self._seen.add(event)
            failed = self._seen.failed_saves
            if len(failed) == FAILED_SAVES:
                since = f"{len(failed)} in a row failed, since step {failed[0].step}"
                text = f"cannot save checkpoints: {since}: {event.text('error')}"
                self._notifier.send(self._attempt, Notification("stalled", text, "status", step=event.step))
