"""Watches the steps, attempts, saves and end of a run from outside."""

from __future__ import annotations

import time
from collections.abc import Callable

from trainkit.backends import backend_of
from trainkit.backends.jobs import liveness_probe
from trainkit.drill.loss_curve import points_of
from trainkit.observe.follow import run_is_over
from trainkit.run.end import AttemptEnd, read_end
from trainkit.run.events import events_of, steps_of
from trainkit.run.files import JsonlTail
from trainkit.run.manifest import partials, published
from trainkit.run.record import read_job
from trainkit.run.rundir import RunDir
from trainkit.slurm.client import SlurmUnreachable

CHECK_END_EVERY_S = 0.25


class RunWatch:
    """The progress of a run as seen so far.

    `poll_s` is the polling interval of its files; it must be shorter than a step for an interruption to hit
    its target. After `patience_s` without progress, not counting time in the queue, the run counts as stuck.
    """

    def __init__(
        self,
        run: RunDir,
        poll_s: float,
        patience_s: float,
        log_line: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.run = run
        self.poll_s = poll_s
        self.patience_s = patience_s
        self.is_stuck = False
        """Whether it made no progress for `patience_s`."""
        self.step = 0
        """The newest recorded step."""
        self.started_s: dict[int, float] = {}
        """Attempt -> monotonic time at which its start was seen."""
        self.first_step_s: dict[int, float] = {}
        """Attempt -> monotonic time at which its first step was seen."""
        self._log_line = log_line
        self._metrics = JsonlTail(run.metrics_file, from_start=True)
        self._events = JsonlTail(run.events_file, from_start=True)
        self.expect_life()

    def expect_life(self) -> None:
        """Reset the liveness probe; call after the run was started again as a new job."""
        self._is_alive = liveness_probe(self.run, self._log_line)
        self._checked_s, self._is_over = float("-inf"), False
        self._progress_s = time.monotonic()

    @property
    def attempt(self) -> int:
        """The newest started attempt; 0 before the first."""
        return max(self.started_s, default=0)

    def is_saving(self, step: int) -> bool:
        """Whether the checkpoint of this step or a later one is being written."""
        return any(
            path.name >= self.run.checkpoint_dir(step).name for path in partials(self.run.checkpoints_dir)
        )

    def saved_steps(self) -> list[int]:
        """The steps of the published checkpoints, oldest first."""
        return [checkpoint.step for checkpoint in published(self.run.checkpoints_dir)]

    def until(self, reached: Callable[[], bool]) -> bool:
        """Wait for a condition; False when the run ends without it or is stuck."""
        while True:
            over = self.over()
            # Read after the check, so that everything written before the end is seen.
            self.read()
            if reached():
                return True
            if over:
                return False
            if time.monotonic() - self._progress_s > self.patience_s and not self._is_in_queue():
                self.is_stuck = True
                return False
            time.sleep(self.poll_s)

    def read(self) -> None:
        """Read new metrics and events."""
        # Steps first: those recorded before an attempt starts belong to the previous attempt.
        for point in points_of(steps_of(self._metrics.read())):
            self._progress_s = time.monotonic()
            self.step = point.step
            # A COMMAND need not record the attempt.
            attempt = self.attempt if point.attempt is None else point.attempt
            self.first_step_s.setdefault(attempt, time.monotonic())
        for event in events_of(self._events.read()):
            self._progress_s = time.monotonic()
            if event.name == "started":
                self.started_s[event.attempt or 0] = time.monotonic()

    def _is_in_queue(self) -> bool:
        """Whether the run's job is pending; asked only after `patience_s` without progress."""
        entry = read_job(self.run).newest
        self._progress_s = time.monotonic()
        try:
            job = None if entry is None else backend_of(entry).job(entry)
        except SlurmUnreachable as error:
            self._log_line(f"unknown whether {self.run.name} is in the queue: {error.message}")
            return True  # asked again after `patience_s`
        return job is not None and job.state.is_waiting

    def over(self) -> bool:
        """Whether the run has ended for good."""
        if time.monotonic() - self._checked_s >= CHECK_END_EVERY_S:
            self._checked_s = time.monotonic()
            self._is_over = run_is_over(self.run, self._is_alive())
        return self._is_over

    def end(self) -> AttemptEnd:
        """How the newest attempt ended, as far as that is recorded."""
        numbers = self.run.attempt_numbers()
        return (read_end(self.run.attempt(numbers[-1])) if numbers else None) or AttemptEnd()
