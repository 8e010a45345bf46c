"""Slurm job ids: `123`, a task of an array `123_4`, its pending tasks `123_[5-9%2]`. Pure."""

from __future__ import annotations

import re

from trainkit.errors import UsageError

LARGEST_INDEX = 4_000_000
"""Slurm's own limit; MaxArraySize is far lower at most sites."""

_JOB_ID = re.compile(r"(?P<base>\d+)(?:_(?P<task>\d+))?")
_SPAN = re.compile(r"(?P<first>\d+)(?:-(?P<last>\d+)(?::(?P<stride>[1-9]\d*))?)?", re.ASCII)


def is_job_id(text: str) -> bool:
    """Whether a string is the id of a job or of one array task."""
    return bool(_JOB_ID.fullmatch(text)) and text.isascii()


def checked_job_id(text: str) -> str:
    """The job id unchanged; raises UsageError if it is not one."""
    if not is_job_id(text):
        raise UsageError(
            f"{text!r} is not a Slurm job id", hint="for example 1234, or 1234_5 for a task of an array"
        )
    return text


def base_id(job_id: str) -> str:
    """`123` of `123`, `123_4`, `123_[5-9]` and `123+1`."""
    return re.split(r"[_+]", job_id, maxsplit=1)[0]


def expand_tasks(job_id: str) -> list[str]:
    """The tasks of `123_[5-7,9%2]`, in order; any other id as a list of itself."""
    base, bracket, spec = job_id.partition("_[")
    if not bracket or not spec.endswith("]"):
        return [job_id]
    return [f"{base}_{index}" for index in array_indices(spec[:-1])]


def array_indices(spec: str) -> list[int]:
    """The indices of an array spec such as `0-15:4,20%2`; raises UsageError for any other form."""
    indices: list[int] = []
    for item in spec.partition("%")[0].split(","):
        match = _SPAN.fullmatch(item)
        if match is None or int(match["last"] or match["first"]) > LARGEST_INDEX:
            raise UsageError(
                f"not the indices of a job array: {spec!r}", hint="for example 0-15, 1,3,5 or 0-99%4"
            )
        first = int(match["first"])
        last = int(match["last"]) if match["last"] else first
        indices += range(first, last + 1, int(match["stride"] or 1))
    return indices
