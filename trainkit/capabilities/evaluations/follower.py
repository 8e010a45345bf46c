"""Starts and stops the process that starts the evaluations of a run; used by the supervisor."""

from __future__ import annotations

import subprocess
import time
from contextlib import suppress

from trainkit.capabilities.evaluations.records import evaluations_dir
from trainkit.capability import Watch
from trainkit.folders import ensure_folder
from trainkit.job.processes import ended, log_line, module_argv, outlives_attempts
from trainkit.plan.launch import LaunchPlan
from trainkit.run.rundir import RunDir

LAST_UPDATE_S = 30.0
"""Maximum time that an exiting job waits until its last evaluations are submitted, in seconds."""
MAX_STARTS = 5


class Follower:
    """Controls the process that starts the evaluations of a run, for all attempts of a supervisor."""

    def __init__(self, run: RunDir) -> None:
        self._run, self._num_starts = run, 0
        self._child: subprocess.Popen[bytes] | None = None

    def ensure_running(self) -> None:
        """Start the process unless it runs; after several starts, only report that it has ended."""
        if (self._child is not None and not ended(self._child)) or self._num_starts > MAX_STARTS:
            return
        self._num_starts += 1
        if self._num_starts > MAX_STARTS:
            run = self._run.quoted
            log_line(
                f"warning: no more checkpoints are evaluated; `trainkit eval {run} --all` evaluates them"
            )
            return
        folder = evaluations_dir(self._run)
        ensure_folder(folder, 0o700)
        argv = module_argv("trainkit.capabilities.evaluations.follow", str(self._run.path))
        with (folder / "follow.log").open("ab") as log:
            # The process has its own session, because it may outlive this process and its terminal.
            self._child = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        outlives_attempts(self._child)

    def end(self, plan: LaunchPlan) -> None:
        """Let the process exit after its last update; wait for this update in a job, which ends with it."""
        if self._child is None or self._child.stdin is None:
            return
        with suppress(BrokenPipeError):
            self._child.stdin.close()
        deadline_s = time.monotonic() + (LAST_UPDATE_S if plan.is_job else 0.0)
        while time.monotonic() < deadline_s and not ended(self._child):
            time.sleep(0.1)


class FollowerWatch(Watch):
    """Keeps the follower of a run alive while an attempt runs."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower

    def poll(self) -> None:
        self._follower.ensure_running()
