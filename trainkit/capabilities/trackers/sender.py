"""Starts and stops the process that sends an attempt's metrics; used by the agent of rank 0."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

from trainkit.capability import Companion
from trainkit.job import processes
from trainkit.job.node.worker_env import configured_environ, with_own_folders
from trainkit.job.processes import log_line, module_argv
from trainkit.plan.launch import LaunchPlan
from trainkit.run.rundir import AttemptDir

DRAIN_S = 30.0
"""Maximum time that a finished run waits for its last steps to be sent, in seconds; `trainkit sync` can send
the remaining steps later."""


def sender_log(attempt: AttemptDir) -> Path:
    """Return the log file of the process that sends an attempt's metrics."""
    return attempt.logs_dir / "trackers.log"


class TrackerSender(Companion):
    """Controls the process that sends the metrics of one attempt.

    If the process is killed, the next attempt's process sends the remaining steps.
    """

    def __init__(self, attempt: AttemptDir, plan: LaunchPlan) -> None:
        argv = module_argv("trainkit.capabilities.trackers.sync", str(attempt.run.path))
        if plan.environment.python is not None and not plan.workload.is_command:
            argv = (*plan.environment.python, *argv[argv.index("-m") :])
        self._child: subprocess.Popen[bytes] | None = None
        try:
            environ = with_own_folders(configured_environ(plan, os.environ), plan, attempt.run)
            environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            with sender_log(attempt).open("ab") as log:
                self._child = processes.start_child(
                    argv,
                    environ=environ,
                    output=log,
                    keeps_mask=False,
                    # Ignore stop signals, because Slurm may send them to every process in a job step.
                    ignored=(signal.SIGTERM, signal.SIGINT, signal.SIGUSR2),
                    stdin=subprocess.PIPE,
                )
        except OSError as error:  # The ranks do not depend on this process, so only report the error.
            log_line(
                f"warning: could not start sending the metrics ({error}); `trainkit sync` sends them later"
            )

    def end(self, *, is_finished: bool) -> None:
        """Stop the process; wait for it only after a finished run, because a preempted job must exit soon."""
        child = self._child
        if child is None:
            return
        assert child.stdin is not None
        if is_finished and not processes.ended(child):
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(b"finished\n")
                child.stdin.flush()
            deadline_s = time.monotonic() + DRAIN_S
            while not processes.ended(child) and (remaining_s := deadline_s - time.monotonic()) > 0:
                if processes.wait_for_signal(remaining_s) not in (None, signal.SIGCHLD):
                    break
        if not processes.ended(child):
            processes.kill_group(child)
        child.stdin.close()
        processes.exit_code(child)
