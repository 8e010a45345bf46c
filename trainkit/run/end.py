"""end.json: how an attempt ended, what follows, and the first failure of a rank, a host or a job."""

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
"""Why a run is restarted: a value of `requeue.on`; `asked` when a person requested it; `not_started` when
Slurm could not start the step, which does not count as a failure of the run. Others are of capabilities."""
RESUME_ACTIONS: tuple[Action, ...] = ("restart", "requeue", "follow_up", "resubmit")
"""The actions after which the run resumes without a command, the cheapest first."""
UNFINISHED_STATES = ("pending", "starting", "running", "paused", "restarting", "stopping", "requeueing")
"""States of a run that may still finish."""
KILLED = "killed by cancel --now"
"""The reason of an end without a save."""
NO_RESULT = "NoResult"
"""The type of failure of a rank that exited with 0 before its function returned."""
SIGNALLED = 128
"""The exit code of a process that signal n killed is SIGNALLED + n."""


@dataclass(frozen=True)
class RankFailure:
    """A failure; None where a value is missing or unknown."""

    rank: int | None = None
    node_rank: int | None = None
    host: str | None = None
    time: str | None = None
    step: int | None = None
    type: str | None = None
    """An exception, ``exit``, ``RankKilled``, ``HostLost``, ``Hang``, ``OutOfMemory`` or `NO_RESULT`."""
    message: str | None = None
    exit_code: int | None = None
    hint: str | None = field(default=None, metadata=OPTIONAL)
    final: bool | None = field(default=None, metadata=OPTIONAL)
    """Whether a restart cannot help."""
    node: bool | None = field(default=None, metadata=OPTIONAL)
    """Whether the run may work on another node."""
    code: CodeLine | None = field(default=None, metadata=OPTIONAL)
    """The innermost line of the user's own code in the traceback of an exception."""
    log_tail: list[str] = field(default_factory=list, metadata=OPTIONAL)
    """The last lines of the rank's log."""
    more: dict[str, object] = field(default_factory=dict, metadata=LEFT_OUT)
    """What else was recorded, such as the traceback."""

    @property
    def was_signalled(self) -> bool:
        """Whether a signal from outside killed a process; a process raises SIGABRT itself."""
        code = self.exit_code
        return code is not None and code > SIGNALLED and code != SIGNALLED + signal.SIGABRT

    @property
    def died_of_notice(self) -> bool:
        """Whether one of `ENDING_SIGNALS` ended it: torchrun raises SignalException when it gets one."""
        number = (self.exit_code or 0) - SIGNALLED
        return number in ENDING_SIGNALS or str(self.type).endswith("SignalException")

    @property
    def line(self) -> str:
        """It as the first failure, on one line: rank, host, step and cause."""
        if self.type == "HostLost":
            return f"host {self.host} failed first: {self.message}"
        subject = "the job" if self.rank is None else f"rank {self.rank}"
        where = f" on {self.host}" if self.host else ""
        when = "" if self.step is None else f" at step {self.step}"
        cause = self.message if self.type == "exit" else f"{self.type}: {self.message}"
        return f"{subject} failed first{where}{when}: {cause}"


def rank_failures(attempt: AttemptDir, job: JobRecord | None = None) -> list[tuple[Path, RankFailure]]:
    """What ranks have recorded of themselves, each with its file, by time; `job` is job.json, if known."""
    records = []
    for path in sorted(attempt.errors_dir.glob("rank-*.json")):
        record = read_object(path)  # empty if it was cut off by a crash
        if record:
            failure = read_record(RankFailure, record)
            if failure.code is not None:
                job = job or read_job(attempt.run)
                failure = replace(failure, code=failure.code.in_tree(job))
            records.append((path, failure))
    return sorted(records, key=lambda item: item[1].time or "~")


T = TypeVar("T")
AWAITED_S = 3.0
"""How much later an agent records a death by one of `ENDING_SIGNALS`: its own notice may follow."""
NOTICED_S = 2.5
"""Within this time, ranks may notice the end of a killed one before its agent has recorded it."""


def first_of(records: Sequence[tuple[T, RankFailure]]) -> tuple[T, RankFailure] | None:
    """The first failure of those that ranks have recorded, in the order of time; None without any.

    A killed rank takes precedence over exceptions: its peers may notice the closed connections before its
    agent can write the record. A rank that was killed much later was killed with the step.
    """
    for path, item in records:
        # An unknown time counts as that of the first.
        later_s = seconds_between(records[0][1].time, parse_time(item.time)) or 0.0
        if item.was_signalled and later_s < NOTICED_S + AWAITED_S * item.died_of_notice:
            return path, item
    return records[0] if records else None


def signal_name(number: int) -> str:
    """The name of a signal, also of one that this machine does not know."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True)
class Best:
    """The best result of a run so far."""

    metric: str
    """``val_loss``, or ``loss`` without a validation."""
    value: float
    step: int | None = None


@dataclass(frozen=True)
class AttemptEnd:
    """The content of end.json; None where a value is missing."""

    state: str | None = None
    """``finished stopped cancelled failed``."""
    action: Action | None = None
    cause: str | None = None
    """A `Cause`, or that of a capability."""
    exit_code: int | None = None
    reason: str | None = None
    """A sentence for people."""
    verdict: RankFailure | None = None
    """The first failure."""
    mark: int | None = None
    """The run's progress: the step of its newest checkpoint, else the number of long attempts."""
    step: int | None = None
    """The step at which the attempt ended."""
    best: Best | None = None
    """The best result of the run."""
    guessed: bool = field(default=False, metadata=OPTIONAL)
    """Whether a later start of the job wrote it, since the attempt left no record of its end."""
    summary: str | None = field(default=None, metadata=OPTIONAL)
    """The event alone, if `reason` also names the next action."""
    saved: bool = field(default=False, metadata=OPTIONAL)
    """Whether it did not finish, and all workers exited as they do after a save."""
    time: str | None = None
    more: dict[str, object] = field(default_factory=dict)
    """What another version recorded."""

    @property
    def resumes(self) -> bool:
        """Whether the run resumes automatically."""
        return self.action in RESUME_ACTIONS

    def write(self, attempt: AttemptDir) -> None:
        """Write end.json. Raises OSError."""
        write_json(attempt.end_file, to_json(self))


def read_end(attempt: AttemptDir) -> AttemptEnd | None:
    """How an attempt ended; None while it runs and if its supervisor was killed."""
    return end_of(read_object(attempt.end_file))


def read_newest_end(folder: str | PathLike[str]) -> AttemptEnd | None:
    """How the newest attempt of the run in a folder ended; None while it runs."""
    # In a copy of the folder `latest` may be no link.
    return end_of(read_object(f"{folder}/attempts/latest/end.json"))


def end_of(content: Mapping[str, object]) -> AttemptEnd | None:
    """The content of an end.json; None if it is empty, as `read_object` returns it without the file."""
    return read_record(AttemptEnd, content) if content else None


def is_over(attempt: AttemptDir) -> bool:
    """Whether an attempt has recorded its end, and no restart follows."""
    end = read_end(attempt)
    return end is not None and not end.resumes


def end_line(attempt: int, action: str, reason: str) -> str:
    """The line of its log with which an attempt ends: what Slurm writes below it is about a later one."""
    return f"attempt {attempt}: {action}: {reason}"


def is_end_line(line: str, attempt: int) -> bool:
    """Whether a line of a log is the `end_line` of an attempt."""
    return line.startswith(tuple(end_line(attempt, action, "") for action in get_args(Action)))
