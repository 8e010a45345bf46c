"""The process of a group on this machine: starts the runs that have not finished, `RunGroup.limit` at once.

``python -m trainkit.backends.local.group GROUP_DIR``

Every run has a supervisor of its own, which survives this process and waits for free GPUs. A group whose
process has died, as with its machine, is resumed by another one, which leaves the runs alone that still run.
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
    """Start the runs of a group in their order, until all have ended; a run that fails does not end it."""
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
    """The job.json of a run, and whether it is alive: what this host cannot tell counts as alive.

    Else it could run twice.
    """
    job = read_job(run)
    return job, job.newest is not None and is_alive(run, job.newest) is not False


def _start(group: RunGroup, index: int, began: str) -> None:
    """Start the next attempt of a run that is left, with the config and plan that it has, or had last."""
    run = group.run(index)
    if not run.config_file.is_file():
        create_trial_run(group, group.trial(index))
    with run_lock(run):
        job, is_active = _read_active(run)
        if is_active:
            return
        end = read_newest_end(run.path)  # after that: its supervisor writes it and exits
        # It may also have been ended on purpose since this process began.
        if end is not None and (end.state == "finished" or (end.time or "") >= began):
            return
        config, plan = map(read_trusted, (run.config_file, run.plan_file))
        reason = "resume" if run.attempt_numbers() else "submit"
        new = NewAttempt(config, plan, LaunchPlan.from_dict(json.loads(plan)), reason, job)
        entry = backend_named("local").start(run, new)
    print(f"run {index}: attempt {entry.attempt} as {entry.job_id}", flush=True)


@whole_paths()
def main() -> int:
    """Run the group that the command line names; returns the exit code."""
    replace_unencodable()
    group = RunGroup(sys.argv[1])
    try:
        acquire_lock(group.supervisor_lock_file, SUPERVISOR_EXIT_S)  # held until this process exits
    except LockBusy as busy:
        print(f"error: {busy}", flush=True)
        return EXIT_FAILED
    group.update(process=ProcessId.of(os.getpid()))  # the command that started it waits for this
    run_trials(group)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
