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
"""`restart` restarts the step inside the allocation, `requeue` requeues the job, `resubmit` submits a new
job, and `follow_up` lets a job that is already in the queue continue the run."""
Cause = Literal["preempted", "timeout", "node_fail", "crash", "hang", "asked", "not_started"]
"""The cause of a restart: a value of `requeue.on`, ``asked`` when a person requested the restart, or
``not_started`` when Slurm could not start the step. The cause ``not_started`` does not count as a failure of
the run. Capabilities define further causes."""
RESUME_ACTIONS: tuple[Action, ...] = ("restart", "requeue", "follow_up", "resubmit")
"""The actions after which the run resumes automatically, the cheapest first."""
UNFINISHED_STATES = ("pending", "starting", "running", "paused", "restarting", "stopping", "requeueing")
"""The states of a run that may still finish."""
KILLED = "killed by cancel --now"
"""The `reason` of an attempt that was killed before it could save."""
NO_RESULT = "NoResult"
"""The failure type of a rank that exited with code 0 before its function returned."""
SIGNALLED = 128
"""The exit code of a process that signal N killed is SIGNALLED + N."""


@dataclass(frozen=True)
class RankFailure:
    """Describes a failure of a rank, a host or a job; a missing or unknown value is None."""

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
    """The innermost line of the user's code in the traceback of an exception."""
    log_tail: list[str] = field(default_factory=list, metadata=OPTIONAL)
    """The last lines of the rank's log."""
    more: dict[str, object] = field(default_factory=dict, metadata=LEFT_OUT)
    """Other recorded values, such as the traceback."""

    @property
    def was_signalled(self) -> bool:
        """Return whether a signal from another process killed the rank; SIGABRT does not count.

        A process sends SIGABRT to itself.
        """
        code = self.exit_code
        return code is not None and code > SIGNALLED and code != SIGNALLED + signal.SIGABRT

    @property
    def died_of_notice(self) -> bool:
        """Return whether one of `ENDING_SIGNALS` ended the process.

        torchrun raises SignalException when it receives one of these signals.
        """
        number = (self.exit_code or 0) - SIGNALLED
        return number in ENDING_SIGNALS or str(self.type).endswith("SignalException")

    @property
    def line(self) -> str:
        """Format the first failure of an attempt on one line: rank, host, step and cause."""
        if self.type == "HostLost":
            return f"host {self.host} failed first: {self.message}"
        subject = "the job" if self.rank is None else f"rank {self.rank}"
        where = f" on {self.host}" if self.host else ""
        when = "" if self.step is None else f" at step {self.step}"
        cause = self.message if self.type == "exit" else f"{self.type}: {self.message}"
        return f"{subject} failed first{where}{when}: {cause}"


def rank_failures(attempt: AttemptDir, job: JobRecord | None = None) -> list[tuple[Path, RankFailure]]:
    """Return the failures that ranks have recorded, each with its file, ordered by time.

    `job` is the content of job.json; if it is None, job.json is read when needed.
    """
    records = []
    for path in sorted(attempt.errors_dir.glob("rank-*.json")):
        record = read_object(path)  # The object is empty if a crash truncated the file.
        if record:
            failure = read_record(RankFailure, record)
            if failure.code is not None:
                job = job or read_job(attempt.run)
                failure = replace(failure, code=failure.code.in_tree(job))
            records.append((path, failure))
    return sorted(records, key=lambda item: item[1].time or "~")


T = TypeVar("T")
AWAITED_S = 3.0
"""Additional seconds by which other errors may precede the record of a kill by one of `ENDING_SIGNALS`. The
agent waits before it records such a kill as a failure: if the agent receives the stop signal too, the kill
was part of a normal stop."""
NOTICED_S = 2.5
"""Maximum number of seconds by which errors of a killed rank's peers may precede the agent's record of the
kill."""


def first_of(records: Sequence[tuple[T, RankFailure]]) -> tuple[T, RankFailure] | None:
    """Return the first failure of `records`, which are ordered by time; None without records.

    A killed rank takes precedence over exceptions, because its peers may notice the closed connections before
    its agent can write the record. Ignores a rank that was killed much later than the first failure, because
    such a rank was killed when the step ended.
    """
    for path, item in records:
        # A failure without a time counts as simultaneous with the first record.
        later_s = seconds_between(records[0][1].time, parse_time(item.time)) or 0.0
        if item.was_signalled and later_s < NOTICED_S + AWAITED_S * item.died_of_notice:
            return path, item
    return records[0] if records else None


def signal_name(number: int) -> str:
    """Return the name of a signal; ``signal N`` for a number that this machine does not know."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True)
class Best:
    """The best result of a run so far."""

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
    """A `Cause`, or a cause that a capability defines."""
    exit_code: int | None = None
    reason: str | None = None
    """A sentence that tells the user why the attempt ended."""
    verdict: RankFailure | None = None
    """The root cause: the first failure of the attempt."""
    mark: int | None = None
    """The run's progress: the step of the newest checkpoint or, for a run without checkpoints, its number of
    long attempts."""
    step: int | None = None
    """The last step that the attempt computed."""
    best: Best | None = None
    """The best result of the run."""
    guessed: bool = field(default=False, metadata=OPTIONAL)
    """True if the attempt left no record of its end, so that a later start of the job wrote the file."""
    summary: str | None = field(default=None, metadata=OPTIONAL)
    """The reason without the next action; set only if `reason` also names the next action."""
    saved: bool = field(default=False, metadata=OPTIONAL)
    """True if the attempt did not finish and all workers exited with the exit code of a completed save."""
    time: str | None = None
    more: dict[str, object] = field(default_factory=dict)
    """Values of end.json that this trainkit version does not know."""

    @property
    def resumes(self) -> bool:
        """Return whether the run resumes automatically after this attempt."""
        return self.action in RESUME_ACTIONS

    def write(self, attempt: AttemptDir) -> None:
        """Write end.json; raise OSError if that fails."""
        write_json(attempt.end_file, to_json(self))


def read_end(attempt: AttemptDir) -> AttemptEnd | None:
    """Read how an attempt ended; return None while it runs, or if its supervisor was killed."""
    return end_of(read_object(attempt.end_file))


def read_newest_end(folder: str | PathLike[str]) -> AttemptEnd | None:
    """Read how the newest attempt of the run in a folder ended; return None while it runs."""
    # Use the path, because some copy tools replace the link `latest` with a copy of the folder.
    return end_of(read_object(f"{folder}/attempts/latest/end.json"))


def end_of(content: Mapping[str, object]) -> AttemptEnd | None:
    """Parse the content of an end.json; return None for an empty object, which stands for a missing file."""
    return read_record(AttemptEnd, content) if content else None


def is_over(attempt: AttemptDir) -> bool:
    """Return whether an attempt has recorded its end and the run does not resume automatically."""
    end = read_end(attempt)
    return end is not None and not end.resumes


def end_line(attempt: int, action: str, reason: str) -> str:
    """Return the last line that an attempt writes to its log.

    Any output of Slurm below this line belongs to a later attempt.
    """
    return f"attempt {attempt}: {action}: {reason}"


def is_end_line(line: str, attempt: int) -> bool:
    """Return whether a line of a log is the `end_line` of an attempt."""
    return line.startswith(tuple(end_line(attempt, action, "") for action in get_args(Action)))
