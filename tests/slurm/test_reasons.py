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
    "QOSMaxJobsPerUserLimit": "would exceed a limit of its QOS: QOSMaxJobsPerUserLimit",
    "AssocGrpGRESMinutes": "would exceed a limit of its account: AssocGrpGRESMinutes",
    "MaxGRESPerAccount": "would exceed a limit of its account: MaxGRESPerAccount",
    "QOSMinCpuNotSatisfied": "is below a limit of its QOS: QOSMinCpuNotSatisfied",
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
    "reason", ["SomethingNew", "QOSmax", "held by the dean", "Nodes required, but moved"]
)
def test_unknown_reasons_are_shown_as_they_are(reason: str) -> None:
    assert reason_sentence(reason) == reason


def test_what_slurm_adds_is_kept() -> None:
    known = reason_sentence("ReqNodeNotAvail")
    assert known == "nodes that it needs are down, drained or reserved, for example for maintenance"
    assert reason_sentence("ReqNodeNotAvail, UnavailableNodes:n3") == f"{known} (UnavailableNodes:n3)"


KNOWN = """
BeginTime Reservation ReservationDeleted PartitionTimeLimit PartitionNodeLimit PartitionDown
PartitionInactive PartitionConfig NodeDown BadConstraints JobHeldAdmin JobHoldMaxRequeue
JobArrayTaskLimit Licenses InvalidAccount InvalidQOS QOSNotAllowed AccountNotAllowed
AccountingPolicy Cleaning Prolog SchedDefer MaxMemPerLimit QOSUsageThreshold AssocGrpCpuLimit
AssocMaxWallDurationPerJobLimit QOSGrpGRESRunMinutes MaxJobsPerAccount
"""


@pytest.mark.parametrize("reason", KNOWN.split())
def test_known_reasons_have_a_sentence(reason: str) -> None:
    assert " " in reason_sentence(reason)
