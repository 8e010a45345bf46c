"""Requeues, cancels and signals jobs, and runs steps in jobs; also parses Slurm versions."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence

from trainkit.errors import UsageError
from trainkit.scheduler import by_cluster, on_cluster, split_job
from trainkit.slurm.client import (
    JOB_TIMEOUT_S,
    QUERY_PATIENCE_S,
    QUERY_TIMEOUT_S,
    SlurmRefused,
    SlurmUnreachable,
    plain_environ,
    query,
    retrying,
    run_slurm,
)
from trainkit.slurm.environment import scrubbed
from trainkit.slurm.states import checked_job_id

CONTROL_PATIENCE_S = 60.0
"""Seconds for which a requeue is retried; long enough for a restart of the controller. Retrying for this long
is acceptable, because Slurm starts a requeued job only after 120 s anyway."""

_GONE = re.compile(r"[Ii]nvalid job id|already (?:completing|finished|done)|No running or pending steps")
_PENDING = re.compile(r"[Jj]ob is (?:pending|no longer running)")
_STATUS_OF_DEPENDENCY = re.compile(r"\((?:unfulfilled|fulfilled|failed)\)")
_VERSION = re.compile(r"(?P<major>\d+)\.(?P<minor>\d+)(?:\.(?P<patch>\d+))?")
_SETTING = re.compile(r"^(?P<name>[\w/]+)(?:\[\d+\])?\s*=[ \t]?(?P<value>.*)$", re.MULTILINE)

Version = tuple[int, int, int]


def requeue(job_id: str, *, patience_s: float = CONTROL_PATIENCE_S) -> None:
    """Requeue a job, or one array task such as `123_4`.

    The request is retried while Slurm does not answer. Raises SlurmRefused if the job has --no-requeue.
    """
    job_id, cluster = split_job(checked_job_id(job_id))
    argv = ["scontrol", "requeue", job_id]
    attempts = 0

    def request() -> None:
        nonlocal attempts
        attempts += 1
        try:
            run_slurm(argv, JOB_TIMEOUT_S, cluster=cluster)
        except SlurmRefused as error:
            # If Slurm rejects a retry because of the job's state, the first request succeeded and only its
            # answer was lost.
            if attempts == 1 or not _PENDING.search(error.sentence):
                raise

    retrying(request, patience_s)


def exclude_hosts(job_id: str, hosts: str) -> None:
    """Replace the list of hosts that a pending job excludes. `hosts` is a Slurm host list.

    Raises SlurmRefused for a running job. Slurm considers a requeued job pending immediately.
    """
    change = [f"JobId={checked_job_id(job_id)}", f"ExcNodeList={hosts}"]
    query(["scontrol", "update", *change])


def cancel(job_ids: Sequence[str]) -> None:
    """Cancel jobs or array tasks with one call per cluster; ignore jobs that have already finished."""
    _scancel([], map(checked_job_id, job_ids))


def cancel_waiting(job_ids: Sequence[str]) -> None:
    """Cancel the pending jobs and array tasks among `job_ids`; running jobs and tasks continue."""
    _scancel(["--state=PENDING"], map(checked_job_id, job_ids))


def send_signal(job_ids: Sequence[str], signal: str) -> None:
    """Send a signal, such as ``USR2`` or ``SIGTERM``, to the steps of running jobs."""
    _scancel([f"--signal={signal}"], map(checked_job_id, job_ids))


def kill_steps(
    steps: Sequence[tuple[str, str]], signal: str = "KILL", *, patience_s: float = QUERY_PATIENCE_S
) -> None:
    """Send a signal, by default SIGKILL, to steps given as (job id, step id).

    Cancelling the whole job would send SIGTERM first, and SIGKILL only after KillWait (30 s by default).
    """
    named = ((*split_job(checked_job_id(job)), step_id) for job, step_id in steps)
    names = (on_cluster(f"{job_id}.{step_id}", cluster) for job_id, cluster, step_id in named)
    _scancel([f"--signal={signal}"], names, patience_s)


def _scancel(options: Sequence[str], names: Iterable[str], patience_s: float = QUERY_PATIENCE_S) -> None:
    """Run scancel for jobs or steps, if any; ignore jobs and steps that have already finished.

    If several clusters return an error, the first error is raised after all clusters have received the
    request.
    """
    problems = list[SlurmRefused | SlurmUnreachable]()
    for cluster, own in by_cluster(names).items():
        try:
            query(["scancel", *options, *own], patience_s=patience_s, cluster=cluster)
        except SlurmUnreachable as error:
            problems.append(error)
        except SlurmRefused as error:
            lines = error.sentence.splitlines()
            if not lines or not all(_GONE.search(line) for line in lines):
                problems.append(error)
    if problems:
        raise problems[0]


def move_dependents(job_id: str, new_id: str) -> list[str]:
    """Make the user's pending jobs that depend on the success of `job_id` depend on `new_id` instead.

    Returns the ids of the modified jobs.
    """
    old, new = checked_job_id(job_id), checked_job_id(new_id)
    listing = query(["squeue", "--me", "--states=PENDING", "--noheader", "--format=%A|%E"])
    moved = []
    for line in listing.splitlines():
        waiting, _, dependency = line.strip().partition("|")
        conditions = _STATUS_OF_DEPENDENCY.sub("", dependency)
        changed = re.sub(rf"\bafterok:{re.escape(old)}(?![\d_])", f"afterok:{new}", conditions)
        if changed != conditions:
            argv = ["scontrol", "update", f"JobId={checked_job_id(waiting)}", f"Dependency={changed}"]
            query(argv)
            moved.append(waiting)
    return moved


def show_config(cluster: str = "") -> dict[str, str]:
    """Return the controller's configuration, such as ClusterName, MaxArraySize and MinJobAge."""
    return parse_config(query(["scontrol", "show", "config"], cluster=cluster))


def parse_config(text: str) -> dict[str, str]:
    """Parse `scontrol show config`, whose lines are `Name = value`."""
    return {match["name"]: match["value"].strip() for match in _SETTING.finditer(text)}


def parse_version(text: str) -> Version:
    """Parse `slurm 22.05.8` or `slurm-wlm 24.11.1-0ubuntu1`; raise UsageError for other text."""
    match = _VERSION.search(text)
    if match is None:
        raise UsageError(f"not a Slurm version: {text.strip()!r}")
    return int(match["major"]), int(match["minor"]), int(match["patch"] or 0)


def has_expedited_requeue(slurm: tuple[int, ...], config: Mapping[str, str]) -> bool:
    """Return whether Slurm supports `sbatch --requeue=expedite` and the site has enabled it."""
    settings = f"{config.get('SlurmctldParameters', '')},{config.get('SchedulerParameters', '')}"
    return slurm >= (25, 11, 0) and "enable_expedited_requeue" in settings.split(",")


def run_step(
    job_id: str, num_nodes: int, argv: Sequence[str], environ: Mapping[str, str] | None = None
) -> str:
    """Run a command once on each node of a running job, as a new step; return the command's stdout.

    The new step shares the job's resources with other steps (--overlap). Without --mem=0, Slurm would reject
    the new step if another step uses all of the job's memory. Raises SlurmRefused if Slurm does not start the
    step, or if the command fails.
    """
    job_id, cluster = split_job(checked_job_id(job_id))
    step = [
        "srun",
        f"--jobid={job_id}",
        "--overlap",
        "--mpi=none",
        "--mem=0",
        "--input=none",
        f"--nodes={num_nodes}",
        f"--ntasks={num_nodes}",
        "--ntasks-per-node=1",
    ]
    clean = plain_environ(scrubbed(os.environ if environ is None else environ))
    return run_slurm([*step, *argv], QUERY_TIMEOUT_S, environ=clean, cluster=cluster)
