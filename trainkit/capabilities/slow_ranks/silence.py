"""Inspects a COMMAND that prints nothing, because it may be waiting for a lock file left by a killed process.

A silent command has not necessarily failed, because a script may write to other files. Silence is therefore
only reported, unless `requeue.silence_s` is set. If `requeue.silence_s` is set, an attempt that is silent for
this time is stopped.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict

from trainkit.capabilities.slow_ranks.output_watch import OutputWatch
from trainkit.capabilities.slow_ranks.policy import slow_ranks_plan
from trainkit.folders import ensure_folder
from trainkit.job.failure.stacks import Reply, Request, Silence, explain_silence, request_stacks
from trainkit.job.hangs import SILENT, HangRecord, find_blocking, node_of
from trainkit.job.processes import log_line
from trainkit.plan.launch import LaunchPlan
from trainkit.run.events import log_event
from trainkit.run.files import utc_now, write_json
from trainkit.run.rundir import AttemptDir

STACKS_TIMEOUT_S = 30.0
"""Maximum time to wait for agents to collect stacks, in seconds; py-spy alone may take 20 s per process."""


class SilenceWatch:
    """Inspects a COMMAND whose ranks write no output, no metrics and no heartbeat.

    After `SlowRanksPlan.inspect_after_s`, the watch collects the Python stacks of the ranks. The watch logs a
    ``silent`` event if no rank has printed anything yet, or if a rank seems to be waiting for a lock file.
    The watch logs a ``silent_over`` event when a rank writes output again. After `requeue.silence_s`, the
    watch writes hang reports like those written by ranks of the built-in trainer.
    """

    def __init__(self, attempt: AttemptDir, plan: LaunchPlan) -> None:
        """Watch an attempt whose plan sets a limit in `SlowRanksPlan.inspect_after_s`."""
        policy = slow_ranks_plan(plan)
        assert policy.inspect_after_s is not None
        self._attempt = attempt
        self._plan = plan
        self._inspect_after_s = policy.inspect_after_s
        self._limit_s = float("inf") if policy.silence_s is None else policy.silence_s
        self._output = OutputWatch(attempt, self._inspect_after_s, with_logs=True)
        self._silent_s = 0.0
        self._request: Request | None = None
        self._request_until_s = 0.0
        self._silence: Silence | None = None
        self._stacks: dict[int, tuple[str, ...]] = {}
        """Maps each rank that is considered running to the frames of its stack."""
        self._is_reported = False

    def poll(self) -> None:
        """Inspect silent ranks after `inspect_after_s`, and report a hang after `requeue.silence_s`.

        Raises OSError if files cannot be read or written.
        """
        silent_s = self._output.poll()
        if silent_s is not None:
            if silent_s < self._silent_s:
                if self._is_reported:
                    log_event(self._attempt.run, self._attempt.number, "silent_over")
                self._forget()
            self._silent_s = silent_s
        if self._silent_s <= self._inspect_after_s:
            return
        if self._silence is None:
            if self._request is None:
                self._request = request_stacks(self._attempt, None, flights=True)
                self._request_until_s = time.monotonic() + STACKS_TIMEOUT_S
            replies = self._request.replies()
            if len(replies) < self._plan.world_size and time.monotonic() < self._request_until_s:
                return
            self._request.withdraw()
            self._silence = self._explain(replies)
            self._log(self._silence)
        if self._silent_s > self._limit_s:
            if self._attempt.waits_in is None:
                self._report(self._silence)
            self._forget()
            self._output.reset()

    def _explain(self, replies: Sequence[Reply]) -> Silence:
        """Explain the silence of a command from the stacks that its ranks sent, and store these stacks.

        If no more than half of the ranks reply, all ranks are considered running, with empty stacks.
        """
        replied = {reply.rank: reply.main_stack for reply in replies if not reply.is_stopped}
        self._stacks = replied
        if 2 * len(replies) <= self._plan.world_size:
            self._stacks = dict.fromkeys(range(self._plan.world_size), ())
        return explain_silence(
            replies, find_blocking(self._attempt, self._plan, self._stacks, is_silence=True)
        )

    def _forget(self) -> None:
        if self._request is not None:
            self._request.withdraw()
        self._request, self._silence, self._is_reported, self._silent_s = None, None, False, 0.0

    def _log(self, silence: Silence) -> None:
        if self._output.has_output and silence.lock is None:
            return  # many scripts print only rarely
        before = "" if self._output.has_output else ", and no output before"
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
        """Write a hang report for each rank in `_stacks`."""
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
