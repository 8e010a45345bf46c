"""Shares Slurm's answers about jobs between the commands of one user, so that they query Slurm less often.

All commands that only show or await the state of jobs query Slurm through `query_shared`. The answers are in
``$XDG_CACHE_HOME/trainkit/slurm/CLUSTER.json``. Only the user can read this file, which can be deleted at any
time.

The supervisor and the commands that act on a job (`cancel`, `requeue`, `resume`, `submit --after`) never use
these answers, and query Slurm directly. An answer may be minutes old: an action based on an old answer could
signal a job that has been requeued in the meantime, or start a second job next to one that runs again. A
command that waits for a job to end after acting on the job repeats its query once per minimum interval.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from trainkit.cluster.min_poll import min_poll_s
from trainkit.errors import SlurmError, TrainkitError, UsageError
from trainkit.folders import ensure_folder, user_cache_folder
from trainkit.locks import LockBusy, file_lock
from trainkit.run.files import parse_time, read_object, read_record, to_json, write_json
from trainkit.scheduler import JobInfo, JobState, base_id, by_cluster, on_cluster, split_job
from trainkit.slurm.client import SlurmRefused, SlurmUnreachable
from trainkit.slurm.environment import cluster_name
from trainkit.slurm.jobs import SlurmJob, query_clusters
from trainkit.slurm.states import checked_job_id

LOCK_TIMEOUT_S = 30.0
"""Timeout in seconds for the lock, which a command holds while it waits for squeue and sacct."""
CLOCKS_S = 5.0
"""Seconds by which the clocks of two login nodes may disagree."""
ATTENTION_S = 60.0
"""A query includes the jobs that commands asked for within this time, or within two minimum intervals."""


@dataclass(frozen=True)
class Answers:
    """Slurm's newest answer about the jobs on one cluster. Times are in Unix seconds."""

    asked_at: float = 0.0
    """The time of the query."""
    wanted: dict[str, float] = field(default_factory=dict)
    """Maps each job id in the query to the time when a command last asked for the job."""
    jobs: dict[str, JobInfo] = field(default_factory=dict)
    problem: str = ""
    """Why Slurm did not answer; empty if it answered."""
    hint: str = ""
    num_failed: int = 0
    """The number of consecutive queries, up to the newest one, that Slurm did not answer."""

    @property
    def is_final(self) -> bool:
        """Return whether no command repeats the query within the minimum interval.

        The next command repeats a single failed query, because one lost answer would otherwise hide the state
        of all jobs for the whole interval. Further failures mean that Slurm is down, so each interval then
        has only one query.
        """
        return self.num_failed != 1


def query_shared(ids: Iterable[str]) -> tuple[dict[str, JobInfo], dict[str, TrainkitError]]:
    """Return the jobs like `query_clusters`, but query each cluster at most once per minimum interval.

    Within the interval, all of a user's commands get the same answers; only the first query about a job, and
    one repetition of a failed query, are sent immediately. If the site sets no minimum interval, the function
    always queries Slurm.
    """
    ids = list(ids)
    if not least_interval_s(ids):
        return query_clusters(ids)
    known, problems = dict[str, JobInfo](), dict[str, TrainkitError]()
    for cluster, own in sorted(by_cluster(ids).items()):
        name = cluster or cluster_name()
        try:
            # The interval is 0 if only other clusters have a minimum.
            found = _shared(answers_file(name), own, cluster, min_poll_s(name))
            known |= {on_cluster(one, cluster): job for one, job in found.items()}
        except TrainkitError as error:
            problems[cluster] = error
    return known, problems


def least_interval_s(jobs: Iterable[str]) -> float:
    """Return the minimum number of seconds between two queries about jobs; 0 if the site sets no minimum."""
    return max((min_poll_s(cluster or cluster_name()) for cluster in by_cluster(jobs)), default=0.0)


def answers_file(cluster: str | None) -> Path:
    """Return the file with the answers about a cluster, or about this host's cluster if its name is None."""
    name = f"of-{os.uname().nodename}" if cluster is None else cluster.lower().replace("/", "_")
    return user_cache_folder() / "slurm" / f"{name}.json"


def _shared(file: Path, ids: Sequence[str], cluster: str, interval_s: float) -> dict[str, JobInfo]:
    """Return the jobs with the given ids, which do not contain the name of a cluster.

    Commands on different clusters share the file if they share the home directory, so only the query itself
    contains the name of the cluster ("" for the cluster of this host).
    """
    try:
        ensure_folder(file.parent, 0o700, parents=True)
        # While one command queries Slurm, all others wait for its answer.
        with file_lock(file.with_suffix(".lock"), LOCK_TIMEOUT_S, quiet=True):
            answers = _answers(file, ids, cluster, interval_s)
    except LockBusy:
        # The command that holds the lock may be suspended; an older answer is better than none.
        answers = _read(file)
        if not answers.problem and answers.wanted.keys() >= set(ids):
            return _select(ids, answers.jobs)
        message = f"another trainkit command has been waiting for Slurm's answer for {LOCK_TIMEOUT_S:g} s"
        raise SlurmError(message, hint="`scontrol ping` shows whether Slurm's controller is up") from None
    except OSError:
        # The answers cannot be shared, for example because the disk is full or read-only.
        answers = _asked(ids, {}, cluster)
    if answers.problem:
        raise SlurmError(answers.problem, answers.hint)
    return _select(ids, answers.jobs)


def _answers(file: Path, ids: Sequence[str], cluster: str, interval_s: float) -> Answers:
    """Return answers that are not older than the interval, querying Slurm if necessary."""
    known, now = _read(file), time.time()
    is_recent = -CLOCKS_S <= now - known.asked_at < interval_s
    # While Slurm is down, even the first query about a job waits until the interval has passed.
    if is_recent and known.is_final and (known.problem or known.wanted.keys() >= set(ids)):
        if all(now - known.wanted.get(one, 0.0) < interval_s / 2 for one in ids):
            return known
        found = replace(known, wanted={**known.wanted, **dict.fromkeys(ids, now)})
    else:
        kept_s = max(ATTENTION_S, 2 * interval_s)
        others = {one: at for one, at in known.wanted.items() if now - at < kept_s}
        found = _asked(ids, others, cluster)
        if found.problem:
            found = replace(found, num_failed=known.num_failed + 1)
    _write(file, found)
    return found


def _asked(ids: Sequence[str], others: Mapping[str, float], cluster: str) -> Answers:
    """Query Slurm about the jobs with the given ids and about jobs that other commands asked for."""
    wanted = {**others, **dict.fromkeys(ids, time.time())}
    jobs, problems = query_clusters([on_cluster(one, cluster) for one in wanted], patience_s=0.0)
    for error in problems.values():
        # Errors other than SlurmUnreachable and SlurmRefused concern only this process; for example, its PATH
        # lacks squeue.
        if not isinstance(error, SlurmUnreachable | SlurmRefused):
            raise error
        return Answers(time.time(), wanted, problem=error.message, hint=error.hint)
    return Answers(time.time(), wanted, {split_job(one)[0]: job for one, job in jobs.items()})


def _select(ids: Sequence[str], known: Mapping[str, JobInfo]) -> dict[str, JobInfo]:
    """Return the jobs with the given ids. The id of an array selects all of its tasks."""
    tasks: dict[str, list[str]] = {}
    for job_id in known:
        tasks.setdefault(base_id(job_id), []).append(job_id)
    # Tasks that were cancelled while they were pending share one record, which has the id of the array.
    found = (one for job_id in ids for one in tasks.get(job_id, [job_id]))
    return {job_id: known[job_id] for job_id in found if job_id in known}


def _write(file: Path, answers: Answers) -> None:
    jobs = {job_id: {**asdict(job), "state": job.state.value} for job_id, job in answers.jobs.items()}
    with suppress(OSError):  # This command has its answer even if the answer cannot be shared.
        write_json(file, {**to_json(replace(answers, jobs={})), "jobs": to_json(jobs)})


def _read(file: Path) -> Answers:
    """Read the answers.

    The result is empty if there is no file, or if another trainkit version wrote the file.
    """
    values = read_object(file)
    jobs = values.pop("jobs", None)
    try:
        if not isinstance(jobs, dict):
            return Answers()
        answers = read_record(Answers, values, strict=True)
        found = {checked_job_id(one): _job(job) for one, job in jobs.items()}
        return replace(
            answers, wanted={checked_job_id(one): at for one, at in answers.wanted.items()}, jobs=found
        )
    except (KeyError, TypeError, ValueError, UsageError):
        return Answers()


def _job(values: object) -> JobInfo:
    if not isinstance(values, dict):
        raise TypeError(f"a job is {values!r}")
    times = {key: parse_time(values[key]) for key in ("start_time", "end_time")}
    return SlurmJob(**{**values, **times, "state": JobState(values["state"])})
