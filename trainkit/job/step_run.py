"""`trainkit run` as the tasks of a Slurm step: the first makes the run, all are agents of it.

The tasks share nothing but the filesystem, so the first tells the others by a file whose name only this
start of this step has: ``runs/.steps/JOB.STEP.RESTART.PORT.json`` below the working directory.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit.errors import EXIT_FAILED, EXIT_INTERRUPTED, TrainkitError
from trainkit.job import processes
from trainkit.job.decision import Decision, RestartOptions
from trainkit.job.ending import judge, write_end
from trainkit.job.node.agent import run_slurm_task
from trainkit.job.node.slurm_step import SlurmPlace
from trainkit.job.node.worker_env import ATTEMPT_VARIABLE
from trainkit.job.outcome import Outcome
from trainkit.job.watch.hangs import read_hangs
from trainkit.rundir import AttemptDir, RunDir, read_json, read_jsonl, write_json

ANNOUNCE_TIMEOUT_S = 300.0
NO_WAY_BACK = RestartOptions(why_not="nobody starts an interactive step again")
POLL_S = 0.05


@dataclass(frozen=True)
class Announced:
    """The attempt that the tasks of a step carry."""

    run: RunDir
    attempt: int


def announcement_file(folder: Path, place: SlurmPlace) -> Path:
    """Where the first task of a step tells the others what they run."""
    return folder / ".steps" / f"{place.key}.json"


def announce(folder: Path, place: SlurmPlace, value: dict[str, Any]) -> None:
    """Tell the other tasks: ``run_dir`` and ``attempt``, or the ``exit_code`` of a start that failed."""
    file = announcement_file(folder, place)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, value)


def withdraw(folder: Path, place: SlurmPlace) -> None:
    """Remove the announcement when the step has ended."""
    announcement_file(folder, place).unlink(missing_ok=True)


def await_announcement(
    folder: Path, place: SlurmPlace, timeout_s: float = ANNOUNCE_TIMEOUT_S
) -> Announced | int:
    """What the first task has announced: an attempt, or the exit code with which all end.

    Raises TrainkitError when it says nothing.
    """
    file = announcement_file(folder, place)
    deadline_s = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(OSError):
            # Listing the folder makes a network filesystem look again for a file that was not there.
            if file in list(file.parent.iterdir()):
                value = read_json(file)
                if "exit_code" in value:
                    return int(value["exit_code"])
                return Announced(RunDir(value["run_dir"]), int(value["attempt"]))
        if time.monotonic() > deadline_s:
            raise TrainkitError(
                f"task 0 of step {place.job_id}.{place.step_id} has not said in {timeout_s:g} s what to run",
                hint=f"all tasks must start in one folder that all nodes share; {file} was not there",
            )
        time.sleep(POLL_S)


def carry(found: Announced) -> int:
    """Be one agent of the attempt; the exit code of its workers."""
    processes.block_signals()
    os.environ[ATTEMPT_VARIABLE] = str(found.attempt)
    return run_slurm_task(found.run, found.attempt)


def carry_first(found: Announced, show: Callable[[AttemptDir, threading.Event], None]) -> Decision:
    """Be the first agent, which also shows what rank 0 prints and writes how the attempt ended.

    `show` prints until its event is set, in a thread of its own.
    """
    attempt = found.run.attempt(found.attempt)
    ended = threading.Event()
    processes.block_signals()
    shower = threading.Thread(target=show, args=(attempt, ended), name="show-rank-0")
    shower.start()
    outcome = Outcome()
    try:
        code = carry(found)
        outcome.ends.append((0, code))
        outcome.hangs = read_hangs(attempt)
        outcome.request = _request(attempt)
        decision = judge(attempt, outcome, NO_WAY_BACK)
    except (OSError, ValueError, TrainkitError) as error:
        decision = Decision("failed", f"{type(error).__name__}: {error}", EXIT_FAILED)
    ended.set()
    shower.join()
    write_end(attempt, outcome, decision)
    return decision


def exit_code_of(decision: Decision, attempt: AttemptDir) -> int:
    """What the task ends with: 130 after Ctrl-C, as any program."""
    return EXIT_INTERRUPTED if _request(attempt) == signal.SIGINT.name else decision.exit_code


def _request(attempt: AttemptDir) -> str | None:
    names = [
        event.get("signal")
        for event in read_jsonl(attempt.run.events_file)
        if event.get("event") == "signal" and event.get("attempt") == attempt.number
    ]
    return str(names[0]) if names else None
