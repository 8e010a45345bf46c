"""Our words for the states of a job, and what Slurm's own states mean where they are read. Pure."""

from __future__ import annotations

import re
from enum import Enum


class JobState(Enum):
    """What a job is doing; the value is the word that people see."""

    PENDING = "pending"
    REQUEUED = "requeued"
    """Waits to be started again after it ran: preempted, a node failed, or somebody asked for it."""
    HELD = "held"
    STARTING = "starting"
    RUNNING = "running"
    SUSPENDED = "suspended"
    COMPLETING = "completing"
    """Its processes end. It may still be put back into the queue."""
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    PREEMPTED = "preempted"
    NODE_FAIL = "node_fail"
    OUT_OF_MEMORY = "out_of_memory"
    UNKNOWN = "unknown"
    """Slurm does not know the job any more and does not say how it ended. Never taken for finished."""

    @property
    def is_terminal(self) -> bool:
        """Whether a job in this state has ended and is not started again."""
        return self in _TERMINAL

    @property
    def is_waiting(self) -> bool:
        """Whether a job in this state is in the queue and waits to be started."""
        return self in (JobState.PENDING, JobState.REQUEUED, JobState.HELD)

    @property
    def is_active(self) -> bool:
        """Whether a job in this state has nodes."""
        return self in (JobState.STARTING, JobState.RUNNING, JobState.SUSPENDED, JobState.COMPLETING)


_TERMINAL = frozenset(
    {
        *(JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED, JobState.TIMEOUT),
        *(JobState.PREEMPTED, JobState.NODE_FAIL, JobState.OUT_OF_MEMORY),
    }
)
_WORDS = {
    "PENDING": JobState.PENDING,
    "REQUEUED": JobState.REQUEUED,
    "REQUEUE_FED": JobState.REQUEUED,
    "REQUEUE_HOLD": JobState.HELD,
    "SPECIAL_EXIT": JobState.HELD,
    "RESV_DEL_HOLD": JobState.HELD,
    "CONFIGURING": JobState.STARTING,
    "POWER_UP_NODE": JobState.STARTING,
    "RUNNING": JobState.RUNNING,
    "RESIZING": JobState.RUNNING,
    "SIGNALING": JobState.RUNNING,
    "SUSPENDED": JobState.SUSPENDED,
    "STOPPED": JobState.SUSPENDED,
    "COMPLETING": JobState.COMPLETING,
    "STAGE_OUT": JobState.COMPLETING,
    "EXPEDITING": JobState.COMPLETING,
    "COMPLETED": JobState.COMPLETED,
    "FAILED": JobState.FAILED,
    "BOOT_FAIL": JobState.FAILED,
    "LAUNCH_FAILED": JobState.FAILED,
    "RECONFIG_FAIL": JobState.FAILED,
    "CANCELLED": JobState.CANCELLED,
    "TIMEOUT": JobState.TIMEOUT,
    "DEADLINE": JobState.TIMEOUT,
    "PREEMPTED": JobState.PREEMPTED,
    "NODE_FAIL": JobState.NODE_FAIL,
    "OUT_OF_MEMORY": JobState.OUT_OF_MEMORY,
}


def state_in_queue(word: str, restarts: int | None) -> JobState:
    """What a state of squeue means.

    squeue shows a job that Slurm requeues as COMPLETING and then as PENDING, so here PREEMPTED and NODE_FAIL
    are the end.
    """
    state = _WORDS.get(word, JobState.UNKNOWN)
    return JobState.REQUEUED if state is JobState.PENDING and restarts else state


def state_in_accounting(word: str) -> JobState:
    """What a state of sacct (`CANCELLED by 1000`) means for a job that squeue does not know.

    Accounting lags: a job that it takes for alive is unknown.
    """
    state = _WORDS.get(word.partition(" ")[0].rstrip("+"), JobState.UNKNOWN)
    return state if state.is_terminal else JobState.UNKNOWN


_SENTENCES = {
    "Resources": "waits for nodes to become free; it is next in line",
    "Priority": "other jobs come first",
    "Dependency": "waits for the jobs that it depends on",
    "DependencyNeverSatisfied": "will never start: a job that it depends on did not end as needed; cancel it",
    "BeginTime": "may not start before its begin time; a requeued job waits like this for about two minutes",
    "Cleaning": "is being cleaned up after its last run before it can start again",
    "Reservation": "waits for its reservation to begin",
    "ReservationDeleted": "its reservation was deleted; choose another or none",
    "ReservationInvalid": "its reservation is not valid any more; choose another or none",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved, for example for maintenance",
    "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions": (
        "nodes that it needs are down, drained or reserved for jobs of higher priority"
    ),
    "NodeDown": "a node that it needs is down",
    "PartitionDown": "its partition is closed for new starts",
    "PartitionInactive": "its partition is inactive",
    "PartitionNodeLimit": "asks for more nodes than its partition has up or allows a job",
    "PartitionTimeLimit": "asks for more time than its partition allows",
    "PartitionConfig": "asks for more than its partition allows",
    "BadConstraints": "its constraints can never be fulfilled; cancel it and ask for something else",
    "Constraints": "its constraints cannot be fulfilled now",
    "JobHeldUser": "is held by its user: `scontrol release JOB` lets it go",
    "JobHeldAdmin": "is held by an administrator",
    "JobHoldMaxRequeue": "is held because it was requeued too often: `scontrol release JOB` lets it go",
    "JobArrayTaskLimit": "as many tasks of its array run as it allows at once",
    "JobLaunchFailure": "could not be launched, for example because of a broken node or a missing folder",
    "launch failed requeued held": "could not be launched and is held: `scontrol release JOB` lets it go",
    "Licenses": "waits for a licence",
    "InvalidAccount": "its account is not valid",
    "InvalidQOS": "its QOS is not valid",
    "QOSNotAllowed": "its QOS is not allowed in its partition or account",
    "AccountNotAllowed": "its account is not allowed in its partition",
    "AccountingPolicy": "a limit of its account or QOS is reached",
    "AssociationJobLimit": "its account runs as many jobs as it may",
    "AssociationResourceLimit": "its account uses as much as it may",
    "AssociationTimeLimit": "its account has used up its time",
    "QOSJobLimit": "its QOS runs as many jobs as it may",
    "QOSResourceLimit": "its QOS uses as much as it may",
    "QOSTimeLimit": "its QOS has used up its time",
    "QOSUsageThreshold": "its account has used more than this QOS allows",
    "Prolog": "its nodes are being prepared",
    "BurstBufferResources": "waits for space in the burst buffer",
    "BurstBufferStageIn": "its data is being copied into the burst buffer",
    "MaxMemPerLimit": "asks for more memory a CPU or node than is allowed",
    "PowerNotAvail": "waits for electric power under the cluster's cap",
    "PowerReserved": "waits for electric power that is reserved for others",
    "SchedDefer": "starts with the next round of the scheduler",
    "FedJobLock": "another cluster of the federation is deciding about it",
    "SystemFailure": "Slurm or a node failed",
    "NonZeroExitCode": "ended with an error",
    "RaisedSignal": "was ended by a signal",
    "TimeLimit": "ran into its time limit",
    "InactiveLimit": "was idle for too long",
    "OutOfMemory": "ran out of memory",
    "DeadLine": "missed its deadline",
}

_WHAT = {
    "cpu": ("CPUs", "CPU"),
    "mem": ("memory", "memory"),
    "memory": ("memory", "memory"),
    "node": ("nodes", "node"),
    "gres": ("GPUs", "GPU"),
    "job": ("running jobs", "job"),
    "jobs": ("running jobs", "job"),
    "submitjob": ("submitted jobs", "job"),
    "submitjobs": ("submitted jobs", "job"),
    "wall": ("time", "time"),
    "wallduration": ("time", "time"),
    "lic": ("licences", "licence"),
    "license": ("licences", "licence"),
    "bb": ("burst buffer", "burst buffer"),
    "energy": ("energy", "energy"),
    "billing": ("billing units", "billing"),
    "unknown": ("a resource", "resource"),
}
"""The resource of a limit: what is limited, and what its minutes are called."""
# AssocGrpGRES, QOSMaxCpuPerUserLimit, AssocGrpCPURunMinutesLimit, QOSMinGRES, MaxGRESPerAccount, …
_LIMIT = re.compile(
    r"(?P<whose>Assoc|QOS)?(?P<kind>Grp|Max|Min)(?P<what>[A-Za-z]+?)(?P<minutes>RunMinutes|Minutes)?"
    r"(?:Per(?P<each>Job|User|Node|Account))?(?:NotSatisfied)?(?:Limit)?"
)


def reason_sentence(reason: str) -> str:
    """What `squeue`'s reason means, as the end of a sentence about the job; an unknown reason as it is.

    Empty for a job that has no reason. What Slurm adds (`ReqNodeNotAvail, UnavailableNodes:node3`) is kept.
    """
    whole = reason.strip().strip("()").replace("_", " ")
    if whole in ("", "None", "N/A", "null"):
        return ""
    if whole in _SENTENCES:
        return _SENTENCES[whole]
    name, _, rest = whole.partition(",")
    rest = rest.strip()
    known = _SENTENCES.get(name) or _limit_sentence(name)
    if known is None:
        return reason
    return f"{known} ({rest})" if rest else known


def _limit_sentence(name: str) -> str | None:
    match = _LIMIT.fullmatch(name)
    names = _WHAT.get(match["what"].lower()) if match else None
    if match is None or names is None:
        return None
    minutes = {"Minutes": f"{names[1]} minutes", "RunMinutes": f"{names[1]} minutes of running jobs"}
    amount = minutes.get(match["minutes"] or "", names[0])
    whose = "account" if match["whose"] == "Assoc" or match["each"] == "Account" else "QOS"
    if match["kind"] == "Min":
        return f"asks for less than its {whose} demands: {amount}"
    if match["each"] in ("Job", "Node"):
        return f"asks for more {amount} than its {whose} allows a {match['each'].lower()}"
    if match["each"] == "User":
        return f"you are at your limit of {amount} in its {whose}"
    return f"its {whose} is at its limit of {amount}"
