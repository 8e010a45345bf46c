"""Queries the states of jobs: first squeue for all jobs, then sacct for jobs that squeue does not list.

At a site without accounting, a job that squeue no longer lists is `unknown`, never finished.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from trainkit.errors import TrainkitError
from trainkit.scheduler import (
    JobInfo,
    JobState,
    base_id,
    by_cluster,
    expand_tasks,
    on_cluster,
    split_job,
)
from trainkit.slurm.client import (
    FIELD,
    QUERY_PATIENCE_S,
    QUERY_TIMEOUT_S,
    RECORD,
    SlurmRefused,
    query,
    records,
    time_of,
)
from trainkit.slurm.states import (
    checked_job_id,
    reason_sentence,
    state_in_accounting,
    state_in_queue,
    unknown_sentence,
)

_QUEUE_FIELDS = (
    "JobID",
    "ArrayJobID",
    "ArrayTaskID",
    "State",
    "Reason",
    "NodeList",
    "NumNodes",
    "StartTime",
    "EndTime",
    "RestartCnt",
    "exit_code",
    "Name",
)
_ACCOUNTING_FIELDS = ("JobID", "State", "NodeList", "NNodes", "Start", "End", "ExitCode", "JobName")
UNKNOWN_JOB = "neither squeue nor sacct lists the job"
_NO_NODES = ("None assigned", "(null)", "N/A")
_ACCOUNTING_TIMEOUT_S = 10.0
_LONGEST_ARGUMENT = 100_000
"""The maximum length in characters of a list of job ids in one argument. Linux limits an argument to 128
KiB."""
_LOG_NOT_OPENED = 53
"""The signal number that Slurm reports if a node cannot open the batch script's output file; it does not mean
that the job received a signal.

In all versions of Slurm, internal error 4021 is truncated to this number in an exit status.
"""


class SlurmJob(JobInfo):
    """A job with the reasons and signals that Slurm reports."""

    @property
    def log_not_opened(self) -> bool:
        return self.state is JobState.FAILED and self.exit_signal == _LOG_NOT_OPENED

    @property
    def explanation(self) -> str:
        return reason_sentence(self.reason)


def query_jobs(ids: Iterable[str]) -> dict[str, JobInfo]:
    """Return the jobs with these ids like `query_clusters`, but raise the first error of any cluster."""
    known, problems = query_clusters(ids)
    if problems:
        raise next(iter(problems.values()))
    return known


def query_clusters(
    ids: Iterable[str], patience_s: float = QUERY_PATIENCE_S
) -> tuple[dict[str, JobInfo], dict[str, TrainkitError]]:
    """Return the jobs with these ids, and the error of each cluster whose query failed.

    The jobs are sorted by cluster, the default cluster first, then by the order of `ids`. The keys are the
    names that `on_cluster` returns. The id of an array selects all tasks in the array. Each task gets its own
    key. Tasks that were cancelled while pending may share one entry with the array's id as its key. If
    neither squeue nor sacct lists a job, its state is `unknown`. Runs at most two commands per cluster, and
    retries squeue for `patience_s` seconds.
    """
    known, problems = dict[str, JobInfo](), dict[str, TrainkitError]()
    for cluster, own in sorted(by_cluster(map(checked_job_id, ids)).items()):
        try:
            known |= {
                on_cluster(job_id, cluster): job for job_id, job in _query_cluster(own, cluster, patience_s)
            }
        except TrainkitError as error:
            problems[cluster] = error
    return known, problems


def _query_cluster(wanted: Sequence[str], cluster: str, patience_s: float) -> Iterator[tuple[str, JobInfo]]:
    known = parse_queue(_query_queue(wanted, cluster, patience_s))
    arrays = {base_id(job_id) for job_id in known if "_" in job_id}
    # Array tasks leave squeue one by one, so squeue may list only some tasks of an array.
    missing = [job_id for job_id in wanted if job_id not in known or job_id in arrays]
    reason = UNKNOWN_JOB
    if missing:
        ended, reason = _query_accounting(missing, cluster)
        known = {**ended, **known}
    return _select(wanted, known, reason)


def _select(
    wanted: Sequence[str], known: Mapping[str, JobInfo], reason: str
) -> Iterator[tuple[str, JobInfo]]:
    of_array: dict[str, list[str]] = {}
    for job_id in known:
        of_array.setdefault(base_id(job_id), []).append(job_id)
    for job_id in wanted:
        if job_id in of_array:
            for found in sorted(of_array[job_id], key=lambda task: int(task.partition("_")[2] or -1)):
                yield found, known[found]
            continue
        info = known.get(job_id, SlurmJob(job_id, JobState.UNKNOWN, reason=reason))
        rest = known.get(base_id(job_id), info)
        ended_together = rest.state.is_terminal and rest.state is not JobState.COMPLETED
        if info.state is JobState.UNKNOWN and ended_together and reason == UNKNOWN_JOB:
            # Array tasks that ended while pending may share one record, which has the id of the array.
            info = replace(rest, job_id=job_id)
        yield job_id, info


def _query_queue(wanted: Sequence[str], cluster: str, patience_s: float) -> str:
    bases = ",".join(dict.fromkeys(map(base_id, wanted)))
    selection = "--me" if len(bases) > _LONGEST_ARGUMENT else f"--jobs={bases}"
    layout = ",".join(f"{name}:{FIELD}" for name in _QUEUE_FIELDS[:-1]) + f",{_QUEUE_FIELDS[-1]}:{RECORD}"
    argv = ["squeue", "--all", "--noconvert", "--noheader", "--states=all", f"--Format={layout}", selection]
    try:
        return query(argv, patience_s=patience_s, cluster=cluster)
    except SlurmRefused as error:
        # squeue reports "invalid job id" if the query names a single job that squeue no longer lists.
        if "invalid job id" in error.sentence.lower():
            return ""
        raise


def parse_queue(text: str) -> dict[str, JobInfo]:
    """Parse squeue's output into jobs by id; expand the pending tasks of an array, which share one record."""
    found: dict[str, JobInfo] = {}
    for fields in records(text, len(_QUEUE_FIELDS)):
        number, array, task, word, reason, nodes, num_nodes, start, end, restarts, exit_code, name = fields
        job_id = number if task in ("", "N/A") else f"{array}_{task if task.isdigit() else f'[{task}]'}"
        restart_count = int(restarts) if restarts.isdigit() else None
        state = state_in_queue(word, restart_count)
        info = _job(job_id, state, word, nodes, num_nodes, start, end, exit_code, name)
        if state is JobState.UNKNOWN:
            reason = unknown_sentence(word, "squeue")
        reason = "" if reason in ("None", "N/A") else reason
        _add(found, replace(info, reason=reason, restarts=restart_count, number=number))
    return found


def _job(job_id: str, state: JobState, word: str, nodes: str, *more: str) -> JobInfo:
    """Create a job from the fields that squeue and sacct both print, in sacct's order."""
    num_nodes, start, end, exit_code, name = more
    code, signal = _exit_of(exit_code) if state.is_terminal else (None, None)
    return SlurmJob(
        job_id=job_id,
        state=state,
        slurm_state=word,
        nodes="" if nodes in _NO_NODES else nodes,
        num_nodes=int(num_nodes) if num_nodes.isdigit() else 0,
        start_time=time_of(start),
        end_time=time_of(end),
        exit_code=code,
        exit_signal=signal,
        name=name,
    )


def _add(found: dict[str, JobInfo], info: JobInfo) -> None:
    if "[" not in info.job_id:
        found[info.job_id] = info
        return
    for job_id in expand_tasks(info.job_id):
        found.setdefault(job_id, replace(info, job_id=job_id))


def _query_accounting(missing: Sequence[str], cluster: str) -> tuple[dict[str, JobInfo], str]:
    """Return the jobs that accounting lists, and the reason why the state of all other jobs is unknown."""
    bases = ",".join(dict.fromkeys(map(base_id, missing)))
    if len(bases) > _LONGEST_ARGUMENT:
        bases = bases[:_LONGEST_ARGUMENT].rpartition(",")[0]
    argv = [
        "sacct",
        "--allocations",
        "--noheader",
        "--parsable",
        f"--delimiter={FIELD}",
        f"--format={','.join(_ACCOUNTING_FIELDS)}",
        f"--jobs={bases}",
    ]
    try:
        text = query(argv, timeout_s=_ACCOUNTING_TIMEOUT_S, patience_s=0.0, cluster=cluster)
    except TrainkitError as error:
        problem = error.message.splitlines()[-1]
        return {}, f"squeue no longer lists the job, and accounting does not answer: {problem}"
    return parse_accounting(text), UNKNOWN_JOB


def parse_accounting(text: str) -> dict[str, JobInfo]:
    """Parse sacct's output into jobs by id. Use this function only for jobs that squeue does not list."""
    found: dict[str, JobInfo] = {}
    for fields in records(text, len(_ACCOUNTING_FIELDS), end=FIELD):
        job_id, word, nodes, *rest = fields
        state = state_in_accounting(word)
        info = _job(job_id, state, word, nodes, *rest)
        _add(found, info if state.is_terminal else replace(info, reason=unknown_sentence(word, "accounting")))
    return found


def _exit_of(text: str) -> tuple[int | None, int | None]:
    """Parse an exit status into (exit code, signal): `1:0`, `0:9`, or squeue 22.05's wait(2) status."""
    code, colon, signal = text.partition(":")
    if not code.isdigit():
        return None, None
    if not colon:
        number = int(code) & 0x7F
        return (0, number) if number else (int(code) >> 8 & 0xFF, None)
    return int(code), (int(signal) if signal.isdigit() and int(signal) else None)


_PAIR = re.compile(r"(?:^|\s)(?P<name>[A-Z][A-Za-z/:_]*)=(?P<value>\S*)")


@dataclass(frozen=True)
class JobDetails:
    """The details of one job as reported by scontrol, with times in UTC."""

    state: JobState
    slurm_state: str
    """Slurm's name for the job's state."""
    is_preempted: bool
    """True if the job is being preempted or was preempted."""
    restarts: int
    """How many times Slurm has requeued the job."""
    may_requeue: bool
    end_time: datetime | None
    """The time when the job reaches its time limit."""
    reason: str = ""
    """Slurm's reason for the job's state, such as TimeLimit."""


def job_details(
    job_id: str, *, timeout_s: float = QUERY_TIMEOUT_S, patience_s: float = QUERY_PATIENCE_S
) -> JobDetails:
    """Return the details of a job, or of one array task such as `123_4`.

    Raises SlurmUnreachable if Slurm does not answer, and SlurmRefused if Slurm no longer knows the job.
    """
    job_id, cluster = split_job(checked_job_id(job_id))
    argv = ["scontrol", "--oneliner", "show", "job", job_id]
    return parse_job(query(argv, timeout_s=timeout_s, patience_s=patience_s, cluster=cluster))


def parse_job(text: str) -> JobDetails:
    """Parse `scontrol show job`: `Name=value` pairs, with free text before UserId and at the end."""
    # If a name occurs several times, use its first value.
    found: dict[str, str] = dict(reversed(_PAIR.findall(text.partition(" UserId=")[2])))
    word = found.get("JobState", "")
    restarts = int(found["Restarts"]) if found.get("Restarts", "").isdigit() else 0
    preempted = time_of(found.get("PreemptTime", "")) is not None
    return JobDetails(
        state=state_in_queue(word, restarts),
        slurm_state=word,
        is_preempted=preempted or word == "PREEMPTED",
        may_requeue=found.get("Requeue") == "1",
        restarts=restarts,
        end_time=time_of(found.get("EndTime", "")),
        reason=found.get("Reason", ""),
    )
