"""Submits a group of runs as one Slurm array; all points are checked before anything is written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainkit.backends import BACKENDS, JobScript
from trainkit.backends.slurm import removed_unless_submitted, submit_file
from trainkit.config import LoadedConfig, RunConfig
from trainkit.errors import ConfigError, Problem, UsageError
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.slurm_request import option_argv
from trainkit.plan.sweep import filled_in, key_without_seed, names_key, shown, shown_value
from trainkit.plan.workload import TRAINER, Workload
from trainkit.run.files import utc_now, write_atomic, write_json
from trainkit.run.group import GROUP_VERSION, Point, RunGroup, difference
from trainkit.run.record import submission_token
from trainkit.run.registry import register
from trainkit.run.rundir import RunDir
from trainkit.slurm.environment import cluster_name
from trainkit.submit.array_spec import ArraySpec, refuse_too_large
from trainkit.submit.create import new_folder, write_origin
from trainkit.submit.plan_run import Gatherer, plan_run
from trainkit.submit.preflight_checks import refuse_leaks
from trainkit.submit.script import script_for

MAX_SHOWN = 10
"""The maximum number of problems that are listed."""


@dataclass(frozen=True)
class PlannedPoint:
    """One point of a sweep or array, with its config and plan."""

    index: int
    values: dict[str, Any]
    config: RunConfig
    plan: LaunchPlan


def plan_points(
    values: Mapping[int, dict[str, Any]],
    configs: Iterable[tuple[int, LoadedConfig | ConfigError]],
    workload: Workload = TRAINER,
    *,
    config_path: str,
    array: ArraySpec | None = None,
) -> list[PlannedPoint]:
    """Plan each point of a group; `values` maps index to values, `configs` yields (index, config).

    An `array` that exceeds the limits of the cluster is refused before any point is planned. Raises
    ConfigError with the problems of all points, and UsageError when one array cannot run them.
    """
    planned: dict[int, PlannedPoint | ConfigError] = {}
    gatherer = Gatherer()
    # By values without the seed, on which no plan depends unless the command names it.
    plans: dict[tuple[str, tuple[str, ...] | None], LaunchPlan | ConfigError] = {}
    for index, loaded in configs:
        if isinstance(loaded, ConfigError):
            planned[index] = loaded
            continue
        own = replace(workload, argv=workload.argv and filled_in(workload.argv, values[index]))
        key = (key_without_seed(values[index]), own.argv)
        if key not in plans:
            try:
                facts = gatherer.facts(loaded, own)
                if not plans:
                    target = facts.target
                    if problem := BACKENDS[target.backend].array_problem(target.reason, config_path):
                        raise UsageError(*problem)
                    if array is not None:
                        refuse_too_large(array)
                plans[key] = plan_run(loaded, facts, own)
            except ConfigError as error:
                plans[key] = error
        plan = plans[key]
        if isinstance(plan, LaunchPlan):
            planned[index] = PlannedPoint(index, values[index], loaded.config, plan)
        else:
            planned[index] = plan
    return check_points(values, planned)


def check_points(
    values: Mapping[int, dict[str, Any]], planned: Mapping[int, PlannedPoint | ConfigError]
) -> list[PlannedPoint]:
    """The points of a group, which must all have a plan and fit one array.

    Raises ConfigError with the problems of all points, each with its first point, and UsageError when the
    points need different jobs.
    """
    found: dict[Problem, list[int]] = {}
    points: list[PlannedPoint] = []
    for index, point in planned.items():
        if isinstance(point, PlannedPoint):
            points.append(point)
            continue
        for problem in point.problems:
            found.setdefault(problem, []).append(index)
    if found:
        raise ConfigError(list(_with_points(found, values)))
    if points[0].config.requeue.follow_ups:
        raise UsageError(
            f"requeue.follow_ups is {points[0].config.requeue.follow_ups}, which a group of runs cannot have",
            hint="set it to 0: follow-up jobs wait for a job, not for a task of an array",
        )
    job_of_first = _job_of(points[0])
    for point in points[1:]:
        differing = job_difference(points[0], point, job_of_first)
        if differing:
            raise UsageError(
                f"point {point.index} ({shown(point.values)}) needs a different job than point "
                f"{points[0].index}: {differing}",
                hint="all tasks of an array have one script and size: "
                "submit a run or a sweep for each of these",
            )
    return points


def common_plan(points: Sequence[PlannedPoint]) -> LaunchPlan:
    """The plan of the first point; its reasons note where others differ, its warnings are those of all."""
    first = points[0].plan
    others = [point.plan.reasons for point in points[1:]]
    reasons = {
        key: text
        if all(other.get(key) == text for other in others)
        else f"differs; for the first point: {text}"
        for key, text in first.reasons.items()
    }
    warnings = dict.fromkeys(text for point in points for text in point.plan.warnings)
    return replace(first, reasons=reasons, warnings=tuple(warnings))


def describe_points(spec: ArraySpec, values: Mapping[int, dict[str, Any]], is_sweep: bool) -> str:
    """The points of a group in one line."""
    first_index, first = next(iter(values.items()))
    if is_sweep:
        axes = {key: dict.fromkeys(shown_value(point[key]) for point in values.values()) for key in first}
        differs = " x ".join(f"{key}={','.join(texts)}" for key, texts in axes.items())
    elif "seed" in first:
        differs = f"seed is {first['seed'] - first_index} + the index"
    else:
        differs = "SLURM_ARRAY_TASK_ID is the index"
    limit = "" if spec.limit is None else f"; at most {spec.limit:,} at once"
    return f"{len(values):,} run{'s' if len(values) > 1 else ''}: {differs}{limit}"


def reaches_command(values: Mapping[int, dict[str, Any]], command: Sequence[str]) -> bool:
    """Whether a COMMAND sees all swept values, as arguments or environment variables."""
    keys = {key for point in values.values() for key in point}
    return all(key.startswith("launch.env.") or names_key(command, key) for key in keys)


def _with_points(
    found: Mapping[Problem, list[int]], values: Mapping[int, dict[str, Any]]
) -> Iterator[Problem]:
    """The problems with their points; a problem of all points is shown without them."""
    for problem, indices in list(found.items())[:MAX_SHOWN]:
        if len(indices) == len(values):
            yield problem
            continue
        others = f" and {len(indices) - 1:,} more" if len(indices) > 1 else ""
        points = f"point {indices[0]} ({shown(values[indices[0]])}){others}"
        origin = f"{points}: {problem.origin}" if problem.origin else points
        yield Problem(problem.key, problem.message, origin, problem.hint)
    if len(found) > MAX_SHOWN:
        yield Problem("", f"and {len(found) - MAX_SHOWN:,} more problems")


def job_difference(
    first: PlannedPoint, point: PlannedPoint, job_of_first: dict[str, str] | None = None
) -> str:
    """What differs in the jobs of two points; empty if one array, with one script and size, can run both.

    `job_of_first` avoids computing it for every other point.
    """
    if point.plan is first.plan and point.config.launch is first.config.launch:
        return ""
    before, now = job_of_first or _job_of(first), _job_of(point)
    return ", ".join(
        f"{before.get(name, f'no {name}')} or {now.get(name, f'no {name}')}"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    )


def _job_of(point: PlannedPoint) -> dict[str, str]:
    """The parts of a point's script by name, as shown to the user."""
    plan = point.plan
    options = {} if plan.slurm is None else {**plan.slurm.srun, **plan.slurm.sbatch}
    script = {f"--{name}": "".join(option_argv({name: value})) for name, value in options.items()}
    # Not part of the script: agents set the variables and the network.
    launch = point.config.launch.model_dump(mode="json", exclude={"env", "network"})
    return {
        **script,
        "device": f"device {plan.device}",
        **{f"launch.{key}": f"launch.{key}: {shown_value(value)}" for key, value in launch.items()},
    }


def group_script(
    group: RunGroup, points: Sequence[PlannedPoint], array: str, code: Mapping[str, Any] | None
) -> JobScript:
    """The script of the array; raises UsageError when it would contain a secret."""
    config, plan = points[0].config, points[0].plan
    # Variables that differ are set by the agents of each point.
    launch = config.launch.model_copy(update={"env": _common(point.config.launch.env for point in points)})
    config = config.model_copy(update={"launch": launch})
    plan = replace(plan, env=_common(point.plan.env for point in points))
    script = script_for(RunDir(group.path), 1, plan, config, Path.cwd(), code, array)
    refuse_leaks(script.text, str(group.script_file), config.secrets, os.environ)
    return script


def _common(mappings: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """The items that all mappings share, in the order of the first."""
    first, *others = mappings
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}


def create_group(
    points: Sequence[PlannedPoint],
    array: str,
    argv: Sequence[str],
    run_dir: Path | None = None,
    option: str = "--run-dir",
    code_from: RunGroup | None = None,
) -> tuple[RunGroup, dict[str, Any] | None]:
    """Create the folder of a group, without its job; returns the group and the description of its code.

    `option` is the command-line option of `run_dir`. `code_from` is a group in the same folder whose code and
    provenance this one shares. Raises UsageError when `run_dir` is not empty or cannot be written, or a
    secret would be written.
    """
    config, plan = points[0].config, points[0].plan
    with new_folder(config.name, run_dir, option) as (folder, name):
        group = RunGroup(folder)
        group.logs_dir.mkdir(mode=0o700)
        if code_from is None:
            code = write_origin(RunDir(group.path), config, plan, argv)
        else:
            code = _share_origin(code_from, group)
        record = _record(name, points, array, code)
        refuse_leaks(json.dumps(record), str(group.sweep_file), config.secrets, os.environ)
        write_atomic(group.script_file, group_script(group, points, array, code).text)
        write_json(group.sweep_file, record)
    return group, code


def _share_origin(source: RunGroup, group: RunGroup) -> dict[str, Any] | None:
    shutil.copyfile(source.provenance_file, group.provenance_file)
    if source.code_dir.is_dir():
        group.code_dir.symlink_to(Path(os.pardir, source.path.name, source.code_dir.name))
    code: dict[str, Any] | None = source.record["code"]
    return code


def _record(
    name: str, points: Sequence[PlannedPoint], array: str, code: Mapping[str, Any] | None
) -> dict[str, Any]:
    first = points[0]
    plan = first.plan.to_dict()
    entries = (
        Point(
            point.index,
            point.values,
            _config_difference(first.config, point.config),
            {} if point.plan == first.plan else difference(plan, point.plan.to_dict()),
        )
        for point in points
    )
    return {
        "version": GROUP_VERSION,
        "name": name,
        "backend": points[0].plan.backend,
        "cwd": str(Path.cwd()),
        "cluster": None if "," in os.environ.get("SLURM_CLUSTERS", "") else cluster_name(),
        "job_id": None,
        "array": array,
        "keys": _keys(points),
        "code": code,
        "config": _config_dict(first.config),
        "plan": plan,
        "points": [_compact(entry) for entry in entries],
    }


def _config_dict(config: RunConfig, sections: set[str] | None = None) -> dict[str, Any]:
    return config.model_dump(mode="json", by_alias=True, include=sections)


def _config_difference(base: RunConfig, other: RunConfig) -> dict[str, Any]:
    """`difference` of two configs; sections that are the same object, as most are, are not compared."""
    changed = {name for name, value in base if getattr(other, name) is not value}
    return difference(_config_dict(base, changed), _config_dict(other, changed))


def _keys(points: Iterable[PlannedPoint]) -> list[str]:
    return list(dict.fromkeys(key for point in points for key in point.values))


def _compact(point: Point) -> dict[str, Any]:
    entry = {"index": point.index, "values": point.values, "config": point.config, "plan": point.plan}
    return {key: value for key, value in entry.items() if value != {} or key == "values"}


def start_group(group: RunGroup, after: str | None = None) -> str:
    """Submit the array of a group and return its job id; it waits until the job `after` has ended.

    Raises SlurmRefused after removing the group, and SlurmUnreachable, which keeps it if the job may exist.
    """
    token = submission_token(RunDir(group.path), 1)
    options = [] if after is None else [f"--dependency=afterany:{after}"]
    with removed_unless_submitted(group.path, token):
        job_id = submit_file(group.script_file, token, group.path, options)
    group.update(job_id=job_id, submitted_at=utc_now())
    register(RunDir(group.path), group.name)
    return job_id
