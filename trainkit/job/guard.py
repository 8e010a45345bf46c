"""The guard of a job that survives the loss of hosts: brings it back when it loses that of its batch shell.

``python -m trainkit.job.guard``, a step of its own on another host. Under ``--no-kill``, which spare nodes
take, Slurm does nothing when the first host dies: no supervisor is left, and the other hosts would wait for
the end of their time.
"""

from __future__ import annotations

import signal
import sys
import time

from trainkit.errors import TrainkitError
from trainkit.job.node.slurm_step import slurm_job_id
from trainkit.slurm.control import cancel, requeue
from trainkit.slurm.hosts import is_down, node_states
from trainkit.slurm.jobs import ask_job

ASK_EVERY_S = 20.0


def watch(job_id: str) -> None:
    """Return when the job was brought back, or ended where Slurm may not start it again."""
    while True:
        time.sleep(ASK_EVERY_S)
        try:
            if _is_done(job_id):
                return
        except TrainkitError as error:
            print(f"{error.message}; asking again", flush=True)


def _is_done(job_id: str) -> bool:
    job = ask_job(job_id)
    host = job.batch_host
    if not host or not is_down(node_states([host]).get(host, "")):
        return False
    what = "is put back into the queue" if job.may_requeue else "ends: Slurm may not start it again"
    print(f"{host}, where the supervisor ran, is gone: {job_id} {what}", flush=True)
    if job.may_requeue:
        requeue(job_id)
    else:
        cancel([job_id])
    return True


def main() -> int:
    """Watch over the job that this is a step of; returns the exit code."""
    # The early notice is for the ranks.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    job_id = slurm_job_id()
    if job_id is None:
        print("error: this is no step of a Slurm job", file=sys.stderr)
        return 2
    watch(job_id)
    return 0


if __name__ == "__main__":
    sys.exit(main())
