"""Why a job waits, as sentences. Pure."""

from __future__ import annotations

import re

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
