"""The backend that executes runs on this machine, with a supervisor process for each run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from trainkit.backend import SUPERVISOR_EXIT_S, Backend, JobStatus, NewAttempt, write_cancelled
from trainkit.errors import TrainkitError, UsageError
from trainkit.job.processes import PAUSE_SIGNALS, descendants, dies_with, module_argv, signal_all
from trainkit.job.signals import NOTICE_SIGNALS
from trainkit.plan.launch import LaunchPlan
from trainkit.run.end import KILLED, is_over
from trainkit.run.events import log_event, read_events
from trainkit.run.group import RunGroup, group_of
from trainkit.run.process import boot_id
from trainkit.run.record import (
    AttemptRecord,
    JobRecord,
    add_attempt,
    discard_attempt,
    is_alive,
    open_attempt,
)
from trainkit.run.rundir import AttemptDir, RunDir
from trainkit.run.submitted import SUBMITTED_VARIABLE, submitted_hash
from trainkit.scheduler import OWN_PREFIX

if TYPE_CHECKING:
    from trainkit.cluster.machine import Machine
    from trainkit.cluster.target import Target
    from trainkit.config.loaded import LoadedConfig
    from trainkit.job.allocation import Allocation
    from trainkit.plan.launch_draft import LaunchDraft
    from trainkit.scheduler import JobInfo

KILL_TIMEOUT_S = 10.0


class LocalBackend(Backend):
    """Executes runs on this machine.

    A run's supervisor keeps running when the terminal closes, unless the run is in the foreground.
    """

    poll_s = 0.05
    ask_every_s = 0.5

    def draft(self, loaded: LoadedConfig, machine: Machine, target: Target) -> LaunchDraft:
        from trainkit.plan.launch_draft import LaunchDraft  # supervisors and listings do not need LaunchDraft

        return LaunchDraft(loaded, machine, target)

    def waiting_for(self, plan: LaunchPlan, names: Sequence[str], reason: str) -> LaunchPlan:
        return replace(plan, after=tuple(names), reasons={**plan.reasons, "after": reason})

    def allocation(self, run: RunDir, arguments: Sequence[str]) -> Allocation:
        from trainkit.backends.local.allocation import LocalAllocation  # only supervisors import it

        number, *options = arguments
        return LocalAllocation(run, int(number), now="--now" in options)

    def start(self, run: RunDir, new: NewAttempt) -> AttemptRecord:
        attempt = open_attempt(run, new.config_text, new.plan_text)
        # Block stop signals so that they stay pending while the supervisor's interpreter starts.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {*NOTICE_SIGNALS, *PAUSE_SIGNALS})
        pid = None
        try:
            pid = self._supervisor(attempt, new)
            entry = add_attempt(run, attempt.number, pid, new.reason)
        except OSError:
            # the supervisor would exit anyway, because job.json does not list it
            if pid not in (None, os.getpid()):
                signal_all([pid], signal.SIGKILL)
            discard_attempt(attempt)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        try:
            log_event(run, attempt.number, "submitted", job_id=entry.job_id, reason=new.reason)
        except OSError as error:
            raise TrainkitError(
                f"{entry.job_id} was started, but {run.shown} cannot be written: {error.strerror}",
                hint="free some disk space, which the run needs too, "
                f"or end the run with `trainkit cancel {run.quoted}`",
            ) from error
        return entry

    def start_group(self, group: RunGroup) -> str:
        argv = module_argv("trainkit.backends.local.group", str(group.path))
        before, has_ended = group.record.process, False
        child = _start_process(argv, group.process_log, group.record.cwd)
        try:
            while not has_ended:
                has_ended = child.poll() is not None
                process = RunGroup(group.path).record.process
                if process is not None and process.pid == child.pid and process != before:
                    return f"local-{child.pid}"
                time.sleep(self.poll_s)
            message = f"the process of {group.shown} ended with exit code {child.returncode}"
            raise TrainkitError(message, hint=f"its output: {group.process_log.read_text(errors='replace')}")
        except BaseException:
            child.kill()
            if before is None and not any(group.run(index).path.exists() for index in group.trials):
                shutil.rmtree(group.path, ignore_errors=True)
            raise

    def _supervisor(self, attempt: AttemptDir, new: NewAttempt) -> int:
        """Start an attempt's supervisor in the folder of the submission; return its pid."""
        now = ("--now",) if new.now or new.foreground else ()
        options = ("--attempt", str(attempt.number), *now)
        argv = module_argv("trainkit.job.supervisor", str(attempt.run.path), *options)
        trial = group_of(attempt.run)
        environ = {SUBMITTED_VARIABLE: submitted_hash(new.config_text, json.loads(new.plan_text))}
        environ |= {} if trial is None else {"SLURM_ARRAY_TASK_ID": str(trial[1])}
        if new.foreground and os.isatty(0):
            from trainkit.job.rank_env import TERMINAL_VARIABLE  # a dry run does not need rank_env

            environ[TERMINAL_VARIABLE] = os.ttyname(0)
        log, cwd = attempt.supervisor_log, new.job.cwd
        return _start_process(argv, log, cwd, environ, foreground=new.foreground).pid

    def stays_here(self, entry: AttemptRecord) -> str | None:
        if os.uname().nodename != entry.host and boot_id() != entry.boot_id:
            return None
        return "local: the run was on this machine; --backend sbatch submits it to Slurm"

    def alive(self, run: RunDir, entry: AttemptRecord) -> bool | None:
        return is_alive(run, entry)

    def status(
        self, run: RunDir, entry: AttemptRecord, waiting: Sequence[str], jobs: Mapping[str, JobInfo] | None
    ) -> JobStatus:
        return JobStatus(self.alive(run, entry))

    def live_entry(self, run: RunDir, job: JobRecord, command: str) -> AttemptRecord | None:
        entry = job.attempts[-1]
        if is_over(run.attempt(entry.attempt)):
            # The supervisor is about to exit and ignores signals.
            self.wait_until_gone(run, entry, SUPERVISOR_EXIT_S)
        alive = self.alive(run, entry)
        if alive is None:
            raise UsageError(
                f"cannot tell from here whether {run.shown} is running: it was started on {entry.host}",
                hint=f"run `trainkit {command} {quote(str(run.path))}` on that host; if that host is gone "
                f"for good, `trainkit resume {run.quoted} --as DIR` continues the run in a new folder",
            )
        return entry if alive else None

    def signal(self, run: RunDir, entry: AttemptRecord, number: signal.Signals) -> str:
        from trainkit.run.history import Attempt, attempts_of  # a dry run does not need run.history

        events = read_events(run, "waiting", "started", attempt=entry.attempt)
        waits = attempts_of(events).get(entry.attempt, Attempt(0)).waits_for is not None
        if waits and number == signal.SIGUSR2:
            return "waiting"
        if entry.pid is not None and entry.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(entry.pid, number)
        return "cancelled" if waits and self.wait_until_gone(run, entry, SUPERVISOR_EXIT_S) else "signalled"

    def kill(self, run: RunDir, entry: AttemptRecord) -> None:
        assert entry.pid is not None, entry
        signal_all((entry.pid, *descendants(entry.pid)), signal.SIGKILL)
        if not self.wait_until_gone(run, entry, KILL_TIMEOUT_S):
            raise TrainkitError(
                f"{entry.job_id} did not exit within {KILL_TIMEOUT_S:g} s of SIGKILL",
                hint=f"`ps -o pid,stat,wchan {entry.pid}` shows what the process is waiting for",
            )
        try:
            write_cancelled(run, entry, KILLED)
        except OSError as error:
            raise TrainkitError(
                f"{entry.job_id} was killed, but its end could not be recorded ({error})",
                hint="free up disk space; until the run is resumed, `trainkit status` shows it as 'died'",
            ) from None


def _start_process(
    argv: Sequence[str],
    output: Path,
    cwd: str | None,
    environ: Mapping[str, str] | None = None,
    *,
    foreground: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a process that outlives the terminal or, with `foreground`, exits when this process exits."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(OWN_PREFIX)}
    with output.open("ab") as log:
        return subprocess.Popen(
            argv,
            # Only the foreground command reads from a terminal. Any other stdin, such as a pipe, is passed on
            # to rank 0.
            stdin=0 if foreground and not os.isatty(0) else subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**inherited, **(environ or {})},
            cwd=cwd if cwd is not None and Path(cwd).is_dir() else None,
            start_new_session=True,
            preexec_fn=dies_with(os.getpid(), signal.SIGTERM) if foreground else None,
        )
