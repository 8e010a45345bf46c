"""One run of `fault_campaign.py`: observes the run while faults are injected, and checks how it ends."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

from tests.on_slurm import survival
from tests.on_slurm.login import Login
from tests.on_slurm.survival import Curve
from trainkit.run.manifest import Checkpoint, find_damage, published
from trainkit.run.rundir import RunDir

OLD_EVERY_S = 5.0
"""Maximum age in seconds of the outdated folder that a host with stale reads sees."""
STUCK_S = 240.0
"""A run is considered stuck after this many seconds without a step and without an active fault."""
CLASH = re.compile(r"address already in use|EADDRINUSE", re.IGNORECASE)
BRAKES = ("saved nothing new", "attempts in a row ended at step")
FAULTS_FOR_A_BRAKE = 3
"""Minimum number of faults after which a run is allowed to give up."""
QUEUED_S = 30.0
"""Seconds for which the job of an ended run may remain in the queue."""
GIVEN_UP = ("did not restart it", "squeue has forgotten it")
"""Reasons for a stop: Slurm failed to restart the run, or slurmctld died before it saved the job."""
NO_SPACE = ("No space left", "disk full")


class Flight:
    """One run of the campaign."""

    def __init__(self, login: Login, run: RunDir, kind: str) -> None:
        self.login = login
        self.run = run
        self.kind = kind
        self.faults: list[str] = []
        self.recent_faults = 0
        """Number of faults since a user last started the run."""
        self.wrong: list[str] = []
        self.stops: list[str] = []
        """Reasons for the stops after which a user had to resume the run."""
        self.old_checkpoints: Path | None = None
        self.old_attempts: Path | None = None
        self._damaged: set[tuple[int, int]] = set()
        """Step and inode of each checkpoint that was damaged deliberately."""
        self._newest = 0
        self._old_at_s = 0.0
        self._num_lines = 0
        self._moved_at_s = time.monotonic()
        self.disk_was_full = False

    @property
    def name(self) -> str:
        return self.run.name

    def note_damage(self, checkpoint: Checkpoint) -> None:
        """Record that a checkpoint is about to be damaged, and is no longer intact."""
        self._damaged.add(_identity(checkpoint))
        self._newest = max((one.step for one in self.intact()), default=0)

    def computes(self) -> bool:
        """Return whether the newest attempt has computed some steps and is still running."""
        attempt = survival.newest_attempt(self.run)
        return (
            len(survival.steps_of(self.run, attempt)) >= 3 and not self.run.attempt(attempt).end_file.exists()
        )

    def where(self) -> str:
        """Return the name, step and attempt of the run for a line of output."""
        steps = survival.steps_of(self.run)
        return f"{self.name} step {steps[-1] if steps else 0} attempt {survival.newest_attempt(self.run)}"

    def look(self, calm: bool) -> None:
        """Record all problems of the run; `calm` is true if no fault is active."""
        newest = max((one.step for one in self.intact()), default=0)
        if newest < self._newest:
            self.wrong.append(f"the newest intact checkpoint went from step {self._newest} back to {newest}")
        self._newest = newest
        num_lines = len(survival.steps_of(self.run))
        if num_lines != self._num_lines or not calm:
            self._num_lines, self._moved_at_s = num_lines, time.monotonic()
        if time.monotonic() > self._moved_at_s + STUCK_S:
            self.wrong.append(f"no step for {STUCK_S:g} s")
        if time.monotonic() > self._old_at_s + OLD_EVERY_S:
            self._old_at_s = time.monotonic()
            self.old_checkpoints = self._copy(self.run.checkpoints_dir, self.old_checkpoints)
            self.old_attempts = self._copy(self.run.attempts_dir, self.old_attempts)

    def _copy(self, folder: Path, before: Path | None) -> Path | None:
        """Copy a folder for use as an outdated view; return the previous copy if copying fails."""
        if not folder.is_dir():
            return before
        kept = self.login.folder / "old" / f"{self.name}-{folder.name}"
        fresh = kept.with_suffix(".new")
        shutil.rmtree(fresh, ignore_errors=True)
        try:
            shutil.copytree(folder, fresh, symlinks=True)
        except (OSError, shutil.Error):
            return before
        shutil.rmtree(kept, ignore_errors=True)
        fresh.rename(kept)
        return kept

    def intact(self) -> list[Checkpoint]:
        """Return the published checkpoints that were not damaged deliberately, oldest first."""
        return [one for one in published(self.run.checkpoints_dir) if _identity(one) not in self._damaged]

    def end(self, slurm_whole_at: float) -> dict[str, Any] | None:
        """Return how the run ended, or None if it has not ended. `trainkit status` detects a dead run.

        Slurm keeps a job until all of its hosts have confirmed the end of the job. Therefore, the time before
        all Slurm daemons are connected again (`slurm_whole_at`, in seconds since the epoch) is not counted.
        """
        end = survival.last_end(self.run)
        if self.login.job_id(self.run) in self.login.jobs():
            ended_s = 0.0 if end is None else time.time() - max(survival.time_of(end), slurm_whole_at)
            if ended_s > QUEUED_S:
                self.wrong.append(f"ended {ended_s:.0f} s ago, and its job is still there: {end}")
            return end
        if end is not None:
            return end
        status = self.login.status(self.run)
        return status if status["state"] in ("died", "cancelled") else survival.last_end(self.run)

    def judge_stop(self, end: dict[str, Any]) -> str | None:
        """Return why a stop is unexpected, or None if the faults explain it and the run can be resumed."""
        reason = str(end["reason"])
        said = f"{reason} {json.dumps(end.get('verdict'))}"
        if any(text in said for text in NO_SPACE) and self.disk_was_full:
            return None
        if end["state"] in ("died", "cancelled") and self.disk_was_full:
            return None  # the run could not record its end
        if any(text in reason for text in GIVEN_UP) and self.recent_faults:
            return None  # Slurm lost the job
        if any(text in reason for text in BRAKES) and self.recent_faults >= FAULTS_FOR_A_BRAKE:
            return None
        return f"stopped: {end['state']}: {reason}"

    def judge_end(self, expected: Curve) -> list[str]:
        """Return all problems of a finished run."""
        wrong = list(self.wrong)
        found = survival.curve(self.run)
        if found != expected:
            differs = [a[0] for a, b in zip(found, expected, strict=False) if a != b]
            wrong.append(f"another curve: {len(found)} of {len(expected)} steps, first other {differs[:1]}")
        wrong += [f"{one.path.name}: {bad}" for one in self.intact() if (bad := find_damage(one))]
        logs = [*self.run.attempts_dir.glob("*/logs/*.log")]
        wrong += [f"port clash in {log}" for log in logs if CLASH.search(log.read_text(errors="replace"))]
        return wrong

    def comebacks(self) -> str:
        """Return how often the run restarted, by type of restart."""
        actions = [event["action"] for event in survival.events_of(self.run, "requeue_decision")]
        return ", ".join(f"{actions.count(action)} {action}" for action in dict.fromkeys(actions)) or "none"


def processes_of(folder: Path) -> list[str]:
    """Return the command lines of processes, on any host, that contain the path of a folder."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # not a process, or a process that is exiting
        if str(folder) in line:
            found.append(f"{entry.name}: {line}")
    return found


def _identity(checkpoint: Checkpoint) -> tuple[int, int]:
    try:
        return checkpoint.step, checkpoint.path.stat().st_ino
    except OSError:
        return checkpoint.step, 0  # the file was removed in the meantime
