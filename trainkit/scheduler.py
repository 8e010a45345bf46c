"""Job ids, job states, host lists and the environment variables that launchers set for ranks.

This module reads no files and runs no commands. A job id has the form `123` for a job, `123_4` for an array
task, and `123_[5-9%2]` for an array's pending tasks. A host list has the form `node[18-19,1-2]`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from itertools import chain, groupby, product
from typing import TypeGuard

from trainkit.errors import UsageError

OWN_PREFIX = "TRAINKIT_JOB_"
"""The prefix of environment variables that trainkit sets in a job, and that a run submitted by a rank must
not inherit.
"""
RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "NODE_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""Environment variables that launchers set for a rank, and that a job submitted from inside a job must not
inherit."""


class JobState(Enum):
    """The state of a job; the value is the text shown to users."""

    PENDING = "pending"
    REQUEUED = "requeued"
    """The job is pending again, after a preemption, a node failure or a requested requeue."""
    HELD = "held"
    STARTING = "starting"
    RUNNING = "running"
    SUSPENDED = "suspended"
    COMPLETING = "completing"
    """The processes of the job are being terminated, but the job may still be requeued."""
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    PREEMPTED = "preempted"
    NODE_FAIL = "node_fail"
    OUT_OF_MEMORY = "out_of_memory"
    UNKNOWN = "unknown"
    """Slurm no longer knows the job, or does not report how the job ended. Such a job is never considered
    finished."""

    @property
    def is_terminal(self) -> bool:
        """Return whether a job in this state has ended and will not restart."""
        return self in _TERMINAL

    @property
    def is_waiting(self) -> bool:
        """Return whether a job in this state is pending."""
        return self in (JobState.PENDING, JobState.REQUEUED, JobState.HELD)

    @property
    def is_active(self) -> bool:
        """Return whether nodes are allocated to a job in this state."""
        return self in (JobState.STARTING, JobState.RUNNING, JobState.SUSPENDED, JobState.COMPLETING)


_TERMINAL = frozenset(
    {
        JobState.COMPLETED,
        JobState.FAILED,
        JobState.CANCELLED,
        JobState.TIMEOUT,
        JobState.PREEMPTED,
        JobState.NODE_FAIL,
        JobState.OUT_OF_MEMORY,
    }
)


@dataclass(frozen=True)
class JobInfo:
    """One job or one array task, as reported by its scheduler, with times in UTC."""

    job_id: str
    """The job id, such as `123`, or `123_4` for an array task."""
    state: JobState
    slurm_state: str = ""
    """The scheduler's name for the job's state, for example NODE_FAIL."""
    reason: str = ""
    """The scheduler's reason why the job is pending, or the reason why its state is unknown."""
    nodes: str = ""
    """The job's host list; empty before the job starts."""
    num_nodes: int = 0
    start_time: datetime | None = None
    """The expected start time of a pending job."""
    end_time: datetime | None = None
    """The time when a running job reaches its time limit."""
    restarts: int | None = None
    """How many times the job was requeued, or None if unknown."""
    exit_code: int | None = None
    """The exit code of the batch script, or None before the job ends."""
    exit_signal: int | None = None
    """The signal that killed the batch script, or None if no signal killed the script."""
    name: str = ""
    number: str = ""
    """The numeric job id of an array task; empty once squeue no longer lists the task."""

    @property
    def log_not_opened(self) -> bool:
        """Return whether the job failed because a node could not open the batch script's log."""
        return False

    @property
    def hosts(self) -> list[str]:
        """Return the hosts in `nodes`."""
        return expand_hosts(self.nodes) if self.nodes else []

    @property
    def explanation(self) -> str:
        """Return the reason as a sentence that omits its subject, the job."""
        return self.reason

    @property
    def sentence(self) -> str:
        """Return why the job is pending or unknown, or "" if the job is running or has ended."""
        if self.state.is_waiting:
            return self.explanation
        return self.reason if self.state is JobState.UNKNOWN else ""


def in_queue(job: JobInfo | None) -> TypeGuard[JobInfo]:
    """Return whether the job is in Slurm's queue, that is, pending or running."""
    return job is not None and not job.state.is_terminal and job.state is not JobState.UNKNOWN


LARGEST_INDEX = 4_000_000
"""The highest array index that Slurm supports. At most sites, MaxArraySize is far lower."""

JOB_ID = re.compile(r"\d+(?:_\d+)?", re.ASCII)
_OTHER_SPAN = re.compile(r"(\d+)\s*(?:\.{2,3}|:|to|\N{EN DASH})\s*(\d+)", re.ASCII)
"""Matches a range of numbers in a notation that Slurm does not support, such as `0..15` or `0:15`."""
_SPAN = re.compile(r"(?P<first>\d+)(?:-(?P<last>\d+)(?::(?P<stride>[1-9]\d*))?)?", re.ASCII)


def is_job_id(text: str) -> bool:
    """Return whether a string is a job id or the id of one array task."""
    return bool(JOB_ID.fullmatch(text))


def on_cluster(job_id: str, cluster: str | None) -> str:
    """Return a job's full name: its id or, on another cluster, `1234;east`, as in `sbatch --parsable`."""
    return f"{job_id};{cluster}" if cluster else job_id


def split_job(job: str) -> tuple[str, str]:
    """Split a full job name (see `on_cluster`) into id and cluster. The cluster is "" for a plain id."""
    job_id, _, cluster = job.partition(";")
    return job_id, cluster


def by_cluster(jobs: Iterable[str]) -> dict[str, list[str]]:
    """Group job ids by cluster; ids without a cluster have the key ""."""
    found: dict[str, list[str]] = {}
    for job in dict.fromkeys(jobs):
        job_id, cluster = split_job(job)
        found.setdefault(cluster, []).append(job_id)
    return found


def base_id(job_id: str) -> str:
    """Return `123` for `123`, `123_4`, `123_[5-9]` and `123+1`; a cluster name is kept."""
    number, cluster = split_job(job_id)
    return on_cluster(re.sub(r"[_+].*", "", number), cluster)


def expand_tasks(job_id: str) -> list[str]:
    """Expand `123_[5-7,9%2]` into a list of task ids; return any other id as a one-element list."""
    base, bracket, spec = job_id.partition("_[")
    if not bracket or not spec.endswith("]"):
        return [job_id]
    return [f"{base}_{index}" for index in array_indices(spec[:-1])]


def array_indices(spec: str) -> list[int]:
    """Expand an array spec such as `0-15:4,20%2` into indices; raise UsageError if it is malformed."""
    indices: list[int] = []
    for item in spec.partition("%")[0].split(","):
        match = _SPAN.fullmatch(item)
        if match is None or int(match["last"] or match["first"]) > LARGEST_INDEX:
            ends = _OTHER_SPAN.fullmatch(spec)
            hint = (
                "for example 0-15, 1,3,5 or 0-99%4" if ends is None else f"did you mean {ends[1]}-{ends[2]}?"
            )
            raise UsageError(f"invalid job array indices: {spec!r}", hint=hint)
        first = int(match["first"])
        last = int(match["last"]) if match["last"] else first
        indices += range(first, last + 1, int(match["stride"] or 1))
    return indices


def array_spec(indices: Sequence[int], limit: int | None = None) -> str:
    """Format ascending indices for sbatch's `--array` option: `0-15,20`, or `0-15,20%4` with a limit of 4."""
    # Within a span of consecutive indices, the difference between list position and index is constant.
    spans = [list(span) for _, span in groupby(enumerate(indices), lambda item: item[1] - item[0])]
    texts = [f"{span[0][1]}-{span[-1][1]}" if len(span) > 1 else str(span[0][1]) for span in spans]
    return ",".join(texts) + ("" if limit is None else f"%{limit}")


_ITEM = re.compile(r"(?:[^\s\[\],]|\[[^\[\]]*\])+")
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(?P<first>\d{1,18})(?:-(?P<last>\d{1,18}))?", re.ASCII)
MAX_HOSTS = 1_000_000
"""The maximum number of hosts in a host list; prevents a typo from exhausting memory."""


def expand_hosts(text: str) -> list[str]:
    """Return all hosts in a host list, in Slurm's order; raise UsageError if the text is not a host list.

    `scontrol show hostnames` does the same, but needs a new process and may be missing in a container.
    """
    text = text.strip()
    # Split each item into the parts of names and the bracketed ranges between these parts.
    items = [_BRACKETS.split(item) for item in _ITEM.findall(text)]
    ranges = [[_ranges(bracket) for bracket in item[1::2]] for item in items]
    counts = [math.prod(sum(len(numbers) for numbers, _ in one) for one in item) for item in ranges]
    is_whole = items and ",".join(_ITEM.findall(text)) == text and text.isprintable()
    if not is_whole or text.startswith("-") or 0 in counts or sum(counts) > MAX_HOSTS:
        raise UsageError(f"invalid Slurm host list: {text!r}", hint="for example node[1-4,7] or gpu-a,gpu-b")
    hosts = []
    for item, brackets in zip(items, ranges, strict=True):
        numbers = [[f"{n:0{width}d}" for span, width in one for n in span] for one in brackets]
        # In Slurm's order, the last bracket varies fastest, then the first, the second, and so on.
        for picked in product(*reversed(numbers[:-1]), *numbers[-1:]):
            chosen = [*reversed(picked[:-1]), *picked[-1:], ""]
            hosts.append("".join(chain.from_iterable(zip(item[::2], chosen, strict=True))))
    return hosts


def _ranges(bracket: str) -> list[tuple[range, int]]:
    """Return the numbers and the digit width of each range in a bracket; empty if any range is malformed."""
    found = [_RANGE.fullmatch(one) for one in bracket.split(",")]
    spans = [
        (range(int(one["first"]), int(one["last"] or one["first"]) + 1), len(one["first"]))
        for one in found
        if one
    ]
    return spans if len(spans) == len(found) and all(span for span, _ in spans) else []
