"""What Slurm's states mean where they are read."""

from __future__ import annotations

import pytest

from trainkit.slurm.states import JobState, state_in_accounting, state_in_queue


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
