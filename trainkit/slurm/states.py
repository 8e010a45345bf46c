"""Ids and states of a job, the mapping from Slurm's states to them, and what Slurm's reasons mean. Pure.

An id is `123`, a task of an array `123_4`, or its pending tasks `123_[5-9%2]`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import groupby

from trainkit.errors import UsageError


class JobState(Enum):
    """State of a job; the value is shown to users."""

    PENDING = "pending"
    REQUEUED = "requeued"
    """Pending again after a preemption, a node failure or a requested requeue."""
    HELD = "held"
    STARTING = "starting"
    RUNNING = "running"
    SUSPENDED = "suspended"
    COMPLETING = "completing"
    """Its processes are being terminated. It may still be requeued."""
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    PREEMPTED = "preempted"
    NODE_FAIL = "node_fail"
    OUT_OF_MEMORY = "out_of_memory"
    UNKNOWN = "unknown"
    """Slurm no longer knows the job, or how it ended. Never treated as finished."""

    @property
    def is_terminal(self) -> bool:
        """Whether a job in this state has ended and will not restart."""
        return self in _TERMINAL

    @property
    def is_waiting(self) -> bool:
        """Whether a job in this state is pending."""
        return self in (JobState.PENDING, JobState.REQUEUED, JobState.HELD)

    @property
    def is_active(self) -> bool:
        """Whether a job in this state has nodes allocated."""
        return self in (JobState.STARTING, JobState.RUNNING, JobState.SUSPENDED, JobState.COMPLETING)


_TERMINAL = frozenset(
    {
        *(JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED, JobState.TIMEOUT),
        *(JobState.PREEMPTED, JobState.NODE_FAIL, JobState.OUT_OF_MEMORY),
    }
)
_STATES = {
    **{state.name: state for state in JobState},
    "REQUEUE_FED": JobState.REQUEUED,
    "EXPEDITING": JobState.REQUEUED,
    "REQUEUE_HOLD": JobState.HELD,
    "SPECIAL_EXIT": JobState.HELD,
    "RESV_DEL_HOLD": JobState.HELD,
    "CONFIGURING": JobState.STARTING,
    "POWER_UP_NODE": JobState.STARTING,
    "RESIZING": JobState.RUNNING,
    "SIGNALING": JobState.RUNNING,
    "STOPPED": JobState.SUSPENDED,
    "STAGE_OUT": JobState.COMPLETING,
    "BOOT_FAIL": JobState.FAILED,
    "LAUNCH_FAILED": JobState.FAILED,
    "RECONFIG_FAIL": JobState.FAILED,
    "DEADLINE": JobState.TIMEOUT,
}


def state_in_queue(word: str, restarts: int | None) -> JobState:
    """The state that squeue calls `word`.

    squeue shows a requeued job as COMPLETING, then as PENDING, so PREEMPTED and NODE_FAIL are final here.
    """
    state = _state(word)
    return JobState.REQUEUED if state is JobState.PENDING and restarts else state


def state_in_accounting(word: str) -> JobState:
    """The state that sacct calls `word`, such as `CANCELLED by 1000`, for a job that squeue does not list.

    Accounting lags behind: a job that it reports as pending or running counts as UNKNOWN.
    """
    state = _state(word)
    return state if state.is_terminal else JobState.UNKNOWN


def _state(word: str) -> JobState:
    """The state that Slurm calls `word`, which a narrow column cuts to `OUT_OF_ME+`."""
    name = word.partition(" ")[0]
    if not name.endswith("+"):
        return _STATES.get(name, JobState.UNKNOWN)
    found = {state for known, state in _STATES.items() if known.startswith(name[:-1])}
    return found.pop() if len(found) == 1 else JobState.UNKNOWN


def unknown_sentence(word: str, source: str) -> str:
    """Why a job is unknown that `source`, such as squeue, lists with the state `word`."""
    if word.partition(" ")[0] == "REVOKED":
        return "another cluster of its federation has taken it: `squeue --federation` shows which"
    if _state(word) is JobState.UNKNOWN:
        return f"{source} reports the state {word}, whose meaning is not known"
    return f"squeue no longer lists it, but {source} still reports {word}"


_SENTENCES = {
    "Resources": "waiting for nodes to become free; next in line",
    "Priority": "other jobs have a higher priority",
    "Dependency": "waiting for the jobs that it depends on",
    "DependencyNeverSatisfied": "will never start, because a job that it depends on failed: cancel it",
    "BeginTime": "waiting for its begin time; a requeued job waits about two minutes",
    "Cleaning": "is being cleaned up after its last run",
    "Reservation": "waiting for its reservation to begin",
    "ReservationDeleted": "its reservation was deleted: choose another or none",
    "ReservationInvalid": "its reservation is no longer valid: choose another or none",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved, for example for maintenance",
    "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions": (
        "nodes that it needs are down, drained or reserved for jobs of higher priority"
    ),
    "Nodes required for job are DOWN, DRAINED, REBOOTING or reserved "
    "for jobs in higher priority partitions": (
        "nodes that it needs are down, drained, rebooting or reserved for jobs of higher priority"
    ),
    "MaxPoweredUpNodes": "its cluster already has as many nodes powered up as it may have",
    "PowerNotAvail": "its cluster has no power left to start it",
    "PowerReserved": "the power that it needs is reserved for other jobs",
    "PartitionDown": "its partition is not starting jobs at the moment",
    "PartitionInactive": "its partition accepts no jobs and starts none at the moment",
    "PartitionNodeLimit": "requests more nodes than its partition has up or allows per job",
    "PartitionTimeLimit": "requests more time than its partition allows",
    "PartitionConfig": "requests more than its partition allows",
    "BadConstraints": "its constraints can never be satisfied: cancel it and change the request",
    "Constraints": "its constraints cannot be satisfied now",
    "JobHeldUser": "is held by its user: `scontrol release JOB` releases it",
    "JobHeldAdmin": "is held by an administrator",
    "JobHoldMaxRequeue": "is held because it was requeued too often: `scontrol release JOB` releases it",
    "JobArrayTaskLimit": "its array already runs its maximum number of tasks",
    "JobLaunchFailure": "could not be launched, for example because of a broken node or a missing folder",
    "launch failed requeued held": "could not be launched and is held: `scontrol release JOB` releases it",
    "launch failure limit exceeded requeued held": (
        "is held because it could not be launched several times: `scontrol release JOB` releases it"
    ),
    "job requeued in held state": "was requeued and is held: `scontrol release JOB` releases it",
    "job requeued in special exit state": (
        "is held because it ended with an exit code that the site treats specially: "
        "`scontrol release JOB` releases it"
    ),
    "user env retrieval failed requeued held": (
        "is held because its node could not read the login environment: `scontrol release JOB` releases it"
    ),
    "Licenses": "waiting for a license that other jobs use",
    "NodeDown": "a node that it needs is down",
    "FrontEndDown": "no front-end node is up to start it",
    "BlockMaxError": "its hardware has failed too often to be prepared: an administrator has to look at it",
    "BlockFreeAction": "its hardware is being released by another job",
    "FedJobLock": "waiting for the clusters of its federation to agree which one starts it",
    "MpiPortsBusy": "waiting for ports that MPI needs on its nodes",
    "NvidiaImexChannels": "waiting for an IMEX channel, through which GPUs of several nodes share memory",
    "InvalidAccount": "its account does not exist, or you may not charge it: cancel it and choose another",
    "InvalidQOS": "its QOS does not exist, or you may not use it: cancel it and choose another",
    "SchedDefer": "waiting for the next pass of the scheduler",
    "InactiveLimit": "reached the limit of idle time",
    "DeadLine": "can no longer end before its deadline",
    "BurstBufferResources": "waiting for space in a burst buffer",
    "BurstBufferStageIn": "its data is being copied into a burst buffer",
    "BurstBufferOperation": "its burst buffer failed: an administrator has to look at it",
    "Burst buffer pre run error": "its burst buffer failed: an administrator has to look at it",
    "QOSNotAllowed": "its QOS is not allowed in its partition or account",
    "AccountNotAllowed": "its account is not allowed in its partition",
    "AccountingPolicy": "its account or QOS has reached a limit",
    "QOSUsageThreshold": "its account has used more than this QOS allows",
    "Prolog": "its nodes are being prepared",
    "MaxMemPerLimit": "requests more memory per CPU or node than allowed",
    # Of a job that has ended.
    "SystemFailure": "Slurm or a node failed",
    "NonZeroExitCode": "ended with an error",
    "RaisedSignal": "was killed by a signal",
    "TimeLimit": "reached its time limit",
    "OutOfMemory": "ran out of memory",
}

_LIMIT = re.compile(r"(?:Assoc|QOS)?(?:Grp|Max|Min)[A-Z]\w+|(?:Association|QOS)(?:Job|Resource|Time)Limit")
"""The name of a limit, such as AssocGrpGRES, QOSMaxCpuPerUserLimit, MaxGRESPerAccount and QOSTimeLimit."""
_MINIMUM = re.compile(r"(?:Assoc|QOS)?Min")
_RESERVATION = re.compile(r"Reservation[ _](?P<name>.+)[ _](?P<what>was[ _]deleted|is[ _]invalid)")


def reason_sentence(reason: str) -> str:
    """Explain squeue's reason as a sentence about the job without its subject; unknown reasons are unchanged.

    Empty for a job without a reason. Details (`ReqNodeNotAvail, UnavailableNodes:node3`) are kept.
    """
    text = reason.strip()
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    if text in ("", "None", "N/A", "null"):
        return ""
    if (known := _explained(text)) is not None:
        return known
    # squeue combines the reasons of pending tasks of an array that it shows as one.
    names = text.split(",")
    if all(several := [_explained(name) for name in names]):
        return "; ".join(filter(None, several))
    name = re.split(r"[,:(]", text, maxsplit=1)[0]
    known, details = _explained(name), text[len(name) :].lstrip(",: _")
    if known is None:
        return reason
    # scontrol writes spaces as underscores, which are also in the names of hosts.
    details = details if ":" in details else details.replace("_", " ")
    if not details or details.endswith(":"):
        return known
    return f"{known} {details if details.startswith('(') else f'({details})'}"


def _explained(reason: str) -> str | None:
    """The sentence for a reason without details; None for an unknown one."""
    plain = reason.replace("_", " ")
    if plain in _SENTENCES:
        return _SENTENCES[plain]
    if _LIMIT.fullmatch(reason):
        whose = "account" if reason.startswith("Assoc") else "QOS"
        relation = "is below" if _MINIMUM.match(reason) else "would exceed"
        return f"{relation} a limit of its {whose}: {reason}"
    if (match := _RESERVATION.fullmatch(reason)) is not None:
        return f"its reservation {match['name']} {match['what'].replace('_', ' ')}: choose another or none"
    return None


LARGEST_INDEX = 4_000_000
"""Slurm's own limit; MaxArraySize is far lower at most sites."""

_JOB_ID = re.compile(r"\d+(?:_\d+)?", re.ASCII)
_JOB = re.compile(rf"{_JOB_ID.pattern}(?:;[\w.-]+)?", re.ASCII)
_OTHER_SPAN = re.compile(r"(\d+)\s*(?:\.{2,3}|:|to|\N{EN DASH})\s*(\d+)", re.ASCII)
"""A span as other programs write it."""
_SPAN = re.compile(r"(?P<first>\d+)(?:-(?P<last>\d+)(?::(?P<stride>[1-9]\d*))?)?", re.ASCII)


def is_job_id(text: str) -> bool:
    """Whether a string is the id of a job or of one array task."""
    return bool(_JOB_ID.fullmatch(text))


def on_cluster(job_id: str, cluster: str | None) -> str:
    """The name of a job: its id, on another cluster `1234;east`, as `sbatch --parsable` prints it."""
    return f"{job_id};{cluster}" if cluster else job_id


def split_job(job: str) -> tuple[str, str]:
    """The id of a job that `on_cluster` names, and its cluster: empty for an id alone."""
    job_id, _, cluster = job.partition(";")
    return job_id, cluster


def by_cluster(jobs: Iterable[str]) -> dict[str, list[str]]:
    """The ids of jobs that are named so, by cluster: that of an id alone is the empty text."""
    found: dict[str, list[str]] = {}
    for job in dict.fromkeys(jobs):
        job_id, cluster = split_job(job)
        found.setdefault(cluster, []).append(job_id)
    return found


def checked_job_id(text: str) -> str:
    """The id of a job, with its cluster if that is named, unchanged; raises UsageError if it is not one."""
    if not _JOB.fullmatch(text):
        raise UsageError(
            f"{text!r} is not a Slurm job id", hint="for example 1234, or 1234_5 for a task of an array"
        )
    return text


def base_id(job_id: str) -> str:
    """`123` of `123`, `123_4`, `123_[5-9]` and `123+1`; the name of a cluster is kept."""
    number, cluster = split_job(job_id)
    return on_cluster(re.sub(r"[_+].*", "", number), cluster)


def expand_tasks(job_id: str) -> list[str]:
    """The tasks of `123_[5-7,9%2]`, in order; any other id as a list of itself."""
    base, bracket, spec = job_id.partition("_[")
    if not bracket or not spec.endswith("]"):
        return [job_id]
    return [f"{base}_{index}" for index in array_indices(spec[:-1])]


def array_indices(spec: str) -> list[int]:
    """The indices of an array spec such as `0-15:4,20%2`; raises UsageError for any other form."""
    indices: list[int] = []
    for item in spec.partition("%")[0].split(","):
        match = _SPAN.fullmatch(item)
        if match is None or int(match["last"] or match["first"]) > LARGEST_INDEX:
            ends = _OTHER_SPAN.fullmatch(spec)
            hint = (
                "for example 0-15, 1,3,5 or 0-99%4" if ends is None else f"did you mean {ends[1]}-{ends[2]}?"
            )
            raise UsageError(f"not the indices of a job array: {spec!r}", hint=hint)
        first = int(match["first"])
        last = int(match["last"]) if match["last"] else first
        indices += range(first, last + 1, int(match["stride"] or 1))
    return indices


def array_spec(indices: Sequence[int], limit: int | None = None) -> str:
    """Indices in ascending order as `--array` of sbatch takes them: `0-15,20`, with a limit `0-15,20%4`."""
    # Indices that follow one another differ from their positions by the same number.
    spans = [list(span) for _, span in groupby(enumerate(indices), lambda item: item[1] - item[0])]
    texts = [f"{span[0][1]}-{span[-1][1]}" if len(span) > 1 else str(span[0][1]) for span in spans]
    return ",".join(texts) + ("" if limit is None else f"%{limit}")
