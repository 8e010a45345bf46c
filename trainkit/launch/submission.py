"""Plan the runs that a command submits: a single run, or the trials of a sweep or array as one group.

A single run is planned like a group with one trial. All trials are checked before `create.py` writes any
file.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.backend import backend_named
from trainkit.config import LoadedConfig, RunConfig, dump_effective
from trainkit.errors import ConfigError, Problem, UsageError
from trainkit.folders import shown_path
from trainkit.formats import plural, shown, shown_value, size
from trainkit.launch.gpu_hours import with_gpu_hours
from trainkit.launch.plan_run import Gatherer, plan_run
from trainkit.launch.secrets import refuse_leaks, secret_options
from trainkit.locks import NEEDS_FLOCK, local_locks, unsupported
from trainkit.plan.keep import KeepRule
from trainkit.plan.launch import LaunchPlan, option_argv
from trainkit.plan.sweep import filled_in, key_without_seed, names_key
from trainkit.plan.workload import Workload
from trainkit.run.files import difference
from trainkit.run.rundir import RUNS_FOLDER, RunDir, next_name
from trainkit.shipped import node_chooser

if TYPE_CHECKING:
    from trainkit.backend import JobScript
    from trainkit.capability import NodesChoice
    from trainkit.launch.repeat import RepeatedRun
    from trainkit.launch.sweep import ArraySpec, LoadedTrial
    from trainkit.run.group import Trial
    from trainkit.run.record import CodeCopy

MAX_SHOWN = 10
"""Maximum number of problems that are listed for a group."""
PLENTY_SHARE = 0.05
"""Checkpoints that need less than this fraction of the free disk space cause no warning."""


@dataclass(frozen=True)
class PlannedTrial:
    """A run to submit, along with its config and plan."""

    index: int
    values: dict[str, object]
    config: RunConfig
    plan: LaunchPlan


@dataclass(frozen=True)
class Submission:
    """The trials of one submission: a single run, or the trials of a group, which share a batch script."""

    trials: list[PlannedTrial]
    array: ArraySpec | None = None
    """The Slurm array of a group; None for a single run."""
    choice: NodesChoice | None = None
    """The reason why trainkit chose the number of nodes; None if the user specified it."""
    code_from: CodeCopy | None = None
    """The code copy of the run that is repeated; None if the run uses the current code."""
    stdin: bytes | None = None
    """The content of standard input for rank 0 of the COMMAND."""

    @cached_property
    def plan(self) -> LaunchPlan:
        """Return the plan of the first trial, combined with the warnings of all trials.

        If a reason differs between trials, its text says so.
        """
        first = self.trials[0].plan
        others = [trial.plan.reasons for trial in self.trials[1:]]
        reasons = {
            key: text
            if all(other.get(key) == text for other in others)
            else f"differs between trials; for the first trial: {text}"
            for key, text in first.reasons.items()
        }
        warnings = dict.fromkeys(text for trial in self.trials for text in trial.plan.warnings)
        return replace(first, reasons=reasons, warnings=tuple(warnings))

    def preview(self, run_dir: Path | None) -> tuple[str, dict[Path, str]]:
        """Return the exact batch script, and the plan files by path; write nothing.

        For a run on this machine, returns the plan as a line of JSON instead of a script. Raises UsageError
        if the script would contain a secret.
        """
        config, plan = self.trials[0].config, self.trials[0].plan
        run = RunDir(run_dir or Path(RUNS_FOLDER, next_name(config.name, None)))
        files: dict[Path, str] = {}
        for place, trial in self._distinct_runs(run):
            files |= {place.path / name: text for name, text in trial.plan.files.items()}
        if not plan.is_job:
            return json.dumps(plan.to_dict(), ensure_ascii=False) + "\n", files
        # Imported here because only a job with a script has a code copy to describe.
        from trainkit.launch.snapshot import future_code

        script = self.script(run, future_code(run, config, plan, self.code_from))
        if self.array is None:
            for where, text in (("plan.json", plan.to_text()), ("config.yaml", dump_effective(config))):
                refuse_leaks(text, where, config.secrets, os.environ)
        return script.text, files

    def _distinct_runs(self, folder: RunDir) -> Iterator[tuple[RunDir, PlannedTrial]]:
        """Yield each run with its folder, except runs whose plan files equal the files of an earlier run."""
        seen: list[Mapping[str, str]] = []
        for trial in self.trials:
            if trial.plan.files not in seen:
                seen.append(trial.plan.files)
                yield folder if self.array is None else RunDir(folder.path / str(trial.index)), trial

    @cached_property
    def group_config(self) -> dict[str, object]:
        """Return the config of the first trial; `group_trials` describes how other trials differ from it."""
        return _config_dict(self.trials[0].config)

    @cached_property
    def group_trials(self) -> list[Trial]:
        """Return the trials in the form stored in sweep.json."""
        from trainkit.run.group import Trial  # imported here because the import is slow

        first = self.trials[0]
        plan = first.plan.to_dict()
        return [
            Trial(
                trial.index,
                trial.values,
                _config_difference(first.config, trial.config),
                {} if trial.plan == first.plan else difference(plan, trial.plan.to_dict()),
            )
            for trial in self.trials
        ]

    def script(self, folder: RunDir, code: CodeCopy | None) -> JobScript:
        """Return the batch script for a run folder; raise UsageError if it would contain a secret."""
        from trainkit.launch.script import script_for
        from trainkit.run.submitted import submitted_group_hash, submitted_hash

        config, own = self.trials[0].config, self.trials[0].plan.to_dict()
        if self.array is None:
            array, submitted = None, submitted_hash(dump_effective(config), own)
        else:
            array = self.array.directive
            submitted = submitted_group_hash(self.group_config, own, self.group_trials)
        # Variables that differ between trials are set by the agents in each trial.
        plan = self.trials[0].plan
        common = _common(trial.plan.environment.variables for trial in self.trials)
        plan = replace(plan, environment=replace(plan.environment, variables=common))
        return script_for(folder, 1, plan, config, Path.cwd(), code, submitted, array)


def plan_submission(
    trials: Iterable[LoadedTrial],
    array: ArraySpec | None,
    workload: Workload,
    *,
    after: Sequence[str],
    warn: Callable[[str], None],
    chooses_nodes: bool = False,
    repeats: RepeatedRun | None = None,
) -> Submission:
    """Plan a single run, or every trial of a group.

    The runs start when all runs in `after` have finished. If the backend cannot run groups, an array is
    rejected before any trial is planned. With `chooses_nodes`, a run without `after` uses the number of nodes
    for which it is expected to finish earliest. With `repeats`, the run uses the code of the repeated run,
    and the plan's reasons mention that run.

    Raises a ConfigError that lists the problems of all trials, or UsageError if the trials need
    different Slurm options.
    """
    code_from = None if repeats is None else repeats.code
    code_dir = None if code_from is None else Path(code_from.workdir)
    gatherer = Gatherer(code_dir=code_dir)
    planned: list[PlannedTrial] = []
    refused: list[LoadedTrial] = []
    first: LoadedConfig | None = None
    choice: NodesChoice | None = None
    # The cache key excludes the seed, because a plan depends on the seed only if the command line contains
    # the seed.
    plans: dict[tuple[str, tuple[str, ...] | None], LaunchPlan | ConfigError] = {}
    for trial in trials:
        loaded = trial.loaded
        if isinstance(loaded, ConfigError):
            refused.append(trial)
            continue
        first = first or loaded
        own = replace(workload, argv=filled_in(workload.argv, trial.values))
        key = (key_without_seed(trial.values), own.argv)
        if key not in plans:
            try:
                facts = gatherer.facts(loaded, own)
                if (
                    array is not None
                    and not plans
                    and (problem := backend_named(facts.target.backend).array_problem())
                ):
                    raise UsageError(*problem)
                if chooses_nodes:
                    loaded, plans[key], choice = node_chooser()(loaded, own, code_dir=code_dir, facts=facts)
                else:
                    plans[key] = plan_run(loaded, facts, own, code_dir=code_dir)
            except ConfigError as error:
                plans[key] = error
        plan = plans[key]
        if isinstance(plan, LaunchPlan):
            planned.append(PlannedTrial(trial.index, trial.values, loaded.config, plan))
        else:
            refused.append(replace(trial, loaded=plan))
    submission = replace(checked(planned, refused, array), choice=choice, code_from=code_from)
    runs = submission.trials
    if first is not None and len(runs) > 1:
        plans_of_group = with_gpu_hours(first, [item.plan for item in runs])
        runs = [replace(item, plan=plan) for item, plan in zip(runs, plans_of_group, strict=True)]
    if after:
        # imported here because the import is slow
        from trainkit.launch.dependency import dependencies, with_dependency

        waits_for = dependencies(after, warn, on_slurm=submission.plan.is_job)
        runs = [replace(item, plan=with_dependency(item.plan, after, waits_for)) for item in runs]
    if repeats is not None:
        runs = [replace(item, plan=repeats.described(item.plan)) for item in runs]
    return replace(submission, trials=runs)


def submission_warnings(
    submission: Submission, folder: Path | None, workload: Workload, *, starts: bool
) -> Iterator[str]:
    """Yield warnings for the user about the run folder and the COMMAND.

    Raises UsageError if the folder does not support locks or the disk is too full.
    """
    plan, trials, folder = submission.plan, submission.trials, folder or Path(RUNS_FOLDER)
    if (problem := lock_problem(folder, plan.is_job)) is not None:
        yield f"warning: {problem}"
    if (forecast := disk_forecast(folder, plan, trials[0].config, len(trials), starts=starts)) is not None:
        yield forecast
    if found := dict.fromkeys(secret_options(workload.argv)):
        yield (
            f"warning: {', '.join(found)} of the command looks like a secret: it is stored in plan.json, and "
            "other users see it in the process list of a node; use an environment variable that "
            "launch.secrets lists"
        )


def lock_problem(folder: Path, on_other_hosts: bool) -> str | None:
    """Return the warning of `local_locks` for a job on other hosts; None if there is no warning.

    Raises UsageError if the file system does not support locks.
    """
    place = Path(os.path.realpath(folder))
    reason = unsupported(next(path for path in (place, *place.parents) if path.is_dir()))
    if reason is not None:
        raise UsageError(
            f"files in {folder} cannot be locked: {reason}",
            hint=f"{NEEDS_FLOCK}; `submit --run-dir` chooses another folder",
        )
    return local_locks(folder) if on_other_hosts else None


def disk_forecast(
    folder: Path, plan: LaunchPlan, config: RunConfig, num_runs: int = 1, *, starts: bool = True
) -> str | None:
    """Return a line about the disk space needed for checkpoints; None if there is plenty of space.

    Also returns None if the size of a checkpoint is unknown. If the runs are about to start (`starts`),
    raises UsageError if the first checkpoint of each run does not fit on the disk.
    """
    place, one = Path(os.path.realpath(folder)), plan.checkpoint_bytes
    if one is None:
        return None
    try:
        free = shutil.disk_usage(next(path for path in (place, *place.parents) if path.is_dir())).free
    except OSError:
        return None  # Ignore the error, because creating the folder will raise a more useful error.
    if one * num_runs > free and starts:
        message = f"a checkpoint needs {size(one)}, but {shown_path(folder)} has only {size(free)} free"
        if num_runs > 1:
            message = f"{num_runs} runs with a checkpoint each need {size(one * num_runs)}: {message}"
        raise UsageError(
            message, hint="free some disk space, or use --run-dir to choose a folder on another disk"
        )
    saves, steps = config.checkpoint, config.train.steps
    rule = KeepRule.of(saves)
    most = rule.most_kept(steps, has_best=saves.best_metric is not None)
    how_many, count = ("up to", most) if most is not None else ("at least", rule.fewest(saves, steps))
    if rule.last is None:
        advice = f"set {saves.last_key} (now null, which keeps all)"
    elif saves.keep is None:
        advice = f"lower {saves.last_key} (now {rule.last})"
    else:
        advice = f"keep fewer with checkpoint.keep (now {rule.text()})"
    need = count * one * num_runs
    if need < PLENTY_SHARE * free and most is not None:
        return None
    whose = f"{num_runs} runs with " if num_runs > 1 else ""
    where = f"{size(free)} free in {shown_path(folder)}"
    text = f"{whose}{how_many} {plural(count, 'checkpoint')} of {size(one)}: {size(need)} of {where}"
    if need > free:
        return f"warning: {text}; {advice}, or free some disk space"
    return f"  disk                {text}"


def checked(
    planned: list[PlannedTrial], refused: Sequence[LoadedTrial], array: ArraySpec | None
) -> Submission:
    """Return a submission of the planned trials after checking that all can be planned and share an array.

    Raises a ConfigError that lists the problems of all trials, each labelled with the first trial that has
    the problem. Raises UsageError if the trials need jobs with different Slurm options.
    """
    if refused:
        raise ConfigError(list(_with_trials(refused, len(planned) + len(refused))))
    first = planned[0]
    if not first.plan.is_job:
        return Submission(planned, array)
    if array is not None and first.config.requeue.follow_ups:
        raise UsageError(
            f"requeue.follow_ups is {first.config.requeue.follow_ups}, but groups have no chained jobs",
            hint="set this key to 0, because a chained job can wait for a job, but not for an array task",
        )
    job_of_first = _job_of(first)
    for trial in planned[1:]:
        if trial.plan is first.plan and trial.config.launch is first.config.launch:
            continue
        job = _job_of(trial)
        differing = ", ".join(
            f"{job_of_first.get(name, f'no {name}')} or {job.get(name, f'no {name}')}"
            for name in {**job_of_first, **job}
            if job_of_first.get(name) != job.get(name)
        )
        if differing:
            raise UsageError(
                f"trial {trial.index} ({shown(trial.values)}) needs a different job than trial "
                f"{first.index}: {differing}",
                hint="all array tasks share one script and one number of nodes: "
                "submit a separate run or sweep for each",
            )
    return Submission(planned, array)


def _with_trials(refused: Sequence[LoadedTrial], num_trials: int) -> Iterator[Problem]:
    """Yield each problem, labelled with the affected trials unless all trials are affected."""
    found: dict[Problem, list[LoadedTrial]] = {}
    for trial in refused:
        for problem in trial.loaded.problems if isinstance(trial.loaded, ConfigError) else ():
            found.setdefault(problem, []).append(trial)
    limit = MAX_SHOWN if num_trials > 1 else len(found)
    for problem, trials in list(found.items())[:limit]:
        if len(trials) == num_trials:
            yield problem
            continue
        others = f" and {len(trials) - 1:,} more" if len(trials) > 1 else ""
        text = f"trial {trials[0].index} ({shown(trials[0].values)}){others}"
        yield replace(problem, origin=f"{text}: {problem.origin}" if problem.origin else text)
    if len(found) > limit:
        yield Problem("", f"and {len(found) - limit:,} more problems")


def reaches_command(trials: Sequence[PlannedTrial], command: Sequence[str]) -> bool:
    """Return whether all swept values are passed to the COMMAND, as arguments or environment variables."""
    keys = {key for trial in trials for key in trial.values}
    return all(key.startswith("launch.env.") or names_key(command, key) for key in keys)


def describe_trials(submission: Submission, is_sweep: bool) -> str:
    """Describe a group's trials in one line, for the user."""
    trials, array = submission.trials, submission.array
    first_index, first = trials[0].index, trials[0].values
    if is_sweep:
        axes = {key: dict.fromkeys(shown_value(trial.values[key]) for trial in trials) for key in first}
        differs = " x ".join(f"{key}={','.join(texts)}" for key, texts in axes.items())
    elif isinstance(seed := first.get("seed"), int):
        differs = f"seed is {seed - first_index} + the array index"
    else:
        differs = "SLURM_ARRAY_TASK_ID is the array index"
    limit = "" if array is None or array.limit is None else f"; at most {array.limit:,} at once"
    if not limit and not trials[0].plan.is_job:
        limit = "; one at a time, unless --array %N allows N"
    return f"{plural(len(trials), 'run')}: {differs}{limit}"


def _job_of(trial: PlannedTrial) -> dict[str, str]:
    """Return descriptions of a trial's job options for the user, by name."""
    plan = trial.plan
    options = backend_named(plan.backend).job_options(plan)
    script = {f"--{name}": "".join(option_argv({name: value})) for name, value in options.items()}
    # launch.env and launch.network are applied by the agents, so they are not part of the script.
    launch = trial.config.launch.model_dump(mode="json", exclude={"env", "network"})
    return {
        **script,
        "device": f"device {plan.device}",
        **{f"launch.{key}": f"launch.{key}: {shown_value(value)}" for key, value in launch.items()},
    }


def _config_dict(config: RunConfig, sections: set[str] | None = None) -> dict[str, object]:
    return config.model_dump(mode="json", by_alias=True, include=sections)


def _config_difference(base: RunConfig, other: RunConfig) -> dict[str, object]:
    """Return the `difference` between two configs.

    Most sections are the same object in both configs; such sections are not compared.
    """
    changed = {name for name, value in base if getattr(other, name) is not value}
    return difference(_config_dict(base, changed), _config_dict(other, changed))


def _common(mappings: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return the items that all mappings have in common, in the order of the first mapping."""
    first, *others = mappings
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}
