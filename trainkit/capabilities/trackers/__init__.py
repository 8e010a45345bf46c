"""Sends the metrics of a run from its run folder to MLflow and Weights & Biases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainkit.capability import Capability, Companion, Part, Planned
from trainkit.errors import KeyProblem

if TYPE_CHECKING:
    from pathlib import Path

    from trainkit.capability import Reading
    from trainkit.config.loaded import LoadedConfig
    from trainkit.config.schema import RunConfig
    from trainkit.job.node.rendezvous import Rendezvous
    from trainkit.plan.facts import Facts
    from trainkit.plan.launch import LaunchPlan
    from trainkit.run.files import Record
    from trainkit.run.rundir import AttemptDir, RunDir


def trackers_dir(run: RunDir) -> Path:
    """Return the folder with one file per tracker; each file records the newest step sent to the tracker."""
    return run.path / "trackers"


@dataclass(frozen=True)
class TrackersPlan(Part):
    """The part of a launch plan that lists the trackers of a run."""

    CAPABILITY = "trackers"
    names: tuple[str, ...] = ()
    """Names of the trackers that receive the run's metrics, such as ``mlflow``."""


class Trackers(Capability):
    """Implements trackers: starts a process on rank 0's node that sends the metrics."""

    name = "trackers"
    quiet = dict.fromkeys(("logging.mlflow", "logging.wandb"), "runs of a {what} are not sent to trackers")
    may_be_secret = ("logging.mlflow",)
    other_keys = dict.fromkeys(
        ("report_to", "wandb_project", "project"),
        "logging.wandb and logging.mlflow define the project or experiment that receives the metrics",
    )

    def contradictions(self, config: RunConfig) -> Iterator[KeyProblem]:
        from urllib.parse import urlsplit

        key, mlflow = "logging.mlflow", config.logging.trackers.get("mlflow")
        uri = getattr(mlflow, "tracking_uri", None) or ""
        if uri.startswith("file:"):
            message = "has the tracking_uri of a file store, but MLflow 3 cannot write to file stores"
            yield key, message, "remove the prefix `file:` to use a SQLite store in the folder"
        if "@" in urlsplit(uri).netloc:
            what = "has a tracking_uri that contains a user name or password"
            hint = "export MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the shell instead"
            yield key, f"{what}, but the config is written to the run folder", hint

    def packages(self, config: RunConfig) -> dict[str, str]:
        return {name: f"logging.{name}" for name in config.logging.trackers}

    def plan(self, loaded: LoadedConfig, facts: Facts, draft: LaunchPlan) -> Planned:
        names = tuple(loaded.config.logging.trackers)
        return Planned(TrackersPlan(names) if names else None)

    def companion(self, attempt: AttemptDir, plan: LaunchPlan, node: Rendezvous) -> Companion | None:
        if not node.has_rank_0:
            return None
        from trainkit.capabilities.trackers.sender import TrackerSender

        return TrackerSender(attempt, plan)

    def status(self, reading: Reading) -> Mapping[str, object]:
        return {"trackers": _sent(reading.history.run)}

    def rows(self, reading: Reading) -> Mapping[str, str]:
        from trainkit.formats import cell

        rows = {}
        for name, sent in _sent(reading.history.run).items():
            place = sent.text("problem") or sent.text("place") or "not sent yet"
            rows[name] = f"up to step {cell(sent.count('step'))}: {place}"
        return rows


def _sent(run: RunDir) -> dict[str, Record]:
    """Read the recorded state of each tracker: its ``step``, ``place``, ``time`` and ``problem``."""
    from trainkit.run.files import Record, read_object

    return {file.stem: Record(read_object(file)) for file in sorted(trackers_dir(run).glob("*.json"))}


CAPABILITY = Trackers
