"""Watches a run from outside while it goes on: its steps, its attempts, its saves, its end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from trainkit.control.jobs import life_watch, slurm_job
from trainkit.drill.curve import points_of
from trainkit.job.record import is_slurm, newest_entry
from trainkit.manifest import partials, published
from trainkit.observe.follow import LogTail, is_over
from trainkit.rundir import RunDir, read_end
from trainkit.slurm.client import SlurmUnreachable

LOOK_FOR_END_S = 0.25


class RunWatch:
    """What has been seen of a run so far.

    `poll_s` is how often its files are looked at: the moment to strike lasts no longer than a step.
    `patience_s` is how long nothing may be heard of it while it is not in the queue.
    """

    def __init__(
        self, run: RunDir, poll_s: float, patience_s: float, say: Callable[[str], None] = lambda text: None
    ) -> None:
        self.run = run
        self.poll_s = poll_s
        self.patience_s = patience_s
        self.is_stuck = False
        """Whether nothing was heard of it for so long."""
        self.step = 0
        """The newest step that was written down."""
        self.started_s: dict[int, float] = {}
        """Attempt -> monotonic time at which it was seen to be started."""
        self.first_step_s: dict[int, float] = {}
        """Attempt -> monotonic time at which its first step was seen."""
        self._say = say
        self._metrics = LogTail(run.metrics_file)
        self._events = LogTail(run.events_file)
        self.expect_life()

    def expect_life(self) -> None:
        """Ask anew whether the run's job is there; call when it was started again."""
        self._is_alive = life_watch(self.run, self._say)
        self._asked_s, self._is_over = float("-inf"), False
        self._heard_s = time.monotonic()

    @property
    def attempt(self) -> int:
        """The newest attempt that was started; 0 before the first."""
        return max(self.started_s, default=0)

    def is_saving(self, step: int) -> bool:
        """Whether the checkpoint of this step or a later one is being written at this moment."""
        return any(
            path.name >= self.run.checkpoint_dir(step).name for path in partials(self.run.checkpoints_dir)
        )

    def saved_steps(self) -> list[int]:
        """The steps of the published checkpoints, oldest first."""
        return [checkpoint.step for checkpoint in published(self.run.checkpoints_dir)]

    def until(self, reached: Callable[[], bool]) -> bool:
        """Wait until something is so; False when the run ends without it, or is stuck."""
        while True:
            over = self.over()
            # Looked at after: what was written before the end is then surely seen.
            self.look()
            if reached():
                return True
            if over:
                return False
            if time.monotonic() - self._heard_s > self.patience_s and not self._is_in_queue():
                self.is_stuck = True
                return False
            time.sleep(self.poll_s)

    def look(self) -> None:
        """Read what is new."""
        # First the steps: what is there when an attempt starts is not of that attempt.
        for point in points_of(_records(self._metrics)):
            self._heard_s = time.monotonic()
            self.step = point.step
            # Trainers of others need not say which attempt they are.
            attempt = self.attempt if point.attempt is None else point.attempt
            self.first_step_s.setdefault(attempt, time.monotonic())
        for event in _records(self._events):
            self._heard_s = time.monotonic()
            if event.get("event") == "started":
                self.started_s[int(event["attempt"])] = time.monotonic()

    def _is_in_queue(self) -> bool:
        """Whether the run's job waits, however long; asked only when nothing was heard for long."""
        entry = newest_entry(self.run)
        self._heard_s = time.monotonic()
        try:
            job = slurm_job(entry) if entry is not None and is_slurm(entry) else None
        except SlurmUnreachable as error:
            self._say(f"whether {self.run.name} is in the queue is not known: {error.message}")
            return True  # it is asked again after as long a time
        return job is not None and job.state.is_waiting

    def over(self) -> bool:
        """Whether the run has ended and nothing brings it back."""
        if time.monotonic() - self._asked_s >= LOOK_FOR_END_S:
            self._asked_s = time.monotonic()
            self._is_over = is_over(self.run, self._is_alive())
        return self._is_over

    def end(self) -> dict[str, Any]:
        """How the newest attempt ended; empty where nothing says so."""
        numbers = self.run.attempt_numbers()
        return (read_end(self.run.attempt(numbers[-1])) if numbers else None) or {}


def _records(tail: LogTail) -> list[dict[str, Any]]:
    found = []
    for line in tail.read():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # cut off by a crash
        if isinstance(record, dict):
            found.append(record)
    return found
