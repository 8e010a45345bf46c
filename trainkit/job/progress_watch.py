"""Watches the progress of a running attempt: reports what is wrong, and finds hosts to continue without.

A COMMAND that prints nothing may wait for a lock file that a killed process has left. Silence alone is no
failure, since a script may print into a file of its own: it is reported, and ends the attempt only where
`requeue.silence_s` says so.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from trainkit.folders import ensure_folder
from trainkit.job.attempt_end import previous_ends
from trainkit.job.decision import Departure, restarts_limit
from trainkit.job.failure.stacks import Reply, Request, Silence, explain_silence, request_stacks
from trainkit.job.hangs import GATHER_S, SILENT, HangRecord, find_blocking, node_of
from trainkit.job.processes import log_line
from trainkit.plan.launch import LaunchPlan
from trainkit.run.events import (
    SLOWDOWN_EVENTS,
    events_of,
    log_event,
    read_events,
)
from trainkit.run.files import Tail, refresh_listing, utc_now, write_json
from trainkit.run.history import Attempt, attempts_of
from trainkit.run.rundir import AttemptDir


def slow_hosts(attempt: AttemptDir, plan: LaunchPlan, hosts: Sequence[str]) -> set[str]:
    """The `hosts` whose ranks were slow when an attempt ended, if the config excludes them."""
    if plan.requeue.slow_hosts == "ignore":
        return set()
    found = set()
    events = read_events(attempt.run, *SLOWDOWN_EVENTS, attempt=attempt.number)
    seen = attempts_of(events).get(attempt.number) or Attempt(attempt.number)
    for event in seen.slow.values():
        if event.host is not None and event.host in hosts:
            log_line(f"excluding {event.host}: rank {event.rank} is {event.number('ratio')} times slower")
            found.add(event.host)
    return found


class SlowHostWatch:
    """Polls the events of one attempt for ranks that stay slow."""

    def __init__(self, attempt: AttemptDir, plan: LaunchPlan, hosts: Sequence[str]) -> None:
        """`hosts` are the good hosts of the allocation, as Slurm names them."""
        self._attempt, self._policy, self._hosts = attempt, plan.requeue, hosts
        self._events = Tail(attempt.run.events_file)
        self._events.position = self._events.size()
        self._seen = Attempt(attempt.number)
        self._since_s: dict[int, float] = {}
        """When the slow ranks were first seen to be so."""

    def poll(self) -> Departure | None:
        """The host to continue without; None as long as there is none. Raises OSError."""
        for event in events_of(self._events.records(SLOWDOWN_EVENTS)):
            if event.attempt == self._attempt.number:
                self._seen.add(event)
        slow = [event for event in self._seen.slow.values() if event.host in self._hosts]
        now_s = time.monotonic()
        self._since_s = {event.rank or 0: self._since_s.get(event.rank or 0, now_s) for event in slow}
        for event in slow:
            if now_s - self._since_s[event.rank or 0] < self._policy.slow_after_s:
                continue
            why = f"rank {event.rank} slow since step {event.count('since_step')} ({event.text('phase')})"
            limit = restarts_limit(list(previous_ends(self._attempt).values()), self._policy)
            if limit is None:
                return Departure("slow_host", f"restarts without {event.host}: {why}", event.host)
            log_line(f"not restarting without {event.host} ({why}): {limit}")
            self._hosts = ()
        return None


SILENCE_POLL_S = 10.0
LOOK_S = 30.0
"""How long the agents may take to look at their ranks: py-spy takes up to 20 s for a process."""


class OutputWatch:
    """Watches the files that a run changes while it makes progress."""

    def __init__(self, attempt: AttemptDir, limit_s: float, *, with_logs: bool) -> None:
        """`with_logs` includes what the ranks print, else events of the trainer; `limit_s` sets the pace."""
        self._attempt = attempt
        self._with_logs = with_logs
        self._pause_s = min(SILENCE_POLL_S, limit_s / 4)
        # Not the files' own times, which are those of other hosts' clocks.
        self._changed_s = self._polled_s = time.monotonic()
        self._seen: dict[str, tuple[int, int]] = {}
        self._at_start: dict[str, tuple[int, int]] | None = None

    @property
    def has_output(self) -> bool:
        """Whether a rank has printed anything, or metrics or a heartbeat were written since the start."""
        run, before = self._attempt.run, self._at_start or {}
        signs = (str(run.metrics_file), str(run.heartbeat_file))
        # An agent prints into the log of its node before its ranks start.
        logs = (size for name, (size, _) in self._seen.items() if Path(name).name.startswith("rank-"))
        return any(logs) or any(self._seen.get(name) != before.get(name) for name in signs)

    def poll(self) -> float | None:
        """Seconds since the last change; None when it is too early to check again. Raises OSError."""
        now_s = time.monotonic()
        if now_s < self._polled_s + self._pause_s:
            return None
        was_suspended, self._polled_s = now_s > self._polled_s + 2 * self._pause_s + GATHER_S, now_s
        seen = self._files()
        self._at_start = seen if self._at_start is None else self._at_start
        if seen != self._seen or was_suspended:
            self._seen, self._changed_s = seen, now_s
        return now_s - self._changed_s

    def reset(self) -> None:
        """Count from now."""
        self._changed_s = time.monotonic()

    def _files(self) -> dict[str, tuple[int, int]]:
        """Size and time of what a running command changes."""
        run, logs = self._attempt.run, self._attempt.logs_dir
        files = [run.metrics_file, run.heartbeat_file]
        if self._with_logs:
            refresh_listing(logs)
            files += [*logs.glob("rank-*.log"), *logs.glob("node-*.log")]
        else:
            files.append(run.events_file)
        found = {}
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                status = file.stat()
                found[str(file)] = status.st_size, status.st_mtime_ns
        return found


class SilenceWatch:
    """Looks at a command when no rank prints anything and no metrics and no heartbeat are written.

    After `RequeuePolicy.look_s` it logs what the ranks wait for, as an event ``silent``, if none has printed
    anything yet or a lock file may be in the way; ``silent_over`` follows with the next output. After
    `requeue.silence_s` it writes the reports of a hang, which ranks of the built-in trainer write themselves.
    """

    def __init__(self, attempt: AttemptDir, plan: LaunchPlan) -> None:
        """`plan.requeue.look_s` must not be None."""
        policy = plan.requeue
        assert policy.look_s is not None
        self._attempt = attempt
        self._plan = plan
        self._look_s = policy.look_s
        self._limit_s = float("inf") if policy.silence_s is None else policy.silence_s
        self._output = OutputWatch(attempt, self._look_s, with_logs=True)
        self._silent_s = 0.0
        self._look: Request | None = None
        self._look_until_s = 0.0
        self._silence: Silence | None = None
        self._stacks: dict[int, tuple[str, ...]] = {}
        """The frames of the ranks that can run, by rank."""
        self._is_reported = False

    def poll(self) -> None:
        """Look at the ranks once there is silence, and report them if it lasts. Raises OSError."""
        silent_s = self._output.poll()
        if silent_s is not None:
            if silent_s < self._silent_s:
                if self._is_reported:
                    log_event(self._attempt.run, self._attempt.number, "silent_over")
                self._forget()
            self._silent_s = silent_s
        if self._silent_s <= self._look_s:
            return
        if self._silence is None:
            if self._look is None:
                self._look = request_stacks(self._attempt, None, flights=True)
                self._look_until_s = time.monotonic() + LOOK_S
            replies = self._look.replies()
            if len(replies) < self._plan.world_size and time.monotonic() < self._look_until_s:
                return
            self._look.withdraw()
            self._silence = self._explain(replies)
            self._log(self._silence)
        if self._silent_s > self._limit_s:
            if not self._attempt.has_rank_in_debugger:
                self._report(self._silence)
            self._forget()
            self._output.reset()

    def _explain(self, replies: Sequence[Reply]) -> Silence:
        """What the ranks wait for; keeps their stacks. One that does not reply counts if most others do."""
        replied = {reply.rank: reply.main_stack for reply in replies if not reply.is_stopped}
        self._stacks = replied
        if 2 * len(replies) <= self._plan.world_size:
            self._stacks = dict.fromkeys(range(self._plan.world_size), ())
        return explain_silence(
            replies, find_blocking(self._attempt, self._plan, self._stacks, is_silence=True)
        )

    def _forget(self) -> None:
        if self._look is not None:
            self._look.withdraw()
        self._look, self._silence, self._is_reported, self._silent_s = None, None, False, 0.0

    def _log(self, silence: Silence) -> None:
        if self._output.has_output and silence.lock is None:
            return  # many a script prints seldom
        before = "" if self._output.has_output else ", and none before"
        reason = f"no output for {self._silent_s:.0f} s{before}; {silence.text}"
        log_line(f"attempt {self._attempt.number}: {reason}")
        self._is_reported = True
        log_event(
            self._attempt.run,
            self._attempt.number,
            "silent",
            rank=silence.rank,
            host=silence.host,
            lock=silence.lock,
            reason=reason,
        )

    def _report(self, silence: Silence) -> None:
        """One report per rank that can run, which differ only in their stacks and hosts."""
        ensure_folder(self._attempt.hangs_dir)
        for rank, stack in self._stacks.items():
            record = HangRecord(
                rank=rank,
                node_rank=node_of(self._plan, rank),
                host="",
                step=None,
                phase=f"{SILENT}: {silence.text}",
                beat=0,
                waited_s=round(self._silent_s, 3),
                limit_s=self._limit_s,
                usual_s=None,
                time=utc_now(),
                stack=() if silence.lock else stack,
            )
            write_json(self._attempt.rank_hang(rank), asdict(record))
