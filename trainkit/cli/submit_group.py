"""``trainkit submit`` with --sweep or --array: many runs of one config as one Slurm array."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from trainkit.errors import EXIT_OK, UsageError

if TYPE_CHECKING:
    from trainkit.cli.options import ConfigRequest, GroupRequest
    from trainkit.config import LoadedConfig
    from trainkit.plan.launch import LaunchPlan
    from trainkit.submit.sweep import ArraySpec, PlannedPoint


@dataclass(frozen=True)
class Submission:
    """What was typed besides the config and the points."""

    command: tuple[str, ...] | None
    launcher: str
    run_dir: Path | None
    after: tuple[str, ...]
    dry_run: bool
    test_only: bool
    follow: bool
    as_json: bool


def submit_many(request: ConfigRequest, group: GroupRequest, typed: Submission) -> int:
    """Submit a group, or show what would be submitted."""
    from trainkit.plan.launch import describe_plan
    from trainkit.submit.sweep import check_points

    if typed.follow:
        raise UsageError(
            "--follow shows one run, and these are many",
            hint="`trainkit logs GROUP/0 -f` follows one of them",
        )
    base = request.load() if not group.sweeps else None
    seed = None if base is None or typed.command is not None else base.config.seed
    spec, values = group.points(seed)
    planner = _Planner(request.path, typed, spec)
    planned = check_points(values, group.loader(request), planner)
    planned = [replace(point, plan=planner.waiting(point.plan)) for point in planned]
    click.echo(describe_plan(_common(planned), planned[0].config.name), err=True)
    click.echo(f"  {'points':<18}  {_in_words(spec, values, bool(group.sweeps))}", err=True)
    if typed.command is not None and group.sweeps and not _all_seen(values):
        hidden = "the rest stands in the config.yaml of its run folder, $TRAINKIT_JOB_RUN_DIR"
        click.echo(f"  note: of a sweep a COMMAND sees only launch.env.NAME; {hidden}", err=True)
    if typed.dry_run or typed.test_only:
        return _show(planned, spec, typed)
    return _submit(planned, spec, typed)


class _Planner:
    """Plans the points one after the other; what is the same for all is looked at once."""

    def __init__(self, path: str, typed: Submission, spec: ArraySpec) -> None:
        self.path = path
        self.typed = typed
        self.spec = spec
        self._target: Any = None
        self._look: Any = None
        self._awaited: list[str] | None = None

    def __call__(self, loaded: LoadedConfig) -> LaunchPlan:
        from trainkit.cli import launch
        from trainkit.cluster.target import make_target
        from trainkit.submit.sweep import refuse_too_large

        if self._target is None:
            self._target, self._look = make_target(loaded), launch.look_once()
            _refuse_other_backends(self._target.backend, self._target.reason, self.path)
            if not self.typed.dry_run:
                refuse_too_large(self.spec)  # before a minute is spent on planning its points
        return launch.plan_for(loaded, self.typed.command, self.typed.launcher, self._target, self._look)

    def waiting(self, plan: LaunchPlan) -> LaunchPlan:
        """The plan with what --after asks for."""
        from trainkit.cli.after import find_job_ids
        from trainkit.plan.launch import with_dependency

        if self._awaited is None:
            self._awaited = find_job_ids(self.typed.after)
        return with_dependency(plan, self.typed.after, self._awaited)


def _refuse_other_backends(backend: str, reason: str, path: str) -> None:
    if backend == "local":
        raise UsageError(
            f"--sweep and --array make an array of Slurm, and this would start on this machine ({reason})",
            hint="a loop of the shell runs them one after the other: "
            f"for lr in 1e-4 3e-4; do trainkit run {quote(path)} --set optimizer.lr=$lr; done",
        )
    if backend == "submitit":
        raise UsageError(
            "submitit has arrays of its own kind, which trainkit does not make", hint="add --backend sbatch"
        )


def _all_seen(points: dict[int, dict[str, Any]]) -> bool:
    """Whether everything that is swept reaches a COMMAND, as a variable."""
    return all(key.startswith("launch.env.") for values in points.values() for key in values)


def _common(planned: Sequence[PlannedPoint]) -> LaunchPlan:
    """The first plan, whose reasons say where those of other points differ."""
    first = planned[0].plan
    others = [point.plan.reasons for point in planned[1:]]
    reasons = {
        key: text
        if all(other.get(key) == text for other in others)
        else f"differs; of the first point: {text}"
        for key, text in first.reasons.items()
    }
    return replace(first, reasons=reasons)


def _in_words(spec: ArraySpec, points: dict[int, dict[str, Any]], is_sweep: bool) -> str:
    """Which points there are, in one line."""
    from trainkit.plan.sweep import shown_value

    first_index, first = next(iter(points.items()))
    if is_sweep:
        axes = {key: dict.fromkeys(shown_value(point[key]) for point in points.values()) for key in first}
        tried = " x ".join(f"{key}={','.join(texts)}" for key, texts in axes.items())
    elif "seed" in first:
        tried = f"seed is {first['seed'] - first_index} + the index"
    else:
        tried = "SLURM_ARRAY_TASK_ID tells each which one it is"
    limit = "" if spec.limit is None else f"; at most {spec.limit:,} at once"
    return f"{len(points):,} run{'s' if len(points) > 1 else ''}: {tried}{limit}"


def _show(planned: Sequence[PlannedPoint], spec: ArraySpec, typed: Submission) -> int:
    """Print the bytes that would be submitted, or what Slurm says to them."""
    from trainkit.rungroup import RunGroup
    from trainkit.submit.code.copy import planned_code
    from trainkit.submit.create import future_run
    from trainkit.submit.sbatch_backend import ask_slurm_about
    from trainkit.submit.sweep import group_script

    config, plan = planned[0].config, planned[0].plan
    run = future_run(config.name, typed.run_dir)
    code = planned_code(run, config, plan, Path.cwd())
    script = group_script(RunGroup(run.path), planned, spec.directive, code)
    if typed.test_only:
        click.echo(ask_slurm_about(script.text))
    else:
        click.echo(script.text, nl=False)
    return EXIT_OK


def _submit(planned: Sequence[PlannedPoint], spec: ArraySpec, typed: Submission) -> int:
    from trainkit.cli.launch import code_copier
    from trainkit.submit.sweep import create_group, submit_group

    config, plan = planned[0].config, planned[0].plan
    copier = code_copier(config, plan)
    group = create_group(planned, spec.directive, typed.run_dir, ["trainkit", *sys.argv[1:]], copier)
    job_id = submit_group(group)
    value = {
        "run_dir": str(group.path),
        "name": group.name,
        "job_id": job_id,
        "backend": plan.backend,
        "array": spec.directive,
        "num_points": len(planned),
    }
    if typed.as_json:
        click.echo(json.dumps(value, ensure_ascii=False))
    else:
        click.echo(value["run_dir"])
        click.echo(value["job_id"])
    shown, first = quote(str(group.path)), quote(str(group.run(spec.indices[0]).path))
    click.echo(f"`trainkit status {shown}` shows all, `trainkit logs {first} -f` one of them", err=True)
    return EXIT_OK
