"""Runs `trainkit run` in the tasks of a Slurm step, or in ranks started by a launcher such as torchrun.

Each of these processes acts as an agent. The processes share only the filesystem. Therefore, the first
process announces the run in a file whose name every process can derive. In a Slurm step, the announcement
file is ``runs/.steps/JOB.STEP.RESTART.PORT.json`` in the working directory. The name of this file is unique
to this start of the step. Outside of Slurm, the announcement file is ``runs/.steps/ADDRESS.PORT.json``, which
is valid while rank 0 is running.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from trainkit.errors import EXIT_FAILED, EXIT_INTERRUPTED, TrainkitError
from trainkit.folders import ensure_folder
from trainkit.job import processes
from trainkit.job.attempt import Attempt, AttemptCapabilities
from trainkit.job.attempt_end import judge, write_end
from trainkit.job.decision import Decision, RestartOptions
from trainkit.job.hangs import read_hangs
from trainkit.job.node import agent
from trainkit.job.node.rendezvous import RENDEZVOUS_TIMEOUT_S, Task, recorded_notices
from trainkit.job.outcome import NOT_RUN, only_observed, outcome_of
from trainkit.job.signals import AGENT_SIGNAL
from trainkit.plan.launch import LaunchPlan
from trainkit.run.files import refresh_listing, wait_for_json, write_json_in_place
from trainkit.run.rundir import AttemptDir, RunDir, is_supervised

STARTS_S = 30.0
"""Seconds that the first task waits, before it exits, for tasks that have not started their ranks yet."""
STARTS_POLL_S = 0.1
NO_RESTART = RestartOptions(unavailable_reason="an interactive step is not restarted")


def announcement_file(folder: Path, task: Task) -> Path:
    """Return the file that the first task writes to announce the attempt."""
    return folder / ".steps" / f"{task.key}.json"


def announce(folder: Path, task: Task, found: AttemptDir | int) -> None:
    """Announce an attempt to the other tasks or, if the run could not start, the exit code."""
    file = announcement_file(folder, task)
    ensure_folder(file.parent, parents=True)
    if isinstance(found, int):
        write_json_in_place(file, {"exit_code": found})
    else:
        write_json_in_place(file, {"run_dir": str(found.run.path), "attempt": found.number})


def withdraw(folder: Path, task: Task) -> None:
    """Remove the announcement when the run ends."""
    announcement_file(folder, task).unlink(missing_ok=True)


def await_starts(attempt: AttemptDir, plan: LaunchPlan) -> None:
    """Wait until all tasks have started their ranks or one has failed; called before `withdraw`.

    If the announcement were withdrawn earlier, some tasks might not have read it yet.
    """
    deadline_s = time.monotonic() + STARTS_S
    firsts = map(plan.first_rank_of, range(plan.num_nodes))
    logs = [
        attempt.rank_log(rank) for rank in (firsts if plan.workload.has_launcher else range(plan.world_size))
    ]
    while not (all(log.exists() for log in logs) or any(attempt.errors_dir.glob("rank-*.json"))):
        if time.monotonic() > deadline_s:
            return
        time.sleep(STARTS_POLL_S)
        refresh_listing(logs[0].parent)


def await_announcement(folder: Path, task: Task, timeout_s: float = RENDEZVOUS_TIMEOUT_S) -> AttemptDir | int:
    """Wait for the first task's announcement; return the attempt, or the exit code for all tasks.

    A launcher may reuse the address of an earlier start, so an announced attempt is valid only while its rank
    0 is running. Raises TrainkitError after the timeout.
    """
    file = announcement_file(folder, task)
    try:
        ensure_folder(file.parent, parents=True)
        value = wait_for_json(
            file,
            timeout_s,
            accept=lambda value: task.has_scheduler or is_supervised(RunDir(value["run_dir"])),
            creates=True,
        )
    except TimeoutError:
        raise TrainkitError(
            f"{task.first} has not announced its run within {timeout_s:g} s",
            hint=f"start all processes in the same folder, shared by all nodes; {file} announces no run",
        ) from None
    except OSError as error:
        raise TrainkitError(
            f"cannot wait for {task.first} at {folder}: {error.strerror or error}",
            hint="start all processes in the same folder, which must be writable and shared by all nodes",
        ) from error
    if "exit_code" in value:
        return int(value["exit_code"])
    return RunDir(value["run_dir"]).attempt(int(value["attempt"]))


def run_task(attempt: AttemptDir, task: Task) -> int:
    """Run this task's agent; return the combined exit code of the agent's workers."""
    processes.block_signals(AGENT_SIGNAL)
    if not task.has_scheduler:
        # torchrun forwards SIGHUP when its terminal is closed.
        signal.signal(signal.SIGHUP, lambda number, frame: os.kill(os.getpid(), signal.SIGTERM))
    return agent.run_task(attempt, task)


def run_first_task(
    attempt: AttemptDir,
    plan: LaunchPlan,
    task: Task,
    show: Callable[[AttemptDir, threading.Event], None],
) -> Decision:
    """Run the first task's agent, print the output of rank 0, and record how the attempt ended.

    `show` runs in a thread and prints the output until the event passed to it is set.
    """
    ended = threading.Event()
    processes.block_signals(AGENT_SIGNAL)
    printer = threading.Thread(target=show, args=(attempt, ended), name="show-rank-0")
    printer.start()
    live = Attempt(attempt, plan)
    observed = live.observed
    try:
        observed.exits.append((0, run_task(attempt, task)))
        observed.hangs, observed.stop_signal = read_hangs(attempt), _stop_signal(attempt)
        live.outcome = outcome_of(attempt, plan, observed)
        live.update()
        decision = judge(live, NO_RESTART)
    except (OSError, ValueError, TrainkitError) as error:
        if live.outcome is NOT_RUN:
            live.outcome = only_observed(observed)
        decision = Decision("failed", f"{type(error).__name__}: {error}", EXIT_FAILED)
    ended.set()
    printer.join()
    capabilities = AttemptCapabilities(attempt, plan)
    live.update()
    capabilities.end(write_end(attempt, live.entry, live.outcome, decision))
    capabilities.close()
    return decision


def exit_code_of(attempt: AttemptDir, code: int) -> int:
    """Return a task's exit code: 130 after Ctrl-C, else `code`."""
    return EXIT_INTERRUPTED if _stop_signal(attempt) == signal.SIGINT.name else code


def _stop_signal(attempt: AttemptDir) -> str | None:
    return next((received.name for received in recorded_notices(attempt)), None)
