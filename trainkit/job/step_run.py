"""`trainkit run` as the tasks of a Slurm step or on several hosts: each is an agent.

They share only the filesystem, so the first one announces the run in a file whose name they all know:
``runs/.steps/JOB.STEP.RESTART.PORT.json`` below the working directory, unique to this start of the step, or
``.steps/ADDRESS.PORT.json`` next to the run folder, which counts while the first host is there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from shlex import quote
from typing import Any

from trainkit import __version__
from trainkit.errors import EXIT_FAILED, EXIT_INTERRUPTED, TrainkitError
from trainkit.folders import ensure_folder
from trainkit.job import processes
from trainkit.job.attempt import Attempt
from trainkit.job.attempt_capabilities import AttemptCapabilities
from trainkit.job.attempt_end import judge, write_end
from trainkit.job.decision import Decision, RestartOptions
from trainkit.job.hangs import read_hangs
from trainkit.job.node.agent import run_node, run_step_task
from trainkit.job.node.host_rendezvous import await_exits, lost_host, pause_for_notice, record_exit
from trainkit.job.node.rendezvous import RENDEZVOUS_TIMEOUT_S, HostPlace, Task, recorded_notices
from trainkit.job.outcome import only_observed, outcome_of
from trainkit.job.signals import AGENT_SIGNAL
from trainkit.plan.launch import LaunchPlan
from trainkit.run.end import read_end
from trainkit.run.files import refresh_listing, wait_for_json, write_json_in_place
from trainkit.run.rundir import AttemptDir, RunDir, is_supervised, is_there

STARTS_S = 30.0
"""How long the first task waits at its end for tasks that have not started their ranks."""
STARTS_POLL_S = 0.1
NO_RESTART = RestartOptions(unavailable_reason="an interactive step is not restarted")


def announcement_file(folder: Path, task: Task | HostPlace) -> Path:
    """The file in which the first task or host announces the attempt."""
    return folder / ".steps" / f"{task.key}.json"


def announce(folder: Path, task: Task | HostPlace, found: AttemptDir | int) -> None:
    """Announce an attempt to the others, or the exit code of a failed start."""
    file = announcement_file(folder, task)
    ensure_folder(file.parent, parents=True)
    if isinstance(found, int):
        write_json_in_place(file, {"exit_code": found})
    else:
        record = {"run_dir": str(found.run.path), "attempt": found.number, "trainkit": __version__}
        write_json_in_place(file, record)


def withdraw(folder: Path, task: Task | HostPlace) -> None:
    """Remove the announcement at the end."""
    announcement_file(folder, task).unlink(missing_ok=True)


def await_starts(attempt: AttemptDir, plan: LaunchPlan) -> None:
    """Wait until every task has started its ranks, or one has failed, before the announcement is withdrawn.

    The command of the first task may have ended before another one looks for the announcement.
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
    """Wait for the announcement of the first task: an attempt, or the exit code that all tasks return.

    Raises TrainkitError after the timeout.
    """
    value = _await(folder, task, timeout_s, lambda value: True)
    if "exit_code" in value:
        return int(value["exit_code"])
    return RunDir(value["run_dir"]).attempt(int(value["attempt"]))


def await_first_host(folder: Path, place: HostPlace, named: str | None) -> tuple[AttemptDir, str]:
    """Wait until the first host announces an attempt; returns it and that host's version of trainkit.

    It must be of a run in `folder`, which is `named` so if it has a name, and of a host that has not ended.
    Raises TrainkitError after the timeout.
    """

    def announced(value: Any) -> RunDir:
        return RunDir(folder / Path(os.path.normpath(value["run_dir"])).name)

    def counts(value: Any) -> bool:
        return named in (None, announced(value).path.name) and is_supervised(announced(value))

    value = _await(folder, place, RENDEZVOUS_TIMEOUT_S, counts)
    return announced(value).attempt(int(value["attempt"])), str(value["trainkit"])


def _await(folder: Path, task: Task | HostPlace, timeout_s: float, accept: Callable[[Any], bool]) -> Any:
    file = announcement_file(folder, task)
    try:
        ensure_folder(file.parent, parents=True)
        return wait_for_json(file, timeout_s, accept=accept, creates=True)
    except TimeoutError:
        raise TrainkitError(
            f"{task.first} has not announced its run within {timeout_s:g} s",
            hint=f"all must start in the same folder, shared by all nodes; {file} has no run",
        ) from None
    except OSError as error:
        raise TrainkitError(
            f"cannot wait for {task.first} at {folder}: {error.strerror or error}",
            hint="all must start in the same folder, shared by all nodes and writable",
        ) from error


def run_task(attempt: AttemptDir) -> int:
    """Run one agent of the attempt; returns the combined exit code of its workers."""
    processes.block_signals(AGENT_SIGNAL)
    return run_step_task(attempt.run, attempt.number)


def run_host(attempt: AttemptDir, plan: LaunchPlan, place: HostPlace) -> int:
    """Run the agent of this host with its own plan; returns the combined exit code of its workers."""
    processes.block_signals(AGENT_SIGNAL)
    # A closed terminal ends the run like SIGTERM.
    signal.signal(signal.SIGHUP, lambda number, frame: os.kill(os.getpid(), signal.SIGTERM))
    code = run_node(attempt, plan, place)
    with contextlib.suppress(OSError):  # without the record it counts as lost
        record_exit(attempt, place.node_rank, code)
    return code


def await_end(attempt: AttemptDir, place: HostPlace) -> None:
    """Wait until the first host has recorded how the attempt ended; raises TrainkitError when it is lost."""
    while read_end(attempt) is None:
        if not is_there(attempt, 0):
            refresh_listing(attempt.path)
            if read_end(attempt) is None:
                raise TrainkitError(
                    f"{place.first} is lost, so the attempt has ended here too",
                    hint=f"`trainkit resume {quote(str(attempt.run.path))}` with the same options on every "
                    "host continues the run",
                )
        pause_for_notice(attempt, place)


def run_first_task(
    attempt: AttemptDir,
    plan: LaunchPlan,
    show: Callable[[AttemptDir, threading.Event], None],
    place: HostPlace | None = None,
) -> Decision:
    """Run the first agent, which also prints rank 0's output and records how the attempt ended.

    `show` prints the output in a thread until its event is set. `place` is that of the first of several hosts
    without Slurm.
    """
    ended = threading.Event()
    processes.block_signals(AGENT_SIGNAL)
    printer = threading.Thread(target=show, args=(attempt, ended), name="show-rank-0")
    printer.start()
    live, lost = Attempt(attempt, plan), tuple[str, ...]()
    observed = live.observed
    try:
        code = run_task(attempt) if place is None else run_host(attempt, plan, place)
        observed.exits.append((0, code))
        if place is not None:
            observed.exits += await_exits(attempt, place, code)
            lost = tuple(filter(None, (lost_host(attempt, node) for node in place.others)))
        observed.hangs, observed.stop_signal = read_hangs(attempt), _stop_signal(attempt)
        live.outcome = outcome_of(attempt, plan, observed, lost_nodes=lost)
        live.update()
        decision = judge(live, NO_RESTART)
    except (OSError, ValueError, TrainkitError) as error:
        live.outcome = only_observed(observed)
        decision = Decision("failed", f"{type(error).__name__}: {error}", EXIT_FAILED)
    ended.set()
    printer.join()
    capabilities = AttemptCapabilities(attempt, plan)
    capabilities.end(write_end(attempt, live.outcome, decision))
    capabilities.close()
    return decision


def exit_code_of(attempt: AttemptDir, code: int) -> int:
    """The exit code of the task or host: 130 after Ctrl-C, else `code`."""
    return EXIT_INTERRUPTED if _stop_signal(attempt) == signal.SIGINT.name else code


def _stop_signal(attempt: AttemptDir) -> str | None:
    return next((received.name for received, _ in recorded_notices(attempt)), None)
