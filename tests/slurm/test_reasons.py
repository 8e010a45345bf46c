"""Why a job waits, in words."""

from __future__ import annotations

import pytest

from trainkit.slurm.states import reason_sentence

SENTENCES = {
    "Resources": "waits for nodes to become free; it is next in line",
    "(Priority)": "other jobs come first",
    "Dependency": "waits for the jobs that it depends on",
    "DependencyNeverSatisfied": "will never start: a job that it depends on did not end as needed; cancel it",
    "JobHeldUser": "is held by its user: `scontrol release JOB` lets it go",
    "QOSMaxJobsPerUserLimit": "you are at your limit of running jobs in its QOS",
    "QOSMaxGRESPerUser": "you are at your limit of GPUs in its QOS",
    "QOSMaxSubmitJobPerUserLimit": "you are at your limit of submitted jobs in its QOS",
    "AssocGrpGRES": "its account is at its limit of GPUs",
    "AssocGrpGRESMinutes": "its account is at its limit of GPU minutes",
    "AssocGrpCPURunMinutesLimit": "its account is at its limit of CPU minutes of running jobs",
    "AssocMaxJobsLimit": "its account is at its limit of running jobs",
    "QOSGrpNodeLimit": "its QOS is at its limit of nodes",
    "QOSGrpMemLimit": "its QOS is at its limit of memory",
    "MaxGRESPerAccount": "its account is at its limit of GPUs",
    "QOSMaxWallDurationPerJobLimit": "asks for more time than its QOS allows a job",
    "AssocMaxGRESPerJob": "asks for more GPUs than its account allows a job",
    "QOSMaxCpuPerNode": "asks for more CPUs than its QOS allows a node",
    "QOSMinGRES": "asks for less than its QOS demands: GPUs",
    "QOSMinCpuNotSatisfied": "asks for less than its QOS demands: CPUs",
    "Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher_priority_partitions": (
        "nodes that it needs are down, drained or reserved for jobs of higher priority"
    ),
    "launch_failed_requeued_held": "could not be launched and is held: `scontrol release JOB` lets it go",
}


@pytest.mark.parametrize("reason", SENTENCES)
def test_sentence(reason: str) -> None:
    assert reason_sentence(reason) == SENTENCES[reason]


@pytest.mark.parametrize("reason", ["", "None", "N/A", "(null)"])
def test_no_reason(reason: str) -> None:
    assert reason_sentence(reason) == ""


@pytest.mark.parametrize(
    "reason", ["SomethingNew", "QOSMaxFooPerUser", "held by the dean", "Nodes required, but moved"]
)
def test_unknown_reasons_are_shown_as_they_are(reason: str) -> None:
    assert reason_sentence(reason) == reason


def test_what_slurm_adds_is_kept() -> None:
    known = reason_sentence("ReqNodeNotAvail")
    assert known == "nodes that it needs are down, drained or reserved, for example for maintenance"
    assert reason_sentence("ReqNodeNotAvail, UnavailableNodes:n3") == f"{known} (UnavailableNodes:n3)"


@pytest.mark.parametrize(
    "reason",
    [
        *(
            "BeginTime",
            "Reservation",
            "ReservationDeleted",
            "PartitionTimeLimit",
            "PartitionNodeLimit",
            "PartitionDown",
        ),
        *(
            "PartitionInactive",
            "PartitionConfig",
            "NodeDown",
            "BadConstraints",
            "JobHeldAdmin",
            "JobHoldMaxRequeue",
        ),
        *(
            "JobArrayTaskLimit",
            "Licenses",
            "InvalidAccount",
            "InvalidQOS",
            "QOSNotAllowed",
            "AccountNotAllowed",
        ),
        *("AccountingPolicy", "Cleaning", "Prolog", "SchedDefer", "MaxMemPerLimit", "QOSUsageThreshold"),
        *(
            "AssocGrpCpuLimit",
            "AssocGrpMemLimit",
            "AssocGrpNodeLimit",
            "AssocGrpJobsLimit",
            "AssocGrpWallLimit",
        ),
        *(
            "AssocMaxWallDurationPerJobLimit",
            "AssocGrpBillingMinutes",
            "QOSGrpGRESRunMinutes",
            "QOSMaxNodePerUserLimit",
        ),
        *(
            "MaxJobsPerAccount",
            "MaxSubmitJobsPerAccount",
            "QOSMaxMemoryPerUser",
            "QOSMaxCpuMinutesPerJobLimit",
        ),
    ],
)
def test_known_reasons_have_a_sentence(reason: str) -> None:
    assert " " in reason_sentence(reason)
