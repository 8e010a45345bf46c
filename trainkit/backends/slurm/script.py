"""The parts of a batch script that are of Slurm: its directives, its step, and when it requeues the job."""

from __future__ import annotations

from collections.abc import Sequence

from trainkit.backend import ScriptParts
from trainkit.errors import UsageError
from trainkit.plan.launch import LaunchPlan, Options, SlurmRequest, option_argv
from trainkit.quoting import log_path
from trainkit.run.group import RunGroup
from trainkit.run.rundir import RunDir, submission_token


def script_parts(
    run: RunDir, attempt: int, plan: LaunchPlan, agent: Sequence[str], array: str | None
) -> ScriptParts:
    """The parts of the script of an attempt, whose step runs `agent`; see `Backend.script_parts`."""
    assert plan.slurm is not None
    step = ("srun", *option_argv(plan.slurm.srun), *agent)
    return ScriptParts(directives(run, attempt, plan.slurm, array), step, _restarts_of_starts(plan))


def _restarts_of_starts(plan: LaunchPlan) -> int:
    """How often in a row the script requeues a job that ended before its supervisor began."""
    assert plan.slurm is not None
    may_requeue = "crash" in plan.requeue.on and "requeue" in plan.slurm.sbatch
    return min(plan.requeue.max, plan.requeue.max_crashes) if may_requeue else 0


def directives(run: RunDir, attempt: int, request: SlurmRequest, array: str | None) -> Options:
    """The options of the `#SBATCH` lines by name; True for an option without a value."""
    comment = request.comment(submission_token(run, attempt))
    log = log_path(str(run.attempt(attempt).supervisor_log))
    options = {**request.sbatch, "comment": comment, "output": log, "open-mode": "append"}
    if array is not None:
        options |= {"array": array, "output": _array_log(RunGroup(run.path))}
    if attempt > 1:
        options.pop("dependency", None)  # only the first attempt waits for it
    return {name: value for name, value in options.items() if value is not False}


def _array_log(group: RunGroup) -> str:
    if "\\" in str(group.path):
        raise UsageError(
            f"{group.path} contains a backslash, so Slurm would write all tasks of an array to the same log",
            hint="choose a folder without one with --run-dir",
        )
    return f"{log_path(str(group.logs_dir))}/{group.log_file('%a').name}"
