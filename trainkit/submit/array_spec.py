"""The indices of a Slurm array, in the syntax of ``--array``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainkit.errors import UsageError
from trainkit.plan.sweep import MAX_POINTS
from trainkit.slurm.control import show_config
from trainkit.slurm.states import array_indices

DEFAULT_MAX_ARRAY_SIZE = 1001
_LIMIT = re.compile(r"[1-9][0-9]*", re.ASCII)
_MAX_TASKS = re.compile(r"(?:^|,)max_array_tasks=(?P<count>\d+)")


@dataclass(frozen=True)
class ArraySpec:
    """The parsed form of ``0-9,20%4``."""

    indices: tuple[int, ...]
    """Empty if only a limit was given."""
    limit: int | None
    """The maximum number of concurrent tasks; None for no limit."""

    @property
    def directive(self) -> str:
        """The value of ``#SBATCH --array``."""
        limit = "" if self.limit is None else f"%{self.limit}"
        return ",".join(_spans(self.indices)) + limit


def parse_array(text: str) -> ArraySpec:
    """Parse ``0-9``, ``1,3,5`` or ``0-99:10``, each with an optional limit ``%4``, or ``%4`` alone.

    Raises UsageError for anything else.
    """
    spec, percent, limit = text.strip().partition("%")
    if percent and not _LIMIT.fullmatch(limit):
        raise UsageError(
            f"--array {text}: {limit!r} is not a number of concurrent tasks",
            hint="for example --array 0-9%4",
        )
    indices = array_indices(spec) if spec or not percent else []
    if len(indices) > MAX_POINTS:
        raise UsageError(
            f"--array {text}: {len(indices):,} tasks; the maximum is {MAX_POINTS:,}",
            hint="for example --array 0-9",
        )
    if len(set(indices)) < len(indices):
        raise UsageError(f"--array {text}: an index is repeated", hint="each index is one run")
    if spec and not indices:
        raise UsageError(f"--array {text}: there are no tasks", hint="for example --array 0-9")
    return ArraySpec(tuple(sorted(indices)), int(limit) if percent else None)


def refuse_too_large(spec: ArraySpec) -> None:
    """Raise UsageError when the array exceeds the limits of the cluster; asks Slurm once."""
    config = show_config()
    size = int(config.get("MaxArraySize") or DEFAULT_MAX_ARRAY_SIZE)
    if spec.indices[-1] >= size:
        raise UsageError(
            f"the array ends with index {spec.indices[-1]:,}; the maximum of this cluster is {size - 1:,} "
            f"(MaxArraySize is {size})",
            hint="split it into several arrays",
        )
    limit = _MAX_TASKS.search(config.get("SchedulerParameters", ""))
    if limit is not None and len(spec.indices) > int(limit["count"]):
        raise UsageError(
            f"the array has {len(spec.indices):,} tasks; the maximum of this cluster is "
            f"{int(limit['count']):,} (max_array_tasks)",
            hint="split it into several arrays",
        )


def _spans(indices: tuple[int, ...]) -> list[str]:
    """Ascending indices as ranges, for example ``0-3``."""
    spans: list[list[int]] = []
    for index in indices:
        if spans and spans[-1][1] == index - 1:
            spans[-1][1] = index
        else:
            spans.append([index, index])
    return [str(first) if first == last else f"{first}-{last}" for first, last in spans]
