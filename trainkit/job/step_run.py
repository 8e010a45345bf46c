"""`trainkit run` as the tasks of a Slurm step: the first task creates the run, and every task is an agent.

The tasks share only the filesystem, so the first one announces the run in a file whose name is unique to this
start of the step: ``runs/.steps/JOB.STEP.RESTART.PORT.json`` below the working directory.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainkit.errors import EXIT_FAILED, EXIT_INTERRUPTED, TrainkitError
from trainkit.folders import ensure_folder
from trainkit.job import processes
from trainkit.job.attempt_end import judge, write_end
from trainkit.job.decision import Decision, Outcome, RestartOptions
from trainkit.job.hangs import read_hangs
from trainkit.job.node.agent import run_slurm_task
from trainkit.job.node.slurm_step import SlurmTask
from trainkit.job.notifications import notify_end
from trainkit.job.rank_env import ATTEMPT_VARIABLE
from trainkit.plan.launch import LaunchPlan
from trainkit.run.events import read_events
from trainkit.run.files import wait_for_json, write_json_in_place
from trainkit.run.rundir import AttemptDir, RunDir

ANNOUNCE_TIMEOUT_S = 300.0
NO_RESTART = RestartOptions(unavailable_reason="an interactive step is not restarted")


@dataclass(frozen=True)
class Announcement:
    """The attempt that the tasks of a step run."""

    run: RunDir
    attempt: int


def announcement_file(folder: Path, task: SlurmTask) -> Path:
    """The file in which the first task of a step announces the attempt that all tasks run."""
    return folder / ".steps" / f"{task.key}.json"


def announce(folder: Path, task: SlurmTask, found: Announcement | int) -> None:
    """Announce an attempt to the other tasks, or the exit code of a failed start."""
    file = announcement_file(folder, task)
    ensure_folder(file.parent, parents=True)
    attempt = {} if isinstance(found, int) else {"run_dir": str(found.run.path), "attempt": found.attempt}
    write_json_in_place(file, attempt or {"exit_code": found})


def withdraw(folder: Path, task: SlurmTask) -> None:
    """Remove the announcement after the step."""
    announcement_file(folder, task).unlink(missing_ok=True)


def await_announcement(
    folder: Path, task: SlurmTask, timeout_s: float = ANNOUNCE_TIMEOUT_S
) -> Announcement | int:
    """Wait for the announcement of the first task: an attempt, or the exit code that all tasks return.

    Raises TrainkitError after the timeout.
    """
    file = announcement_file(folder, task)
    try:
        ensure_folder(file.parent, parents=True)
        value = wait_for_json(file, timeout_s, creates=True)
    except TimeoutError:
        raise TrainkitError(
            f"task 0 of step {task.job_id}.{task.step_id} has not announced its run within {timeout_s:g} s",
            hint=f"all tasks must start in the same folder, shared by all nodes; {file} is missing",
        ) from None
    if "exit_code" in value:
        return int(value["exit_code"])
    return Announcement(RunDir(value["run_dir"]), int(value["attempt"]))


def run_task(found: Announcement) -> int:
    """Run one agent of the attempt; returns the combined exit code of its workers."""
    processes.block_signals()
    os.environ[ATTEMPT_VARIABLE] = str(found.attempt)
    return run_slurm_task(found.run, found.attempt)


def run_first_task(found: Announcement, show: Callable[[AttemptDir, threading.Event], None]) -> Decision:
    """Run the first agent, which also prints rank 0's output and records how the attempt ended.

    `show` prints the output in a thread until its event is set.
    """
    attempt = found.run.attempt(found.attempt)
    ended = threading.Event()
    processes.block_signals()
    printer = threading.Thread(target=show, args=(attempt, ended), name="show-rank-0")
    printer.start()
    outcome = Outcome()
    try:
        code = run_task(found)
        outcome.exits.append((0, code))
        outcome.hangs = read_hangs(attempt)
        outcome.stop_signal = _stop_signal(attempt)
        decision = judge(attempt, LaunchPlan.read(attempt.plan_file), outcome, NO_RESTART)
    except (OSError, ValueError, TrainkitError) as error:
        decision = Decision("failed", f"{type(error).__name__}: {error}", EXIT_FAILED)
    ended.set()
    printer.join()
    notify_end(attempt, write_end(attempt, outcome, decision))
    return decision


def exit_code_of(decision: Decision, attempt: AttemptDir) -> int:
    """The exit code of the task: 130 after Ctrl-C, else that of the decision."""
    return EXIT_INTERRUPTED if _stop_signal(attempt) == signal.SIGINT.name else decision.exit_code


def _stop_signal(attempt: AttemptDir) -> str | None:
    first = next(read_events(attempt.run, "signal", attempt=attempt.number), None)
    return None if first is None else first.text("signal")
