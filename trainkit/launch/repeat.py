"""Load the config of an existing run again, and repeat this run in a new folder."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from trainkit.config import LoadedConfig, RunConfig, load_config, read_effective
from trainkit.config.schema import flatten
from trainkit.errors import UsageError
from trainkit.folders import shown_path, working_in
from trainkit.function import call_file
from trainkit.launch.snapshot import moved
from trainkit.plan.launch import LaunchPlan
from trainkit.run.files import read_json
from trainkit.run.record import CodeCopy, JobRecord, read_job
from trainkit.run.registry import UnknownRun, find_run_or_group, one_run
from trainkit.run.rundir import AttemptDir, RunDir
from trainkit.shipped import keys_of

REPLAY_FILE = "replay.json"
"""The file, in the job folder of `trainkit replay`, that contains the run and the steps to replay."""
FOUND_HERE = {"device": "device", "resources.gpus_per_node": "workers_per_node", "launch.backend": "backend"}
"""Maps each key that may be ``auto`` to the plan attribute with its resolved value."""
SHAPE = ("backend", "num_nodes", "workers_per_node", "device", "layout", "batch", "lr")


@dataclass(frozen=True)
class RepeatedRun:
    """A run to repeat in a new folder."""

    run: RunDir
    config: RunConfig
    plan: LaunchPlan
    job: JobRecord
    code: CodeCopy | None
    """The run's code copy; None if the new run uses the current code."""
    stdin: bytes | None
    """The content of standard input for rank 0 of the COMMAND; None if the run did not store it."""

    def found_values(self, typed: Collection[str]) -> dict[str, tuple[str, object]]:
        """Return the values found for this run's ``auto`` keys, excluding keys that the user `typed`.

        The result maps a key to (origin of the value, value).
        """
        found = dict(flatten(self.config.model_dump(mode="json")))
        return {
            key: (str(self.run.plan_file), getattr(self.plan, name))
            for key, name in FOUND_HERE.items()
            if key not in typed
            and found[key] == "auto"
            and (key != "launch.backend" or self.plan.has_supervisor)
        }

    def described(self, plan: LaunchPlan) -> LaunchPlan:
        """Return the new run's plan with a reason that names the repeated run and the differences from it."""
        taken = ["config"]
        argv = plan.workload.argv
        taken += ["command"] if argv and argv == self.plan.workload.argv else []
        taken += ["code"] if self.code else []
        kept = f"its {' and '.join(filter(None, (', '.join(taken[:-1]), taken[-1])))}"
        code = "" if self.code else f"; with the current code in {Path.cwd()}"
        differing = [
            name.replace("_", " ") for name in SHAPE if getattr(plan, name) != getattr(self.plan, name)
        ]
        other = f"; other {', '.join(differing)}" if differing else ""
        text = f"{self.run.path}: {kept}{code}{other}"
        return replace(plan, reasons={"repeats": text, **plan.reasons})


def find_repeated(text: str) -> RunDir | None:
    """Return the run that an argument refers to; None if it does not refer to a run."""
    try:
        return one_run(find_run_or_group(text, to_change=True), text)
    except UnknownRun:
        return None


def repeated_run(run: RunDir, *, uses_current_code: bool) -> RepeatedRun:
    """Return the config, code copy and standard input that are needed to repeat a run.

    With `uses_current_code`, the new run uses the current code instead of the run's code copy. Raises
    UsageError if the run cannot be repeated, or if another user could have written its files.
    """
    refuse_replay(run)
    refuse_by_hand(run)
    if call_file(run).exists():
        raise UsageError(f"{run.shown} runs a Python function", hint="call trainkit.submit(…) again")
    job = read_job(run)
    code, cwd = job.code, job.cwd
    if code is not None and not uses_current_code:
        code = moved(code, run.code_dir)
        if not Path(code.workdir).is_dir():
            raise UsageError(
                f"the code snapshot of {run.shown} is missing: there is no {shown_path(code.workdir)}",
                hint=f"--no-snapshot runs the current code in {cwd}",
            )
    config, plan = config_and_plan(run)
    stdin = run.input_file.read_bytes() if run.input_file.is_file() else None
    return RepeatedRun(run, config, plan, job, None if uses_current_code else code, stdin)


def config_and_plan(folder: RunDir | AttemptDir) -> tuple[RunConfig, LaunchPlan]:
    """Read the config and plan of a run or an attempt.

    Raises UsageError if a file is damaged, or if another user could have written it.
    """
    return read_effective(folder.config_file), LaunchPlan.read(folder.plan_file)


def load_again(
    run: RunDir,
    before: LaunchPlan,
    overrides: Sequence[str],
    flags: Mapping[str, tuple[str, object]],
    profile: str | None = None,
) -> LoadedConfig:
    """Load the config of a run again with changed values; `before` is the plan of the run."""
    loaded = load_config(run.config_file, profile=profile, overrides=overrides, flags=flags, layers=False)
    adjustable = {"train.device_batch_size", "parallel.pp_microbatches"}
    if before.workload.is_command:
        # config.yaml contains all keys, but a value that the user did not set must not be passed to the
        # launcher.
        adjustable = loaded.origins.keys() - keys_of(before.parts)
    origin = loaded.origins["name"].rpartition(":")[0]
    return loaded.adjusting(*adjustable, origin=origin)


@contextmanager
def submission_folder(job: JobRecord, takes_new_code: bool = False) -> Iterator[Path]:
    """Change to the working directory at a run's submission.

    Paths in the run's config are relative to this directory. Yields the working directory of the run's
    COMMAND: a folder in the code snapshot or, if there is no snapshot or `takes_new_code` is set, the folder
    of submission.
    """
    here = Path.cwd()
    submitted = Path(job.cwd or here)
    if not submitted.is_dir():
        submitted = here
    code = None if takes_new_code else job.code
    with working_in(submitted):
        yield submitted if code is None else Path(code.workdir)


def refuse_by_hand(run: RunDir) -> None:
    """Raise UsageError for a run of `trainkit.loop` in a program that trainkit did not start."""
    if run.was_started_by_hand:
        raise UsageError(
            f"{run.shown} was not started by trainkit",
            hint="start the program again; it resumes from the newest checkpoint",
        )


def refuse_replay(run: RunDir) -> None:
    """Raise UsageError if the run was created by `trainkit replay`."""
    try:
        record = read_json(run.path / REPLAY_FILE)
    except FileNotFoundError:
        return
    raise UsageError(
        f"{run.shown} is a replay of {shown_path(record['run'])}",
        hint=f"`trainkit replay --collect {run.quoted}` compares the replay with that run",
    )
