"""MLflow and Weights & Biases: a reader of the run folder that sends what `metrics.jsonl` has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainkit.capability import Capability, Companion, Part, Planned

if TYPE_CHECKING:
    from trainkit.capability import Reading
    from trainkit.config.loaded import LoadedConfig
    from trainkit.job.node.rendezvous import Rendezvous
    from trainkit.plan.facts import Facts
    from trainkit.plan.launch import LaunchPlan
    from trainkit.run.files import Record
    from trainkit.run.rundir import AttemptDir, RunDir


@dataclass(frozen=True)
class TrackersPlan(Part):
    """The trackers of a run."""

    CAPABILITY = "trackers"
    names: tuple[str, ...] = ()
    """The trackers that get the metrics, such as ``mlflow``."""


class Trackers(Capability):
    """The capability: a process next to rank 0 sends the metrics."""

    name = "trackers"

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
    """How far each tracker has the metrics: ``step, place, time, problem``."""
    from trainkit.run.files import Record, read_object

    return {file.stem: Record(read_object(file)) for file in sorted(run.trackers_dir.glob("*.json"))}


CAPABILITY = Trackers
