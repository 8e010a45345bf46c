"""Ids and states of jobs, what Slurm's states mean where they are read, and why a job waits."""

import pytest

from trainkit.errors import UsageError
from trainkit.slurm.states import (
    JobState,
    array_indices,
    base_id,
    by_cluster,
    checked_job_id,
    is_job_id,
    on_cluster,
    reason_sentence,
    state_in_accounting,
    state_in_queue,
)


@pytest.mark.parametrize(
    ("word", "restarts", "state"),
    [
        ("PENDING", 0, JobState.PENDING),
        ("PENDING", None, JobState.PENDING),
        ("PENDING", 2, JobState.REQUEUED),
        ("REQUEUED", 0, JobState.REQUEUED),
        ("REQUEUE_HOLD", 1, JobState.HELD),
        ("SPECIAL_EXIT", 1, JobState.HELD),
        ("CONFIGURING", 0, JobState.STARTING),
        ("RUNNING", 3, JobState.RUNNING),
        ("SIGNALING", 0, JobState.RUNNING),
        ("SUSPENDED", 0, JobState.SUSPENDED),
        ("COMPLETING", 1, JobState.COMPLETING),
        ("STAGE_OUT", 0, JobState.COMPLETING),
        ("COMPLETED", 0, JobState.COMPLETED),
        ("DEADLINE", 0, JobState.TIMEOUT),
        ("BOOT_FAIL", 0, JobState.FAILED),
        ("NODE_FAIL", 1, JobState.NODE_FAIL),
        ("PREEMPTED", 0, JobState.PREEMPTED),
        ("REVOKED", 0, JobState.UNKNOWN),
        ("A_STATE_OF_2030", 0, JobState.UNKNOWN),
        ("", 0, JobState.UNKNOWN),
    ],
)
def test_in_queue(word: str, restarts: int | None, state: JobState) -> None:
    assert state_in_queue(word, restarts) is state


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("COMPLETED", JobState.COMPLETED),
        ("CANCELLED by 1000", JobState.CANCELLED),
        ("CANCELLED+", JobState.CANCELLED),
        ("OUT_OF_MEMORY", JobState.OUT_OF_MEMORY),
        ("PREEMPTED", JobState.PREEMPTED),
        # squeue has forgotten these jobs, so they are not what accounting still believes.
        ("RUNNING", JobState.UNKNOWN),
        ("PENDING", JobState.UNKNOWN),
        ("REQUEUED", JobState.UNKNOWN),
        ("", JobState.UNKNOWN),
    ],
)
def test_in_accounting(word: str, state: JobState) -> None:
    assert state_in_accounting(word) is state


def test_what_has_ended() -> None:
    ended = {"completed", "failed", "cancelled", "timeout", "preempted", "node_fail", "out_of_memory"}
    assert {state.value for state in JobState if state.is_terminal} == ended
    for state in JobState:
        kinds = (state.is_terminal, state.is_waiting, state.is_active, state is JobState.UNKNOWN)
        assert kinds.count(True) == 1, state


SENTENCES = {
    "Resources": "waiting for nodes to become free; next in line",
    "(Priority)": "other jobs have a higher priority",
    "QOSMaxJobsPerUserLimit": "would exceed a limit of its QOS: QOSMaxJobsPerUserLimit",
    "AssocGrpGRESMinutes": "would exceed a limit of its account: AssocGrpGRESMinutes",
    "AssociationJobLimit": "would exceed a limit of its account: AssociationJobLimit",
    "MaxGRESPerAccount": "would exceed a limit of its account: MaxGRESPerAccount",
    "QOSMinCpuNotSatisfied": "is below a limit of its QOS: QOSMinCpuNotSatisfied",
    "Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher_priority_partitions": (
        "nodes that it needs are down, drained or reserved for jobs of higher priority"
    ),
    "launch_failed_requeued_held": "could not be launched and is held: `scontrol release JOB` releases it",
    "job_requeued_in_held_state": "was requeued and is held: `scontrol release JOB` releases it",
    "Licenses": "waiting for a license that other jobs use",
    "InvalidQOS": "its QOS does not exist, or you may not use it: cancel it and choose another",
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


@pytest.mark.parametrize("text", ["1", "123456789", "123_0", "123_42"])
def test_job_ids(text: str) -> None:
    assert is_job_id(text)
    for name in (text, on_cluster(text, "west-2")):
        assert checked_job_id(name) == name


def test_jobs_of_other_clusters() -> None:
    names = [on_cluster("7", None), on_cluster("7", "east"), on_cluster("8_[1-2]", "east"), "9", "7"]
    assert names == ["7", "7;east", "8_[1-2];east", "9", "7"]
    assert by_cluster(names) == {"": ["7", "9"], "east": ["7", "8_[1-2]"]}
    assert list(map(base_id, names)) == ["7", "7;east", "8;east", "9", "7"]


@pytest.mark.parametrize(
    "text", ["", "-1", "a", "1 ", "1;", "1; 2", "1_", "_1", "1_[2-3]", "1.0", "1_2_3", "--all", "1\n", "١"]
)
def test_no_job_ids(text: str) -> None:
    assert not is_job_id(text)
    with pytest.raises(UsageError, match="is not a Slurm job id"):
        checked_job_id(text)


def test_base_id() -> None:
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
def test_array_indices(spec: str, indices: list[int]) -> None:
    assert array_indices(spec) == indices


@pytest.mark.parametrize("spec", ["", "a", "1-", "1--2", "1,,2", "-1", "1-2:", "0-9:0", "1;2"])
def test_no_array_indices(spec: str) -> None:
    with pytest.raises(UsageError, match="not the indices of a job array"):
        array_indices(spec)
