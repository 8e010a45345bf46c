"""Tests ids and states of jobs, the meaning of Slurm's states for each source, and reasons for a wait."""

import pytest

from tests.support.said import said
from trainkit.errors import UsageError
from trainkit.scheduler import JobState, array_indices, base_id, by_cluster, is_job_id, on_cluster
from trainkit.slurm.states import checked_job_id, reason_sentence, state_in_accounting, state_in_queue

IN_QUEUE = {  # with the number of restarts, if it is not 0
    "pending": "PENDING",
    "requeued": "PENDING/2 REQUEUED REQUEUE_FED EXPEDITING/1",  # the last job is first in the queue
    "held": "REQUEUE_HOLD/1 RESV_DEL_HOLD SPECIAL_EXIT/1",
    "starting": "CONFIGURING POWER_UP_NODE",
    "running": "RUNNING/3 RESIZING SIGNALING",
    "suspended": "SUSPENDED STOPPED",
    "completing": "COMPLETING/1 STAGE_OUT",
    "completed": "COMPLETED",
    "failed": "FAILED BOOT_FAIL LAUNCH_FAILED RECONFIG_FAIL",
    "cancelled": "CANCELLED",
    "timeout": "TIMEOUT DEADLINE",
    "node_fail": "NODE_FAIL/1",
    "out_of_memory": "OUT_OF_MEMORY",
    "preempted": "PREEMPTED",
    "unknown": "? REVOKED A_STATE_OF_2030",
}


def test_in_queue():
    words = [(word.partition("/"), state) for state, line in IN_QUEUE.items() for word in line.split()]
    for (word, _, restarts), state in words:
        assert state_in_queue(word, int(restarts or 0)).value == state, word
    assert (state_in_queue("PENDING", None), state_in_queue("", 0)) == (JobState.PENDING, JobState.UNKNOWN)


IN_ACCOUNTING = {
    "completed": ("COMPLETED", "COMPLETE+"),
    "cancelled": ("CANCELLED by 1000", "CANCELLED+"),
    "out_of_memory": ("OUT_OF_MEMORY", "OUT_OF_ME+"),
    "node_fail": ("NODE_F+",),
    "preempted": ("PREEMPTED",),
    # COMPLET+ may be COMPLETING. squeue has forgotten the job, so RUNNING, PENDING and REQUEUED are outdated.
    "unknown": ("COMPLET+", "+", "REVOKED", "REVOKED by 1000", "RUNNING", "PENDING", "REQUEUED", ""),
}


@pytest.mark.parametrize("state", IN_ACCOUNTING)
def test_in_accounting(state):
    assert {state_in_accounting(word).value for word in IN_ACCOUNTING[state]} == {state}


def test_what_has_ended():
    ended = {"completed", "failed", "cancelled", "timeout", "preempted", "node_fail", "out_of_memory"}
    assert {state.value for state in JobState if state.is_terminal} == ended
    for state in JobState:
        kinds = (state.is_terminal, state.is_waiting, state.is_active, state is JobState.UNKNOWN)
        assert kinds.count(True) == 1, state


LIMITS = (
    *("AssocGrpGRES", "AssocGrpCPURunMinutesLimit", "AssocMaxWallDurationPerJobLimit", "AssocGrpBBMinutes"),
    *("AssociationJobLimit", "QOSMaxCpuPerUserLimit", "QOSGrpSubmitJobsLimit", "QOSTimeLimit"),
    *("QOSMaxUnknownMinutesPerJob", "MaxGRESPerAccount", "MaxCpuRunMinsPerAccount", "MaxNodeRunMinsPerUser"),
)
"""Some of the 170 limits of all versions. The part that they share says whose limit it is."""
REASONS = (
    *("Resources", "(Priority)", *LIMITS, "QOSMinCpuNotSatisfied", "QOSMinGRES", "MaxPoweredUpNodes"),
    "Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher_priority_partitions",
    "Nodes required for job are DOWN, DRAINED, REBOOTING or reserved for jobs in higher priority partitions",
    *("launch_failed_requeued_held", "launch failure limit exceeded requeued held"),
    *("job_requeued_in_held_state", "Licenses", "InvalidQOS", "Dependency", "DependencyNeverSatisfied"),
    *("Reservation maint_1 was deleted", "Reservation_maint_1_is_invalid", "RaisedSignal:9(Killed)"),
    # Details are kept: a list of hosts unchanged, and a text without scontrol's underscores.
    *("ReqNodeNotAvail, UnavailableNodes:gpu_n[1-3,7],b_1", "ReqNodeNotAvail, UnavailableNodes:"),
    *("ReqNodeNotAvail,_May_be_reserved_for_other_job", "ReqNodeNotAvail(Unavailable:n_1)"),
    "Dependency,JobArrayTaskLimit",  # the reasons belong to two tasks of an array
)
PENDING = """
AccountNotAllowed AccountingPolicy BadConstraints BeginTime BlockFreeAction BlockMaxError BurstBufferOperation
BurstBufferResources BurstBufferStageIn Cleaning Constraints DeadLine Dependency DependencyNeverSatisfied
FedJobLock FrontEndDown InactiveLimit InvalidAccount InvalidQOS JobArrayTaskLimit JobHeldAdmin JobHeldUser
JobHoldMaxRequeue JobLaunchFailure Licenses MaxMemPerLimit MaxPoweredUpNodes MpiPortsBusy NodeDown
NvidiaImexChannels PartitionConfig PartitionDown PartitionInactive PartitionNodeLimit PartitionTimeLimit
PowerNotAvail PowerReserved Priority Prolog QOSNotAllowed QOSUsageThreshold ReqNodeNotAvail Reservation
ReservationDeleted ReservationInvalid Resources SchedDefer
"""
"""Every reason of Slurm 22.05 to 26.05 for a pending job, except for the limits."""
OTHERS = (
    "SomethingNew",
    "QOSmax",
    "held by the dean",
    "Nodes required, but moved",
    "What, UnavailableNodes:n3",
)


def test_reasons():
    said("\n".join(reason_sentence(reason) for reason in REASONS))
    assert [reason for reason in PENDING.split() if " " not in reason_sentence(reason)] == []
    assert {reason_sentence(reason) for reason in ("", "None", "N/A", "(null)")} == {""}
    assert [reason_sentence(reason) for reason in OTHERS] == [*OTHERS], "an unknown reason is shown as it is"


def test_job_ids():
    for text in ("1", "123456789", "123_0", "123_42"):
        assert is_job_id(text)
        for name in (text, on_cluster(text, "west-2")):
            assert checked_job_id(name) == name


@pytest.mark.parametrize(
    "text", ["", "-1", "a", "1 ", "1;", "1; 2", "1_", "_1", "1_[2-3]", "1.0", "1_2_3", "--all", "1\n", "١"]
)
def test_no_job_ids(text):
    assert not is_job_id(text)
    with pytest.raises(UsageError, match="is not a Slurm job id"):
        checked_job_id(text)


def test_jobs_of_other_clusters():
    names = [on_cluster("7", None), on_cluster("7", "east"), on_cluster("8_[1-2]", "east"), "9", "7"]
    assert names == ["7", "7;east", "8_[1-2];east", "9", "7"]
    assert by_cluster(names) == {"": ["7", "9"], "east": ["7", "8_[1-2]"]}
    for cluster in (None, "east", "my_cluster", "my-2_b-c"):
        names = [on_cluster(text, cluster) for text in ("12", "12_3", "12_[4-9%2]", "12+1")]
        assert list(map(base_id, names)) == [on_cluster("12", cluster)] * 4


def test_array_indices():
    specs = ("0-3", "1,3,5", "0-15:5,20%2", "7", "3-1")
    assert list(map(array_indices, specs)) == [[0, 1, 2, 3], [1, 3, 5], [0, 5, 10, 15, 20], [7], []]
    for spec in ("", "a", "1-", "1--2", "1,,2", "-1", "1-2:", "0-9:0", "1;2"):
        with pytest.raises(UsageError, match="invalid job array indices"):
            array_indices(spec)
