"""Runs something on the nodes of a job, beside what runs there."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from trainkit.slurm.client import QUERY_TIMEOUT_S, plain_environ, run_slurm
from trainkit.slurm.environment import scrubbed
from trainkit.slurm.jobid import checked_job_id


def run_on_nodes(
    job_id: str,
    num_nodes: int,
    argv: Sequence[str],
    *,
    timeout_s: float = QUERY_TIMEOUT_S,
    environ: Mapping[str, str] | None = None,
) -> str:
    """What a command printed that ran once on each node of a running job, as a step of its own.

    Takes nothing from the steps that are there: without --mem=0 Slurm refuses it where the first step has all
    the memory of the job. Raises SlurmRefused when Slurm did not start it or it failed.
    """
    step = [
        *("srun", f"--jobid={checked_job_id(job_id)}", "--overlap", "--mem=0", "--input=none"),
        *(f"--nodes={num_nodes}", f"--ntasks={num_nodes}", "--ntasks-per-node=1"),
    ]
    clean = plain_environ(scrubbed(os.environ if environ is None else environ))
    return run_slurm([*step, *argv], timeout_s, environ=clean)
