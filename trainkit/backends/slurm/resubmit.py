"""Continues a run in another job: resubmits the run, excludes bad hosts and finds lost hosts.

``python -m trainkit.backends.slurm.resubmit`` runs as a step on another host and monitors the batch host,
where the batch shell runs. A job with spare nodes uses ``--no-kill``, so if the batch host dies along with
the supervisor, Slurm does not requeue the job. Without the monitor, the job's other hosts would be idle until
the time limit.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from trainkit.backends.slurm.step import slurm_job_id
from trainkit.errors import EXIT_OK, TrainkitError, replace_unencodable
from trainkit.job import processes
from trainkit.job.processes import log_line, module_argv, retry_on_disk_error
from trainkit.plan.launch import LaunchPlan, SlurmRequest, option_argv, with_excluded
from trainkit.run.events import log_event
from trainkit.run.files import write_atomic
from trainkit.run.record import (
    AUTO_RESTART,
    add_slurm_attempt,
    copy_submitit_pickle,
    discard_attempt,
    record_of,
    reopen_attempt,
)
from trainkit.run.rundir import AttemptDir, RunDir, run_lock, submission_token
from trainkit.scheduler import split_job
from trainkit.slurm.client import SlurmRefused, SlurmUnreachable
from trainkit.slurm.control import cancel, exclude_hosts, move_dependents, requeue
from trainkit.slurm.hosts import hosts_of_job, is_down, is_unavailable, node_states
from trainkit.slurm.jobs import job_details
from trainkit.slurm.submit import query_start, submit_script
from trainkit.trust import read_trusted

EVICTION_S = 120.0
"""Seconds that Slurm may take to terminate the batch shell of a requeued job."""
TEST_TIMEOUT_S = 20.0


def await_eviction() -> None:
    """Wait until Slurm terminates this batch shell of a requeued job, but at most EVICTION_S.

    Returns immediately on SIGTERM, because the job's next start waits for a lock that this process holds.
    """
    deadline_s = time.monotonic() + EVICTION_S
    while (remaining_s := deadline_s - time.monotonic()) > 0:
        if processes.wait_for_signal(remaining_s) == signal.SIGTERM:
            return


def resubmit(
    run: RunDir, job_id: str, exclude: Sequence[str] = (), lock_timeout_s: float | None = None
) -> str:
    """Submit the run's next attempt, using the script of the current job; return the id of the new job.

    Call this function in the current job's batch shell when the job is about to end. The new job depends on
    the current job. In an array, only the calling task is resubmitted. Excludes as many of the hosts in
    `exclude` as possible, provided that Slurm can still start the job. Raises TrainkitError if the run was
    cancelled, if its lock cannot be acquired in time, or if Slurm rejects the job. Raises OSError if the run
    folder cannot be written.
    """
    with run_lock(run, lock_timeout_s):
        newest = run.attempt(run.attempt_numbers()[-1])
        entry = record_of(newest)
        if entry.job_id not in ("", job_id):
            raise TrainkitError(f"job {entry.job_id} has taken over the run")
        if entry.is_cancelled:
            raise TrainkitError("the run was cancelled in the meantime")
        if not run.script_file.is_file():
            raise TrainkitError(f"{run.script_file}, the script of job {job_id}, is missing")
        text = read_trusted(run.script_file)
        plan = LaunchPlan.read(newest.plan_file)
        following = retry_on_disk_error(lambda: reopen_attempt(newest))
        try:
            write_atomic(following.script_file, text)
            new_id = _submit(following, job_id, plan, exclude)
        except BaseException as error:
            if not (isinstance(error, SlurmUnreachable) and error.may_have_arrived):
                discard_attempt(following)
            raise
        retry_on_disk_error(
            lambda: add_slurm_attempt(run, following.number, new_id, AUTO_RESTART, plan.backend)
        )
    log_event(run, following.number, "submitted", job_id=new_id, reason=AUTO_RESTART)
    try:
        for moved in move_dependents(job_id, new_id):
            log_line(f"job {moved} now waits for {new_id}")
    except TrainkitError as error:
        log_line(f"cannot make the chained jobs of {job_id} wait for {new_id}: {error.message}")
    return new_id


def _submit(following: AttemptDir, job_id: str, plan: LaunchPlan, exclude: Sequence[str]) -> str:
    assert plan.slurm is not None
    run, request = following.run, plan.slurm
    token = submission_token(run, following.number)
    options = [f"--comment={request.comment(token)}", f"--dependency=afterany:{job_id}"]
    _exclude(exclude, request, lambda hosts: options.append(f"--exclude={hosts}"))
    task = job_id.partition("_")[2]
    if task:
        options.append(f"--array={task}")
    new_id = submit_script(
        following.script_file, token=token, cwd=run.path, extra_argv=options, notify=log_line
    )
    new_id = split_job(new_id)[0]  # the new job runs on the same cluster as the job that it depends on
    copy_submitit_pickle(run, job_id, new_id)
    return f"{new_id}_{task}" if task else new_id


def exclude_from(job_id: str, hosts: Sequence[str], request: SlurmRequest) -> None:
    """Exclude hosts from a requeued job's next start. `request` is the job's resource request.

    A failure is only logged, because it must not prevent the requeue.
    """
    _exclude(hosts, request, lambda excluded: exclude_hosts(job_id, excluded))


def _exclude(hosts: Sequence[str], request: SlurmRequest, act: Callable[[str], None]) -> None:
    """Call `act` with the list of all hosts that can be excluded, if any; log a failure."""
    try:
        if excluded := excludable(hosts, request):
            act(str(with_excluded(request, excluded).sbatch["exclude"]))
    except TrainkitError as error:
        log_line(f"cannot exclude {', '.join(hosts)}: {error.message}")


def excludable(
    hosts: Sequence[str], request: SlurmRequest, notify: Callable[[str], None] = log_line
) -> list[str]:
    """Return as many of `hosts` as can be excluded without preventing Slurm from starting the job.

    If too many hosts were excluded, the job would stay pending forever. `notify` is called with a sentence
    about each host that cannot be excluded. Raises SlurmUnreachable if Slurm does not answer, and
    TrainkitError if `sbatch --test-only` cannot run on this host.
    """
    if not hosts or _refusal(hosts, request) is None:
        return list(hosts)
    found: list[str] = []
    for host in hosts:
        refusal = _refusal([*found, host], request)
        if refusal is None:
            found.append(host)
        else:
            notify(f"cannot exclude {host}: {refusal}")
    return found


def _refusal(hosts: Sequence[str], request: SlurmRequest) -> str | None:
    """Return why Slurm would reject the job if `hosts` were excluded, or None if it would accept the job.

    Raises SlurmUnreachable if Slurm does not answer, and TrainkitError if `sbatch --test-only` cannot run on
    this host.
    """
    options = {**with_excluded(request, hosts).sbatch, "comment": False, "dependency": False}
    try:
        query_start("#!/bin/sh\n", timeout_s=TEST_TIMEOUT_S, extra_argv=option_argv(options))
    except SlurmRefused as error:
        return error.message
    except OSError as error:
        raise TrainkitError(f"cannot run sbatch --test-only on this host: {error}") from error
    return None


def lost_hosts(job_id: str, hosts: Sequence[str], *, is_running: bool) -> tuple[str, ...] | None:
    """Return the hosts in a job that can no longer start processes, or None if Slurm does not answer.

    A host is lost if Slurm reports it as down, failed or not responding. For a running job, the result
    includes hosts that Slurm has removed from the job. For a job that is about to end, the result excludes
    removed hosts, because Slurm also removes working hosts that have finished.
    """
    if not hosts:
        return ()
    try:
        remaining, states = (hosts_of_job(job_id) if is_running else hosts), node_states(hosts)
    except TrainkitError as error:
        log_line(f"cannot query the hosts of {job_id}: {error.message}")
        return None
    if is_running and not remaining:
        return None  # the job ended between the two queries, so none of its hosts is considered lost
    return tuple(host for host in hosts if host not in remaining or is_unavailable(states.get(host, "")))


def start_host_watch(watched: str, host: str, log: Path) -> subprocess.Popen[bytes]:
    """Start a step on `host` that monitors this batch shell's host (see `main`)."""
    argv = [
        "srun",
        "--overlap",
        "--mpi=none",
        "--mem=0",
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={host}",
        "--input=none",
        *module_argv("trainkit.backends.slurm.resubmit", watched),
    ]
    with log.open("ab") as output:
        return processes.start_child(argv, environ=os.environ, output=output, keeps_mask=False)


HOST_POLL_S = 60.0
"""Seconds between two checks of the batch host. Each check takes two RPCs, and Slurm needs minutes to mark a
host as down."""


def requeue_if_down(job_id: str, host: str) -> bool:
    """Requeue the job if its batch host is down; if the job has --no-requeue, cancel it instead.

    Returns whether the batch host is down.
    """
    if not is_down(node_states([host]).get(host, "")):
        return False
    job = job_details(job_id)
    if job.restarts > int(os.environ.get("SLURM_RESTART_COUNT", "0")):
        return True  # the job has already been requeued
    action = "requeuing" if job.may_requeue else "cancelling (because of --no-requeue)"
    print(f"{host}, the host of the supervisor, is down: {action} {job_id}", flush=True)
    if job.may_requeue:
        requeue(job_id)
    else:
        cancel([job_id])
    return True


def main(host: str) -> int:
    """Monitor the batch host of this step's job until the host goes down; return the exit code."""
    replace_unencodable()
    # Ignore the warning signal before the time limit, which is meant for the ranks.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    while True:
        time.sleep(HOST_POLL_S)
        try:
            if requeue_if_down(str(slurm_job_id()), host):
                return EXIT_OK
        except TrainkitError as error:
            print(f"{error.message}; retrying", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
