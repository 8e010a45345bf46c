"""Maps Slurm's states to job states, and explains Slurm's reasons in plain English.

This module runs no commands.
"""

from __future__ import annotations

import re

from trainkit.errors import UsageError
from trainkit.scheduler import JOB_ID, JobState

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
    """Return the job state for `word`, a job's state in squeue's output.

    For a job that is being requeued, squeue prints COMPLETING, then PENDING. PREEMPTED and NODE_FAIL in
    squeue's output therefore mean that a job has ended and will not restart.
    """
    state = _state(word)
    return JobState.REQUEUED if state is JobState.PENDING and restarts else state


def state_in_accounting(word: str) -> JobState:
    """Return the job state for `word`, the state in sacct's output of a job that squeue does not list.

    `word` may contain details, as in `CANCELLED by 1000`. Accounting data lags behind, so a job that sacct
    still lists as pending or running is considered UNKNOWN.
    """
    state = _state(word)
    return state if state.is_terminal else JobState.UNKNOWN


def _state(word: str) -> JobState:
    """Return the job state for Slurm's state `word`, which may be truncated as in `OUT_OF_ME+`."""
    name = word.partition(" ")[0]
    if not name.endswith("+"):
        return _STATES.get(name, JobState.UNKNOWN)
    found = {state for known, state in _STATES.items() if known.startswith(name[:-1])}
    return found.pop() if len(found) == 1 else JobState.UNKNOWN


def unknown_sentence(word: str, source: str) -> str:
    """Return why a job's state is unknown although `source`, for example squeue, lists the job as `word`."""
    if word.partition(" ")[0] == "REVOKED":
        return "another cluster of the federation has taken the job: `squeue --federation` shows which one"
    if _state(word) is JobState.UNKNOWN:
        return f"{source} reports the unknown state {word}"
    return f"squeue no longer lists the job, but {source} still reports {word}"


_SENTENCES = {
    "Resources": "waiting for nodes to become free; next in line",
    "Priority": "other jobs have a higher priority",
    "Dependency": "waiting for the jobs on which this job depends",
    "DependencyNeverSatisfied": "will never start, because a dependency failed: cancel the job",
    "BeginTime": "waiting for the job's begin time; a requeued job waits about two minutes",
    "Cleaning": "is being cleaned up after its last run",
    "Reservation": "waiting for the job's reservation to begin",
    "ReservationDeleted": "the job's reservation was deleted: choose another reservation or none",
    "ReservationInvalid": "the job's reservation is no longer valid: choose another reservation or none",
    "ReqNodeNotAvail": "nodes that the job needs are down, drained or reserved, for example for maintenance",
    "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions": (
        "nodes that the job needs are down, drained or reserved for jobs of higher priority"
    ),
    "Nodes required for job are DOWN, DRAINED, REBOOTING or reserved "
    "for jobs in higher priority partitions": (
        "nodes that the job needs are down, drained, rebooting or reserved for jobs of higher priority"
    ),
    "MaxPoweredUpNodes": "the cluster already has its maximum number of nodes powered up",
    "PowerNotAvail": "the cluster has too little electrical power available to start the job",
    "PowerReserved": "the power that the job needs is reserved for other jobs",
    "PartitionDown": "the partition is not starting jobs at the moment",
    "PartitionInactive": "the partition does not accept or start jobs at the moment",
    "PartitionNodeLimit": (
        "requests more nodes than are up in the partition, or more than the partition allows per job"
    ),
    "PartitionTimeLimit": "requests more time than the partition allows",
    "PartitionConfig": "requests more resources than the partition allows",
    "BadConstraints": "the job's constraints can never be satisfied: cancel the job and change the request",
    "Constraints": "the job's constraints cannot be satisfied now",
    "JobHeldUser": "is held by the user: `scontrol release JOB` releases it",
    "JobHeldAdmin": "is held by an administrator",
    "JobHoldMaxRequeue": "is held because it was requeued too often: `scontrol release JOB` releases it",
    "JobArrayTaskLimit": "the array already has its maximum number of running tasks",
    "JobLaunchFailure": "could not be launched, for example because of a broken node or a missing folder",
    "launch failed requeued held": "could not be launched and is held: `scontrol release JOB` releases it",
    "launch failure limit exceeded requeued held": (
        "is held because several attempts to launch it failed: `scontrol release JOB` releases it"
    ),
    "job requeued in held state": "was requeued and is held: `scontrol release JOB` releases it",
    "job requeued in special exit state": (
        "is held because it exited with a code for which the site holds jobs: "
        "`scontrol release JOB` releases it"
    ),
    "user env retrieval failed requeued held": (
        "is held because a node could not read the login environment: `scontrol release JOB` releases it"
    ),
    "Licenses": "waiting for a license that other jobs use",
    "NodeDown": "a node that the job needs is down",
    "FrontEndDown": "no front-end node is up to start the job",
    "BlockMaxError": (
        "preparing the job's hardware failed too often: an administrator must check the hardware"
    ),
    "BlockFreeAction": "the job's hardware is being released by another job",
    "FedJobLock": "waiting for the clusters of the federation to agree on the cluster that starts the job",
    "MpiPortsBusy": "waiting for ports that MPI needs on the job's nodes",
    "NvidiaImexChannels": "waiting for an IMEX channel, through which GPUs of several nodes share memory",
    "InvalidAccount": (
        "the account does not exist, or you are not allowed to use it: cancel the job and choose another "
        "account"
    ),
    "InvalidQOS": (
        "the QOS does not exist, or you are not allowed to use it: cancel the job and choose another QOS"
    ),
    "SchedDefer": "waiting for the next pass of the scheduler",
    "InactiveLimit": "reached the idle time limit",
    "DeadLine": "can no longer finish before the deadline",
    "BurstBufferResources": "waiting for space in a burst buffer",
    "BurstBufferStageIn": "the job's data is being copied into a burst buffer",
    "BurstBufferOperation": "the burst buffer failed: an administrator must check the burst buffer",
    "Burst buffer pre run error": "the burst buffer failed: an administrator must check the burst buffer",
    "QOSNotAllowed": "the QOS is not allowed in the job's partition or account",
    "AccountNotAllowed": "the account is not allowed in the job's partition",
    "AccountingPolicy": "the job's account or QOS has reached a limit",
    "QOSUsageThreshold": "the account has used more than the QOS allows",
    "Prolog": "the job's nodes are being prepared",
    "MaxMemPerLimit": "requests more memory per CPU or node than allowed",
    # The reasons below apply to jobs that have ended.
    "SystemFailure": "Slurm or a node failed",
    "NonZeroExitCode": "ended with an error",
    "RaisedSignal": "was killed by a signal",
    "TimeLimit": "reached its time limit",
    "OutOfMemory": "ran out of memory",
}

_LIMIT = re.compile(r"(?:Assoc|QOS)?(?:Grp|Max|Min)[A-Z]\w+|(?:Association|QOS)(?:Job|Resource|Time)Limit")
"""Matches the names of Slurm limits, such as AssocGrpGRES, QOSMaxCpuPerUserLimit or QOSTimeLimit."""
_MINIMUM = re.compile(r"(?:Assoc|QOS)?Min")
_RESERVATION = re.compile(r"Reservation[ _](?P<name>.+)[ _](?P<what>was[ _]deleted|is[ _]invalid)")


def reason_sentence(reason: str) -> str:
    """Explain squeue's reason for a job's state in a sentence that omits its subject, the job.

    Returns an unknown reason unchanged, and "" if there is no reason. Keeps the details in a reason, for
    example in `ReqNodeNotAvail, UnavailableNodes:node3`.
    """
    text = reason.strip()
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    if text in ("", "None", "N/A", "null"):
        return ""
    if (known := _explained(text)) is not None:
        return known
    # If squeue prints the pending tasks of an array on one line, the reasons are joined with commas.
    names = text.split(",")
    if all(several := [_explained(name) for name in names]):
        return "; ".join(filter(None, several))
    name = re.split(r"[,:(]", text, maxsplit=1)[0]
    known, details = _explained(name), text[len(name) :].lstrip(",: _")
    if known is None:
        return reason
    # scontrol replaces spaces with underscores, but host names may also contain underscores.
    details = details if ":" in details else details.replace("_", " ")
    if not details or details.endswith(":"):
        return known
    return f"{known} {details if details.startswith('(') else f'({details})'}"


def _explained(reason: str) -> str | None:
    """Return the sentence for a reason without details, or None if the reason is unknown."""
    plain = reason.replace("_", " ")
    if plain in _SENTENCES:
        return _SENTENCES[plain]
    if _LIMIT.fullmatch(reason):
        whose = "account" if reason.startswith("Assoc") else "QOS"
        relation = "is below" if _MINIMUM.match(reason) else "would exceed"
        return f"{relation} a limit of its {whose}: {reason}"
    if (match := _RESERVATION.fullmatch(reason)) is not None:
        return (
            f"the job's reservation {match['name']} {match['what'].replace('_', ' ')}: choose another "
            "reservation or none"
        )
    return None


_JOB = re.compile(rf"{JOB_ID.pattern}(?:;[\w.-]+)?", re.ASCII)


def checked_job_id(text: str) -> str:
    """Return a job id, with or without a cluster, unchanged; raise UsageError if the id is malformed."""
    if not _JOB.fullmatch(text):
        raise UsageError(
            f"{text!r} is not a Slurm job id", hint="a job id looks like 1234, or 1234_5 for an array task"
        )
    return text
