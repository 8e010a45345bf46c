"""Implements ``trainkit wait``, which waits for a state of a run and reports the result as its exit code."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache

import click

from trainkit.backends.jobs import QUERY_INTERVAL_S, SlurmPoller, read_job_status
from trainkit.cli.help import as_command, option, warn
from trainkit.cli.options import run_argument
from trainkit.errors import EXIT_FAILED, EXIT_OK, EXIT_STOPPED, EXIT_TIMEOUT, SlurmError, UsageError
from trainkit.observe.current import look_at, query_group
from trainkit.observe.group import state_counts
from trainkit.observe.status import RunStatus, read_status
from trainkit.run.group import RunGroup, group_of
from trainkit.run.history import Restart, RunHistory
from trainkit.run.record import read_job_to_change
from trainkit.run.registry import find_to_read
from trainkit.run.rundir import RunDir, is_being_changed

INTERVAL_S = 2.0
SHOW_EVERY_S = 30.0
"""Minimum number of seconds between two lines about the steps of a run."""
MAX_SLEEP_S = 3600.0
NOT_SUBMITTED_S = 60.0
"""Seconds after which a run that no command is submitting is reported as never submitted."""
HAVE_STARTED = ("starting", "running", "paused", "stopping", "restarting", "finished", "stopped", "failed")
"""States of a run whose newest attempt has started. The state `died` is not included, because the job of such
a run may have ended before the attempt started."""
ENDED, STARTED, CHECKPOINT, STEP = "ended", "started", "checkpoint", "step"


@dataclass(frozen=True)
class Goal:
    """The goal that `trainkit wait` waits for."""

    kind: str
    """One of `ENDED`, `STARTED`, `CHECKPOINT` and `STEP`."""
    step: int = 0

    def is_reached(self, run: RunStatus) -> bool:
        """Return whether a run has reached the goal, even if the run has ended since."""
        if self.kind == STARTED:
            return run.used.num_starts > 0 and run.state in (*HAVE_STARTED, "died")
        if self.kind == CHECKPOINT:
            return run.checkpoint is not None
        if self.kind == STEP:
            return (run.progress.step or 0) >= self.step
        return run.state == "finished"

    @property
    def text(self) -> str:
        """Return the goal as a phrase that follows "before" in a message."""
        return {STEP: f"step {self.step:,}", CHECKPOINT: "its first checkpoint"}.get(self.kind, "it started")


class GoalType(click.ParamType):  # type: ignore[type-arg] # generic since click 8.2
    """A goal, such as ``ended`` or ``step=100``."""

    name = "goal"

    def convert(self, value: str | Goal, param: click.Parameter | None, ctx: click.Context | None) -> Goal:
        if isinstance(value, Goal):
            return value
        kind, _, number = value.partition("=")
        if value in (ENDED, STARTED, CHECKPOINT):
            return Goal(value)
        if kind == STEP:
            if number.isascii() and number.isdecimal() and len(number) < 16 and int(number) > 0:
                return Goal(STEP, int(number))
            raise UsageError(f"--for {value[:40]}: N must be a whole number above 0", hint="such as step=100")
        hint = "use started, checkpoint, ended or step=N with a step such as step=100"
        raise UsageError(f"--for {value}: nothing to wait for has this name", hint=hint)


class Seconds(click.FloatRange):
    """A finite number of seconds."""

    def convert(self, value: float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = float(super().convert(value, param, ctx))
        if not math.isfinite(seconds):
            self.fail(f"{value} is not a finite number of seconds", param, ctx)
        return seconds


@as_command(
    "trainkit wait last",
    "trainkit wait last --for started --timeout 3600",
    "trainkit wait last --for step=1000",
    "trainkit wait lr-sweep --interval 60",
)
@run_argument
@option(
    "--for GOAL",
    "What to wait for: started, checkpoint, ended, or step=N for step N.",
    name="goal",
    type=GoalType(),
    default=ENDED,
    show_default=True,
)
@option(
    "--timeout S",
    "Seconds after which to give up, with exit code 124.",
    name="timeout_s",
    type=Seconds(0),
)
@option(
    "--interval S",
    "Seconds between two reads of the run folder; Slurm is queried at most every 10 s.",
    name="interval_s",
    type=Seconds(min=0.2),
    default=INTERVAL_S,
    show_default=True,
)
def command(run_name: str, goal: Goal, timeout_s: float | None, interval_s: float) -> int:
    """Wait until RUN has reached a goal, and print its progress to stderr; the exit code reports the result.

    The exit code is 0 if RUN has reached the goal or, for the goal `ended`, if RUN has finished. The exit
    code is 75 if RUN was stopped before the goal and `trainkit resume` can continue RUN, and 1 if RUN failed,
    was cancelled, or finished before the goal. A run that will restart automatically is not considered ended.
    The exit code is 124 if the timeout expires; RUN is not affected.

    If RUN is a group, `started` means that any of its runs has started, and `ended` that all have ended.
    """
    found = find_to_read(run_name)
    poll: Callable[[], tuple[str, int | None]]
    if isinstance(found, RunGroup):
        if goal.kind not in (ENDED, STARTED):
            raise UsageError(
                f"--for {goal.kind}: {found.shown} is a group of runs",
                hint=f"use started or ended, or wait for one run, for example {found.quoted}/0",
            )
        poll = GroupPoll(found, goal)
        if found.record.process is None:
            interval_s = max(interval_s, QUERY_INTERVAL_S)  # Each poll of a group queries Slurm.
    else:
        poll = RunPoll(found, goal)
    deadline_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
    progress = Progress(found.shown)
    while True:
        text, code = poll()
        progress.show(text, is_last=code is not None)
        if code is not None:
            if code != EXIT_OK and goal.kind != ENDED:
                print_progress(f"{found.shown} ended before {goal.text}")
            return code
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            print_progress(f"{found.shown}: the timeout of {timeout_s:g} s is over")
            return EXIT_TIMEOUT
        time.sleep(min(interval_s, left_s, MAX_SLEEP_S))


def print_progress(text: str) -> None:
    """Print a line to stderr; ignore errors, because the exit code reports the result even without output."""
    with suppress(OSError):
        click.echo(text, err=True)


_STEP = re.compile(r"step [\d,]+")


class Progress:
    """Prints the progress of a run to stderr: state changes immediately, new steps every `SHOW_EVERY_S`."""

    def __init__(self, name: str) -> None:
        self._name, self._said, self._at_s = name, "", float("-inf")

    def show(self, text: str, *, is_last: bool) -> None:
        """Print the status immediately if the state has changed, and every `SHOW_EVERY_S` otherwise."""
        is_new_state = _STEP.sub("", text) != _STEP.sub("", self._said)
        is_due = time.monotonic() - self._at_s >= SHOW_EVERY_S
        if text != self._said and (is_new_state or is_due or is_last):
            print_progress(f"{self._name}: {text}")
            self._said, self._at_s = text, time.monotonic()


class RunPoll:
    """Reads the state of a run; each call reads only data added to the run's files since the last call."""

    def __init__(self, run: RunDir, goal: Goal) -> None:
        self._run, self._goal, self._history = run, goal, RunHistory(run)
        self._slurm = SlurmPoller()
        self._num_restarts = 0
        self._not_submitted_at_s: float | None = None

    def __call__(self) -> tuple[str, int | None]:
        """Return the state as text, and the exit code, or None if the command must keep waiting.

        Raises UsageError if the run folder no longer exists, or if the run was never submitted.
        """
        if not self._run.path.is_dir():
            hint = "if the folder was moved, wait for the run by its new path"
            raise UsageError(f"{self._run.shown} no longer exists", hint=hint)
        try:
            job = read_job_to_change(self._run)
        except OSError as error:  # The file server may be temporarily unavailable.
            return _with_reason("unknown", f"cannot read {self._run.job_file.name}: {error.strerror}"), None
        status = self._status()
        if status.state == "incomplete":
            return self._not_submitted(), None
        self._report_restarts(status.restarts, (status.attempt or 0) - job.num_auto_restarts)
        step, total = status.progress.step, status.progress.total_steps
        text = status.state
        if step is not None:
            text += f", step {step:,}" + ("" if total is None else f" of {total:,}")
        text = _with_reason(text, self._slurm.problem or status.reason)
        if self._goal.is_reached(status) and not self._died_before_start(status):
            return text, EXIT_OK
        return text, None if status.is_active else verdict([status.state], self._goal)

    def _report_restarts(self, restarts: Sequence[Restart], first_attempt: int) -> None:
        """Print the cause of each restart; a run that failed before may still finish with code 0.

        `first_attempt` is the first attempt since a command last started the run; omit earlier restarts.
        """
        for restart in restarts[self._num_restarts :]:
            number = restart.attempt
            if number < first_attempt:
                continue
            if restart.verdict is None:
                text = f"attempt {number} ended ({restart.cause}) and was restarted"
            else:
                hint = f"`trainkit diagnose {self._run.quoted} --attempt {number}`"
                text = f"attempt {number} failed: {restart.verdict.failure.line} ({hint})"
            print_progress(f"{self._run.shown}: {text}")
        self._num_restarts = len(restarts)

    def _died_before_start(self, status: RunStatus) -> bool:
        is_wanted = self._goal.kind == STARTED and status.state == "died"
        return is_wanted and self._history.events.attempt(status.attempt).started is None

    def _not_submitted(self) -> str:
        """Return the state of a run that has no job yet, because another command may be submitting it."""
        now_s = time.monotonic()
        if is_being_changed(self._run) or self._not_submitted_at_s is None:
            self._not_submitted_at_s = now_s
        if now_s - self._not_submitted_at_s > NOT_SUBMITTED_S:
            hint = f"`trainkit resume {self._run.quoted}` submits the run"
            raise UsageError(f"{self._run.shown} has not been submitted", hint=hint)
        return "pending: the run has not been submitted yet"

    def _status(self) -> RunStatus:
        if not self._run.attempt_numbers() and group_of(self._run) is not None:
            return look_at(self._run, warn)[1]  # Only the group knows the state of an unstarted trial.
        record, job = read_job_status(self._run, self._slurm.jobs)
        return read_status(self._history, record, job.alive, datetime.now(timezone.utc), job.job)


class GroupPoll:
    """Reads the state of a group."""

    def __init__(self, group: RunGroup, goal: Goal) -> None:
        self._group, self._goal, self._warn_once = group, goal, cache(warn)

    def __call__(self) -> tuple[str, int | None]:
        """Return the states as text, and the exit code, or None if the command must keep waiting."""
        try:
            status = query_group(self._group, self._warn_once)
        except SlurmError as error:  # The jobs of the group may or may not have been submitted.
            return _with_reason("unknown", error.message), None
        states, text = [trial.state for trial in status.trials], state_counts(status.states)
        if self._goal.kind == STARTED and any(state in HAVE_STARTED for state in states):
            return text, EXIT_OK
        return text, None if status.is_active else verdict(states, self._goal)


def _with_reason(text: str, reason: str | None) -> str:
    """Return a state with its reason on one line."""
    return f"{text}: {' '.join(reason.split())}" if reason else text


def verdict(states: list[str], goal: Goal) -> int:
    """Return the exit code for runs that have all ended; a goal other than `ended` has not been reached."""
    counts = Counter(states)
    if goal.kind == ENDED and counts["finished"] == len(states):
        return EXIT_OK
    if counts["stopped"] and counts["stopped"] + counts["finished"] == len(states):
        return EXIT_STOPPED
    return EXIT_FAILED
