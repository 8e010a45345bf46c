"""Provides functions for the tests on a real cluster: submit jobs, wait for them, and count them."""

import time
from pathlib import Path

from tests.support import programs
from tools.slurm_cluster.cluster import Cluster
from trainkit.scheduler import JobState
from trainkit.slurm.jobs import SlurmJob, query_jobs
from trainkit.slurm.submit import submit_script

SLEEP = "sleep 2400\n"


def write(folder: Path, body: str, token: str, *directives: str) -> Path:
    """Write a batch script that contains its token."""
    lines = [
        "#!/bin/bash",
        f"#SBATCH --comment={token}",
        "#SBATCH --time=10",
        "#SBATCH --output=log",
        *directives,
    ]
    path = folder / f"{token}.sbatch"
    path.write_text("\n".join(f"#SBATCH {x}" if x.startswith("--") else x for x in lines) + f"\n{body}")
    return path


def send(cluster: Cluster, folder: Path, body: str, *directives: str, token: str = "", **more: object) -> str:
    """Submit a job that runs `body`, and return its id."""
    token = token or f"trainkit:{time.monotonic_ns():x}"
    path = write(folder, body, token, *directives)
    return submit_script(path, token=token, cwd=folder, **{"notify": print, **more})  # type: ignore[arg-type]


def wait_for(cluster: Cluster, job_id: str, *states: JobState, timeout_s: float = 240) -> SlurmJob:
    """Wait until a job has one of these states, and return the job."""

    def asked() -> SlurmJob | None:
        job = query_jobs([job_id])[job_id]
        return job if job.state in states else None

    found: SlurmJob = programs.wait_for(asked, timeout_s, f"{states} of job {job_id}", 0.1)
    return found


def wait_for_text(path: Path, text: str, timeout_s: float = 120) -> None:
    programs.wait_for(lambda: path.exists() and text in path.read_text(), timeout_s, f"{text!r} in {path}")


def jobs_with_token(cluster: Cluster, token: str) -> list[str]:
    """Return every job that was ever submitted with this token."""
    argv = ["squeue", "--noheader", "--states=all", "--format=%i %r %k"]
    shown = cluster.run(argv, timeout_s=240, check=True).stdout.splitlines()
    # Slurm records some of the jobs that it has refused.
    return [line.split()[0] for line in shown if token in line.split() and "BadConstraints" not in line]


def slurmctld_pid(cluster: Cluster) -> int:
    return cluster.state.processes["slurmctld"].pid
