"""What a tracker gets of a run: the settled records, and the facts of the newest attempt."""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit.config import read_effective
from trainkit.config.running import MlflowConfig, WandbConfig
from trainkit.errors import UsageError
from trainkit.run.end import read_end
from trainkit.run.events import read_metrics
from trainkit.run.files import parse_time, read_json, read_object, refresh_listing
from trainkit.run.manifest import published
from trainkit.run.record import read_job
from trainkit.run.rundir import RunDir

_NOT_ALLOWED = re.compile(r"[^\w\-./ :]")
"""What MLflow accepts in no name."""


@dataclass(frozen=True)
class Facts:
    """What describes a run: its name, its config, where its code comes from, its layout."""

    name: str
    folder: Path
    cwd: Path
    attempt: int
    config: Mapping[str, object]
    """The effective config, with dotted keys."""
    config_text: str
    code: dict[str, str]
    """Versions and commit, without the diff and the command line."""
    layout: dict[str, int]


@dataclass(frozen=True)
class Sample:
    """The metrics of one step."""

    step: int
    time_ms: int
    values: dict[str, float]


@dataclass(frozen=True)
class Position:
    """The content of ``trackers/NAME.json``."""

    key: str
    """Identifies the run in the tracker, over all attempts."""
    place: str = ""
    """Where the run is: a URL or a folder. A run that is sent elsewhere is sent from its first step."""
    step: int = 0
    """The newest step that the tracker has."""
    time: str = ""
    problem: str = ""
    """Why the last attempt to send failed."""


def trackers_of(run: RunDir) -> dict[str, MlflowConfig | WandbConfig]:
    """The settings of the trackers of a run, by name; raises UsageError if it has none."""
    found = read_effective(run.config_file).logging.trackers
    if not found:
        hint = "`trainkit resume RUN --set logging.mlflow=true` resumes it with one"
        raise UsageError(f"{run.path} has no tracker: logging.mlflow and logging.wandb are null", hint=hint)
    return found


def read_facts(run: RunDir) -> Facts:
    """The facts of the newest attempt. Raises OSError, ValueError or TrainkitError if they cannot be read."""
    text = run.config_file.read_text(encoding="utf-8")
    config = read_effective(run.config_file).model_dump(mode="json", by_alias=True)
    plan, provenance = read_json(run.plan_file), read_object(run.provenance_file)
    git = provenance.get("git") or {}
    code = {name: provenance.get(name) for name in ("trainkit", "python", "torch")}
    code |= {"commit": git.get("sha"), "branch": git.get("branch"), "dirty": git.get("dirty")}
    layout = {name: int(size) for name, size in plan["layout"].items() if isinstance(size, int)}
    return Facts(
        name=read_job(run).name or run.name,
        folder=run.path,
        cwd=command_folder(run),
        attempt=run.latest_number() or 1,
        config=dict(_flat(config)),
        config_text=text,
        code={name: str(value) for name, value in code.items() if value is not None},
        layout={**layout, "world_size": int(plan["world_size"])},
    )


def command_folder(run: RunDir) -> Path:
    """The folder of the command that created a run."""
    return Path(read_job(run).cwd or run.path.parent)  # `trainkit.attach` makes no job.json


def _flat(mapping: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in mapping.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def state_of(run: RunDir) -> str:
    """``finished``, ``failed``, ``stopped``, or ``running`` for a run that has not ended or will resume."""
    number = run.latest_number()
    end = None if number is None else read_end(run.attempt(number))
    action = str(end and end.action)
    return action if action in ("finished", "failed", "stopped") else "running"


def settled_step(run: RunDir, is_finished: bool) -> float:
    """The newest step that no later attempt computes again: that of the newest checkpoint.

    Infinite for a run that has finished.
    """
    if is_finished:
        return math.inf
    refresh_listing(run.checkpoints_dir)
    checkpoints = published(run.checkpoints_dir)
    return checkpoints[-1].step if checkpoints else 0


def read_position(run: RunDir, name: str) -> Position:
    """How far a tracker has the metrics; a new position for a tracker that has none."""
    try:
        return Position(**read_json(run.trackers_dir / f"{name}.json"))
    except FileNotFoundError:
        return Position(uuid.uuid4().hex[:16])


def samples(run: RunDir, after: int, up_to: float) -> list[Sample]:
    """The metrics of the steps above `after`, up to `up_to`, each step once and in order."""
    return [_sample(record) for record in read_metrics(run) if after < record["step"] <= up_to]


def _sample(record: Mapping[str, Any]) -> Sample:
    time = parse_time(record.get("time"))
    values = {
        _NOT_ALLOWED.sub("_", name): float(value)
        for name, value in record.items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }
    return Sample(record["step"], 0 if time is None else round(time.timestamp() * 1000), values)
