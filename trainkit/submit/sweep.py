"""Submits a group of runs as one Slurm array: every point is checked before anything is written."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit.config import LoadedConfig, RunConfig
from trainkit.control.run_registry import register
from trainkit.errors import ConfigError, Problem, UsageError
from trainkit.job.record import submission_token
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.slurm_request import option_argv
from trainkit.plan.sweep import MAX_POINTS, difference, shown, shown_value
from trainkit.rundir import RunDir, utc_now, write_atomic, write_json
from trainkit.rungroup import GROUP_VERSION, Point, RunGroup
from trainkit.slurm.control import show_config
from trainkit.slurm.job_id import array_indices
from trainkit.submit.create import CodeCopier, new_place, write_origin
from trainkit.submit.sbatch_backend import removed_unless_submitted, submit_file
from trainkit.submit.script import JobScript, script_for
from trainkit.submit.secrets import refuse_leaks

MAX_SHOWN = 10
"""Problems that are shown one by one."""


@dataclass(frozen=True)
class PlannedPoint:
    """A point that was checked."""

    index: int
    values: dict[str, Any]
    config: RunConfig
    plan: LaunchPlan


def check_points(
    points: Mapping[int, dict[str, Any]],
    load: Callable[[dict[str, Any]], LoadedConfig],
    plan: Callable[[LoadedConfig], LaunchPlan],
) -> list[PlannedPoint]:
    """Every point with its config and plan.

    `points` are values by index. Raises ConfigError with the problems of all of them, each with the first
    point that has it, and UsageError when one array cannot hold them.
    """
    checked: list[PlannedPoint] = []
    found: dict[Problem, list[int]] = {}
    for index, values in points.items():
        try:
            loaded = load(values)
            checked.append(PlannedPoint(index, values, loaded.config, plan(loaded)))
        except ConfigError as error:
            for problem in error.problems:
                found.setdefault(problem, []).append(index)
    if found:
        raise ConfigError(list(_named(found, points)))
    if checked[0].config.requeue.follow_ups:
        raise UsageError(
            f"requeue.follow_ups is {checked[0].config.requeue.follow_ups}, and these are many runs",
            hint="follow-up jobs wait for one job, not for a task of an array: set it to 0",
        )
    job = _job_of(checked[0])
    for point in checked[1:]:
        _refuse_other_job(checked[0], job, point)
    return checked


def _named(found: Mapping[Problem, list[int]], points: Mapping[int, dict[str, Any]]) -> Iterator[Problem]:
    """The problems, each with the point that has it; one that all points have is the config's own."""
    for problem, indices in list(found.items())[:MAX_SHOWN]:
        if len(indices) == len(points):
            yield problem
            continue
        others = f" and {len(indices) - 1:,} more" if len(indices) > 1 else ""
        who = f"point {indices[0]} ({shown(points[indices[0]])}){others}"
        origin = f"{who}: {problem.origin}" if problem.origin else who
        yield Problem(problem.key, problem.message, origin, problem.hint)
    if len(found) > MAX_SHOWN:
        yield Problem("", f"and {len(found) - MAX_SHOWN:,} more problems like these")


def _refuse_other_job(first: PlannedPoint, before: Mapping[str, str], point: PlannedPoint) -> None:
    """One array has one script: what is asked of Slurm and what surrounds the ranks is the same for all."""
    now = _job_of(point)
    differing = [
        f"{before.get(name, f'no {name}')} or {now.get(name, f'no {name}')}"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    ]
    if differing:
        raise UsageError(
            f"point {point.index} ({shown(point.values)}) needs another job than point {first.index}: "
            + ", ".join(differing),
            hint="an array is one script with one size: submit a run, or a sweep, for each of these",
        )


def _job_of(point: PlannedPoint) -> dict[str, str]:
    """What the script of a point is made of, by name and as a person reads it."""
    plan = point.plan
    options = {} if plan.slurm is None else {**plan.slurm.srun, **plan.slurm.sbatch}
    script = {f"--{name}": "".join(option_argv({name: value})) for name, value in options.items()}
    # Variables and network are set by the agents.
    launch = point.config.launch.model_dump(mode="json", exclude={"env", "network"})
    return {
        **script,
        "device": f"device {plan.device}",
        **{f"launch.{key}": f"launch.{key}: {shown_value(value)}" for key, value in launch.items()},
    }


def group_script(
    group: RunGroup, points: Sequence[PlannedPoint], array: str, code: Mapping[str, Any] | None
) -> JobScript:
    """The script of the array; UsageError when a secret would stand in it."""
    config, plan = points[0].config, points[0].plan
    # Variables that differ are set by the agents of each point.
    launch = config.launch.model_copy(update={"env": _common(point.config.launch.env for point in points)})
    config = config.model_copy(update={"launch": launch})
    plan = dataclasses.replace(plan, env=_common(point.plan.env for point in points))
    script = script_for(RunDir(group.path), 1, plan, config, Path.cwd(), code, array)
    refuse_leaks(script.text, str(group.script_file), config.launch.secrets, os.environ)
    return script


def _common(mappings: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """What all mappings hold alike, in the order of the first."""
    first, *others = mappings
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}


def create_group(
    points: Sequence[PlannedPoint],
    array: str,
    run_dir: Path | None,
    argv: Sequence[str],
    copier: CodeCopier | None,
    option: str = "--run-dir",
) -> RunGroup:
    """Make the folder of a group with everything but its job; `option` is what names `run_dir`.

    Raises UsageError when `run_dir` is not empty, the place cannot be written, or a secret would be.
    """
    config = points[0].config
    with new_place(config.name, run_dir, option) as (folder, name):
        group = RunGroup(folder)
        group.logs_dir.mkdir(mode=0o700)
        code = write_origin(RunDir(group.path), argv, config.launch.secrets, "sbatch", copier)
        record = _record(name, points, array, code)
        refuse_leaks(json.dumps(record), str(group.sweep_file), config.launch.secrets, os.environ)
        write_atomic(group.script_file, group_script(group, points, array, code).text)
        write_json(group.sweep_file, record)
    return group


def _record(
    name: str, points: Sequence[PlannedPoint], array: str, code: Mapping[str, Any] | None
) -> dict[str, Any]:
    config, plan = _config_dict(points[0].config), points[0].plan.to_dict()
    entries = (
        Point(
            point.index,
            point.values,
            difference(config, _config_dict(point.config)),
            difference(plan, point.plan.to_dict()),
        )
        for point in points
    )
    return {
        "version": GROUP_VERSION,
        "name": name,
        "backend": points[0].plan.backend,
        "cwd": str(Path.cwd()),
        "job_id": None,
        "array": array,
        "keys": _keys(points),
        "code": code,
        "config": config,
        "plan": plan,
        "points": [_compact(entry) for entry in entries],
    }


def _config_dict(config: RunConfig) -> dict[str, Any]:
    return config.model_dump(mode="json", by_alias=True)


def _keys(points: Iterable[PlannedPoint]) -> list[str]:
    return list(dict.fromkeys(key for point in points for key in point.values))


def _compact(point: Point) -> dict[str, Any]:
    return {key: value for key, value in dataclasses.asdict(point).items() if value != {} or key == "values"}


def submit_group(group: RunGroup) -> str:
    """Submit the array of a group, and give its job id; when Slurm does not take it, the group is removed.

    Raises SlurmRefused, and SlurmUnreachable, which leaves the group when Slurm may have taken it.
    """
    mark = submission_token(RunDir(group.path), 1)
    with removed_unless_submitted(group.path, mark):
        job_id = submit_file(group.script_file, mark, group.path)
    group.update(job_id=job_id, submitted_at=utc_now())
    register(RunDir(group.path), group.name)
    return job_id


DEFAULT_MAX_ARRAY_SIZE = 1001
_LIMIT = re.compile(r"[1-9][0-9]*", re.ASCII)
_MAX_TASKS = re.compile(r"(?:^|,)max_array_tasks=(?P<count>\d+)")


@dataclass(frozen=True)
class ArraySpec:
    """What ``0-9,20%4`` says."""

    indices: tuple[int, ...]
    """Empty when only the limit was given."""
    limit: int | None
    """How many tasks run at once; None leaves that to Slurm."""

    @property
    def directive(self) -> str:
        """The value of ``#SBATCH --array``."""
        limit = "" if self.limit is None else f"%{self.limit}"
        return ",".join(_spans(self.indices)) + limit


def parse_array(text: str) -> ArraySpec:
    """The array of ``--array``: ``0-9``, ``1,3,5``, ``0-99:10``, each with ``%4``, or ``%4`` alone.

    Raises UsageError.
    """
    spec, percent, limit = text.strip().partition("%")
    if percent and not _LIMIT.fullmatch(limit):
        raise UsageError(
            f"--array {text}: {limit!r} is no number of tasks that run at once",
            hint="for example --array 0-9%4",
        )
    indices = array_indices(spec) if spec or not percent else []
    if len(indices) > MAX_POINTS:
        raise UsageError(
            f"--array {text}: these are {len(indices):,} tasks, and {MAX_POINTS:,} are the most",
            hint="for example --array 0-9",
        )
    if len(set(indices)) < len(indices):
        raise UsageError(
            f"--array {text}: an index stands there twice", hint="every task is a run of its own"
        )
    if spec and not indices:
        raise UsageError(f"--array {text}: there are no tasks", hint="for example --array 0-9")
    return ArraySpec(tuple(sorted(indices)), int(limit) if percent else None)


def refuse_too_large(spec: ArraySpec) -> None:
    """Raise UsageError when the cluster does not take such an array; asks Slurm once."""
    config = show_config()
    size = int(config.get("MaxArraySize") or DEFAULT_MAX_ARRAY_SIZE)
    if spec.indices[-1] >= size:
        raise UsageError(
            f"the array ends with index {spec.indices[-1]:,}, and the largest here is {size - 1:,} "
            f"(MaxArraySize is {size})",
            hint="submit it in parts",
        )
    most = _MAX_TASKS.search(config.get("SchedulerParameters", ""))
    if most is not None and len(spec.indices) > int(most["count"]):
        raise UsageError(
            f"the array has {len(spec.indices):,} tasks, and the most here are {int(most['count']):,} "
            "(max_array_tasks)",
            hint="submit it in parts",
        )


def _spans(indices: tuple[int, ...]) -> list[str]:
    """Ascending indices with what follows each other written as one span."""
    spans: list[list[int]] = []
    for index in indices:
        if spans and spans[-1][1] == index - 1:
            spans[-1][1] = index
        else:
            spans.append([index, index])
    return [str(first) if first == last else f"{first}-{last}" for first, last in spans]
