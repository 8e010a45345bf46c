"""Goes back to an earlier checkpoint after a loss spike, and shows the rollbacks of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from trainkit.capabilities.spike.spike_plan import SPIKE, SpikePlan
from trainkit.capability import Capability, Notice, Planned
from trainkit.formats import plural
from trainkit.plan.keep import KeepRule
from trainkit.run.files import read_record, to_json
from trainkit.run.rollbacks import EVENT, Rollback

if TYPE_CHECKING:
    from trainkit.capability import Reading, TrainedModel, TrainerHook
    from trainkit.config.loaded import LoadedConfig
    from trainkit.config.schema import RunConfig
    from trainkit.errors import KeyProblem
    from trainkit.plan.facts import Facts
    from trainkit.plan.launch import LaunchPlan
    from trainkit.run.events import Event
    from trainkit.run.history import RunHistory


class Spike(Capability):
    """Applies the rule `train.spike` on all ranks of the trainer."""

    name = "spike"
    quiet = dict.fromkeys(("train.spike",), "the {what} does not go back after a loss spike")

    def contradictions(self, config: RunConfig) -> Iterable[KeyProblem]:
        saved = config.checkpoint.every_steps, config.checkpoint.every_minutes
        if config.train.spike is not None and saved == (None, None):
            yield (
                "train.spike",
                "is set, but checkpoint.every_steps and checkpoint.every_minutes are null, so the run has no "
                "checkpoint to go back to",
                "set checkpoint.every_steps",
            )

    def plan(self, loaded: LoadedConfig, facts: Facts, draft: LaunchPlan) -> Planned:
        given, train, checkpoint = loaded.config.train.spike, loaded.config.train, loaded.config.checkpoint
        if given is None or draft.workload.is_command:
            return Planned()
        warnings = []
        if given.patience_steps > train.max_nonfinite_steps:
            warnings.append(
                f"train.spike.patience_steps is {given.patience_steps}, but the run fails after "
                f"{plural(train.max_nonfinite_steps, 'non-finite step')} (train.max_nonfinite_steps)"
            )
        every, kept = checkpoint.every_steps, KeepRule.of(checkpoint).last
        if every is not None and kept is not None and every * (kept - 1) < given.patience_steps:
            warnings.append(
                f"train.spike.patience_steps is {given.patience_steps}, checkpoint.every_steps is {every}, "
                f"and {checkpoint.last_key} is {kept}: no checkpoint from before a spike may be left"
            )
        reason = (
            f"goes back if the loss is above {given.factor:g} x its median over {given.window_steps} steps "
            f"for {plural(given.patience_steps, 'step')}, at most {plural(given.max_rollbacks, 'time')}"
        )
        part = SpikePlan(given.factor, given.window_steps, given.patience_steps, given.max_rollbacks)
        return Planned(part, {"spike": reason}, tuple(warnings))

    def trainer_hook(self, plan: LaunchPlan, model: TrainedModel) -> TrainerHook | None:
        part = plan.part(SpikePlan)
        if part is None:
            return None
        from trainkit.capabilities.spike.rule import SpikeRule

        return SpikeRule(part)

    def rows(self, reading: Reading) -> Mapping[str, str]:
        found = [rollback.describe() for rollback in _rollbacks(reading.history)]
        return {"rollbacks": "; ".join(found)} if found else {}

    def status(self, reading: Reading) -> Mapping[str, object]:
        return {"rollbacks": [to_json(item) for item in _rollbacks(reading.history)]}

    def report(self, history: RunHistory) -> Mapping[str, object]:
        return {"rollbacks": [to_json(item) for item in _rollbacks(history)]}

    def notices(self, reading: Reading) -> Sequence[Notice]:
        return [Notice(event.time, self.past(event)) for event in reading.lasting if event.name == SPIKE]

    def past(self, event: Event) -> str:
        if event.name == EVENT:
            return f"{read_record(Rollback, event.values).describe()}: {event.reason}"
        loss, usual = event.number("loss"), event.number("median")
        high = "is not finite" if loss is None else f"is {loss:.4f}"
        than = "" if usual is None else f", its median {usual:.4f}"
        return f"the loss {high} at step {event.step}{than}"


def _rollbacks(history: RunHistory) -> Sequence[Rollback]:
    """Return the rollbacks of a run, oldest first."""
    found = (event for event in history.events.owned.all if event.name == EVENT)
    return [read_record(Rollback, event.values) for event in found]


CAPABILITY = Spike
