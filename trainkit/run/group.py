"""A group is a folder of runs submitted as one Slurm array: the points of a sweep, one array task each.

``sweep.json submit.sbatch provenance.json code/ logs/INDEX.log`` and one run folder ``INDEX/`` per
point. A point's folder is created when its task starts or a command needs it, so that submitting ten thousand
points takes no longer than submitting ten.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from trainkit.errors import UsageError
from trainkit.formats import JsonObject
from trainkit.locks import file_lock
from trainkit.run.events import log_event
from trainkit.run.files import read_json, read_record, write_json
from trainkit.run.record import CodeCopy, add_slurm_attempt, create_job, open_attempt
from trainkit.run.rundir import RunDir

GROUP_VERSION = 1
BENCH_FILE = "bench.json"
"""In the folder of a bench, which is a group of runs, or has them or several groups in it."""


@dataclass(frozen=True)
class Point:
    """One run of a group, as `sweep.json` describes it."""

    index: int
    """Its number in the Slurm array, and the name of its folder."""
    values: JsonObject
    """The values of the swept keys, by dotted key."""
    config: dict[str, Any]
    """How its config differs from the group's, as `difference` computes it."""
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

    @property
    def code(self) -> CodeCopy | None:
        """The copy of the code of all runs; None if they use the files in place."""
        found = self.record.get("code")
        return None if found is None else read_record(CodeCopy, found)

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


def create_task_run(run: RunDir, job_id: str | None = None) -> RunDir:
    """The run, after creating its folder if it is that of an array task and does not exist yet.

    It does so when the task starts, or earlier when a command needs it.

    `job_id` is the id of the task, by default derived from the group's sweep.json.
    Raises UsageError when the group has no such task, was not submitted, or cannot be written.
    """
    if run.exists() or (found := group_of(run)) is None:
        return run
    group, index = found
    point = group.point(index)
    job_id = job_id or group.task_id(index)
    if job_id is None:
        raise UsageError(
            f"cannot tell whether {group.path} was submitted: its sweep.json has no job id",
            hint="`squeue --me` lists your jobs",
        )
    try:
        _create(group, point, job_id)
    except OSError as error:
        raise UsageError(
            f"cannot create the run folder {run.path}: {error.strerror or error}",
            hint="check the permissions of its parent folder and the free space of the disk",
        ) from error
    return run


def _create(group: RunGroup, point: Point, job_id: str) -> None:
    """Create the folder under a temporary name and rename it, so that no reader sees a partial run."""
    run = group.run(point.index)
    stage = RunDir(tempfile.mkdtemp(prefix=f".{point.index}.", dir=group.path))
    try:
        _fill(stage, group, point, job_id)
        stage.path.rename(run.path)
    except BaseException as error:
        shutil.rmtree(stage.path, ignore_errors=True)
        # Another command, or the task itself, may have created it meanwhile.
        if not (isinstance(error, OSError) and run.exists()):
            raise


def _fill(stage: RunDir, group: RunGroup, point: Point, job_id: str) -> None:
    from trainkit.config.yamlfile import dump  # slow to import

    record = group.record
    stage.checkpoints_dir.mkdir(mode=0o700)
    create_job(
        stage,
        backend=record["backend"],
        name=f"{group.name}/{point.index}",
        cwd=record["cwd"],
        code=group.code,
    )
    plan = json.dumps(changed(record["plan"], point.plan), indent=2, ensure_ascii=False) + "\n"
    attempt = open_attempt(stage, dump(changed(record["config"], point.config)), plan)
    shutil.copyfile(group.provenance_file, stage.provenance_file)
    for copy in (attempt.script_file, stage.script_file):
        shutil.copyfile(group.script_file, copy)
    if group.code_dir.is_dir():
        stage.code_dir.symlink_to(Path(os.pardir, group.code_dir.name))
    # Slurm writes the output of the task there from its first line on.
    log = Path(*[os.pardir] * 4, group.logs_dir.name, group.log_file(point.index).name)
    attempt.supervisor_log.symlink_to(log)
    known = {key: record[key] for key in ("submitted_at", "cancelled_at", "cluster") if record.get(key)}
    add_slurm_attempt(stage, attempt.number, job_id, "submit", str(record["backend"]), **known)
    log_event(stage, attempt.number, "submitted", job_id=job_id, reason="submit")


def difference(base: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The changes that turn JSON object `base` into `other`, by dotted path.

    A mapping that lost a key, or has a name with a dot, is replaced as a whole.
    """
    return dict(_differences(base, other, ()))


def _differences(
    base: Mapping[str, Any], other: Mapping[str, Any], path: tuple[str, ...]
) -> Iterator[tuple[str, Any]]:
    for key, value in other.items():
        before = base.get(key)
        # As JSON: in Python 1 is True, also inside of lists.
        if key in base and json.dumps(before, sort_keys=True) == json.dumps(value, sort_keys=True):
            continue
        if isinstance(before, dict) and isinstance(value, dict) and _fits_in(before, value):
            yield from _differences(before, value, (*path, key))
        else:
            yield ".".join((*path, key)), value


def _fits_in(before: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
    """Whether dotted paths can express the change of a mapping."""
    return before.keys() <= value.keys() and not any("." in name for name in value)


def changed(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `base` with the changes that `difference` returned."""
    result = dict(base)
    for path, value in changes.items():
        head, dot, rest = path.partition(".")
        result[head] = changed(result[head], {rest: value}) if dot else value
    return result
