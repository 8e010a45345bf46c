"""Runs without Slurm: a supervisor process on this machine, or several hosts that were started by hand."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from trainkit.backends import SUPERVISOR_EXIT_S, Backend, JobStatus, NewAttempt, write_cancelled
from trainkit.errors import TrainkitError, UsageError
from trainkit.job.processes import PAUSE_SIGNALS, descendants, dies_with, module_argv, signal_all
from trainkit.job.signals import NOTICE_SIGNALS
from trainkit.run.end import KILLED, is_over
from trainkit.run.events import log_event
from trainkit.run.process import boot_id
from trainkit.run.record import AttemptRecord, add_attempt, open_attempt, read_job
from trainkit.run.rundir import AttemptDir, RunDir, is_supervised
from trainkit.slurm.environment import OWN_PREFIX

if TYPE_CHECKING:
    from trainkit.slurm.jobs import JobInfo

KILL_TIMEOUT_S = 10.0


class LocalBackend(Backend):
    """A supervisor process on this machine, which survives the terminal unless it runs in the foreground."""

    poll_s = 0.05

    def start(self, run: RunDir, new: NewAttempt) -> AttemptRecord:
        attempt = open_attempt(run, new.config_text, new.plan_text)
        # A stop signal stays pending while the supervisor's interpreter starts.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {*NOTICE_SIGNALS, *PAUSE_SIGNALS})
        try:
            pid = self._supervisor(attempt, new.foreground)
            entry = add_attempt(run, attempt.number, pid, new.reason)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        log_event(run, attempt.number, "submitted", job_id=entry.job_id, reason=new.reason)
        return entry

    def _supervisor(self, attempt: AttemptDir, foreground: bool) -> int:
        """Start the supervisor of an attempt, in the folder of the submission; returns its pid."""
        cwd = read_job(attempt.run).cwd
        environ = {name: value for name, value in os.environ.items() if not name.startswith(OWN_PREFIX)}
        with attempt.supervisor_log.open("ab") as log:
            return subprocess.Popen(
                module_argv(
                    "trainkit.job.supervisor", str(attempt.run.path), "--attempt", str(attempt.number)
                ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environ,
                cwd=cwd if cwd is not None and Path(cwd).is_dir() else None,
                start_new_session=True,
                preexec_fn=dies_with(os.getpid(), signal.SIGTERM) if foreground else None,
            ).pid

    def array_problem(self, reason: str, config_path: str) -> tuple[str, str]:
        loop = f"for lr in 1e-4 3e-4; do trainkit run {quote(config_path)} --set optimizer.lr=$lr; done"
        message = f"--sweep and --array need Slurm, but this would run on this machine ({reason})"
        return message, f"run them in a shell loop: {loop}"

    def stays_here(self, entry: AttemptRecord) -> str | None:
        if os.uname().nodename != entry.host and boot_id() != entry.boot_id:
            return None
        return "local: it ran on this machine; --backend sbatch submits it to Slurm"

    def running_job(self, run: RunDir, entry: AttemptRecord) -> JobInfo:
        raise UsageError(
            f"{run.path} is a local run, not a Slurm job", hint="use a shell on the machine that runs it"
        )

    def alive(self, run: RunDir, entry: AttemptRecord) -> bool | None:
        alive = entry.alive()
        # Another name of this machine, or a container on it: its kernel knows who holds the lock.
        return False if alive is None and entry.boot_id == boot_id() and not is_supervised(run) else alive

    def status(
        self, run: RunDir, entry: AttemptRecord, waiting: Sequence[str], jobs: Mapping[str, JobInfo] | None
    ) -> JobStatus:
        return JobStatus(self.alive(run, entry))

    def live_entry(self, run: RunDir, entry: AttemptRecord, command: str) -> AttemptRecord | None:
        if is_over(run.attempt(entry.attempt)):
            # The supervisor is about to exit and ignores signals.
            self.wait_until_gone(run, entry, SUPERVISOR_EXIT_S)
        alive = self.alive(run, entry)
        if alive is None:
            raise UsageError(
                f"cannot tell from here whether {run.path} is running: it was started on {entry.host}",
                hint=f"run `trainkit {command} {quote(str(run.path))}` on that host; if it is gone for good, "
                f"`trainkit resume {quote(str(run.path))} --as DIR` continues in a new folder",
            )
        return entry if alive else None

    def signal(self, run: RunDir, entry: AttemptRecord, number: signal.Signals) -> str:
        if entry.pid is not None and entry.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(entry.pid, number)
        return "signalled"

    def kill(self, run: RunDir, entry: AttemptRecord) -> None:
        assert entry.pid is not None, entry
        signal_all((entry.pid, *descendants(entry.pid)), signal.SIGKILL)
        if not self.wait_until_gone(run, entry, KILL_TIMEOUT_S):
            raise TrainkitError(
                f"{entry.job_id} did not end within {KILL_TIMEOUT_S:g} s of SIGKILL",
                hint=f"`ps -o pid,stat,wchan {entry.pid}` shows what it waits for",
            )
        try:
            write_cancelled(run, entry, KILLED)
        except OSError as error:
            message = f"{entry.job_id} was killed, but that could not be recorded ({error})"
            raise TrainkitError(message) from None


class HostsBackend(LocalBackend):
    """This process on the first of several hosts that were started by hand; it records their end."""

    def _supervisor(self, attempt: AttemptDir, foreground: bool) -> int:
        return os.getpid()
