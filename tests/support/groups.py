"""Provides groups of runs as `trainkit submit --sweep` creates them, without a cluster."""

from pathlib import Path
from typing import Any

from trainkit.cluster.machine import Machine
from trainkit.cluster.model import Cluster
from trainkit.cluster.target import Target
from trainkit.config import load_config
from trainkit.errors import ConfigError
from trainkit.launch.create import create_submission
from trainkit.launch.submission import PlannedTrial, Submission, checked
from trainkit.launch.sweep import ArraySpec, LoadedTrial
from trainkit.plan.facts import Facts
from trainkit.plan.make_plan import make_plan
from trainkit.plan.workload import Workload
from trainkit.run.group import RunGroup

SUBMITTED_AT = "2026-01-01T00:00:00.000Z"
CONFIG = """
name: small
device: cpu
train: {device_batch_size: 1, global_batch_size: 8}
launch: {snapshot: false}
"""
LOGIN_NODE = Machine(4, 0, (), "a login node")


def planned(
    folder: Path, trials: dict[int, dict[str, Any]], command: tuple[str, ...] | None = None
) -> list[PlannedTrial]:
    """Plan the trials of a config in a folder. Raise ConfigError and UsageError as `trainkit submit` does."""
    config_file = folder / "small.yaml"
    config_file.write_text(CONFIG)

    target = Target("sbatch", "a test", Cluster("unknown"))
    result, refused = [], []
    for index, values in trials.items():
        flags = {key: (f"--sweep {key}={value}", value) for key, value in values.items()}
        try:
            loaded = load_config(config_file, flags=flags, environ={}, cwd=folder)
            plan = make_plan(loaded, Facts(LOGIN_NODE, target), Workload(command or ()))
            result.append(PlannedTrial(index, values, loaded.config, plan))
        except ConfigError as error:
            refused.append(LoadedTrial(index, values, error))
    return checked(result, refused, ArraySpec(tuple(trials), None)).trials


def make_group(
    folder: Path,
    trials: dict[int, dict[str, Any]],
    job_id: str | None = "12",
    command: tuple[str, ...] | None = None,
    **record: Any,
) -> RunGroup:
    """Create a group at ``folder/group`` with the given job as its array, and with changes of sweep.json."""
    submission = Submission(planned(folder, trials, command), ArraySpec(tuple(trials), None))
    group = RunGroup(create_submission(submission, ["trainkit", "submit"], folder / "group").run.path)
    group.update(job_id=job_id, submitted_at=SUBMITTED_AT, **record)
    return group
