"""Starts and steers the supervisor of a run on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from trainkit.control.run_registry import register
from trainkit.errors import TrainkitError, UsageError
from trainkit.job.processes import descendants, dies_with, module_argv
from trainkit.job.record import (
    KILLED,
    Liveness,
    add_entry,
    is_exiting,
    liveness,
    newest_entry,
    open_attempt,
    read_job,
)
from trainkit.job.signals import NOTICE_SIGNALS
from trainkit.rundir import RunDir, log_event, utc_now, write_json

LEAVING_S = 10.0
"""How long a supervisor that has written how its job ended may take to exit."""


def start_attempt(
    run: RunDir, config_text: str, plan_text: str, reason: str, foreground: bool = False
) -> dict[str, Any]:
    """Start a run's next attempt and give its job.json entry; call with the run's lock held.

    Detached, it goes on when the terminal closes. In the foreground it saves and ends when this process dies.
    `reason` is one of ``submit run requeue resume``.
    """
    attempt = open_attempt(run, config_text, plan_text)
    argv = module_argv("trainkit.job.supervisor", str(run.path), "--attempt", str(attempt.number))
    job = read_job(run)
    # A stop signal that comes while the supervisor's interpreter starts waits for it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, NOTICE_SIGNALS)
    try:
        with attempt.supervisor_log.open("ab") as log:
            supervisor = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=_working_dir(job),
                start_new_session=True,
                preexec_fn=dies_with(os.getpid(), signal.SIGTERM) if foreground else None,
            )
        entry = add_entry(run, attempt.number, supervisor.pid, reason)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    log_event(run, attempt.number, "submitted", job_id=entry["job_id"], reason=reason)
    register(run, str(job["name"]))
    return entry


def _working_dir(job: dict[str, Any]) -> str:
    """Where the run was submitted, so that a resume from elsewhere sees the same relative paths."""
    cwd = job.get("cwd")
    return cwd if isinstance(cwd, str) and Path(cwd).is_dir() else str(Path.cwd())


def live_entry(run: RunDir, what: str) -> dict[str, Any] | None:
    """The newest attempt's entry when its supervisor is alive, None when it has ended.

    Raises UsageError when this host cannot know; `what` is the command that needs to.
    """
    entry = newest_entry(run)
    if entry is None:
        return None
    if is_exiting(run, entry):
        wait_until_gone(entry, LEAVING_S)  # all that is left to it is to exit; a signal would be lost
    state = liveness(entry)
    if state is Liveness.UNKNOWN:
        raise UsageError(
            f"cannot know from here whether {run.path} is running: it was started on {entry.get('host')}",
            hint=f"type `trainkit {what} {run.path}` on that host",
        )
    return entry if state is Liveness.ALIVE else None


def send(entry: dict[str, Any], number: signal.Signals) -> None:
    """Send a signal to a supervisor, unless it has just ended."""
    if liveness(entry) is Liveness.ALIVE:
        with contextlib.suppress(ProcessLookupError):
            os.kill(entry["pid"], number)


def wait_until_gone(entry: dict[str, Any], timeout_s: float) -> bool:
    """Whether the supervisor has ended within the time."""
    deadline_s = time.monotonic() + timeout_s
    while liveness(entry) is Liveness.ALIVE:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)
    return True


def kill_job(run: RunDir, entry: dict[str, Any]) -> None:
    """SIGKILL for the supervisor and everything below it, and the end.json that it can no longer write."""
    below = descendants(entry["pid"])
    for pid in (entry["pid"], *below):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if not wait_until_gone(entry, 10.0):
        raise TrainkitError(
            f"{entry['job_id']} does not end although it was sent SIGKILL",
            hint=f"`ps -o pid,stat,wchan {entry['pid']}` shows what it waits for",
        )
    end = {
        "state": "cancelled",
        "action": "stopped",
        "exit_code": 137,
        "reason": KILLED,
        "verdict": None,
        "time": utc_now(),
    }
    try:
        write_json(run.attempt(entry["attempt"]).end_file, end)
        log_event(run, entry["attempt"], "stopped", state="cancelled", exit_code=137, reason=end["reason"])
    except OSError as error:
        message = f"{entry['job_id']} is killed, which could not be written down ({error})"
        raise TrainkitError(message) from None
