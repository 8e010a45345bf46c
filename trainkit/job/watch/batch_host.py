"""Watches the host of a job's batch shell from another host, and requeues the job when that host dies.

Runs as a separate step: ``python -m trainkit.job.watch.batch_host``. Under ``--no-kill``, which spare nodes
require, Slurm does nothing when the batch host dies: the supervisor is lost, and the other hosts would idle
until the time limit.
"""

from __future__ import annotations

import signal
import sys
import time

from trainkit.errors import TrainkitError
from trainkit.job.node.slurm_step import slurm_job_id
from trainkit.slurm.control import cancel, requeue
from trainkit.slurm.hosts import is_down, node_states
from trainkit.slurm.jobs import job_details

POLL_S = 20.0


def watch_batch_host(job_id: str) -> None:
    """Wait until the batch host dies, then requeue the job, or cancel it if Slurm may not requeue it."""
    while True:
        time.sleep(POLL_S)
        try:
            if requeue_if_down(job_id):
                return
        except TrainkitError as error:
            print(f"{error.message}; retrying", flush=True)


def requeue_if_down(job_id: str) -> bool:
    """Requeue or cancel the job if its batch host is down; returns whether it is."""
    job = job_details(job_id)
    host = job.batch_host
    if not host or not is_down(node_states([host]).get(host, "")):
        return False
    action = "requeuing" if job.may_requeue else "cancelling (the job must not be requeued)"
    print(f"{host}, the host of the supervisor, is down: {action} {job_id}", flush=True)
    if job.may_requeue:
        requeue(job_id)
    else:
        cancel([job_id])
    return True


def main() -> int:
    """Watch the job that this step belongs to; returns the exit code."""
    # The early notice is for the ranks.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    job_id = slurm_job_id()
    if job_id is None:
        print("error: this is not a step of a Slurm job", file=sys.stderr)
        return 2
    watch_batch_host(job_id)
    return 0


if __name__ == "__main__":
    sys.exit(main())
