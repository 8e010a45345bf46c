"""Why a job waits, in words."""

from __future__ import annotations

import pytest

from trainkit.slurm.states import reason_sentence

SENTENCES = {
    "Resources": "waiting for nodes to become free; next in line",
    "(Priority)": "other jobs have a higher priority",
    "Dependency": "waiting for the jobs that it depends on",
    "DependencyNeverSatisfied": "will never start, because a job that it depends on failed: cancel it",
    "JobHeldUser": "is held by its user: `scontrol release JOB` releases it",
    "QOSMaxJobsPerUserLimit": "you have reached your limit of running jobs in its QOS",
    "QOSMaxGRESPerUser": "you have reached your limit of GPUs in its QOS",
    "QOSMaxSubmitJobPerUserLimit": "you have reached your limit of submitted jobs in its QOS",
    "AssocGrpGRES": "its account has reached its limit of GPUs",
    "AssocGrpGRESMinutes": "its account has reached its limit of GPU minutes",
    "AssocGrpCPURunMinutesLimit": "its account has reached its limit of CPU minutes of running jobs",
    "AssocMaxJobsLimit": "its account has reached its limit of running jobs",
    "QOSGrpNodeLimit": "its QOS has reached its limit of nodes",
    "QOSGrpMemLimit": "its QOS has reached its limit of memory",
    "MaxGRESPerAccount": "its account has reached its limit of GPUs",
    "QOSMaxWallDurationPerJobLimit": "requests more time than its QOS allows per job",
    "AssocMaxGRESPerJob": "requests more GPUs than its account allows per job",
    "QOSMaxCpuPerNode": "requests more CPUs than its QOS allows per node",
    "QOSMinGRES": "requests less than the minimum of its QOS: GPUs",
    "QOSMinCpuNotSatisfied": "requests less than the minimum of its QOS: CPUs",
    "Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher_priority_partitions": (
        "nodes that it needs are down, drained or reserved for jobs of higher priority"
    ),
    "launch_failed_requeued_held": "could not be launched and is held: `scontrol release JOB` releases it",
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
