"""Steers jobs (requeue, cancel, signals) and knows what Slurm's versions differ in."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from enum import Enum

from trainkit.errors import UsageError
from trainkit.slurm.client import (
    QUERY_PATIENCE_S,
    QUERY_TIMEOUT_S,
    SlurmRefused,
    plain_environ,
    query,
    retrying,
    run_slurm,
    scrubbed,
)
from trainkit.slurm.job_id import checked_job_id

CONTROL_PATIENCE_S = 60.0
"""A job that ends while the controller restarts still gets its requeue; Slurm starts it again after 120 s."""

_GONE = re.compile(r"[Ii]nvalid job id|already (?:completing|finished|done)|No running or pending steps")
_PENDING = re.compile(r"[Jj]ob is (?:pending|no longer running)")
_SIGNAL = re.compile(r"(?:SIG)?(?P<name>[A-Z]+[0-9]*)|(?P<number>[0-9]{1,2})")
_VERSION = re.compile(r"(?P<major>\d+)\.(?P<minor>\d+)(?:\.(?P<patch>\d+))?")
_SETTING = re.compile(r"^(?P<name>[\w/]+)(?:\[\d+\])?\s*=[ \t]?(?P<value>.*)$", re.MULTILINE)

Version = tuple[int, int, int]


class Receiver(Enum):
    """Which processes of a job a signal is for."""

    STEPS = ""
    BATCH = "--batch"
    ALL = "--full"


def requeue(
    job_id: str, *, patience_s: float = CONTROL_PATIENCE_S, environ: Mapping[str, str] | None = None
) -> None:
    """Put a job back into the queue; of an array only the task that `123_4` names.

    Asked again while Slurm is away. Raises SlurmRefused when the job was submitted with --no-requeue.
    """
    argv = ["scontrol", "requeue", checked_job_id(job_id)]
    asked = 0

    def ask() -> None:
        nonlocal asked
        asked += 1
        try:
            run_slurm(argv, QUERY_TIMEOUT_S, environ=environ)
        except SlurmRefused as error:
            # The answer to the first question was lost, what it asked for was done.
            if asked == 1 or not _PENDING.search(error.sentence):
                raise

    retrying(ask, patience_s)


def exclude_hosts(
    job_id: str,
    hosts: str,
    *,
    patience_s: float = QUERY_PATIENCE_S,
    environ: Mapping[str, str] | None = None,
) -> None:
    """Have Slurm leave out these hosts, as a host list, when it starts a waiting job.

    They take the place of those that it left out before. Raises SlurmRefused for a job that runs; one that
    was put back into the queue waits from that moment on.
    """
    change = [f"JobId={checked_job_id(job_id)}", f"ExcNodeList={hosts}"]
    query(["scontrol", "update", *change], environ=environ, patience_s=patience_s)


def cancel(
    job_ids: Sequence[str],
    *,
    patience_s: float = QUERY_PATIENCE_S,
    environ: Mapping[str, str] | None = None,
) -> None:
    """End jobs, or tasks of arrays, in one call; those that have ended already are no error."""
    _scancel([], job_ids, patience_s, environ)


def cancel_waiting(
    job_ids: Sequence[str],
    *,
    patience_s: float = QUERY_PATIENCE_S,
    environ: Mapping[str, str] | None = None,
) -> None:
    """End those of the jobs, and of an array the tasks, that wait in the queue; running ones continue."""
    _scancel(["--state=PENDING"], job_ids, patience_s, environ)


def send_signal(
    job_ids: Sequence[str],
    signal: str,
    receiver: Receiver = Receiver.STEPS,
    *,
    patience_s: float = QUERY_PATIENCE_S,
    environ: Mapping[str, str] | None = None,
) -> None:
    """Send a signal (`USR2`, `SIGTERM`, `12`) to the steps, the batch shell or all of running jobs."""
    if _SIGNAL.fullmatch(signal) is None:
        raise UsageError(f"{signal!r} is no signal", hint="for example USR2 or TERM")
    options = [f"--signal={signal}", *([receiver.value] if receiver.value else [])]
    _scancel(options, job_ids, patience_s, environ)


def kill_step(
    job_id: str,
    step_id: str,
    signal: str = "KILL",
    *,
    patience_s: float = QUERY_PATIENCE_S,
    environ: Mapping[str, str] | None = None,
) -> None:
    """End a step at once, by SIGKILL or another signal.

    SIGKILL for a whole job is SIGTERM first, and KillWait later (30 s) SIGKILL.
    """
    kill_steps([(job_id, step_id)], signal, patience_s=patience_s, environ=environ)


def kill_steps(
    steps: Sequence[tuple[str, str]],
    signal: str = "KILL",
    *,
    patience_s: float = QUERY_PATIENCE_S,
    environ: Mapping[str, str] | None = None,
) -> None:
    """End steps, each as its job and its number, as `kill_step` does, in one call."""
    for _, step_id in steps:
        if not step_id.isdigit():
            raise UsageError(f"{step_id!r} is no number of a step")
    names = [f"{checked_job_id(job_id)}.{step_id}" for job_id, step_id in steps]
    if names:
        _scancel_these([f"--signal={signal}"], names, patience_s, environ)


def _scancel(
    options: list[str], job_ids: Sequence[str], patience_s: float, environ: Mapping[str, str] | None
) -> None:
    if job_ids:
        _scancel_these(options, [checked_job_id(job_id) for job_id in job_ids], patience_s, environ)


def _scancel_these(
    options: list[str], names: Sequence[str], patience_s: float, environ: Mapping[str, str] | None
) -> None:
    argv = ["scancel", *options, *names]
    try:
        query(argv, environ=environ, patience_s=patience_s)
    except SlurmRefused as error:
        lines = error.sentence.splitlines()
        if not lines or not all(_GONE.search(line) for line in lines):
            raise


def show_config(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The controller's configuration: ClusterName, SLURM_VERSION, MaxArraySize, MinJobAge, …"""
    return parse_config(query(["scontrol", "show", "config"], environ=environ).stdout)


def parse_config(text: str) -> dict[str, str]:
    """`scontrol show config`, whose lines are `Name = value`."""
    return {match["name"]: match["value"].strip() for match in _SETTING.finditer(text)}


def version(environ: Mapping[str, str] | None = None) -> Version:
    """The version of Slurm's commands here, for example (22, 5, 8); asks no controller."""
    path = None if environ is None else environ.get("PATH")
    program = next((name for name in ("srun", "sbatch", "scontrol") if shutil.which(name, path=path)), "srun")
    return parse_version(run_slurm([program, "--version"], QUERY_TIMEOUT_S, environ=environ))


def parse_version(text: str) -> Version:
    """`slurm 22.05.8` or `slurm-wlm 24.11.1-0ubuntu1` as numbers."""
    match = _VERSION.search(text)
    if match is None:
        raise UsageError(f"not a version of Slurm: {text.strip()!r}")
    return int(match["major"]), int(match["minor"]), int(match["patch"] or 0)


def needs_srun_cpus_per_task(slurm: Version) -> bool:
    """Whether srun forgets the job's --cpus-per-task unless SRUN_CPUS_PER_TASK is exported."""
    return (22, 5, 0) <= slurm < (23, 11, 0)


def has_expedited_requeue(slurm: Version, config: Mapping[str, str]) -> bool:
    """Whether `sbatch --requeue=expedite` exists and the site has enabled it."""
    settings = f"{config.get('SlurmctldParameters', '')},{config.get('SchedulerParameters', '')}"
    return slurm >= (25, 11, 0) and "enable_expedited_requeue" in settings.split(",")


def run_step(
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
