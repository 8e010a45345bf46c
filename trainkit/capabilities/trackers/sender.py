"""The process that sends the metrics of an attempt, which the agent of rank 0 starts."""

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
"""How long a run that has finished waits until its last steps are sent; `trainkit sync` sends the others."""


def sender_log(attempt: AttemptDir) -> Path:
    """The log of the process that sends the metrics of an attempt."""
    return attempt.logs_dir / "trackers.log"


class TrackerSender(Companion):
    """The process of one attempt. It can be killed at any moment: the next one sends what is missing."""

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
                    # Slurm may signal every process of a step.
                    ignored=(signal.SIGTERM, signal.SIGINT, signal.SIGUSR2),
                    stdin=subprocess.PIPE,
                )
        except OSError as error:  # the ranks run without it
            log_line(f"warning: the metrics are not sent ({error}); `trainkit sync` sends them later")

    def end(self, *, is_finished: bool) -> None:
        """End the process, at once unless the run has finished: a job that is preempted must not wait."""
        child = self._child
        if child is None:
            return
        assert child.stdin is not None
        if is_finished and not processes.ended(child):
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(b"finished\n")
                child.stdin.flush()
            deadline_s = time.monotonic() + DRAIN_S
            while not processes.ended(child) and (left_s := deadline_s - time.monotonic()) > 0:
                if processes.wait_for_signal(left_s) not in (None, signal.SIGCHLD):
                    break
        if not processes.ended(child):
            processes.kill_group(child)
        child.stdin.close()
        processes.exit_code(child)
