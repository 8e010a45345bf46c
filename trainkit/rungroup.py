"""A group is a folder of runs that were submitted as one Slurm array: its points, counted by their index.

``sweep.json submit.sbatch provenance.json code/ logs/INDEX.log`` and one run folder ``INDEX/`` a point.
A point's folder is made when its task starts or a command needs it, so that submitting ten thousand of them
takes no longer than submitting ten.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from trainkit.errors import UsageError
from trainkit.rundir import RunDir, read_json, write_json

GROUP_VERSION = 1


@dataclass(frozen=True)
class Point:
    """One run of a group, as `sweep.json` has it."""

    index: int
    """Its number in the Slurm array, and the name of its folder."""
    values: dict[str, Any]
    """What it tries, by dotted key."""
    config: dict[str, Any]
    """How its config differs from the group's, as `trainkit.plan.sweep.difference` tells it."""
    plan: dict[str, Any]
    """How its plan differs from the group's."""


class RunGroup:
    """The paths of one group, and what its `sweep.json` says."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()

    def __repr__(self) -> str:
        return f"RunGroup({str(self.path)!r})"

    @property
    def sweep_file(self) -> Path:
        return self.path / "sweep.json"

    @property
    def script_file(self) -> Path:
        """The batch script of the array."""
        return self.path / "submit.sbatch"

    @property
    def provenance_file(self) -> Path:
        return self.path / "provenance.json"

    @property
    def code_dir(self) -> Path:
        """The code as it was when the group was submitted; its points have links to it."""
        return self.path / "code"

    @property
    def logs_dir(self) -> Path:
        """What the first start of every task prints, from its first line on; points have links to it."""
        return self.path / "logs"

    def log_file(self, index: int | str) -> Path:
        """Where Slurm puts what a task prints; it writes ``%a`` for the index."""
        return self.logs_dir / f"{index}.log"

    def run(self, index: int) -> RunDir:
        """The run of a point, whose folder need not be there yet."""
        return RunDir(self.path / str(index))

    def exists(self) -> bool:
        """True when this folder contains a group."""
        return self.sweep_file.is_file()

    @cached_property
    def record(self) -> dict[str, Any]:
        """What `sweep.json` holds, as it was when it was first asked for.

        Raises UsageError when it cannot be read or a newer trainkit wrote it.
        """
        try:
            record = read_json(self.sweep_file)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{self.sweep_file} cannot be read: {error}",
                hint="each of its runs can still be named by its folder",
            ) from error
        if not isinstance(record, dict) or not isinstance(record.get("points"), list):
            raise UsageError(f"{self.sweep_file} is not what trainkit writes there")
        if record.get("version", 0) > GROUP_VERSION:
            raise UsageError(
                f"{self.sweep_file} has version {record['version']}; this trainkit knows {GROUP_VERSION}",
                hint="use the trainkit that submitted it, or a newer one",
            )
        return record

    def update(self, **changes: Any) -> None:
        """Write changed values into `sweep.json`."""
        record = {**self.record, **changes}
        write_json(self.sweep_file, record)
        self.__dict__["record"] = record

    @property
    def name(self) -> str:
        return str(self.record.get("name") or self.path.name)

    @property
    def job_id(self) -> str | None:
        """The id of the whole array; None before Slurm has told it."""
        found = self.record.get("job_id")
        return None if found is None else str(found)

    @cached_property
    def points(self) -> dict[int, Point]:
        """The points by index."""
        made = (_point(value) for value in self.record["points"])
        return {point.index: point for point in made}

    def point(self, index: int) -> Point:
        """A point; UsageError when there is none of this index."""
        if index not in self.points:
            indices = sorted(self.points)
            raise UsageError(
                f"{self.path} has no point {index}", hint=f"its points are {indices[0]} to {indices[-1]}"
            )
        return self.points[index]

    def task_id(self, index: int) -> str | None:
        """The job id of a point's task in the array."""
        return None if self.job_id is None else f"{self.job_id}_{index}"


def group_of(run: RunDir) -> tuple[RunGroup, int] | None:
    """The group and the index of a run that is a point, whether its folder is there yet or not."""
    group = RunGroup(run.path.parent)
    if not is_index(run.name) or not group.exists():
        return None
    return group, int(run.name)


def is_index(text: str) -> bool:
    """Whether a folder in a group is named as a point's is."""
    return text.isascii() and text.isdigit() and str(int(text)) == text


def _point(value: Mapping[str, Any]) -> Point:
    return Point(value["index"], value["values"], value.get("config", {}), value.get("plan", {}))
