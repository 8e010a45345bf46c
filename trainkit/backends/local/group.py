"""The process for a group on this machine: starts unfinished runs, at most `RunGroup.limit` at a time.

The command line is ``python -m trainkit.backends.local.group GROUP_DIR``.

Each run has its own supervisor, which outlives this process and waits for free GPUs. If the group's process
dies, for example because the machine reboots, another process can resume the group. The new process does not
touch runs that are still running.
"""

from __future__ import annotations

import json
import os
import sys
import time

from trainkit.backend import SUPERVISOR_EXIT_S, NewAttempt, backend_named
from trainkit.errors import EXIT_FAILED, EXIT_OK, TrainkitError, replace_unencodable
from trainkit.folders import whole_paths
from trainkit.locks import LockBusy, acquire_lock
from trainkit.plan.launch import LaunchPlan
from trainkit.run.end import read_newest_end
from trainkit.run.files import utc_now
from trainkit.run.group import RunGroup, create_trial_run
from trainkit.run.process import ProcessId
from trainkit.run.record import JobRecord, is_alive, read_job
from trainkit.run.rundir import RunDir, run_lock
from trainkit.trust import read_trusted

POLL_S = 0.5


def run_trials(group: RunGroup) -> None:
    """Start the runs in a group in order, and wait until all have ended, even if some fail."""
    began, running = utc_now(), list[RunDir]()
    for index in sorted(group.trials):
        while len(running := [run for run in running if _is_active(run)]) >= group.limit:
            time.sleep(POLL_S)
        run = group.run(index)
        try:
            _start(group, index, began)
        except (OSError, ValueError, TrainkitError) as error:
            print(f"run {index} cannot be started: {error}", flush=True)
        running.append(run)
    while any(map(_is_active, running)):
        time.sleep(POLL_S)


def _is_active(run: RunDir) -> bool:
    return _read_active(run)[1]


def _read_active(run: RunDir) -> tuple[JobRecord, bool]:
    """Return a run's job.json, and whether the run is alive.

    If the run's state cannot be determined on this host, the run is considered alive, so that it is not
    started twice.
    """
    job = read_job(run)
    return job, job.newest is not None and is_alive(run, job.newest) is not False


def _start(group: RunGroup, index: int, began: str) -> None:
    """Start the next attempt of an unfinished trial, using the trial's current config and plan."""
    run = group.run(index)
    if not run.config_file.is_file():
        create_trial_run(group, group.trial(index))
    with run_lock(run):
        job, is_active = _read_active(run)
        if is_active:
            return
        # Read end.json only after checking that the run is not alive, because a supervisor writes end.json
        # before it exits.
        end = read_newest_end(run.path)
        # A user may also have cancelled the run since this process began.
        if end is not None and (end.state == "finished" or (end.time or "") >= began):
            return
        config, plan = map(read_trusted, (run.config_file, run.plan_file))
        reason = "resume" if run.attempt_numbers() else "submit"
        new = NewAttempt(config, plan, LaunchPlan.from_dict(json.loads(plan)), reason, job)
        entry = backend_named("local").start(run, new)
    print(f"run {index}: attempt {entry.attempt} as {entry.job_id}", flush=True)


@whole_paths()
def main() -> int:
    """Run the group given on the command line; return the process's exit code."""
    replace_unencodable()
    group = RunGroup(sys.argv[1])
    try:
        acquire_lock(
            group.supervisor_lock_file, SUPERVISOR_EXIT_S
        )  # this process holds the lock on the group until it exits
    except LockBusy as busy:
        print(f"error: {busy}", flush=True)
        return EXIT_FAILED
    # The command that started this process waits until this process id is written.
    group.update(process=ProcessId.of(os.getpid()))
    run_trials(group)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
