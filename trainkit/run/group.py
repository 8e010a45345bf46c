"""A group is a folder of runs submitted as one Slurm array: the points of a sweep, one array task each.

``sweep.json submit.sbatch provenance.json code/ logs/INDEX.log`` and one run folder ``INDEX/`` per
point. A point's folder is created when its task starts or a command needs it, so that submitting ten thousand
points takes no longer than submitting ten.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from trainkit.errors import UsageError
from trainkit.locks import file_lock
from trainkit.run.files import read_json, write_json
from trainkit.run.rundir import RunDir

GROUP_VERSION = 1
BENCH_FILE = "bench.json"
"""In the folder of a bench, which is a group of runs, or has them or several groups in it."""


@dataclass(frozen=True)
class Point:
    """One run of a group, as `sweep.json` describes it."""

    index: int
    """Its number in the Slurm array, and the name of its folder."""
    values: dict[str, Any]
    """The values of the swept keys, by dotted key."""
    config: dict[str, Any]
    """How its config differs from the group's, as `trainkit.plan.sweep.difference` computes it."""
    plan: dict[str, Any]
    """How its plan differs from the group's."""


class RunGroup:
    """The paths of one group, and the content of its `sweep.json`."""

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
        """The code snapshot of the group; its runs link to it."""
        return self.path / "code"

    @property
    def logs_dir(self) -> Path:
        """The output of each task's first start, from its first line on; the runs link to it."""
        return self.path / "logs"

    def log_file(self, index: int | str) -> Path:
        """The log of a task; Slurm replaces ``%a`` by the index."""
        return self.logs_dir / f"{index}.log"

    def run(self, index: int) -> RunDir:
        """The run of a point, whose folder may not exist yet."""
        return RunDir(self.path / str(index))

    def exists(self) -> bool:
        """True when this folder contains a group."""
        return self.sweep_file.is_file()

    @cached_property
    def record(self) -> dict[str, Any]:
        """The content of `sweep.json`, cached at the first access.

        Raises UsageError when it cannot be read or a newer trainkit wrote it.
        """
        return self._read()

    def _read(self) -> dict[str, Any]:
        try:
            record = read_json(self.sweep_file)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{self.sweep_file} cannot be read: {error}",
                hint="name one of its runs by its folder",
            ) from error
        if not isinstance(record, dict) or not isinstance(record.get("points"), list):
            raise UsageError(f"{self.sweep_file} was not written by trainkit")
        if record.get("version", 0) > GROUP_VERSION:
            raise UsageError(
                f"{self.sweep_file} has version {record['version']}; this trainkit knows {GROUP_VERSION}",
                hint="use the trainkit that submitted it, or a newer one",
            )
        return record

    def update(self, **changes: Any) -> None:
        """Write changed values into `sweep.json`; other changes since it was read are kept."""
        with file_lock(self.path / ".lock"):
            record = {**self._read(), **changes}
            write_json(self.sweep_file, record)
        self.__dict__["record"] = record

    @property
    def name(self) -> str:
        return str(self.record.get("name") or self.path.name)

    @property
    def job_id(self) -> str | None:
        """The id of the whole array; None before it is known."""
        found = self.record.get("job_id")
        return None if found is None else str(found)

    @cached_property
    def points(self) -> dict[int, Point]:
        """The points by index."""
        made = (_point(value) for value in self.record["points"])
        return {point.index: point for point in made}

    def point(self, index: int) -> Point:
        """The point of an index; UsageError when there is none."""
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
    """The group and the index of a run that is a point of one, whether its folder exists or not."""
    group = RunGroup(run.path.parent)
    if not is_index(run.name) or not group.exists():
        return None
    return group, int(run.name)


def is_index(text: str) -> bool:
    """Whether a folder of a group has the name of a point's run."""
    return text.isascii() and text.isdigit() and str(int(text)) == text


def _point(value: Mapping[str, Any]) -> Point:
    return Point(value["index"], value["values"], value.get("config", {}), value.get("plan", {}))
