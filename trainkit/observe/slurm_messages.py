"""What srun and slurmstepd wrote about one attempt: each line is about the attempt that ran at that time.

How a job ends, slurmstepd writes into the log with which the job began: that of an earlier attempt, after a
restart inside the allocation or a requeue.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import takewhile

from trainkit.observe.run_text import Text, read_log
from trainkit.run.end import is_end_line
from trainkit.run.files import parse_time
from trainkit.run.record import AttemptRecord, read_job
from trainkit.run.rundir import AttemptDir

_END_OF_THE_JOB = re.compile(r"slurmstepd\S*: error: \*\*\* JOB \S+ ON \S+ CANCELLED AT (\S+)")
_RESOLUTION = timedelta(seconds=1)
"""Slurm omits the fraction of a second."""


def slurm_messages(attempt: AttemptDir, *, is_recorded: bool) -> Iterator[Text]:
    """The messages in the log of an attempt, and those about its end in the logs of earlier ones of its job.

    `is_recorded` if the attempt has recorded its end itself.
    """
    entries = read_job(attempt.run).attempts
    entry = next((entry for entry in entries if entry.attempt == attempt.number), AttemptRecord())
    start = parse_time(entry.started_at)
    others = (parse_time(other.started_at) for other in entries if other.attempt > attempt.number)
    next_start = min(filter(None, others), default=None)

    def is_of_a_later_one(line: str) -> bool:
        time = _end_of_the_job(line)
        return time is not None and next_start is not None and time >= next_start

    own = _log(attempt)
    if own is not None:
        lines = takewhile(lambda line: not is_end_line(line, attempt.number), own.lines)
        kept = list(takewhile(lambda line: not is_of_a_later_one(line), lines))
        yield own.part(0, len(kept), "srun")
    if start is None or is_recorded:
        return  # it recorded its end, and with it the reason that Slurm gave
    earlier = [
        other.attempt for other in entries if other.attempt < attempt.number and other.job_id == entry.job_id
    ]
    for log in map(_log, map(attempt.run.attempt, earlier)):
        for index, line in enumerate([] if log is None else log.lines):
            time = _end_of_the_job(line)
            if log and time and time + _RESOLUTION > start and not is_of_a_later_one(line):
                yield log.part(index, 1, "srun")


def _log(attempt: AttemptDir) -> Text | None:
    return read_log(attempt.supervisor_log, attempt.run.path, "srun")


def _end_of_the_job(line: str) -> datetime | None:
    """When slurmstepd ended the job; None for any other line."""
    found = _END_OF_THE_JOB.search(line)
    time = None if found is None else parse_time(found[1])
    # Slurm writes the local time of the host.
    return None if time is None else time.astimezone()
