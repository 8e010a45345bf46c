"""Tests ids and states of jobs, the meaning of Slurm's states for each source, and reasons for a wait."""

import pytest

from tests.support.said import said
from trainkit.errors import UsageError
from trainkit.scheduler import JobState, array_indices, base_id, by_cluster, is_job_id, on_cluster
from trainkit.slurm.states import checked_job_id, reason_sentence, state_in_accounting, state_in_queue


@pytest.mark.parametrize(
    ("word", "restarts", "state"),
    [
        ("PENDING", 0, JobState.PENDING),
        ("PENDING", None, JobState.PENDING),
        ("PENDING", 2, JobState.REQUEUED),
        ("REQUEUED", 0, JobState.REQUEUED),
        ("REQUEUE_FED", 0, JobState.REQUEUED),
        ("EXPEDITING", 1, JobState.REQUEUED),  # the job is first in the queue
        ("REQUEUE_HOLD", 1, JobState.HELD),
        ("RESV_DEL_HOLD", 0, JobState.HELD),
        ("SPECIAL_EXIT", 1, JobState.HELD),
        ("CONFIGURING", 0, JobState.STARTING),
        ("POWER_UP_NODE", 0, JobState.STARTING),
        ("RUNNING", 3, JobState.RUNNING),
        ("RESIZING", 0, JobState.RUNNING),
        ("SIGNALING", 0, JobState.RUNNING),
        ("SUSPENDED", 0, JobState.SUSPENDED),
        ("STOPPED", 0, JobState.SUSPENDED),
        ("COMPLETING", 1, JobState.COMPLETING),
        ("STAGE_OUT", 0, JobState.COMPLETING),
        ("COMPLETED", 0, JobState.COMPLETED),
        ("FAILED", 0, JobState.FAILED),
        ("BOOT_FAIL", 0, JobState.FAILED),
        ("LAUNCH_FAILED", 0, JobState.FAILED),
        ("RECONFIG_FAIL", 0, JobState.FAILED),
        ("CANCELLED", 0, JobState.CANCELLED),
        ("TIMEOUT", 0, JobState.TIMEOUT),
        ("DEADLINE", 0, JobState.TIMEOUT),
        ("NODE_FAIL", 1, JobState.NODE_FAIL),
        ("OUT_OF_MEMORY", 0, JobState.OUT_OF_MEMORY),
        ("PREEMPTED", 0, JobState.PREEMPTED),
        ("?", 0, JobState.UNKNOWN),
        ("REVOKED", 0, JobState.UNKNOWN),
        ("A_STATE_OF_2030", 0, JobState.UNKNOWN),
        ("", 0, JobState.UNKNOWN),
    ],
)
def test_in_queue(word, restarts, state):
    assert state_in_queue(word, restarts) is state


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("COMPLETED", JobState.COMPLETED),
        ("CANCELLED by 1000", JobState.CANCELLED),
        ("CANCELLED+", JobState.CANCELLED),
        ("OUT_OF_MEMORY", JobState.OUT_OF_MEMORY),
        ("OUT_OF_ME+", JobState.OUT_OF_MEMORY),
        ("NODE_F+", JobState.NODE_FAIL),
        ("COMPLETE+", JobState.COMPLETED),
        ("COMPLET+", JobState.UNKNOWN),  # the full state may be COMPLETING
        ("+", JobState.UNKNOWN),
        ("REVOKED", JobState.UNKNOWN),
        ("REVOKED by 1000", JobState.UNKNOWN),
        ("PREEMPTED", JobState.PREEMPTED),
        # squeue has forgotten these jobs, so accounting's state is outdated.
        ("RUNNING", JobState.UNKNOWN),
        ("PENDING", JobState.UNKNOWN),
        ("REQUEUED", JobState.UNKNOWN),
        ("", JobState.UNKNOWN),
    ],
)
def test_in_accounting(word, state):
    assert state_in_accounting(word) is state


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
REASONS = [
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
]


@pytest.mark.parametrize("reason", REASONS)
def test_sentence(reason):
    said(reason_sentence(reason))


PENDING = (
    *("AccountNotAllowed", "AccountingPolicy", "BadConstraints", "BeginTime", "BlockFreeAction"),
    *("BlockMaxError", "BurstBufferOperation", "BurstBufferResources", "BurstBufferStageIn", "Cleaning"),
    *("Constraints", "DeadLine", "Dependency", "DependencyNeverSatisfied", "FedJobLock", "FrontEndDown"),
    *("InactiveLimit", "InvalidAccount", "InvalidQOS", "JobArrayTaskLimit", "JobHeldAdmin", "JobHeldUser"),
    *("JobHoldMaxRequeue", "JobLaunchFailure", "Licenses", "MaxMemPerLimit", "MaxPoweredUpNodes"),
    *("MpiPortsBusy", "NodeDown", "NvidiaImexChannels", "PartitionConfig", "PartitionDown"),
    *("PartitionInactive", "PartitionNodeLimit", "PartitionTimeLimit", "PowerNotAvail", "PowerReserved"),
    *("Priority", "Prolog", "QOSNotAllowed", "QOSUsageThreshold", "ReqNodeNotAvail", "Reservation"),
    *("ReservationDeleted", "ReservationInvalid", "Resources", "SchedDefer"),
)
"""Every reason of Slurm 22.05 to 26.05 for a pending job, except for the limits."""


@pytest.mark.parametrize("reason", PENDING)
def test_every_reason_is_explained(reason):
    assert " " in reason_sentence(reason)


@pytest.mark.parametrize("reason", ["", "None", "N/A", "(null)"])
def test_no_reason(reason):
    assert reason_sentence(reason) == ""


@pytest.mark.parametrize(
    "reason",
    ["SomethingNew", "QOSmax", "held by the dean", "Nodes required, but moved", "What, UnavailableNodes:n3"],
)
def test_unknown_reasons_are_shown_as_they_are(reason):
    assert reason_sentence(reason) == reason


@pytest.mark.parametrize("text", ["1", "123456789", "123_0", "123_42"])
def test_job_ids(text):
    assert is_job_id(text)
    for name in (text, on_cluster(text, "west-2")):
        assert checked_job_id(name) == name


def test_jobs_of_other_clusters():
    names = [on_cluster("7", None), on_cluster("7", "east"), on_cluster("8_[1-2]", "east"), "9", "7"]
    assert names == ["7", "7;east", "8_[1-2];east", "9", "7"]
    assert by_cluster(names) == {"": ["7", "9"], "east": ["7", "8_[1-2]"]}
    assert list(map(base_id, names)) == ["7", "7;east", "8;east", "9", "7"]


@pytest.mark.parametrize(
    "text", ["", "-1", "a", "1 ", "1;", "1; 2", "1_", "_1", "1_[2-3]", "1.0", "1_2_3", "--all", "1\n", "١"]
)
def test_no_job_ids(text):
    assert not is_job_id(text)
    with pytest.raises(UsageError, match="is not a Slurm job id"):
        checked_job_id(text)


def test_base_id():
    for cluster in (None, "east", "my_cluster", "my-2_b-c"):
        names = [on_cluster(text, cluster) for text in ("12", "12_3", "12_[4-9%2]", "12+1")]
        assert list(map(base_id, names)) == [on_cluster("12", cluster)] * 4


@pytest.mark.parametrize(
    ("spec", "indices"),
    [
        ("0-3", [0, 1, 2, 3]),
        ("1,3,5", [1, 3, 5]),
        ("0-15:5,20%2", [0, 5, 10, 15, 20]),
        ("7", [7]),
        ("3-1", []),
    ],
)
def test_array_indices(spec, indices):
    assert array_indices(spec) == indices


@pytest.mark.parametrize("spec", ["", "a", "1-", "1--2", "1,,2", "-1", "1-2:", "0-9:0", "1;2"])
def test_no_array_indices(spec):
    with pytest.raises(UsageError, match="invalid job array indices"):
        array_indices(spec)
