"""What is done for a job whose batch shell is gone with its host, by an agent on another one.

A job that survives the loss of hosts (``--no-kill``, for spare nodes) survives that of its first host too:
Slurm ends nothing and starts nothing, and the other hosts would wait for the end of their time.
"""

from __future__ import annotations

from trainkit.errors import TrainkitError
from trainkit.job.slurm_place import slurm_job_id
from trainkit.plan.launch import LaunchPlan
from trainkit.slurm.control import cancel, requeue
from trainkit.slurm.job_now import ask_job
from trainkit.slurm.nodes import is_out, node_states

LAST_HELPER = 2
"""Node rank of the last agent that looks: one is enough, and thousands would ask Slurm at once."""


def bring_back_orphan(plan: LaunchPlan, node_rank: int) -> None:
    """Have Slurm start the job again when nobody else is left to ask for it; call after a failure."""
    job_id = slurm_job_id()
    if plan.backend == "srun" or node_rank > LAST_HELPER or job_id is None:
        return
    try:
        job = ask_job(job_id)
        if not job.batch_host or not is_out(node_states([job.batch_host]).get(job.batch_host, "")):
            return
        what = "is put back into the queue" if job.may_requeue else "ends: Slurm may not start it again"
        print(f"{job.batch_host}, where the supervisor ran, is gone: {job_id} {what}", flush=True)
        if job.may_requeue:
            requeue(job_id)
        else:
            cancel([job_id])
    except TrainkitError as error:
        print(f"whether the supervisor of {job_id} is gone is not known: {error.message}", flush=True)
