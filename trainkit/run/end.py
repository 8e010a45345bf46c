"""Read and write end.json: how an attempt ended, the next action and the first failure."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Literal, TypeVar, get_args

from trainkit.run.files import (
    LEFT_OUT,
    OPTIONAL,
    parse_time,
    read_object,
    read_record,
    seconds_between,
    to_json,
    write_json,
)
from trainkit.run.process import ENDING_SIGNALS
from trainkit.run.record import JobRecord, read_job
from trainkit.run.rundir import AttemptDir
from trainkit.run.tracebacks import CodeLine

Action = Literal["finished", "stopped", "failed", "restart", "requeue", "resubmit", "follow_up"]
"""`restart` restarts the step in the same allocation, `requeue` requeues the job, `resubmit` submits a new
job, and `follow_up` leaves the run to a chained job that is already in the queue."""
Cause = Literal["preempted", "timeout", "node_fail", "crash", "hang", "asked", "not_started", "rollback"]
"""Why an attempt is restarted: a value of `requeue.on`, ``asked`` if a user requested the restart,
``rollback`` if the ranks decided to go back to an earlier checkpoint, or ``not_started`` if Slurm could not
start the step. A restart with the cause ``not_started`` is not counted as a failure of the run. Capabilities
can define additional causes."""
RESUME_ACTIONS: tuple[Action, ...] = ("restart", "requeue", "follow_up", "resubmit")
"""The actions after which a run resumes automatically, ordered from the cheapest to the most expensive."""
UNFINISHED_STATES = ("pending", "starting", "running", "paused", "restarting", "stopping", "requeueing")
"""States of a run that has not finished or failed yet."""
KILLED = "killed by cancel --now"
"""The `reason` of an attempt that was killed before it could save a checkpoint."""
NO_RESULT = "NoResult"
"""The failure type of a rank that exited with code 0 before its function returned."""
SIGNALLED = 128
"""Offset of the exit code for a process that was killed by signal N: the exit code is SIGNALLED + N."""


@dataclass(frozen=True)
class RankFailure:
    """A failure of a rank, host or job; unknown values are None."""

    rank: int | None = None
    node_rank: int | None = None
    host: str | None = None
    time: str | None = None
    step: int | None = None
    type: str | None = None
    """The failure type: the name of an exception, ``exit``, ``RankKilled``, ``HostLost``, ``Hang``,
    ``OutOfMemory`` or `NO_RESULT`."""
    message: str | None = None
    exit_code: int | None = None
    hint: str | None = field(default=None, metadata=OPTIONAL)
    final: bool | None = field(default=None, metadata=OPTIONAL)
    """True if a restart cannot fix the failure."""
    node: bool | None = field(default=None, metadata=OPTIONAL)
    """True if the failure is specific to the node, so that the run may succeed on another node."""
    code: CodeLine | None = field(default=None, metadata=OPTIONAL)
    """The innermost line of user code in the exception's traceback."""
    num_alike: int | None = field(default=None, metadata=OPTIONAL)
    """The number of ranks of the attempt if all of them raised the same exception at the same step and at
    about the same time; else None."""
    log_tail: list[str] = field(default_factory=list, metadata=OPTIONAL)
    """The last lines of the rank's log."""
    more: dict[str, object] = field(default_factory=dict, metadata=LEFT_OUT)
    """Other values in the failure record, such as the traceback."""

    @property
    def was_signalled(self) -> bool:
        """Return whether a signal from another process killed the rank; ignores SIGABRT.

        SIGABRT is ignored because a process that aborts sends SIGABRT to itself.
        """
        code = self.exit_code
        return code is not None and code > SIGNALLED and code != SIGNALLED + signal.SIGABRT

    @property
    def died_of_stop_signal(self) -> bool:
        """Return whether one of `ENDING_SIGNALS` killed the process.

        torchrun raises SignalException if it receives a signal in `ENDING_SIGNALS`.
        """
        number = (self.exit_code or 0) - SIGNALLED
        return number in ENDING_SIGNALS or str(self.type).endswith("SignalException")

    @property
    def line(self) -> str:
        """Format the first failure of an attempt on one line: rank, host, step and cause."""
        if self.type == "HostLost":
            return f"host {self.host} failed first: {self.message}"
        when = "" if self.step is None else f" at step {self.step}"
        cause = self.message if self.type == "exit" else f"{self.type}: {self.message}"
        if self.num_alike is not None:
            return f"all {self.num_alike} ranks failed in the same way{when}: {cause}"
        subject = "the job" if self.rank is None else f"rank {self.rank}"
        where = f" on {self.host}" if self.host else ""
        return f"{subject} failed first{where}{when}: {cause}"


def rank_failures(attempt: AttemptDir, job: JobRecord | None = None) -> list[tuple[Path, RankFailure]]:
    """Return the failures that ranks have recorded, as (file, failure) pairs ordered by time.

    `job` is the content of job.json; if it is None, job.json is read if needed.
    """
    records = []
    for path in sorted(attempt.errors_dir.glob("rank-*.json")):
        record = read_object(path)  # empty if a crash truncated the file
        if record:
            failure = read_record(RankFailure, record)
            if failure.code is not None:
                job = job or read_job(attempt.run)
                failure = replace(failure, code=failure.code.in_tree(job))
            records.append((path, failure))
    return sorted(records, key=lambda item: item[1].time or "~")


T = TypeVar("T")
AWAITED_S = 3.0
"""Number of seconds added to `NOTICED_S` if the rank was killed by one of `ENDING_SIGNALS`. Before recording
a kill by a stop signal as a failure, the agent waits: if the agent also receives the stop signal, the kill
was part of a normal stop."""
NOTICED_S = 2.5
"""Maximum number of seconds between the first error of a killed rank's peers and the agent's record of the
kill."""


def first_of(records: Sequence[tuple[T, RankFailure]]) -> tuple[T, RankFailure] | None:
    """Return the first failure in `records`, which must be ordered by time; None if `records` is empty.

    A killed rank takes precedence over exceptions in other ranks, because the other ranks may notice closed
    connections before the killed rank's agent can record the kill. A rank that was killed much later than the
    first failure is ignored, because it was killed when the step was stopped.
    """
    for path, item in records:
        # A failure without a time is treated as simultaneous with the first failure.
        later_s = seconds_between(records[0][1].time, parse_time(item.time)) or 0.0
        if item.was_signalled and later_s < NOTICED_S + AWAITED_S * item.died_of_stop_signal:
            return path, item
    return records[0] if records else None


def signal_name(number: int) -> str:
    """Return the name of a signal, or ``signal N`` for a number that is unknown on this machine."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True)
class Best:
    """The best metric value of a run so far, with its step."""

    metric: str
    """Name of the metric: ``val_loss``, or ``loss`` in a run without validation."""
    value: float
    step: int | None = None


@dataclass(frozen=True)
class AttemptEnd:
    """The content of end.json; a value that is missing from the file is None."""

    state: str | None = None
    """The state of the run: ``finished``, ``stopped``, ``cancelled`` or ``failed``."""
    action: Action | None = None
    cause: str | None = None
    """A `Cause`, or a cause defined by a capability."""
    exit_code: int | None = None
    reason: str | None = None
    """A sentence that tells the user why the attempt ended."""
    verdict: RankFailure | None = None
    """The root cause: the first failure of the attempt."""
    mark: int | None = None
    """The progress of the run: the step of its newest checkpoint or, for a run without checkpoints, the
    number of its attempts that ran for a long time."""
    step: int | None = None
    """The last step that the attempt computed."""
    best: Best | None = None
    """The best result of the run."""
    guessed: bool = field(default=False, metadata=OPTIONAL)
    """True if the attempt could not write its own end.json, so that a later start of the job wrote the
    file."""
    summary: str | None = field(default=None, metadata=OPTIONAL)
    """The reason without the next action; set only if `reason` also mentions the next action."""
    stopped_by: str | None = field(default=None, metadata=OPTIONAL)
    """What stopped the attempt, if `cause` does not say it: the signal that a user sent, ``drained HOST``, or
    the capability in which a user quit."""
    saved: bool = field(default=False, metadata=OPTIONAL)
    """True if the attempt did not finish, but all workers exited with the exit code for a completed save."""
    time: str | None = None
    more: dict[str, object] = field(default_factory=dict)
    """Values in end.json that are unknown to this trainkit version."""

    @property
    def resumes(self) -> bool:
        """Return whether the run resumes automatically after this attempt."""
        return self.action in RESUME_ACTIONS

    def write(self, attempt: AttemptDir) -> None:
        """Write end.json; raise OSError if it cannot be written."""
        write_json(attempt.end_file, to_json(self))


def read_end(attempt: AttemptDir) -> AttemptEnd | None:
    """Return the parsed end.json of an attempt; None if it is still running or its supervisor was killed."""
    return end_of(read_object(attempt.end_file))


def read_newest_end(folder: str | PathLike[str]) -> AttemptEnd | None:
    """Return the parsed end.json of the newest attempt in a run folder; None while the attempt is running."""
    # Open the file by its path, because some copy tools replace the link `latest` with a copy of the folder.
    return end_of(read_object(f"{folder}/attempts/latest/end.json"))


def end_of(content: Mapping[str, object]) -> AttemptEnd | None:
    """Parse the content of an end.json; return None for {}, which represents a missing file."""
    return read_record(AttemptEnd, content) if content else None


def is_over(attempt: AttemptDir) -> bool:
    """Return whether an attempt has ended and will not be resumed automatically."""
    end = read_end(attempt)
    return end is not None and not end.resumes


def end_line(attempt: int, action: str, reason: str) -> str:
    """Return the last line that an attempt writes to its log.

    Slurm output below this line belongs to a later attempt.
    """
    return f"attempt {attempt}: {action}: {reason}"


def is_end_line(line: str, attempt: int) -> bool:
    """Return whether a log line is the `end_line` of an attempt."""
    return line.startswith(tuple(end_line(attempt, action, "") for action in get_args(Action)))
