"""Our words for the states of a job, and what Slurm's own states mean where they are read. Pure."""

from __future__ import annotations

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
